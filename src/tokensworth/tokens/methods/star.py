"""STAR, synergistic patch pruning (Zhang et al., ICLR 2024).

Two measures of a patch's importance are fused: p, seen online in the layer (the class token's attention), and q, known
offline for each place of the grid (relevance for the answer, propagated back through all later layers and averaged over
images; see `fit_star`). The fusion r minimizes a KL(r, p) + (1 - a) KL(r, q), which gives r ~ p^a q^(1-a).
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.halves import Seen
from tokensworth.tokens.method import adapted_vits
from tokensworth.tokens.pruning import Pruning, PruningViT
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT

_TINY = 1e-12


@dataclass(frozen=True)
class Star(Pruning):
    """Options of STAR; see `Pruning`. `fit_star` measures the offline importance and can choose `keep`.

    Attributes:
        alpha: weight of the online importance; 1 leaves the offline one out.
    """

    name: ClassVar[str] = "star"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise UnsupportedModelError(f"star alpha {self.alpha}: from 0 to 1")

    def attach(self, vit: ViT) -> "StarViT":
        return StarViT(self, vit)


class StarViT(PruningViT):
    """STAR on one vision transformer, with the offline importance (layers, n) of each place of the grid."""

    method: Star
    offline: Tensor
    fitted: Tensor

    def __init__(self, method: Star, vit: ViT) -> None:
        super().__init__(method, vit)
        self.follows_places = True
        stem: Any = vit.patch_embed
        self.register_buffer("offline", torch.ones(len(method.layers), stem.num_patches) / stem.num_patches)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self._asked = False

    def scores(self, layer: int, tokens: Tokens, seen: Seen) -> Tensor:
        self._warn_unfitted()
        if tokens.patches != self.offline.shape[1]:
            raise UnsupportedModelError(
                f"star was made for {self.offline.shape[1]} patches and is given {tokens.patches}; "
                "adapt and fit the model at this image size"
            )
        assert tokens.places is not None
        q = self.offline[self.method.layers.index(layer)]
        return fused(self.received(seen), q[tokens.places[:, self.prefix :] - self.prefix], self.method.alpha)

    def _warn_unfitted(self) -> None:
        if self._asked or torch.compiler.is_compiling():
            return
        self._asked = True
        if not bool(self.fitted):
            warnings.warn("STAR's offline importance is not fitted; run fit_star(model, images)", stacklevel=2)

    def learn(self, offline: Tensor, keep: tuple[float, ...] | None) -> None:
        """Takes the offline importance (layers, n), and the shares that each layer keeps of what it gets."""
        with torch.no_grad():
            self.offline.copy_(offline / offline.sum(dim=1, keepdim=True))
            self.fitted.fill_(True)
        if keep is not None:
            self.method = replace(self.method, keep=keep)  # type: ignore[assignment]
            self.shares = self.method.shares()


def fused(p: Tensor, q: Tensor, alpha: float) -> Tensor:
    """The distribution r that minimizes alpha KL(r, p) + (1 - alpha) KL(r, q), (B, n).

    Args:
        p, q: importance, positive, (B, n); each is taken as a share of its sum.
        alpha: weight of p.
    """
    first, second = (part / part.sum(dim=-1, keepdim=True) for part in (p + _TINY, q + _TINY))
    return torch.softmax(alpha * first.log() + (1 - alpha) * second.log(), dim=-1)


def star_of(model: torch.nn.Module) -> list[StarViT]:
    """STAR of every vision transformer in a model.

    Raises:
        UnsupportedModelError: not adapted with STAR.
    """
    found = [added for _, added in adapted_vits(model) if isinstance(added, StarViT)]
    if not found:
        raise UnsupportedModelError("the model is not adapted with STAR; run adapt(model, Star(...)) first")
    return found
