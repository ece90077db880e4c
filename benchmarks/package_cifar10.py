"""Puts trained CIFAR-10 models and a sample of images into the package.

    python benchmarks/package_cifar10.py --runs RUNS --train TRAIN --test TEST

RUNS holds `cascade`, `static_3`, `static_5`, `static_8` and `vit`, as `tokensworth train` leaves them. The sample's
calibration images are among those held out of training; its test images are of the test split.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokensworth.cascade import Cascade
from tokensworth.data.packaged import STATIC_GRIDS, packaged_folder, packaged_vit
from tokensworth.data.sources import ImageSet, hold_out, open_images
from tokensworth.exits import frontier
from tokensworth.files import atomic_path, write_json
from tokensworth.jobs.answers import answers

HELD_OUT, SEED, SAMPLE = 5000, 0, 2000
MODEL_FILES = ("config.json", "model.safetensors", "train.json", "log.jsonl")


def write_sample(images: ImageSet, path: Path) -> None:
    """A Parquet file in the Hugging Face schema."""
    table = pa.table({"img": [{"bytes": data, "path": None} for data in images.items], "label": images.labels.tolist()})
    features = {"img": {"_type": "Image"}, "label": {"names": list(images.class_names), "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    with atomic_path(path) as temporary:
        pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    options = parser.parse_args()
    out = packaged_folder()
    homes = {"cascade": out} | {f"static_{g}": out / f"static_{g}" for g in STATIC_GRIDS} | {"vit": packaged_vit()}
    for name, home in homes.items():
        home.mkdir(parents=True, exist_ok=True)
        for file in MODEL_FILES:
            shutil.copyfile(options.runs / name / file, home / file)
    train, test = open_images(options.train, "train"), open_images(options.test, "test")
    held = train.select(hold_out(len(train), HELD_OUT, SEED)[1])
    write_sample(held.select(hold_out(len(held), SAMPLE, SEED)[1]), out / "calibration.parquet")
    write_sample(test.select(hold_out(len(test), SAMPLE, SEED)[1]), out / "test.parquet")
    cascade = Cascade.from_pretrained(out)
    known, seen = answers(cascade, held), answers(cascade, test)
    line = frontier(known, points=60)
    write_json(out / "frontier.json", {"resolution": line.resolution, "policies": [asdict(p) for p in line.policies]})
    results = {
        "test_images": len(test),
        "test_accuracy": seen.anytime,
        "held_out_accuracy": known.anytime,
        "exit_macs": seen.exit_costs.tolist(),
        "static_test_accuracy": {
            str(g): answers(Cascade.from_pretrained(out / f"static_{g}"), test).anytime[0] for g in STATIC_GRIDS
        },
        "vit_test_accuracy": answers(Cascade.from_pretrained(packaged_vit()), test).anytime[0],
    }
    write_json(out / "results.json", json.loads(json.dumps(results, default=float)))
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    weights = sum(f.stat().st_size for f in out.rglob("*.safetensors"))
    print(json.dumps(results, indent=1, default=float))
    print(f"{size / 2**20:.1f} MiB in all, weights {weights / 2**20:.1f} MiB; {np.bincount(seen.labels).tolist()}")


if __name__ == "__main__":
    main()
