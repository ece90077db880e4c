"""What a policy is to reach: a mean cost, or an accuracy."""

import re
from dataclasses import dataclass

from tokensworth.errors import BudgetError

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Macs:
    """A budget of mean MACs per image, as a number or with a unit: `Macs("1.2G")`."""

    value: float | str

    @property
    def amount(self) -> float:
        match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([KMGT]?)\s*", str(self.value), re.IGNORECASE)
        try:
            assert match
            return float(match[1]) * _UNITS[match[2].upper()]
        except (AssertionError, ValueError):
            raise BudgetError(f"{self.value!r} is not a number of MACs; write for example 1.2G or 350M") from None

    unit = "MACs"


@dataclass(frozen=True)
class Millis:
    """A budget of mean milliseconds per image, under the costs a calibration was measured with."""

    value: float

    @property
    def amount(self) -> float:
        return float(self.value)

    unit = "ms"


@dataclass(frozen=True)
class Accuracy:
    """A required accuracy as a share: the cheapest policy that reaches it is wanted."""

    value: float

    def __post_init__(self) -> None:
        if not 0 < self.value <= 1:
            raise BudgetError(f"target accuracy {self.value} is not a share between 0 and 1")


Budget = Macs | Millis


def show_cost(cost: float, unit: str) -> str:
    """A cost for people: `16.3 M MACs`, `2.41 ms`."""
    if unit != "MACs":
        return f"{cost:.3g} {unit}"
    for letter in ("G", "M", "K"):
        if cost >= _UNITS[letter]:
            return f"{cost / _UNITS[letter]:.3g} {letter} MACs"
    return f"{cost:.0f} MACs"
