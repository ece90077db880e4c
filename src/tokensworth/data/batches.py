"""Training batches whose order and augmentation depend on the seed, epoch and step alone.

So a run that was stopped in mid-epoch goes on with the very batches it would have seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tokensworth.data.sources import ImageSet
from tokensworth.data.tensors import TensorSet, crop_and_flip, normalize
from tokensworth.errors import DataError


def derive_seed(*parts: int) -> int:
    """One 63-bit seed from several whole numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order (count,) in which an epoch visits the images."""
    return np.random.default_rng(derive_seed(seed, epoch)).permutation(count)


class Batches(Protocol):
    """What the training loop needs of its data."""

    def steps(self) -> int:
        """Batches per epoch."""
        ...

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches `first` and later of an epoch: images (B, C, S, S) normalized, labels (B,)."""
        ...


@dataclass(frozen=True)
class Plan:
    """Which images are in which batch of which process; the last images that fill none are left out of an epoch."""

    count: int
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.steps() < 1:
            raise DataError(f"{self.count} images do not fill one batch of {self.batch_size * self.world}")

    def steps(self) -> int:
        return self.count // (self.batch_size * self.world)

    def epoch(self, epoch: int, first: int) -> Iterator[tuple[int, np.ndarray]]:
        order = epoch_order(self.count, self.seed, epoch)
        size = self.batch_size * self.world
        for step in range(first, self.steps()):
            start = step * size + self.rank * self.batch_size
            yield step, order[start : start + self.batch_size]


class TensorBatches:
    """Batches of images held in memory, cropped and flipped as one tensor.

    Args:
        data: the images.
        batch_size: images per batch and process.
        mean, std: channel normalization.
        seed: of order and augmentation.
        padding: how far a crop may shift, in pixels; 0 turns augmentation off.
        rank, world: which process of how many.
    """

    def __init__(self, data: TensorSet, batch_size: int, mean, std, seed: int, padding: int = 4, rank=0, world=1):
        self.data, self.mean, self.std = data, mean, std
        self.padding = padding
        self.plan = Plan(len(data), batch_size, seed, rank, world)

    def steps(self) -> int:
        return self.plan.steps()

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for step, index in self.plan.epoch(epoch, first):
            at = torch.from_numpy(index)
            images = self.data.images[at]
            if self.padding:
                seed = derive_seed(self.plan.seed, epoch, step, self.plan.rank)
                images = crop_and_flip(images, self.padding, torch.Generator().manual_seed(seed))
            yield normalize(images, self.mean, self.std), self.data.labels[at]


class _Transformed(Dataset):
    """Images by (position, seed), so that a worker's random numbers do not depend on its history."""

    def __init__(self, images: ImageSet, transform) -> None:
        self.images, self.transform = images, transform

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        import random

        index, seed = key
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return self.transform(self.images.read(index)), int(self.images.labels[index])


class FileBatches:
    """Batches of encoded images, decoded and augmented by timm's transforms in worker processes."""

    def __init__(self, images: ImageSet, batch_size: int, transform, seed: int, workers: int = 0, rank=0, world=1):
        self.data = _Transformed(images, transform)
        self.workers = workers
        self.plan = Plan(len(images), batch_size, seed, rank, world)

    def steps(self) -> int:
        return self.plan.steps()

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = [
            [(int(i), derive_seed(self.plan.seed, epoch, int(i))) for i in index]
            for _, index in self.plan.epoch(epoch, first)
        ]
        yield from DataLoader(self.data, batch_sampler=sampler, num_workers=self.workers)  # type: ignore[arg-type]
