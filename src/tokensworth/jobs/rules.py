"""One exit rule against another at equal budgets, on images that neither has seen."""

from dataclasses import dataclass

import numpy as np

from tokensworth.errors import BudgetError
from tokensworth.exits.calibration import Calibration
from tokensworth.exits.outcome import leaving_exit
from tokensworth.exits.solve import Frontier, frontier
from tokensworth.jobs.choosing import paired_difference

BUDGETS = 8


@dataclass(frozen=True)
class RuleRow:
    """Two rules under one budget.

    Attributes:
        budget: mean cost per image on the calibration images, in the calibration's unit.
        plain, learned: shares of right answers on the test images.
        plain_cost, learned_cost: mean costs there.
        gain, low, high: learned less plain, and its 95 % interval over the test images.
    """

    budget: float
    plain: float
    learned: float
    plain_cost: float
    learned_cost: float
    gain: float
    low: float
    high: float


def compare_rules(
    known: tuple[Calibration, Calibration], test: tuple[Calibration, Calibration], seed: int = 0
) -> list[RuleRow]:
    """Policies of both rules at budgets spread evenly between the first exit's cost and that of all stages.

    Args:
        known: answers on the calibration images under the plain and the learned score; thresholds come from these.
        test: the same on the test images.
        seed: of the bootstrap.
    """
    lines = [frontier(k) for k in known]
    costs = known[0].exit_costs
    rows = []
    for budget in np.linspace(costs[0], costs[-1], BUDGETS + 2)[1:-1]:
        found = [_right(line, t, budget) for line, t in zip(lines, test, strict=True)]
        if None in found:
            continue
        (plain, plain_cost), (learned, learned_cost) = found  # type: ignore[misc]
        gain = paired_difference(learned, plain, seed)
        shares = float(plain.mean()), float(learned.mean())
        rows.append(RuleRow(float(budget), *shares, plain_cost, learned_cost, gain.mean, gain.low, gain.high))
    return rows


def _right(line: Frontier, test: Calibration, budget: float) -> tuple[np.ndarray, float] | None:
    """Which test images (N,) are answered rightly within a budget, and the mean cost there."""
    try:
        policy = line.within(budget)
    except BudgetError:
        return None
    leaving = leaving_exit(test.scores, np.asarray(policy.thresholds))
    return test.right[leaving, np.arange(len(leaving))], float(test.exit_costs[leaving].mean())
