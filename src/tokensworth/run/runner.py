"""The runner: each stage runs only on images that have not left, so that saved MACs become saved time."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tokensworth.cascade import Cascade, Upstream, model_hash
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

# How many batches of images may wait for others of their stage before all queues are emptied.
_LAG = 16


@dataclass
class _Waiting:
    """Survivors of several batches that wait for one stage."""

    positions: list[Tensor] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    states: list[Upstream] = field(default_factory=list)
    said: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(p) for p in self.positions)

    def add(self, positions: Tensor, images: Tensor, state: Upstream, said: Tensor) -> None:
        self.positions.append(positions)
        self.images.append(images)
        self.states.append(state)
        self.said.append(said)

    def take(self) -> tuple[Tensor, Tensor, Upstream, Tensor]:
        """All of them as one dense batch: positions, images, states, and what earlier exits said of them."""
        if len(self.positions) == 1:
            packed = self.positions[0], self.images[0], self.states[0], self.said[0]
        else:
            states = Upstream.concat(self.states)
            packed = torch.cat(self.positions), torch.cat(self.images), states, torch.cat(self.said)
        self.__init__()
        return packed


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
        positions, state = torch.arange(count, device=self.device), None
        said = self._nothing(count)
        for index in range(self.cascade.num_stages):
            answer = self._stage(index, images, state, positions, said)
            gone = positions[answer.leaves]
            labels[gone], confidences[gone], exits[gone] = answer.labels, answer.confidences, index
            if answer.stay is None or answer.said is None:
                break
            positions, images = positions[answer.stay], images[answer.stay]
            state, said = answer.state, answer.said
        return labels, confidences, exits

    def _nothing(self, count: int) -> Tensor:
        """What exits before the first have said: (count, 0, 2)."""
        return torch.empty(count, 0, 2, device=self.device)

    def _stage(self, index: int, images: Tensor, state: Upstream | None, positions: Tensor, said: Tensor) -> "_Answer":
        """One stage on a dense batch: who leaves with which answer, who stays with which state."""
        policy, last = self._policy, index == self.cascade.num_stages - 1
        with torch.inference_mode():
            logits, handed_on = self.engine.run_stage(index, images, state)
            heat = policy.temperatures[index] if policy.temperatures else 1.0
            probabilities, confidences, labels = read_answer(logits, heat)
            if last:
                return _Answer(torch.arange(len(labels), device=self.device), labels, confidences)
            score = self._judge(probabilities, positions, index, said)
            # Compared in the scores' own precision, as the solvers do.
            leave = score >= torch.tensor(policy.thresholds[index], dtype=score.dtype, device=score.device)
            leaves = leave.nonzero().squeeze(1)
            if len(leaves) == len(labels):
                return _Answer(leaves, labels, confidences)
            stay = (~leave).nonzero().squeeze(1)
            assert handed_on is not None
            said = remember(said, labels, confidences)
            if not len(leaves):
                return _Answer(leaves, labels[leaves], confidences[leaves], stay, handed_on, said)
            left = labels[leaves], confidences[leaves]
            return _Answer(leaves, *left, stay, handed_on.select(stay), said[stay])


@dataclass(slots=True)
class _Answer:
    """One stage's answer for a batch."""

    leaves: Tensor
    labels: Tensor
    confidences: Tensor
    stay: Tensor | None = None
    state: Upstream | None = None
    said: Tensor | None = None


class _Stream:
    """One pass over a source: a queue per later stage, results put back in order."""

    def __init__(self, runner: Runner, batches: Iterator[Batch]) -> None:
        self.runner, self.batches = runner, batches
        self.waiting = [_Waiting() for _ in range(runner.cascade.num_stages)]
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
        self._run(0, positions, images, None, self.runner._nothing(len(images)))

    def _empty(self, force: bool) -> None:
        """Runs the later stages on full batches of survivors; with `force`, on all of them."""
        size = self.runner.batch_size
        for index in range(1, len(self.waiting)):
            queue = self.waiting[index]
            if not queue or (len(queue) < size and not force):
                continue
            positions, images, state, said = queue.take()
            full = len(positions) if force else len(positions) // size * size
            for start in range(0, full, size):
                piece = slice(start, min(start + size, full))
                self._run(index, positions[piece], images[piece], state.select(piece), said[piece])
            if full < len(positions):
                rest = slice(full, None)
                queue.add(positions[rest], images[rest], state.select(rest), said[rest])

    def _run(self, index: int, positions: Tensor, images: Tensor, state: Upstream | None, said: Tensor) -> None:
        runner = self.runner
        answer = runner._stage(index, images, state, positions, said)
        classes, macs = runner.cascade.config.class_names, runner.exit_macs[index]
        gone = positions[answer.leaves].tolist()
        for position, label, sure in zip(gone, answer.labels.tolist(), answer.confidences.tolist(), strict=True):
            named = classes[label] if classes else ""
            self.done[position] = Result(position, self.names.pop(position), label, named, sure, index + 1, macs)
        runner.monitor.add([index] * len(gone))
        if answer.stay is not None and answer.state is not None and answer.said is not None:
            self.waiting[index + 1].add(positions[answer.stay], images[answer.stay], answer.state, answer.said)
