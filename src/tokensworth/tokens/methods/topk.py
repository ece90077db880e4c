"""Top-K: only the patches that the class token attends to most go on, as EViT without its fused token."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokensworth.tokens.halves import Seen
from tokensworth.tokens.pruning import Pruning, PruningViT
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class TopK(Pruning):
    """Options of Top-K; see `Pruning`. Without a class token, the attention received from all tokens counts."""

    name: ClassVar[str] = "topk"

    def attach(self, vit: ViT) -> "TopKViT":
        return TopKViT(self, vit)


class TopKViT(PruningViT):
    """Top-K on one vision transformer."""

    def scores(self, layer: int, tokens: Tokens, seen: Seen) -> Tensor:
        return self.received(seen)
