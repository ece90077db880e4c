"""What a runner says of one image."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """The answer for one image, or why there is none.

    Attributes:
        index: position in the input.
        name: file or other name; empty for arrays.
        label: predicted class, -1 where there is an error.
        class_name: its name, or empty.
        confidence: probability of the label.
        exit: the exit it left at, counted from 1; 0 where there is an error.
        macs: MACs spent on it.
        error: what is wrong with the image, or empty.
    """

    index: int
    name: str = ""
    label: int = -1
    class_name: str = ""
    confidence: float = 0.0
    exit: int = 0
    macs: float = 0.0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON or a table."""
        return asdict(self)
