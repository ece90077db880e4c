"""One stage: a vision transformer that may lean on the stage before it."""

import torch
from timm.layers.weight_init import trunc_normal_
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.cascade.backbone import make_backbone
from tokensworth.cascade.config import CascadeConfig
from tokensworth.cascade.reuse import FeatureReuse, RelationReuse, Upstream


def _widen(block: Block, width: int, joint_norm: bool, zero: bool) -> None:
    """Gives a block's MLP `width` more input channels; with `zero`, they start without effect."""
    old: nn.Linear = block.mlp.fc1  # type: ignore[assignment]
    fc1 = nn.Linear(old.in_features + width, old.out_features, bias=old.bias is not None)
    with torch.no_grad():
        fc1.weight[:, : old.in_features] = old.weight
        if zero:
            fc1.weight[:, old.in_features :].zero_()
        else:
            trunc_normal_(fc1.weight[:, old.in_features :], std=0.02)
        if old.bias is not None:
            fc1.bias.copy_(old.bias)
    block.mlp.fc1 = fc1  # type: ignore[assignment]
    if joint_norm:
        norm = block.norm2
        wide = type(norm)(old.in_features + width, eps=norm.eps)  # type: ignore[call-arg]
        with torch.no_grad():
            wide.weight[: old.in_features] = norm.weight  # type: ignore[index]
            wide.bias[: old.in_features] = norm.bias  # type: ignore[index]
        block.norm2 = wide


class Stage(nn.Module):
    """One stage of a cascade.

    Args:
        config: the whole cascade's configuration.
        index: which stage; stages after the first reuse the one before.
        pretrained: start from timm's pretrained weights, reuse without effect until trained.
    """

    def __init__(self, config: CascadeConfig, index: int, pretrained: bool = False) -> None:
        super().__init__()
        grid, reuse = config.grids[index], config.reuse
        self.vit = make_backbone(config, grid, pretrained)
        self.depth = len(self.vit.blocks)
        self.heads: int = self.vit.blocks[0].attn.num_heads  # type: ignore[assignment,union-attr]
        self.joint_norm = reuse.joint_norm
        self.all_features = reuse.feature == "each"
        self.feature: FeatureReuse | None = None
        self.relation: RelationReuse | None = None
        self.balance: nn.Parameter | None = None
        if index == 0:
            return
        coarse, prefix = config.grids[index - 1], self.vit.num_prefix_tokens
        if reuse.feature != "off":
            norm = self.vit.blocks[0].norm1
            eps: float = norm.eps  # type: ignore[assignment]
            self.feature = FeatureReuse(
                self.vit.embed_dim, self.depth, prefix, coarse, grid, reuse, lambda d: type(norm)(d, eps=eps)
            )
            for block in self.vit.blocks:
                _widen(block, reuse.width, reuse.joint_norm, zero=pretrained)  # type: ignore[arg-type]
        if reuse.relation != "off":
            self.relation = RelationReuse(self.depth, self.heads, prefix, coarse, grid, reuse)
            if reuse.weighting:
                # (L, 2, H): how much own and reused relations count.
                self.balance = nn.Parameter(torch.ones(self.depth, 2, self.heads, 1, 1))

    def relations(self, state: Upstream) -> Tensor:
        """This stage's pre-softmax logits, reused ones included: (B, L*H, N, N)."""
        own = state.queries @ state.keys.transpose(-2, -1)
        if state.prior is not None and self.relation is not None:
            bias = [self._reused(layer, state.prior) for layer in range(self.depth)]
            own = own + torch.stack(bias, dim=1)
        return own.flatten(1, 2)

    def _reused(self, layer: int, prior: Tensor) -> Tensor:
        """What one layer adds to its own logits: (B, H, N, N)."""
        assert self.relation is not None
        bias = self.relation.bias(layer, prior)
        return bias if self.balance is None else bias * self.balance[layer, 1]

    def prior(self, upstream: "Stage", state: Upstream) -> Tensor | None:
        """Transformed upstream relations (B, L*H, M, M), a few images at a time where no gradient is kept."""
        if self.relation is None:
            return None
        count = len(state.queries)
        step = count if torch.is_grad_enabled() else self.relation.images_at_once(state.queries.shape[3])
        if step >= count:
            return self.relation.transform(upstream.relations(state))
        chunks = torch.arange(count, device=state.queries.device).split(step)
        parts = [self.relation.transform(upstream.relations(state.select(c))) for c in chunks]
        return torch.cat(parts)

    def forward(
        self, image: Tensor, upstream: "Stage | None" = None, state: Upstream | None = None
    ) -> tuple[Tensor, Upstream]:
        """Runs the stage on a dense batch.

        Args:
            image: (B, C, S, S), normalized.
            upstream: the stage before, or None for the first.
            state: what the stage before handed on for these images.

        Returns:
            Logits (B, num_classes) and what the next stage may reuse.
        """
        vit = self.vit
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(image))))
        prior = None
        if upstream is not None and state is not None:
            prior = self.prior(upstream, state)
        features, queries, keys = [], [], []
        for layer, block in enumerate(vit.blocks):
            bias = None if prior is None else self._reused(layer, prior)
            context = None
            if self.feature is not None and state is not None:
                context = self.feature(layer, state.features)
            x, q, k = self._block(block, layer, x, bias, context)  # type: ignore[arg-type]
            queries.append(q)
            keys.append(k)
            if self.all_features:
                features.append(x)
        handed_on = Upstream(
            torch.stack(features or [x], dim=1), torch.stack(queries, dim=1), torch.stack(keys, dim=1), prior
        )
        return vit.forward_head(vit.norm(x)), handed_on

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: nn.Module) -> Tensor:
        """softmax(q k^T + bias) v, with q already scaled: (B, H, N, d)."""
        if bias is not None and torch.is_grad_enabled():
            # Fused attention takes a slow path for a mask that needs gradients.
            return dropout((q @ k.transpose(-2, -1) + bias).softmax(dim=-1)) @ v
        rate: float = dropout.p if dropout.training else 0.0  # type: ignore[assignment]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate, scale=1.0)

    def _block(
        self, block: Block, layer: int, x: Tensor, bias: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A timm block with an additive relation `bias` and a `context` beside the MLP's input."""
        attn = block.attn
        qkv = attn.qkv(block.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = attn.q_norm(q) * attn.scale, attn.k_norm(k)
        if self.balance is not None:
            q = q * self.balance[layer, 0]
        mixed = self._attend(q, k, v, bias, attn.attn_drop)
        mixed = attn.norm(mixed.transpose(1, 2).flatten(2))
        x = x + block.drop_path1(block.ls1(attn.proj_drop(attn.proj(mixed))))
        if context is None:
            inner = block.norm2(x)
        elif self.joint_norm:
            inner = block.norm2(torch.cat([x, context], dim=2))
        else:
            inner = torch.cat([block.norm2(x), context], dim=2)
        return x + block.drop_path2(block.ls2(block.mlp(inner))), q, k
