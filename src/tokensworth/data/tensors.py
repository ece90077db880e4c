"""Small images as one tensor in memory, augmented a batch at a time: an epoch of CIFAR becomes cheap."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokensworth.data.sources import ImageSet


@dataclass(frozen=True)
class TensorSet:
    """Images (N, C, S, S) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def to_tensor(image: Image.Image, size: int) -> Tensor:
    """RGB image to (3, size, size) uint8: the shorter side resized, the middle cut out."""
    if image.size != (size, size):
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def load_tensors(images: ImageSet, size: int) -> TensorSet:
    """Decodes a whole image set.

    Raises:
        DataError: an image cannot be decoded; the message names it.
    """
    out = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
    for index in range(len(images)):
        out[index] = to_tensor(images.read(index), size)
    return TensorSet(out, torch.from_numpy(images.labels.copy()))


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, C, S, S) to float32 with the given channel mean and deviation of [0, 1] values."""
    shape = (1, -1, 1, 1)
    offset = torch.tensor(mean, device=images.device).view(shape)
    scale = torch.tensor(std, device=images.device).view(shape)
    return (images.float() / 255 - offset) / scale


def crop_and_flip(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to `padding` pixels (edges reflected) and flipped half the time.

    (B, C, S, S) -> (B, C, S, S), any dtype; random numbers come from `generator` on the CPU.
    """
    count, _, _, size = images.shape
    shift = torch.randint(-padding, padding + 1, (2, count, 1), generator=generator)
    flip = torch.rand(count, 1, generator=generator) < 0.5
    place = torch.arange(size)
    rows, columns = place + shift[0], place + shift[1]
    columns = torch.where(flip, columns.flip(1), columns)
    # Reflection: -1 becomes 1, size becomes size - 2.
    rows, columns = ((size - 1) - ((size - 1) - p.abs()).abs() for p in (rows, columns))
    batch = torch.arange(count).view(-1, 1, 1)
    index = (t.to(images.device) for t in (batch, rows.unsqueeze(2), columns.unsqueeze(1)))
    at, row, column = index
    return images.permute(0, 2, 3, 1)[at, row, column].permute(0, 3, 1, 2)
