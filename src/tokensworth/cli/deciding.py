"""`tokensworth calibrate | solve | eval`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokensworth.cli.options import (
    Data,
    Device,
    HeldOut,
    Json,
    Model,
    Seed,
    Split,
    Threads,
    answer,
    load_images,
    load_model,
    progress,
    set_threads,
)


def calibrate(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Calibration file to write.")],
    split: Split = "train",
    held_out: HeldOut = 0,
    score: Annotated[str, typer.Option(help="confidence, entropy, margin, random or learned.")] = "confidence",
    temperature: Annotated[bool, typer.Option(help="Fit one temperature per exit.")] = False,
    time: Annotated[bool, typer.Option(help="Measure milliseconds per stage as costs, instead of MACs.")] = False,
    batch_size: Annotated[int, typer.Option(help="Batch of the time measurement.")] = 64,
    seed: Seed = 0,
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Run every exit on labelled images that were not trained on, and keep what the solvers need."""
    from rich.table import Table

    from tokensworth.jobs.answers import answers, timed_costs

    set_threads(threads)
    cascade, images = load_model(model, device), load_images(data, split, held_out, seed)
    with progress("calibrating", len(images), as_json) as update:
        calibration = answers(cascade, images, score=score, temperature=temperature, on_batch=update)
    if time:
        calibration = timed_costs(cascade, images, calibration, batch_size)
    calibration.save(out)
    errors = calibration.calibration_errors()
    table = Table("exit", "accuracy %", "calibration error", "temperature", f"cost of leaving, {calibration.unit}")
    for i, (right, error) in enumerate(zip(calibration.anytime, errors, strict=True)):
        cells = (f"{100 * right:.2f}", f"{error:.4f}", f"{calibration.temperatures[i]:.3f}")
        table.add_row(str(i + 1), *cells, f"{calibration.exit_costs[i]:.6g}")
    value = {
        "images": len(calibration.labels),
        "accuracy": calibration.anytime,
        "calibration_error": errors,
        "temperatures": calibration.temperatures,
        "exit_costs": calibration.exit_costs.tolist(),
        "unit": calibration.unit,
        "out": str(out),
    }
    answer(value, as_json, table)


def solve(
    calibration: Annotated[Path, typer.Option(help="File that `tokensworth calibrate` wrote.")],
    out: Annotated[Path, typer.Option(help="Policy file to write; with --frontier, a list of policies.")],
    budget: Annotated[str, typer.Option(help="Mean MACs per image, as 12M or 1.2G.")] = "",
    millis: Annotated[float, typer.Option(help="Mean milliseconds per image.")] = 0.0,
    target: Annotated[float, typer.Option(help="Required accuracy as a share; the cheapest policy wins.")] = 0.0,
    frontier: Annotated[bool, typer.Option(help="Solve the whole frontier.")] = False,
    solver: Annotated[str, typer.Option(help="exact, genetic or walk.")] = "exact",
    cost_confidence: Annotated[float, typer.Option(help="Bound the cost at this confidence, as 0.95.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the genetic algorithm.")] = 0,
    as_json: Json = False,
) -> None:
    """Find the thresholds for a budget or a required accuracy, or the whole frontier."""
    from dataclasses import asdict

    from tokensworth.exits import Accuracy, Calibration, Macs, Millis
    from tokensworth.exits import frontier as whole_frontier
    from tokensworth.exits import solve as solve_one
    from tokensworth.files import write_json

    known = Calibration.load(calibration)
    if frontier:
        line = whole_frontier(known, cost_confidence=cost_confidence)
        rows = [asdict(p) for p in line.policies]
        write_json(out, {"resolution": line.resolution, "policies": rows})
        answer(
            {"resolution": line.resolution, "policies": rows},
            as_json,
            _policies("frontier", rows[:: max(1, len(rows) // 20)]),
        )
        return
    wanted = Macs(budget) if budget else Millis(millis) if millis else None
    with progress("solving", 200 if solver == "genetic" else None, as_json) as update:
        policy = solve_one(
            known,
            wanted,
            target=Accuracy(target) if target else None,
            solver=solver,  # type: ignore[arg-type]
            cost_confidence=cost_confidence,
            seed=seed,
            on_generation=lambda n, best: update(n, note=f"best {best:.4f}"),
        )
    policy.save(out)
    answer(asdict(policy), as_json, _policies(policy.goal, [asdict(policy)]))


def _policies(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    from tokensworth.exits.goals import show_cost

    table = Table("thresholds", "calibration accuracy %", "mean cost", "leaving at each exit %", title=title)
    for row in rows:
        thresholds = ", ".join(f"{t:.4f}" for t in row["thresholds"])
        shares = " / ".join(f"{100 * s:.0f}" for s in row["shares"])
        table.add_row(thresholds, f"{100 * row['accuracy']:.2f}", show_cost(row["cost"], row["unit"]), shares)
    return table


def evaluate(
    model: Model,
    data: Data,
    policy: Annotated[list[Path], typer.Option(help="Policy to evaluate; may be repeated.")] = [],  # noqa: B006
    split: Split = "test",
    held_out: HeldOut = 0,
    seed: Seed = 0,
    device: Device = "",
    as_json: Json = False,
) -> None:
    """Accuracy and cost on labelled images: of each exit alone, and under policies."""
    from dataclasses import asdict, replace

    from tokensworth.exits.policy import Policy
    from tokensworth.jobs.answers import answers
    from tokensworth.jobs.study import cascade_point
    from tokensworth.report.tables import evaluation_table

    cascade, images = load_model(model, device), load_images(data, split, held_out, seed)
    policies = [Policy.load(p) for p in policy]
    with progress("evaluating", len(images), as_json) as update:
        known = answers(cascade, images, on_batch=update)
        everything = Policy.run_all(cascade.num_stages)
        points = [cascade_point(f"exit {i + 1} alone", known, everything.up_to(i)) for i in range(cascade.num_stages)]
        for path, p in zip(policy, policies, strict=True):
            p.check(cascade.num_stages, known.model)
            scored = known
            if p.score != known.score or any(t != 1 for t in p.temperatures):
                scored = answers(cascade, images, score=p.score, temperature=p.temperatures or False, rule=p.rule)
            points.append(replace(cascade_point(str(path), scored, p), name=str(path)))
    answer({"images": len(images), "points": [asdict(p) for p in points]}, as_json, evaluation_table(points))


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    app.command(
        epilog="Example: tokensworth calibrate --model packaged --data packaged:calibration --out cal.safetensors"
    )(calibrate)
    app.command(epilog="Example: tokensworth solve --calibration cal.safetensors --budget 12M --out policy.json")(solve)
    app.command("eval", epilog="Example: tokensworth eval --model packaged --data packaged:test --policy policy.json")(
        evaluate
    )
