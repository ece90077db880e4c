"""The released code's solver: a walk along one family of exit fractions."""

import numpy as np

from tokensworth.exits.calibration import Calibration

POINTS = range(1, 60)

# The authors' thresholds for an exit that takes nobody and for one that takes everybody.
_NOBODY, _EVERYBODY = 1e8, -1e8


def walk_thresholds(confidences: np.ndarray, p: int) -> np.ndarray:
    """Thresholds (S,) of one point of the walk.

    With q = p/20, exit k is to take the share q^k / sum of q^j of *all* images; its threshold is the score of
    the last image that still fits, among those that have not left.

    Args:
        confidences: (S, N).
        p: point of the walk, 1 to 59.
    """
    stages, count = confidences.shape
    powers = np.power(p / 20, np.arange(1, stages + 1))
    fractions = powers / powers.sum()
    in_flight = np.ones(count, dtype=bool)
    thresholds = np.full(stages, _EVERYBODY)
    for index in range(stages - 1):
        take = int(np.floor(count * fractions[index]))
        scores = np.sort(confidences[index][in_flight])[::-1]
        thresholds[index] = _NOBODY if take == 0 or len(scores) < take else scores[take - 1]
        in_flight &= confidences[index] < thresholds[index]
    return thresholds


def walk(calibration: Calibration) -> np.ndarray:
    """All points' thresholds without the last exit's: (59, S-1)."""
    return np.stack([walk_thresholds(calibration.scores, p)[:-1] for p in POINTS])
