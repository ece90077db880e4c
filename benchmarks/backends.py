"""Saved MACs as saved time on every engine, against the static reference on the same engine, at batch 1 and 64.

The packaged cascade at its largest static model's accuracy; a cascade of DeiT-Small's size (grids 7, 10, 14 at 224 px,
random weights) with 60, 25 and 15 % of the images leaving at its exits; and, with --tuned, one that `tokensworth tune`
made. Also the latency of an image that never leaves early. Sides alternate in one process.

python benchmarks/backends.py [--tuned FOLDER --data TEST.parquet] [--repeats 5] [--only packaged,deit,tuned]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import finish
from tokensworth.cascade import Cascade
from tokensworth.data.packaged import packaged_folder, packaged_images, packaged_statics
from tokensworth.data.sources import open_images
from tokensworth.exits import Accuracy, Policy, calibrate, solve
from tokensworth.jobs.answers import all_tensors, answers
from tokensworth.jobs.study import pass_over
from tokensworth.measure.macs import model_macs
from tokensworth.measure.timing import alternate
from tokensworth.run.runner import Runner
from tokensworth.train.precision import native_bf16

ENGINES: dict[str, tuple[str, torch.dtype | None]] = {
    "torch": ("torch", None),
    "torch bf16": ("torch", torch.bfloat16),
    "onnx": ("onnx", None),
    "openvino": ("openvino", None),
    "openvino bf16": ("openvino", torch.bfloat16),
}
SHARES = (0.60, 0.25, 0.15)
_SINGLES = 32


@dataclass(frozen=True)
class Case:
    """A cascade under a policy, the static model that a user would take instead, and images for both."""

    name: str
    cascade: Cascade
    policy: Policy
    static: Cascade
    images: Tensor


def packaged_case() -> Case:
    """At the accuracy of the largest static model on the calibration images."""
    cascade = Cascade.from_pretrained(packaged_folder())
    static = Cascade.from_pretrained(packaged_statics()[8])
    known = answers(cascade, packaged_images("calibration"))
    wanted = answers(static, packaged_images("calibration")).anytime[0]
    policy = solve(known, target=Accuracy(wanted))
    images, _ = all_tensors(packaged_images("test"), cascade.config)
    return Case("packaged cascade", cascade, policy, static, images[:1024])


def deit_case() -> Case:
    """DeiT-Small's sizes; thresholds are quantiles of the scores, so that the wanted shares leave."""
    torch.manual_seed(0)
    cascade = Cascade.from_timm("deit_small_patch16_224", (7, 10, 14), 1000).eval()
    static = Cascade(cascade.config.static(14)).eval()
    images = torch.randn(192, 3, 224, 224)
    parts = [(part, torch.zeros(len(part), dtype=torch.long)) for part in images.split(32)]
    known = calibrate(cascade, parts)
    first = float(np.quantile(known.scores[0], 1 - SHARES[0]))
    stay = known.scores[1][known.scores[0] < first]
    second = float(np.quantile(stay, 1 - SHARES[1] / (1 - SHARES[0])))
    return Case("DeiT-Small size", cascade, Policy((first, second)), static, images)


def tuned_case(folder: Path, data: Path) -> Case:
    """The tuned cascade under its policy, beside the backbone at its largest grid."""
    cascade, policy = Cascade.from_pretrained(folder / "model"), Policy.load(folder / "policy.json")
    static = Cascade(cascade.config.static(cascade.config.grids[-1]))
    static.stages[0].vit.load_state_dict(cascade.stages[-1].vit.state_dict())  # type: ignore[union-attr]
    found = open_images(data, "test")
    images, _ = all_tensors(found.select(np.arange(256)), cascade.config)
    return Case("tuned DINOv2-small", cascade, policy, static, images)


def _singles(runner: Runner, images: Tensor) -> Callable[[], None]:
    def run() -> None:
        for image in images[:_SINGLES].split(1):
            runner.run(image)

    return run


def measure(case: Case, repeats: int) -> list[dict[str, Any]]:
    """A row per engine and batch."""
    config = case.cascade.config
    static_macs = model_macs(case.static, config.image_size, config.in_chans)
    found = []
    engines = {n: e for n, e in ENGINES.items() if e[1] is None or native_bf16(torch.device("cpu"))}
    for name, (backend, dtype) in engines.items():
        runners = {
            "cascade": Runner(case.cascade, case.policy, backend=backend, dtype=dtype),
            "static": Runner(case.static, backend=backend, dtype=dtype),
        }
        never = Policy((2.0,) * len(case.policy.thresholds), case.policy.score, rule=case.policy.rule)
        never_early = Runner(case.cascade, never, backend=backend, dtype=dtype)
        results = list(runners["cascade"].predict(case.images))
        for batch in (64, 1):
            seen = results if batch == 64 else results[:_SINGLES]
            macs = float(np.mean([r.macs for r in seen]))
            make = pass_over if batch == 64 else _singles
            sides = {side: make(runner, case.images) for side, runner in runners.items()}
            if batch == 1:
                sides["never"] = _singles(never_early, case.images)
            times = alternate(sides, repeats)
            images = len(case.images) if batch == 64 else _SINGLES
            millis = {side: 1000 * t.median / images for side, t in times.items()}
            saved, time_saved = 1 - macs / static_macs, 1 - millis["cascade"] / millis["static"]
            found.append(
                {
                    "case": case.name,
                    "engine": name,
                    "batch": batch,
                    "macs_saved": saved,
                    "time_saved": time_saved,
                    "share": time_saved / saved,
                    "millis": millis,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="packaged,deit,tuned")
    options = parser.parse_args()
    wanted = options.only.split(",")
    rows: list[dict[str, Any]] = []
    if "packaged" in wanted:
        rows += measure(packaged_case(), options.repeats)
    if "deit" in wanted:
        rows += measure(deit_case(), options.repeats)
    if "tuned" in wanted and options.tuned:
        rows += measure(tuned_case(options.tuned, options.data), options.repeats)
    table = [
        (
            row["case"],
            row["engine"],
            str(row["batch"]),
            f"{row['millis']['static']:.3f}",
            f"{row['millis']['cascade']:.3f}",
            f"{row['millis']['never']:.3f}" if "never" in row["millis"] else "",
            f"{row['macs_saved']:.1%}",
            f"{row['time_saved']:.1%}",
            f"{row['share']:.2f}",
        )
        for row in rows
    ]
    header = (
        "case",
        "engine",
        "batch",
        "static ms",
        "cascade ms",
        "never early ms",
        "MACs saved",
        "time saved",
        "share",
    )
    title = "time saved over MACs saved, against the static model on the same engine"
    finish("backends", title, header, table, {"seed": 0, "repeats": options.repeats, "rows": rows})


if __name__ == "__main__":
    main()
