"""One stage: a vision transformer that may lean on the stage before it."""

from functools import partial
from typing import Any

import torch
from timm.layers.weight_init import trunc_normal_
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from tokensworth.cascade.backbone import make_backbone
from tokensworth.cascade.config import CascadeConfig
from tokensworth.cascade.reuse import FeatureReuse, RelationReuse, Upstream
from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.attention import attend, finish, logits_of, project
from tokensworth.tokens.choose import Chosen
from tokensworth.tokens.gather import put, take
from tokensworth.tokens.method import Method
from tokensworth.tokens.tosa_modules import attend_per_head, observe, thinned


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
        self.depth = self.reusing = len(self.vit.blocks)
        self.heads: int = self.vit.blocks[0].attn.num_heads  # type: ignore[assignment,union-attr]
        self.joint_norm = reuse.joint_norm
        self.all_features = reuse.feature == "each"
        self.keeps_relations = reuse.relation != "off"
        # Whether any stage of the cascade leans on another.
        self.leans = len(config.grids) > 1 and (reuse.feature != "off" or self.keeps_relations)
        self.feature: FeatureReuse | None = None
        self.relation: RelationReuse | None = None
        self.balance: nn.Parameter | None = None
        if index == 0:
            return
        coarse, prefix = config.grids[index - 1], self.vit.num_prefix_tokens
        if reuse.feature != "off":
            norm: Any = self.vit.blocks[0].norm1
            make_norm = partial(type(norm), eps=norm.eps)
            self.feature = FeatureReuse(self.vit.embed_dim, self.depth, prefix, coarse, grid, reuse, make_norm)
            for block in self.vit.blocks:
                _widen(block, reuse.width, reuse.joint_norm, zero=pretrained)  # type: ignore[arg-type]
        if reuse.relation != "off":
            self.relation = RelationReuse(self.depth, self.heads, prefix, coarse, grid, reuse)
            if reuse.weighting:
                # How much own and reused relations count, per layer and head.
                self.balance = nn.Parameter(torch.ones(self.depth, 2, self.heads))

    def check_method(self, method: Method) -> None:
        """Refuses a token method that cannot run here.

        Raises:
            UnsupportedModelError: the method changes the grid that a stage reuses or hands on.
        """
        if self.leans and not method.follows_reuse:
            raise UnsupportedModelError(
                f"{method.name} cannot run in a cascade whose stages reuse features or relations; "
                "ToSA can, or a cascade with both reuses off"
            )

    def reused(self, layer: int, prior: Tensor) -> Tensor:
        """What one layer adds to its own logits: (B, H, N, N)."""
        assert self.relation is not None
        bias = self.relation.bias(layer, prior)
        return bias if self.balance is None else bias * self.balance[layer, 1, :, None, None]

    def prior(self, state: Upstream) -> Tensor | None:
        """Transformed upstream relations (B, L*H, M, M) at the coarse size, or None without relation reuse."""
        if self.relation is None or state.relations is None:
            return None
        return self.relation.transform(state.relations)

    def forward(
        self, image: Tensor, state: Upstream | None = None, hand_on: bool = True
    ) -> tuple[Tensor, Upstream | None]:
        """Runs the stage on a dense batch.

        Args:
            image: (B, C, S, S), normalized.
            state: what the stage before handed on for these images; None for the first.
            hand_on: gather what the next stage may reuse; the last stage need not.

        Returns:
            Logits (B, num_classes) and what the next stage may reuse, or None.
        """
        vit = self.vit
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(image))))
        prior = None if state is None else self.prior(state)
        features: list[Tensor] = []
        relations: list[Tensor] = []
        for layer, block in enumerate(vit.blocks):
            bias = None if prior is None else self.reused(layer, prior)
            context = None
            if self.feature is not None and state is not None:
                context = self.feature(layer, state.features)
            kept = relations if hand_on and self.keeps_relations else None
            x = self._block(block, layer, x, bias, context, kept) if self.leans else block(x)  # type: ignore[arg-type]
            features = [*features, x] if self.all_features else [x]
        logits = vit.forward_head(vit.norm(x))
        if not hand_on:
            return logits, None
        return logits, Upstream(torch.stack(features, dim=1), torch.cat(relations, dim=1) if relations else None)

    @staticmethod
    def _attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kept: list[Tensor] | None) -> Tensor:
        """softmax(scale * q k^T + bias) v, (B, H, N, d); appends the logits to `kept`."""
        if kept is None and (bias is None or not torch.is_grad_enabled()):
            return attend(attn, q, k, v, bias)
        # The logits are wanted anyway. Also, fused attention is slow for a mask that needs gradients.
        logits = logits_of(attn, q, k, bias)
        if kept is not None:
            kept.append(logits)
        return attn.attn_drop(logits.softmax(dim=-1)) @ v

    def _block(
        self,
        block: Block,
        layer: int,
        x: Tensor,
        bias: Tensor | None,
        context: Tensor | None,
        kept: list[Tensor] | None,
    ) -> Tensor:
        """A timm block with an additive relation `bias` and a `context` beside the MLP's input.

        A layer that a token method thins out runs on the chosen tokens; what it hands on as its relations is the
        predicted map.
        """
        picked = thinned(block)
        if picked is None:
            return self._tokens(block, layer, x, bias, context, kept)
        if kept is not None:
            kept.append(picked.predicted)
        if picked.chosen.places.ndim == 3:
            return self._tokens(block, layer, x, bias, context, None, picked.chosen)
        index, hidden = picked.chosen.places, picked.chosen.between(bias, x.dtype)
        part = take(x, index)
        out = self._tokens(block, layer, part, hidden, None if context is None else take(context, index), None)
        return put(x, index, picked.chosen.merge(out, part))

    def _tokens(
        self,
        block: Block,
        layer: int,
        x: Tensor,
        bias: Tensor | None,
        context: Tensor | None,
        kept: list[Tensor] | None,
        chosen: Chosen | None = None,
    ) -> Tensor:
        """The block on tokens (B, K, D), with a bias (B, H, K, K); `chosen` per head where heads differ."""
        attn: Any = block.attn
        inner = block.norm1(x)
        q, k, v = project(attn, inner)
        if self.balance is not None:
            q = q * self.balance[layer, 0, :, None, None]
        observe(attn, q, k, bias, whole=kept is not None)
        if chosen is None:
            mixed = self._attend(attn, q, k, v, bias, kept)
        else:
            mixed = attend_per_head(attn, q, k, v, bias, chosen)
        x = x + block.drop_path1(block.ls1(finish(attn, inner, mixed)))
        if context is None:
            inner = block.norm2(x)
        elif self.joint_norm:
            inner = block.norm2(torch.cat([x, context], dim=2))
        else:
            inner = torch.cat([block.norm2(x), context], dim=2)
        return x + block.drop_path2(block.ls2(block.mlp(inner)))
