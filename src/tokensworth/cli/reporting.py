"""`tokensworth report | demo`."""

from pathlib import Path
from typing import Annotated

import typer

from tokensworth.cli.options import (
    Data,
    Json,
    Model,
    Split,
    Statics,
    Threads,
    answer,
    load_images,
    load_model,
    progress,
    set_threads,
)


def report(
    model: Model,
    calibration: Annotated[Path, typer.Option(help="File that `tokensworth calibrate` wrote.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("report.html"),
    static: Statics = [],  # noqa: B006
    split: Split = "test",
    batch_size: Annotated[int, typer.Option(help="Batch of the timings.")] = 64,
    timed: Annotated[int, typer.Option(help="Policies of the frontier to time.")] = 8,
    repeats: Annotated[int, typer.Option(help="Timed rounds; medians count.")] = 3,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Write one self-contained page: the frontier beside the static models, in MACs and time, and who leaves where."""
    from tokensworth.exits import Calibration
    from tokensworth.jobs.study import load_statics, run_study
    from tokensworth.report.page import write_report
    from tokensworth.report.tables import study_table

    set_threads(threads)
    cascade = load_model(model)
    with progress("report", None, as_json) as update:
        study = run_study(
            cascade,
            Calibration.load(calibration),
            load_images(data, split),
            load_statics([Path(s) for s in static]),
            batch=batch_size,
            timed=timed,
            repeats=repeats,
            say=lambda text: update(0, note=text),
        )
    write_report(study, out, f"tokensworth report: {model}")
    answer(study.to_dict() | {"out": str(out)}, as_json, study_table(study), f"wrote {out}")


def demo(
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("report.html"),
    repeats: Annotated[int, typer.Option(help="Timed rounds; medians count.")] = 3,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Calibrate the packaged CIFAR-10 cascade, run it at three budgets beside static models, and write the report."""
    from tokensworth.jobs.demo import run_demo
    from tokensworth.report.page import write_report
    from tokensworth.report.tables import study_table

    set_threads(threads)
    with progress("demo", None, as_json) as update:
        study = run_demo(repeats, say=lambda text: update(0, note=text))
    write_report(study, out, "tokensworth on CIFAR-10")
    answer(study.to_dict() | {"out": str(out)}, as_json, study_table(study, study.timed[:3]), f"wrote {out}")


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    app.command(
        epilog="Example: tokensworth report --model packaged --calibration cal.safetensors --data packaged:test"
    )(report)
    app.command(epilog="Example: tokensworth demo --out report.html")(demo)
