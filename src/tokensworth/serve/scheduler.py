"""Continuous batching across stages: survivors of many requests form the next stage's batch.

One thread runs the engine, which has all processors to itself. Whenever it is free it takes the stage whose batch is
full, the latest first; else new images; else, or where somebody has waited long, what there is. So it never idles
while anybody waits.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokensworth.errors import PolicyError, TokensworthError
from tokensworth.run.runner import Runner
from tokensworth.run.waiting import Group, Waiting
from tokensworth.serve.governor import Governor, Limits

# Seconds that survivors wait for a full batch while new images keep coming.
_LINGER = 0.02
# How fast the mean time per image and stage follows what is measured.
_MEMORY = 0.1


class Busy(TokensworthError):  # noqa: N818
    """The service is full, or going down; `retry_after` seconds later it may not be."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Late(TokensworthError):  # noqa: N818
    """The deadline passed before the first stage saw the image."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer for one image.

    Attributes:
        label, confidence: of the exit it left at.
        exit: counted from 1.
        macs: spent on it.
        hurried: its deadline came first: the answer is the last exit's that had one.
    """

    label: int
    confidence: float
    exit: int
    macs: float
    hurried: bool = False


@dataclass(slots=True)
class _Ticket:
    """One request's images."""

    future: "Future[list[Reply]]"
    deadline: float
    arrived: float
    replies: list[Reply | None]
    missing: int


@dataclass
class Counts:
    """What happened so far, for metrics; `on_stage` is told stage, images and seconds of each call."""

    accepted: int = 0
    refused: int = 0
    late: int = 0
    exits: list[int] = field(default_factory=list)


