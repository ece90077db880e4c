"""How much each token of each layer contributes to an answer: relevance propagated back through a vision transformer.

Attention weights, the deviations inside LayerNorms and the slopes of activations are held at what they were, which
makes the network linear around each image; then input times gradient is a share of the answer, and what a layer's
tokens hold adds up to the same answer in every layer, biases aside (Ali et al., ICML 2022, arXiv 2202.07304).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers.mlp import Mlp
from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.attention import KNOWN_ATTENTION, finish, logits_of, project
from tokensworth.tokens.vit import Swaps, find_vits


class _HeldNorm(nn.Module):
    """Mixed into a LayerNorm: its deviation counts as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        norm: Any = self
        scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt().detach()
        return scaled if norm.weight is None else scaled * norm.weight + (0 if norm.bias is None else norm.bias)


class _HeldActivation(nn.Module):
    """Mixed into an activation: the line from the origin to its value counts as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            safe = torch.where(x.abs() < 1e-6, torch.full_like(x, 1e-6), x)
            slope = super().forward(safe) / safe  # type: ignore[misc]
        return x * slope


class _HeldAttention(nn.Module):
    """Mixed into an attention: its weights count as constants."""

    def forward(self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        q, k, v = project(self, x, rope)
        with torch.no_grad():
            weights = logits_of(self, q, k, attn_mask).softmax(dim=-1)
        return finish(self, x, weights @ v)


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """While it lasts, the vision transformers in a model are linear around each image; answers stay as they are.

    Raises:
        UnsupportedModelError: a part that relevance cannot follow.
    """
    swaps = Swaps()
    try:
        for vit in find_vits(model):
            for block in vit.blocks:
                mlp = getattr(block, "mlp", None)
                if type(mlp) is not Mlp or not isinstance(getattr(block, "attn", None), KNOWN_ATTENTION):
                    kind = type(mlp).__name__
                    raise UnsupportedModelError(f"relevance cannot be followed through an MLP of kind {kind}")
                swaps.swap(mlp.act, _HeldActivation)
                swaps.swap(block.attn, _HeldAttention)  # type: ignore[arg-type]
            for part in vit.modules():
                if isinstance(part, nn.LayerNorm):
                    swaps.swap(part, _HeldNorm)
        yield
    finally:
        swaps.undo()


def top_logit(out: Any) -> Tensor:
    """The highest logit of the last exit, (B,)."""
    logits = out[-1] if isinstance(out, (list, tuple)) else out
    return logits.max(dim=1).values


def relevance(
    model: nn.Module, images: Tensor, layers: Sequence[int], answer: Callable[[Any], Tensor] = top_logit
) -> list[Tensor]:
    """What each token that enters a layer contributes to the answer.

    Args:
        model: with one vision transformer, in evaluation mode, not adapted (or inside `dense`).
        images: (B, C, S, S), normalized.
        layers: from 1; depth + 1 for what leaves the last layer.
        answer: the model's output to one number for each image (B,).

    Returns:
        For each layer, (B, N). The sum over tokens is the answer, but for what biases add after that layer.

    Raises:
        UnsupportedModelError: a part that relevance cannot follow.
    """
    vit: Any = find_vits(model)[0]
    seen: dict[int, Tensor] = {}

    def note(layer: int, x: Tensor) -> Tensor:
        # A new leaf of the graph where nothing before it asks for gradients.
        seen[layer] = x if x.requires_grad else x.detach().requires_grad_()
        return seen[layer]

    handles = []
    for layer in sorted(set(layers)):
        if layer <= len(vit.blocks):
            block = vit.blocks[layer - 1]
            handles.append(
                block.register_forward_pre_hook(
                    lambda _, args, kw, n=layer: ((note(n, args[0]), *args[1:]), kw), with_kwargs=True
                )
            )
        else:
            handles.append(vit.blocks[-1].register_forward_hook(lambda _, args, out, n=layer: note(n, out)))
    try:
        with held(model), torch.enable_grad():
            total = answer(model(images)).sum()
            gradients = torch.autograd.grad(total, [seen[layer] for layer in layers])
    finally:
        for handle in handles:
            handle.remove()
    return [(seen[layer] * g).sum(dim=-1).detach() for layer, g in zip(layers, gradients, strict=True)]
