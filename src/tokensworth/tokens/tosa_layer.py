"""Selector and choice of one ToSA layer: from the logits of the layer before to the tokens that take part."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tokensworth.tokens.attention import row_logits
from tokensworth.tokens.choose import Chosen, fewest, highest
from tokensworth.tokens.selector import Selector, received, row_weights, staggered_rows

if TYPE_CHECKING:
    from tokensworth.tokens.tosa import ToSA

# On a CPU the selector runs a few images at a time, its hidden maps near this size: small enough for a cache.
_CHUNK_BYTES = 2**20


class Picked(NamedTuple):
    """What a selector said for one ToSA layer.

    Attributes:
        chosen: the tokens that take part.
        whole: predicted log-attention of all rows (B, H, N, N), where it was asked for.
    """

    chosen: Chosen
    whole: Tensor | None

    @property
    def predicted(self) -> Tensor:
        """The predicted map, for a stage that hands it on."""
        assert self.whole is not None
        return self.whole


class ToSALayer(nn.Module):
    """Selector and choice of one ToSA layer.

    The layer before it calls `observe`; the layer itself then calls `pick`.

    Args:
        method: the options.
        keep: share of patches that take part.
        heads: H of the layer before.
        prefix: number of prefix tokens.
        grid: height and width of the patch grid; a model fed another number of patches has a square one.
    """

    def __init__(self, method: "ToSA", keep: float, heads: int, prefix: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.method, self.keep, self.prefix, self.grid = method, keep, prefix, grid
        self.selector = Selector(heads, method.width * heads, method.kernel)
        self.picked: Picked | None = None
        self._rows: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self.record: Callable[[Chosen], None] | None = None

    def rows(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Query rows that are scored, (R,), and how many queries each stands for, (1, R)."""
        count, patches = self.method.rows, tokens - self.prefix
        key = (tokens, count, device)
        known = None if torch.compiler.is_compiling() else self._rows.get(key)
        if known is None:
            rows = staggered_rows(patches, self.width(tokens), self.prefix, count, device)
            known = rows, row_weights(patches, self.prefix, len(rows), device)
            if not torch.compiler.is_compiling():
                self._rows[key] = known
        return known

    def width(self, tokens: int) -> int:
        """Width of the patch grid of N tokens, prefix tokens included."""
        patches = tokens - self.prefix
        return self.grid[1] if self.grid[0] * self.grid[1] == patches else math.isqrt(patches)

    def choose(self, scores: Tensor) -> Chosen:
        """The tokens that take part, by scores (H, B, N)."""
        scores = scores.mean(dim=0) if self.method.scope == "layer" else scores.transpose(0, 1)
        if self.method.mass:
            return fewest(scores, self.prefix, self.method.mass, self.keep)
        return highest(scores, self.prefix, self.keep)

    @torch.no_grad()
    def observe(self, attn: Any, q: Tensor, k: Tensor, bias: Tensor | None, whole: bool = False) -> None:
        """Predicts the next layer's map and chooses its tokens.

        Args:
            attn: the layer before.
            q, k: its queries and keys (B, H, N, d).
            bias: what is added to its logits, (B, H, N, N), or None.
            whole: predict all rows, to be handed on as relations; the choice stays that of the scored rows.
        """
        tokens, device = k.shape[2], k.device
        scored, weights = self.rows(tokens, device)
        predicted = None
        if whole:
            everything = torch.arange(tokens, device=device)
            predicted = self.predict(attn, q, k, everything, bias).log_softmax(dim=-1)
        if self.method.scorer == "random":
            scores = torch.rand((k.shape[1], len(k), tokens), device=device)
        elif predicted is not None:
            scores = received(predicted.index_select(2, scored).exp(), weights)
        else:
            step = self._step(scored, tokens) or len(k)
            pieces = []
            for start in range(0, len(k), step):
                part = slice(start, start + step)
                maps = self.predict(attn, q[part], k[part], scored, None if bias is None else bias[part])
                pieces.append(received(maps.softmax(dim=-1), weights))
            scores = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        self.picked = Picked(self.choose(scores), None if predicted is None else predicted.transpose(0, 1))

    def predict(self, attn: Any, q: Tensor, k: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (R,) of the next layer's map before softmax, heads first: (H, B, R, N); arguments as in `observe`."""
        if self.method.scorer == "selector":
            return self.selector.maps(row_logits(attn, q, k, rows, bias, self.selector.margin))
        return row_logits(attn, q, k, rows, bias)

    def _step(self, scored: Tensor, tokens: int) -> int:
        """Images at a time whose hidden maps fit a cache; 0 for all at once."""
        if torch.compiler.is_compiling() or scored.device.type != "cpu":
            return 0
        return max(1, _CHUNK_BYTES // (4 * self.selector.conv1.out_channels * len(scored) * tokens))

    def pick(self) -> "Picked | None":
        """What was chosen; None where the layer is to run on all tokens."""
        picked = self.picked
        if self.record is not None and picked is not None:
            self.record(picked.chosen)
        if not (self.training or torch.is_grad_enabled()):
            # Otherwise kept: a checkpointed layer asks again when it is run for the gradients.
            self.picked = None
        return picked
