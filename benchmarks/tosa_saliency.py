"""ToSA on a real pretrained ViT: selectors fitted to photos, and what thinning does to its saliency maps.

Fits selectors for layers 2, 4, 6, 8, 10 of a DINOv2-small fine-tuned for saliency, on 800 photos without labels;
everything is reported on 200 others: overlap of the chosen tokens with those of the true next-layer maps, saliency
maps of the thinned model against the dense one's, and which tokens are kept. Then, with `--tune`, phase 2: selectors
frozen, the backbone learns from the dense model's features and maps on the same 800 photos, and so do the baselines.

    python benchmarks/tosa_saliency.py --weights dinov2_small_saliency.safetensors --data one_per_class.parquet

`--weights` comes from `scripts/convert_saliency.py`; `--data` is any Parquet file or folder of photos.
"""

import argparse
import copy
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from common import finish
from saliency import SaliencyModel
from tokensworth.cli.options import progress
from tokensworth.cli.tokens import overlap_table
from tokensworth.data.sources import hold_out, open_images
from tokensworth.jobs.models import ImageBatches
from tokensworth.report.tables import rich_table
from tokensworth.tokens import ToSA, adapt, restore, set_keep
from tokensworth.tokens.method import token_keys
from tokensworth.tokens.statistics import token_statistics
from tokensworth.tokens.tosa import recording
from tokensworth.train.selectors import STATE_NAME, SelectorRecipe, fit_selectors

SEED, FITTED, HELD_OUT = 0, 800, 200
KEEPS = (0.8, 0.6, 0.5)
TUNING_LR = 3e-5
# The choice of the fitted selector, beside one by the current layer's own column sums over all rows, and a random one.
SIDES = {"selector": {}, "current layer's sums": {"scorer": "current", "rows": 0}, "random": {"scorer": "random"}}


def difference(maps: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Mean absolute error, and the mean over images of the correlation, of saliency maps (N, S, S)."""
    error = float((maps - wanted).abs().mean())
    pairs = zip(maps.flatten(1), wanted.flatten(1), strict=True)
    return error, float(torch.stack([torch.corrcoef(torch.stack(p))[0, 1] for p in pairs]).nanmean())


@torch.inference_mode()
def saliency(model: SaliencyModel, batches: ImageBatches) -> Tensor:
    return torch.cat([model(x) for x, _ in batches])


@torch.inference_mode()
def kept_patches(model: SaliencyModel, batches: ImageBatches) -> dict[int, Tensor]:
    """By layer, True (N, n) where a patch took part."""
    parts: dict[int, list[Tensor]] = {}
    with recording(model) as seen:
        for x, _ in batches:
            model(x)
            for layer, chosen in seen[0].items():
                parts.setdefault(layer, []).append(chosen.mask(257)[:, 1:])
    return {layer: torch.cat(masks) for layer, masks in parts.items()}


def adapted(model: SaliencyModel, learned: dict[str, Tensor], method: ToSA) -> SaliencyModel:
    """A copy with the fitted selectors, under another method."""
    other = restore(copy.deepcopy(model))
    adapt(other, method)
    other.load_state_dict(learned, strict=False)
    return other.eval()


Lesson = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def lessons(teacher: SaliencyModel, batches: ImageBatches) -> list[Lesson]:
    """Each batch with the dense model's features (B, n, D) and saliency (B, S, S)."""
    features = ((image, teacher.features(image)) for image, _ in batches)
    return [(x, wanted, teacher.logits(wanted, x.shape[2]).sigmoid()) for x, wanted in features]


def tune(model: SaliencyModel, taught: list[Lesson], epochs: int, say: Any) -> SaliencyModel:
    """Phase 2 for dense prediction: the backbone learns from the dense model's features and saliency, no labels.

    The keep ratio goes round from batch to batch; selectors, their scores and the head stay as they are.
    """
    weights = [p for name, p in model.backbone.named_parameters() if name not in set(token_keys(model.backbone))]
    optimizer = torch.optim.AdamW(weights, lr=TUNING_LR, weight_decay=0.05)
    total, step = epochs * len(taught), 0
    torch.manual_seed(SEED)
    for _ in range(epochs):
        for image, wanted, shown in taught:
            for group in optimizer.param_groups:
                group["lr"] = TUNING_LR * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / total))
            set_keep(model, KEEPS[step % len(KEEPS)])
            features = model.features(image)
            maps = torch.nn.functional.binary_cross_entropy_with_logits(model.logits(features, image.shape[2]), shown)
            loss = (features - wanted).square().mean() / wanted.var() + maps
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            step += 1
            say(step, total, f"loss {float(loss.detach()):.4f}")
    return model


