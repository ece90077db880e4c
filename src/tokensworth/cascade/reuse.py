"""Feature reuse and relation reuse of DVT (Wang et al. 2021, sections 3.2 and 3.3), the cheap way.

Everything learned runs at the coarse size; resizing comes last, per layer, just before use.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn

from tokensworth.cascade.config import Reuse
from tokensworth.cascade.resize import RowResize

# Relation maps are transformed a piece at a time, its hidden layer near this size: small enough for a cache.
_CHUNK_BYTES = 3 * 2**20


class Upstream(NamedTuple):
    """What a stage hands on for every image that may go on.

    Attributes:
        features: (B, F, N, D) outputs of the last block (F = 1) or of each (F = L), before the final norm.
        relations: (B, L*H, N, N) pre-softmax logits of every layer and head, layer by layer, with what the
            stage itself reused; None where the next stage reuses none.
    """

    features: Tensor
    relations: Tensor | None

    def select(self, index: Tensor | slice) -> "Upstream":
        """The images of `index`: positions (K,) gathered into a dense batch, or a slice as a view."""
        return Upstream(self.features[index], None if self.relations is None else self.relations[index])

    @staticmethod
    def concat(parts: Sequence["Upstream"]) -> "Upstream":
        """Several batches packed into one."""
        relations = [part.relations for part in parts if part.relations is not None]
        return Upstream(torch.cat([part.features for part in parts]), torch.cat(relations) if relations else None)


class ContextEmbedding(nn.Module):
    """f_l of equation 5: LayerNorm, two linear layers with GELU between, run at the coarse size.

    (B, M, D) -> (B, M, width).
    """

    def __init__(self, dim: int, reuse: Reuse, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.fc1 = nn.Linear(dim, reuse.hidden)
        self.fc2 = nn.Linear(reuse.hidden, reuse.width)
        for layer in (self.fc1, self.fc2):
            trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


class FeatureReuse(nn.Module):
    """Context embeddings of every layer of a stage from the upstream stage's features.

    Args:
        dim: token width.
        depth: number of layers.
        prefix: number of prefix tokens.
        coarse, fine: sides of the upstream and of this stage's grid.
        reuse: the switches; `class_token` lets the prefix rows through.
        make_norm: builds a LayerNorm over `dim` channels with the backbone's epsilon.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        prefix: int,
        coarse: int,
        fine: int,
        reuse: Reuse,
        make_norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ContextEmbedding(dim, reuse, make_norm(dim)) for _ in range(depth))
        # Without the class token's context, prefix rows are zeros and not even computed.
        self.skipped = 0 if reuse.class_token else prefix
        self.resize = RowResize(coarse, fine, prefix - self.skipped, zeros=self.skipped)

    def forward(self, layer: int, features: Tensor) -> Tensor:
        """Context embedding of one layer: features (B, F, M, D) -> (B, N, width)."""
        source = features[:, min(layer, features.shape[1] - 1)]
        return self.resize(self.layers[layer](source[:, self.skipped :]))


class MapMixer(nn.Module):
    """A 1x1 convolution over relation maps (B, maps, P), as one product; `groups` maps mix among themselves."""

    def __init__(self, maps: int, out: int, groups: int, zero: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out // groups, maps // groups))
        self.bias = nn.Parameter(torch.zeros(out, 1))
        # The usual uniform start of a convolution, by the number of its inputs.
        bound = 0.0 if zero else (groups / maps) ** 0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, maps: Tensor) -> Tensor:
        count, groups = maps.shape[0], self.weight.shape[0]
        grouped = maps.reshape(count * groups, -1, maps.shape[2])
        weight = self.weight.expand(count, -1, -1, -1).flatten(0, 1)
        # One batched product per image: the layout stays as it is, nothing is copied.
        if torch.is_grad_enabled():
            # The gradient of a broadcast term inside baddbmm is twenty times slower than that of a sum.
            return torch.bmm(weight, grouped).view(count, -1, maps.shape[2]) + self.bias
        bias = self.bias.view(groups, -1, 1).expand(count, -1, -1, -1).flatten(0, 1)
        return torch.baddbmm(bias, weight, grouped).view(count, -1, maps.shape[2])


class RelationReuse(nn.Module):
    """r of equation 9: two 1x1 convolutions over the maps of all layers and heads, then resizing.

    The last convolution starts at zero, so that a stage starts without reused relations.

    Args:
        depth, heads: layers and heads of the stage; maps are ordered layer by layer.
        prefix: number of prefix tokens, whose rows and columns pass through the resizing.
        coarse, fine: sides of the upstream and of this stage's grid.
        reuse: the switches `relation` (`all` or `matching`) and `upsample`.
    """

    def __init__(self, depth: int, heads: int, prefix: int, coarse: int, fine: int, reuse: Reuse) -> None:
        super().__init__()
        maps, groups = depth * heads, depth if reuse.relation == "matching" else 1
        self.heads = heads
        self.fc1 = MapMixer(maps, 3 * maps, groups)
        self.fc2 = MapMixer(3 * maps, maps, groups, zero=True)
        self.resize = RowResize(coarse, fine, prefix, naive=reuse.upsample == "naive")

    def transform(self, relations: Tensor) -> Tensor:
        """Logits (B, L*H, M, M) to what this stage adds to its own, still at the coarse size."""
        maps = relations.flatten(2)
        places, hidden = maps.shape[2], self.fc1.bias.shape[0]
        step = max(1, _CHUNK_BYTES // (4 * hidden))
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or maps.shape[0] * places <= step:
            return self.fc2(nn.functional.gelu(self.fc1(maps))).view_as(relations)
        out = torch.empty_like(maps)
        together = max(1, step // places)
        for first in range(0, maps.shape[0], together):
            for start in range(0, places, step):
                piece = (slice(first, first + together), slice(None), slice(start, start + step))
                out[piece] = self.fc2(nn.functional.gelu(self.fc1(maps[piece])))
        return out.view_as(relations)

    def bias(self, layer: int, prior: Tensor) -> Tensor:
        """One layer's share of the transformed maps, resized: (B, L*H, M, M) -> (B, H, N, N)."""
        maps = prior[:, layer * self.heads : (layer + 1) * self.heads].flatten(0, 1)
        return self.resize(self.resize(maps.mT).mT).unflatten(0, (-1, self.heads))
