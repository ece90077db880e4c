"""Which tokens of an image take part in each ToSA layer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokensworth.tokens.capture import dense_pairs
from tokensworth.tokens.tosa import recording, tosa_of


@dataclass(frozen=True)
class ShownLayer:
    """One ToSA layer.

    Attributes:
        name: `2` for layer 2; `stage 1, layer 2` where a model holds several transformers.
        grid: height and width of the patch grid.
        kept: row by row, whether a patch takes part; with a choice per head, in at least half of the heads.
    """

    name: str
    grid: tuple[int, int]
    kept: tuple[bool, ...]


@dataclass(frozen=True)
class ShownImage:
    """One image as the model saw it.

    Attributes:
        name: what to call it.
        pixels: (3, S, S) in [0, 1].
        layers: what each ToSA layer took.
    """

    name: str
    pixels: Tensor
    layers: tuple[ShownLayer, ...]


def _visible(image: Tensor) -> Tensor:
    """A normalized image stretched to [0, 1], whatever its normalization was."""
    low, high = image.amin(dim=(1, 2), keepdim=True), image.amax(dim=(1, 2), keepdim=True)
    return ((image - low) / (high - low).clamp(min=1e-6)).cpu()


@torch.no_grad()
def shown_tokens(model: nn.Module, image: Tensor, name: str) -> ShownImage:
    """Runs one image and keeps what each ToSA layer chose.

    Args:
        model: adapted with `ToSA`; of a cascade, every stage runs.
        image: (C, S, S), normalized.
        name: what to call it.

    Raises:
        UnsupportedModelError: not adapted with ToSA.
    """
    tosa_of(model)
    model.eval()
    batch = image.unsqueeze(0).to(next(model.parameters()).device)
    tokens = [(p.name, p.current.k.shape[2], p.layer) for p in dense_pairs(model, batch)]
    with recording(model) as seen:
        model(batch)
    chosen = [c for per_vit in seen for c in per_vit.values()]
    layers = []
    for (layer_name, count, layer), picked in zip(tokens, chosen, strict=True):
        mask = picked.mask(count)[0, ..., layer.prefix :]
        mask = mask if mask.ndim == 1 else mask.float().mean(0) >= 0.5
        width = layer.width(count)
        grid = (math.ceil(len(mask) / width), width)
        layers.append(ShownLayer(layer_name, grid, tuple(mask.tolist())))
    return ShownImage(name, _visible(image), tuple(layers))
