"""A comparison for people: the table, the figures, the page; and its rows as CSV."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import tokensworth
from tokensworth.errors import MissingExtraError
from tokensworth.exits.goals import show_cost
from tokensworth.files import write_text
from tokensworth.jobs.ranking import Recommendation, Row
from tokensworth.measure.machine import machine
from tokensworth.report.page import embedded_plot
from tokensworth.report.tables import rich_table

HEADER = (
    "method",
    "setting",
    "accuracy %",
    "change",
    "95 %",
    "MACs",
    "MACs x",
    "time x",
    "alone x",
    "images/s",
    "p50 ms",
    "MiB",
    "grid",
    "best",
)
CAPTION = (
    "Change: points of accuracy against the plain model on the same images, and its 95 % interval (paired bootstrap). "
    "MACs x, time x, alone x: the plain model's MACs, time in batches and time of one image alone (p50) over this "
    "row's, the two sides timed in turn; above 1 is less. MiB: peak tensor memory of a batch. Grid: whether all tokens "
    "are there in the end. Best: no other row is both cheaper and better, in MACs (M) or in time (t)."
)


DEPTH_CAPTION = (
    "Delta1: mean share of pixels within a factor of 1.25 of their depth. Abs_rel: mean relative error, and its change "
    "in percent against the plain model on the same images. "
)


def header(rows: Sequence[Row]) -> tuple[str, ...]:
    """`HEADER`, with the relative error where the rows are of depth models."""
    if not rows[0].errors:
        return HEADER
    return (*HEADER[:2], "abs_rel", "change %", "95 %", "delta1 %", *HEADER[3:])


def caption(rows: Sequence[Row]) -> str:
    """What the columns mean."""
    return DEPTH_CAPTION + CAPTION.replace("accuracy", "delta1") if rows[0].errors else CAPTION


def _error_cells(row: Row) -> tuple[str, ...]:
    change = row.abs_rel_change
    if change is None:
        return ()
    span = f"{100 * change.low:+.1f} to {100 * change.high:+.1f}"
    return f"{row.errors['abs_rel']:.4f}", f"{100 * change.mean:+.2f}", span


def table_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Cells of `header`."""
    return [
        (
            r.curve,
            r.setting,
            *_error_cells(r),
            f"{100 * r.accuracy:.2f}",
            f"{100 * r.difference.mean:+.2f}",
            f"{100 * r.difference.low:+.1f} to {100 * r.difference.high:+.1f}",
            show_cost(r.macs, "MACs").removesuffix(" MACs"),
            f"{r.macs_ratio:.2f}",
            f"{r.time_ratio:.2f}",
            f"{r.p50_ratio:.2f}",
            f"{r.rate:.0f}",
            f"{r.p50:.2f}",
            f"{r.peak_bytes / 2**20:.1f}",
            "yes" if r.keeps_grid else "no",
            "".join(mark for mark, has in (("M", r.pareto_macs), ("t", r.pareto_time)) if has),
        )
        for r in rows
    ]


def comparison_table(rows: Sequence[Row], images: int, batch: int) -> Table:
    """The table for the terminal."""
    table = rich_table(f"{images} test images, batch {batch}", header(rows), table_rows(rows))
    table.caption = caption(rows)
    return table


def recommended(found: Recommendation) -> str:
    """A recommendation as a line."""
    if found.row is None:
        return f"{found.goal}: no setting reaches it on the calibration images"
    row = found.row
    change = f"{100 * row.difference.mean:+.2f} points ({100 * row.difference.low:+.2f} to "
    change += f"{100 * row.difference.high:+.2f})"
    speed = f"{row.time_ratio:.2f}x the speed in batches, {row.p50_ratio:.2f}x alone"
    return f"{found.goal}: {row.curve}, {row.setting}; on the test images {change}, {speed}"


def as_csv(rows: Sequence[Row]) -> str:
    """All rows and columns as CSV."""
    out = io.StringIO()
    values = [row.to_dict() for row in rows]
    writer = csv.DictWriter(out, list(values[0]))
    writer.writeheader()
    writer.writerows(values)
    return out.getvalue()


def _figure(rows: Sequence[Row], title: str, axis: str, cost: Any, best: Any) -> Any:
    import plotly.express as px
    import plotly.graph_objects as go

    colors = px.colors.qualitative.Dark24
    curves = list(dict.fromkeys(row.curve for row in rows))
    figure = go.Figure()
    for number, curve in enumerate(curves):
        of = sorted((row for row in rows if row.curve == curve), key=cost)
        figure.add_trace(
            go.Scatter(
                x=[cost(r) for r in of],
                y=[100 * r.accuracy for r in of],
                mode="lines+markers",
                name=curve,
                text=[r.setting for r in of],
                line={"color": colors[number % len(colors)], "width": 2},
                marker={
                    "size": [13 if best(r) else 7 for r in of],
                    "line": {"width": [2 if best(r) else 0 for r in of]},
                },
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [100 * (r.difference.high - r.difference.mean) for r in of],
                    "arrayminus": [100 * (r.difference.mean - r.difference.low) for r in of],
                    "thickness": 1,
                },
                hovertemplate=curve + ", %{text}<br>%{x:.3g}<br>%{y:.2f} %<extra></extra>",
            )
        )
    figure.update_layout(
        title=title,
        xaxis_title=axis,
        yaxis_title=("pixels within a factor of 1.25" if rows[0].errors else "accuracy") + " on the test images, %",
        template="plotly_white",
        height=560,
        legend={"orientation": "h", "y": -0.2},
    )
    return figure


def write_comparison(
    rows: Sequence[Row], found: Recommendation | None, path: str | Path, *, images: int, batch: int, title: str
) -> None:
    """Writes the page atomically.

    Raises:
        MissingExtraError: plotly or jinja2 is not installed.
    """
    try:
        import plotly  # noqa: F401
        from jinja2 import Environment, PackageLoader, select_autoescape
    except ImportError:
        raise MissingExtraError("the page", "report") from None
    what = "Depth" if rows[0].errors else "Accuracy"
    plots = [
        (f"{what} against compute", "mean million MACs per image", lambda r: r.macs / 1e6, lambda r: r.pareto_macs),
        (
            f"{what} against measured time, batch {batch}",
            "time per image, of the plain model's",
            lambda r: 1 / r.time_ratio,
            lambda r: r.pareto_time,
        ),
    ]
    environment = Environment(loader=PackageLoader("tokensworth.report"), autoescape=select_autoescape())
    html = environment.get_template("comparison.html").render(
        title=title,
        version=tokensworth.__version__,
        machine=machine(),
        images=images,
        batch=batch,
        header=header(rows),
        caption=caption(rows),
        rows=table_rows(rows),
        recommendation=None if found is None else recommended(found),
        plots=[embedded_plot(_figure(rows, *plot), f"plot{i}", first=not i) for i, plot in enumerate(plots)],
    )
    write_text(path, html)
