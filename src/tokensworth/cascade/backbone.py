"""One stage's transformer, built from timm's `VisionTransformer` with a stem for its grid."""

from functools import partial
from typing import Any

import timm
import torch
from timm.layers.norm import LayerNorm
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from tokensworth.cascade.config import CascadeConfig
from tokensworth.cascade.stems import PatchStem, make_stem
from tokensworth.cascade.t2t_position import sinusoid
from tokensworth.errors import TokensworthError, UnsupportedModelError

# T2T-ViT (Yuan et al. 2021): dim, depth, heads, MLP ratio. No bias in q, k, v; LayerNorm eps 1e-5.
T2T_SIZES: dict[str, tuple[int, int, int, float]] = {
    "t2t_vit_7": (256, 7, 4, 2),
    "t2t_vit_10": (256, 10, 4, 2),
    "t2t_vit_12": (256, 12, 4, 2),
    "t2t_vit_14": (384, 14, 6, 3),
    "t2t_vit_19": (448, 19, 7, 3),
    "t2t_vit_24": (512, 24, 8, 3),
}


def default_stem(backbone: str) -> str:
    """The stem a backbone has when none is named."""
    return "t2t" if backbone in T2T_SIZES else "patch"


def timm_normalization(backbone: str) -> dict[str, Any]:
    """Mean and deviation that a timm backbone was pretrained with; empty where there is none."""
    pretraining = timm.get_pretrained_cfg(backbone) if timm.is_model(backbone) else None
    return {} if pretraining is None else {"mean": tuple(pretraining.mean), "std": tuple(pretraining.std)}


def _sizes(config: CascadeConfig) -> dict[str, Any]:
    if config.backbone in T2T_SIZES:
        dim, depth, heads, ratio = T2T_SIZES[config.backbone]
        norm = partial(LayerNorm, eps=1e-5)
        fixed = {"embed_dim": dim, "depth": depth, "num_heads": heads, "mlp_ratio": ratio}
        return {**fixed, "qkv_bias": False, "norm_layer": norm, **config.backbone_args}
    return dict(config.backbone_args)


def _plain(config: CascadeConfig, grid: int, pretrained: bool) -> VisionTransformer:
    """A timm model whose position embedding already fits the grid."""
    common = {"num_classes": config.num_classes, "in_chans": config.in_chans}
    if config.backbone == "vit" or config.backbone in T2T_SIZES:
        if pretrained:
            raise UnsupportedModelError(f"{config.backbone} has no pretrained weights; name a timm model")
        sizes = _sizes(config)
        # Without a patch size of its own, the finest grid sees every pixel once.
        patch = sizes.pop("patch_size", max(1, config.image_size // config.grids[-1]))
        return VisionTransformer(img_size=grid * patch, patch_size=patch, **common, **sizes)
    if ":" not in config.backbone and not timm.is_model(config.backbone):
        close = timm.list_models(f"*{config.backbone.split('_')[0]}*patch*")[:3]
        raise UnsupportedModelError(f"timm has no model {config.backbone!r}; for example {', '.join(close)}")
    with torch.device("meta"):
        probe = timm.create_model(config.backbone, num_classes=0)
    if not isinstance(probe, VisionTransformer):
        kind = type(probe).__name__
        raise UnsupportedModelError(f"{config.backbone} is a {kind}; a cascade needs timm's VisionTransformer")
    args = {"img_size": grid * probe.patch_embed.patch_size[0], **common, **config.backbone_args}
    model = timm.create_model(config.backbone, pretrained=pretrained, **args)
    assert isinstance(model, VisionTransformer)
    return model


def _check(model: VisionTransformer, name: str) -> None:
    for block in model.blocks:
        if type(block) is not Block:
            kind = type(block).__name__
            raise UnsupportedModelError(f"{name} has blocks of kind {kind}; a cascade needs timm's Block")
        if getattr(block.attn, "gate", None) is not None:
            raise UnsupportedModelError(f"{name} has gated attention, which relation reuse cannot follow")


def make_backbone(config: CascadeConfig, grid: int, pretrained: bool = False) -> VisionTransformer:
    """A timm `VisionTransformer` for one grid, its patch embedding replaced by the stem.

    With `pretrained`, patch and position embeddings are resampled to the grid.

    Raises:
        UnsupportedModelError: an unknown name, or a model the cascade cannot drive.
        InvalidGridError: the stem makes no such grid.
    """
    try:
        model = _plain(config, grid, pretrained)
    except TypeError as error:
        raise TokensworthError(f"backbone_args do not fit {config.backbone}: {error}") from None
    _check(model, config.backbone)
    old = model.patch_embed
    patch = old.patch_size[0]
    stem_name = config.stem or default_stem(config.backbone)
    bias = old.proj.bias is not None
    stem = make_stem(stem_name, config.image_size, grid, model.embed_dim, patch, config.in_chans, bias)
    if pretrained and isinstance(stem, PatchStem):
        _inherit_patches(old.proj, stem)
    model.patch_embed = stem
    if config.backbone in T2T_SIZES and model.pos_embed is not None:
        model.pos_embed = nn.Parameter(sinusoid(model.pos_embed.shape[1], model.embed_dim), requires_grad=False)
    return model


def _inherit_patches(old: nn.Module, stem: PatchStem) -> None:
    from timm.layers.patch_embed import resample_patch_embed

    size = list(stem.proj.kernel_size)
    stem.proj.weight.data.copy_(resample_patch_embed(old.weight.data, size))  # type: ignore[arg-type]
    if stem.proj.bias is not None:
        stem.proj.bias.data.copy_(old.bias.data)  # type: ignore[union-attr]
