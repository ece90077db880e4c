"""PiToMe (Tran et al., NeurIPS 2024, arXiv 2405.16148): merge where tokens are many and alike, spare the rare ones.

A token's energy is high where many others resemble it. In every layer the patches of highest energy, and no others,
are split in two by turns; each of the first half is merged into the one of the second half that it resembles most.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.halves import Seen
from tokensworth.tokens.method import Method
from tokensworth.tokens.reducing import Reducing
from tokensworth.tokens.sequence import Tokens, first_rows
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class PiToMe(Method):
    """Options of PiToMe.

    Attributes:
        keep: share of the patches that each layer keeps of those it gets.
        margin: similarity above which a token counts as alike in the first layer; it falls to 0 at the last.
        alpha: how much tokens below the margin count.
        proportional: add the logarithm of a token's size to its logits.
    """

    name: ClassVar[str] = "pitome"
    keep: float = 0.925
    margin: float = 0.9
    alpha: float = 1.0
    proportional: bool = True

    def __post_init__(self) -> None:
        if not 0.5 <= self.keep <= 1:
            raise UnsupportedModelError(f"pitome keep {self.keep}: from 0.5 (every patch in a pair) to 1")

    @classmethod
    def settings(cls, depth: int, patches: int) -> list[Method]:
        return [cls(keep=round(left ** (1 / depth), 3)) for left in (0.54, 0.39, 0.28)]

    def attach(self, vit: ViT) -> "EnergyMerging":
        return EnergyMerging(self, vit)


class EnergyMerging(Reducing):
    """PiToMe on one vision transformer."""

    method: PiToMe

    def __init__(self, method: PiToMe, vit: ViT) -> None:
        self_depth = len(vit.blocks)
        super().__init__(method, vit, between=range(1, self_depth + 1), followed=True)
        self.depth = self_depth

    def bias(self, tokens: Tokens) -> Tensor | None:
        if tokens.sizes is None or not self.method.proportional:
            return None
        return tokens.sizes.log().to(tokens.x.dtype)[:, None, None, :]

    def between(self, layer: int, tokens: Tokens, seen: Seen) -> Tokens:
        patches = tokens.x.shape[1] - self.prefix
        count = patches - int(self.method.keep * patches + 0.5)
        if not count or 2 * count > patches:
            return tokens
        with torch.no_grad():
            metric = F.normalize(seen.k.mean(dim=1)[:, self.prefix :], dim=-1)
            alike = metric @ metric.mT
            margin = self.method.margin * (1 - (layer - 1) / self.depth)
            order = energy(alike, margin, self.method.alpha).argsort(dim=1, descending=True)
            first, second = order[:, : 2 * count : 2], order[:, 1 : 2 * count : 2]
            between = alike.gather(1, first.unsqueeze(2).expand(-1, -1, patches))
            partner = between.gather(2, second.unsqueeze(1).expand(-1, count, -1)).argmax(dim=2)
            into = second.gather(1, partner)
            kept = torch.cat([second, order[:, 2 * count :]], dim=1)
        rows = torch.cat([first_rows(self.prefix, kept), kept + self.prefix], dim=1)
        return tokens.merge(rows, first + self.prefix, into + self.prefix)


def energy(alike: Tensor, margin: float, alpha: float) -> Tensor:
    """How many others a token resembles (B, n), from cosines (B, n, n); equation 4 of the paper."""
    return torch.where(alike >= margin, alike, alpha * (torch.exp(alike - margin) - 1)).mean(dim=-1)
