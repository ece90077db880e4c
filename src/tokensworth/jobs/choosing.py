"""Of several measured ways to run a model: which are worth having, and which one to take."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """A paired difference in accuracy, as shares, and its 95 % interval by bootstrap."""

    mean: float
    low: float
    high: float


def paired_difference(right: np.ndarray, reference: np.ndarray, seed: int = 0, draws: int = 10_000) -> Difference:
    """Accuracy of one side less that of another on the same images.

    Args:
        right: (N,) bool, whether each image was answered rightly.
        reference: (N,) bool, the same of the other side.
        seed: of the bootstrap.
        draws: resampled sets of images. A difference per image is -1, 0 or 1, so a resampled set is fully described
            by how often each occurs, and those counts are drawn.
    """
    change = right.astype(int) - reference.astype(int)
    count = len(change)
    shares = np.array([(change == value).mean() for value in (-1, 0, 1)])
    drawn = np.random.default_rng(seed).multinomial(count, shares, size=draws)
    means = (drawn[:, 2] - drawn[:, 0]) / count
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(change.mean()), float(low), float(high))


def pareto(costs: Sequence[float], values: Sequence[float]) -> list[bool]:
    """Which points no other point beats: none is at least as cheap and as good, and better in one of them."""
    points = list(zip(costs, values, strict=True))
    return [not any(c <= cost and v >= value and (c, v) != (cost, value) for c, v in points) for cost, value in points]


def cheapest_within(costs: Sequence[float], accuracies: Sequence[float], least: float) -> int | None:
    """The cheapest point of at least an accuracy; None where there is none."""
    fitting = [i for i, accuracy in enumerate(accuracies) if accuracy >= least]
    return min(fitting, key=lambda i: (costs[i], -accuracies[i])) if fitting else None


def best_within(costs: Sequence[float], accuracies: Sequence[float], most: float) -> int | None:
    """The most accurate point that costs at most so much; None where there is none."""
    fitting = [i for i, cost in enumerate(costs) if cost <= most]
    return max(fitting, key=lambda i: (accuracies[i], -costs[i])) if fitting else None
