"""Token grids after chosen layers of a vision transformer, adapted or not, as dense prediction reads them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.method import Method
from tokensworth.tokens.reducing import Reducing
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


def check_keeps_grid(method: Method) -> None:
    """Refuses a method after which tokens are missing.

    Raises:
        UnsupportedModelError: the method drops tokens, or merges them for good.
    """
    if not method.keeps_grid:
        hint = "; set unmerge" if hasattr(method, "unmerge") else ""
        raise UnsupportedModelError(f"dense prediction needs every token, and {method.name} does not keep them{hint}")


def tokens_after(vit: ViT, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """Every token after some layers, each through the model's last norm; merged tokens are given back their places.

    Args:
        vit: the model.
        images: (B, C, H, W), normalized.
        layers: from 1.

    Returns:
        (B, P + n, D) for each layer, P prefix tokens first.
    """
    seen: dict[int, Tensor] = {}
    added = vit._modules.get("token_method")
    merging = added if isinstance(added, Reducing) and added.enabled else None

    def keep(layer: int) -> Callable[..., None]:
        return lambda block, given, tokens: seen.__setitem__(layer, tokens)

    def keep_whole(layer: int, tokens: Tokens) -> None:
        if layer in layers:
            seen[layer] = tokens.whole()

    last = len(vit.blocks)
    inner = [layer for layer in layers if layer != last]
    before = None if merging is None else merging.record
    hooks = []
    if merging is not None and inner:
        merging.record = keep_whole
    else:
        hooks = [vit.blocks[layer - 1].register_forward_hook(keep(layer)) for layer in inner]
    try:
        final = vit.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()
        if merging is not None:
            merging.record = before
    return [final if layer == last else vit.norm(seen[layer]) for layer in layers]
