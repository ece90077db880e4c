"""STAR's offline part: the importance of each place of the grid in each layer, and rates chosen from it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tokensworth.errors import DataError
from tokensworth.tokens.method import dense
from tokensworth.tokens.methods.star import star_of
from tokensworth.tokens.vit import find_vits
from tokensworth.train.relevance import relevance, top_logit

# The rates are looked up at so many shares of the relevance.
_STEPS = 1000
# Share of the importance that all patches share alike, so that those without relevance are told apart from each other
# by nothing, but not from the rest by everything.
_FLOOR = 0.05


@dataclass(frozen=True)
class StarFit:
    """What `fit_star` found.

    Attributes:
        images: how many it saw.
        layers: the pruning layers.
        keep: share that each of them keeps of the patches it gets.
        mass: share of an image's relevance that the kept patches hold at these rates; None where they were given.
    """

    images: int
    layers: tuple[int, ...]
    keep: tuple[float, ...]
    mass: float | None


def fit_star(
    model: nn.Module,
    batches: Iterable[Tensor | tuple[Tensor, Tensor]],
    *,
    share: float | None = None,
    answer: Callable[[Any], Tensor] = top_logit,
    on_batch: Callable[[int], None] = lambda _: None,
) -> StarFit:
    """Measures the offline importance of a STAR-adapted model on images, no labels needed.

    Args:
        model: adapted with `Star`.
        batches: images (B, C, S, S), normalized, or pairs with labels, which are not used.
        share: choose the rates too, so that the mean share of patches over all layers is this: each layer then
            keeps what holds one and the same share of the relevance. None leaves `keep` as it is.
        answer: the model's output to one number for each image, whose relevance is followed.
        on_batch: told the images seen so far.

    Raises:
        UnsupportedModelError: not adapted with STAR, or a part that relevance cannot follow.
        DataError: no images, or a share that cannot be.
    """
    added = star_of(model)[0]
    layers, prefix = added.method.layers, added.prefix
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    importance, needed, seen = 0, 0, 0
    levels = torch.linspace(0, 1, _STEPS + 1, device=device)
    try:
        for batch in batches:
            images = (batch if isinstance(batch, Tensor) else batch[0]).to(device)
            with dense(model):
                parts = relevance(model, images, layers, answer)
            held = torch.stack([part[:, prefix:].clamp(min=0) for part in parts])  # (layers, B, n)
            held = held / held.sum(dim=-1, keepdim=True).clamp(min=1e-9)
            held = (1 - _FLOOR) * held + _FLOOR / held.shape[-1]
            importance = importance + held.sum(dim=1)
            needed = needed + _needed(held, levels).sum(dim=1)
            seen += len(images)
            on_batch(seen)
    finally:
        model.train(training)
    if not seen:
        raise DataError("fit_star needs at least one batch of images")
    keep, mass = None, None
    if share is not None:
        depth = len(find_vits(model)[0].blocks)
        keep, mass = _rates(needed / seen, levels, layers, depth, share)  # type: ignore[operator]
    added.learn(importance / seen, keep)  # type: ignore[operator]
    kept = added.method.keep
    return StarFit(seen, layers, kept if isinstance(kept, tuple) else (kept,) * len(layers), mass)


def _needed(held: Tensor, levels: Tensor) -> Tensor:
    """Share of the patches that together hold a share of the relevance: (layers, B, n), (S,) -> (layers, B, S)."""
    reached = held.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    wanted = levels.expand(*reached.shape[:-1], -1).contiguous()
    counts = torch.searchsorted(reached.contiguous(), wanted - 1e-6) + 1
    return counts.clamp(max=held.shape[-1]).float() / held.shape[-1]


def _rates(
    needed: Tensor, levels: Tensor, layers: tuple[int, ...], depth: int, share: float
) -> tuple[tuple[float, ...], float]:
    """Rates of each layer for a mean share over all layers, and the share of relevance that gives them."""
    left = needed.cummin(dim=0).values  # later layers cannot have more
    # Patches are dropped between attention and MLP: the layer itself counts half.
    spans = [b - a for a, b in zip(layers, (*layers[1:], depth + 0.5), strict=True)]
    before = layers[0] - 0.5
    means = (before + (left * torch.tensor(spans, device=left.device)[:, None]).sum(dim=0)) / depth
    if not float(means[0]) <= share <= 1:
        raise DataError(f"a mean share of {share}: STAR at layers {list(layers)} can reach {float(means[0]):.2f} to 1")
    at = int((means - share).abs().argmin())
    shares = [1.0, *left[:, at].tolist()]
    keep = tuple(round(min(1.0, b / a), 4) for a, b in pairwise(shares))
    return keep, float(levels[at])
