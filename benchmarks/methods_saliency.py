"""Token methods that keep or give back the grid, on a real pretrained ViT: saliency maps, MACs and time against dense.

A DINOv2-small fine-tuned for saliency, frozen; 200 held-out photos. ToSA's selectors are fitted to other photos without
labels, SViT's gates learn from the dense model's features and maps on the same photos, alone (its backbone stays too),
ToMe merges and gives every place the token it was merged into. Random tokens in ToSA's place are the floor.

    python benchmarks/methods_saliency.py --weights dinov2_small_saliency.safetensors --data one_per_class.parquet

`--weights` comes from `scripts/convert_saliency.py`; `--data` is any Parquet file or folder of photos.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

from common import finish
from saliency import SaliencyModel
from tokensworth.cli.options import progress
from tokensworth.data.sources import hold_out, open_images
from tokensworth.exits.goals import show_cost
from tokensworth.jobs.models import ImageBatches
from tokensworth.measure.macs import count_macs
from tokensworth.measure.timing import alternate
from tokensworth.tokens import ToSA, adapt, method_from_dict, readapt
from tokensworth.tokens.method import Method, adapted_vits, method_penalties
from tokensworth.train.selectors import SelectorRecipe, fit_selectors
from tosa_saliency import HELD_OUT, SEED, Lesson, difference, lessons, saliency

LAYERS = (2, 4, 6, 8, 10)
KEEPS, MERGED = (0.8, 0.6, 0.5), (8, 13, 17)


def learn_gates(model: SaliencyModel, taught: list[Lesson], say: Any) -> SaliencyModel:
    """SViT's gates, straight through the frozen backbone: the dense features and maps, and the share that is wanted."""
    added = adapted_vits(model)[0][1]
    model.requires_grad_(False)
    added.requires_grad_(True)
    optimizer = torch.optim.AdamW(added.parameters(), lr=3e-3)
    torch.manual_seed(SEED)
    added.train()
    for step, (image, wanted, shown) in enumerate(taught, 1):
        features = model.features(image)
        maps = torch.nn.functional.binary_cross_entropy_with_logits(model.logits(features, image.shape[2]), shown)
        loss = (features - wanted).square().mean() / wanted.var() + maps + sum(method_penalties(model))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(step, len(taught), f"loss {float(loss.detach()):.4f}")
    return model.eval()


@torch.inference_mode()
def cost(model: SaliencyModel, dense: SaliencyModel, batches: ImageBatches, repeats: int) -> tuple[float, float, float]:
    """Mean MACs of the backbone per image, and the dense backbone's time over this one's in batches and alone."""
    images = next(iter(batches))[0]
    macs = count_macs(lambda: [model.backbone(x) for x in images[:8].split(1)]) / 8
    ratios = []
    for batch in (images, images[:1]):
        lead = int(len(batch) == 1)
        sides = {"dense": lambda x=batch: dense.backbone(x), "this": lambda x=batch: model.backbone(x)}
        times = alternate(sides, repeats * (4 if lead else 1), lead=lead)
        ratios.append(times["dense"].median / times["this"].median)
    return macs, ratios[0], ratios[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--fitted", type=int, default=800, help="photos that selectors and gates learn from")
    parser.add_argument("--epochs", type=int, default=4, help="of the selectors' fitting")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    from timm.data.transforms_factory import create_transform

    images = open_images(options.data, "train")
    left, held_at = hold_out(len(images), min(HELD_OUT, len(images) // 5), SEED)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    transform: Any = create_transform(224, is_training=False, crop_pct=1.0, mean=mean, std=std)
    photos = ImageBatches(images.select(left[: options.fitted]), transform, 16, keep=True)
    held = ImageBatches(images.select(held_at), transform, 20, keep=True)
    dense = SaliencyModel.load(options.weights)
    wanted = saliency(dense, held)

    sides: list[tuple[str, str, Method]] = []
    for keep in KEEPS:
        sides.append(("ToSA", f"keep {keep}", ToSA(LAYERS, keep)))
        sides.append(("ToSA, per head", f"keep {keep}", ToSA(LAYERS, keep, scope="per_head")))
        sides.append(("random in ToSA's place", f"keep {keep}", ToSA(LAYERS, keep, scorer="random")))
        sides.append(("SViT", f"keep {keep}", method_from_dict({"name": "svit", "keep": keep})))
    for r in MERGED:
        sides.append(("ToMe, unmerged", f"r = {r}", method_from_dict({"name": "tome", "r": r, "unmerge": True})))
    sides.sort(key=lambda side: side[0])

    chooser = adapt(copy.deepcopy(dense), ToSA(LAYERS))
    with progress("fitting", None, False) as update:
        recipe = SelectorRecipe(epochs=options.epochs, seed=SEED)
        fit_selectors(chooser, photos, recipe=recipe, on_step=lambda p: update(p.step, p.total, f"{p.kl:.4f}"))
    taught = lessons(dense, photos)
    rows, found = [], []
    full = count_macs(lambda: dense.backbone(next(iter(held))[0][:1]))
    for name, setting, method in sides:
        model = copy.deepcopy(chooser if isinstance(method, ToSA) else dense)
        if isinstance(method, ToSA):
            readapt(model, method)
        else:
            adapt(model, method)
        if method.needs_training:
            with progress(f"{name}, {setting}", None, False) as update:
                learn_gates(model, taught, update)
        torch.manual_seed(SEED)
        error, correlation = difference(saliency(model.eval(), held), wanted)
        macs, batched, alone = cost(model, dense, held, options.repeats)
        found.append(
            {
                "method": name,
                "setting": setting,
                "mae": error,
                "correlation": correlation,
                "macs": macs,
                "macs_ratio": full / macs,
                "time_ratio": batched,
                "time_ratio_alone": alone,
            }
        )
        cells = (f"{error:.4f}", f"{correlation:.4f}", show_cost(macs, "MACs"), f"{full / macs:.2f}x")
        rows.append((name, setting, *cells, f"{batched:.2f}x", f"{alone:.2f}x"))
    header = ("method", "setting", "mean absolute error", "correlation", "MACs", "MACs ratio", "batch 20", "batch 1")
    value = {
        "seed": SEED,
        "images": len(photos.images),
        "held_out": len(held.images),
        "epochs": options.epochs,
        "repeats": options.repeats,
        "data_sha256": images.digest(),
        "dense_macs": full,
        "sides": found,
    }
    title = f"saliency of a frozen DINOv2-small on {len(held.images)} photos, against the dense model's"
    finish("methods_saliency", title, header, rows, value)


if __name__ == "__main__":
    main()
