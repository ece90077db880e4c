"""What a token method keeps, as numbers: the paper's Figure 4 (arXiv 2406.08816) measured."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokensworth.errors import DataError


@dataclass(frozen=True)
class TokenStatistics:
    """Kept tokens of some images.

    Attributes:
        salient: share of the salient patches that take part, by layer.
        background: share of the background patches that take part, by layer.
        jaccard: Jaccard index of the kept background patches of two layers, mean over images; 1 where two
            layers keep the same ones.
    """

    salient: dict[int, float]
    background: dict[int, float]
    jaccard: dict[tuple[int, int], float]


def token_statistics(kept: Mapping[int, Tensor], salient: Tensor) -> TokenStatistics:
    """Counts what was kept.

    Args:
        kept: by layer, True (B, n) where a patch takes part; prefix tokens left out.
        salient: True (B, n) where a patch is salient.

    Raises:
        DataError: masks of other shapes, or no salient or no background patch at all.
    """
    if any(mask.shape != salient.shape for mask in kept.values()):
        raise DataError("masks of kept and of salient patches must have the same shape")
    background = ~salient
    if not salient.any() or not background.any():
        raise DataError("both salient and background patches are needed")
    pairs = {(a, b) for a in kept for b in kept if a < b}
    return TokenStatistics(
        {layer: float(mask[salient].float().mean()) for layer, mask in kept.items()},
        {layer: float(mask[background].float().mean()) for layer, mask in kept.items()},
        {pair: _jaccard(kept[pair[0]] & background, kept[pair[1]] & background) for pair in sorted(pairs)},
    )


def _jaccard(first: Tensor, second: Tensor) -> float:
    """Mean over images of |both| / |either|; images where neither layer keeps any are left out."""
    either = (first | second).sum(1)
    both = (first & second).sum(1)
    counted = either > 0
    return float((both[counted] / either[counted]).mean()) if bool(counted.any()) else float(torch.nan)
