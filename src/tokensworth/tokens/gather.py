"""Moving chosen tokens out of a grid and back, each image with its own choice.

Rows are copied whole through a flat index, which is several times faster on a CPU than an expanded `gather`.
"""

import torch
from torch import Tensor


def flat_rows(places: Tensor, tokens: int) -> Tensor:
    """Positions (..., K) within each group of `tokens` rows to positions among the rows of all groups: (... K,)."""
    flat = places.flatten(0, -2)
    groups = flat.shape[0]
    # A graph must not depend on how many groups there are; a call on one saves the addition.
    if groups == 1 and not torch.compiler.is_compiling():
        return flat.flatten()
    start = torch.arange(groups, device=places.device) * tokens
    return (flat + start.unsqueeze(1)).flatten()


def take(x: Tensor, places: Tensor, rows: Tensor | None = None) -> Tensor:
    """Rows of each group: x (..., N, D), places (..., K) -> (..., K, D).

    Args:
        x: the tokens.
        places: which of them.
        rows: `flat_rows` of the places, where it is at hand.
    """
    rows = flat_rows(places, x.shape[-2]) if rows is None else rows
    return x.flatten(0, -2).index_select(0, rows).unflatten(0, places.shape)


def put(x: Tensor, places: Tensor, part: Tensor, rows: Tensor | None = None) -> Tensor:
    """A copy of x (..., N, D) with `part` (..., K, D) at the places (..., K); `rows` as in `take`."""
    rows = flat_rows(places, x.shape[-2]) if rows is None else rows
    return x.flatten(0, -2).index_copy(0, rows, part.flatten(0, -2).to(x.dtype)).view_as(x)


def take_square(bias: Tensor, places: Tensor) -> Tensor:
    """The K x K part of a bias between tokens: (B, H, N, N) -> (B, H, K, K).

    Args:
        bias: (B or 1, H or 1, N or 1, N).
        places: (B, K) for all heads alike, or (B, H, K).
    """
    shared = places.unsqueeze(1) if places.ndim == 2 else places
    heads = max(bias.shape[1], shared.shape[1])
    shared = shared.expand(-1, heads, -1)
    bias = bias.expand(places.shape[0], heads, bias.shape[2], -1)
    if bias.shape[2] > 1:
        bias = bias.gather(2, shared.unsqueeze(3).expand(-1, -1, -1, bias.shape[3]))
    return bias.gather(3, shared.unsqueeze(2).expand(-1, -1, bias.shape[2], -1))


def take_rope(rope: Tensor, places: Tensor, prefix: int) -> Tensor:
    """Rotary positions of the chosen patch tokens: (B, 1 or H, K - prefix, e).

    Args:
        rope: (N, e); (H, N, e) for one per head; or (B, 1 or H, N, e) after patch dropout. N patches.
        places: (B, K) token positions, the prefix tokens first.
        prefix: number of prefix tokens, which have no rotary position.
    """
    patches = places[:, prefix:] - prefix
    if rope.ndim == 2:
        return rope[patches].unsqueeze(1)
    if rope.ndim == 3:
        return rope[:, patches].transpose(0, 1)
    return take(rope, patches.unsqueeze(1).expand(-1, rope.shape[1], -1))
