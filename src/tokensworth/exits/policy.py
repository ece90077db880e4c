"""A policy: the thresholds at which images leave, and what they were solved for."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokensworth.errors import PolicyError
from tokensworth.exits.learned import WIDTH, Rule
from tokensworth.exits.scores import NEVER, make_judge
from tokensworth.files import write_json


@dataclass(frozen=True)
class Policy:
    """Thresholds of all exits but the last, which takes everybody.

    Attributes:
        thresholds: (S-1,); an image leaves at the first exit whose score reaches its threshold.
        score: name of the score.
        rule: of the learned score, its numbers for every exit but the last.
        temperatures: per exit; logits are divided by them before the score.
        model: hash of the model it was solved for; empty for any.
        goal: what it was solved for, in words.
        unit: of the costs, `MACs` or `ms`.
        accuracy, cost: on the calibration images; 0 where it was not solved on any.
        shares: of calibration images leaving at each exit.
        stage_costs: cost of each stage, from which the expected cost follows.
        context: for `ms`: engine, batch, threads and dtype the times were measured with.
    """

    thresholds: tuple[float, ...]
    score: str = "confidence"
    temperatures: tuple[float, ...] = ()
    model: str = ""
    goal: str = ""
    unit: str = "MACs"
    accuracy: float = 0.0
    cost: float = 0.0
    shares: tuple[float, ...] = ()
    stage_costs: tuple[float, ...] = ()
    context: dict[str, Any] = field(default_factory=dict)
    rule: Rule = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", tuple(tuple(float(v) for v in numbers) for numbers in self.rule))
        if self.rule and {len(numbers) for numbers in self.rule} != {WIDTH + 1}:
            raise PolicyError(f"a learned rule has {WIDTH + 1} numbers for each exit but the last")
        make_judge(self.score, self.rule)
        for name in ("thresholds", "temperatures", "shares", "stage_costs"):
            object.__setattr__(self, name, tuple(float(v) for v in getattr(self, name)))
        if any(not -1e9 <= t <= 1e9 for t in self.thresholds):
            raise PolicyError(f"thresholds must be finite numbers, not {list(self.thresholds)}")

    @classmethod
    def run_all(cls, stages: int) -> "Policy":
        """Every image runs every stage."""
        return cls((NEVER,) * (stages - 1), goal="all stages")

    def up_to(self, exit_index: int) -> "Policy":
        """The same, but nobody goes beyond an exit (counted from 0): anytime prediction."""
        if not 0 <= exit_index <= len(self.thresholds):
            raise PolicyError(f"exit {exit_index + 1} of {len(self.thresholds) + 1}")
        stop = tuple(-1e9 if i >= exit_index else t for i, t in enumerate(self.thresholds))
        return replace(self, thresholds=stop, goal=f"{self.goal}, at most exit {exit_index + 1}".lstrip(", "))

    def check(self, stages: int, model: str, context: dict[str, Any] | None = None) -> list[str]:
        """Whether the policy fits a model; what only makes its promise doubtful is returned as warnings.

        Raises:
            PolicyError: solved for another model, or for another number of exits.
        """
        if len(self.thresholds) != stages - 1:
            raise PolicyError(f"the policy is for {len(self.thresholds) + 1} exits, the model has {stages}")
        if self.model and self.model != model:
            raise PolicyError(f"the policy was solved for model {self.model}, this is {model}; solve it again")
        differing = [k for k, v in self.context.items() if context is not None and context.get(k) != v]
        if self.unit == "ms" and differing:
            here = {k: (context or {}).get(k) for k in differing}
            there = {k: self.context[k] for k in differing}
            return [f"the policy's milliseconds were measured with {there}, here it is {here}"]
        return []

    def save(self, path: str | Path) -> None:
        """Writes a small JSON file atomically."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        """Reads what `save` wrote.

        Raises:
            PolicyError: missing, not JSON, or not a policy.
        """
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise PolicyError(f"{path} is not a policy ({error}); make one with `tokensworth solve`") from None
