"""ToMe, token merging (Bolya et al., ICLR 2023, arXiv 2210.09461).

In every layer, between attention and MLP, the most similar tokens are averaged: tokens at even places each find the
most similar one at an odd place, and the best `r` of these pairs merge. Similarity is the cosine of keys, averaged over
heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.gather import take
from tokensworth.tokens.halves import Seen
from tokensworth.tokens.method import Method
from tokensworth.tokens.reducing import Reducing
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class ToMe(Method):
    """Options of ToMe.

    Attributes:
        r: pairs merged in each layer, one number for all layers or one for each (none where the list ends).
        inflection: with one number: 1 merges none at first and 2r at last, -1 the other way round, 0 always r.
        proportional: add the logarithm of a token's size to its logits, so that it counts as what it stands for.
        unmerge: give the whole grid back after the last layer, each token as the one it was merged into.
    """

    name: ClassVar[str] = "tome"
    r: int | tuple[int, ...] = 13
    inflection: float = 0.0
    proportional: bool = True
    unmerge: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.r, Sequence):
            object.__setattr__(self, "r", tuple(self.r))
        each = self.r if isinstance(self.r, tuple) else (self.r,)
        if any(not isinstance(r, int) or r < 0 for r in each) or not -1 <= self.inflection <= 1:
            raise UnsupportedModelError(f"r {self.r} and inflection {self.inflection}: whole numbers, and -1 to 1")

    @classmethod
    def settings(cls, depth: int, patches: int) -> list[Method]:
        # As 8, 13 and 16 of 196 patches are in twelve layers.
        return [cls(r=max(1, round(share * patches / depth))) for share in (0.49, 0.8, 0.98)]

    def schedule(self, depth: int) -> list[int]:
        """Pairs to merge in each of so many layers."""
        if isinstance(self.r, tuple):
            return [*self.r[:depth], *[0] * (depth - len(self.r))]
        first = int(self.r * (1 - self.inflection))
        step = (2 * self.r - 2 * first) / max(1, depth - 1)
        return [int(first + i * step) for i in range(depth)]

    @property
    def keeps_grid(self) -> bool:
        return self.unmerge

    def attach(self, vit: ViT) -> "Merging":
        return Merging(self, vit)


class Pairs(NamedTuple):
    """Which tokens merge into which; rows as `Tokens.merge` takes them."""

    kept: Tensor
    merged: Tensor
    into: Tensor


class Merging(Reducing):
    """ToMe on one vision transformer."""

    method: ToMe

    def __init__(self, method: ToMe, vit: ViT) -> None:
        self_schedule = method.schedule(len(vit.blocks))
        super().__init__(method, vit, between=range(1, len(vit.blocks) + 1), followed=True)
        self.schedule = self_schedule
        self.follows_source = method.unmerge

    def bias(self, tokens: Tokens) -> Tensor | None:
        if tokens.sizes is None or not self.method.proportional:
            return None
        return tokens.sizes.log().to(tokens.x.dtype)[:, None, None, :]

    def between(self, layer: int, tokens: Tokens, seen: Seen) -> Tokens:
        count = min(self.schedule[layer - 1], (tokens.x.shape[1] - self.prefix) // 2)
        return tokens.merge(*most_similar(seen.k, count, self.prefix)) if count else tokens

    def finish(self, tokens: Tokens) -> Tensor:
        return tokens.whole() if self.method.unmerge else tokens.x


@torch.no_grad()
def most_similar(keys: Tensor, count: int, prefix: int) -> Pairs:
    """The most similar pairs of a token at an even place and one at an odd place; prefix tokens stay out of it.

    Args:
        keys: (B, H, N, d).
        count: pairs R; tokens at even places that merge.
        prefix: tokens at the beginning that must remain.
    """
    metric = mean_key(keys)
    tokens = metric.shape[1]
    even, odd = math.ceil(prefix / 2), prefix // 2  # of either, so many are prefix tokens
    alike = metric[:, 2 * even :: 2] @ metric[:, 2 * odd + 1 :: 2].mT
    # The partner matters for the tokens that merge alone; an argmax over all would cost more than the product.
    merged = alike.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
    partner = take(alike, merged).max(dim=-1).indices
    gone = torch.zeros(alike.shape[:2], dtype=torch.bool, device=alike.device).scatter_(1, merged, True)
    rest = gone.argsort(dim=1, stable=True)[:, : gone.shape[1] - count]
    heads = torch.arange(0, 2 * even, 2, device=rest.device).expand(len(rest), -1)
    odds = torch.arange(1, tokens, 2, device=rest.device).expand(len(rest), -1)
    kept = torch.cat([heads, rest * 2 + 2 * even, odds], dim=1)
    return Pairs(kept, merged * 2 + 2 * even, partner + (even + rest.shape[1] + odd))


def mean_key(keys: Tensor) -> Tensor:
    """Direction of the keys' mean over heads: (B, H, N, d) -> (B, N, d), of length 1."""
    parts = keys.unbind(dim=1)
    # Few heads are added faster than summed over.
    total = sum(parts[1:], parts[0]) if 1 < len(parts) <= 4 else keys.sum(dim=1)
    return total / torch.linalg.vector_norm(total, dim=-1, keepdim=True)
