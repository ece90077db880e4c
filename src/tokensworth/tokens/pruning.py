"""What methods share that keep the best patches at a few layers and drop the others for good."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.halves import Seen
from tokensworth.tokens.method import Method
from tokensworth.tokens.reducing import Reducing
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class Pruning(Method):
    """Options of a method that drops patches at a few layers.

    Attributes:
        layers: the layers, from 1, in which patches are dropped.
        keep: the share that each of them keeps of the patches it gets, one for all or one for each; the second of
            two layers that keep 0.7 leaves 0.49 of all.
    """

    layers: tuple[int, ...] = (4, 7, 10)
    keep: float | tuple[float, ...] = 0.7

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if isinstance(self.keep, Sequence):
            object.__setattr__(self, "keep", tuple(self.keep))
        keeps = self.keep if isinstance(self.keep, tuple) else (self.keep,) * len(self.layers)
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 1:
            raise UnsupportedModelError(f"{self.name} layers {list(self.layers)}: name each once, growing, from 1 on")
        if len(keeps) != len(self.layers) or not all(0 < k <= 1 for k in keeps):
            raise UnsupportedModelError(f"{self.name} keep {self.keep}: one ratio above 0 and at most 1 for each layer")

    @classmethod
    def settings(cls, depth: int, patches: int) -> list[Method]:
        layers = tuple(sorted({depth * quarter // 4 + 1 for quarter in (1, 2, 3)}))
        return [cls(layers=layers, keep=keep) for keep in (0.9, 0.7, 0.5)]

    def shares(self) -> dict[int, float]:
        """By layer, the share of all patches that is left after it."""
        keeps = self.keep if isinstance(self.keep, tuple) else (self.keep,) * len(self.layers)
        return dict(zip(self.layers, accumulate(keeps, mul), strict=True))


class PruningViT(Reducing):
    """Keeps the patches with the highest `scores` between attention and MLP of the named layers."""

    method: Pruning

    def __init__(self, method: Pruning, vit: ViT) -> None:
        super().__init__(method, vit, between=method.layers)
        self.shares = method.shares()

    def scores(self, layer: int, tokens: Tokens, seen: Seen) -> Tensor:
        """What patches are kept by, (B, n)."""
        raise NotImplementedError

    def count(self, layer: int, tokens: Tokens) -> int:
        """How many patches are left after a layer."""
        return max(1, int(self.shares[layer] * tokens.patches + 1e-6))

    def between(self, layer: int, tokens: Tokens, seen: Seen) -> Tokens:
        with torch.no_grad():
            scores = self.scores(layer, tokens, seen)
            count = self.count(layer, tokens)
            best = scores.topk(min(count, scores.shape[1]), dim=1, sorted=False).indices
        return tokens.keep(self.with_prefix(best))
