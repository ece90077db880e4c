"""Draws `docs/frontier.png` from `results/cifar10.json`, which `benchmarks/cifar10.py` writes."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from common import RESULTS

OUT = Path(__file__).parent.parent / "docs" / "frontier.png"
CASCADE, STATIC, EXIT = "#1f6feb", "#d1242f", "#57606a"


def main() -> None:
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
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=130)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
