"""`tokensworth bench`: MACs, throughput, latency and memory beside static models."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokensworth.cascade import Cascade
from tokensworth.data.sources import ImageSet
from tokensworth.exits.policy import Policy
from tokensworth.jobs.answers import all_tensors
from tokensworth.jobs.study import pass_over
from tokensworth.measure.machine import machine
from tokensworth.measure.macs import stage_macs
from tokensworth.measure.memory import peak_memory
from tokensworth.measure.timing import alternate
from tokensworth.run.runner import Runner

# Single images whose latency is taken, each in every round.
_SINGLES = 100


def _one_by_one(runner: Runner, images: Tensor) -> list[Callable[[], Any]]:
    return [lambda i=i: runner.run(images[i : i + 1]) for i in range(len(images))]


def bench_models(
    cascade: Cascade,
    policy: Policy | None,
    statics: list[Cascade],
    images: ImageSet,
    *,
    count: int = 2000,
    batch_size: int = 64,
    repeats: int = 5,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Times a cascade under a policy, running all stages, and static models, sides alternating.

    `never leaves early` is the latency of an image that runs every stage: the worst case of a user.

    Returns:
        `stages`: MACs of each; `sides`: per side images/s at the batch size and at 1, p50 and p99 latency in
        ms at batch 1, peak bytes of a batch; machine and settings.
    """
    tensors, _ = all_tensors(images.select(np.arange(min(count, len(images)))), cascade.config)
    models: dict[str, tuple[Cascade, Policy | None]] = {}
    if policy is not None:
        models["cascade"] = (cascade, policy)
    models["never leaves early"] = (cascade, None)
    models |= {f"static {s.config.grids[0]}x{s.config.grids[0]}": (s, None) for s in statics}
    runners = {name: Runner(m, p, batch_size=batch_size) for name, (m, p) in models.items()}
    device = next(iter(runners.values())).device
    tensors = tensors.to(device)
    say(f"batch {batch_size}")
    whole = alternate({name: pass_over(r, tensors) for name, r in runners.items()}, repeats, device=device)
    say("batch 1")
    singles = tensors[:: max(1, len(tensors) // _SINGLES)][:_SINGLES]
    each = {name: _one_by_one(r, singles) for name, r in runners.items()}
    taken: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(len(singles)):
        times = alternate({name: calls[index] for name, calls in each.items()}, repeats, device=device)
        for name, t in times.items():
            taken[name].append(1000 * t.median)
    say("memory")
    sides = {}
    for name, runner in runners.items():
        sides[name] = {
            "rate": len(tensors) / whole[name].median,
            "rate_single": 1000 / float(np.mean(taken[name])),
            "p50": float(np.percentile(taken[name], 50)),
            "p99": float(np.percentile(taken[name], 99)),
            "peak_bytes": peak_memory(lambda r=runner: r.run(tensors[:batch_size]), device),
        }
    return {
        "machine": machine(),
        "batch": batch_size,
        "repeats": repeats,
        "images": len(tensors),
        "threads": torch.get_num_threads(),
        "stages": [asdict(s) | {"wider": s.wider} for s in stage_macs(cascade)],
        "policy": asdict(policy) if policy else None,
        "sides": sides,
    }
