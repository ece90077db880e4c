"""ToSA, token selective attention (Singh et al., CVPR workshops 2024, arXiv 2406.08816).

A standard layer's logits predict the next layer's attention map; in that next layer, the ToSA layer, only the
tokens that the prediction finds attended take part. The others pass it by, so the whole grid survives.

Two readings of "pass by", since the paper does not spell it out:

- `layer`: scores are averaged over heads; the K tokens run timm's own block, the others skip it whole.
- `per_head`: each head attends over its own K tokens; a token skipped by a head gets nothing from that head,
  and the MLP runs on every token.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.choose import Chosen
from tokensworth.tokens.method import Adapted, Method, adapted_vits
from tokensworth.tokens.tosa_layer import ToSALayer
from tokensworth.tokens.tosa_modules import ObservedAttention, SelectiveAttention, SelectiveBlock
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
        rows: how many query rows are scored, about: the mean queries of so many blocks of the grid, and each prefix
            token's own. 0 for every query, as published, which costs more than it saves.
        kernel: size of the selector's first convolution along the keys, odd.
        width: the selector's hidden channels per head, at least 2.
        mass: keep as few tokens as hold this share of the predicted attention, at most `keep`; 0 for off.
        scorer: what scores the tokens: the fitted `selector`; the `current` layer's own map; or `random`.
            The last two are baselines.
    """

    name: ClassVar[str] = "tosa"
    follows_reuse: ClassVar[bool] = True
    layers: tuple[int, ...] = (2, 4, 6, 8, 10)
    keep: float | tuple[float, ...] = 0.8
    scope: Literal["layer", "per_head"] = "layer"
    rows: int = 9
    kernel: int = 3
    width: int = 4
    mass: float = 0.0
    scorer: Literal["selector", "current", "random"] = "selector"

    def __post_init__(self) -> None:
        layers = tuple(sorted(self.layers))
        if isinstance(self.keep, Sequence):
            # Ratios stay with the layers they were given for.
            pairs = sorted(zip(self.layers, self.keep, strict=False))
            same = len(self.keep) == len(layers)
            object.__setattr__(self, "keep", tuple(k for _, k in pairs) if same else tuple(self.keep))
        object.__setattr__(self, "layers", layers)
        if not layers or len(set(layers)) < len(layers) or layers[0] < 2:
            raise UnsupportedModelError(
                f"ToSA layers {list(layers)}: name each once, from 2 on (layer 1 has none before)"
            )
        if any(b == a + 1 for a, b in pairwise(layers)):
            raise UnsupportedModelError(f"ToSA layers {list(layers)}: a standard layer must stand before each of them")
        keeps = self.keeps()
        if not all(0 < k <= 1 for k in keeps.values()):
            raise UnsupportedModelError(f"keep {self.keep}: each ratio must be above 0 and at most 1")
        if self.scope not in ("layer", "per_head") or self.scorer not in ("selector", "current", "random"):
            raise UnsupportedModelError(f"no scope {self.scope!r} with scorer {self.scorer!r}")
        if self.rows < 0 or self.kernel % 2 == 0 or self.kernel < 1 or self.width < 2 or not 0 <= self.mass <= 1:
            raise UnsupportedModelError("rows >= 0, an odd kernel, width >= 2 and 0 <= mass <= 1 are needed")

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

    @property
    def keeps_grid(self) -> bool:
        return True

    @property
    def per_image(self) -> bool:
        return self.mass > 0

    @classmethod
    def settings(cls, depth: int, patches: int) -> list[Method]:
        layers = tuple(range(2, max(3, depth - 1), 2))
        return [cls(layers=layers, keep=keep) for keep in (0.8, 0.5, 0.3)]

    def attach(self, vit: ViT) -> "AdaptedToSA":
        for layer in self.layers:
            check_attention(vit, layer)
            check_attention(vit, layer - 1)
        return AdaptedToSA(self, vit)


class AdaptedToSA(Adapted):
    """ToSA on one vision transformer: its layers' selectors by layer number."""

    method: ToSA

    def __init__(self, method: ToSA, vit: ViT) -> None:
        super().__init__(method)
        self.layers = nn.ModuleDict()
        height, width = getattr(vit.patch_embed, "grid_size", None) or (1, 1)
        for number, keep in method.keeps().items():
            before: Any = vit.blocks[number - 2]
            block: Any = vit.blocks[number - 1]
            layer = ToSALayer(method, keep, before.attn.num_heads, vit.num_prefix_tokens, (height, width))
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
    layers: list[Any] = []
    for into, added in zip(seen, found, strict=True):
        for number, layer in added.layers.items():
            layers.append(layer)
            layers[-1].record = partial(into.__setitem__, int(number))
    try:
        yield seen
    finally:
        for layer in layers:
            layer.record = None
