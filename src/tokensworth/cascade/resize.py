"""Resizing of token grids as one small fixed matrix per pair of grids.

DVT's released code resizes in two steps: nearest to twice the coarse side, then adaptive average pooling
to the wanted side (7 -> 14 -> 10, 10 -> 20 -> 14). Both are linear and separable, so a grid is resized by
one matrix `u` of shape (fine, coarse) along each of its two sides.
"""

from functools import lru_cache
from math import gcd, isqrt

import torch
from torch import Tensor
from torch.nn import functional as F


@lru_cache(maxsize=64)
def side_matrix(coarse: int, fine: int) -> Tensor:
    """The matrix (fine, coarse) that resizes one side of a grid, float32 on the CPU."""
    basis = torch.eye(coarse).unsqueeze(1)
    doubled = F.interpolate(basis, size=2 * coarse, mode="nearest")
    return F.adaptive_avg_pool1d(doubled, fine).squeeze(1).T.contiguous()


# Up to this many entries, one product with the whole grid's matrix is faster than several tiny ones.
_SMALL = 2048


@lru_cache(maxsize=64)
def row_matrix(coarse: int, fine: int, naive: bool = False) -> Tensor:
    """The matrix that `resize_rows` works with, float32 on the CPU.

    For small grids the whole grid's matrix (f*f, c*c). Otherwise one of the equal blocks (f/g, c/g) that
    `side_matrix` is made of, g = gcd(c, f): both steps of the resizing treat every g-th part of a side alike,
    10 -> 14 is twice 5 -> 7. Naive, the rows are resized as a line, which mixes unrelated tokens (DVT's
    ablation).
    """
    if naive:
        return side_matrix(coarse**2, fine**2)
    side = side_matrix(coarse, fine)
    if coarse == 1 or coarse**2 * fine**2 <= _SMALL:
        return torch.kron(side, side)
    blocks = gcd(coarse, fine)
    return side[: fine // blocks, : coarse // blocks].contiguous()


def _times(matrix: Tensor, batch: Tensor) -> Tensor:
    """One matrix times each of a batch. `@` would fold the batch into one product and copy it twice for that."""
    return torch.bmm(matrix.expand(batch.shape[0], -1, -1), batch)


def resize_rows(maps: Tensor, matrix: Tensor, prefix: int) -> Tensor:
    """Resizes the rows of relation maps or features: (B, prefix + c*c, W) -> (B, prefix + f*f, W).

    With a block of one side, small products along each side do a tenth of the work of the whole matrix.

    Args:
        maps: any columns; prefix rows pass through.
        matrix: from `row_matrix`.
        prefix: number of prefix tokens.
    """
    count, rows, width = maps.shape
    patches = maps[:, prefix:]
    if matrix.shape[1] == rows - prefix:
        patches = _times(matrix, patches)
    else:
        coarse = isqrt(rows - prefix)
        blocks = coarse // matrix.shape[1]
        fine = matrix.shape[0] * blocks
        patches = _times(matrix, patches.reshape(count * blocks, matrix.shape[1], coarse * width))
        patches = _times(matrix, patches.view(count * fine * blocks, matrix.shape[1], width))
        patches = patches.view(count, fine * fine, width)
    return torch.cat([maps[:, :prefix], patches], dim=1) if prefix else patches
