"""ToMe, token merging (Bolya et al., ICLR 2023, arXiv 2210.09461).

In every layer, between attention and MLP, the most similar tokens are averaged: tokens at even places each find the
most similar one at an odd place, and the best `r` of these pairs merge. Similarity is the cosine of keys, averaged over
heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.alone import Pairs, alone, log_alone, pairs_alone
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
        logs = log_alone(tokens.sizes) if alone(tokens.x) else tokens.sizes.log().to(tokens.x.dtype)
        return logs[:, None, None, :]

    def between(self, layer: int, tokens: Tokens, seen: Seen) -> Tokens:
        count = min(self.schedule[layer - 1], (tokens.x.shape[1] - self.prefix) // 2)
        return tokens.merge(*most_similar(seen.k, count, self.prefix)) if count else tokens

    def finish(self, tokens: Tokens) -> Tensor:
        return tokens.whole() if self.method.unmerge else tokens.x


class Layout(NamedTuple):
    """Where tokens stand in a sequence of N, prefix tokens first.

    Attributes:
        even, odd: places of the patches (1, n) that look for a partner, and of those they choose from.
        order: (1, N), by which the tokens that remain are put in line: prefix tokens, even places, odd places.
    """

    even: Tensor
    odd: Tensor
    order: Tensor


def lay_out(tokens: int, prefix: int, device: torch.device) -> Layout:
    """The layout of a sequence."""
    places = torch.arange(tokens, device=device).unsqueeze(0)
    first = (prefix + 1) // 2 * 2
    order = places + tokens * (1 + places % 2) * (places >= prefix)
    return Layout(places[:, first::2], places[:, prefix // 2 * 2 + 1 :: 2], order)


@lru_cache(maxsize=256)
def _known_layout(tokens: int, prefix: int, device: torch.device) -> Layout:
    # A tensor made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        return lay_out(tokens, prefix, device)


def most_similar(keys: Tensor, count: int, prefix: int) -> Pairs:
    """The most similar pairs of a token at an even place and one at an odd place; prefix tokens stay out of it.

    Args:
        keys: (B, H, N, d).
        count: pairs R; tokens at even places that merge.
        prefix: tokens at the beginning that must remain.
    """
    metric = mean_key(keys.detach())
    images, tokens = metric.shape[:2]
    compiling = torch.compiler.is_compiling()
    first, second = (prefix + 1) // 2 * 2, prefix // 2 * 2 + 1
    alike = torch.bmm(metric[:, first::2], metric[:, second::2].mT)
    if alone(alike):
        return pairs_alone(alike, count, tokens, prefix)
    even, odd, order = (lay_out if compiling else _known_layout)(tokens, prefix, metric.device)
    # The partner matters for the tokens that merge alone; to look for all would cost more than the product.
    merged = alike.amax(dim=2).topk(count, dim=1, sorted=False).indices
    partner = take(alike, merged).max(dim=2).indices
    gone = even.expand(images, -1).gather(1, merged)
    line = order.expand(images, -1).scatter(1, gone, 4 * tokens).argsort(dim=1)
    return Pairs(line[:, : tokens - count], gone, odd.expand(images, -1).gather(1, partner))


def mean_key(keys: Tensor) -> Tensor:
    """Direction of the keys' mean over heads: (B, H, N, d) -> (B, N, d), of length 1."""
    if keys.shape[0] > 1 and 1 < keys.shape[1] <= 4:
        # Of large batches, few heads are added faster than summed over.
        parts = keys.unbind(dim=1)
        total = sum(parts[1:], parts[0])
    else:
        total = keys.sum(dim=1)
    return total / torch.linalg.vector_norm(total, dim=-1, keepdim=True)
