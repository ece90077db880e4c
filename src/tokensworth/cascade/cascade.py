"""The cascade: stages fed ever more tokens, each able to answer, each leaning on the one before."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from tokensworth.cascade.backbone import timm_normalization
from tokensworth.cascade.config import CascadeConfig, Reuse
from tokensworth.cascade.reuse import Upstream
from tokensworth.cascade.shared import shared_stages
from tokensworth.cascade.sharing import copy_backbone, shared_config, source_model
from tokensworth.cascade.stage import Stage
from tokensworth.cascade.storage import load_folder, save_folder
from tokensworth.errors import InvalidGridError, TokensworthError
from tokensworth.tokens.method import adapt, method_from_dict


class Cascade(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="tokensworth",
    tags=["vision-transformer", "adaptive-inference"],
    license="apache-2.0",
):
    """A Dynamic Vision Transformer (Wang et al., NeurIPS 2021, arXiv 2105.15075).

    Args:
        config: grids, backbone, stem and reuse.
        pretrained: start every stage from timm's pretrained weights.

    Raises:
        InvalidGridError: a grid that the stem cannot make; the message names the nearest ones.
        UnsupportedModelError: a backbone that cannot be driven.

    Example:
        >>> cascade = Cascade.from_timm("deit_tiny_patch16_224", grids=(7, 14), num_classes=10)
        >>> [logits.shape for logits in cascade(torch.zeros(1, 3, 224, 224))]
        [torch.Size([1, 10]), torch.Size([1, 10])]
    """

    def __init__(self, config: CascadeConfig, pretrained: bool = False) -> None:
        super().__init__()
        self.base = replace(config, tokens=None)
        if config.share:
            self.stages = shared_stages(config, pretrained)
        else:
            self.stages = nn.ModuleList(Stage(config, i, pretrained) for i in range(len(config.grids)))
        if config.tokens:
            adapt(self, method_from_dict(config.tokens))

    @property
    def config(self) -> CascadeConfig:
        """Grids, backbone, stem, reuse, and the token method that the stages are adapted with now."""
        # All stages are adapted alike. The runner asks for every batch, so nothing is searched for or built in vain.
        added = getattr(self.stages[0].vit, "token_method", None)
        return self.base if added is None else replace(self.base, tokens=added.method.to_dict())

    @classmethod
    def from_timm(
        cls,
        backbone: str | nn.Module,
        grids: Sequence[int],
        num_classes: int = 0,
        *,
        pretrained: bool = False,
        reuse: Reuse | None = None,
        share: bool = False,
        **options: Any,
    ) -> "Cascade":
        """A cascade of any timm `VisionTransformer`, or of a T2T-ViT by name.

        Args:
            backbone: a name, for example `deit_small_patch16_224` or `t2t_vit_12`; with `share` also a timm model,
                whose weights are copied.
            grids: token grid sides, at least two, growing.
            num_classes: number of classes; with `share`, 0 for the pretrained model's own, its head kept.
            pretrained: load timm's weights into every stage, patch and position embeddings resampled. Each
                stage then starts exactly as the pretrained model: reuse enters with weight zero and, unless
                `reuse` is given, leaves the pretrained LayerNorms alone (`joint_norm=False`).
            reuse: the switches of feature and relation reuse.
            share: one transformer at growing token counts, weights held once; any timm `VisionTransformer` or `Eva`.
                Every stage starts exactly as the pretrained model at that input size, last norms and head its own.
            **options: other fields of `CascadeConfig`; the normalization is timm's for this backbone unless given.

        Raises:
            InvalidGridError: fewer than two grids, grids that do not grow, or one the stem cannot make.
            UnsupportedModelError: a backbone that cannot be driven, or whose weights cannot be had.
            TokensworthError: no number of classes where the model has none.
        """
        if len(grids) < 2:
            raise InvalidGridError(f"a cascade needs at least two grids, not {list(grids)}")
        if share:
            model = source_model(backbone, pretrained)
            return copy_backbone(model, cls(shared_config(model, grids, num_classes, reuse, options)))
        if not isinstance(backbone, str) or num_classes < 1:
            raise TokensworthError("stages of separate weights need a backbone's name and the number of classes")
        reuse = reuse or Reuse(joint_norm=not pretrained)
        options = {**timm_normalization(backbone), **options}
        config = CascadeConfig(backbone, tuple(grids), num_classes, reuse=reuse, **options)
        return cls(config, pretrained)

    @classmethod
    def from_official(cls, path: str | Path) -> "Cascade":
        """Loads one of the authors' released `.pth.tar` files; `read_official` gives their results as well.

        Raises:
            CheckpointError: missing, unsafe, or not one of the released models.
        """
        from tokensworth.cascade.official import read_official

        return read_official(path)[0]

    @property
    def num_stages(self) -> int:
        """Number of stages, which is the number of exits."""
        return len(self.stages)

    def run_stage(self, index: int, images: Tensor, state: Upstream | None) -> tuple[Tensor, Upstream | None]:
        """One stage on a dense batch of the images that have not left.

        Args:
            index: which stage, from 0.
            images: (B, C, S, S), normalized.
            state: what stage index - 1 handed on for these images; None for the first stage.

        Returns:
            Logits (B, num_classes), and the state for the next stage; None after the last.
        """
        return self.stages[index](images, state, hand_on=index + 1 < self.num_stages)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Logits of every exit, all stages run: (B, C, S, S) -> S tensors of (B, num_classes)."""
        outputs, state = [], None
        for index in range(self.num_stages):
            logits, state = self.run_stage(index, images, state)
            outputs.append(logits)
        return outputs

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *, dtype: torch.dtype | None = None, **hub: Any
    ) -> None:
        """Writes `config.json` and `model.safetensors`, each atomically; `push_to_hub` uploads the same two.

        Args:
            save_directory: the folder, made if missing.
            dtype: store floating-point weights in this type, for example `torch.float16`.
            **hub: what the Hub's mixin passes on and this model does not need.
        """
        save_folder(Path(save_directory), self.config, self.state_dict(), dtype)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, revision: str | None = None) -> "Cascade":  # type: ignore[override]
        """Loads a folder, or a Hub repository, that `save_pretrained` or `push_to_hub` wrote.

        Raises:
            CheckpointError: missing, cut short, other shapes (the first few keys are named) or NaN weights.
        """
        config, weights = load_folder(path, revision)
        model = cls(config)
        weights.copy_into(model)
        return model.eval()
