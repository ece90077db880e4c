"""Resizing of token grids as one small fixed matrix per pair of grids.

DVT's released code resizes in two steps: nearest to twice the coarse side, then adaptive average pooling
to the wanted side (7 -> 14 -> 10, 10 -> 20 -> 14). Both are linear and separable, so a grid is resized by
one matrix `u` of shape (fine, coarse) along each of its two sides.
"""

from functools import lru_cache

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
def grid_matrix(coarse: int, fine: int) -> Tensor:
    """The matrix (fine*fine, coarse*coarse) that resizes a flattened grid, rows first."""
    side = side_matrix(coarse, fine)
    return torch.kron(side, side)


@lru_cache(maxsize=64)
def token_matrix(coarse: int, fine: int, prefix: int, naive: bool = False) -> Tensor:
    """The matrix over whole token sequences: prefix tokens pass through, patch tokens are resized.

    Args:
        coarse: side of the upstream grid.
        fine: side of the downstream grid.
        prefix: number of prefix tokens (class and register tokens).
        naive: resize the flat sequence as if it were a line, which mixes unrelated tokens (DVT's ablation).

    Returns:
        (prefix + fine**2, prefix + coarse**2), float32 on the CPU.
    """
    patches = side_matrix(coarse**2, fine**2) if naive else grid_matrix(coarse, fine)
    return torch.block_diag(torch.eye(prefix), patches)
