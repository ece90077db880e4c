"""How well the choice of a ToSA layer agrees with the one its true attention map would make."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokensworth.errors import DataError
from tokensworth.tokens.capture import Pair, dense_pairs
from tokensworth.tokens.choose import highest

# Whole maps of so many images are held at once.
_IMAGES = 8


@dataclass(frozen=True)
class Overlap:
    """Share of the truly most attended patches that a choice contains.

    Attributes:
        per_head: each head choosing for itself, (H,).
        layer: heads choosing together, by the mean of their scores.
    """

    per_head: tuple[float, ...]
    layer: float

    @property
    def mean(self) -> float:
        """Mean over the heads."""
        return sum(self.per_head) / len(self.per_head)


@dataclass(frozen=True)
class LayerReport:
    """One ToSA layer on some images.

    Attributes:
        name: which layer.
        kl: KL(true || predicted), mean over images, heads and all query rows.
        kl_current: the same, were the next map the current one.
        sampled: overlap of the choice as made, from the scored rows.
        all_rows: overlap of the selector's choice from all rows.
        current: of the choice by the current layer's own column sums.
        random: of a random choice.
        agreement: of the sampled choice with the selector's own from all rows. Near-ties make it low without
            harm; judge the sample by `sampled` beside `all_rows`.
    """

    name: str
    kl: float
    kl_current: float
    sampled: Overlap
    all_rows: Overlap
    current: Overlap
    random: Overlap
    agreement: Overlap


def _share(scores: Tensor, truth: Tensor, prefix: int, keep: float) -> Tensor:
    """Overlap of two choices (..., N) among the patches: (...)."""
    first, second = _mask(scores, prefix, keep), _mask(truth, prefix, keep)
    return (first & second).sum(-1) / second.sum(-1)


def _mask(scores: Tensor, prefix: int, keep: float) -> Tensor:
    return highest(scores, prefix, keep).mask(scores.shape[-1])[..., prefix:]


class _Sums:
    """Sums over images of one layer's figures."""

    def __init__(self) -> None:
        self.count = 0
        self.kl = self.kl_current = 0.0
        self.shares: dict[str, tuple[Tensor, float]] = {}

    def add(self, pair: Pair, keep: float, generator: torch.Generator) -> None:
        layer, tokens = pair.layer, pair.current.k.shape[2]
        every = torch.arange(tokens, device=pair.current.k.device)
        logits = pair.current.logits(every)
        current = logits.log_softmax(dim=-1)
        truth = pair.following.logits(every).log_softmax(dim=-1)
        predicted = layer.selector(logits)
        images = len(logits)
        self.count += images
        self.kl += images * _divergence(truth, predicted)
        self.kl_current += images * _divergence(truth, current)
        queries = layer.queries(tokens, every.device)
        choices = {
            "sampled": queries.received(layer.selector(queries.of_map(logits)).exp()),
            "all_rows": predicted.exp().sum(2),
            "current": current.exp().sum(2),
            "random": torch.rand(truth.shape[0], truth.shape[1], tokens, generator=generator).to(every.device),
        }
        true = truth.exp().sum(2)
        compared = {name: (scores, true) for name, scores in choices.items()}
        compared["agreement"] = (choices["sampled"], choices["all_rows"])
        for name, (scores, wanted) in compared.items():
            heads = _share(scores, wanted, layer.prefix, keep).sum(0).cpu()
            together = float(_share(scores.mean(1), wanted.mean(1), layer.prefix, keep).sum())
            before = self.shares.get(name)
            self.shares[name] = (heads, together) if before is None else (before[0] + heads, before[1] + together)

    def report(self, name: str) -> LayerReport:
        overlaps = {
            kind: Overlap(tuple((heads / self.count).tolist()), together / self.count)
            for kind, (heads, together) in self.shares.items()
        }
        return LayerReport(name, self.kl / self.count, self.kl_current / self.count, **overlaps)


def _divergence(truth: Tensor, predicted: Tensor) -> float:
    """KL(truth || predicted) of log-maps (B, H, N, N), mean over images, heads and rows."""
    return float((truth.exp() * (truth - predicted)).sum(-1).mean())


@torch.no_grad()
def overlap_report(model: nn.Module, images: Iterable[Tensor], keep: float = 0.5, seed: int = 0) -> list[LayerReport]:
    """Reports each ToSA layer of an adapted model on images.

    Args:
        model: adapted with `ToSA`; it runs dense, so that each layer is judged on its own.
        images: batches (B, C, S, S), normalized.
        keep: share of patches chosen on both sides.
        seed: of the random baseline.

    Raises:
        UnsupportedModelError: not adapted with ToSA.
        DataError: no images.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, _Sums] = {}
    for batch in images:
        for part in batch.split(_IMAGES):
            for pair in dense_pairs(model, part.to(device)):
                sums.setdefault(pair.name, _Sums()).add(pair, keep, generator)
    if not sums:
        raise DataError("no images to report on")
    return [s.report(name) for name, s in sums.items()]
