"""ToSA's claim beside the exact count: MACs of DeiT-Tiny with ToSA at layers 2, 4, 6, 8, 10.

python benchmarks/tosa_macs.py
"""

import warnings
from typing import Any

import timm

from common import finish
from tokensworth.measure.describe import describe
from tokensworth.tokens import ToSA, adapt, restore

NAME = "deit_tiny_patch16_224"
LAYERS = (2, 4, 6, 8, 10)
SCOPES: tuple[Any, ...] = ("layer", "per_head")
CASES = [(scope, rows, keep) for scope in SCOPES for rows in (0, 9) for keep in (0.8, 0.5, 0.3)]


def main() -> None:
    warnings.filterwarnings("ignore", message=".*not fitted.*")
    model = timm.create_model(NAME).eval()
    plain = describe(model).macs
    rows, found = [], []
    for scope, scored, keep in CASES:
        adapt(model, ToSA(layers=LAYERS, keep=keep, scope=scope, rows=scored))
        cost = describe(model)
        restore(model)
        selectors = sum(layer.selector_macs or 0 for layer in cost.layers)
        thinned = plain - (cost.macs - selectors)
        found.append(
            {
                "scope": scope,
                "rows": scored,
                "keep": keep,
                "macs": cost.macs,
                "selectors": selectors,
                "saved": cost.saved,
            }
        )
        rows.append(
            (
                scope,
                f"{scored or 'all'}",
                f"{keep}",
                f"{thinned / 1e6:.1f}",
                f"{selectors / 1e6:.1f}",
                f"{cost.macs / 1e9:.3f}",
                f"{100 * cost.saved:.1f}",
            )
        )
    title = f"{NAME}, {plain / 1e9:.4f} G MACs; ToSA at layers {', '.join(map(str, LAYERS))}"
    header = ("scope", "scored rows", "keep", "saved in layers, M", "selectors, M", "MACs, G", "saved in all, %")
    finish("tosa_macs", title, header, rows, {"dense_macs": plain, "cases": found})


if __name__ == "__main__":
    main()
