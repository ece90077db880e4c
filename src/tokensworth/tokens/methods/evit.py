"""EViT (Liang et al., ICLR 2022, arXiv 2202.07800).

At a few layers the patches that the class token attends to most go on; the others go on as one token, their sum
weighted by that attention, which is an ordinary patch from then on.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from tokensworth.tokens.halves import Seen
from tokensworth.tokens.pruning import Pruning, PruningViT
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class EViT(Pruning):
    """Options of EViT; see `Pruning`. Without a class token, the attention received from all tokens counts."""

    name: ClassVar[str] = "evit"

    def attach(self, vit: ViT) -> "EViTViT":
        return EViTViT(self, vit)


class EViTViT(PruningViT):
    """EViT on one vision transformer."""

    def between(self, layer: int, tokens: Tokens, seen: Seen) -> Tokens:
        scores = self.received(seen)
        count = self.count(layer, tokens)
        if count >= scores.shape[1]:
            return tokens
        best = scores.topk(count, dim=1, sorted=False).indices
        dropped = scores.scatter(1, best, 0)
        fused = dropped.unsqueeze(1) @ tokens.x[:, self.prefix :]
        kept = tokens.keep(self.with_prefix(best))
        places = kept.places
        if places is not None and tokens.places is not None:
            # The fused token stands where the most attended of the dropped ones stood.
            at = dropped.argmax(dim=1, keepdim=True) + self.prefix
            places = torch.cat([places, tokens.places.gather(1, at)], dim=1)
        return kept._replace(x=torch.cat([kept.x, fused.to(kept.x.dtype)], dim=1), places=places)
