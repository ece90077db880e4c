"""Which tokens take part: the highest scores, or as few as carry a wanted share of the attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokensworth.tokens.gather import take_square


class Chosen(NamedTuple):
    """The tokens that take part in a layer, the prefix tokens first.

    Attributes:
        places: positions (B, K), or (B, H, K) where each head has its own.
        valid: same shape; False marks padding in a batch whose images keep different numbers. None: all count.
    """

    places: Tensor
    valid: Tensor | None = None

    def mask(self, tokens: int) -> Tensor:
        """True where a token takes part: (B, N), or (B, H, N)."""
        valid = torch.ones_like(self.places, dtype=torch.bool) if self.valid is None else self.valid
        shape = (*self.places.shape[:-1], tokens)
        return torch.zeros(shape, dtype=torch.bool, device=self.places.device).scatter(-1, self.places, valid)

    def merge(self, out: Tensor, before: Tensor) -> Tensor:
        """The chosen tokens after a layer (B, K, D), padding as it was before."""
        return out if self.valid is None else torch.where(self.valid.unsqueeze(2), out, before)

    def between(self, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the logits among the chosen tokens, padding hidden as keys; None for nothing.

        Args:
            bias: between all tokens, (B, H, N, N), or None.
            dtype: of a bias that only hides padding.

        Returns:
            (B, H, K, K), (B, 1 or H, 1, K), or None.
        """
        part = None if bias is None else take_square(bias, self.places)
        if self.valid is None:
            return part
        shown = self.valid.unsqueeze(-2)
        shown = shown.unsqueeze(1) if self.valid.ndim == 2 else shown
        hidden = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(~shown, float("-inf"))
        return hidden if part is None else part + hidden


def _with_prefix(patches: Tensor, prefix: int) -> Tensor:
    """Puts the prefix tokens before positions among the patches (..., K)."""
    if not prefix:
        return patches
    first = torch.arange(prefix, device=patches.device).expand(*patches.shape[:-1], -1)
    return torch.cat([first, patches + prefix], dim=-1)


def kept_count(patches: int, keep: float) -> int:
    """K of a keep ratio: the nearest whole number of patches, at least one."""
    return max(1, int(keep * patches + 0.5))


def highest(scores: Tensor, prefix: int, keep: float) -> Chosen:
    """The `keep` share of the patches with the highest scores (..., N), and all prefix tokens."""
    patches = scores[..., prefix:]
    places = patches.topk(kept_count(patches.shape[-1], keep), dim=-1, sorted=False).indices
    return Chosen(_with_prefix(places, prefix))


def fewest(scores: Tensor, prefix: int, mass: float, keep: float) -> Chosen:
    """As few patches as together hold the share `mass` of the patches' score, at most the share `keep`.

    The batch is as wide as its hungriest image; inside a compiled graph, whose shapes cannot depend on
    values, as wide as `keep` allows.
    """
    patches = scores[..., prefix:]
    most = kept_count(patches.shape[-1], keep)
    values, order = patches.topk(most, dim=-1)
    wanted = mass * patches.sum(dim=-1, keepdim=True)
    counts = (values.cumsum(dim=-1) < wanted).sum(dim=-1, keepdim=True).add(1).clamp(max=most)
    width = most if torch.compiler.is_compiling() else int(counts.max())
    valid = torch.arange(width, device=scores.device) < counts
    shown = torch.ones((*valid.shape[:-1], prefix), dtype=torch.bool, device=scores.device)
    return Chosen(_with_prefix(order[..., :width], prefix), torch.cat([shown, valid], dim=-1))
