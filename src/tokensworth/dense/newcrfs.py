"""The NeWCRFs decoder (Yuan et al., CVPR 2022): pyramid pooling, then window CRFs from coarse to fine.

Names of parameters are the authors'.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.dense.crf import CRFLevel
from tokensworth.errors import UnsupportedModelError

_HEAD_WIDTH = 32
_BINS = (1, 2, 3, 6)


class _Pooled(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 1, bias=False)
        self.gn = nn.GroupNorm(width // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.gn(self.conv(x)))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class PyramidPooling(nn.Module):
    """Pools the coarsest features to 1, 2, 3 and 6 places a side and joins what comes back: (B, C, H, W) to width."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        pools = [nn.Sequential(nn.AdaptiveAvgPool2d(side), _Pooled(channels, width)) for side in _BINS]
        self.psp_modules = nn.ModuleList(pools)
        self.bottleneck = _Bottleneck(channels + len(_BINS) * width, width)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        pooled = (pool(x) for pool in self.psp_modules)
        wide = [F.interpolate(part, size, mode="bilinear", align_corners=False) for part in pooled]
        return self.bottleneck(torch.cat([x, *wide], dim=1))


class _DepthHead(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1(x).float().sigmoid()


class NeWCRFs(nn.Module):
    """Feature maps at four scales to depth.

    Args:
        channels: of the feature maps, fine to coarse.
        widths: of the four levels, fine to coarse; multiples of 32, each at most four times the one before.
        pooled: width of the pyramid pooling.
        max_depth: metres.

    Raises:
        UnsupportedModelError: widths that the heads or the pixel shuffle cannot share out.

    Example:
        >>> decoder = NeWCRFs((192, 384, 768, 1536), (128, 256, 512, 1024), 512, max_depth=10.0)  # "large"
    """

    def __init__(self, channels: Sequence[int], widths: Sequence[int], pooled: int, max_depth: float) -> None:
        super().__init__()
        if len(channels) != 4 or len(widths) != 4 or any(w < _HEAD_WIDTH or w % _HEAD_WIDTH for w in widths):
            raise UnsupportedModelError(f"NeWCRFs of widths {list(widths)}: four multiples of {_HEAD_WIDTH} are needed")
        if pooled < 2 or pooled % 2:
            raise UnsupportedModelError(f"NeWCRFs with {pooled} pooled channels: an even number is needed")
        self.max_depth = max_depth
        self.decoder = PyramidPooling(channels[3], pooled)
        coming = [widths[1] // 4, widths[2] // 4, widths[3] // 4, pooled]
        for i in range(4):
            level = CRFLevel(channels[i], widths[i], coming[i], widths[i] // _HEAD_WIDTH)
            self.add_module(f"crf{i}", level)
        self.disp_head1 = _DepthHead(widths[0])

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Feature maps (B, C_i, H / 2^i, W / 2^i), fine to coarse, to depth (B, 1, H, W) in metres."""
        prediction = self.decoder(features[3])
        for i in (3, 2, 1, 0):
            prediction = self.get_submodule(f"crf{i}")(features[i], prediction)
            if i:
                prediction = F.pixel_shuffle(prediction, 2)
        return self.disp_head1(prediction) * self.max_depth
