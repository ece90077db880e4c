"""What a tuning run is asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from tokensworth.cascade.config import NO_REUSE, Reuse
from tokensworth.errors import CheckpointError, TokensworthError, UnsupportedModelError
from tokensworth.exits.goals import Budget
from tokensworth.exits.learned import LEARNED
from tokensworth.exits.scores import SCORES
from tokensworth.tokens.storage import from_pretrained, is_saved_timm
from tokensworth.tokens.vit import ViT, find_vits
from tokensworth.weights import read_weights


@dataclass(frozen=True)
class TuneJob:
    """All that `tokensworth tune` needs.

    Attributes:
        model: timm name, `hf-hub:` id, or folder of a saved timm model.
        data: labelled images, as `open_images` takes them.
        out: folder for kept steps and everything that comes out.
        weights: safetensors file for a model given by its timm name; empty for timm's pretrained weights.
        test: images to report on; see `open_parts`.
        grids: candidates, growing.
        keep_grids: take all candidates instead of choosing among them.
        score: by which images leave: `confidence`, `entropy`, `margin` or `learned`.
        budget: mean cost per image; None for the accuracy of the static model of the largest grid.
        held, limit: images held out, and fitted on; see `open_parts`.
        image_size: side in pixels that images are held in; 0 for their own where small, or the largest grid's.
        head: `linear` or `cosine`.
        text: file of one embedding per class, (classes, E), as `.npy` or safetensors: CLIP's zero-shot classifier,
            nothing fitted.
        reuse: what later stages take from earlier ones, where it is trained.
        cached_epochs: passes over kept tokens that train the last layers' reuse, last norms and heads; 0 for none.
        last_layers: how many layers that are, as in `reuse.layers`.
        blocks: train those layers themselves as well.
        epochs: passes of a full fine-tune; 0 for none.
        fine_tune_static: fine-tune the static model of the largest grid alike, as what to compare with.
        lr, layer_decay, batch_size: of the fine-tune.
        precision: `auto`, `fp32` or `bf16`, for everything.
        timed_images, repeats, timed_batch: of the timings.
        device: where to run.
        seed: of the split and the training.
    """

    model: str
    data: str
    out: Path
    weights: str = ""
    test: str = ""
    grids: tuple[int, ...] = (4, 7, 10, 14)
    keep_grids: bool = False
    score: str = "confidence"
    budget: Budget | None = None
    held: int = 0
    limit: int = 0
    image_size: int = 0
    head: str = "linear"
    text: str = ""
    reuse: Reuse = NO_REUSE
    cached_epochs: int = 0
    last_layers: int = 0
    blocks: bool = False
    epochs: int = 0
    fine_tune_static: bool = False
    lr: float = 1e-4
    layer_decay: float = 0.8
    batch_size: int = 64
    precision: str = "auto"
    timed_images: int = 512
    repeats: int = 3
    timed_batch: int = 32
    device: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.grids) < 2 or list(self.grids) != sorted(set(self.grids)):
            raise TokensworthError(f"--grids {list(self.grids)}: give at least two candidates that grow")
        if self.score not in (*SCORES, LEARNED):
            raise TokensworthError(f"--score {self.score!r}: write {', '.join(SCORES)} or {LEARNED}")
        if self.text and self.head != "cosine":
            raise TokensworthError("--text needs --head cosine")
        if self.cached_epochs and not self.last_layers:
            raise TokensworthError("training on kept tokens needs to know how many of the last layers: --last-layers")
        if self.fine_tune_static and not self.epochs:
            raise TokensworthError("--fine-tune-static needs --epochs")
        if self.cached_epochs and self.head != "linear":
            raise TokensworthError("only linear heads are trained on kept tokens")


def open_source(job: TuneJob) -> ViT:
    """The pretrained model.

    Raises:
        CheckpointError: weights of another model.
        UnsupportedModelError: timm does not know it, has no weights, or it is of another family.
    """
    folder = Path(job.model)
    if folder.is_dir():
        if not is_saved_timm(folder):
            raise CheckpointError(f"{folder} holds no timm model (config.json with its architecture)")
        return find_vits(from_pretrained(folder))[0]
    if job.weights and not Path(job.weights).is_file():
        raise CheckpointError(f"{job.weights} is missing; name a file of weights for {job.model}")
    # The head is fitted anew; CLIP's is the projection into the space of its texts.
    options: dict[str, Any] = {} if job.text else {"num_classes": 0}
    if job.weights:
        options["pretrained_cfg_overlay"] = {"file": job.weights}
    try:
        model = timm.create_model(job.model, pretrained=True, **options)
    except Exception as error:  # timm and the hub client raise many kinds
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(
            f"{job.model}: neither a folder nor a timm model with weights to be had ({reason})"
        ) from None
    return find_vits(model)[0].eval()


def read_text(path: str, classes: int) -> Tensor:
    """Text embeddings (classes, E) from a file.

    Raises:
        CheckpointError: not a matrix of one row per class.
    """
    import numpy as np

    try:
        found = torch.from_numpy(np.load(path, allow_pickle=False)) if path.endswith(".npy") else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a NumPy array ({error})") from None
    if found is None:
        tensors = list(read_weights(Path(path)).tensors.values())
        found = tensors[0] if len(tensors) == 1 else torch.empty(0)
    if found.ndim != 2 or len(found) != classes:
        raise CheckpointError(f"{path} holds {list(found.shape)}; expected one row for each of the {classes} classes")
    return found.float()
