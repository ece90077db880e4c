"""One study of a cascade: its frontier on held-out images beside the static models, in accuracy, MACs and time."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensworth.cascade import Cascade
from tokensworth.data.sources import ImageSet
from tokensworth.exits.calibration import Calibration
from tokensworth.exits.outcome import evaluate, leaving_exit
from tokensworth.exits.policy import Policy
from tokensworth.exits.solve import Frontier, frontier
from tokensworth.jobs.answers import all_tensors, answers
from tokensworth.measure.machine import machine
from tokensworth.measure.macs import StageMacs, model_macs, stage_macs
from tokensworth.measure.timing import alternate
from tokensworth.run.runner import Runner

# Timings pass over so many of the test images.
_TIMED_IMAGES = 2000


@dataclass(frozen=True)
class Point:
    """One way to run on the test images.

    Attributes:
        name: what it is.
        accuracy, low, high: share of right answers and its 95 % interval.
        macs: mean MACs per image.
        rate: images per second at the study's batch size; 0 where not timed.
        shares: of images leaving at each exit; empty for a static model.
        policy: the policy, for a point of the cascade.
    """

    name: str
    accuracy: float
    low: float
    high: float
    macs: float
    rate: float = 0.0
    shares: tuple[float, ...] = ()
    policy: Policy | None = None


def wilson(accuracy: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share seen on `count` images."""
    z = NormalDist().inv_cdf(0.5 + level / 2)
    middle = (accuracy + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * np.sqrt(accuracy * (1 - accuracy) / count + z * z / (4 * count * count))
    return float(middle - half), float(middle + half)


@dataclass(frozen=True)
class Study:
    """All that a report shows.

    Attributes:
        cascade: the model.
        stages: MACs of each stage.
        calibration: answers on the calibration images, from which policies come.
        test: answers on the test images, on which everything is reported.
        images: the test images.
        frontier: the policies.
        curve: their results on the test images.
        timed: a few of them, timed.
        exits: each exit alone (anytime prediction).
        statics: the static references, timed.
        everything: all stages for every image, timed.
        batch: batch size of the timings.
    """

    cascade: Cascade
    stages: list[StageMacs]
    calibration: Calibration
    test: Calibration
    images: ImageSet
    frontier: Frontier
    curve: list[Point]
    timed: list[Point]
    exits: list[Point]
    statics: list[Point]
    everything: Point
    batch: int

    def static_of_equal_accuracy(self, accuracy: float) -> Point | None:
        """The cheapest static model at least as accurate; None where none is."""
        fitting = [p for p in self.statics if p.accuracy >= accuracy]
        return min(fitting, key=lambda p: p.macs) if fitting else None

    def at_accuracy(self, accuracy: float) -> Point | None:
        """The cheapest point of the curve that reaches an accuracy on the test images."""
        fitting = [p for p in self.curve if p.accuracy >= accuracy]
        return min(fitting, key=lambda p: p.macs) if fitting else None

    def leaving(self, policy: Policy) -> np.ndarray:
        """The exit (N,) at which each test image leaves, from 0."""
        return leaving_exit(self.test.scores, np.asarray(policy.thresholds))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        groups = ("curve", "timed", "exits", "statics")
        points = {g: [asdict(p) for p in getattr(self, g)] for g in groups}
        return {
            "machine": machine(),
            "batch": self.batch,
            "calibration_images": len(self.calibration.labels),
            "test_images": len(self.test.labels),
            "stages": [asdict(s) for s in self.stages],
            "resolution": self.frontier.resolution,
            "everything": asdict(self.everything),
            **points,
        }


def cascade_point(name: str, test: Calibration, policy: Policy, rate: float = 0.0) -> Point:
    """A policy's results on the test images."""
    outcome = evaluate(test, np.asarray(policy.thresholds))
    accuracy = float(outcome.accuracy)
    low, high = wilson(accuracy, len(test.labels))
    return Point(name, accuracy, low, high, float(outcome.cost), rate, tuple(map(float, outcome.shares)), policy)


def pass_over(runner: Runner, images: Tensor) -> Callable[[], None]:
    """A full pass over normalized images in memory, results made."""

    def run() -> None:
        for _ in runner.predict(images):
            pass

    return run


def _accuracy(runner: Runner, images: ImageSet) -> float:
    truth = images.labels.tolist()
    return sum(result.label == y for result, y in zip(runner.predict(images), truth, strict=True)) / len(truth)


def load_statics(folders: list[Path]) -> list[Cascade]:
    """Static references, saved by `tokensworth train --static`."""
    return [Cascade.from_pretrained(folder) for folder in folders]


def _spread(policies: tuple[Policy, ...], count: int) -> list[Policy]:
    """A few policies, evenly by cost, ends included."""
    costs = np.array([p.cost for p in policies])
    wanted = np.linspace(costs[0], costs[-1], count)
    return [policies[i] for i in sorted({int(np.abs(costs - w).argmin()) for w in wanted})]


def run_study(
    cascade: Cascade,
    calibration: Calibration,
    test_images: ImageSet,
    statics: list[Cascade],
    *,
    batch: int = 64,
    timed: int = 8,
    repeats: int = 3,
    extra: list[Policy] | None = None,
    test: Calibration | None = None,
    static_accuracies: Sequence[float] = (),
    dtype: torch.dtype | None = None,
    timed_images: int = _TIMED_IMAGES,
    say: Callable[[str], None] = lambda _: None,
) -> Study:
    """Makes a study.

    Args:
        cascade: the model.
        calibration: answers on calibration images; policies are chosen on these alone.
        test_images: everything is reported on these.
        statics: static references.
        batch: images per batch of the timings.
        timed: how many policies of the frontier are timed.
        repeats: timed rounds; medians count.
        extra: further policies to time, put first among the timed points.
        test: answers on the test images, where they are known already.
        static_accuracies: of the static references on the test images, where known.
        dtype: autocast to this type.
        timed_images: timings pass over the first so many of the test images.
        say: told what is under way.
    """
    if test is None:
        say("answers on the test images")
        heats, rule = calibration.temperatures, calibration.rule
        test = answers(cascade, test_images, score=calibration.score, temperature=heats, rule=rule)
    say("solving the frontier")
    line = frontier(calibration)
    everything = Policy.run_all(cascade.num_stages)
    chosen = [*(extra or []), *_spread(line.policies, timed)]
    say("timing")
    few, _ = all_tensors(test_images.select(np.arange(min(timed_images, len(test_images)))), cascade.config)
    sides: dict[str, Callable[[], None]] = {}
    for index, policy in enumerate([everything, *chosen]):
        sides[f"policy{index}"] = pass_over(Runner(cascade, policy, batch_size=batch, dtype=dtype), few)
    runners = [Runner(s, batch_size=batch, dtype=dtype) for s in statics]
    for index, runner in enumerate(runners):
        sides[f"static{index}"] = pass_over(runner, few)
    times = alternate(sides, repeats)

    def rate(name: str) -> float:
        return len(few) / times[name].median

    points = [cascade_point(p.goal, test, p, rate(f"policy{i + 1}")) for i, p in enumerate(chosen)]
    static_points = []
    for index, (model, runner) in enumerate(zip(statics, runners, strict=True)):
        share = static_accuracies[index] if static_accuracies else _accuracy(runner, test_images)
        low, high = wilson(share, len(test_images))
        macs = float(model_macs(model, model.config.image_size, model.config.in_chans))
        grid = model.config.grids[0]
        static_points.append(Point(f"static {grid}x{grid}", share, low, high, macs, rate(f"static{index}")))
    stop_at = [everything.up_to(i) for i in range(cascade.num_stages)]
    return Study(
        cascade,
        stage_macs(cascade),
        calibration,
        test,
        test_images,
        line,
        [cascade_point("frontier", test, p) for p in line.policies],
        points,
        [cascade_point(f"exit {i + 1}", test, p) for i, p in enumerate(stop_at)],
        static_points,
        cascade_point("all stages", test, everything, rate("policy0")),
        batch,
    )
