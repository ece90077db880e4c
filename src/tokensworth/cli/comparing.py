"""`tokensworth compare`."""

from pathlib import Path
from typing import Annotated

import typer

from tokensworth.cli.options import (
    Data,
    DepthRoot,
    Device,
    Json,
    Root,
    Split,
    Task,
    Threads,
    answer,
    check_task,
    load_depth,
    load_images,
    progress,
    set_threads,
)


def compare(
    model: Annotated[str, typer.Option(help="The plain model: timm name, or folder of a saved model.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the results; run again with it to go on.")],
    calibration: Annotated[str, typer.Option(help="Images on which settings are chosen; none of those of --data.")],
    task: Task = "classify",
    method: Annotated[
        list[str],
        typer.Option(
            help="Token method, as tome:r=4 or evit:keep=0.7;layers=4,7,10; without options at three settings; "
            "`all` for all; may be repeated."
        ),
    ] = [],  # noqa: B006
    trained: Annotated[
        list[str], typer.Option(help="Folder of a trained model or cascade to compare too; may be repeated.")
    ] = [],  # noqa: B006
    max_drop: Annotated[
        float | None, typer.Option(help="Recommend the fastest setting that loses at most so many points.")
    ] = None,
    millis: Annotated[
        float | None, typer.Option(help="Recommend the best setting of at most so many milliseconds per image.")
    ] = None,
    single: Annotated[bool, typer.Option("--single", help="Recommend by the time of one image alone.")] = False,
    split: Split = "test",
    calibration_split: Annotated[str, typer.Option(help="Split of a named calibration data set.")] = "train",
    held_out: Annotated[
        int, typer.Option(help="Of --calibration, only so many images that `train --hold-out` kept out; 0 for all.")
    ] = 0,
    limit: Annotated[int, typer.Option(help="Only the first so many calibration and test images; 0 for all.")] = 0,
    root: Root = None,
    depth_root: DepthRoot = None,
    batch_size: Annotated[int, typer.Option(help="Batch of the timings.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed rounds; medians count.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the hold-out, random choices and the bootstrap.")] = 0,
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Compare token methods, trained models and cascades: accuracy, MACs, time and memory, and which one to take."""
    import numpy as np

    from tokensworth.data.sources import hold_out
    from tokensworth.files import write_json, write_text
    from tokensworth.jobs.comparing import Comparison, Images, check_images
    from tokensworth.jobs.ranking import rank, recommend
    from tokensworth.jobs.sides import plan
    from tokensworth.measure.machine import machine
    from tokensworth.report.comparison import as_csv, comparison_table, recommended, write_comparison

    set_threads(threads)
    if check_task(task):
        tests, chosen_on = (load_depth(part, root, depth_root) for part in (data, calibration))
        if held_out:
            chosen_on = chosen_on.select(hold_out(len(chosen_on), held_out, seed)[1])
    else:
        tests, chosen_on = load_images(data, split), load_images(calibration, calibration_split, held_out, seed)
    if limit:
        tests, chosen_on = (part.select(np.arange(min(limit, len(part)))) for part in (tests, chosen_on))
    images = Images(chosen_on, tests)
    check_images(images)
    sides, left_out = plan(model, method or ([] if trained else ["all"]), trained)
    with progress("comparing", len(sides), as_json) as update:
        comparison = Comparison(
            out,
            images,
            batch_size=batch_size,
            repeats=repeats,
            seed=seed,
            device=device,
            say=lambda done, text: update(done, len(sides), text),
        )
        rows = rank(comparison.run(sides), seed)
    found = recommend(rows, max_drop, millis, single)
    value = {
        "machine": machine(),
        "batch": batch_size,
        "repeats": repeats,
        "seed": seed,
        "test_images": len(tests),
        "calibration_images": len(chosen_on),
        "rows": [row.to_dict() for row in rows],
        "left_out": left_out,
        "recommendation": None if found is None else recommended(found),
    }
    write_json(out / "compare.json", value)
    write_text(out / "compare.csv", as_csv(rows))
    write_comparison(
        rows, found, out / "compare.html", images=len(tests), batch=batch_size, title=f"tokensworth compare: {model}"
    )
    lines = [*left_out, *([recommended(found)] if found else []), f"wrote {out}/compare.html, .json and .csv"]
    answer(value | {"out": str(out)}, as_json, comparison_table(rows, len(tests), batch_size), *lines)


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    example = (
        "Example: tokensworth compare --model vit --data cifar10 --calibration cifar10 --held-out 5000 "
        "--method tome:r=4 --method evit --max-drop 0.5 --out compared"
    )
    app.command(epilog=example)(compare)
