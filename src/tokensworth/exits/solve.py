"""One call for all solvers: the best thresholds for a goal, or the whole frontier."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tokensworth.errors import BudgetError, PolicyError
from tokensworth.exits.calibration import Calibration
from tokensworth.exits.exact import ExactSolver, Points, pareto, upper_bound
from tokensworth.exits.genetic import evaluate_many, solve_genetic
from tokensworth.exits.goals import Accuracy, Budget, show_cost
from tokensworth.exits.outcome import evaluate
from tokensworth.exits.policy import Policy
from tokensworth.exits.walk import walk

SOLVERS = ("exact", "genetic", "walk")
Solver = Literal["exact", "genetic", "walk"]

# Grid points whose neighbourhoods are searched for one goal.
_REFINED = 6


def make_policy(calibration: Calibration, thresholds: np.ndarray, goal: str) -> Policy:
    """A policy with what its thresholds (S-1,) reach on the calibration images."""
    outcome = evaluate(calibration, thresholds)
    return Policy(
        tuple(thresholds),
        calibration.score,
        calibration.temperatures,
        calibration.model,
        goal,
        calibration.unit,
        float(outcome.accuracy),
        float(outcome.cost),
        tuple(outcome.shares),
        calibration.stage_costs,
        dict(calibration.context),
        calibration.rule,
    )


@dataclass(frozen=True)
class Frontier:
    """Policies by growing cost and growing accuracy, and how finely they were searched."""

    policies: tuple[Policy, ...]
    resolution: float

    def within(self, amount: float) -> Policy:
        """The most accurate policy of at most this cost.

        Raises:
            BudgetError: below the cheapest policy.
        """
        fitting = [p for p in self.policies if p.cost <= amount]
        if not fitting:
            first = self.policies[0]
            raise BudgetError(
                f"the budget {show_cost(amount, first.unit)} is below the first exit's cost, "
                f"{show_cost(first.cost, first.unit)}"
            )
        return fitting[-1]


def frontier(calibration: Calibration, points: int = 200, cost_confidence: float = 0.0) -> Frontier:
    """The whole frontier of accuracy against mean cost, refined around evenly spread costs.

    Args:
        calibration: the images.
        points: about how many policies to keep.
        cost_confidence: hold an upper confidence bound of the cost to account instead of the mean.
    """
    solver = ExactSolver(calibration)
    grid = solver.frontier(cost_confidence)
    spread = np.linspace(grid.outcome.cost[0], grid.outcome.cost[-1], points)
    near = np.unique(np.searchsorted(grid.outcome.cost, spread, side="right") - 1)
    refined = [solver.refine(grid.thresholds[i]) for i in near] if solver.resolution else []
    merged = _merge([grid.select(near), *refined])
    best = pareto(merged, upper_bound(merged.outcome, calibration, cost_confidence))
    keep = np.unique(np.searchsorted(best.outcome.cost, spread, side="right").clip(1) - 1)
    policies = [make_policy(calibration, t, "frontier") for t in best.thresholds[keep]]
    return Frontier(tuple(policies), solver.resolution)


def solve(
    calibration: Calibration,
    budget: Budget | None = None,
    *,
    target: Accuracy | None = None,
    solver: Solver = "exact",
    cost_confidence: float = 0.0,
    seed: int = 0,
    on_generation: Callable[[int, float], None] | None = None,
) -> Policy:
    """The best policy for one goal: most accurate within a budget, or cheapest that reaches a target.

    Args:
        calibration: what the exits said of the calibration images.
        budget: mean cost per image, `Macs("1.2G")` or `Millis(3.5)`.
        target: required accuracy on the calibration images; cheapest wins.
        solver: `exact` (ours), `genetic` (the paper's; budgets only) or `walk` (the released code's).
        cost_confidence: keep an upper confidence bound of the mean cost within the budget, for example 0.95.
        seed: of the genetic algorithm.
        on_generation: progress of the genetic algorithm.

    Raises:
        BudgetError: a budget below the first exit's cost, in another unit than the calibration's, or a target
            that no policy reaches; or not exactly one goal.
        PolicyError: an unknown solver.

    Example:
        >>> policy = solve(calibration, budget=Macs("12M"))  # doctest: +SKIP
    """
    if (budget is None) == (target is None):
        raise BudgetError("name one goal: a budget or a target accuracy")
    if solver not in SOLVERS:
        raise PolicyError(f"unknown solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    if budget is not None:
        return _solve_budget(calibration, budget, solver, cost_confidence, seed, on_generation)
    assert target is not None
    return _solve_target(calibration, target, solver, cost_confidence)


def _check_budget(calibration: Calibration, budget: Budget) -> float:
    if budget.unit != calibration.unit:
        raise BudgetError(f"the budget is in {budget.unit}, but the calibration's costs are in {calibration.unit}")
    amount, first = budget.amount, calibration.exit_costs[0]
    if amount < first:
        raise BudgetError(
            f"the budget {show_cost(amount, budget.unit)} is below the first exit's cost, "
            f"{show_cost(first, budget.unit)}"
        )
    return amount


def _merge(parts: list[Points]) -> Points:
    thresholds = np.concatenate([p.thresholds for p in parts])
    fields = ("accuracy", "cost", "shares", "deviation")
    joined = {f: np.concatenate([getattr(p.outcome, f) for p in parts]) for f in fields}
    return Points(thresholds, replace(parts[0].outcome, **joined))


def _search(calibration: Calibration, rank: Callable[[Points], np.ndarray]) -> Points:
    """The exact solver's best points under a ranking (lower is better), their neighbourhoods searched."""
    solver = ExactSolver(calibration)
    if not solver.resolution:
        return solver.points
    order = np.argsort(rank(solver.points), kind="stable")[:_REFINED]
    return _merge([solver.points, *(solver.refine(solver.points.thresholds[i]) for i in order)])


