"""The vision transformers inside a model, and exchanging the classes of their parts in place."""

from functools import cache
from typing import Any

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.attention import KNOWN_ATTENTION

ViT = VisionTransformer | Eva


def find_vits(model: nn.Module) -> list[ViT]:
    """Every timm `VisionTransformer` or `Eva` in a model, the model itself included, in order.

    Raises:
        UnsupportedModelError: there is none.
    """
    vits = [part for part in model.modules() if isinstance(part, (VisionTransformer, Eva))]
    if not vits:
        kind = type(model).__name__
        raise UnsupportedModelError(
            f"{kind} has no timm VisionTransformer or Eva in it, whose equal blocks of attention and MLP "
            "token methods need"
        )
    return vits


def check_attention(vit: ViT, layer: int) -> None:
    """Refuses a layer (from 1) whose attention cannot be followed.

    Raises:
        UnsupportedModelError: no such layer, no attention of its own, or one of an unknown kind.
    """
    if not 1 <= layer <= len(vit.blocks):
        raise UnsupportedModelError(f"layer {layer} of a model of {len(vit.blocks)} layers; they count from 1")
    block = vit.blocks[layer - 1]
    attn = getattr(block, "attn", None)
    if attn is None:
        kind = type(block).__name__
        raise UnsupportedModelError(f"blocks of kind {kind} have no attention layer of their own (`attn`)")
    if not isinstance(attn, KNOWN_ATTENTION):
        known = ", ".join(k.__name__ for k in KNOWN_ATTENTION)
        raise UnsupportedModelError(f"attention of kind {type(attn).__name__} cannot be followed; known are {known}")


@cache
def _joined(mixin: type, base: type) -> type:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {"__module__": mixin.__module__})


class Swaps:
    """Modules whose class was exchanged for one that does more; weights, names and hooks stay where they are."""

    def __init__(self) -> None:
        self._done: list[tuple[nn.Module, type, tuple[str, ...]]] = []

    def swap(self, module: nn.Module, mixin: type, **attributes: Any) -> None:
        """Puts `mixin` before the module's class and sets attributes that no state dict shows."""
        self._done.append((module, type(module), tuple(attributes)))
        module.__class__ = _joined(mixin, type(module))
        # Past nn.Module's own setter, which would register modules among the attributes as children.
        module.__dict__.update(attributes)

    def undo(self) -> None:
        """Gives every module its class back."""
        while self._done:
            module, kind, names = self._done.pop()
            module.__class__ = kind
            for name in names:
                module.__dict__.pop(name, None)
