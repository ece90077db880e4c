"""`tokensworth predict`: a folder of images to a file of answers, bad files skipped, resumed where it stopped."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokensworth.errors import DataError
from tokensworth.files import atomic_path
from tokensworth.run.inputs import list_images
from tokensworth.run.results import Result
from tokensworth.run.runner import Runner


@dataclass
class Summary:
    """What a prediction run did.

    Attributes:
        done: images answered in this run.
        failed: images with an error in this run.
        resumed: images that an earlier run had answered.
        exits: images leaving at each exit, from exit 1.
        macs: mean MACs per answered image.
        drift: what the monitor says.
    """

    done: int = 0
    failed: int = 0
    resumed: int = 0
    exits: list[int] | None = None
    macs: float = 0.0
    drift: str = ""


def _finished(journal: Path) -> dict[str, str]:
    """Names answered by an earlier run, with their lines; a line cut short by a crash is dropped."""
    lines: dict[str, str] = {}
    if not journal.exists():
        return lines
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            lines[json.loads(line)["name"]] = line
        except (ValueError, KeyError, TypeError):
            continue
    return lines


def _write_parquet(lines: list[str], out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_path(out) as temporary:
        pq.write_table(pa.Table.from_pylist([json.loads(line) for line in lines]), temporary)


def predict_folder(
    runner: Runner, folder: Path, out: Path, on_result: Callable[[Result, int], None] | None = None
) -> Summary:
    """Answers every image below a folder.

    Results are appended to a journal as they come, so that nothing is lost when the run is stopped; run
    again, it goes on with the images that have no answer yet. Images with an error are tried again.

    Args:
        runner: how.
        folder: of images, searched in depth; or one image file.
        out: `.jsonl` or `.parquet`.
        on_result: told each result and the number of images in all.

    Raises:
        DataError: no images, or an output of an unknown kind.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{out}: write to a .jsonl or .parquet file")
    files = [folder] if folder.is_file() else list_images(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    journal = out if out.suffix == ".jsonl" else out.with_name(f".{out.name}.partial.jsonl")
    kept = {name: line for name, line in _finished(journal).items() if not json.loads(line)["error"]}
    wanted = {str(f) for f in files}
    kept = {name: line for name, line in kept.items() if name in wanted}
    with atomic_path(journal) as temporary:
        temporary.write_text("".join(line + "\n" for line in kept.values()), encoding="utf-8")
    rest = [f for f in files if str(f) not in kept]
    summary = Summary(resumed=len(kept), exits=[0] * runner.cascade.num_stages)
    assert summary.exits is not None
    total_macs = 0.0
    # Line by line, so that even a killed process loses no answer.
    with journal.open("a", encoding="utf-8", buffering=1) as stream:
        for result in runner.predict(rest):
            row = {k: v for k, v in result.to_dict().items() if k != "index"}
            stream.write(json.dumps(row) + "\n")
            if result.error:
                summary.failed += 1
            else:
                summary.done += 1
                summary.exits[result.exit - 1] += 1
                total_macs += result.macs
            if on_result:
                on_result(result, len(rest))
    if out.suffix == ".parquet":
        lines = _finished(journal)
        _write_parquet([lines[str(f)] for f in files if str(f) in lines], out)
        journal.unlink()
    summary.macs = total_macs / summary.done if summary.done else 0.0
    summary.drift = str(runner.drift) if runner.drift.drifting else ""
    return summary
