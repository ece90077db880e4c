"""`tokensworth predict | bench`."""

from pathlib import Path
from typing import Annotated

import typer

from tokensworth.cli.options import (
    Data,
    Device,
    Json,
    Model,
    Split,
    Statics,
    Threads,
    answer,
    existing_folder,
    load_images,
    load_model,
    progress,
    set_threads,
)


def predict(
    source: Annotated[Path, typer.Argument(help="Image file, or folder of images, searched in depth.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="Results: .jsonl or .parquet.")],
    policy: Annotated[Path | None, typer.Option(help="Policy file; every image runs every stage without.")] = None,
    max_exit: Annotated[int, typer.Option(help="Let nobody go beyond this exit, from 1; 0 for no limit.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 64,
    bf16: Annotated[bool, typer.Option(help="Products in bfloat16; not with onnx.")] = False,
    backend: Annotated[str, typer.Option(help="torch, compile, onnx or openvino.")] = "torch",
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Label a folder of images; bad files are skipped with one line, and a second run goes on where one stopped."""
    import sys
    from dataclasses import asdict

    import torch

    from tokensworth.exits.goals import show_cost
    from tokensworth.exits.policy import Policy
    from tokensworth.jobs.predicting import predict_folder
    from tokensworth.run.exported import exported_graphs
    from tokensworth.run.results import Result
    from tokensworth.run.runner import Runner

    set_threads(threads)
    existing_folder(source)
    cascade = load_model(model, device)
    chosen = Policy.load(policy) if policy else Policy.run_all(cascade.num_stages)
    if max_exit:
        chosen = chosen.up_to(max_exit - 1)
    dtype = torch.bfloat16 if bf16 else None
    runner = Runner(cascade, chosen, batch_size=batch_size, dtype=dtype, backend=backend, graphs=exported_graphs(model))
    with progress("predicting", None, as_json) as update:

        def on_result(result: Result, total: int) -> None:
            if result.error:
                print(f"skipped {result.error}", file=sys.stderr)
            update(result.index + 1, total)

        summary = predict_folder(runner, source, out, on_result)
    lines = [
        f"{summary.done} answered, {summary.failed} skipped, {summary.resumed} from an earlier run -> {out}",
        f"leaving at each exit: {summary.exits}; {show_cost(summary.macs, 'MACs')} per image",
    ]
    answer(asdict(summary), as_json, *lines, *([summary.drift] if summary.drift else []))
    if summary.failed and not summary.done and not summary.resumed:
        raise typer.Exit(1)


def bench(
    model: Model,
    data: Data,
    policy: Annotated[Path | None, typer.Option(help="Policy file; all stages run without.")] = None,
    static: Statics = [],  # noqa: B006
    split: Split = "test",
    images: Annotated[int, typer.Option(help="How many images to time on.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Batch of the throughput.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed rounds; medians count.")] = 5,
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Measure MACs, images/s, latency and memory beside static models, in one process, sides alternating."""
    from tokensworth.exits.policy import Policy
    from tokensworth.jobs.benching import bench_models
    from tokensworth.report.tables import bench_tables

    set_threads(threads)
    cascade = load_model(model, device)
    chosen = Policy.load(policy) if policy else None
    with progress("timing", None, as_json) as update:
        value = bench_models(
            cascade,
            chosen,
            [load_model(s, device) for s in static],
            load_images(data, split),
            count=images,
            batch_size=batch_size,
            repeats=repeats,
            say=lambda text: update(0, note=text),
        )
    answer(value, as_json, *bench_tables(value))


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    app.command(epilog="Example: tokensworth predict photos/ --model packaged --policy policy.json --out labels.jsonl")(
        predict
    )
    app.command(epilog="Example: tokensworth bench --model packaged --data packaged:test --policy policy.json")(bench)
