"""ToSA's saving as time: DeiT-Tiny and DINOv2-small at 224 and 448 pixels, scope `layer`, selectors included.

All sides of a model alternate in one process, float32, random weights (time does not depend on them). The judge is
the share of time saved over the share of MACs saved; above it, what one selector costs beside the layer it serves.

    python benchmarks/tosa.py [--models deit_tiny_patch16_224 ...] [--sizes 224 448]
"""

import argparse
import copy
import warnings
from typing import Any

import timm
import torch

from common import finish
from tokensworth.measure.describe import describe
from tokensworth.measure.timing import alternate
from tokensworth.tokens import ToSA, adapt, set_keep
from tokensworth.tokens.tosa import tosa_of

MODELS = ("deit_tiny_patch16_224", "vit_small_patch14_dinov2")
KEEPS = (0.8, 0.5)


def selector_share(model: Any, images: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Seconds of one selector with its scoring and choice, and of the layer it serves, on the batch."""
    layer: Any = tosa_of(model)[0].layers["2"]
    block, before = copy.deepcopy(model.blocks[2]), model.blocks[0].attn
    tokens = model.num_prefix_tokens + layer.grid[0] * layer.grid[1]
    x = torch.randn(len(images), tokens, model.embed_dim)
    # As the layer has them: views of one projection.
    q, k, _ = torch.randn(len(images), tokens, 3, before.num_heads, before.head_dim).permute(2, 0, 3, 1, 4)
    sides = {"selector": lambda: layer.observe(before, q, k, None), "layer": lambda: block(x)}
    # Layer 3 serves layer 4; without that, it is the plain block.
    block.attn.__class__ = type(block.attn).__mro__[2]
    times = alternate(sides, repeats)
    return times["selector"].median, times["layer"].median


def one_model(name: str, size: int, batch: int, repeats: int) -> list[dict[str, Any]]:
    """A model at one size and batch: dense and at every keep ratio, alternating."""
    torch.manual_seed(0)
    dense = timm.create_model(name, img_size=size).eval()
    thinned = adapt(copy.deepcopy(dense), ToSA(layers=(2, 4, 6, 8, 10), keep=KEEPS[0]))
    images = torch.randn(batch, 3, size, size)

    def run(keep: float) -> Any:
        set_keep(thinned, keep)
        return thinned(images)

    sides: dict[str, Any] = {"dense": lambda: dense(images), **{f"{k}": (lambda k=k: run(k)) for k in KEEPS}}
    with torch.inference_mode():
        times = alternate(sides, repeats)
        selector, layer = selector_share(thinned, images, repeats)
    out = []
    for keep in KEEPS:
        set_keep(thinned, keep)
        cost = describe(thinned)
        saved_time = 1 - times[f"{keep}"].median / times["dense"].median
        out.append(
            {
                "model": name,
                "size": size,
                "batch": batch,
                "keep": keep,
                "macs": cost.macs,
                "dense_macs": cost.dense_macs,
                "seconds": times[f"{keep}"].seconds,
                "dense_seconds": times["dense"].seconds,
                "saved_macs": cost.saved,
                "saved_time": saved_time,
                "ratio": saved_time / cost.saved,
                "selector_of_layer": selector / layer,
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--sizes", nargs="+", type=int, default=(224, 448))
    parser.add_argument("--batches", nargs="+", type=int, default=(32, 1))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    # Time does not depend on what the selectors learned.
    warnings.filterwarnings("ignore", message=".*not fitted.*")
    found = []
    for name in options.models:
        for size in options.sizes:
            for batch in options.batches:
                repeats = options.repeats if batch > 1 else 6 * options.repeats
                found += one_model(name, size, batch, repeats)
                print(f"{name}, {size} px, batch {batch}: done", flush=True)
    rows = [
        (
            f"{r['model']}, {r['size']} px",
            f"{r['batch']}",
            f"{r['keep']}",
            f"{100 * r['saved_macs']:.1f}",
            f"{100 * r['saved_time']:.1f}",
            f"{r['ratio']:.2f}",
            f"{100 * r['selector_of_layer']:.1f}",
        )
        for r in found
    ]
    header = ("model", "batch", "keep", "MACs saved %", "time saved %", "time over MACs", "selector, % of its layer")
    finish(
        "tosa", "ToSA at layers 2, 4, 6, 8, 10", header, rows, {"seed": 0, "repeats": options.repeats, "runs": found}
    )


if __name__ == "__main__":
    main()
