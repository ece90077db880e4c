"""One ToSA-adapted model at several keep ratios: accuracy, exact MACs and measured time, in one call."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensworth.errors import DataError
from tokensworth.measure.describe import describe
from tokensworth.measure.timing import alternate
from tokensworth.tokens.method import dense
from tokensworth.tokens.tosa import set_keep, tosa_of

DENSE = "dense"


@dataclass(frozen=True)
class KeepPoint:
    """The model at one keep ratio.

    Attributes:
        keep: the ratio; None for the plain model.
        macs: per image, selectors included.
        millis: per image, median, at the batch size of the call.
        accuracy: share of right answers, or None without labels.
    """

    keep: float | None
    macs: int
    millis: float
    accuracy: float | None


def _logits(out: Any) -> Tensor:
    """A cascade answers with every exit; its last one counts."""
    return out[-1] if isinstance(out, (list, tuple)) else out


def keep_frontier(
    model: nn.Module,
    batches: Iterable[Tensor | Sequence[Tensor]],
    keeps: Sequence[float] = (1.0, 0.8, 0.6, 0.5, 0.3),
    *,
    batch_size: int = 32,
    repeats: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> list[KeepPoint]:
    """Runs a ToSA-adapted model dense and at every keep ratio; the options are afterwards as before.

    Args:
        model: adapted with `ToSA`.
        batches: images (B, C, S, S), normalized, or (images, labels) pairs, for the accuracy.
        keeps: the ratios.
        batch_size: images per timed batch, taken from the first batch and repeated if it is smaller.
        repeats: timed rounds, all sides in turn; the median counts.
        say: told what is under way.

    Returns:
        The plain model first, then one point per ratio.

    Raises:
        UnsupportedModelError: not adapted with ToSA.
        DataError: no batches.
    """
    batches = list(batches)
    if not batches:
        raise DataError("keep_frontier needs at least one batch of images")
    device = next(model.parameters()).device
    first = batches[0] if isinstance(batches[0], Tensor) else batches[0][0]
    copies = -(-batch_size // len(first))
    images = first.repeat(copies, 1, 1, 1)[:batch_size].to(device)
    training = model.training
    model.eval()
    sides: dict[str, float | None] = {DENSE: None, **{f"{k}": k for k in keeps}}

    def run(keep: float | None, x: Tensor) -> Tensor:
        if keep is None:
            with dense(model):
                return _logits(model(x))
        set_keep(model, keep)
        return _logits(model(x))

    before = tosa_of(model)[0].method.keep
    try:
        say("timing")
        with torch.inference_mode():
            times = alternate({n: (lambda k=k: run(k, images)) for n, k in sides.items()}, repeats, device=device)
        points = []
        for name, keep in sides.items():
            say(f"keep {name}")
            if keep is not None:
                set_keep(model, keep)
            cost = describe(model)
            accuracy = _accuracy(lambda x, k=keep: run(k, x), batches, device)
            macs = cost.dense_macs if keep is None else cost.macs
            points.append(KeepPoint(keep, macs, 1000 * times[name].median / batch_size, accuracy))
    finally:
        set_keep(model, before)
        model.train(training)
    return points


@torch.inference_mode()
def _accuracy(run: Callable[[Tensor], Tensor], batches: Sequence[Any], device: torch.device) -> float | None:
    if isinstance(batches[0], Tensor):
        return None
    right = sum(int((run(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in batches)
    return right / sum(len(y) for _, y in batches)
