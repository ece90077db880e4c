"""ToSA, token selective attention (Singh et al., CVPR workshops 2024, arXiv 2406.08816).

A standard layer's logits predict the next layer's attention map; in that next layer, the ToSA layer, only the
tokens that the prediction finds attended take part. The others pass it by, so the whole grid survives.

Two readings of "pass by", since the paper does not spell it out:

- `layer`: scores are averaged over heads; the K tokens run timm's own block, the others skip it whole.
- `per_head`: each head attends over its own K tokens; a token skipped by a head gets nothing from that head,
  and the MLP runs on every token.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.attention import attend, finish, project, row_logits
from tokensworth.tokens.choose import Chosen, fewest, highest
from tokensworth.tokens.gather import put, take, take_rope, take_square
from tokensworth.tokens.method import Adapted, Method, adapted_vits
from tokensworth.tokens.selector import Selector, row_weights, staggered_rows
from tokensworth.tokens.vit import ViT, check_attention

Keep = float | Sequence[float] | Mapping[int, float]


@dataclass(frozen=True)
class ToSA(Method):
    """Options of ToSA.

    Attributes:
        layers: the ToSA layers, counted from 1 as in the paper; each is served by the layer before it.
        keep: share of the patch tokens that take part, one for all ToSA layers or one for each. Prefix
            tokens always take part.
        scope: `layer` or `per_head`, see above.
        rows: every how many-th query row is scored; 1 for all, as published, which costs more than it saves.
        kernel: size of the selector's convolutions along the keys, odd.
        width: the selector's hidden channels per head, at least 2.
        mass: keep as few tokens as hold this share of the predicted attention, at most `keep`; 0 for off.
        scorer: what scores the tokens: the fitted `selector`; the `current` layer's own map; or `random`.
            The last two are baselines.
    """

    name: ClassVar[str] = "tosa"
    layers: tuple[int, ...] = (2, 4, 6, 8, 10)
    keep: float | tuple[float, ...] = 0.8
    scope: Literal["layer", "per_head"] = "layer"
    rows: int = 8
    kernel: int = 3
    width: int = 4
    mass: float = 0.0
    scorer: Literal["selector", "current", "random"] = "selector"

    def __post_init__(self) -> None:
        layers = tuple(sorted(self.layers))
        object.__setattr__(self, "layers", layers)
        if isinstance(self.keep, Sequence):
            object.__setattr__(self, "keep", tuple(self.keep))
        if not layers or len(set(layers)) < len(layers) or layers[0] < 2:
            raise UnsupportedModelError(f"ToSA layers {list(layers)}: name each once, from 2 on (layer 1 has none before)")
        if any(b == a + 1 for a, b in zip(layers, layers[1:], strict=False)):
            raise UnsupportedModelError(f"ToSA layers {list(layers)}: a standard layer must stand before each of them")
        keeps = self.keeps()
        if not all(0 < k <= 1 for k in keeps.values()):
            raise UnsupportedModelError(f"keep {self.keep}: each ratio must be above 0 and at most 1")
        if self.scope not in ("layer", "per_head") or self.scorer not in ("selector", "current", "random"):
            raise UnsupportedModelError(f"no scope {self.scope!r} with scorer {self.scorer!r}")
        if self.rows < 1 or self.kernel % 2 == 0 or self.kernel < 1 or self.width < 2 or not 0 <= self.mass <= 1:
            raise UnsupportedModelError("rows >= 1, an odd kernel, width >= 2 and 0 <= mass <= 1 are needed")

    def keeps(self) -> dict[int, float]:
        """Keep ratio of each ToSA layer.

        Raises:
            UnsupportedModelError: another number of ratios than layers.
        """
        if isinstance(self.keep, tuple):
            if len(self.keep) != len(self.layers):
                raise UnsupportedModelError(f"{len(self.keep)} keep ratios for {len(self.layers)} ToSA layers")
            return dict(zip(self.layers, self.keep, strict=True))
        return dict.fromkeys(self.layers, float(self.keep))

    def attach(self, vit: ViT) -> "AdaptedToSA":
        for layer in self.layers:
            check_attention(vit, layer)
            check_attention(vit, layer - 1)
        return AdaptedToSA(self, vit)


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

    def __init__(self, method: ToSA, keep: float, heads: int, prefix: int, grid: tuple[int, int]) -> None:
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

    def scores(self, maps: Tensor) -> Tensor:
        """How much attention each token receives, summed over all N queries: rows (B, H, R, N) -> (B, H, N).

        Args:
            maps: attention of the scored rows, as probabilities.
        """
        count, rows = maps.shape[3], maps.shape[2]
        weights = row_weights(count - self.prefix, self.prefix, rows, maps.device).to(maps.dtype)
        return torch.einsum("bhrn,r->bhn", maps, weights)

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
        scored = self.rows(k.shape[2], k.device)
        everything = torch.arange(k.shape[2], device=k.device)
        logits = row_logits(attn, q, k, everything if whole else scored, bias)
        predicted = self.selector(logits) if self.method.scorer == "selector" else logits.log_softmax(dim=-1)
        if self.method.scorer == "random":
            scores = torch.rand_like(predicted[:, :, 0])
        else:
            scores = self.scores((predicted.index_select(2, scored) if whole else predicted).exp())
        self.picked = Picked(self.choose(scores), predicted if whole else None)

    def pick(self) -> "Picked | None":
        """What was chosen; None where the layer is to run on all tokens."""
        picked = self.picked
        if self.record is not None and picked is not None:
            self.record(picked.chosen)
        if not (self.training or torch.is_grad_enabled()):
            # Otherwise kept: a checkpointed layer asks again when it is run for the gradients.
            self.picked = None
        return picked


class AdaptedToSA(Adapted):
    """ToSA on one vision transformer: its layers' selectors by layer number."""

    method: ToSA

    def __init__(self, method: ToSA, vit: ViT) -> None:
        super().__init__(method)
        self.layers = nn.ModuleDict()
        grid = tuple(getattr(vit.patch_embed, "grid_size", None) or (1, 1))
        for number, keep in method.keeps().items():
            before: Any = vit.blocks[number - 2]
            block: Any = vit.blocks[number - 1]
            layer = ToSALayer(method, keep, before.attn.num_heads, vit.num_prefix_tokens, grid)
            self.layers[str(number)] = layer
            self.swaps.swap(before.attn, ObservedAttention, serves=(layer, self))
            if method.scope == "layer":
                self.swaps.swap(block, SelectiveBlock, tosa=(layer, self))
            else:
                self.swaps.swap(block.attn, SelectiveAttention, tosa=(layer, self))
        self.requires_grad_(False)
        self._asked = False

    def warn_unfitted(self) -> None:
        """Warns once where the selectors are used as they were made."""
        if self._asked or torch.compiler.is_compiling():
            return
        self._asked = True
        unfitted = [n for n, layer in self.layers.items() if not bool(layer.selector.fitted)]  # type: ignore[union-attr]
        if unfitted and self.method.scorer == "selector":
            warnings.warn(
                f"the selectors of ToSA layers {', '.join(unfitted)} are not fitted and choose by the layer "
                "before; run fit_selectors(model, images)",
                stacklevel=3,
            )

    def set_keep(self, keep: Keep) -> None:
        """Changes the keep ratios: one for all, one for each ToSA layer, or some by layer number."""
        now = {int(n): layer.keep for n, layer in self.layers.items()}  # type: ignore[misc]
        if isinstance(keep, Mapping):
            other = sorted(keep.keys() - now.keys())
            if other:
                raise UnsupportedModelError(f"layers {other} are no ToSA layers; those are {sorted(now)}")
            keep = tuple({**now, **keep}.values())  # type: ignore[dict-item]
        method = replace(self.method, keep=keep if isinstance(keep, (int, float)) else tuple(keep))
        self.method = method
        for number, ratio in method.keeps().items():
            layer: Any = self.layers[str(number)]
            layer.method, layer.keep = method, ratio


