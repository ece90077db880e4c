"""The authors' released DVT checkpoints: their names for things, turned into ours."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensworth.cascade.cascade import Cascade
from tokensworth.cascade.config import CascadeConfig, Reuse
from tokensworth.errors import CheckpointError
from tokensworth.weights import Weights

_STAGES = ("less_less_token", "less_token", "normal_token")
_GRIDS = (7, 10, 14)

# Patterns of the authors' keys inside a stage, and ours.
_RENAMES = (
    (r"^tokens_to_token\.", "vit.patch_embed."),
    (r"^blocks\.(\d+)\.feature_resuse_mlp\.0\.", r"feature.layers.\1.norm."),
    (r"^blocks\.(\d+)\.feature_resuse_mlp\.1\.", r"feature.layers.\1."),
    (r"^relation_reuse_conv\.0\.", "relation.fc1."),
    (r"^relation_reuse_conv\.2\.", "relation.fc2."),
    (r"^(cls_token|pos_embed|patch_embed\.|blocks\.|norm\.|head\.)", r"vit.\1"),
)


@dataclass(frozen=True)
class OfficialResults:
    """What the authors saved beside their weights.

    Attributes:
        flops: MACs of leaving at each exit, cumulative, in billions as saved.
        anytime: accuracy of each exit alone, in percent.
        thresholds: the walk's thresholds, one tuple per point, as saved.
        budgeted: what the walk reached: rows of cost and accuracy, as saved.
    """

    flops: Any
    anytime: Any
    thresholds: Any
    budgeted: Any


def _our_key(key: str) -> str:
    stage, _, rest = key.removeprefix("module.").partition(".")
    if stage not in _STAGES:
        raise CheckpointError(f"key {key!r} is of none of the stages {', '.join(_STAGES)}")
    for pattern, replacement in _RENAMES:
        renamed, count = re.subn(pattern, replacement, rest)
        if count:
            return f"stages.{_STAGES.index(stage)}.{renamed}"
    raise CheckpointError(f"key {key!r} is not one of a released DVT model")


def _our_value(key: str, value: Tensor) -> Tensor:
    if ".relation." in key:
        # A 1x1 convolution (out, in, 1, 1) is one product: (groups, out, in) and a bias column.
        return value[None, :, :, 0, 0] if key.endswith("weight") else value[:, None]
    return value


def _backbone(state: dict[str, Tensor]) -> str:
    """Which of the three released models a state is of, by its width and depth."""
    try:
        width = state[f"{_STAGES[0]}.cls_token"].shape[-1]
    except KeyError:
        raise CheckpointError(f"no {_STAGES[0]}.cls_token: not a released DVT model") from None
    if f"{_STAGES[0]}.patch_embed.proj.weight" in state:
        return {192: "deit_tiny_patch16_224", 384: "deit_small_patch16_224"}.get(width, "deit_base_patch16_224")
    depth = 1 + max(int(m[1]) for k in state if (m := re.match(rf"{_STAGES[0]}\.blocks\.(\d+)\.", k)))
    return f"t2t_vit_{depth}"


def read_official(path: str | Path) -> tuple[Cascade, OfficialResults]:
    """The model and the saved results of a released `.pth.tar`; pickled code in it is refused.

    Raises:
        CheckpointError: missing, cut short, holding anything but plain data, or of another model.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except Exception as error:  # torch raises many kinds on damaged or unsafe files
        reason = str(error).splitlines()[0][:160]
        raise CheckpointError(f"{path}: damaged, or holds more than plain tensors and numbers ({reason})") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("model_state_dict"), dict):
        raise CheckpointError(f"{path}: no model_state_dict; not a released DVT checkpoint")
    state = {k.removeprefix("module."): v for k, v in saved["model_state_dict"].items()}
    config = CascadeConfig(_backbone(state), _GRIDS, state[f"{_STAGES[0]}.head.weight"].shape[0], reuse=Reuse())
    model = Cascade(config)
    renamed = {_our_key(key): value for key, value in state.items()}
    Weights({k: _our_value(k, v) for k, v in renamed.items()}, str(path)).copy_into(model)
    results = OfficialResults(
        saved.get("flops"),
        saved.get("anytime_classification"),
        saved.get("dynamic_threshold"),
        saved.get("budgeted_batch_classification"),
    )
    return model.eval(), results
