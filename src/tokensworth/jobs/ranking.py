"""Measured sides as rows that can be ranked: paired differences, Pareto points, and a recommendation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tokensworth.jobs.choosing import Difference, best_within, cheapest_within, paired_difference, pareto
from tokensworth.jobs.comparing import Measured


@dataclass(frozen=True)
class Row:
    """One side, reported on the test images.

    Attributes:
        curve, setting: of the side.
        accuracy: share of right answers on the test images; of depth, the share of pixels within a factor of 1.25.
        difference: from the plain model, paired.
        calibration_accuracy: what settings are chosen by.
        macs: mean per image.
        macs_ratio: of the plain model's to this side's; above 1 is less work.
        rate: images per second in batches.
        time_ratio: of the plain model's time in batches to this side's, measured in turn; above 1 is faster.
        p50: median milliseconds of one image alone.
        p50_ratio: of the plain model's to this side's, measured in turn.
        peak_bytes: of one batch.
        keeps_grid: whether the whole token grid is there in the end.
        pareto_macs, pareto_time: whether no other side is both better and cheaper, in MACs or in measured time.
        errors: of depth, the means of the field's measures.
        abs_rel_change: of depth, the paired difference of abs_rel as a share of the plain model's.
    """

    curve: str
    setting: str
    accuracy: float
    difference: Difference
    calibration_accuracy: float
    macs: float
    macs_ratio: float
    rate: float
    time_ratio: float
    p50: float
    p50_ratio: float
    peak_bytes: int
    keeps_grid: bool
    pareto_macs: bool
    pareto_time: bool
    errors: dict[str, float] = field(default_factory=dict)
    abs_rel_change: Difference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and CSV."""
        values = asdict(self)
        errors = values.pop("errors")
        for name in ("difference", "abs_rel_change"):
            found = values.pop(name) or {}
            values |= {f"{name}_{k}" if k != "mean" else name: v for k, v in found.items()}
        return values | errors


def rank(measured: Sequence[Measured], seed: int = 0) -> list[Row]:
    """Rows in the order of the sides; the first is the plain model, from which differences are taken."""
    plain = measured[0]
    accuracies = [float(m.test.mean()) for m in measured]
    by_macs = pareto([m.macs for m in measured], accuracies)
    by_time = pareto([m.millis / m.reference_millis for m in measured], accuracies)

    def change(side: Measured) -> Difference | None:
        if not plain.errors:
            return None
        own, reference = (np.array(m.errors["abs_rel"]) for m in (side, plain))
        return paired_difference(own, reference, seed, floor=float(reference.mean()))

    return [
        Row(
            m.curve,
            m.setting,
            accuracies[i],
            paired_difference(m.test, plain.test, seed),
            float(m.calibration.mean()),
            m.macs,
            plain.macs / m.macs,
            1000 / m.millis,
            m.reference_millis / m.millis,
            m.p50,
            m.reference_p50 / m.p50,
            m.peak_bytes,
            m.keeps_grid,
            by_macs[i],
            by_time[i],
            {name: float(np.mean(values)) for name, values in m.errors.items()},
            change(m),
        )
        for i, m in enumerate(measured)
    ]


@dataclass(frozen=True)
class Recommendation:
    """A setting chosen on calibration images, to be judged by its row, which the test images made.

    Attributes:
        goal: what was asked for, in words.
        row: the setting; None where none reaches the goal.
    """

    goal: str
    row: Row | None


def recommend(rows: Sequence[Row], max_drop: float | None, millis: float | None, single: bool) -> Recommendation | None:
    """The cheapest setting that loses little, or the best that is fast enough.

    Args:
        rows: of `rank`.
        max_drop: most points of calibration accuracy that may be lost against the plain model; the least time wins.
        millis: most milliseconds per image; the highest calibration accuracy wins.
        single: judge time by one image alone instead of batches.
    """
    if max_drop is None and millis is None:
        return None
    # By ratios to the plain model beside which each was measured, so that a slow minute does not count.
    plain = rows[0].p50 if single else 1000 / rows[0].rate
    times = [plain / (r.p50_ratio if single else r.time_ratio) for r in rows]
    accuracies = [r.calibration_accuracy for r in rows]
    where = "one image alone" if single else "batches"
    if millis is not None:
        place, goal = best_within(times, accuracies, millis), f"at most {millis:g} ms per image, {where}"
    else:
        assert max_drop is not None
        least = accuracies[0] - max_drop / 100 - 1e-9
        place, goal = cheapest_within(times, accuracies, least), f"at most {max_drop:g} points lost, {where}"
    return Recommendation(goal, None if place is None else rows[place])
