"""A sequence of tokens that grows shorter: what is known of each token, dropping some, merging some."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokensworth.tokens.gather import flat_rows, take


class Tokens(NamedTuple):
    """The tokens between two layers, prefix tokens first.

    Attributes:
        x: (B, N, D).
        patches: how many patch tokens there were at first.
        places: (B, N), which token of the whole sequence each is; None: not followed.
        sizes: (B, N), how many tokens each stands for; None: one each.
        source: (B, M), for each of the M tokens there were at first, the row that holds it now; None: not followed.
        policy: (B, N), in training, 1 for tokens still taking part; None: all.
    """

    x: Tensor
    patches: int
    places: Tensor | None = None
    sizes: Tensor | None = None
    source: Tensor | None = None
    policy: Tensor | None = None

    def keep(self, rows: Tensor) -> "Tokens":
        """The tokens at rows (B, K) alone."""

        def chosen(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.gather(1, rows)

        return self._replace(
            x=take(self.x, rows), places=chosen(self.places), sizes=chosen(self.sizes), policy=chosen(self.policy)
        )

    def merge(self, kept: Tensor, merged: Tensor, into: Tensor) -> "Tokens":
        """Averages tokens into others, weighted by how many tokens each stands for.

        Args:
            kept: rows (B, K) that remain, in this order.
            merged: rows (B, R) that do not.
            into: (B, R), for each of these, the place in `kept` of the token it is merged into.
        """
        count = kept.shape[1]
        sizes = torch.ones(self.x.shape[:2], device=self.x.device) if self.sizes is None else self.sizes
        more = sizes.gather(1, merged)
        after = sizes.gather(1, kept).scatter_add_(1, into, more)
        share = more.div_(after.gather(1, into)).unsqueeze(2).to(self.x.dtype)
        # The new mean is the old one plus its share of the difference: only rows that change are touched twice.
        x, rows = take(self.x, kept), flat_rows(into, count)
        moved = (take(self.x, merged) - take(x, into, rows)) * share
        x = x.flatten(0, 1).index_add_(0, rows, moved.flatten(0, 1))
        source = self.source
        if source is not None:
            row = torch.empty(self.x.shape[:2], dtype=torch.long, device=x.device)
            order = torch.arange(count, device=x.device).expand(len(kept), -1)
            source = row.scatter_(1, kept, order).scatter_(1, merged, into).gather(1, source)
        places = None if self.places is None else self.places.gather(1, kept)
        return self._replace(x=x.unflatten(0, kept.shape), places=places, sizes=after, source=source)

    def whole(self) -> Tensor:
        """The sequence at its first length (B, M, D), each token as the one that holds it now."""
        assert self.source is not None
        return take(self.x, self.source)


def first_rows(count: int, like: Tensor) -> Tensor:
    """Rows 0 .. count - 1 for each image of a batch: (B, count)."""
    return torch.arange(count, device=like.device).expand(like.shape[0], -1)
