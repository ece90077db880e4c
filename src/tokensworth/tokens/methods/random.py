"""Random patches go on: the floor under every method that chooses."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokensworth.tokens.halves import Seen
from tokensworth.tokens.pruning import Pruning, PruningViT
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class Random(Pruning):
    """Options of the random choice; see `Pruning`. It follows PyTorch's seed."""

    name: ClassVar[str] = "random"

    def attach(self, vit: ViT) -> "RandomViT":
        return RandomViT(self, vit)


class RandomViT(PruningViT):
    """Random patches on one vision transformer."""

    def scores(self, layer: int, tokens: Tokens, seen: Seen) -> Tensor:
        return torch.rand(tokens.x.shape[0], tokens.x.shape[1] - self.prefix, device=tokens.x.device)
