"""How much attention each token will receive in the next layer, by a selector's prediction."""

from typing import Any

import torch
from torch import Tensor

from tokensworth.tokens.attention import logits_of
from tokensworth.tokens.queries import Queries
from tokensworth.tokens.selector import Selector

# On a CPU the selector runs a few images at a time, its hidden maps near this size: small enough for a cache.
_PIECE_BYTES = 2**21


def scores_of(
    selector: Selector | None, attn: Any, q: Tensor, k: Tensor, bias: Tensor | None, queries: Queries
) -> Tensor:
    """Predicted attention received by each token from all queries: (B, H, N).

    Args:
        selector: None for the layer's own attention.
        attn: the layer.
        q, k: its queries and keys, (B, H, N, d).
        bias: added to its logits, broadcast to (B, H, N, N), or None.
        queries: the rows that are scored.
    """
    rows = queries.of(q)
    if selector is not None and bias is None and _eagerly(q):
        return _by_pieces(selector, rows * attn.scale, k, queries)
    # A mean over hidden pairs, of minus infinity, must not become not-a-number.
    shown = None if bias is None else queries.of_map(bias.clamp(min=torch.finfo(bias.dtype).min))
    logits = logits_of(attn, rows, k, shown)
    return queries.received(logits.softmax(dim=-1) if selector is None else selector(logits).exp())


def _eagerly(q: Tensor) -> bool:
    """Whether it pays, and is possible, to run some images at a time."""
    return q.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))


def _by_pieces(selector: Selector, rows: Tensor, k: Tensor, queries: Queries) -> Tensor:
    """`scores_of` on rows (B, H, R, d), scaled, and keys (B, H, N, d)."""
    images, heads, count, _ = rows.shape
    tokens = k.shape[2]
    step = max(1, _PIECE_BYTES // (rows.element_size() * len(selector.bias) * count * tokens))
    pieces = []
    for start in range(0, images, step):
        some, keys = rows[start : start + step], k[start : start + step]
        # One product for a single image, else one for each head: so keys that view one projection stay as they are.
        if len(some) == 1:
            logits = torch.bmm(some[0], keys[0].mT).unsqueeze(1)
        else:
            logits = rows.new_empty(heads, len(some), count, tokens)
            for head in range(heads):
                torch.bmm(some[:, head], keys[:, head].mT, out=logits[head])
        pieces.append(queries.received(selector.maps(logits).softmax(dim=-1)))
    scores = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return scores.transpose(0, 1)
