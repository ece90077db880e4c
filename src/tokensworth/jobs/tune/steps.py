"""Steps of a long job whose results are kept: run again, it goes on behind the last one that is done."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokensworth.files import write_json


class Steps:
    """Small results on disk, each with all that it depends on.

    Args:
        folder: where to keep them.
        say: told which step begins.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say

    def run(self, name: str, depends_on: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The kept result of a step, if it depended on the very same, or a new one.

        Args:
            name: of the step.
            depends_on: plain values.
            make: makes the result, plain values.
        """
        key = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()
        path = self.folder / f"{name}.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return kept["result"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self.say(name)
        result = make()
        write_json(path, {"key": key, "result": result})
        return result
