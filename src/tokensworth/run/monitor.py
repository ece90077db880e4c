"""Watches whether the mean cost stays what the policy promised."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from tokensworth.exits.policy import Policy


@dataclass(frozen=True)
class Drift:
    """The cost of recent images against the promise.

    Attributes:
        images: how many recent images are counted.
        expected, observed: mean cost per image.
        deviations: how many standard errors apart they are.
        drifting: whether the gap is larger than chance and larger than the tolerance.
    """

    images: int
    expected: float
    observed: float
    deviations: float
    drifting: bool

    def __str__(self) -> str:
        if not self.images or not self.expected:
            return "no images yet"
        gap = self.observed / self.expected - 1
        kind = "harder" if gap > 0 else "easier"
        text = f"mean cost {gap:+.1%} against the policy over {self.images} images"
        return f"{text}: inputs are {kind} than the calibration images" if self.drifting else text


class Monitor:
    """Counts exits of the last `window` images and compares their mean cost with the policy's.

    Args:
        policy: carries the expected shares and stage costs; without them nothing drifts.
        window: images that are remembered.
        deviations: standard errors that count as more than chance.
        tolerance: smallest relative gap worth a report.
    """

    def __init__(self, policy: Policy, window: int = 2000, deviations: float = 4.0, tolerance: float = 0.05):
        self.window, self.limit, self.tolerance = window, deviations, tolerance
        self.exits: deque[int] = deque(maxlen=window)
        self.watch(policy)

    def watch(self, policy: Policy) -> None:
        """Starts anew under another policy."""
        self.policy = policy
        self.exits.clear()

    def add(self, exits: list[int]) -> None:
        """Counts images that left at these exits, counted from 0."""
        self.exits.extend(exits)

    def drift(self) -> Drift:
        """Where the cost stands now."""
        shares = np.asarray(self.policy.shares)
        if not self.exits or not len(shares):
            return Drift(len(self.exits), 0.0, 0.0, 0.0, False)
        costs = np.cumsum(self.policy.stage_costs)
        observed = float(costs[np.asarray(self.exits)].mean())
        expected = float(shares @ costs)
        variance = max(float(shares @ costs**2) - expected**2, (1e-3 * expected) ** 2)
        deviations = (observed - expected) / np.sqrt(variance / len(self.exits))
        far = abs(deviations) > self.limit and abs(observed / expected - 1) > self.tolerance
        return Drift(len(self.exits), expected, observed, float(deviations), bool(far))
