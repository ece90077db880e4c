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


@lru_cache(maxsize=64)
def side_block(coarse: int, fine: int) -> Tensor:
    """One of the equal blocks (fine/g, coarse/g) that `side_matrix` is made of, g = gcd(coarse, fine).

    Both steps of the resizing treat every g-th part of a side alike: 10 -> 14 is twice 5 -> 7.
    """
    blocks = gcd(coarse, fine)
    return side_matrix(coarse, fine)[: fine // blocks, : coarse // blocks].contiguous()


def resize_rows(maps: Tensor, side: Tensor, prefix: int, naive: bool = False) -> Tensor:
    """Resizes the rows of relation maps or features, one side of the grid after the other.

    Small products with one block of the side's matrix do a tenth of the work of the whole grid's matrix.

    Args:
        maps: (B, prefix + c*c, W): any columns; prefix rows pass through.
        side: from `side_block`; in naive mode the whole matrix (f*f, c*c) of the flattened grid.
        prefix: number of prefix tokens.
        naive: resize the rows as a line, which mixes unrelated tokens (DVT's ablation).

    Returns:
        (B, prefix + f*f, W).
    """
    count, rows, width = maps.shape
    patches = maps[:, prefix:]
    if naive:
        patches = side @ patches
    else:
        coarse = isqrt(rows - prefix)
        blocks = coarse // side.shape[1]
        fine = side.shape[0] * blocks
        patches = side @ patches.reshape(count * blocks, side.shape[1], coarse * width)
        patches = side @ patches.view(count * fine * blocks, side.shape[1], width)
        patches = patches.view(count, fine * fine, width)
    return torch.cat([maps[:, :prefix], patches], dim=1) if prefix else patches
