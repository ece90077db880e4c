"""tokensworth: adaptive inference for vision transformers.

Names are loaded when first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokensworth.cascade import Cascade, CascadeConfig, Reuse
    from tokensworth.errors import CheckpointError, InvalidGridError, TokensworthError
    from tokensworth.train.loss import CascadeLoss

__version__ = "0.1.0"

_HOMES = {
    "Cascade": "tokensworth.cascade",
    "CascadeConfig": "tokensworth.cascade",
    "Reuse": "tokensworth.cascade",
    "CascadeLoss": "tokensworth.train.loss",
    "CheckpointError": "tokensworth.errors",
    "InvalidGridError": "tokensworth.errors",
    "TokensworthError": "tokensworth.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokensworth' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
