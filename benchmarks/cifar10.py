"""The published CIFAR-10 figures: the cascade against its static references on the full test split.

Policies are chosen on images held out of training; the test split is only for reporting. Speed is measured in
one process, sides alternating, at batch 64 and 1. Ablations trained alike are tabled where they are given.

    python benchmarks/cifar10.py --train TRAIN --test TEST [--ablations RUNS]

TRAIN and TEST are CIFAR-10 as Parquet files, or `cifar10`; models are the packaged ones unless named.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common import finish
from tokensworth.cascade import Cascade
from tokensworth.data.packaged import packaged_folder, packaged_statics
from tokensworth.data.sources import ImageSet, hold_out, open_images
from tokensworth.exits import Accuracy, Macs, solve
from tokensworth.exits.goals import show_cost
from tokensworth.jobs.answers import answers
from tokensworth.jobs.benching import bench_models
from tokensworth.jobs.study import Point, cascade_point, load_statics, run_study
from tokensworth.report.tables import rich_table

HELD_OUT, SEED = 5000, 0


def ablations(folder: Path, held: ImageSet, test: ImageSet) -> list[tuple[str, ...]]:
    """Rows for models that were trained alike with the reuses on and off."""
    rows = []
    for name in ("reuse_off", "reuse_feature", "reuse_relation", "reuse_both"):
        if not (folder / name / "model.safetensors").exists():
            continue
        model = Cascade.from_pretrained(folder / name)
        known, seen = answers(model, held), answers(model, test)
        policy = solve(known, Macs(float(known.exit_costs[-1]) * 0.4))
        point = cascade_point(name, seen, policy)
        epochs = len(json.loads((folder / name / "train.json").read_text())["history"])
        exits = " / ".join(f"{100 * a:.2f}" for a in seen.anytime)
        rows.append((name, str(epochs), exits, f"{100 * point.accuracy:.2f}", show_cost(point.macs, "MACs")))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--model", type=Path, default=packaged_folder())
    parser.add_argument("--static", type=Path, action="append", default=[])
    parser.add_argument(
        "--ablations", type=Path, help="folder with reuse_off, reuse_feature, reuse_relation, reuse_both"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cascade = Cascade.from_pretrained(options.model)
    statics = load_statics(options.static or list(packaged_statics().values()))
    train = open_images(options.train, "train")
    held = train.select(hold_out(len(train), HELD_OUT, SEED)[1])
    test = open_images(options.test, "test")
    known = answers(cascade, held)
    # The wanted accuracy is the largest static model's, as known from the calibration images alone.
    largest = max(statics, key=lambda s: s.config.grids[0])
    wanted = answers(largest, held).anytime[0]
    policy = solve(known, target=Accuracy(min(wanted, max(known.anytime))))
    study = run_study(cascade, known, test, statics, extra=[policy], repeats=options.repeats)
    matched, static = study.timed[0], max(study.statics, key=lambda p: p.macs)
    on_curve = study.at_accuracy(static.accuracy)
    timing = bench_models(cascade, policy, statics, test, repeats=options.repeats)
    rows = [_row(p, timing) for p in (*study.exits, *study.statics, matched)]
    header = ("setting", "accuracy %", "95 %", "MACs/image", "images/s, batch 64", "images/s, batch 1")
    title = "CIFAR-10 test split"
    print(
        f"policy at the largest static model's accuracy on the calibration images: {100 * matched.accuracy:.2f} % "
        f"against {100 * static.accuracy:.2f} % static on the test split, {static.macs / matched.macs:.2f}x fewer MACs"
    )
    if on_curve:
        ratio = static.macs / on_curve.macs
        print(f"cheapest point of the frontier at least as accurate on the test split: {ratio:.2f}x fewer MACs")
    table = ablations(options.ablations, held, test) if options.ablations else []
    if table:
        from rich.console import Console

        names = ("trained alike", "epochs", "accuracy of each exit %", "at 40 % of its MACs %", "MACs/image")
        Console(width=140).print(rich_table("reuse on and off", names, table))
    value = {
        "seed": SEED,
        "calibration_images": len(held),
        "test_images": len(test),
        "exit_accuracy": study.test.anytime,
        "static": [{"name": p.name, "accuracy": p.accuracy, "macs": p.macs} for p in study.statics],
        "matched": {"accuracy": matched.accuracy, "macs": matched.macs, "thresholds": policy.thresholds},
        "macs_ratio_matched": static.macs / matched.macs,
        "macs_ratio_on_test_curve": static.macs / on_curve.macs if on_curve else None,
        "calibration_error": known.calibration_errors(),
        "bench": timing,
        "study": study.to_dict(),
        "ablations": table,
    }
    finish("cifar10", title, header, rows, value)


def _row(point: Point, timing: dict[str, Any]) -> tuple[str, ...]:
    side = timing["sides"].get(point.name if point.name.startswith("static") else "cascade" if point.rate else "")
    if point.name == "exit 3":
        side = timing["sides"]["never leaves early"]
    rates = (f"{side['rate']:.0f}", f"{side['rate_single']:.0f}") if side else ("-", "-")
    interval = f"{100 * point.low:.2f} to {100 * point.high:.2f}"
    return (point.name, f"{100 * point.accuracy:.2f}", interval, show_cost(point.macs, "MACs"), *rates)


if __name__ == "__main__":
    main()
