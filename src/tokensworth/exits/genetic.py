"""The paper's solver: a genetic algorithm over the thresholds (its authors never released theirs)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tokensworth.errors import MissingExtraError
from tokensworth.exits.calibration import Calibration
from tokensworth.exits.outcome import Outcome, evaluate_grid

POPULATION, GENERATIONS = 100, 200


def evaluate_many(calibration: Calibration, thresholds: np.ndarray) -> Outcome:
    """The outcomes of thresholds (P, S-1), through one grid over all their values."""
    axes, places = [], []
    for column in thresholds.T:
        axis, place = np.unique(column, return_inverse=True)
        axes.append(axis)
        places.append(place)
    grid = evaluate_grid(calibration, axes)
    at = tuple(places)
    return Outcome(grid.accuracy[at], grid.cost[at], grid.shares[at], grid.deviation[at])


def solve_genetic(
    calibration: Calibration,
    budget: float,
    *,
    seed: int = 0,
    population: int = POPULATION,
    generations: int = GENERATIONS,
    on_generation: Callable[[int, float], None] | None = None,
) -> np.ndarray:
    """Thresholds (S-1,) that maximize accuracy under a mean cost of at most `budget` (DVT, equation 10).

    Genes are ranks in [0, 1]: a threshold is that quantile of its exit's scores.

    Args:
        calibration: the images.
        budget: mean cost per image.
        seed: of the search.
        population, generations: size and length of the search.
        on_generation: told each generation's number and best feasible accuracy (-1 where none is).

    Raises:
        MissingExtraError: pymoo is not installed.
    """
    try:
        from pymoo.algorithms.soo.nonconvex.ga import GA
        from pymoo.core.callback import Callback
        from pymoo.core.problem import Problem
        from pymoo.optimize import minimize
    except ImportError:
        raise MissingExtraError("the genetic solver", "genetic") from None
    from tokensworth.exits.exact import all_thresholds

    every = [all_thresholds(scores) for scores in calibration.scores[:-1]]

    def decode(genes: np.ndarray) -> np.ndarray:
        columns = [e[np.rint(g * (len(e) - 1)).astype(int)] for e, g in zip(every, np.atleast_2d(genes).T, strict=True)]
        return np.stack(columns, axis=-1)

    class Thresholds(Problem):
        def __init__(self) -> None:
            super().__init__(n_var=len(every), n_obj=1, n_ieq_constr=1, xl=0.0, xu=1.0)

        def _evaluate(self, x, out, *args, **kwargs) -> None:
            outcome = evaluate_many(calibration, decode(x))
            out["F"] = -outcome.accuracy[:, None]
            out["G"] = (outcome.cost[:, None] - budget) / budget

    class Watch(Callback):
        def notify(self, algorithm) -> None:
            found: Any = algorithm.opt
            best = found[0]
            if on_generation:
                on_generation(int(algorithm.n_gen or 0), float(-best.F[0]) if best.feas else -1.0)

    result = minimize(
        Thresholds(),
        GA(pop_size=population),
        ("n_gen", generations),
        seed=seed,
        callback=Watch(),
        verbose=False,
    )
    # Where nothing is feasible, the least bad.
    best: Any = result.opt
    return decode(np.asarray(best[0].X))[0]
