"""tokensworth: adaptive inference for vision transformers.

Names are loaded when first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokensworth.cascade import Cascade, CascadeConfig, Reuse
    from tokensworth.dense import DepthConfig, DepthModel, SILogLoss, depth_errors
    from tokensworth.errors import (
        BudgetError,
        CheckpointError,
        DataError,
        InvalidGridError,
        MissingExtraError,
        PolicyError,
        TokensworthError,
        TrainingError,
        UnsupportedModelError,
    )
    from tokensworth.exits import (
        Accuracy,
        Calibration,
        Frontier,
        Macs,
        Millis,
        Policy,
        calibrate,
        frontier,
        solve,
    )
    from tokensworth.measure.describe import describe
    from tokensworth.measure.keeps import keep_frontier
    from tokensworth.run.results import Result
    from tokensworth.run.runner import Runner
    from tokensworth.tokens import (
        VTCLFC,
        DynamicViT,
        EViT,
        PiToMe,
        Random,
        Star,
        SViT,
        ToMe,
        TopK,
        ToSA,
        adapt,
        list_methods,
        method_penalties,
        readapt,
        restore,
        set_keep,
    )
    from tokensworth.train.channels import prune_channels
    from tokensworth.train.loss import CascadeLoss
    from tokensworth.train.selectors import fit_selectors
    from tokensworth.train.star import fit_star

__version__ = "0.1.0"

_HOMES = {
    "tokensworth.cascade": ("Cascade", "CascadeConfig", "Reuse"),
    "tokensworth.dense": ("DepthConfig", "DepthModel", "SILogLoss", "depth_errors"),
    "tokensworth.errors": (
        "BudgetError",
        "CheckpointError",
        "DataError",
        "InvalidGridError",
        "MissingExtraError",
        "PolicyError",
        "TokensworthError",
        "TrainingError",
        "UnsupportedModelError",
    ),
    "tokensworth.exits": (
        "Accuracy",
        "Calibration",
        "Frontier",
        "Macs",
        "Millis",
        "Policy",
        "calibrate",
        "frontier",
        "solve",
    ),
    "tokensworth.measure.describe": ("describe",),
    "tokensworth.measure.keeps": ("keep_frontier",),
    "tokensworth.run.results": ("Result",),
    "tokensworth.run.runner": ("Runner",),
    "tokensworth.tokens": (
        "DynamicViT",
        "EViT",
        "PiToMe",
        "Random",
        "SViT",
        "Star",
        "ToMe",
        "ToSA",
        "TopK",
        "VTCLFC",
        "adapt",
        "list_methods",
        "method_penalties",
        "readapt",
        "restore",
        "set_keep",
    ),
    "tokensworth.train.channels": ("prune_channels",),
    "tokensworth.train.loss": ("CascadeLoss",),
    "tokensworth.train.selectors": ("fit_selectors",),
    "tokensworth.train.star": ("fit_star",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "VTCLFC",
    "Accuracy",
    "BudgetError",
    "Calibration",
    "Cascade",
    "CascadeConfig",
    "CascadeLoss",
    "CheckpointError",
    "DataError",
    "DepthConfig",
    "DepthModel",
    "DynamicViT",
    "EViT",
    "Frontier",
    "InvalidGridError",
    "Macs",
    "Millis",
    "MissingExtraError",
    "PiToMe",
    "Policy",
    "PolicyError",
    "Random",
    "Result",
    "Reuse",
    "Runner",
    "SILogLoss",
    "SViT",
    "Star",
    "ToMe",
    "ToSA",
    "TokensworthError",
    "TopK",
    "TrainingError",
    "UnsupportedModelError",
    "adapt",
    "calibrate",
    "depth_errors",
    "describe",
    "fit_selectors",
    "fit_star",
    "frontier",
    "keep_frontier",
    "list_methods",
    "method_penalties",
    "prune_channels",
    "readapt",
    "restore",
    "set_keep",
    "solve",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'tokensworth' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
