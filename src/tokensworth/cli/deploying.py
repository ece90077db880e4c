"""`tokensworth export | check | serve`."""

from pathlib import Path
from typing import Annotated

import typer

from tokensworth.cli.options import (
    Data,
    Json,
    Model,
    Split,
    Threads,
    answer,
    load_images,
    load_model,
    progress,
    set_threads,
)


def export(
    model: Model,
    policy: Annotated[Path, typer.Option(help="Policy to serve with.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    split: Split = "test",
    limit: Annotated[int, typer.Option(help="Measure on so many images.")] = 1000,
    frontier: Annotated[
        Path | None, typer.Option(help="File of `solve --frontier`: lets the service's budget follow the load.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantized variants too, with what they cost.")] = False,
    repeats: Annotated[int, typer.Option(help="Timed rounds; medians count.")] = 3,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Write a folder that engines run: a graph per stage, policy, preprocessing, model card, checksums."""
    import numpy as np
    from rich.table import Table

    from tokensworth.exits.goals import show_cost
    from tokensworth.exits.policy import Policy
    from tokensworth.jobs.exporting import run_export

    set_threads(threads)
    images = load_images(data, split)
    images = images.select(np.arange(min(limit, len(images))))
    cascade = load_model(model, "cpu")
    with progress("exporting", None, as_json) as update:
        record = run_export(
            cascade,
            Policy.load(policy),
            images,
            out,
            frontier=frontier,
            int8=int8,
            repeats=repeats,
            say=lambda text: update(0, note=text),
        )
    table = Table("engine", "accuracy %", "MACs", "ms, batch 64", "ms, alone", "same as PyTorch %", title=str(out))
    for row in record["rows"]:
        times = f"{row['millis_batch']:.3f}", f"{row['millis_single']:.2f}"
        cells = (f"{100 * row['accuracy']:.2f}", show_cost(row["macs"], "MACs"), *times, f"{100 * row['same']:.2f}")
        table.add_row(row["engine"], *cells)
    answer(record | {"out": str(out)}, as_json, table)


def check(
    folder: Annotated[Path, typer.Argument(help="Folder that `tokensworth export` wrote.")],
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Check a folder's files against their checksums and its graphs against the PyTorch model."""
    from rich.table import Table

    from tokensworth.jobs.exporting import check_folder

    set_threads(threads)
    found = check_folder(folder)
    table = Table("engine", "same as PyTorch %", "largest gap", "exceptions", title=f"{found['images']} sample images")
    for row in found["rows"]:
        exceptions = f"{len(row['exceptions'])}, {row['near']} within rounding of a threshold"
        table.add_row(row["engine"], f"{100 * row['same']:.2f}", f"{row['gap']:.2g}", exceptions)
    answer(found, as_json, table, "good" if found["good"] else "float32 graphs differ from the model: export again")
    if not found["good"]:
        raise typer.Exit(1)


def serve(
    folder: Annotated[Path, typer.Argument(help="Folder that `tokensworth export` wrote.")],
    backend: Annotated[str, typer.Option(help="openvino, onnx, torch or compile.")] = "openvino",
    bf16: Annotated[bool, typer.Option(help="Products in bfloat16; not with onnx.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="The quantized graphs.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 8000,
    batch_size: Annotated[int, typer.Option(help="Images per call of a stage.")] = 32,
    capacity: Annotated[int, typer.Option(help="Images that may wait; more are refused with 503.")] = 1024,
    deadline_ms: Annotated[float, typer.Option(help="Longest that a request may take.")] = 5000.0,
    patience_ms: Annotated[
        float, typer.Option(help="Expected wait from which the budget shrinks, where exported with a frontier.")
    ] = 500.0,
    max_images: Annotated[int, typer.Option(help="Images in one request.")] = 64,
    max_bytes: Annotated[int, typer.Option(help="Bytes of one encoded image.")] = 20_000_000,
    fixed: Annotated[bool, typer.Option("--fixed", help="Keep the exported policy whatever the load.")] = False,
    token: Annotated[
        str, typer.Option(envvar="TOKENSWORTH_TOKEN", help="What changes of /policy must carry; none without.")
    ] = "",
    threads: Threads = 0,
) -> None:
    """Serve a folder over HTTP; an interrupt lets accepted requests finish."""
    import torch

    from tokensworth.errors import MissingExtraError
    from tokensworth.run.exported import Exported

    try:
        import uvicorn

        from tokensworth.serve import Governor, Settings, UploadLimits, make_app
    except ImportError:
        raise MissingExtraError("the service", "serve") from None
    set_threads(threads)
    exported = Exported.open(folder)
    runner = exported.runner(backend, int8=int8, batch_size=batch_size, dtype=torch.bfloat16 if bf16 else None)
    policies = [] if fixed else exported.frontier()
    settings = Settings(
        capacity=capacity,
        deadline=deadline_ms / 1000,
        token=token,
        uploads=UploadLimits(images=max_images, bytes=max_bytes),
    )
    app = make_app(runner, settings, Governor(policies, patience_ms / 1000) if policies else None)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=int(deadline_ms / 1000) + 5)


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    example = "Example: tokensworth export --model packaged --policy policy.json --data packaged:test --out exported"
    app.command(epilog=example)(export)
    app.command(epilog="Example: tokensworth check exported")(check)
    app.command(epilog="Example: tokensworth serve exported --backend openvino --bf16 --port 8000")(serve)
