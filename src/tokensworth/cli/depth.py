"""`tokensworth scenes | depth | evaluate`: generated rooms, depth of images, and its errors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokensworth.cli.options import (
    DepthRoot,
    Device,
    Json,
    Root,
    Threads,
    answer,
    existing_folder,
    load_depth,
    numbers,
    progress,
    set_threads,
)
from tokensworth.errors import TokensworthError

if TYPE_CHECKING:
    from tokensworth.dense.model import DepthModel

DepthModelOption = Annotated[str, typer.Option("--model", help="Folder of a saved depth model.")]


def scenes(
    out: Annotated[Path, typer.Option(help="Folder for the frames and their split file.")],
    count: Annotated[int, typer.Option(help="How many frames.")] = 1000,
    size: Annotated[str, typer.Option(help="Height and width in pixels.")] = "240,320",
    views: Annotated[int, typer.Option(help="Frames of one scene.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the scenes; another seed gives other scenes.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes; as many as processors where 0.")] = 0,
    as_json: Json = False,
) -> None:
    """Generate rooms with exact depth, laid out as NYU Depth V2; run it again to go on where it stopped."""
    from tokensworth.data.scenes import write_frames

    sides = numbers(size)
    if len(sides) != 2:
        raise TokensworthError(f"--size {size!r}: write height and width, as 240,320")
    with progress("rendering", count, as_json) as update:
        path = write_frames(out, count, seed=seed, size=sides, views=views, workers=workers, on_frame=update)
    value = {"frames": count, "seed": seed, "size": sides, "data": f"nyu:{path}"}
    answer(value, as_json, f"{count} frames; use them as --data nyu:{path}")


def depth(
    source: Annotated[Path, typer.Argument(help="Image file, or folder of images, searched in depth.")],
    model: DepthModelOption,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")],
    short: Annotated[
        int,
        typer.Option(help="Pixels of the shorter side as the model sees it; -1 for the image's own, 0 for training's."),
    ] = 0,
    mirrored: Annotated[
        bool, typer.Option("--mirrored", help="Average with the mirrored image; twice the time.")
    ] = False,
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Depth of images: a 16-bit PNG in millimetres (or 1/256 m beyond 65 m) and a coloured one for each."""
    import sys

    from tokensworth.jobs.depth_pictures import depth_of_folder

    set_threads(threads)
    existing_folder(source)
    opened = _load(model, device)
    with progress("depth", None, as_json) as update:
        found = depth_of_folder(
            opened,
            source,
            out,
            short=min(opened.config.image_size) if short == 0 else max(short, 0),
            mirrored=mirrored,
            on_image=lambda done, total: update(done, total),
            on_problem=lambda line: print(f"skipped {line}", file=sys.stderr),
        )
    lines = [f"{p.image}: {p.nearest:.2f} to {p.farthest:.2f} m -> {p.depth}" for p in found.pictures]
    value = {"pictures": [p.to_dict() for p in found.pictures], "failed": found.failed, "unit": found.unit}
    answer(value, as_json, *lines, f"{len(found.pictures)} images, {found.failed} skipped")
    if found.failed:
        raise typer.Exit(1)


def evaluate(
    model: DepthModelOption,
    data: Annotated[str, typer.Option(help="nyu:FILE or kitti:FILE, FILE the split file or its folder.")],
    root: Root = None,
    depth_root: DepthRoot = None,
    batch_size: Annotated[int, typer.Option(help="Images of one size that run together.")] = 8,
    mirrored: Annotated[
        bool, typer.Option("--mirrored/--direct", help="Average with the mirrored image, as the field does.")
    ] = True,
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Errors of a depth model: the field's nine measures, in its crops and range."""
    import sys

    from rich.table import Table

    from tokensworth.dense.metrics import mean_errors
    from tokensworth.jobs.depth import evaluate_depth

    set_threads(threads)
    opened, images = _load(model, device), load_depth(data, root, depth_root)
    problems: list[str] = list(images.problems)

    def on_problem(line: str) -> None:
        problems.append(line)
        print(f"skipped {line}", file=sys.stderr)

    with progress("evaluating", len(images), as_json) as update:
        found = evaluate_depth(
            opened, images, batch_size=batch_size, mirrored=mirrored, on_image=update, on_problem=on_problem
        )
    errors = mean_errors(found).to_dict()
    counted = sum(e is not None for e in found)
    table = Table(*errors, title=f"{counted} images of {data}" + (", mirrored mean" if mirrored else ""))
    table.add_row(*(f"{v:.4f}" for v in errors.values()))
    answer({**errors, "images": counted, "mirrored": mirrored, "problems": problems}, as_json, table)
    if problems:
        raise typer.Exit(1)


def _load(model: str, device: str) -> "DepthModel":
    from tokensworth.dense.model import DepthModel
    from tokensworth.jobs.models import open_model

    opened = open_model(str(existing_folder(Path(model))), device)
    if not isinstance(opened, DepthModel):
        raise TokensworthError(f"{model}: no depth model; `tokensworth train --task depth` makes one")
    return opened


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    app.command(epilog="Example: tokensworth scenes --count 8000 --size 154,154 --out rooms")(scenes)
    app.command(epilog="Example: tokensworth depth photos/ --model runs/depth --out depth")(depth)
    app.command(epilog="Example: tokensworth evaluate --model runs/depth --data nyu:nyu_test.txt --root nyu")(evaluate)
