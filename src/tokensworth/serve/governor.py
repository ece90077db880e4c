"""A budget that follows the load: as images wait longer the policy moves along the frontier to a cheaper one."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokensworth.errors import PolicyError
from tokensworth.exits.policy import Policy

# Share of the wanted wait below which a better policy is tried again: lower than 1, so that it does not swing.
_CALM = 0.5


@dataclass(frozen=True)
class Limits:
    """Between which policies it may move.

    Attributes:
        cheapest, best: places in the list of policies, by growing cost.
    """

    cheapest: int
    best: int


class Governor:
    """Chooses a policy by how long images are expected to wait.

    Args:
        policies: by growing cost; at least one.
        patience: seconds that an image may be expected to wait.
        limits: between which policies; all of them where None.
        calm: seconds that the wait must stay short before a step back to a better policy.

    Raises:
        PolicyError: no policies, or limits outside them.
    """

    def __init__(
        self, policies: Sequence[Policy], patience: float, limits: Limits | None = None, calm: float = 1.0
    ) -> None:
        if not policies:
            raise PolicyError("a budget that follows the load needs the policies of a frontier")
        self.policies = list(policies)
        self.limits = limits or Limits(0, len(policies) - 1)
        if not 0 <= self.limits.cheapest <= self.limits.best < len(policies):
            raise PolicyError(f"limits {self.limits.cheapest} to {self.limits.best} of {len(policies)} policies")
        self.patience, self.calm = patience, calm
        self.place = self.limits.best
        self._since = 0.0

    @property
    def policy(self) -> Policy:
        """The one in force."""
        return self.policies[self.place]

    def update(self, wait: float, now: float) -> bool:
        """Moves along the frontier.

        Args:
            wait: seconds that an image that comes now is expected to wait.
            now: seconds of a clock that only goes forward.

        Returns:
            Whether the policy changed.
        """
        before = self.place
        if wait > self.patience:
            # At once, the further the longer the wait; back one step at a time.
            span = self.limits.best - self.limits.cheapest
            down = max(1, round(span * min(1.0, (wait / self.patience - 1) / 2)))
            self.place = max(self.limits.cheapest, self.place - down)
            self._since = now
        elif wait > _CALM * self.patience:
            self._since = now
        elif now - self._since >= self.calm:
            self.place = min(self.limits.best, self.place + 1)
            self._since = now
        return self.place != before
