"""The query rows that a selector reads: all, or one for each block of the grid, the mean of its queries.

A token's score is a sum over all N queries. Logits are linear in the queries, so the logits of a block's mean query
are the mean logits of its queries: a few such rows stand for the whole map, and unlike a sample miss nothing.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Queries(NamedTuple):
    """R query rows that stand for N.

    Attributes:
        mean: each row's weights over the queries (R, N); None where the rows are the queries themselves.
        weights: how many queries each row stands for, (1, R).
    """

    mean: Tensor | None
    weights: Tensor

    def of(self, q: Tensor) -> Tensor:
        """Queries (B, H, N, d) to rows (B, H, R, d)."""
        if self.mean is None:
            return q
        # All heads at once; where q is a view of one projection nothing is copied.
        flat = q.transpose(1, 2).flatten(2)
        rows = torch.bmm(self.mean.to(q.dtype).expand(q.shape[0], -1, -1), flat)
        return rows.unflatten(2, (q.shape[1], -1)).transpose(1, 2)

    def of_map(self, maps: Tensor) -> Tensor:
        """Rows of a map over all queries (..., N, N) -> (..., R, N), or of a bias (..., 1, N), as it is."""
        return maps if self.mean is None or maps.shape[-2] == 1 else self.mean.to(maps.dtype) @ maps

    def received(self, maps: Tensor) -> Tensor:
        """How much attention each token receives from all queries: probabilities (..., R, N) -> (..., N)."""
        flat = maps.flatten(0, -3)
        weights = self.weights.to(maps.dtype).expand(flat.shape[0], -1, -1)
        return torch.bmm(weights, flat).view(*maps.shape[:-2], -1)


def _members(patches: int, width: int, count: int, device: torch.device) -> Tensor:
    """One for each patch of a block (blocks, patches): about `count` nearly square blocks of a grid `width` wide."""
    height = -(-patches // width)
    down = min(height, count, max(1, round(math.sqrt(count * height / width))))
    across = min(width, max(1, round(count / down)))
    place = torch.arange(patches, device=device)
    block = (place // width * down // height) * across + place % width * across // width
    return (block == torch.arange(down * across, device=device).unsqueeze(1)).float()


def block_queries(patches: int, width: int, prefix: int, count: int, device: torch.device) -> Queries:
    """Rows for the prefix tokens, each its own, and for about `count` blocks of patches.

    Args:
        patches: number of patches.
        width: of the patch grid.
        prefix: number of prefix tokens.
        count: how many blocks, about; 0, or at least as many as patches, for all queries as they are.
        device: of the result.
    """
    if not 0 < count < patches:
        return Queries(None, torch.ones(1, prefix + patches, device=device))
    sums = torch.block_diag(torch.eye(prefix, device=device), _members(patches, width, count, device))
    weights = sums.sum(dim=1)
    # Where the grid's last row is cut short, a block may be empty: it counts for nothing.
    return Queries(sums / weights.clamp(min=1).unsqueeze(1), weights.unsqueeze(0))
