"""What a policy does to a set of images: who leaves where, how many are right, what it costs."""

from dataclasses import dataclass
from math import prod

import numpy as np

from tokensworth.exits.calibration import Calibration, require_stages


@dataclass(frozen=True)
class Outcome:
    """Results of thresholds on a set of images; arrays share their leading shape.

    Attributes:
        accuracy: share of right answers.
        cost: mean cost per image.
        shares: (..., S) share of images that leave at each exit.
        deviation: standard deviation of the cost over images.
    """

    accuracy: np.ndarray
    cost: np.ndarray
    shares: np.ndarray
    deviation: np.ndarray


def _outcome(right: np.ndarray, left: np.ndarray, count: int, exit_costs: np.ndarray) -> Outcome:
    """From right answers (...) and images leaving at each exit (..., S), as counts."""
    shares = left / count
    cost = shares @ exit_costs
    variance = np.maximum(shares @ exit_costs**2 - cost**2, 0)
    return Outcome(right / count, cost, shares, np.sqrt(variance))


def leaving_exit(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """The exit (N,) each image leaves at: the first whose score (S, N) reaches its threshold, else the last."""
    leaves = scores[:-1] >= np.asarray(thresholds, dtype=scores.dtype)[:, None]
    last = np.full((1, scores.shape[1]), True)
    return np.concatenate([leaves, last]).argmax(axis=0)


def evaluate(calibration: Calibration, thresholds: np.ndarray) -> Outcome:
    """One policy's outcome, image by image.

    Raises:
        PolicyError: another number of thresholds than exits less one.
    """
    thresholds = np.asarray(thresholds)
    require_stages(calibration, thresholds)
    exits = leaving_exit(calibration.scores, thresholds)
    right = np.take_along_axis(calibration.right, exits[None], axis=0).sum()
    left = np.bincount(exits, minlength=len(calibration.scores))
    return _outcome(right, left, len(exits), calibration.exit_costs)


def _flip_cumulate(table: np.ndarray, leave_axis: int | None) -> np.ndarray:
    """Counts by (bin per exit) -> counts by (threshold per exit): stayed at all axes, left at `leave_axis`."""
    for axis in range(table.ndim):
        below = np.cumsum(table, axis=axis)
        if axis == leave_axis:
            below = np.take(below, [-1], axis=axis) - below
        # Bin b holds images above exactly b thresholds; threshold i keeps the bins up to i.
        table = np.take(below, range(table.shape[axis] - 1), axis=axis)
    return table


def evaluate_grid(calibration: Calibration, axes: list[np.ndarray]) -> Outcome:
    """The outcomes of every combination of thresholds at once, by one histogram per exit.

    Each image falls into one cell of a histogram over (bin at exit 1, bin at exit 2, ...); sums over the cells
    then give the images that leave and the right answers for all combinations. No loop over images.

    Args:
        calibration: the images.
        axes: per exit but the last, sorted thresholds (K_e,).

    Returns:
        Outcome with leading shape (K_1, ..., K_{S-1}).
    """
    scores, right = calibration.scores, calibration.right
    sizes = [len(axis) + 1 for axis in axes]
    full = tuple(len(axis) for axis in axes)
    # Thresholds are compared in the scores' own precision, as leaving_exit and the runner do.
    bins = [np.searchsorted(a.astype(s.dtype), s, side="right") for a, s in zip(axes, scores, strict=False)]
    total_right, left, flat = np.zeros(full), [], np.zeros(len(calibration.labels), dtype=np.int64)
    for index in range(len(scores)):
        last = index == len(axes)
        depth = len(axes) if last else index + 1
        if not last:
            flat = flat * sizes[index] + bins[index]
        shape, leave = sizes[:depth], None if last else index
        hits = np.bincount(flat, right[index], minlength=prod(shape)).reshape(shape)
        everyone = np.bincount(flat, minlength=prod(shape)).reshape(shape)
        spread = (slice(None),) * depth + (None,) * (len(axes) - depth)
        total_right += _flip_cumulate(hits, leave)[spread]
        left.append(np.broadcast_to(_flip_cumulate(everyone, leave)[spread], full))
    return _outcome(total_right, np.stack(left, axis=-1), len(calibration.labels), calibration.exit_costs)
