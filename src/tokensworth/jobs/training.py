"""`tokensworth train`: from images to a saved cascade or static reference."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensworth.cascade import Cascade, CascadeConfig, model_hash
from tokensworth.data.batches import Batches, FileBatches, TensorBatches
from tokensworth.data.sources import ImageSet, hold_out, open_images
from tokensworth.data.tensors import load_tensors
from tokensworth.errors import DataError, TrainingError
from tokensworth.files import write_json, write_text
from tokensworth.jobs.answers import labelled_batches
from tokensworth.measure.machine import machine
from tokensworth.train.loop import Progress, Recipe, Trainer

# Up to this side in pixels, the whole data set is held as one tensor and augmented a batch at a time.
_IN_MEMORY_SIZE = 64


@dataclass(frozen=True)
class TrainJob:
    """All that `tokensworth train` needs.

    Attributes:
        config: the model; its class names and normalization are filled in from the data.
        data: source of labelled images, as `open_images` takes it.
        out: folder for the state, the log and the finished model.
        recipe: how to train.
        hold_out: images kept out of training, for calibration; chosen by the recipe's seed.
        limit: train on so many images only; 0 for all.
        workers: processes that decode larger images.
        save_every: steps between saved states.
        pretrained: start from timm's pretrained weights.
        start: a saved model to go on from, its token method and selectors included; `config` is its own then.
        teacher: a saved model to learn from, with weight `recipe.teach`.
    """

    config: CascadeConfig
    data: str
    out: Path
    recipe: Recipe
    hold_out: int = 0
    limit: int = 0
    workers: int = 0
    save_every: int = 200
    pretrained: bool = False
    start: Path | None = None
    teacher: Path | None = None


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel of uint8 images (N, C, S, S), in [0, 1], to four digits."""
    flat = images.transpose(0, 1).flatten(1).double() / 255
    return tuple(round(float(v), 4) for v in flat.mean(1)), tuple(round(float(v), 4) for v in flat.std(1))


def accuracy_per_exit(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> list[float]:
    """Share of right answers at each exit, in percent, over normalized images and labels."""
    right: list[int] = []
    count = 0
    with torch.inference_mode():
        for images, labels in batches:
            hits = [int((logits.argmax(1).cpu() == labels).sum()) for logits in model(images.to(device))]
            right = [a + b for a, b in zip(right or [0] * len(hits), hits, strict=True)]
            count += len(labels)
    return [round(100 * r / count, 2) for r in right]


def _prepare(job: TrainJob, images: ImageSet) -> tuple[CascadeConfig, ImageSet, ImageSet | None]:
    classes = job.config.num_classes
    if images.labels.max() >= classes or images.labels.min() < 0:
        span = f"{images.labels.min()} to {images.labels.max()}"
        raise DataError(f"{images.origin}: labels run from {span}, but the model has {classes} classes")
    held = None
    if job.hold_out:
        kept, out = hold_out(len(images), job.hold_out, job.recipe.seed)
        images, held = images.select(kept), images.select(out)
    if job.limit:
        images = images.select(hold_out(len(images), len(images) - job.limit, job.recipe.seed)[0])
    names = images.class_names if len(images.class_names) == classes else ()
    return replace(job.config, class_names=names), images, held


def run_training(job: TrainJob, on_step: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Trains, or goes on training, and saves the averaged model in float16 beside its record.

    Returns:
        The record that is also written to `train.json`: command, recipe, data digest, machine, history.
    """
    config, images, held = _prepare(job, open_images(job.data, "train"))
    size = config.image_size
    tensors = load_tensors(images, size) if size <= _IN_MEMORY_SIZE else None
    if tensors and job.start is None:
        mean, std = channel_statistics(tensors.images)
        config = replace(config, mean=mean, std=std)
    torch.manual_seed(job.recipe.seed)
    model = Cascade(config, job.pretrained) if job.start is None else Cascade.from_pretrained(job.start)
    teacher = None if job.teacher is None else Cascade.from_pretrained(job.teacher)
    config = model.config
    if teacher is not None and teacher.config.num_classes != config.num_classes:
        raise TrainingError(
            f"{job.teacher}: a teacher of {teacher.config.num_classes} classes for a model of {config.num_classes}"
        )

    def batches(rank: int, world: int) -> Batches:
        recipe = job.recipe
        if tensors:
            return TensorBatches(
                tensors, recipe.batch_size, config.mean, config.std, recipe.seed, rank=rank, world=world
            )
        from timm.data.transforms_factory import create_transform

        transform = create_transform(
            size,
            is_training=True,
            mean=config.mean,
            std=config.std,
            auto_augment="rand-m9-mstd0.5",
            re_prob=0.25,
        )
        return FileBatches(images, recipe.batch_size, transform, recipe.seed, job.workers, rank, world)

    def evaluate(averaged: nn.Module) -> dict[str, Any]:
        if held is None:
            return {}
        batches = labelled_batches(held, config)
        with trainer.accelerator.autocast():
            found = accuracy_per_exit(averaged, batches, next(averaged.parameters()).device)
        return {"held_out_accuracy": found}

    digest = images.digest()
    identity = {"config": config.to_dict(), "data": digest, "pretrained": job.pretrained}
    identity |= {"start": model_hash(model) if job.start else None, "teacher": model_hash(teacher) if teacher else None}
    trainer = Trainer(
        model,
        batches,
        job.recipe,
        job.out,
        evaluate=evaluate,
        save_every=job.save_every,
        identity=identity,
        teacher=teacher,
    )
    averaged = trainer.run(on_step)
    record = {
        "command": "tokensworth " + " ".join(sys.argv[1:]),
        "seed": job.recipe.seed,
        "data_sha256": digest,
        "images": len(images),
        "hold_out": job.hold_out,
        "machine": machine(),
        "history": trainer.state.history,
    }
    if trainer.accelerator.is_main_process:
        averaged.save_pretrained(job.out, dtype=torch.float16)  # type: ignore[operator]
        write_json(job.out / "train.json", record)
        log = "".join(json.dumps(entry) + "\n" for entry in trainer.state.history)
        write_text(job.out / "log.jsonl", log)
    return record
