"""DynamicViT (Rao et al., NeurIPS 2021, arXiv 2106.02034).

Before a few layers, a small learned network scores each patch by itself and by the mean of those still there. Inference
keeps the highest; training draws who stays (Gumbel-softmax, hard) and hides the others from attention.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.tokens.notes import Notes
from tokensworth.tokens.pruning import Pruning
from tokensworth.tokens.reducing import Reducing
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class DynamicViT(Pruning):
    """Options of DynamicViT; see `Pruning`.

    Attributes:
        ratio_weight: weight, in training, of the squared distance of the mean share kept from the wanted one.
    """

    name: ClassVar[str] = "dynamicvit"
    needs_training: ClassVar[bool] = True
    ratio_weight: float = 2.0

    def attach(self, vit: ViT) -> "DynamicViTs":
        return DynamicViTs(self, vit)


class Predictor(nn.Module):
    """Patches (B, n, D) and who is still there (B, n) to the log-probabilities (B, n, 2) of staying and going."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_conv = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())
        self.out_conv = nn.Sequential(
            nn.Linear(dim, dim // 2), nn.GELU(), nn.Linear(dim // 2, dim // 4), nn.GELU(), nn.Linear(dim // 4, 2)
        )

    def forward(self, x: Tensor, policy: Tensor | None) -> Tensor:
        own, shared = self.in_conv(x).chunk(2, dim=-1)
        if policy is None:
            mean = shared.mean(dim=1, keepdim=True)
        else:
            there = policy.unsqueeze(2).to(x.dtype)
            mean = (shared * there).sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp(min=1)
        return self.out_conv(torch.cat([own, mean.expand_as(shared)], dim=-1)).float().log_softmax(dim=-1)


class DynamicViTs(Reducing):
    """DynamicViT on one vision transformer."""

    method: DynamicViT

    def __init__(self, method: DynamicViT, vit: ViT) -> None:
        super().__init__(method, vit, before=method.layers, followed=True)
        self.shares = method.shares()
        self.predictors = nn.ModuleDict({str(layer): Predictor(vit.embed_dim) for layer in method.layers})
        self._kept = Notes()

    def before(self, layer: int, tokens: Tokens) -> Tokens:
        policy = tokens.policy
        there = None if policy is None else policy[:, self.prefix :]
        says = self.predictors[str(layer)](tokens.x[:, self.prefix :], there)
        if self.training:
            stays = F.gumbel_softmax(says, hard=True, dim=-1)[..., 0]
            stays = stays if there is None else stays * there
            self._kept[layer] = stays
            prefix = stays.new_ones(stays.shape[0], self.prefix)
            return tokens._replace(policy=torch.cat([prefix, stays], dim=1))
        count = min(max(1, int(self.shares[layer] * tokens.patches + 1e-6)), says.shape[1])
        best = says[..., 0].topk(count, dim=1, sorted=False).indices
        return tokens.keep(self.with_prefix(best))

    def penalty(self) -> Tensor | None:
        """How far the last training pass was from the wanted shares, weighted (Rao et al. 2021, equation 12)."""
        if not self._kept:
            return None
        off = [(stays.mean() - self.shares[layer]).square() for layer, stays in self._kept.items()]
        self._kept.clear()
        return self.method.ratio_weight * torch.stack(off).mean()
