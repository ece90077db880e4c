"""Which grids a cascade should have: of all short lists of candidates, the one that serves the goal best."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from tokensworth.errors import BudgetError
from tokensworth.exits.calibration import calibrate_logits
from tokensworth.exits.goals import Accuracy, Budget
from tokensworth.exits.policy import Policy
from tokensworth.exits.solve import solve

MOST_STAGES = 4


@dataclass(frozen=True)
class Candidate:
    """A list of grids and what the best policy for the goal reaches with it on the calibration images."""

    grids: tuple[int, ...]
    accuracy: float
    cost: float


@dataclass(frozen=True)
class Goal:
    """What a user wants: a mean cost, or an accuracy as a share.

    Attributes:
        budget: the cost, or None.
        target: the accuracy where there is no budget.
        words: the goal in words.
    """

    budget: Budget | None
    target: float
    words: str

    def solve(self, calibration) -> Policy:
        """The best policy.

        Raises:
            BudgetError: out of reach.
        """
        if self.budget is not None:
            return solve(calibration, self.budget)
        return solve(calibration, target=Accuracy(self.target))

    def better(self, one: Candidate, other: Candidate) -> bool:
        """Whether one list of grids serves the goal better than another."""
        if self.budget is not None:
            return (one.accuracy, -one.cost) > (other.accuracy, -other.cost)
        return (one.cost, -one.accuracy) < (other.cost, -other.accuracy)


def rank_grids(
    logits: dict[int, Tensor], labels: Tensor, costs: dict[int, float], goal: Goal, unit: str = "MACs"
) -> list[Candidate]:
    """All lists of two to four candidate grids that reach the goal, the best first.

    Args:
        logits: of the calibration images, by grid, (N, classes).
        labels: (N,).
        costs: of running each grid's stage on one image.
        goal: what is wanted.
        unit: of the costs.

    Raises:
        BudgetError: no list reaches the goal.
    """
    found: list[Candidate] = []
    reason: BudgetError | None = None
    for grids in _lists(sorted(logits)):
        stage_costs = [costs[grid] for grid in grids]
        known = calibrate_logits([logits[grid] for grid in grids], labels, stage_costs, temperature=True)
        try:
            policy = goal.solve(known.with_costs(stage_costs, unit, {}))
        except BudgetError as error:
            reason = error
            continue
        place = Candidate(grids, policy.accuracy, policy.cost)
        at = next((i for i, other in enumerate(found) if goal.better(place, other)), len(found))
        found.insert(at, place)
    if not found:
        assert reason is not None
        raise reason
    return found


def _lists(grids: Sequence[int]) -> list[tuple[int, ...]]:
    return [chosen for count in range(2, MOST_STAGES + 1) for chosen in combinations(grids, count)]
