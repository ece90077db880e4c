"""MLPs with fewer hidden channels, beside the whole ones, so that a model can be restored."""

from typing import Any, cast

import torch
from timm.layers.mlp import Mlp
from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.method import Adapted
from tokensworth.tokens.vit import ViT


def hidden_widths(vit: ViT) -> list[int]:
    """Hidden channels of each layer's MLP.

    Raises:
        UnsupportedModelError: an MLP of another kind than `Mlp`.
    """
    return [cast(nn.Linear, _mlp(vit, layer).fc1).out_features for layer in range(1, len(vit.blocks) + 1)]


def _mlp(vit: ViT, layer: int) -> Mlp:
    mlp = getattr(vit.blocks[layer - 1], "mlp", None)
    if type(mlp) is not Mlp and not isinstance(mlp, NarrowMlp):
        raise UnsupportedModelError(f"channels of an MLP of kind {type(mlp).__name__} cannot be pruned")
    return mlp  # type: ignore[return-value]


class Narrow(nn.Module):
    """The two linear layers of an MLP with fewer hidden channels, the first ones until `take` is called."""

    def __init__(self, mlp: Mlp, width: int) -> None:
        super().__init__()
        first, second = cast(nn.Linear, mlp.fc1), cast(nn.Linear, mlp.fc2)
        self.fc1 = nn.Linear(first.in_features, width, bias=first.bias is not None)
        self.fc2 = nn.Linear(width, second.out_features, bias=second.bias is not None)
        self.take(mlp, torch.arange(width, device=first.weight.device))

    @torch.no_grad()
    def take(self, mlp: Mlp, channels: Tensor) -> None:
        """Copies the weights of some hidden channels (width,)."""
        first, second = cast(nn.Linear, mlp.fc1), cast(nn.Linear, mlp.fc2)
        self.fc1.weight.copy_(first.weight[channels])
        self.fc2.weight.copy_(second.weight[:, channels])
        if first.bias is not None:
            self.fc1.bias.copy_(first.bias[channels])
        if second.bias is not None:
            self.fc2.bias.copy_(second.bias)


class NarrowMlp(nn.Module):
    """Mixed into an MLP some of whose hidden channels are left out."""

    narrow: tuple[int, Adapted]

    def forward(self, x: Tensor) -> Tensor:
        layer, added = self.narrow
        mlp: Any = self
        if not added.enabled:
            return super().forward(x)  # type: ignore[misc]
        part: Any = cast(nn.ModuleDict, added.narrow)[str(layer)]
        return mlp.drop2(part.fc2(mlp.norm(mlp.drop1(mlp.act(part.fc1(x))))))


def narrow_mlps(vit: ViT, added: Adapted, widths: tuple[int, ...]) -> nn.ModuleDict:
    """Puts narrow MLPs to work where fewer channels are wanted than there are.

    Args:
        vit: the model.
        added: what they belong to; it must keep the returned modules as `narrow`.
        widths: hidden channels of each layer; empty for all.

    Raises:
        UnsupportedModelError: another number of widths than layers, more channels than there are, or an MLP that is no
            plain `Mlp` (one with a norm inside, for example).
    """
    narrow = nn.ModuleDict()
    if not widths:
        return narrow
    whole = hidden_widths(vit)
    if len(widths) != len(whole) or any(not 1 <= n <= m for n, m in zip(widths, whole, strict=False)):
        raise UnsupportedModelError(f"hidden widths {list(widths)} for a model of {whole}")
    for layer, (width, full) in enumerate(zip(widths, whole, strict=True), 1):
        if width < full:
            mlp = _mlp(vit, layer)
            if not isinstance(mlp.norm, nn.Identity):
                raise UnsupportedModelError("channels of an MLP with a norm inside cannot be pruned")
            narrow[str(layer)] = Narrow(mlp, width)
            added.swaps.swap(mlp, NarrowMlp, narrow=(layer, added))
    return narrow