def _walk_points(calibration: Calibration) -> Points:
    thresholds = walk(calibration)
    return Points(thresholds, evaluate_many(calibration, thresholds))


def _solve_budget(
    calibration: Calibration,
    budget: Budget,
    solver: Solver,
    cost_confidence: float,
    seed: int,
    on_generation: Callable[[int, float], None] | None,
) -> Policy:
    amount = _check_budget(calibration, budget)
    goal = f"at most {show_cost(amount, budget.unit)} on average"
    if cost_confidence:
        goal += f" at {cost_confidence:.0%} confidence"
    if solver == "genetic":
        best = solve_genetic(calibration, amount, seed=seed, on_generation=on_generation)
        return make_policy(calibration, best, goal)

    def rank(points: Points) -> np.ndarray:
        over = upper_bound(points.outcome, calibration, cost_confidence) > amount
        return np.where(over, np.inf, -points.outcome.accuracy + 1e-9 * points.outcome.cost / amount)

    points = _walk_points(calibration) if solver == "walk" else _search(calibration, rank)
    order = rank(points)
    best = int(np.argmin(order))
    if not np.isfinite(order[best]):
        raise BudgetError(f"no policy of the {solver} solver stays within {show_cost(amount, budget.unit)}")
    return make_policy(calibration, points.thresholds[best], goal)


def _solve_target(calibration: Calibration, target: Accuracy, solver: Solver, cost_confidence: float) -> Policy:
    if solver == "genetic":
        raise PolicyError("the genetic solver takes budgets only; use the exact one for a target accuracy")

    def rank(points: Points) -> np.ndarray:
        cost = upper_bound(points.outcome, calibration, cost_confidence)
        return np.where(points.outcome.accuracy < target.value, np.inf, cost)

    points = _walk_points(calibration) if solver == "walk" else _search(calibration, rank)
    order = rank(points)
    best = int(np.argmin(order))
    if not np.isfinite(order[best]):
        top = points.outcome.accuracy.max()
        raise BudgetError(f"no policy reaches accuracy {target.value:.2%} on these images; the best has {top:.2%}")
    return make_policy(calibration, points.thresholds[best], f"at least {target.value:.2%} right")
