"""A study as rows for people."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tokensworth.exits.goals import show_cost
from tokensworth.jobs.study import Point, Study


def _percent(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * s:.0f}" for s in shares)


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


HEADER = (
    "setting",
    "accuracy %",
    "MACs/image",
    "images/s",
    "static/this: MACs",
    "time",
    "all/this: MACs",
    "time",
    "leaving at each exit %",
)
CAPTION = (
    "static/this: the cheapest static model at least as accurate, over this setting; all/this: running all stages, "
    "over this setting. Above 1: less work, less time."
)


def study_rows(study: Study, points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Rows of `HEADER` for points of the cascade; ratios above 1 mean less work or less time."""
    rows = []
    for point in points:
        static = study.static_of_equal_accuracy(point.accuracy)
        against = (_ratio(static.macs / point.macs), _ratio(point.rate / static.rate)) if static else ("none", "-")
        whole = study.everything
        rows.append(
            (
                point.name,
                f"{100 * point.accuracy:.2f}",
                show_cost(point.macs, "MACs").removesuffix(" MACs"),
                f"{point.rate:.0f}",
                *against,
                _ratio(whole.macs / point.macs),
                _ratio(point.rate / whole.rate),
                _percent(point.shares),
            )
        )
    return rows


def static_rows(study: Study) -> list[tuple[str, ...]]:
    """Rows of the static models and of running all stages."""
    return [
        (
            p.name,
            f"{100 * p.accuracy:.2f}",
            show_cost(p.macs, "MACs").removesuffix(" MACs"),
            f"{p.rate:.0f}",
            *(("-",) * 5),
        )
        for p in (*study.statics, study.everything)
    ]


def rich_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal; the first column is text, the rest is set right."""
    table = Table(title=title)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if not index else "right")
    for row in rows:
        table.add_row(*row)
    return table


def study_table(study: Study, points: Sequence[Point] | None = None) -> Table:
    """The measured points of a study and the static models."""
    rows = [*study_rows(study, study.timed if points is None else points), *static_rows(study)]
    table = rich_table(f"{len(study.test.labels)} test images, batch {study.batch}", HEADER, rows)
    table.caption = CAPTION
    return table


def evaluation_table(points: Sequence[Point]) -> Table:
    """Accuracy with its 95 % interval, cost and exits of points that were not timed."""
    header = ("setting", "accuracy %", "95 %", "MACs/image", "leaving at each exit %")
    rows = [
        (
            p.name,
            f"{100 * p.accuracy:.2f}",
            f"{100 * p.low:.2f} to {100 * p.high:.2f}",
            show_cost(p.macs, "MACs").removesuffix(" MACs"),
            _percent(p.shares),
        )
        for p in points
    ]
    return rich_table("evaluation", header, rows)


def bench_tables(value: dict[str, Any]) -> list[Table]:
    """The tables of `bench_models`' result."""
    parts = ("total", "plain", "feature", "relation", "wider", "saved")
    stages = [
        (str(i + 1), *(show_cost(stage[k], "MACs").removesuffix(" MACs") for k in parts))
        for i, stage in enumerate(value["stages"])
    ]
    header = ("stage", "MACs", "plain backbone", "feature reuse", "relation reuse", "wider MLPs", "saved by tokens")
    sides = [
        (
            name,
            f"{side['rate']:.0f}",
            f"{side['rate_single']:.0f}",
            f"{side['p50']:.2f}",
            f"{side['p99']:.2f}",
            f"{side['peak_bytes'] / 2**20:.1f}",
        )
        for name, side in value["sides"].items()
    ]
    batch = value["batch"]
    times = (
        "side",
        f"images/s, batch {batch}",
        "images/s, batch 1",
        "p50 ms",
        "p99 ms",
        f"peak MiB, batch {batch}",
    )
    return [rich_table("where the MACs go", header, stages), rich_table("measured", times, sides)]


def tuning_tables(record: dict[str, Any]) -> list[Table]:
    """What a tuning run fitted and chose, from its record."""
    heads = Table("grid", "held back by", "held-out loss", "held-out accuracy %", title="heads")
    for fit in record["heads"]:
        cells = (f"{fit['strength']:.3g}", f"{fit['loss']:.4f}", f"{100 * fit['accuracy']:.2f}")
        heads.add_row(f"{fit['grid']}x{fit['grid']}", *cells)
    lists = Table("grids", "calibration accuracy %", "mean cost", title=f"goal: {record['goal']}")
    for found in record["lists"][:5]:
        cost = show_cost(found["cost"], record["policy"]["unit"])
        lists.add_row(", ".join(map(str, found["grids"])), f"{100 * found['accuracy']:.2f}", cost)
    rules = Table("budget", "confidence %", "learned %", "gain, points", "mean cost", title="exit rules, test images")
    for row in record["rules"]:
        gain = f"{100 * row['gain']:+.2f} ({100 * row['low']:+.2f} to {100 * row['high']:+.2f})"
        costs = " / ".join(show_cost(row[f"{name}_cost"], "MACs") for name in ("plain", "learned"))
        rules.add_row(
            show_cost(row["budget"], "MACs"), f"{100 * row['plain']:.2f}", f"{100 * row['learned']:.2f}", gain, costs
        )
    return [heads, lists, rules] if record["heads"] else [lists, rules]
