"""What `benchmarks/tune_cifar10.sh` found, as the tables of docs/tune.md; writes `results/tune.json`.

python benchmarks/tune_table.py --runs RUNS
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS
from tokensworth.files import write_json

NAMES = ("heads", "finetuned")
KEPT = ("images", "goal", "heads", "grids", "lists", "rules", "precision", "seed", "machine", "seconds")


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a run's record: no paths, no frontier of hundreds of policies."""
    study = record["study"]
    points = {name: study[name] for name in ("timed", "statics", "exits")}
    for group in points.values():
        for point in group:
            point.pop("policy", None)
    study["everything"].pop("policy", None)
    curve = [{k: point[k] for k in ("accuracy", "macs")} for point in study["curve"]]
    kept = {name: record[name] for name in KEPT} | points
    return kept | {"everything": study["everything"], "curve": curve, "batch": study["batch"]}


def print_table(name: str, run: dict[str, Any]) -> None:
    """The cascade for the goal beside the static models, in Markdown."""
    static, goal = run["statics"][-1], run["timed"][0]
    print(f"\n{name}: grids {', '.join(map(str, run['grids']))}, goal: {run['goal']}\n")
    print(f"| | accuracy % | MACs per image | images/s, batch {run['batch']} | MACs x | time x |")
    print("|---|---|---|---|---|---|")
    rows = [*run["statics"], *run["exits"], run["everything"], goal]
    for point in rows:
        times = (f"{point['rate']:.0f}", f"{point['rate'] / static['rate']:.2f}") if point["rate"] else ("", "")
        macs = f"{point['macs'] / 1e9:.3f} G", f"{static['macs'] / point['macs']:.2f}"
        print(f"| {point['name']} | {100 * point['accuracy']:.2f} | {macs[0]} | {times[0]} | {macs[1]} | {times[1]} |")
    reached = [point["macs"] for point in run["curve"] if point["accuracy"] >= static["accuracy"]]
    if reached:
        print(f"\ncheapest policy that reaches the static accuracy on the test images: {min(reached) / 1e9:.3f} G MACs")
    print("\n| budget, G MACs | confidence % | learned % | gain in points, 95 % interval |")
    print("|---|---|---|---|")
    for row in run["rules"]:
        gain = f"{100 * row['gain']:+.2f} ({100 * row['low']:+.2f} to {100 * row['high']:+.2f})"
        print(f"| {row['budget'] / 1e9:.2f} | {100 * row['plain']:.2f} | {100 * row['learned']:.2f} | {gain} |")
    machine = run["machine"]
    print(
        f"\n{run['images']['fit']} images to fit on, {run['images']['calibration']} to calibrate, "
        f"{run['images']['test']} test images, {run['precision']}, seed {run['seed']}, {machine['cpu']}, "
        f"{machine['threads']} threads, torch {machine['torch']}; {run['seconds'] / 60:.1f} minutes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the runs are; the kept results where not given")
    options = parser.parse_args()
    path = RESULTS / "tune.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in NAMES if options.runs else ():
        record = options.runs / name / "tune.json"
        if record.exists():
            found[name] = summary(json.loads(record.read_text()))
    if options.runs:
        write_json(path, found)
    for name in NAMES:
        if name in found:
            print_table(name, found[name])


if __name__ == "__main__":
    main()
