"""What the benchmarks share: their table, and their JSON with the machine and versions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tokensworth.allocator import keep_freed_memory
from tokensworth.files import write_json
from tokensworth.measure.machine import machine
from tokensworth.report.tables import rich_table

# As the command line does, and for all sides of a comparison.
keep_freed_memory()

RESULTS = Path(__file__).parent / "results"


def finish(name: str, title: str, header: Sequence[str], rows: list[tuple[str, ...]], value: dict[str, Any]) -> None:
    """Prints the table and writes `results/NAME.json`."""
    Console(width=140).print(rich_table(title, header, rows))
    path = RESULTS / f"{name}.json"
    write_json(path, json.loads(json.dumps({"machine": machine(), **value}, default=float)))
    print(f"wrote {path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else f"wrote {path}")


def print_conditions(found: dict[str, Any], images: str) -> None:
    """The recommendation of a `compare.json` and how it was measured, below a table of it."""
    machine = found["machine"]
    conditions = (
        f"{found['test_images']} test {images}",
        f"{found['calibration_images']} to choose on",
        f"batch {found['batch']}",
        f"medians of {found['repeats']}",
        f"seed {found['seed']}",
        machine["cpu"],
        f"{machine['threads']} threads",
        f"torch {machine['torch']}",
    )
    print(f"\n{found['recommendation']}\n{', '.join(conditions)}")
