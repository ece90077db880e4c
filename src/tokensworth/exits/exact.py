"""Our solver: all combinations of thresholds on a fine grid at once, then exact values around the winners."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tokensworth.exits.calibration import Calibration
from tokensworth.exits.outcome import Outcome, evaluate_grid
from tokensworth.exits.scores import ALWAYS, NEVER

# Combinations evaluated at once: 2048 thresholds for each of two exits.
_CELLS = 2**22
# Near-winners are kept for each of so many slices of cost, so many each.
_SLICES, _WINNERS = 256, 4
# Exact thresholds per exit around a point that is refined.
_WINDOW = 64


def all_thresholds(scores: np.ndarray) -> np.ndarray:
    """Every threshold that makes a difference on scores (N,): midpoints of neighbours, and both ends.

    Midpoints keep a policy away from the scores themselves, so that rounding cannot flip an answer.
    """
    distinct = np.unique(scores)
    # In the scores' own precision a midpoint of close neighbours may be one of them; the upper one keeps
    # the meaning of score >= threshold.
    middle = np.maximum((distinct[:-1].astype(np.float64) + distinct[1:]) / 2, np.nextafter(distinct[:-1], np.inf))
    return np.concatenate([[ALWAYS], middle, [NEVER]])


def _thin(values: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the sorted values, evenly by rank, both ends kept."""
    if len(values) <= count:
        return values
    return values[np.unique(np.linspace(0, len(values) - 1, count).round().astype(int))]


@dataclass(frozen=True)
class Points:
    """Thresholds (P, S-1) with their outcome (P,), by growing cost."""

    thresholds: np.ndarray
    outcome: Outcome

    def __len__(self) -> int:
        return len(self.thresholds)

    def select(self, index: np.ndarray) -> "Points":
        o = self.outcome
        picked = Outcome(o.accuracy[index], o.cost[index], o.shares[index], o.deviation[index])
        return Points(self.thresholds[index], picked)


def pareto(points: Points, bound: np.ndarray | None = None) -> Points:
    """The points that no other beats: growing cost, strictly growing accuracy.

    Args:
        points: any points.
        bound: (P,) what counts as a point's cost; the mean cost where None.
    """
    cost = points.outcome.cost if bound is None else bound
    order = np.lexsort((-points.outcome.accuracy, cost))
    best = np.maximum.accumulate(points.outcome.accuracy[order])
    keep = np.concatenate([[True], best[1:] > best[:-1]])
    return points.select(order[keep])


def _points(axes: list[np.ndarray], outcome: Outcome, places: np.ndarray) -> Points:
    """The combinations at flat `places` (P,) of a grid's outcome."""
    index = np.unravel_index(places, outcome.cost.shape)
    thresholds = np.stack([axis[i] for axis, i in zip(axes, index, strict=True)], axis=-1)
    fields = (outcome.accuracy, outcome.cost, outcome.shares, outcome.deviation)
    return Points(thresholds, Outcome(*(values[index] for values in fields)))


class ExactSolver:
    """Near exact by construction; exact where every threshold fits on the grid.

    Args:
        calibration: the images.
        cells: combinations evaluated at once.

    Attributes:
        points: the grid's best combinations, from which a goal is answered or a search goes on.
        resolution: the largest share of images between neighbouring grid thresholds of an exit; 0 where the
            grid holds every threshold. Refinement then closes the gap around the winners.
    """

    def __init__(self, calibration: Calibration, cells: int = _CELLS) -> None:
        self.calibration = calibration
        self.every = [all_thresholds(scores) for scores in calibration.scores[:-1]]
        per_exit = max(2, int(cells ** (1 / max(1, len(self.every)))))
        self.axes = [_thin(values, per_exit) for values in self.every]
        gaps = [
            0.0 if len(axis) == len(values) else 1 / (len(axis) - 1)
            for axis, values in zip(self.axes, self.every, strict=True)
        ]
        self.resolution = max(gaps)
        self.points = self._candidates()

    def _candidates(self) -> Points:
        """All points that no other beats, and a few near-winners of each fine slice of cost."""
        outcome = evaluate_grid(self.calibration, self.axes)
        cost, accuracy = outcome.cost.ravel(), outcome.accuracy.ravel()
        order = np.lexsort((-accuracy, cost))
        best = np.maximum.accumulate(accuracy[order])
        chosen = [order[np.concatenate([[True], best[1:] > best[:-1]])]]
        edges = np.searchsorted(cost[order], np.linspace(cost.min(), cost.max(), _SLICES + 1))
        for low, high in pairwise(edges):
            part = order[low:high]
            top = min(_WINNERS, len(part))
            if top:
                chosen.append(part[np.argpartition(-accuracy[part], top - 1)[:top]])
        return _points(self.axes, outcome, np.unique(np.concatenate(chosen)))

    def frontier(self, cost_confidence: float = 0.0) -> Points:
        """The whole frontier on the grid."""
        return pareto(self.points, upper_bound(self.points.outcome, self.calibration, cost_confidence))

    def refine(self, point: np.ndarray) -> Points:
        """All exact combinations around thresholds (S-1,): a window of each exit's own thresholds."""
        side = _WINDOW if len(point) <= 2 else max(3, int(_CELLS ** (1 / len(point)) / 4))
        axes = []
        for value, every, axis in zip(point, self.every, self.axes, strict=True):
            reach = max(1, round(len(every) / len(axis)))
            middle = int(np.searchsorted(every, value))
            axes.append(_thin(every[max(0, middle - reach) : middle + reach + 1], side))
        outcome = evaluate_grid(self.calibration, axes)
        return _points(axes, outcome, np.arange(outcome.cost.size))


def upper_bound(outcome: Outcome, calibration: Calibration, confidence: float) -> np.ndarray:
    """The mean cost, or its upper confidence bound under the normal approximation, for 0 < confidence < 1."""
    if not confidence:
        return outcome.cost
    from statistics import NormalDist

    z = NormalDist().inv_cdf(confidence)
    return outcome.cost + z * outcome.deviation / np.sqrt(len(calibration.labels))
