"""Draws the figures of `docs/` from `results/`: of `cifar10.py`, of `tosa_cifar10.py`, and of `tokensworth compare`."""

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


def compare_figure() -> None:
    """Accuracy against MACs and time, both over the plain model's; above training-free, below fine-tuned."""
    found = json.loads((RESULTS / "compare.json").read_text())
    rows = found["rows"]
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows[1:]:
        curves.setdefault(row["curve"], []).append(row)
    methods = list(dict.fromkeys(curve.removesuffix(", tuned") for curve in curves if not shared(curve)))
    figure, panels = plt.subplots(2, 2, figsize=(11, 8.5), sharex="col", sharey=True, constrained_layout=True)
    for tuned, line in enumerate(panels):
        for axes, ratio in zip(line, ("macs_ratio", "time_ratio"), strict=True):
            for curve, points in curves.items():
                of = sorted(points, key=lambda p: 1 / p[ratio])
                x, y = [1 / p[ratio] for p in of], [100 * p["accuracy"] for p in of]
                if shared(curve):
                    static = not curve.startswith("cascade")
                    if static:
                        axes.plot(x, y, "s", color=STATIC, label="static models")
                    else:
                        axes.plot(x, y, "o-", color="black", linewidth=2, label=curve)
                elif curve.endswith(", tuned") == bool(tuned):
                    name = curve.removesuffix(", tuned")
                    color = f"C{methods.index(name)}" if methods.index(name) < 10 else EXIT
                    axes.plot(x, y, ".-", color=color, label=name)
            axes.plot([1], [100 * rows[0]["accuracy"]], "D", color=STATIC, markersize=8, label="plain model")
        line[0].set_ylabel(f"{'fine-tuned' if tuned else 'training-free'}: test accuracy, %")
    panels[1][0].set_xlabel("MACs per image, of the plain model's")
    threads = found["machine"]["threads"]
    panels[1][1].set_xlabel(f"time, of the plain model's, batch {found['batch']}, {threads} threads")
    panels[0][0].set_ylim(bottom=74)
    handles = {h.get_label(): h for axes in panels.flat for h in axes.get_lines()}
    figure.legend(handles.values(), handles, loc="outside lower center", ncol=7, frameon=False)
    save(figure, "compare.png")


def shared(curve: str) -> bool:
    """Whether a line belongs into both panels: cascades and plainly trained models."""
    return curve.startswith("cascade") or curve == "trained, plain"


def main() -> None:
    cascade_figure()
    tosa_figure()
    compare_figure()


if __name__ == "__main__":
    main()
