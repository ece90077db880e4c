"""Stages that are one pretrained transformer at growing token counts: its weights are held once.

The image is resized to the grid, position embeddings are resampled as timm does. A stage's own are its last norms and
its head, and what it takes from the stage before, which enters with weight zero: untrained, every stage equals the
pretrained model at that input size.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import timm
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tokensworth.cascade.config import CascadeConfig
from tokensworth.cascade.heads import make_cosine
from tokensworth.cascade.resize import ImageResize
from tokensworth.cascade.reuse import FeatureReuse, RelationReuse, Upstream
from tokensworth.errors import TokensworthError, UnsupportedModelError
from tokensworth.tokens.attention import attend, finish, logits_of, project
from tokensworth.tokens.halves import added, check_block, normed
from tokensworth.tokens.method import Method
from tokensworth.tokens.vit import ViT

OWN = ("norm", "fc_norm", "head", "head_dist")


def make_shared_backbone(config: CascadeConfig, pretrained: bool = False) -> ViT:
    """The timm model that all stages share, for images of any size.

    Raises:
        UnsupportedModelError: an unknown name, weights that cannot be had, or a model that cannot be driven.
    """
    if not timm.is_model(config.backbone.split(".")[0]):
        raise UnsupportedModelError(f"timm has no model {config.backbone!r}; shared weights need one of timm's")
    linear = config.head == "linear"
    common = {"num_classes": config.num_classes if linear else config.head_width, "in_chans": config.in_chans}
    try:
        vit = timm.create_model(
            config.backbone, pretrained=pretrained, **common, **{**config.backbone_args, "dynamic_img_size": True}
        )
    except Exception as error:  # timm and the hub client raise many kinds
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(f"{config.backbone}: timm cannot make it or has no weights ({reason})") from None
    if not isinstance(vit, (VisionTransformer, Eva)):
        kind = type(vit).__name__
        raise UnsupportedModelError(f"{config.backbone} is a {kind}; a cascade needs timm's VisionTransformer or Eva")
    for layer in range(1, len(vit.blocks) + 1):
        check_block(vit, layer)
    if not linear:
        make_cosine(vit, config.num_classes, config.head_width)
    return vit


def _with_own_parts(vit: ViT, copied: bool) -> tuple[ViT, dict[str, nn.Module]]:
    """A view of a model that holds the same parts, last norms and heads `copied` or not; and those."""
    parts = {name: part for name in OWN if (part := vit._modules.get(name)) is not None}
    own = copy.deepcopy(parts) if copied else parts
    view = copy.copy(vit)
    # Parameters and buffers stay the very same dictionaries, so that moves and conversions reach both.
    # The stem is copied as shallowly, to know another grid.
    view.__dict__["_modules"] = {**vit._modules, **own, "patch_embed": copy.copy(vit.patch_embed)}
    return view, own


class SharedStage(nn.Module):
    """One stage of a cascade of shared weights; interface and results as `Stage`'s.

    Args:
        config: the whole cascade's configuration.
        index: which stage; stages after the first reuse the one before.
        vit: the shared model; the first stage holds it, the others a view with own last norms and heads.
    """

    vit: ViT

    def __init__(self, config: CascadeConfig, index: int, vit: ViT) -> None:
        super().__init__()
        self.grid = grid = config.grids[index]
        view, own = _with_own_parts(vit, copied=index > 0)
        # The shared parts are registered once, in the first stage.
        for name, part in (own if index > 0 else {"vit": vit}).items():
            self.add_module(name, part)
        # Past nn.Module's own setter, before whose entries it comes.
        self.__dict__["vit"] = view
        stem: Any = vit.patch_embed
        patch = stem.feat_ratio(as_scalar=False)
        self.learned_grid: tuple[int, int] = stem.grid_size
        self.size = (grid * patch[0], grid * patch[1])
        self.resize = ImageResize(self.size, "bicubic")
        reuse = config.reuse
        self.layers = len(vit.blocks)
        # How many of the last layers reuse, and hand on relations.
        self.reusing = reuse.layers or self.layers
        attn: Any = vit.blocks[0].attn
        self.heads: int = attn.num_heads
        self.keeps_features = reuse.feature != "off"
        self.all_features = reuse.feature == "each"
        self.keeps_relations = reuse.relation != "off"
        self.leans = len(config.grids) > 1 and (self.keeps_features or self.keeps_relations)
        self.feature: FeatureReuse | None = None
        self.relation: RelationReuse | None = None
        self._resampled: tuple[Any, ...] = ()
        if index == 0:
            return
        coarse, prefix = config.grids[index - 1], vit.num_prefix_tokens
        if self.keeps_features:
            norm: Any = vit.blocks[0].norm1
            make_norm = partial(type(norm), eps=norm.eps)
            wide = replace(reuse, width=vit.embed_dim)
            self.feature = FeatureReuse(vit.embed_dim, self.reusing, prefix, coarse, grid, wide, make_norm)
            for layer in self.feature.layers:
                nn.init.zeros_(layer.fc2.weight)  # type: ignore[arg-type]
        if self.keeps_relations:
            self.relation = RelationReuse(self.reusing, self.heads, prefix, coarse, grid, reuse)

    def check_method(self, method: Method) -> None:
        """Refuses token methods.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"{method.name} cannot run in a cascade whose stages share their weights; adapt the plain model, or make "
            "the cascade with share=False"
        )

    def train(self, mode: bool = True) -> "SharedStage":
        super().train(mode)
        self.vit.training = mode
        return self

    def reused(self, layer: int, prior: Tensor) -> Tensor:
        """What one of the reusing layers adds to its own logits: (B, H, N, N)."""
        assert self.relation is not None
        return self.relation.bias(layer, prior)

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
        first = self.layers - self.reusing if self.leans else self.layers
        tokens, handed_on = self.resume(self.tokens_before(image, first), first, state, hand_on)
        return self.vit.forward_head(self.vit.norm(tokens)), handed_on

    def tokens_before(self, image: Tensor, layer: int) -> Tensor:
        """Tokens (B, N, D) that block `layer` (from 0) reads, when no block before it reuses."""
        vit: Any = self.vit
        self._fit_positions()
        x = vit._pos_embed(vit.patch_embed(self.resize(image)))
        # An `Eva` gives its rotary positions too.
        x = vit.norm_pre(x[0] if isinstance(x, tuple) else vit.patch_drop(x))
        for place, rope in enumerate(self._ropes()[:layer]):
            x = vit.blocks[place](x) if rope is None else vit.blocks[place](x, rope=rope)
        return x

    def resume(self, x: Tensor, first: int, state: Upstream | None, hand_on: bool) -> tuple[Tensor, Upstream | None]:
        """The blocks from `first` (from 0) on, with reuse: tokens (B, N, D) before the last norm, next state."""
        prior = None if state is None else self.prior(state)
        features: list[Tensor] = []
        relations: list[Tensor] = []
        ropes = self._ropes()
        for layer in range(first, self.layers):
            place = layer - (self.layers - self.reusing)
            bias = None if prior is None else self.reused(place, prior)
            context = None
            if self.feature is not None and state is not None:
                context = self.feature(place, state.features)
            kept = relations if hand_on and self.keeps_relations else None
            x = self._block(self.vit.blocks[layer], x, ropes[layer], bias, context, kept)
            features = [*features, x] if self.all_features else [x]
        if not hand_on:
            return x, None
        # Without feature reuse a state is still handed on, but holds nothing.
        seen = torch.stack(features, dim=1) if self.keeps_features and features else x[:, None, :0]
        return x, Upstream(seen, torch.cat(relations, dim=1) if relations else None)

    @staticmethod
    def _block(
        block: Any,
        x: Tensor,
        rope: Tensor | None,
        bias: Tensor | None,
        context: Tensor | None,
        kept: list[Tensor] | None,
    ) -> Tensor:
        """A block with an additive relation `bias` (B, H, N, N) and a `context` (B, N, D) added to the MLP's input."""
        attn = block.attn
        inner = normed(block, x, 1)
        q, k, v = project(attn, inner, rope)
        if torch.is_grad_enabled() and (kept is not None or bias is not None or x.device.type == "cpu"):
            # A bias that needs gradients would send fused attention to its plain path anyway, and a CPU's is slower
            # backwards than plain products.
            logits = logits_of(attn, q, k, bias)
            mixed = attn.attn_drop(logits.softmax(dim=-1)) @ v
            if kept is not None:
                kept.append(logits)
        else:
            mixed = attend(attn, q, k, v, bias)
            if kept is not None:
                kept.append(logits_of(attn, q, k, bias))
        x = added(block, x, finish(attn, inner, mixed), 1)
        inner = normed(block, x, 2)
        return added(block, x, block.mlp(inner if context is None else inner + context), 2)

    def _ropes(self) -> Sequence[Tensor | None]:
        """Rotary positions of every block at this grid."""
        rope: Any = self.vit._modules.get("rope")
        if rope is None:
            return [None] * self.layers
        found = rope.get_embed(shape=(self.grid, self.grid))
        return list(found) if getattr(self.vit, "rope_mixed", False) else [found] * self.layers

    def _fit_positions(self) -> None:
        """Position embeddings of this grid, kept ready for inference; timm resamples them anew for every batch."""
        vit: Any = self.vit
        learned: Tensor | None = vit._parameters.get("pos_embed")
        if learned is None:
            return
        if torch.is_grad_enabled():
            vit.__dict__.pop("pos_embed", None)
            vit.patch_embed.grid_size, self._resampled = self.learned_grid, ()
            return
        if torch.compiler.is_compiling():
            # What was kept before stays; without, timm resamples within the graph.
            return
        now = (learned._version, learned.data_ptr(), learned.device, learned.dtype)
        if self._resampled != now:
            prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
            with torch.inference_mode(False):
                fitted = resample_abs_pos_embed(learned.detach(), [self.grid] * 2, list(self.learned_grid), prefix)
            # Shadows the parameter, which stays registered; of the right size, timm takes it as it is.
            vit.__dict__["pos_embed"] = fitted
            vit.patch_embed.grid_size, self._resampled = (self.grid, self.grid), now


def shared_stages(config: CascadeConfig, pretrained: bool = False) -> nn.ModuleList:
    """All stages of a cascade of shared weights.

    Raises:
        TokensworthError: switches that shared weights cannot follow.
        UnsupportedModelError: a backbone that cannot be shared.
    """
    reuse = config.reuse
    if reuse.joint_norm and reuse.feature != "off":
        raise TokensworthError("shared weights keep their norms: feature reuse needs joint_norm=False")
    if reuse.weighting:
        raise TokensworthError("shared weights keep their logits as they are: weighting is not to be had")
    if config.stem:
        raise TokensworthError(f"shared weights have their own patch embedding; stem={config.stem!r} is not to be had")
    vit = make_shared_backbone(config, pretrained)
    if not 0 <= reuse.layers <= len(vit.blocks):
        raise TokensworthError(f"reuse in the last {reuse.layers} layers of {len(vit.blocks)}")
    return nn.ModuleList(SharedStage(config, index, vit) for index in range(len(config.grids)))
