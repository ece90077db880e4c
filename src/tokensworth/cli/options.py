"""Options that several commands share, and how they answer."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokensworth.errors import TokensworthError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokensworth.cascade import Cascade
    from tokensworth.data.depth import DepthSet
    from tokensworth.data.sources import ImageSet

Model = Annotated[str, typer.Option(help="Folder of a saved cascade, a Hub id, or `packaged`.")]
Data = Annotated[
    str,
    typer.Option(
        help="Parquet file, folder with one sub-folder per class, `cifar10`, a Hub data set, "
        "`packaged:test` or `packaged:calibration`; with depth, `nyu:FILE` or `kitti:FILE`, FILE the split file."
    ),
]
Split = Annotated[str, typer.Option(help="Split of a named data set.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]
HeldOut = Annotated[int, typer.Option(help="Use only so many images that `train --hold-out` kept out; 0 for all.")]
Seed = Annotated[int, typer.Option(help="Seed of the hold-out, as in training.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...; what is available where empty.")]
Statics = Annotated[list[str], typer.Option("--static", help="Folder of a static reference; may be repeated.")]
Task = Annotated[str, typer.Option(help="classify or depth.")]
Root = Annotated[Path | None, typer.Option(help="depth only: folder that a split file's paths start from; its own.")]
DepthRoot = Annotated[Path | None, typer.Option(help="depth only: where depth paths start; --root.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 for PyTorch's choice.")]


def numbers(text: str) -> tuple[int, ...]:
    """`3,5,8` as whole numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TokensworthError(f"{text!r} is not a list of whole numbers such as 7,10,14") from None


def set_threads(threads: int) -> None:
    """Sets PyTorch's CPU threads where a number is given."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def load_model(model: str, device: str = "") -> "Cascade":
    """Opens a cascade on the wanted or available device."""
    import torch

    from tokensworth.cascade import Cascade
    from tokensworth.data.packaged import packaged_folder

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return Cascade.from_pretrained(packaged_folder() if model == "packaged" else model).to(place)
    except RuntimeError as error:
        raise TokensworthError(f"device {place!r} is not usable: {str(error).splitlines()[0]}") from None


def load_images(data: str, split: str = "train", held_out: int = 0, seed: int = 0) -> "ImageSet":
    """Opens labelled images, or the part of them that training held out."""
    from tokensworth.data.depth import LAYOUTS
    from tokensworth.data.packaged import packaged_images
    from tokensworth.data.sources import hold_out, open_images

    kind, _, part = data.partition(":")
    if kind in LAYOUTS:
        images = load_depth(data).images()
        return images.select(hold_out(len(images), held_out, seed)[1]) if held_out else images
    images = packaged_images(part or "test") if kind == "packaged" else open_images(data, split)
    return images.select(hold_out(len(images), held_out, seed)[1]) if held_out else images


def load_depth(data: str, root: Path | None = None, depth_root: Path | None = None) -> "DepthSet":
    """Opens images with depth; each line of the split file that cannot be used gives one on standard error."""
    from tokensworth.data.depth import open_depth

    found = open_depth(data, root, depth_root)
    for problem in found.problems:
        print(f"skipped {problem}", file=sys.stderr)
    return found


def check_task(task: str) -> bool:
    """Whether a task is depth; it is `classify` otherwise."""
    if task not in ("classify", "depth"):
        raise TokensworthError(f"--task {task!r}: write classify or depth")
    return task == "depth"


def answer(value: dict[str, Any], as_json: bool, *tables: Any) -> None:
    """Prints JSON, or tables."""
    if as_json:
        print(json.dumps(value, default=str))
        return
    from rich.console import Console

    # Piped into a file, a table keeps its width instead of being squeezed.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for table in tables:
        console.print(table)


@contextmanager
def progress(label: str, total: int | None, quiet: bool) -> Iterator["Callable[..., None]"]:
    """A progress bar on standard error; yields `update(done, total=None, note="")`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:
        task = bars.add_task(label, total=total)

        def update(done: int, total: int | None = None, note: str = "") -> None:
            bars.update(task, completed=done, total=total, description=f"{label} {note}".rstrip())

        yield update


def existing_folder(path: Path) -> Path:
    """A path that must be there, for messages before long work."""
    if not path.exists():
        raise TokensworthError(f"{path}: no such file or folder")
    return path
