"""The README's table, in Markdown, from `results/compare.json`, which `tokensworth compare` wrote.

python benchmarks/compare_table.py
"""

import json
from typing import Any

from common import RESULTS, print_conditions

Row = dict[str, Any]


def cell(points: list[Row]) -> str:
    """Accuracy, MACs and time of each setting, mild to strong."""
    mild_first = sorted(points, key=lambda p: p["macs_ratio"])
    parts = (f"{100 * p['accuracy']:.2f} ({p['macs_ratio']:.2f}x, {p['time_ratio']:.2f}x)" for p in mild_first)
    return ", ".join(parts) or "must be trained"


def main() -> None:
    found = json.loads((RESULTS / "compare.json").read_text())
    rows: list[Row] = found["rows"]
    curves: dict[str, list[Row]] = {}
    for row in rows[1:]:
        # A setting with a second option is a curve of its own, else the points would not be comparable.
        apart = row["setting"].partition(", ")[2] if row["curve"] == "vtc_lfc" else ""
        curves.setdefault(f"{row['curve']} {apart}".strip(), []).append(row)
    tuned_apart = [c for c in curves if c.endswith(", tuned")]
    alone = [c for c in curves if c.startswith(("cascade", "trained"))]
    methods = sorted({c.removesuffix(", tuned") for c in curves} - set(alone))
    print("| | as it is | fine-tuned |")
    print("|---|---|---|")
    print(f"| plain model | {cell(rows[:1])} | |")
    for name in methods:
        tuned = f"{name}, tuned"
        print(f"| {name} | {cell(curves.get(name, []))} | {cell(curves[tuned]) if tuned in tuned_apart else ''} |")
    for name in alone:
        for row in curves[name]:
            print(f"| {name}: {row['setting']} | | {cell([row])} |")
    print_conditions(found, "images")


if __name__ == "__main__":
    main()