def set_keep(model: nn.Module, keep: Keep) -> None:
    """Changes the keep ratio of a ToSA-adapted model at run time.

    Args:
        model: adapted with `ToSA`.
        keep: one ratio for all ToSA layers, one for each, or some by layer number.

    Raises:
        UnsupportedModelError: not adapted with ToSA, a ratio outside (0, 1], or no such layer.
    """
    for added in tosa_of(model):
        added.set_keep(keep)


def tosa_of(model: nn.Module) -> list[AdaptedToSA]:
    """ToSA of every vision transformer in a model.

    Raises:
        UnsupportedModelError: not adapted with ToSA.
    """
    found = [added for _, added in adapted_vits(model) if isinstance(added, AdaptedToSA)]
    if not found:
        raise UnsupportedModelError("the model is not adapted with ToSA; run adapt(model, ToSA(...)) first")
    return found


@contextmanager
def recording(model: nn.Module) -> Iterator[list[dict[int, Chosen]]]:
    """Yields, filled by each forward pass, what was chosen: per vision transformer, by ToSA layer number."""
    found = tosa_of(model)
    seen: list[dict[int, Chosen]] = [{} for _ in found]
    pairs = [(into, int(n), layer) for into, added in zip(seen, found, strict=True) for n, layer in added.layers.items()]
    for into, number, layer in pairs:
        layer.record = partial(into.__setitem__, number)
    try:
        yield seen
    finally:
        for _, _, layer in pairs:
            layer.record = None


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
    tap = getattr(attn, "tap", None)
    if tap is not None:
        tap(attn, q, k, bias)
    served = getattr(attn, "serves", None)
    if served is not None and served[1].enabled:
        served[1].warn_unfitted()
        served[0].observe(attn, q, k, bias, whole)


