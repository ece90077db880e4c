"""Classifiers of a stage: timm's linear ones, or cosines to one direction per class, as CLIP's texts give them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.errors import TokensworthError
from tokensworth.tokens.vit import ViT

# Distilled DeiT has two, one per special token, whose logits are averaged.
_NAMES = ("head", "head_dist")


class CosineHead(nn.Module):
    """scale * cos(features, class direction), over a projection of the features where there is one.

    (B, D) -> (B, classes). CLIP's zero-shot classifier is this with its visual projection and its text embeddings.

    Args:
        dim: D.
        classes: number of classes.
        width: of the projection's space; 0 for none, then the directions lie among the features.
        scale: what cosines are multiplied by, at the start; CLIP's is 100.
    """

    def __init__(self, dim: int, classes: int, width: int = 0, scale: float = 100.0) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, width, bias=False) if width else nn.Identity()
        self.weight = nn.Parameter(torch.randn(classes, width or dim) * dim**-0.5)
        self.log_scale = nn.Parameter(torch.tensor(scale).log())

    def forward(self, features: Tensor) -> Tensor:
        directions = F.normalize(self.projection(features), dim=-1)
        return self.log_scale.exp() * F.linear(directions, F.normalize(self.weight, dim=-1))


def heads_of(vit: ViT) -> dict[str, nn.Module]:
    """A model's classifiers by name: one, or two in distilled DeiT."""
    return {name: part for name in _NAMES if (part := vit._modules.get(name)) is not None}


def make_cosine(vit: ViT, classes: int, width: int) -> None:
    """Gives a model cosine heads; a projection keeps the old head's weights where they fit."""
    for name, old in heads_of(vit).items():
        head = CosineHead(vit.num_features, classes, width)
        if width and isinstance(old, nn.Linear) and old.out_features == width:
            with torch.no_grad():
                head.projection.weight.copy_(old.weight)  # type: ignore[operator,union-attr]
        setattr(vit, name, head)


def features_of(vit: ViT, tokens: Tensor) -> Tensor:
    """What the classifiers read, side by side: (B, N, D) normed tokens -> (B, D), or (B, 2 D) for two of them."""
    if "head_dist" not in vit._modules:
        return vit.forward_head(tokens, pre_logits=True)
    return tokens[:, :2].flatten(1)


def set_linear(vit: ViT, weight: Tensor, bias: Tensor) -> None:
    """Makes the logits `features @ weight.T + bias`, features as `features_of` gives them.

    Args:
        vit: a model with linear heads.
        weight: (classes, D), or (classes, 2 D) for two heads.
        bias: (classes,).

    Raises:
        TokensworthError: the heads are not linear.
    """
    heads = heads_of(vit)
    if not all(isinstance(head, nn.Linear) for head in heads.values()):
        raise TokensworthError("only linear heads can be set from weights and biases")
    with torch.no_grad():
        for head, part in zip(heads.values(), weight.chunk(len(heads), dim=1), strict=True):
            linear: Any = head
            # The average of the heads' logits is the answer.
            linear.weight.copy_(part * len(heads))
            linear.bias.copy_(bias)
