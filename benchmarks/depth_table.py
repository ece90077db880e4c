"""The table of docs/depth.md, in Markdown, from `results/depth.json`, which `tokensworth compare --task depth` wrote.

python benchmarks/depth_table.py
"""

import json
from typing import Any

from common import RESULTS, print_conditions

Row = dict[str, Any]


def main() -> None:
    found = json.loads((RESULTS / "depth.json").read_text())
    rows: list[Row] = found["rows"]
    dense = next(row for row in rows if row["curve"] == "trained, plain")
    print(
        "| backbone | tuned | abs_rel | beside tuned dense | delta1 % | MACs | MACs x | time x, batch | time x, alone |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        name, _, tuned = row["curve"].partition(", ")
        worse = 100 * (row["abs_rel"] / dense["abs_rel"] - 1)
        cells = (
            f"{name} {row['setting']}",
            "yes" if tuned else "",
            f"{row['abs_rel']:.4f}",
            f"{worse:+.1f} %",
            f"{100 * row['delta1']:.2f}",
            f"{row['macs'] / 1e9:.2f} G",
            f"{row['macs_ratio']:.2f}",
            f"{row['time_ratio']:.2f}",
            f"{row['p50_ratio']:.2f}",
        )
        print(f"| {' | '.join(cells)} |")
    print_conditions(found, "frames")


if __name__ == "__main__":
    main()