def thinned(part: Any) -> Picked | None:
    """What was chosen for a block or its attention; None where it runs on all tokens."""
    tosa = getattr(part, "tosa", None) or getattr(getattr(part, "attn", None), "tosa", None)
    return tosa[0].pick() if tosa is not None and tosa[1].enabled else None


class ObservedAttention(nn.Module):
    """Mixed into the attention before a ToSA layer: as before, and shows its logits to the selector."""

    serves: tuple[ToSALayer, AdaptedToSA]

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

    tosa: tuple[ToSALayer, AdaptedToSA]

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        _refuse(is_causal)
        options: dict[str, Tensor] = {} if rope is None else {"rope": rope}
        picked = thinned(self)
        if picked is None:
            return super().forward(x, **options, attn_mask=attn_mask)  # type: ignore[misc]
        chosen = picked.chosen
        part = take(x, chosen.index)
        if rope is not None:
            options["rope"] = take_rope(rope, chosen.index, self.tosa[0].prefix)
        bias, hidden = _square(attn_mask, x.dtype), chosen.bias(x.dtype)
        if bias is not None:
            bias = take_square(bias, chosen.index)
            hidden = bias if hidden is None else bias + hidden
        out = super().forward(part, **options, attn_mask=hidden)  # type: ignore[misc]
        return put(x, chosen.index, chosen.merge(out, part))


class SelectiveAttention(nn.Module):
    """Mixed into a ToSA layer's attention, scope `per_head`: each head attends over its own tokens."""

    tosa: tuple[ToSALayer, AdaptedToSA]

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
    index = chosen.index
    hidden = chosen.bias(q.dtype)
    if bias is not None:
        bias = take_square(bias, index)
        hidden = bias if hidden is None else bias + hidden
    part = attend(attn, take(q, index), take(k, index), take(v, index), hidden)
    if chosen.valid is not None:
        part = part * chosen.valid.unsqueeze(3)
    return put(torch.zeros_like(v), index, part)
