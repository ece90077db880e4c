"""Dense prediction: metric depth with adaptive backbones."""

from tokensworth.dense.loss import SILogLoss
from tokensworth.dense.metrics import DepthErrors, depth_errors, mean_errors, mirrored_mean
from tokensworth.dense.model import DepthConfig, DepthModel
from tokensworth.dense.newcrfs import NeWCRFs

__all__ = [
    "DepthConfig",
    "DepthErrors",
    "DepthModel",
    "NeWCRFs",
    "SILogLoss",
    "depth_errors",
    "mean_errors",
    "mirrored_mean",
]
