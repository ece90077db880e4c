"""Labelled images to what every exit says of them."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tokensworth.cascade import Cascade, CascadeConfig
from tokensworth.data.sources import ImageSet
from tokensworth.data.tensors import normalize
from tokensworth.exits.calibration import Calibration, calibrate
from tokensworth.exits.learned import Rule
from tokensworth.measure.timing import stage_millis
from tokensworth.run.inputs import make_transform
from tokensworth.run.runner import Runner


def labelled_batches(
    images: ImageSet,
    config: CascadeConfig,
    batch_size: int = 250,
    on_batch: Callable[[int], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalized images (B, C, S, S) and labels (B,), in order.

    Raises:
        DataError: an image that cannot be decoded; the message names it.
    """
    transform = make_transform(config)
    labels = torch.from_numpy(images.labels.copy())
    for start in range(0, len(images), batch_size):
        stop = min(start + batch_size, len(images))
        batch = torch.stack([transform(images.read(i)) for i in range(start, stop)])
        yield normalize(batch, config.mean, config.std), labels[start:stop]
        if on_batch:
            on_batch(stop)


def all_tensors(images: ImageSet, config: CascadeConfig) -> tuple[Tensor, Tensor]:
    """All images, normalized (N, C, S, S), and labels (N,)."""
    parts = list(labelled_batches(images, config))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def answers(
    cascade: Cascade,
    images: ImageSet,
    *,
    score: str = "confidence",
    temperature: bool | Sequence[float] = False,
    rule: Rule = (),
    on_batch: Callable[[int], None] | None = None,
) -> Calibration:
    """Every exit's answer on a labelled set; see `calibrate`."""
    batches = labelled_batches(images, cascade.config, on_batch=on_batch)
    return calibrate(cascade, batches, score=score, temperature=temperature, rule=rule)


def timed_costs(cascade: Cascade, images: ImageSet, calibration: Calibration, batch: int) -> Calibration:
    """The same calibration with measured milliseconds per image and stage as its costs."""
    count = min(batch, len(images))
    tensors, _ = all_tensors(images.select(np.arange(count)), cascade.config)
    runner = Runner(cascade, batch_size=count)
    millis = stage_millis(cascade, tensors.to(runner.device))
    return calibration.with_costs(millis, "ms", runner.context)
