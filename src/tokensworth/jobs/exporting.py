"""`tokensworth export` and `check`: from a model and its policy to a folder that engines run, and back to the proof."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensworth.cascade import Cascade, model_hash
from tokensworth.data.sources import ImageSet
from tokensworth.data.tensors import normalize
from tokensworth.exits.goals import show_cost
from tokensworth.exits.policy import Policy
from tokensworth.files import write_json, write_text
from tokensworth.jobs.answers import all_tensors
from tokensworth.jobs.study import pass_over
from tokensworth.measure.machine import machine
from tokensworth.measure.timing import alternate
from tokensworth.run.engines.graphs import stage_files
from tokensworth.run.engines.quantize import quantize_graphs
from tokensworth.run.exported import FRONTIER, GRAPHS, POLICY, Exported, load_frontier, write_manifest, write_samples
from tokensworth.run.inputs import make_transform
from tokensworth.run.results import Result
from tokensworth.run.runner import Runner
from tokensworth.train.precision import native_bf16

_SAMPLES, _RANGES, _SINGLES = 64, 128, 50
# Rounding that other orders of summation may bring.
CLOSE = 1e-4


@dataclass(frozen=True)
class Variant:
    """One way to run a folder's graphs.

    Attributes:
        name: for people.
        backend: of the runner.
        dtype: precision of products; None for float32.
        int8: the quantized graphs.
    """

    name: str
    backend: str
    dtype: torch.dtype | None = None
    int8: bool = False


def variants(int8: bool) -> list[Variant]:
    """What runs here: PyTorch first, OpenVINO in bfloat16 where the processor has it, int8 where exported."""
    found = [Variant("torch", "torch"), Variant("onnx", "onnx"), Variant("openvino", "openvino")]
    if native_bf16(torch.device("cpu")):
        found.append(Variant("openvino bf16", "openvino", torch.bfloat16))
    if int8:
        found += [Variant("onnx int8", "onnx", int8=True), Variant("openvino int8", "openvino", int8=True)]
    return found


@dataclass(frozen=True)
class Agreement:
    """How a variant's answers agree with PyTorch's.

    Attributes:
        same: share of images with the same label and exit.
        gap: largest difference of confidence among these.
        exceptions: images that differ: name, and both labels and exits.
        near: how many of these have a confidence within rounding of a threshold.
    """

    same: float
    gap: float
    exceptions: list[dict[str, Any]]
    near: int


def agreement(plain: list[Result], other: list[Result], policy: Policy) -> Agreement:
    """Compares two passes over the same images."""
    differing, near, gaps = [], 0, [0.0]
    for one, two in zip(plain, other, strict=True):
        if (one.label, one.exit) == (two.label, two.exit):
            gaps.append(abs(one.confidence - two.confidence))
            continue
        differing.append({"image": one.index, "torch": [one.label, one.exit], "engine": [two.label, two.exit]})
        first = min(one.exit, two.exit)
        sure = (one if one.exit == first else two).confidence
        at = policy.thresholds[first - 1] if first <= len(policy.thresholds) else np.inf
        near += policy.score == "confidence" and abs(sure - at) < CLOSE
    return Agreement(1 - len(differing) / len(plain), max(gaps), differing, near)


def run_export(
    cascade: Cascade,
    policy: Policy,
    images: ImageSet,
    out: Path,
    *,
    frontier: Path | None = None,
    int8: bool = False,
    repeats: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes the folder: model, policy, graphs, preprocessing, samples, figures, model card, checksums.

    Args:
        cascade: the model.
        policy: to serve with.
        images: labelled; figures are measured on them, samples and int8 ranges taken from them.
        out: the folder.
        frontier: file of `tokensworth solve --frontier`, for a budget that follows the load.
        int8: quantized variants too.
        repeats: timed rounds; medians count.
        say: told what is under way.

    Returns:
        The figures, as in `measured.json`.
    """
    model = model_hash(cascade)
    for known in [policy, *(load_frontier(frontier) if frontier else [])]:
        known.check(cascade.num_stages, model)
    cascade.save_pretrained(out)
    policy.save(out / POLICY)
    if frontier:
        write_text(out / FRONTIER, frontier.read_text(encoding="utf-8"))
    say("writing graphs")
    graphs = stage_files(cascade, out / GRAPHS[False])
    config = cascade.config
    tensors, labels = all_tensors(images, config)
    if int8:
        say("quantizing")
        quantize_graphs(cascade, graphs, tensors[:_RANGES].split(32), out / GRAPHS[True])
    transform = make_transform(config)
    write_samples(out, torch.stack([transform(images.read(i)) for i in range(min(_SAMPLES, len(images)))]))
    side = config.image_size
    write_json(
        out / "preprocessing.json",
        {
            "image": f"RGB, shorter side resized, middle {side}x{side} cut out",
            "size": side,
            "cut": 1.0 if side <= 64 else 0.9,
            "resampling": "bicubic",
            "scale": 1 / 255,
            "mean": list(config.mean),
            "std": list(config.std),
            "layout": "NCHW float32",
            "classes": list(config.class_names),
        },
    )
    write_manifest(out)
    say("measuring")
    record = _measure(Exported.open(out), variants(int8), tensors, labels, repeats)
    write_json(out / "measured.json", record)
    write_text(out / "README.md", _card(cascade, policy, record))
    write_manifest(out)
    return record