def compare(model: SaliencyModel, wanted: Tensor, held: ImageBatches) -> list[dict[str, Any]]:
    """Saliency maps of a model at every keep ratio against the dense model's, (N, S, S)."""
    out = []
    for keep in KEEPS:
        set_keep(model, keep)
        torch.manual_seed(SEED)
        error, correlation = difference(saliency(model, held), wanted)
        out.append({"keep": keep, "mae": error, "correlation": correlation})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=SelectorRecipe().epochs)
    parser.add_argument("--tune", type=int, default=0, help="epochs of phase 2")
    parser.add_argument("--scope", choices=("layer", "per_head"), default="layer")
    parser.add_argument("--kernel", type=int, default=ToSA().kernel)
    parser.add_argument("--width", type=int, default=ToSA().width)
    parser.add_argument("--out", type=Path, help="folder of the fitting's state, to go on after a stop")
    options = parser.parse_args()
    from timm.data.transforms_factory import create_transform

    images = open_images(options.data, "train")
    left, held_at = hold_out(len(images), min(HELD_OUT, len(images) // 5), SEED)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    transform: Any = create_transform(224, is_training=False, crop_pct=1.0, mean=mean, std=std)
    batches = ImageBatches(images.select(left[:FITTED]), transform, 16, keep=True)
    held = ImageBatches(images.select(held_at), transform, 20, keep=True)
    model = SaliencyModel.load(options.weights)
    method = ToSA(layers=(2, 4, 6, 8, 10), keep=0.5, kernel=options.kernel, width=options.width)
    adapt(model, method)
    recipe = SelectorRecipe(epochs=options.epochs, seed=SEED)
    resumed = options.out is not None and (options.out / STATE_NAME).exists()
    start = time.perf_counter()
    with progress("fitting", None, False) as update:
        fit = fit_selectors(
            model,
            batches,
            held_out=held,
            recipe=recipe,
            out=options.out,
            on_step=lambda p: update(p.step, p.total, f"divergence {p.kl:.4f}"),
        )
    seconds = time.perf_counter() - start
    console = Console(width=140)
    console.print(overlap_table(fit.report, 0.5))
    learned = {k: v.clone() for k, v in model.state_dict().items() if k in token_keys(model)}
    # One fitting serves both scopes.
    method = replace(method, scope=options.scope)
    teacher = restore(copy.deepcopy(model)).eval()
    salient = saliency(teacher, held)
    taught = lessons(teacher, batches) if options.tune else []
    maps = []
    for side, choice in SIDES.items():
        other = adapted(model, learned, replace(method, **choice))
        maps += [{"side": side, "tuned": 0, **row} for row in compare(other, salient, held)]
        if options.tune:
            with progress(f"tuning: {side}", None, False) as update:
                tune(other, taught, options.tune, update)
            maps += [{"side": side, "tuned": options.tune, **row} for row in compare(other.eval(), salient, held)]
    patches = torch.nn.functional.avg_pool2d(salient.unsqueeze(1), 14)[:, 0].flatten(1) > 0.5
    kept = token_statistics(kept_patches(model, held), patches) if options.scope == "layer" else None
    if kept:
        rows = [(str(n), f"{100 * kept.salient[n]:.1f}", f"{100 * kept.background[n]:.1f}") for n in kept.salient]
        title = f"kept at 50 %: {100 * float(patches.float().mean()):.1f} % of the patches are salient"
        console.print(rich_table(title, ("layer", "of the salient %", "of the background %"), rows))
        pairs = [(f"{a} and {b}", f"{value:.3f}") for (a, b), value in kept.jaccard.items()]
        console.print(rich_table("kept background", ("layers", "Jaccard index"), pairs))
    maps.sort(key=lambda m: (m["tuned"], -m["keep"]))
    rows = [(f"{m['tuned']}", f"{m['keep']}", m["side"], f"{m['mae']:.4f}", f"{m['correlation']:.4f}") for m in maps]
    value = {
        "seed": SEED,
        "images": len(batches.images),
        "held_out": len(held.images),
        "data_sha256": images.digest(),
        "fit_seconds": None if resumed else seconds,
        "recipe": asdict(recipe),
        "method": method.to_dict(),
        "history": fit.history,
        "report": [asdict(r) for r in fit.report],
        "maps": maps,
        "statistics": {
            "salient": kept.salient,
            "background": kept.background,
            "jaccard": {f"{a}-{b}": v for (a, b), v in kept.jaccard.items()},
        }
        if kept
        else None,
    }
    how = "selectors of an earlier run" if resumed else f"selectors fitted in {seconds / 60:.1f} minutes"
    title = f"saliency maps against the dense model's, scope {options.scope}; {how}"
    finish(
        f"tosa_saliency_{options.scope}",
        title,
        ("epochs tuned", "keep", "chosen by", "mean absolute error", "correlation"),
        rows,
        value,
    )


if __name__ == "__main__":
    main()
