"""Survivors of several batches that wait for one stage, first come first served."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from tokensworth.cascade import Upstream


@dataclass(slots=True)
class Group:
    """Images as one dense batch on their way to a stage.

    Attributes:
        positions: (B,) who they are, by numbers of the caller's.
        images: (B, C, S, S).
        state: what the stage before handed on; None before the first.
        said: (B, e, 2), label and confidence of each exit before.
    """

    positions: Tensor
    images: Tensor
    state: Upstream | None
    said: Tensor

    def __len__(self) -> int:
        return self.positions.shape[0]

    def select(self, index: Tensor | slice) -> "Group":
        """Some of them: places (K,) or a slice."""
        state = None if self.state is None else self.state.select(index)
        return Group(self.positions[index], self.images[index], state, self.said[index])

    @staticmethod
    def concat(groups: list["Group"]) -> "Group":
        """Several as one."""
        if len(groups) == 1:
            return groups[0]
        states = [g.state for g in groups if g.state is not None]
        return Group(
            torch.cat([g.positions for g in groups]),
            torch.cat([g.images for g in groups]),
            Upstream.concat(states) if states else None,
            torch.cat([g.said for g in groups]),
        )


class Waiting:
    """A queue of groups, counted in images."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, group: Group) -> None:
        """Puts images at the end."""
        if len(group):
            self._groups.append(group)
            self._count += len(group)

    def take(self, count: int) -> Group:
        """The first `count` images, or all where there are fewer, as one dense batch."""
        taken: list[Group] = []
        missing = min(count, self._count)
        self._count -= missing
        while missing:
            group = self._groups.popleft()
            if len(group) > missing:
                self._groups.appendleft(group.select(slice(missing, None)))
                group = group.select(slice(0, missing))
            taken.append(group)
            missing -= len(group)
        return Group.concat(taken)
