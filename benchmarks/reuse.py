"""What reuse costs: stage 3 of DVT on DeiT-Small with both reuses, against the plain timm model.

Both sides alternate in one process, batch 16, float32. Peak memory is compared with the same stage holding
the resized relation maps of all layers at once, as the released code does.
"""

import argparse
from typing import Any

import timm
import torch

from common import finish
from tokensworth.cascade import Cascade
from tokensworth.measure.macs import model_macs, stage_macs
from tokensworth.measure.memory import peak_memory
from tokensworth.measure.timing import alternate

NAME = "deit_small_patch16_224"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    cascade = Cascade.from_timm(NAME, (7, 10, 14), 1000).eval()
    plain = timm.create_model(NAME).eval()
    images = torch.randn(options.batch, 3, 224, 224)
    with torch.inference_mode():
        _, first = cascade.run_stage(0, images, None)
        _, state = cascade.run_stage(1, images, first)
        assert state is not None
        stage: Any = cascade.stages[2]
        sides = {"plain": lambda: plain(images), "stage 3": lambda: cascade.run_stage(2, images, state)}
        times = alternate(sides, options.repeats)
    ratio = times["stage 3"].median / times["plain"].median

    def holding_all_maps() -> None:
        prior = stage.prior(state)
        maps = [stage.reused(layer, prior) for layer in range(stage.depth)]
        stage.reused = lambda layer, _: maps[layer]
        try:
            cascade.run_stage(2, images, state)
        finally:
            del stage.reused

    ours = peak_memory(lambda: cascade.run_stage(2, images, state))
    naive = peak_memory(holding_all_maps)
    macs, plain_macs = stage_macs(cascade)[2], model_macs(plain, 224)
    rows = [
        ("time, ms", f"{1000 * times['plain'].median:.0f}", f"{1000 * times['stage 3'].median:.0f}", f"{ratio:.2f}"),
        ("MACs, G", f"{plain_macs / 1e9:.3f}", f"{macs.total / 1e9:.3f}", f"{macs.total / plain_macs:.2f}"),
        ("peak, MiB (all maps held / ours)", f"{naive / 2**20:.0f}", f"{ours / 2**20:.0f}", f"{ours / naive:.2f}"),
    ]
    title = f"{NAME}, batch {options.batch}, fp32: stage 3 with both reuses against the plain model"
    value = {
        "seed": options.seed,
        "batch": options.batch,
        "repeats": options.repeats,
        "plain_seconds": times["plain"].seconds,
        "stage_seconds": times["stage 3"].seconds,
        "time_ratio": ratio,
        "macs_ratio": macs.total / plain_macs,
        "peak_bytes": ours,
        "peak_bytes_all_maps": naive,
    }
    finish("reuse", title, ("", "plain", "stage 3", "ratio"), rows, value)


if __name__ == "__main__":
    main()
