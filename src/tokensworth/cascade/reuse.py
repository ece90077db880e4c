"""Feature reuse and relation reuse of DVT (Wang et al. 2021, sections 3.2 and 3.3), the cheap way.

Everything learned runs at the coarse size; resizing comes last, per layer, just before use.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn

from tokensworth.cascade.config import Reuse
from tokensworth.cascade.resize import token_matrix

# Relation maps are transformed for as many images at once as keep the hidden layer near this size.
_CHUNK_BYTES = 32 * 2**20


class Upstream(NamedTuple):
    """What a stage hands on, small enough to keep for every image that may go on.

    Attributes:
        features: (B, F, N, D) outputs of the last block (F = 1) or of each (F = L), before the final norm.
        queries: (B, L, H, N, d), scaled so that queries @ keys are the stage's own logits.
        keys: (B, L, H, N, d).
        prior: (B, L*H, M, M) relations this stage itself received, at its upstream's size; or None.
    """

    features: Tensor
    queries: Tensor
    keys: Tensor
    prior: Tensor | None

    def select(self, index: Tensor) -> "Upstream":
        """The rows of `index` (K,) gathered into a dense batch."""
        return Upstream(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]

    @staticmethod
    def concat(parts: list["Upstream"]) -> "Upstream":
        """Several batches packed into one."""
        columns = zip(*parts, strict=True)
        return Upstream(*(None if c[0] is None else torch.cat(c) for c in columns))  # type: ignore[arg-type]


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

    expand: Tensor

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
        # Without the class token its rows are not even computed: zero rows of the matrix stand for them.
        self.skip = 0 if reuse.class_token else prefix
        matrix = token_matrix(coarse, fine, prefix)[:, self.skip :]
        self.register_buffer("expand", matrix.contiguous(), persistent=False)

    def forward(self, layer: int, features: Tensor) -> Tensor:
        """Context embedding of one layer: features (B, F, M, D) -> (B, N, width)."""
        source = features[:, min(layer, features.shape[1] - 1), self.skip :]
        context = self.layers[layer](source)
        return self.expand.to(context.dtype) @ context


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
        if self.weight.shape[0] == 1:
            return self.weight[0] @ maps + self.bias
        grouped = maps.unflatten(1, (self.weight.shape[0], -1))
        return (self.weight @ grouped).flatten(1, 2) + self.bias


class RelationReuse(nn.Module):
    """r of equation 9: two 1x1 convolutions over the maps of all layers and heads, then resizing.

    The last convolution starts at zero, so that a stage starts without reused relations.

    Args:
        depth, heads: layers and heads of the stage; maps are ordered layer by layer.
        prefix: number of prefix tokens, whose rows and columns pass through the resizing.
        coarse, fine: sides of the upstream and of this stage's grid.
        reuse: the switches `relation` (`all` or `matching`) and `upsample`.
    """

    expand: Tensor

    def __init__(self, depth: int, heads: int, prefix: int, coarse: int, fine: int, reuse: Reuse) -> None:
        super().__init__()
        maps, groups = depth * heads, depth if reuse.relation == "matching" else 1
        self.heads = heads
        self.fc1 = MapMixer(maps, 3 * maps, groups)
        self.fc2 = MapMixer(3 * maps, maps, groups, zero=True)
        matrix = token_matrix(coarse, fine, prefix, naive=reuse.upsample == "naive")
        self.register_buffer("expand", matrix, persistent=False)

    def images_at_once(self, tokens: int) -> int:
        """How many images' maps keep the hidden layer within the chunk size."""
        return max(1, _CHUNK_BYTES // (4 * len(self.fc1.bias) * tokens**2))

    def transform(self, relations: Tensor) -> Tensor:
        """Logits (B, L*H, M, M) to what this stage adds to its own, still at the coarse size."""
        hidden = nn.functional.gelu(self.fc1(relations.flatten(2)))
        return self.fc2(hidden).view_as(relations)

    def bias(self, layer: int, prior: Tensor) -> Tensor:
        """One layer's share of the transformed maps, resized: (B, L*H, M, M) -> (B, H, N, N)."""
        maps = prior[:, layer * self.heads : (layer + 1) * self.heads]
        expand = self.expand.to(maps.dtype)
        return expand @ (maps @ expand.T)
