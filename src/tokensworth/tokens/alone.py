"""One image on a CPU, in NumPy: its calls cost less than torch's, which is what the small operations of one image are
made of, and they wake no threads."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Which tokens merge into which; rows as `Tokens.merge` takes them."""

    kept: Tensor
    merged: Tensor
    into: Tensor


def alone(x: Tensor) -> bool:
    """Whether x (B, ...) is one image of which NumPy can take over a part."""
    return (
        x.shape[0] == 1
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not x.requires_grad
    )


@lru_cache(maxsize=256)
def _line(tokens: int, prefix: int) -> np.ndarray:
    """The rows in the order of those that remain: prefix tokens, then patches at even places, then at odd ones."""
    places = np.arange(tokens)
    return (places + tokens * (1 + places % 2) * (places >= prefix)).argsort()


def pairs_alone(alike: Tensor, count: int, tokens: int, prefix: int) -> Pairs:
    """The most similar pairs of one image.

    Args:
        alike: similarity (1, n, m) of the tokens at even places to those at odd places.
        count: pairs wanted.
        tokens: N.
        prefix: tokens at the beginning that must remain.
    """
    values = alike[0].numpy()
    partner = values.argmax(axis=1)
    best = values[np.arange(len(values)), partner]
    merged = best.argpartition(len(best) - count)[len(best) - count :]
    remains = np.ones(tokens, dtype=bool)
    remains[prefix + merged] = False  # even places follow the prefix tokens in the line
    gone, into = (prefix + 1) // 2 * 2 + 2 * merged, prefix // 2 * 2 + 1 + 2 * partner[merged]
    rows = _line(tokens, prefix)[remains], gone, into
    return Pairs(*(torch.from_numpy(part[None]) for part in rows))


def merge_alone(x: Tensor, sizes: Tensor | None, kept: Tensor, merged: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """What `Tokens.merge` does to the tokens (1, N, D) and their sizes (1, N) of one image; `x` is changed in place."""
    each = x[0].numpy()
    kept_rows, merged_rows, into_rows = kept[0].numpy(), merged[0].numpy(), into[0].numpy()
    size = np.ones(len(each), dtype=np.float32) if sizes is None else sizes[0].numpy()
    more = size.take(merged_rows)
    size = size + np.bincount(into_rows, more, len(each)).astype(np.float32)
    share = more / size.take(into_rows)
    moved = (each.take(merged_rows, axis=0) - each.take(into_rows, axis=0)) * share[:, None]
    for row, what in zip(into_rows.tolist(), moved, strict=True):  # two may go into one
        each[row] += what
    return torch.from_numpy(each.take(kept_rows, axis=0)[None]), torch.from_numpy(size.take(kept_rows)[None])


def log_alone(sizes: Tensor) -> Tensor:
    """The logarithm of the sizes of one image's tokens."""
    return torch.from_numpy(np.log(sizes.numpy()))