class Scheduler:
    """Queues of images, one per stage, and the thread that empties them.

    Args:
        runner: runs the stages; its policy may change at any time.
        capacity: images that may be in the house.
        governor: moves the policy with the load; None for a fixed one.
        on_stage: told stage, images and seconds of every call of the engine.
    """

    def __init__(
        self,
        runner: Runner,
        capacity: int = 1024,
        governor: Governor | None = None,
        on_stage: Callable[[int, int, float], None] = lambda *_: None,
    ) -> None:
        self.runner, self.capacity, self.governor, self.on_stage = runner, capacity, governor, on_stage
        stages = runner.cascade.num_stages
        self.counts = Counts(exits=[0] * stages)
        self._queues = [Waiting() for _ in range(stages)]
        self._since: list[float] = [0.0] * stages
        self._seconds = [0.0] * stages
        self._owners: dict[int, tuple[_Ticket, int]] = {}
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._next = 0
        self._changed = threading.Condition()
        self._closing = False
        if governor is not None:
            runner.policy = governor.policy
        self._thread = threading.Thread(target=self._work, name="tokensworth-engine", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Images in the house."""
        return len(self._owners)

    @property
    def waiting(self) -> list[int]:
        """Images that wait for each stage."""
        return [len(queue) for queue in self._queues]

    def expected_wait(self) -> float:
        """Seconds until all images in the house are through, by recent times of the stages and the exits' shares."""
        shares = self.runner.policy.shares or (0.0,) * (len(self._queues) - 1) + (1.0,)
        total = 0.0
        for index, queue in enumerate(self._queues):
            reach = 1.0
            for later in range(index, len(self._queues)):
                total += len(queue) * reach * self._seconds[later]
                left = sum(shares[later:])
                reach *= 1 - (shares[later] / left if left else 0.0)
        return total

    def submit(self, images: Tensor, seconds: float) -> "Future[list[Reply]]":
        """Takes images in.

        Args:
            images: (N, C, S, S), normalized.
            seconds: until the deadline.

        Returns:
            The replies, in order; or `Late`.

        Raises:
            Busy: full, or going down.
        """
        now = time.monotonic()
        with self._changed:
            if self._closing:
                raise Busy("the service is going down", 5.0)
            if len(self._owners) + len(images) > self.capacity:
                self.counts.refused += len(images)
                raise Busy(
                    f"full: {len(self._owners)} of {self.capacity} images are waiting", max(0.1, self.expected_wait())
                )
            self.counts.accepted += len(images)
            if not len(images):
                empty: Future[list[Reply]] = Future()
                empty.set_result([])
                return empty
            ticket = _Ticket(Future(), now + seconds, now, [None] * len(images), len(images))
            numbers = torch.arange(self._next, self._next + len(images))
            self._next += len(images)
            self._owners.update((int(n), (ticket, place)) for place, n in enumerate(numbers))
            self._put(0, self.runner.group(numbers, images), now)
            self._changed.notify()
        return ticket.future

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Has the engine's thread do something between two batches: no one else may touch the engine."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closing:
                raise Busy("the service is going down", 5.0)
            self._calls.append((work, future))
            self._changed.notify()
        return future

    def limit(self, limits: Limits) -> None:
        """Sets between which policies the governor moves; on the engine's thread, by `call`."""
        if self.governor is None:
            raise PolicyError("no governor, no limits")
        self.governor = Governor(self.governor.policies, self.governor.patience, limits, self.governor.calm)
        self.runner.policy = self.governor.policy

    def close(self) -> None:
        """Takes nothing in any more and waits until what was accepted is answered."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, index: int, group: Group, now: float) -> None:
        if not self._queues[index]:
            self._since[index] = now
        self._queues[index].add(group)

    def _choose(self, now: float) -> int | None:
        """The stage to run next; None where nobody waits."""
        size, later = self.runner.batch_size, range(len(self._queues) - 1, 0, -1)
        for index in later:
            queue = self._queues[index]
            if len(queue) >= size or (queue and now - self._since[index] > _LINGER):
                return index
        if self._queues[0]:
            return 0
        return next((index for index in later if self._queues[index]), None)

    def _work(self) -> None:
        index: int | None = None
        while True:
            with self._changed:
                now = time.monotonic()
                while not self._calls and (index := self._choose(now)) is None:
                    if self._closing:
                        return
                    self._govern(now)
                    # With a governor also to find a better policy while nobody comes.
                    self._changed.wait(self.governor.calm if self.governor else None)
                    now = time.monotonic()
                calls, self._calls = self._calls, []
                group = None
                if not calls:
                    self._govern(now)
                    assert index is not None
                    group = self._queues[index].take(self.runner.batch_size)
                    self._since[index] = now
            for work, future in calls:
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
            if group is not None and index is not None:
                self._run(index, self._in_time(group, now))

    def _govern(self, now: float) -> None:
        if self.governor is not None and self.governor.update(self.expected_wait(), now):
            self.runner.policy = self.governor.policy

    def _in_time(self, group: Group, now: float) -> Group | None:
        """Those whose deadline has not passed; the others get the last answer they had."""
        numbers = group.positions.tolist()
        over = [i for i, number in enumerate(numbers) if self._owners[number][0].deadline <= now]
        if not over:
            return group
        exits = group.said.shape[1]
        for place in over:
            if not exits:
                self._fail(numbers[place])
                continue
            label, sure = group.said[place, -1].tolist()
            self._reply(numbers[place], Reply(int(label), sure, exits, self.runner.exit_macs[exits - 1], True))
        gone = set(over)
        rest = torch.tensor([i for i in range(len(numbers)) if i not in gone], dtype=torch.long)
        return group.select(rest) if len(rest) else None

    def _run(self, index: int, group: Group | None) -> None:
        if group is None:
            return
        begun = time.monotonic()
        try:
            answer = self.runner.step(index, group)
        except Exception as error:  # an engine's failure is the request's, not the service's
            for number in group.positions.tolist():
                self._fail(number, error)
            return
        now = time.monotonic()
        each = (now - begun) / len(group)
        known = self._seconds[index]
        self._seconds[index] = each if not known else (1 - _MEMORY) * known + _MEMORY * each
        self.on_stage(index, len(group), now - begun)
        gone = answer.positions.tolist()
        for number, label, sure in zip(gone, answer.labels.tolist(), answer.confidences.tolist(), strict=True):
            self._reply(number, Reply(label, sure, index + 1, self.runner.exit_macs[index]))
        self.runner.monitor.add([index] * len(gone))
        if answer.stay is not None:
            with self._changed:
                self._put(index + 1, answer.stay, now)

    def _reply(self, number: int, reply: Reply) -> None:
        ticket, place = self._leave(number)
        self.counts.exits[reply.exit - 1] += 1
        ticket.replies[place] = reply
        ticket.missing -= 1
        if not ticket.missing and not ticket.future.done():
            ticket.future.set_result([r for r in ticket.replies if r is not None])

    def _fail(self, number: int, error: Exception | None = None) -> None:
        ticket, _ = self._leave(number)
        self.counts.late += error is None
        if not ticket.future.done():
            ticket.future.set_exception(error or Late("the deadline passed before the image's turn came"))

    def _leave(self, number: int) -> tuple[_Ticket, int]:
        with self._changed:
            return self._owners.pop(number)
