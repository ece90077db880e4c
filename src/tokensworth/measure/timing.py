"""Time, measured so that two sides can be compared: alternating in one run, medians of repeats."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensworth.cascade import Cascade


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat of one side."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in seconds."""
        return float(np.median(self.seconds))


def synchronize(device: torch.device) -> None:
    """Waits for a device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alternate(
    sides: Mapping[str, Callable[[], Any]],
    repeats: int = 7,
    warmup: int = 1,
    device: torch.device | None = None,
    lead: int = 0,
) -> dict[str, Times]:
    """Times several sides in turn, so that a noisy machine is noisy for all of them.

    Args:
        sides: what to run, by name.
        repeats: timed rounds.
        warmup: rounds before them.
        device: waited for after each call; the CPU where None.
        lead: calls of a side before each of its timed ones. A short call right after another side's pays for caches
            that hold the other's weights and code; with a lead it runs as it would in a service of its own.
    """
    place = device or torch.device("cpu")
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(warmup + repeats):
        for name, run in sides.items():
            for _ in range(lead):
                run()
            synchronize(place)
            start = time.perf_counter()
            run()
            synchronize(place)
            if round_ >= warmup:
                taken[name].append(time.perf_counter() - start)
    return {name: Times(tuple(values)) for name, values in taken.items()}


def stage_millis(cascade: Cascade, images: Tensor, repeats: int = 7) -> list[float]:
    """Milliseconds per image of each stage on a dense batch: the costs for a time budget.

    Args:
        cascade: the model, on the device of the images.
        images: (B, C, S, S), normalized.
        repeats: timed rounds; the median counts.
    """
    with torch.inference_mode():
        states: list[Any] = [None]
        for index in range(cascade.num_stages - 1):
            states.append(cascade.run_stage(index, images, states[-1])[1])
        sides = {str(i): (lambda i=i: cascade.run_stage(i, images, states[i])) for i in range(cascade.num_stages)}
        times = alternate(sides, repeats, device=images.device)
    return [1000 * times[str(i)].median / len(images) for i in range(cascade.num_stages)]
