"""A sequence of tokens that grows shorter: what is known of each token, dropping some, merging some."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokensworth.tokens.alone import alone, merge_alone
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
        """Averages tokens into others, weighted by how many tokens each stands for; `x` is changed in place.

        Args:
            kept: rows (B, K) that remain, in this order.
            merged: rows (B, R) that do not.
            into: rows (B, R) among those that remain, into which these are merged.
        """
        x, sizes = (merge_alone if alone(self.x) else _merge)(self.x, self.sizes, kept, merged, into)
        return Tokens(
            x,
            self.patches,
            None if self.places is None else self.places.gather(1, kept),
            sizes,
            None if self.source is None else _moved(self.source, self.x.shape[1], kept, merged, into),
            self.policy,
        )

    def whole(self) -> Tensor:
        """The sequence at its first length (B, M, D), each token as the one that holds it now."""
        assert self.source is not None
        return take(self.x, self.source)


def first_rows(count: int, like: Tensor) -> Tensor:
    """Rows 0 .. count - 1 for each image of a batch: (B, count)."""
    return torch.arange(count, device=like.device).expand(like.shape[0], -1)


def _merge(x: Tensor, sizes: Tensor | None, kept: Tensor, merged: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and sizes after a merge; arguments as in `Tokens.merge`."""
    tokens = x.shape[1]
    kept_rows, merged_rows, into_rows = (flat_rows(rows, tokens) for rows in (kept, merged, into))
    flat = x.flatten(0, 1)
    size = torch.ones(flat.shape[0], device=x.device) if sizes is None else sizes.flatten()
    more = size.index_select(0, merged_rows)
    size = size.index_add(0, into_rows, more)
    share = more.div_(size.index_select(0, into_rows)).unsqueeze(1)
    # The new mean is the old one plus a share of the difference, so that no other row is touched.
    moved = flat.index_select(0, merged_rows) - flat.index_select(0, into_rows)
    flat = flat.index_add_(0, into_rows, moved * (share if share.dtype == x.dtype else share.to(x.dtype)))
    parts = flat.index_select(0, kept_rows), size.index_select(0, kept_rows)
    return parts[0].view(*kept.shape, -1), parts[1].view(kept.shape)


def _moved(source: Tensor, tokens: int, kept: Tensor, merged: Tensor, into: Tensor) -> Tensor:
    """Where each first token (B, M) is held after a merge; arguments as in `Tokens.merge`."""
    row = torch.zeros(kept.shape[0], tokens, dtype=torch.long, device=kept.device)
    row = row.scatter(1, kept, first_rows(kept.shape[1], kept))
    return row.scatter(1, merged, row.gather(1, into)).gather(1, source)
