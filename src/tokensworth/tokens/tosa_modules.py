"""timm's own blocks and attention layers with ToSA mixed in."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.attention import attend, finish, project
from tokensworth.tokens.choose import Chosen
from tokensworth.tokens.gather import flat_rows, put, take, take_rope
from tokensworth.tokens.tosa_layer import Picked, ToSALayer


class Switch(Protocol):
    """What the layers ask of the adaptation they belong to."""

    enabled: bool
    most: bool

    def warn_unfitted(self) -> None:
        """Warns once where the selectors are used as they were made."""


def _refuse(is_causal: bool) -> None:
    if is_causal:
        raise UnsupportedModelError("ToSA cannot run with causal attention")


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """timm's attention masks may be boolean, True where attended."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))


def _square(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as an additive bias of four dimensions."""
    bias = _additive(mask, dtype)
    return None if bias is None else bias[(None,) * (4 - bias.ndim)]


def observe(attn: nn.Module, q: Tensor, k: Tensor, bias: Tensor | None, whole: bool = False) -> None:
    """Shows an attention layer's queries and keys to the ToSA layer that it serves, and to a tap, if any."""
    # Swapped-in attributes lie in `__dict__`; to ask nn.Module for what is not there is slow.
    tap = attn.__dict__.get("tap")
    if tap is not None:
        tap(attn, q, k, bias)
    served = attn.__dict__.get("serves")
    if served is not None and served[1].enabled:
        served[1].warn_unfitted()
        served[0].observe(attn, q, k, bias, whole, served[1].most)


def thinned(part: Any) -> Picked | None:
    """What was chosen for a block or its attention; None where it runs on all tokens."""
    inner = part._modules.get("attn")
    tosa = part.__dict__.get("tosa") or (None if inner is None else inner.__dict__.get("tosa"))
    return tosa[0].pick() if tosa is not None and tosa[1].enabled else None


class ObservedAttention(nn.Module):
    """Mixed into the attention before a ToSA layer: as before, and shows its logits to the selector."""

    serves: tuple[ToSALayer, Switch]

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _refuse(is_causal)
        q, k, v = project(self, x, rope)
        bias = _square(attn_mask, q.dtype)
        observe(self, q, k, None if bias is None else bias.expand(-1, -1, q.shape[2], -1))
        return finish(self, x, attend(self, q, k, v, bias))


class SelectiveBlock(nn.Module):
    """Mixed into a ToSA layer's block, scope `layer`: timm's own block on the chosen tokens."""

    tosa: tuple[ToSALayer, Switch]

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _refuse(is_causal)
        options: dict[str, Tensor] = {} if rope is None else {"rope": rope}
        picked = thinned(self)
        if picked is None:
            return super().forward(x, **options, attn_mask=attn_mask)  # type: ignore[misc]
        chosen = picked.chosen
        rows = flat_rows(chosen.places, x.shape[1])
        part = take(x, chosen.places, rows)
        if rope is not None:
            options["rope"] = take_rope(rope, chosen.places, self.tosa[0].prefix)
        hidden = chosen.between(_square(attn_mask, x.dtype), x.dtype)
        out = super().forward(part, **options, attn_mask=hidden)  # type: ignore[misc]
        return put(x, chosen.places, chosen.merge(out, part), rows)


class SelectiveAttention(nn.Module):
    """Mixed into a ToSA layer's attention, scope `per_head`: each head attends over its own tokens."""

    tosa: tuple[ToSALayer, Switch]

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _refuse(is_causal)
        q, k, v = project(self, x, rope)
        bias, picked = _square(attn_mask, q.dtype), thinned(self)
        mixed = attend(self, q, k, v, bias) if picked is None else attend_per_head(self, q, k, v, bias, picked.chosen)
        return finish(self, x, mixed)


def attend_per_head(attn: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, chosen: Chosen) -> Tensor:
    """Attention of each head over its own tokens, zero elsewhere: (B, H, N, d).

    Args:
        attn: the layer, for its scale and dropout.
        q, k, v: (B, H, N, d).
        bias: additive, (B, H, N, N), or None.
        chosen: positions (B, H, K).
    """
    index = chosen.places
    hidden = chosen.between(bias, q.dtype)
    rows = flat_rows(index, q.shape[2])
    part = attend(attn, take(q, index, rows), take(k, index, rows), take(v, index, rows), hidden)
    if chosen.valid is not None:
        part = part * chosen.valid.unsqueeze(3)
    return put(torch.zeros_like(v), index, part, rows)
