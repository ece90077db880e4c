"""The runner: each stage runs only on images that have not left, so that saved MACs become saved time."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokensworth.cascade import Cascade, model_hash
from tokensworth.data.tensors import normalize
from tokensworth.errors import PolicyError
from tokensworth.exits.learned import remember
from tokensworth.exits.policy import Policy
from tokensworth.exits.scores import make_judge, read_answer
from tokensworth.measure.macs import stage_macs
from tokensworth.run.engines import make_engine
from tokensworth.run.inputs import Batch, Source, read_batches
from tokensworth.run.monitor import Drift, Monitor
from tokensworth.run.results import Result
from tokensworth.run.waiting import Group, Waiting

# How many batches of images may wait for others of their stage before all queues are emptied.
_LAG = 16


class Runner:
    """Runs a cascade under a policy, image by image no more than needed, batch by batch in fact.

    Args:
        cascade: the model; put into evaluation mode and moved to `device`.
        policy: when images leave; every image runs every stage where None.
        batch_size: images of a stage's batch; later stages pack survivors of several batches.
        device: where to run; where the model is, if None.
        dtype: precision of products, for example `torch.bfloat16`: autocast for PyTorch, a hint for OpenVINO; None for
            float32.
        backend: `torch`, `compile`, `onnx` or `openvino`.
        graphs: ONNX files of the stages, for the last two; written to a temporary folder where None.
        pack: let survivors wait to fill a batch. Off, each batch runs through at once (lower latency).

    Raises:
        PolicyError: the policy is for another model or number of exits, or the backend is unknown.
        MissingExtraError: the backend is not installed.

    Example:
        >>> runner = Runner(cascade, policy)  # doctest: +SKIP
        >>> for result in runner.predict("photos/"):  # doctest: +SKIP
        ...     print(result.name, result.class_name, result.exit)
    """

    def __init__(
        self,
        cascade: Cascade,
        policy: Policy | None = None,
        *,
        batch_size: int = 64,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "torch",
        graphs: Sequence[Path] | None = None,
        pack: bool = True,
    ) -> None:
        if batch_size < 1:
            raise PolicyError(f"batch size {batch_size} is not positive")
        self.cascade = cascade.eval()
        self.device = torch.device(device) if device else next(cascade.parameters()).device
        cascade.to(self.device)
        self.batch_size, self.dtype, self.pack, self.backend = batch_size, dtype, pack, backend
        self.engine = make_engine(backend, cascade, dtype, graphs)
        self.model = model_hash(cascade)
        stage_costs = [s.total for s in stage_macs(cascade)]
        self.exit_macs = [float(sum(stage_costs[: i + 1])) for i in range(len(stage_costs))]
        self._policy = Policy.run_all(cascade.num_stages)
        self._judge = make_judge(self._policy.score)
        self.monitor = Monitor(self._policy)
        if policy is not None:
            self.policy = policy

    @property
    def context(self) -> dict[str, object]:
        """What measured times depend on, as a policy records it."""
        return {
            "backend": self.backend,
            "batch": self.batch_size,
            "threads": torch.get_num_threads(),
            "dtype": str(self.dtype or torch.float32).removeprefix("torch."),
        }

    @property
    def policy(self) -> Policy:
        """The policy in force; another one may be set between batches."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        for warning in policy.check(self.cascade.num_stages, self.model, self.context):
            warnings.warn(warning, stacklevel=3)
        self._policy, self._judge = policy, make_judge(policy.score, policy.rule)
        self.monitor.watch(policy)

    @property
    def drift(self) -> Drift:
        """Whether recent images cost what the policy promised."""
        return self.monitor.drift()

    def predict(self, source: Source) -> Iterator[Result]:
        """Streams one result per image, in input order, with bounded memory.

        Args:
            source: arrays, a file, a folder, a Parquet file, an `ImageSet`, or an iterable of paths, encoded
                bytes or PIL images.

        Raises:
            DataError: a source that cannot be read at all. A single bad image becomes a result with an error.
        """
        return _Stream(self, read_batches(source, self.cascade.config, self.batch_size)).results()

    def run(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One batch straight through, without packing: the loop behind `predict` for tensors in hand.

        Args:
            images: (B, C, S, S), normalized, on the runner's device.

        Returns:
            Labels, confidences and exits counted from 0, each (B,).
        """
        count = len(images)
        labels = torch.empty(count, dtype=torch.long, device=self.device)
        confidences = torch.empty(count, device=self.device)
        exits = torch.empty(count, dtype=torch.long, device=self.device)
        group: Group | None = self.group(torch.arange(count, device=self.device), images)
        index = 0
        while group is not None:
            answer = self.step(index, group)
            gone = answer.positions
            labels[gone], confidences[gone], exits[gone] = answer.labels, answer.confidences, index
            group, index = answer.stay, index + 1
        return labels, confidences, exits

    def group(self, positions: Tensor, images: Tensor) -> Group:
        """Images (B, C, S, S), normalized, on their way to the first stage; `positions` (B,) name them."""
        return Group(positions, images, None, torch.empty(len(images), 0, 2, device=images.device))

    def step(self, index: int, group: Group) -> "Answer":
        """One stage on a dense batch: who leaves with which answer, who goes on with which state.

        Args:
            index: which stage, from 0.
            group: the images that it shall see.
        """
        policy, last = self._policy, index == self.cascade.num_stages - 1
        with torch.inference_mode():
            logits, handed_on = self.engine.run_stage(index, group.images, group.state)
            heat = policy.temperatures[index] if policy.temperatures else 1.0
            probabilities, confidences, labels = read_answer(logits, heat)
            if last:
                return Answer(group.positions, labels, confidences)
            score = self._judge(probabilities, group.positions, index, group.said)
            # Compared in the scores' own precision, as the solvers do.
            leave = score >= torch.tensor(policy.thresholds[index], dtype=score.dtype, device=score.device)
            leaves = leave.nonzero().squeeze(1)
            if len(leaves) == len(labels):
                return Answer(group.positions, labels, confidences)
            said = remember(group.said, labels, confidences)
            everybody = Group(group.positions, group.images, handed_on, said)
            if not len(leaves):
                return Answer(group.positions[leaves], labels[leaves], confidences[leaves], everybody)
            stay = everybody.select((~leave).nonzero().squeeze(1))
            return Answer(group.positions[leaves], labels[leaves], confidences[leaves], stay)


@dataclass(slots=True)
class Answer:
    """One stage's answer for a batch.

    Attributes:
        positions: (L,) who leaves.
        labels, confidences: (L,) with what.
        stay: the others on their way to the next stage, or None.
    """

    positions: Tensor
    labels: Tensor
    confidences: Tensor
    stay: Group | None = None


class _Stream:
    """One pass over a source: a queue per later stage, results put back in order."""

    def __init__(self, runner: Runner, batches: Iterator[Batch]) -> None:
        self.runner, self.batches = runner, batches
        self.waiting = [Waiting() for _ in range(runner.cascade.num_stages)]
        self.names: dict[int, str] = {}
        self.done: dict[int, Result] = {}
        self.next = 0  # the first position whose result has not been handed out

    def results(self) -> Iterator[Result]:
        position = 0
        for batch in self.batches:
            self._enter(batch, position)
            position += len(batch.names)
            late = position - self.next > _LAG * self.runner.batch_size
            self._empty(force=late or not self.runner.pack)
            yield from self._ready()
        self._empty(force=True)
        yield from self._ready()

    def _ready(self) -> Iterator[Result]:
        while self.next in self.done:
            yield self.done.pop(self.next)
            self.next += 1

    def _enter(self, batch: Batch, start: int) -> None:
        for place, error in batch.errors.items():
            self.done[start + place] = Result(start + place, batch.names[place], error=error)
        if batch.images is None:
            return
        self.names.update((start + place, batch.names[place]) for place in batch.good)
        images = batch.images.to(self.runner.device)
        if images.dtype == torch.uint8:
            config = self.runner.cascade.config
            images = normalize(images, config.mean, config.std)
        positions = torch.tensor(batch.good, device=images.device) + start
        self._run(0, self.runner.group(positions, images))

    def _empty(self, force: bool) -> None:
        """Runs the later stages on full batches of survivors; with `force`, on all of them."""
        size = self.runner.batch_size
        for index in range(1, len(self.waiting)):
            queue = self.waiting[index]
            while len(queue) >= size or (queue and force):
                self._run(index, queue.take(size))

    def _run(self, index: int, group: Group) -> None:
        runner = self.runner
        answer = runner.step(index, group)
        classes, macs = runner.cascade.config.class_names, runner.exit_macs[index]
        gone = answer.positions.tolist()
        for position, label, sure in zip(gone, answer.labels.tolist(), answer.confidences.tolist(), strict=True):
            named = classes[label] if classes else ""
            self.done[position] = Result(position, self.names.pop(position), label, named, sure, index + 1, macs)
        runner.monitor.add([index] * len(gone))
        if answer.stay is not None:
            self.waiting[index + 1].add(answer.stay)
