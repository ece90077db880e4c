"""Training batches of images with depth: the field's augmentations, by seed, epoch and step alone."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tokensworth.data.batches import Plan, derive_seed
from tokensworth.data.depth import DepthLayout, DepthSet
from tokensworth.data.tensors import normalize
from tokensworth.errors import DataError


def augment(
    image: Image.Image, depth: np.ndarray, layout: DepthLayout, size: tuple[int, int], random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Turned, cropped, mirrored and recoloured, as monocular depth is trained since BTS (Lee et al., 2019).

    Args:
        image: RGB.
        depth: (H, W) metres, 0 where unknown.
        layout: of the data set.
        size: height and width of the crop.
        random: all chance.

    Returns:
        The image (h, w, 3) uint8 and its depth (h, w) in metres, 0 where there is nothing to learn from.

    Raises:
        DataError: the image is smaller than the crop.
    """
    rows, columns = layout.blank(*depth.shape)
    image, depth = Image.fromarray(np.asarray(image)[rows, columns]), depth[rows, columns]
    if layout.turn:
        degrees = random.uniform(-layout.turn, layout.turn)
        image = image.rotate(degrees, Image.Resampling.BILINEAR)
        # Depth between two surfaces is that of neither: the nearest is taken. The corners come out unknown.
        depth = np.asarray(Image.fromarray(depth).rotate(degrees, Image.Resampling.NEAREST))
    color = np.asarray(image)
    spare = depth.shape[0] - size[0], depth.shape[1] - size[1]
    if min(spare) < 0:
        found = f"{depth.shape[0]}x{depth.shape[1]}"
        raise DataError(f"images of {found} (height x width) are smaller than the crop of {size[0]}x{size[1]}")
    top, left = (int(random.integers(0, s + 1)) for s in spare)
    color, depth = (a[top : top + size[0], left : left + size[1]] for a in (color, depth))
    if random.random() < 0.5:
        color, depth = color[:, ::-1], depth[:, ::-1]
    if random.random() < 0.5:
        color = _recoloured(color, layout.brightness, random)
    learned = (depth > layout.train_min) & (depth < layout.max_depth)
    return color, np.where(learned, depth, np.float32(0))


def _recoloured(color: np.ndarray, brightness: float, random: np.random.Generator) -> np.ndarray:
    """Gamma 0.9 to 1.1, brightness, and each channel's strength 0.9 to 1.1."""
    levels = (np.arange(256) / 255) ** random.uniform(0.9, 1.1) * random.uniform(1 - brightness, 1 + brightness)
    table = (255 * levels[:, None] * random.uniform(0.9, 1.1, 3)).clip(0, 255).astype(np.uint8)
    return np.stack([table[color[..., i], i] for i in range(3)], axis=-1)


class _Augmented(Dataset):
    """Pairs by (position, seed), so that a worker's random numbers do not depend on its history."""

    def __init__(self, data: DepthSet, size: tuple[int, int]) -> None:
        self.data, self.size = data, size

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        index, seed = key
        color, depth = augment(*self.data.read(index), self.data.layout, self.size, np.random.default_rng(seed))
        image = torch.from_numpy(np.ascontiguousarray(color.transpose(2, 0, 1)))
        return image, torch.from_numpy(np.ascontiguousarray(depth)).unsqueeze(0)


class DepthBatches:
    """Batches of images (B, 3, h, w), normalized, and depth (B, 1, h, w) in metres, 0 where there is none.

    Args:
        data: the pairs.
        batch_size: images per batch and process.
        size: height and width of the crop.
        mean, std: channel normalization.
        seed: of order and augmentation.
        workers: processes that decode and augment.
        rank, world: which process of how many.
    """

    def __init__(
        self,
        data: DepthSet,
        batch_size: int,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.data, self.mean, self.std, self.workers = _Augmented(data, size), mean, std, workers
        self.plan = Plan(len(data), batch_size, seed, rank, world)

    def steps(self) -> int:
        return self.plan.steps()

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        sampler = [
            [(int(i), derive_seed(self.plan.seed, epoch, int(i))) for i in index]
            for _, index in self.plan.epoch(epoch, first)
        ]
        loader = DataLoader(self.data, batch_sampler=sampler, num_workers=self.workers)  # type: ignore[arg-type]
        for images, depth in loader:
            yield normalize(images, self.mean, self.std), depth
