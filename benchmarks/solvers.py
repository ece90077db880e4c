"""Three solvers on 50,000 calibration images and three exits: time of the frontier, and who finds better policies.

The answers are drawn by the rule of the golden threshold cases (harder images answered less surely, later exits
better), so that the size is an ImageNet validation set's. A second draw is held out. Brute force over every
pair of thresholds is feasible on 2,000 images, where the gap to it is reported.
"""

import argparse
import time

import numpy as np
from rich.progress import track

from common import finish
from tokensworth.exits import Calibration, Macs, frontier, solve
from tokensworth.exits.exact import ExactSolver
from tokensworth.exits.genetic import evaluate_many, solve_genetic
from tokensworth.exits.outcome import evaluate
from tokensworth.exits.walk import walk

COSTS = (0.468, 0.978, 2.009)


def draw(count: int, seed: int, classes: int = 10) -> Calibration:
    """Answers of three exits on images of random difficulty."""
    random = np.random.RandomState(seed)
    labels, difficulty = random.randint(0, classes, count), random.rand(count)
    scores, predictions = [], []
    for stage in range(3):
        logits = random.randn(count, classes)
        logits[np.arange(count), labels] += (1.2 + 1.0 * stage) * (1.6 - 1.3 * difficulty)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
        scores.append(probabilities.max(axis=1))
        predictions.append(probabilities.argmax(axis=1))
    stacked = np.stack(scores)
    return Calibration(stacked, stacked, np.stack(predictions), labels, COSTS)


def gap_to_brute_force(seed: int) -> dict[str, float]:
    """Largest loss of accuracy, in points, of a coarse grid with refinement against every pair, on 2,000 images."""
    known = draw(2000, seed)
    every = ExactSolver(known)
    assert every.resolution == 0
    best = every.frontier().outcome
    coarse = ExactSolver(known, cells=256**2)
    budgets = np.linspace(known.exit_costs[0] * 1.02, known.exit_costs[-1], 60)
    shipped, thinned = [], []
    for budget in budgets:
        top = best.accuracy[best.cost <= budget].max()
        shipped.append(100 * (top - solve(known, Macs(budget)).accuracy))
        fits = np.flatnonzero(coarse.points.outcome.cost <= budget)
        winners = fits[np.argsort(-coarse.points.outcome.accuracy[fits])[:6]]
        refined = [coarse.refine(coarse.points.thresholds[i]).outcome for i in winners]
        reached = max(o.accuracy[o.cost <= budget].max(initial=0) for o in refined)
        thinned.append(100 * (top - max(reached, coarse.points.outcome.accuracy[fits].max())))
    return {"as shipped": max(shipped), "grid of 256 per exit": max(thinned)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--budgets", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5, help="of the genetic algorithm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    known, held = draw(options.images, options.seed), draw(options.images, options.seed + 1)
    start = time.perf_counter()
    line = frontier(known)
    seconds = time.perf_counter() - start
    walked = walk(known)
    outcomes = evaluate_many(known, walked)
    costs = known.exit_costs
    budgets = np.linspace(costs[0] * 1.02, costs[-1] * 0.98, options.budgets)
    best = {"ours": [], "genetic": [], "walk": []}
    held_best = {"ours": [], "genetic": [], "walk": []}
    spent = {"ours": 0.0, "genetic": 0.0}
    for budget in track(budgets, description="budgets"):
        began = time.perf_counter()
        policy = solve(known, Macs(budget))
        spent["ours"] += time.perf_counter() - began
        found = {"ours": [np.array(policy.thresholds)], "walk": []}
        began = time.perf_counter()
        found["genetic"] = [solve_genetic(known, budget, seed=s) for s in range(options.seeds)]
        spent["genetic"] += time.perf_counter() - began
        fits = np.flatnonzero(outcomes.cost <= budget)
        if len(fits):
            found["walk"] = [walked[fits[outcomes.accuracy[fits].argmax()]]]
        for name, thresholds in found.items():
            reached = [evaluate(known, t) for t in thresholds]
            allowed = [
                (float(o.accuracy), t) for o, t in zip(reached, thresholds, strict=True) if o.cost <= budget + 1e-9
            ]
            top = max(allowed, key=lambda pair: pair[0], default=None)
            best[name].append(100 * top[0] if top else np.nan)
            held_best[name].append(100 * float(evaluate(held, top[1]).accuracy) if top else np.nan)
    ours = np.array(best["ours"])
    rows, value = [], {}
    for name in ("genetic", "walk"):
        gap = np.array(best[name]) - ours
        held_gap = np.array(held_best[name]) - np.array(held_best["ours"])
        value[name] = {
            "largest_lead_over_ours": float(np.nanmax(gap)),
            "mean_lead_over_ours": float(np.nanmean(gap)),
            "held_out_mean_lead": float(np.nanmean(held_gap)),
            "held_out_largest_lead": float(np.nanmax(held_gap)),
            "budgets_with_a_policy": int(np.isfinite(gap).sum()),
        }
        v = value[name]
        cells = [v["largest_lead_over_ours"], v["mean_lead_over_ours"], v["held_out_mean_lead"]]
        rows.append((name, *(f"{c:+.4f}" for c in cells), str(v["budgets_with_a_policy"])))
    brute = gap_to_brute_force(options.seed)
    converged: list[float] = []
    middle = float(budgets[len(budgets) // 2])
    solve_genetic(known, middle, seed=0, on_generation=lambda _, top: converged.append(100 * top))
    last_gain = 1 + converged.index(converged[-1])
    title = (
        f"{options.images} images, {options.budgets} budgets: points of accuracy ahead of ours. "
        f"Whole frontier: {seconds:.2f} s, {len(line.policies)} policies, resolution {line.resolution:.2%}. "
        f"Gap to brute force on 2,000 images: {brute['as shipped']:.4f} points. "
        f"The genetic algorithm's last gain at the middle budget: generation {last_gain} of {len(converged)}"
    )
    header = ("solver", "largest lead", "mean lead", "mean lead, held out", "budgets it can meet")
    value |= {
        "seed": options.seed,
        "genetic_seeds": options.seeds,
        "images": options.images,
        "budgets": options.budgets,
        "frontier_seconds": seconds,
        "resolution": line.resolution,
        "seconds_per_budget": {
            k: s / len(budgets) / (options.seeds if k == "genetic" else 1) for k, s in spent.items()
        },
        "gap_to_brute_force": brute,
        "genetic_convergence": {"budget": middle, "best_accuracy_by_generation": converged},
        "accuracy": {name: [None if np.isnan(a) else a for a in values] for name, values in best.items()},
    }
    finish("solvers", title, header, rows, value)


if __name__ == "__main__":
    main()
