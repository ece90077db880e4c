"""Draws `docs/frontier.png` and `docs/tosa.png` from what `cifar10.py` and `tosa_cifar10.py` wrote to `results/`."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from common import RESULTS

DOCS = Path(__file__).parent.parent / "docs"
CASCADE, STATIC, EXIT = "#1f6feb", "#d1242f", "#57606a"


def save(figure: Any, name: str) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    DOCS.mkdir(exist_ok=True)
    figure.savefig(DOCS / name, dpi=130)
    print(f"wrote {DOCS / name}")


def cascade_figure() -> None:
    study = json.loads((RESULTS / "cifar10.json").read_text())["study"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
    curve = study["curve"]
    x = [p["macs"] / 1e6 for p in curve]
    left.fill_between(x, [100 * p["low"] for p in curve], [100 * p["high"] for p in curve], color=CASCADE, alpha=0.15)
    left.plot(x, [100 * p["accuracy"] for p in curve], color=CASCADE, label="cascade, 95 % interval")
    statics = study["statics"]
    values = [100 * p["accuracy"] for p in statics]
    left.plot([p["macs"] / 1e6 for p in statics], values, "s-", color=STATIC, label="static models")
    exits = study["exits"]
    left.plot(
        [p["macs"] / 1e6 for p in exits], [100 * p["accuracy"] for p in exits], "D", color=EXIT, label="each exit alone"
    )
    left.set_xlabel("mean million MACs per image")
    left.set_ylabel("accuracy on the CIFAR-10 test split, %")
    left.legend(frameon=False, loc="lower right")
    timed = sorted(study["timed"], key=lambda p: -p["rate"])
    right.plot([1000 / p["rate"] for p in timed], [100 * p["accuracy"] for p in timed], "o-", color=CASCADE)
    right.plot([1000 / p["rate"] for p in statics], values, "s-", color=STATIC)
    right.set_xlabel(f"measured milliseconds per image, batch {study['batch']}, {study['machine']['threads']} threads")
    save(figure, "frontier.png")


def tosa_figure() -> None:
    found = json.loads((RESULTS / "tosa_cifar10.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, constrained_layout=True)
    for (name, points), color in zip(found["frontiers"].items(), (CASCADE, EXIT, "#1a7f37"), strict=False):
        values = [100 * p["accuracy"] for p in points[1:]]
        left.plot([p["macs"] / 1e6 for p in points[1:]], values, "o-", color=color, label=f"ToSA, {name}")
        right.plot([p["millis"] for p in points[1:]], values, "o-", color=color)
    dense = next(iter(found["frontiers"].values()))[0]
    left.plot([dense["macs"] / 1e6], [100 * dense["accuracy"]], "s", color=STATIC, label="dense")
    right.plot([dense["millis"]], [100 * dense["accuracy"]], "s", color=STATIC)
    left.set_xlabel("million MACs per image")
    left.set_ylabel("accuracy on the CIFAR-10 test split, %")
    left.legend(frameon=False, loc="lower right")
    right.set_xlabel(f"measured milliseconds per image, batch {found['batch']}, {found['machine']['threads']} threads")
    save(figure, "tosa.png")


def main() -> None:
    cascade_figure()
    tosa_figure()


if __name__ == "__main__":
    main()
