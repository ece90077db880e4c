"""SViT, selective vision transformer (Liu et al., WACV 2024, arXiv 2306.07050).

A small gate before each layer decides which tokens take part in it, as many as the image needs. The others pass it by
unchanged, so the grid survives and a token may come back in a later layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.models.eva import Eva
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.choose import Chosen
from tokensworth.tokens.gather import flat_rows, put, take, take_rope
from tokensworth.tokens.halves import attention_half, check_block, mlp_half
from tokensworth.tokens.method import Adapted, Method
from tokensworth.tokens.notes import Notes
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class SViT(Method):
    """Options of SViT.

    Attributes:
        layers: the layers, from 1, with a gate before them.
        keep: share of the tokens that training aims at, over all gates.
        elect_prefix: let the last gate judge the prefix tokens too, as the authors' code does; otherwise they
            always take part.
        ratio_weight: weight, in training, of the squared distance of the mean share kept from `keep`.
        bias: how much higher a gate's logit for taking part is than the other at first; training starts where nearly
            all take part.
    """

    name: ClassVar[str] = "svit"
    needs_training: ClassVar[bool] = True
    layers: tuple[int, ...] = (4, 5, 6, 7, 8, 9, 10, 11, 12)
    keep: float = 0.7
    elect_prefix: bool = False
    ratio_weight: float = 2.0
    bias: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))
        if not self.layers or self.layers[0] < 1 or not 0 < self.keep <= 1:
            raise UnsupportedModelError(f"svit layers {list(self.layers)}, keep {self.keep}: from 1 on; above 0 to 1")

    @property
    def keeps_grid(self) -> bool:
        return True

    @property
    def per_image(self) -> bool:
        return True

    @classmethod
    def settings(cls, depth: int, patches: int) -> list[Method]:
        layers = tuple(range(depth // 4 + 1, depth + 1))
        return [cls(layers=layers, keep=keep) for keep in (0.7, 0.5, 0.3)]

    def attach(self, vit: ViT) -> "GatedViT":
        return GatedViT(self, vit)


class Gate(nn.Module):
    """Tokens (B, N, D) to logits (B, N, 2) of taking part and passing by."""

    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1, self.act, self.fc2 = nn.Linear(dim, dim // 4), nn.GELU(), nn.Linear(dim // 4, 2)
        with torch.no_grad():
            self.fc2.weight.mul_(0.1)
            self.fc2.bias.copy_(torch.tensor([bias / 2, -bias / 2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.norm(x)))).float()


class GatedViT(Adapted):
    """SViT on one vision transformer."""

    method: SViT

    def __init__(self, method: SViT, vit: ViT) -> None:
        super().__init__(method)
        for layer in method.layers:
            check_block(vit, layer)
        if method.elect_prefix and isinstance(vit, Eva):
            raise UnsupportedModelError(
                "svit with elect_prefix: rotary positions need the prefix tokens in every layer"
            )
        self.prefix: int = vit.num_prefix_tokens
        self.gates = nn.ModuleDict({str(layer): Gate(vit.embed_dim, method.bias) for layer in method.layers})
        self.record: Callable[[int, Chosen], None] | None = None
        self._kept = Notes()
        for layer in method.layers:
            self.swaps.swap(vit.blocks[layer - 1], GatedBlock, gated=(layer, self))

    def spared(self, layer: int) -> int:
        """How many prefix tokens take part in a layer without being asked."""
        return 0 if self.method.elect_prefix and layer == self.method.layers[-1] else self.prefix

    def draw(self, layer: int, x: Tensor) -> Tensor:
        """In training: who takes part (B, N), 1 or 0, drawn, with gradients."""
        drawn = F.gumbel_softmax(self.gates[str(layer)](x), hard=True, dim=-1)[..., 0]
        spared = self.spared(layer)
        self._kept[layer] = drawn[:, spared:]
        return torch.cat([drawn.new_ones(drawn.shape[0], spared), drawn[:, spared:]], dim=1).to(x.dtype)

    def choose(self, layer: int, x: Tensor) -> Chosen:
        """In inference: who takes part. The batch is as wide as its hungriest image, in a compiled graph as all."""
        says = self.gates[str(layer)](x)
        takes = says[..., 0] > (float("-inf") if self.most else says[..., 1])
        spared = self.spared(layer)
        takes[:, :spared] = True
        counts = takes.sum(dim=1, keepdim=True)
        width = x.shape[1] if torch.compiler.is_compiling() else max(1, int(counts.max()))
        places = takes.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
        valid = torch.arange(width, device=x.device) < counts
        chosen = Chosen(places, valid)
        if self.record is not None:
            self.record(layer, chosen)
        return chosen

    def penalty(self) -> Tensor | None:
        """How far the last training pass was from the wanted share, weighted."""
        if not self._kept:
            return None
        mean = torch.cat([kept.mean(dim=1) for kept in self._kept.values()]).mean()
        self._kept.clear()
        return self.method.ratio_weight * (mean - self.method.keep).square()


class GatedBlock(nn.Module):
    """Mixed into a block with a gate before it."""

    gated: tuple[int, GatedViT]

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        layer, added = self.gated
        options: dict[str, Any] = {} if rope is None else {"rope": rope}
        if not added.enabled:
            return super().forward(x, **options, attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[misc]
        if attn_mask is not None or is_causal:
            raise UnsupportedModelError("svit cannot run with an attention mask")
        if added.training:
            takes = added.draw(layer, x)
            after = mlp_half(self, attention_half(self, x, rope, policy=takes)[0])
            return x + takes.unsqueeze(2) * (after - x)
        chosen = added.choose(layer, x)
        rows = flat_rows(chosen.places, x.shape[1])
        part = take(x, chosen.places, rows)
        if rope is not None:
            options["rope"] = take_rope(rope, chosen.places, added.prefix)
        out = super().forward(part, **options, attn_mask=chosen.between(None, x.dtype))  # type: ignore[misc]
        return put(x, chosen.places, chosen.merge(out, part), rows)
