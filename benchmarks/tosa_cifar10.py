"""ToSA on the 12-layer CIFAR-10 ViT, full test split: fine-tuned with it and without, and over keep ratios.

benchmarks/train_tosa_cifar10.sh TRAIN RUNS
python benchmarks/tosa_cifar10.py --runs RUNS --test TEST
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from common import finish
from tokensworth.cascade import Cascade
from tokensworth.cli.tokens import overlap_table
from tokensworth.data.sources import open_images
from tokensworth.exits.goals import show_cost
from tokensworth.jobs.answers import labelled_batches
from tokensworth.measure.keeps import KeepPoint, keep_frontier
from tokensworth.report.tables import rich_table
from tokensworth.tokens import adapt, restore
from tokensworth.tokens.method import method_of, token_keys
from tokensworth.tokens.overlap import LayerReport, Overlap

KEEPS = (1.0, 0.8, 0.6, 0.5, 0.3)
SEEDS = (0, 1, 2)
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def right_answers(model: Cascade, batches: Batches) -> np.ndarray:
    """Whether each test image is answered rightly, (N,)."""
    return torch.cat([model(x)[-1].argmax(1) == y for x, y in batches]).numpy()


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean of paired differences (N,) and its 95 % interval, in points."""
    mean, half = differences.mean(), 1.96 * differences.std(ddof=1) / np.sqrt(len(differences))
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def with_scope(model: Cascade, scope: str) -> Cascade:
    """The same weights and selectors under another scope."""
    learned = {k: v.clone() for k, v in model.state_dict().items() if k in token_keys(model)}
    method = method_of(model)
    assert method is not None
    restore(model)
    adapt(model, replace(method, scope=scope))  # type: ignore[type-var]
    model.load_state_dict(learned, strict=False)
    return model.eval()


def keep_rows(name: str, scope: str, points: list[KeepPoint]) -> list[tuple[str, ...]]:
    plain = points[0]
    return [
        (
            name,
            "dense" if p.keep is None else scope,
            "" if p.keep is None else f"{p.keep}",
            f"{100 * (p.accuracy or 0):.2f}",
            show_cost(p.macs, "MACs"),
            f"{100 * (1 - p.macs / plain.macs):.1f}",
            f"{p.millis:.3f}",
            f"{100 * (1 - p.millis / plain.millis):.1f}",
        )
        for p in points
    ]


def layer_reports(path: Path) -> list[LayerReport]:
    """The fitting's report, as it was written."""

    def entry(values: dict[str, Any]) -> LayerReport:
        overlaps = {k: Overlap(tuple(v["per_head"]), v["layer"]) for k, v in values.items() if isinstance(v, dict)}
        return LayerReport(**{**values, **overlaps})

    return [entry(values) for values in json.loads(path.read_text())["report"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    runs, test = options.runs, open_images(options.test, "test")
    base = Cascade.from_pretrained(runs / "vit")
    batches = list(labelled_batches(test, base.config))
    console = Console(width=140)
    console.print(overlap_table(layer_reports(runs / "vit_fitted" / "fit.json"), 0.5))

    differences, pairs, rows = [], [], []
    for seed in SEEDS:
        folders = (runs / f"vit_dense_{seed}", runs / f"vit_tosa_{seed}")
        if not all((folder / "train.json").exists() for folder in folders):
            continue
        dense, thinned = (right_answers(Cascade.from_pretrained(folder), batches) for folder in folders)
        differences.append(thinned.astype(float) - dense)
        mean, low, high = interval(differences[-1])
        pairs.append({"seed": seed, "dense": dense.mean(), "tosa": thinned.mean(), "interval": (low, high)})
        cells = (f"{100 * dense.mean():.2f}", f"{100 * thinned.mean():.2f}")
        rows.append((f"{seed}", *cells, f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}"))
    together = interval(np.mean(differences, axis=0)) if differences else None
    if together:
        mean, low, high = together
        rows.append(("all", "", "", f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}"))
        before = 100 * right_answers(base, batches).mean()
        title = f"fine-tuned alike, {len(test)} test images; dense before that {before:.2f} %"
        header = ("seed", "dense %", "ToSA, keep 0.8, %", "difference", "95 % over images")
        console.print(rich_table(title, header, rows))

    frontiers = {}
    fitted = Cascade.from_pretrained(runs / "vit_fitted")
    table = []
    for scope in ("layer", "per_head"):
        points = keep_frontier(
            with_scope(fitted, scope), batches, KEEPS, batch_size=options.batch, repeats=options.repeats
        )
        frontiers[f"fitted, {scope}"] = points
        table += keep_rows("selectors fitted", scope, points)
    if (runs / "vit_tosa_0" / "train.json").exists():
        tuned = Cascade.from_pretrained(runs / "vit_tosa_0")
        points = keep_frontier(tuned, batches, KEEPS, batch_size=options.batch, repeats=options.repeats)
        frontiers["fine-tuned at 0.8, layer"] = points
        table += keep_rows("and fine-tuned at 0.8", "layer", points)
    header = ("model", "scope", "keep", "accuracy %", "MACs", "saved %", f"ms/image, batch {options.batch}", "saved %")
    value = {
        "test_images": len(test),
        "pairs": pairs,
        "together": together,
        "frontiers": {name: [asdict(p) for p in points] for name, points in frontiers.items()},
        "batch": options.batch,
        "repeats": options.repeats,
    }
    finish("tosa_cifar10", "12-layer ViT, CIFAR-10, ToSA at layers 2, 4, 6, 8, 10", header, table, value)


if __name__ == "__main__":
    main()
