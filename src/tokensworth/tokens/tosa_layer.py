"""Selector and choice of one ToSA layer: from the logits of the layer before to the tokens that take part."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tokensworth.tokens.attention import row_logits
from tokensworth.tokens.choose import Chosen, fewest, highest
from tokensworth.tokens.selector import Selector, received, staggered_rows

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
        self.record: Callable[[Chosen], None] | None = None

    def rows(self, tokens: int, device: torch.device) -> Tensor:
        """Query rows that are scored, (R,)."""
        return staggered_rows(tokens - self.prefix, self.width(tokens), self.prefix, self.method.rows, device)

    def width(self, tokens: int) -> int:
        """Width of the patch grid of N tokens, prefix tokens included."""
        patches = tokens - self.prefix
        return self.grid[1] if self.grid[0] * self.grid[1] == patches else math.isqrt(patches)

    def received(self, maps: Tensor) -> Tensor:
        """How much attention each token receives from all queries: scored rows (B, H, R, N) -> (B, H, N)."""
        return received(maps, maps.shape[3] - self.prefix, self.prefix)

    def choose(self, scores: Tensor) -> Chosen:
        """The tokens that take part, by scores (B, H, N)."""
        if self.method.scope == "layer":
            scores = scores.mean(dim=1)
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
        scored = self.rows(tokens, device)
        predicted = None
        if whole:
            predicted = self.predict(row_logits(attn, q, k, torch.arange(tokens, device=device), bias)).log_softmax(-1)
        if self.method.scorer == "random":
            scores = torch.rand(k.shape[:3], device=device)
        elif predicted is not None:
            scores = self.received(predicted.index_select(2, scored).exp())
        else:
            step = self._step(scored, tokens)
            pieces = []
            for start in range(0, len(k), step or len(k)):
                part = slice(start, start + step if step else None)
                logits = row_logits(attn, q[part], k[part], scored, None if bias is None else bias[part])
                pieces.append(self.received(self.predict(logits).softmax(dim=-1)))
            scores = torch.cat(pieces)
        self.picked = Picked(self.choose(scores), predicted)

    def predict(self, logits: Tensor) -> Tensor:
        """The next layer's map before softmax, (B, H, R, N)."""
        return self.selector.maps(logits) if self.method.scorer == "selector" else logits

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
