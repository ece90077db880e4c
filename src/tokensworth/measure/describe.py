"""What a token method does to a model and what that saves, in exact MACs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tokensworth.measure.macs import count_macs, input_shape
from tokensworth.tokens.capture import dense_pairs
from tokensworth.tokens.choose import kept_count
from tokensworth.tokens.method import adapted_vits, at_most, dense, method_of
from tokensworth.tokens.tosa import AdaptedToSA


@dataclass(frozen=True)
class LayerCost:
    """One layer in which not all tokens take part.

    Attributes:
        name: which layer.
        kept: tokens that take part (in its MLP, where the sequence grows shorter), prefix tokens included. Where it
            depends on the image, the most there can be.
        tokens: tokens the model starts with.
        selector_macs: what choosing them costs per image (ToSA: scored logits and convolutions); None where that is
            not told apart.
    """

    name: str
    kept: int
    tokens: int
    selector_macs: int | None


@dataclass(frozen=True)
class Description:
    """A model as it is adapted now.

    Attributes:
        method: options of the token method; None for a plain model.
        layers: the layers it thins out.
        macs: per image, selectors included. With an adaptive keep ratio, the most it can cost.
        dense_macs: per image of the plain model.
    """

    method: dict[str, Any] | None
    layers: tuple[LayerCost, ...]
    macs: int
    dense_macs: int

    @property
    def saved(self) -> float:
        """Share of MACs saved."""
        return 1 - self.macs / self.dense_macs


def describe(model: nn.Module, size: int | None = None) -> Description:
    """What is adapted and what an image costs.

    Args:
        model: a timm model or a cascade, adapted or not.
        size: side of the image in pixels; the model's own where None.

    Raises:
        UnsupportedModelError: no vision transformer in it.
    """
    parameter = next(model.parameters())
    image = torch.zeros(1, *input_shape(model, size), device=parameter.device, dtype=parameter.dtype)
    training = model.training
    model.eval()
    try:
        with dense(model):
            plain = count_macs(lambda: model(image))
        method = method_of(model)
        if method is None:
            return Description(None, (), plain, plain)
        with at_most(model):
            macs = count_macs(lambda: model(image))
            layers = _tosa_layers(model, image) or _lengths(model, image)
    finally:
        model.train(training)
    return Description(method.to_dict(), layers, macs, plain)


@torch.no_grad()
def _lengths(model: nn.Module, image: torch.Tensor) -> tuple[LayerCost, ...]:
    """Layers whose MLP gets fewer tokens than the first layer."""
    vits: list[Any] = [vit for vit, _ in adapted_vits(model)]
    seen: dict[tuple[int, int], int] = {}

    def note(key: tuple[int, int], module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen[key] = args[0].shape[1]

    handles = []
    for place, vit in enumerate(vits):
        handles.append(vit.blocks[0].register_forward_pre_hook(partial(note, (place, 0))))
        handles += [
            block.mlp.register_forward_pre_hook(partial(note, (place, n))) for n, block in enumerate(vit.blocks, 1)
        ]
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    prefix = {place: f"stage {place + 1}, layer " if len(vits) > 1 else "" for place in range(len(vits))}
    return tuple(
        LayerCost(f"{prefix[place]}{number}", kept, seen[place, 0], None)
        for (place, number), kept in seen.items()
        if kept < seen[place, 0]
    )


def _tosa_layers(model: nn.Module, image: torch.Tensor) -> tuple[LayerCost, ...]:
    if not any(isinstance(added, AdaptedToSA) for _, added in adapted_vits(model)):
        return ()
    out = []
    for pair in dense_pairs(model, image):
        tokens, layer = pair.current.k.shape[2], pair.layer
        cost = count_macs(partial(layer.scores, *pair.current))
        kept = layer.prefix + kept_count(tokens - layer.prefix, layer.keep)
        out.append(LayerCost(pair.name, kept, tokens, cost))
    return tuple(out)
