"""From one pretrained timm model to a cascade of shared weights."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import timm
import torch
from timm.models._input import get_model_args
from torch import nn

from tokensworth.cascade.config import CascadeConfig, Reuse
from tokensworth.cascade.heads import heads_of
from tokensworth.errors import TokensworthError, UnsupportedModelError
from tokensworth.tokens.vit import ViT, find_vits

if TYPE_CHECKING:
    from tokensworth.cascade.cascade import Cascade


def source_model(backbone: str | nn.Module, pretrained: bool) -> ViT:
    """The timm model to share: the one given, or by its name.

    Raises:
        UnsupportedModelError: timm does not know it or has no weights for it, or it is of another family.
    """
    if isinstance(backbone, str):
        try:
            backbone = timm.create_model(backbone, pretrained=pretrained)
        except Exception as error:  # timm and the hub client raise many kinds
            reason = str(error).splitlines()[0]
            raise UnsupportedModelError(f"{backbone}: timm cannot make it or has no weights ({reason})") from None
    vit = find_vits(backbone)[0]
    if vit is not backbone or not getattr(vit, "pretrained_cfg", None):
        kind = type(backbone).__name__
        raise UnsupportedModelError(f"this {kind} was not made by timm.create_model, by which it could be made again")
    return vit


def shared_config(
    vit: ViT, grids: Sequence[int], num_classes: int, reuse: Reuse | None, options: dict[str, Any]
) -> CascadeConfig:
    """The configuration by which timm makes the same architecture again.

    Args:
        vit: the model.
        grids: token grid sides.
        num_classes: 0 for the model's own.
        reuse: the switches; by default the paper's, the pretrained norms left alone.
        options: other fields of `CascadeConfig`.

    Raises:
        TokensworthError: no number of classes where the model has none.
        UnsupportedModelError: arguments that no file can hold.
    """
    made_with = get_model_args(vit)
    made_with.pop("num_classes", None)
    channels = made_with.pop("in_chans", 3)
    known: Any = vit.pretrained_cfg
    try:
        arguments = json.loads(json.dumps(made_with))
    except TypeError:
        raise UnsupportedModelError(f"{known['architecture']} was made with arguments that no file can hold") from None
    classes = num_classes or vit.num_classes
    if not classes:
        raise TokensworthError(f"{known['architecture']} has no classes of its own: say how many there are")
    stem: Any = vit.patch_embed
    defaults = {
        "image_size": grids[-1] * stem.feat_ratio(as_scalar=False)[0],
        "in_chans": channels,
        "mean": tuple(known["mean"]),
        "std": tuple(known["std"]),
        "reuse": reuse or Reuse(joint_norm=False),
    }
    fixed = {"num_classes": classes, "backbone_args": arguments, "share": True}
    return CascadeConfig(known["architecture"], tuple(grids), **fixed, **{**defaults, **options})


@torch.no_grad()
def copy_backbone(vit: ViT, cascade: "Cascade") -> "Cascade":
    """Gives every stage a pretrained model's weights; heads of another number of classes start anew.

    Returns:
        The cascade.
    """
    kept = vit.state_dict()
    heads = tuple(f"{name}." for name in heads_of(vit))
    for stage in cascade.stages:
        target: Any = stage.vit
        wanted = target.state_dict()
        mine = {key: value for key, value in kept.items() if key in wanted and value.shape == wanted[key].shape}
        other = sorted({*kept, *wanted} - mine.keys())
        if any(not key.startswith(heads) for key in other):
            raise UnsupportedModelError(f"the model and {cascade.config.backbone} differ: {', '.join(other[:3])}")
        target.load_state_dict(mine, strict=False)
    return cascade.to(next(vit.parameters()).device).eval()
