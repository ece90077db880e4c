"""`tokensworth train --task depth`: from images with depth to a saved depth model."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokensworth.cascade import model_hash
from tokensworth.data.depth import DepthSet
from tokensworth.data.depth_batches import DepthBatches
from tokensworth.dense.loss import SILogLoss
from tokensworth.dense.metrics import mean_errors
from tokensworth.dense.model import DepthConfig, DepthModel
from tokensworth.files import write_json, write_text
from tokensworth.jobs.depth import evaluate_depth
from tokensworth.measure.machine import machine
from tokensworth.train.loop import Progress, Recipe, Trainer


@dataclass(frozen=True)
class DepthJob:
    """All that `tokensworth train --task depth` needs.

    Attributes:
        encoder: timm name or folder of a timm model; unused with `start`.
        config: the rest of the model; with `start` only its image size counts, as the crop.
        data: images with depth to learn from.
        out: folder for the state, the log and the finished model.
        recipe: how to train.
        validate: evaluated after each epoch; None for nothing.
        workers: processes that decode and augment.
        save_every: steps between saved states.
        pretrained: start from timm's pretrained weights.
        start: a saved depth model to go on from, its token method and selectors included.
        teacher: a saved depth model to learn from, with weight `recipe.teach`.
    """

    encoder: str
    config: DepthConfig
    data: DepthSet
    out: Path
    recipe: Recipe
    validate: DepthSet | None = None
    workers: int = 0
    save_every: int = 200
    pretrained: bool = False
    start: Path | None = None
    teacher: Path | None = None


def run_depth_training(job: DepthJob, on_step: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Trains, or goes on training, and saves the averaged model in float16 beside its record.

    Returns:
        The record that is also written to `train.json`.
    """
    torch.manual_seed(job.recipe.seed)
    if job.start is None:
        model = DepthModel.from_timm(job.encoder, job.config, pretrained=job.pretrained)
    else:
        model = DepthModel.from_pretrained(job.start)
    teacher = None if job.teacher is None else DepthModel.from_pretrained(job.teacher)
    config, recipe = model.config, job.recipe

    def batches(rank: int, world: int) -> DepthBatches:
        size = job.config.image_size
        return DepthBatches(
            job.data, recipe.batch_size, size, config.mean, config.std, recipe.seed, job.workers, rank, world
        )

    def evaluate(averaged: nn.Module) -> dict[str, Any]:
        if job.validate is None:
            return {}
        assert isinstance(averaged, DepthModel)
        return {"validation": mean_errors(evaluate_depth(averaged, job.validate, mirrored=False)).to_dict()}

    digest = job.data.digest()
    identity = {"config": asdict(config), "crop": job.config.image_size, "data": digest, "encoder": job.encoder}
    identity |= {"start": model_hash(model) if job.start else None, "teacher": model_hash(teacher) if teacher else None}
    trainer = Trainer(
        model,
        batches,
        recipe,
        job.out,
        evaluate=evaluate,
        save_every=job.save_every,
        identity=identity,
        teacher=teacher,
        loss=SILogLoss(teach=recipe.teach),
    )
    averaged = trainer.run(on_step)
    assert isinstance(averaged, DepthModel)
    record = {
        "command": "tokensworth " + " ".join(sys.argv[1:]),
        "seed": recipe.seed,
        "data_sha256": digest,
        "images": len(job.data),
        "machine": machine(),
        "history": trainer.state.history,
    }
    if trainer.accelerator.is_main_process:
        averaged.save_pretrained(job.out, dtype=torch.float16)
        write_json(job.out / "train.json", record)
        write_text(job.out / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in trainer.state.history))
    return record