def _measure(exported: Exported, ways: list[Variant], tensors: Tensor, labels: Tensor, repeats: int) -> dict[str, Any]:
    runners = {w.name: exported.runner(w.backend, int8=w.int8, dtype=w.dtype) for w in ways}
    passes = {name: list(runner.predict(tensors)) for name, runner in runners.items()}
    plain = passes["torch"]
    batch = alternate({name: pass_over(r, tensors) for name, r in runners.items()}, repeats)
    few = tensors[:_SINGLES]

    def one_by_one(runner: Runner) -> Callable[[], None]:
        def run() -> None:
            for i in range(len(few)):
                runner.run(few[i : i + 1])

        return run

    single = alternate({name: one_by_one(r) for name, r in runners.items()}, repeats)
    rows = []
    for name, results in passes.items():
        found = agreement(plain, results, exported.policy)
        rows.append(
            {
                "engine": name,
                "accuracy": float(np.mean([r.label == y for r, y in zip(results, labels.tolist(), strict=True)])),
                "macs": float(np.mean([r.macs for r in results])),
                "millis_batch": 1000 * batch[name].median / len(tensors),
                "millis_single": 1000 * single[name].median / len(few),
                **asdict(found),
            }
        )
    return {"machine": machine(), "images": len(tensors), "batch": 64, "repeats": repeats, "rows": rows}


def _card(cascade: Cascade, policy: Policy, record: dict[str, Any]) -> str:
    config = cascade.config
    lines = [
        f"# {config.backbone}, grids {', '.join(map(str, config.grids))}",
        "",
        f"An adaptive classifier of {config.num_classes} classes, exported by tokensworth.",
        f"Policy: {policy.goal or 'thresholds set by hand'}.",
        "",
        "| engine | accuracy % | MACs per image | ms, batch 64 | ms, alone | same as PyTorch % |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        cells = (
            row["engine"],
            f"{100 * row['accuracy']:.2f}",
            show_cost(row["macs"], "MACs"),
            f"{row['millis_batch']:.3f}",
            f"{row['millis_single']:.2f}",
            f"{100 * row['same']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    machine = record["machine"]
    lines += [
        "",
        f"{record['images']} images, {machine['cpu']}, {machine['threads']} threads, medians of {record['repeats']}.",
        "",
        "`preprocessing.json` says what an image goes through; `tokensworth check` compares the graphs with the model.",
        "",
    ]
    return "\n".join(lines)


def check_folder(folder: Path) -> dict[str, Any]:
    """Compares every exported graph with the PyTorch model on the folder's sample images.

    Returns:
        Per variant: share of same answers, largest gap, exceptions.

    Raises:
        CheckpointError: files missing or changed.
    """
    exported = Exported.open(folder)
    config = exported.cascade.config
    images = normalize(exported.samples(), config.mean, config.std)
    plain = list(exported.runner("torch").predict(images))
    int8 = (folder / GRAPHS[True]).is_dir()
    rows = []
    for way in variants(int8)[1:]:
        runner = exported.runner(way.backend, int8=way.int8, dtype=way.dtype)
        rows.append({"engine": way.name} | asdict(agreement(plain, list(runner.predict(images)), exported.policy)))
    exact = [row for row in rows if row["engine"] in ("onnx", "openvino")]
    good = all(len(row["exceptions"]) == row["near"] and row["gap"] < CLOSE for row in exact)
    return {"folder": str(folder), "images": len(images), "good": good, "rows": rows}
