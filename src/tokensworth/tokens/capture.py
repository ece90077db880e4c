"""Queries, keys and reused relations of the layers around each ToSA layer, from a dense forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokensworth.tokens.attention import logits_of
from tokensworth.tokens.method import adapted_vits, dense
from tokensworth.tokens.tosa import AdaptedToSA
from tokensworth.tokens.tosa_layer import ToSALayer
from tokensworth.tokens.tosa_modules import ObservedAttention
from tokensworth.tokens.vit import Swaps


class Attended(NamedTuple):
    """What one attention layer compared in a forward pass.

    Attributes:
        attn: the layer.
        q, k: (B, H, N, d).
        bias: added to its logits (B, H, N, N), or None.
    """

    attn: nn.Module
    q: Tensor
    k: Tensor
    bias: Tensor | None

    def logits(self, rows: Tensor) -> Tensor:
        """Pre-softmax logits of query rows (R,): (B, H, R, N)."""
        bias = self.bias if self.bias is None or self.bias.shape[2] == 1 else self.bias.index_select(2, rows)
        return logits_of(self.attn, self.q.index_select(2, rows), self.k, bias)


class Pair(NamedTuple):
    """One ToSA layer and what a dense pass showed around it.

    Attributes:
        name: `2` for layer 2; `stage 1, layer 2` where a model holds several transformers.
        layer: selector and choice.
        current: the standard layer before.
        following: the ToSA layer itself, on all tokens: the truth.
    """

    name: str
    layer: ToSALayer
    current: Attended
    following: Attended


@contextmanager
def _tapped(model: nn.Module) -> Iterator[dict[tuple[int, int], Attended]]:
    """Fills a dictionary by (transformer, layer number) with each forward pass."""
    seen: dict[tuple[int, int], Attended] = {}
    swaps, tapped = Swaps(), []

    def keep(key: tuple[int, int], *values: Any) -> None:
        seen[key] = Attended(*values)

    for place, (vit, added) in enumerate(adapted_vits(model)):
        if not isinstance(added, AdaptedToSA):
            continue
        for number in added.method.layers:
            for key in ((place, number - 1), (place, number)):
                attn: Any = vit.blocks[key[1] - 1].attn  # type: ignore[union-attr]
                if key[1] == number:
                    swaps.swap(attn, ObservedAttention)
                attn.__dict__["tap"] = partial(keep, key)
                tapped.append(attn)
    try:
        yield seen
    finally:
        for attn in tapped:
            attn.__dict__.pop("tap", None)
        swaps.undo()


@torch.no_grad()
def dense_pairs(model: nn.Module, images: Tensor) -> list[Pair]:
    """Runs an adapted model on all tokens and returns each ToSA layer with its surroundings.

    Args:
        model: adapted with `ToSA`.
        images: (B, C, S, S), normalized.
    """
    with dense(model), _tapped(model) as seen:
        model(images)
    pairs = []
    vits = adapted_vits(model)
    for place, (_, added) in enumerate(vits):
        if not isinstance(added, AdaptedToSA):
            continue
        for number in added.method.layers:
            layer: Any = added.layers[str(number)]
            name = f"{number}" if len(vits) == 1 else f"stage {place + 1}, layer {number}"
            pairs.append(Pair(name, layer, seen[place, number - 1], seen[place, number]))
    return pairs
