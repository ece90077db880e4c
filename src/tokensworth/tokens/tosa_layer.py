"""Selector and choice of one ToSA layer: from the logits of the layer before to the tokens that take part."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tokensworth.tokens.attention import logits_of
from tokensworth.tokens.choose import Chosen, fewest, highest
from tokensworth.tokens.queries import Queries, block_queries
from tokensworth.tokens.scoring import scores_of
from tokensworth.tokens.selector import Selector

if TYPE_CHECKING:
    from tokensworth.tokens.tosa import ToSA


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
        self._queries: dict[tuple[int, int, torch.device], Queries] = {}
        self.record: Callable[[Chosen], None] | None = None

    def queries(self, tokens: int, device: torch.device) -> Queries:
        """The query rows that are scored, of N."""
        count, patches = self.method.rows, tokens - self.prefix
        key = (tokens, count, device)
        known = None if torch.compiler.is_compiling() else self._queries.get(key)
        if known is None:
            known = block_queries(patches, self.width(tokens), self.prefix, count, device)
            if not torch.compiler.is_compiling():
                self._queries[key] = known
        return known

    def width(self, tokens: int) -> int:
        """Width of the patch grid of N tokens, prefix tokens included."""
        patches = tokens - self.prefix
        return self.grid[1] if self.grid[0] * self.grid[1] == patches else math.isqrt(patches)

    def choose(self, scores: Tensor, most: bool = False) -> Chosen:
        """The tokens that take part, by scores (B, H, N); with `most`, as many as may."""
        scores = scores.mean(dim=1) if self.method.scope == "layer" else scores
        if self.method.mass and not most:
            return fewest(scores, self.prefix, self.method.mass, self.keep)
        return highest(scores, self.prefix, self.keep)

    @torch.no_grad()
    def observe(
        self, attn: Any, q: Tensor, k: Tensor, bias: Tensor | None, whole: bool = False, most: bool = False
    ) -> None:
        """Predicts the next layer's map and chooses its tokens.

        Args:
            attn: the layer before.
            q, k: its queries and keys (B, H, N, d).
            bias: what is added to its logits, (B, H, N, N), or None.
            whole: predict all rows, to be handed on as relations; the choice stays that of the scored rows.
            most: keep as many tokens as an adaptive keep ratio may.
        """
        predicted = None
        if whole:
            logits = logits_of(attn, q, k, bias)
            predicted = self.selector(logits) if self.method.scorer == "selector" else logits.log_softmax(dim=-1)
        self.picked = Picked(self.choose(self.scores(attn, q, k, bias), most), predicted)

    @torch.no_grad()
    def scores(self, attn: Any, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """What tokens are chosen by, (B, H, N); arguments as in `observe`."""
        if self.method.scorer == "random":
            return torch.rand(k.shape[:3], device=k.device)
        selector = self.selector if self.method.scorer == "selector" else None
        return scores_of(selector, attn, q, k, bias, self.queries(k.shape[2], k.device))

    def pick(self) -> "Picked | None":
        """What was chosen; None where the layer is to run on all tokens."""
        picked = self.picked
        if self.record is not None and picked is not None:
            self.record(picked.chosen)
        if not (self.training or torch.is_grad_enabled()):
            # Otherwise kept: a checkpointed layer asks again when it is run for the gradients.
            self.picked = None
        return picked
