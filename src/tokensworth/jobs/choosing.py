"""Of several measured ways to run a model: which are worth having, and which one to take."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """A paired difference of two means and its 95 % interval by bootstrap; of accuracies, as shares."""

    mean: float
    low: float
    high: float


def paired_difference(
    values: np.ndarray, reference: np.ndarray, seed: int = 0, draws: int = 10_000, floor: float = 1.0
) -> Difference:
    """The mean of one side less that of another on the same images.

    Args:
        values: (N,), whether each image was answered rightly, or another measure of each.
        reference: (N,), the same of the other side.
        seed: of the bootstrap.
        draws: resampled sets of images. Images that differ alike stand for each other, so a resampled set is fully
            described by how often each difference occurs, and those counts are drawn.
        floor: what all differences are divided by.
    """
    change, count = np.unique(values.astype(float) - reference.astype(float), return_counts=True)
    images = len(values)
    random = np.random.default_rng(seed)
    chances = count / images
    # In parts, since every image may differ in its own way.
    means = [random.multinomial(images, chances, size=min(500, draws - d)) @ change for d in range(0, draws, 500)]
    low, high = np.quantile(np.concatenate(means) / images, [0.025, 0.975])
    return Difference(*(float(v) / floor for v in (change @ chances, low, high)))


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
