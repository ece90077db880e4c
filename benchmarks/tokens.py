"""Every token method on DeiT-Tiny at 224 px, over the dense model: time at batch 1 and 32 beside MACs.

python benchmarks/tokens.py [--compiled]

Weights are random, which times do not depend on, but for SViT: its gates are set to pass about the wanted share by.
With --compiled, the dense model and ToMe are also compared with both compiled (torch.compile, a minute each).
"""

import argparse
from typing import Any

import timm
import torch
from torch import nn

from common import finish
from tokensworth.exits.goals import show_cost
from tokensworth.measure.macs import count_macs
from tokensworth.measure.timing import alternate
from tokensworth.tokens import Method, adapt, method_from_dict
from tokensworth.tokens.method import adapted_vits

SIDES: dict[str, dict[str, Any]] = {
    "ToMe, r = 8": {"name": "tome", "r": 8},
    "ToMe, r = 13": {"name": "tome", "r": 13},
    "ToMe, r = 16": {"name": "tome", "r": 16},
    "ToMe, r = 13, unmerged": {"name": "tome", "r": 13, "unmerge": True},
    "PiToMe, keep 0.925": {"name": "pitome", "keep": 0.925},
    "Top-K, keep 0.7": {"name": "topk", "keep": 0.7},
    "EViT, keep 0.7": {"name": "evit", "keep": 0.7},
    "DynamicViT, keep 0.7": {"name": "dynamicvit", "keep": 0.7},
    "VTC-LFC, keep 0.7": {"name": "vtc_lfc", "keep": 0.7},
    "STAR, keep 0.7": {"name": "star", "keep": 0.7},
    "random, keep 0.7": {"name": "random", "keep": 0.7},
    "SViT, keep 0.7": {"name": "svit", "keep": 0.7},
    "ToSA, keep 0.5": {"name": "tosa", "keep": 0.5},
}
COMPILED = ("ToMe, r = 8", "ToMe, r = 13", "ToMe, r = 16")


def make(method: Method | None) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224").eval()
    return model if method is None else adapt(model, method)


@torch.inference_mode()
def set_gates(model: nn.Module, images: torch.Tensor, keep: float) -> None:
    """Gives SViT gates that tell tokens apart, and biases at which so many of the tokens of some images take part."""
    vit, added = adapted_vits(model)[0]
    for layer, gate in added.gates.items():  # type: ignore[union-attr,operator]
        nn.init.normal_(gate.fc2.weight)

        def fit(_: nn.Module, args: tuple[torch.Tensor, ...], gate: Any = gate) -> None:
            says = gate(args[0])
            gate.fc2.bias[0] += (says[..., 1] - says[..., 0])[:, 1:].flatten().quantile(keep)

        handle = vit.blocks[int(layer) - 1].register_forward_pre_hook(fit)
        model(images)
        handle.remove()


def compare(sides: dict[str, nn.Module], batch: int, repeats: int, images: torch.Tensor) -> dict[str, dict[str, float]]:
    """Milliseconds per batch, MACs per image, and both ratios to the dense model."""
    x = images[:batch]
    with torch.inference_mode():
        calls = {name: (lambda m=m: m(x)) for name, m in sides.items()}
        times = alternate(calls, repeats, warmup=2, lead=int(batch == 1))
        macs = {name: count_macs(lambda m=m: [m(i) for i in images[:8].split(1)]) / 8 for name, m in sides.items()}
    out = {}
    for name, taken in times.items():
        time_ratio, macs_ratio = times["dense"].median / taken.median, macs["dense"] / macs[name]
        out[name] = {
            "millis": 1000 * taken.median,
            "macs": macs[name],
            "macs_ratio": macs_ratio,
            "time_ratio": time_ratio,
            "of_macs": time_ratio / macs_ratio,
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    images = torch.randn(32, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    sides: dict[str, nn.Module] = {"dense": make(None)}
    for name, values in SIDES.items():
        sides[name] = make(method_from_dict(values))
        if values["name"] == "svit":
            set_gates(sides[name], images[:8], values["keep"])
    found: dict[str, dict[int, dict[str, dict[str, float]]]] = {"eager": {}, "compiled": {}}
    for batch in (1, 32):
        found["eager"][batch] = compare(sides, batch, options.repeats * (4 if batch == 1 else 1), images)
    if options.compiled:
        for batch in (1, 32):
            torch._dynamo.reset()
            few = {name: sides[name] for name in ("dense", *COMPILED)}
            macs = {name: found["eager"][batch][name]["macs_ratio"] for name in few}
            with torch.inference_mode():
                calls = {name: torch.compile(m, fullgraph=True) for name, m in few.items()}
                x = images[:batch]
                rounds = options.repeats * (4 if batch == 1 else 1)
                taken = alternate(
                    {n: (lambda c=c, x=x: c(x)) for n, c in calls.items()}, rounds, warmup=3, lead=int(batch == 1)
                )
            found["compiled"][batch] = {}
            for name, t in taken.items():
                ratio = taken["dense"].median / t.median
                entry = {"millis": 1000 * t.median, "macs_ratio": macs[name], "time_ratio": ratio}
                found["compiled"][batch][name] = entry | {"of_macs": ratio / macs[name]}
    rows = []
    for mode, batches in found.items():
        for name in batches.get(1, {}):
            one, many = batches[1][name], batches[32][name]
            rows.append(
                (
                    name if mode == "eager" else f"{name}, compiled",
                    show_cost(found["eager"][1][name]["macs"], "MACs"),
                    f"{one['macs_ratio']:.2f}x",
                    f"{one['millis']:.1f}",
                    f"{one['time_ratio']:.2f}x",
                    f"{many['millis']:.0f}",
                    f"{many['time_ratio']:.2f}x",
                    f"{many['of_macs']:.2f}",
                )
            )
    header = ("method", "MACs", "MACs ratio", "ms, batch 1", "ratio", "ms, batch 32", "ratio", "of MACs ratio")
    value = {"repeats": options.repeats, "seed": 0, "found": found}
    finish("tokens", "DeiT-Tiny, 224 px, dense over each method", header, rows, value)


if __name__ == "__main__":
    main()
