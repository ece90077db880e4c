"""What a calibrated policy's budget is worth on corrupted images: accuracy, mean cost, and what the monitor says.

Gaussian noise, Gaussian blur and lower contrast at the five strengths of CIFAR-10-C (Hendrycks and Dietterich, ICLR
2019). The packaged cascade and images, or those of a folder that `tokensworth tune` wrote:

python benchmarks/shift.py [--tuned FOLDER --data TEST.parquet --limit 1000]
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from common import finish
from tokensworth.cascade import Cascade
from tokensworth.data.packaged import packaged_folder, packaged_images
from tokensworth.data.sources import open_images
from tokensworth.data.tensors import load_tensors
from tokensworth.exits import Macs, Policy, solve
from tokensworth.jobs.answers import answers
from tokensworth.run.runner import Runner
from tokensworth.train.precision import native_bf16

STRENGTHS = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
}
# The packaged policy's budget, as a share of the cost of all stages.
BUDGET = 0.35


def corrupt(images: Tensor, kind: str, strength: float) -> Tensor:
    """uint8 (N, C, S, S) to the same, corrupted; noise is of seed 0."""
    values = images.float() / 255
    if kind == "noise":
        values = values + strength * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    elif kind == "blur":
        values = gaussian_blur(values, [7, 7], [strength, strength])
    else:
        mean = values.mean(dim=(2, 3), keepdim=True)
        values = (values - mean) * strength + mean
    return (values.clamp(0, 1) * 255).round().byte()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--limit", type=int, default=1000)
    options = parser.parse_args()
    if options.tuned:
        cascade, policy = Cascade.from_pretrained(options.tuned / "model"), Policy.load(options.tuned / "policy.json")
        found, dtype = open_images(options.data, "test"), torch.bfloat16 if native_bf16(torch.device("cpu")) else None
    else:
        cascade, dtype = Cascade.from_pretrained(packaged_folder()), None
        known = answers(cascade, packaged_images("calibration"))
        policy, found = solve(known, Macs(BUDGET * known.exit_costs[-1])), packaged_images("test")
    found = found.select(np.arange(min(options.limit, len(found))))
    images = load_tensors(found, cascade.config.image_size).images
    rows, points = [], []
    for kind, strength in [("none", 0.0), *((kind, s) for kind, all_ in STRENGTHS.items() for s in all_)]:
        # One per corruption, as if a service had seen nothing else.
        runner = Runner(cascade, policy, dtype=dtype)
        seen = images if kind == "none" else corrupt(images, kind, strength)
        results = list(runner.predict(seen))
        right = float(np.mean([r.label == y for r, y in zip(results, found.labels, strict=True)]))
        everything = Runner(cascade, dtype=dtype).predict(seen)
        best = float(np.mean([r.label == y for r, y in zip(everything, found.labels, strict=True)]))
        drift = runner.drift
        point = {"kind": kind, "strength": strength, "accuracy": right, "all_stages": best}
        points.append({**point, "cost": drift.observed / drift.expected, "drifting": drift.drifting})
        cells = (f"{100 * right:.2f}", f"{100 * best:.2f}", f"{drift.observed / drift.expected:.3f}x")
        rows.append(
            (kind, f"{strength:g}" if strength else "", *cells, "drifting" if drift.drifting else "as promised")
        )
    header = ("corruption", "strength", "accuracy %", "all stages %", "cost over promise", "the monitor")
    title = f"{options.tuned or 'packaged cascade'}: {policy.goal}, {len(found)} test images"
    name = "shift_tuned" if options.tuned else "shift"
    finish(name, title, header, rows, {"seed": 0, "policy": policy.goal, "images": len(found), "points": points})


if __name__ == "__main__":
    main()
