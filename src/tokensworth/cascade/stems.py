"""Stems: from an image (B, C, S, S) to a grid of tokens (B, g*g, D).

Each stem knows for which image sizes it can make which grids, and refuses the others by name.
"""

from collections.abc import Iterable

from timm.layers.weight_init import trunc_normal_
from torch import Tensor, nn

from tokensworth.cascade.resize import ImageResize
from tokensworth.cascade.t2t import TokensToToken
from tokensworth.errors import InvalidGridError, TokensworthError

STEMS = ("patch", "t2t", "t2t_softmax", "conv")

# Convolution kernel, stride, padding that make the DVT paper's grids from 224 px without resizing.
_PATCH_224 = {7: (32, 32, 0), 10: (23, 23, 3), 14: (16, 16, 0)}

# First soft split (kernel, stride, padding) per image size and grid; the next two halve each side.
_T2T = {
    224: {7: (14, 8, 3), 10: (11, 6, 5), 14: (7, 4, 2)},
    32: {4: (5, 2, 2), 8: (3, 1, 1)},
}

# Convolutions (width, kernel, stride, padding) before the last one, and the last one's (kernel, stride,
# padding). Coarse grids shrink the image early, so that their whole stage is cheap.
_CONV = {
    32: {
        3: (((24, 3, 2, 1), (48, 3, 2, 1)), (3, 3, 1)),
        4: (((24, 3, 2, 1), (48, 3, 2, 1)), (3, 2, 1)),
        5: (((24, 3, 2, 1), (32, 3, 1, 1)), (4, 3, 0)),
        6: (((24, 3, 2, 1), (32, 3, 1, 1)), (3, 3, 1)),
        8: (((24, 3, 1, 1), (48, 3, 2, 1), (48, 3, 1, 1)), (3, 2, 1)),
        10: (((24, 3, 1, 1), (48, 3, 1, 1)), (5, 3, 0)),
        11: (((24, 3, 1, 1), (48, 3, 1, 1)), (3, 3, 1)),
        16: (((24, 3, 1, 1), (48, 3, 1, 1)), (3, 2, 1)),
    },
}


def _refuse(grid: int, valid: Iterable[int], stem: str, size: int) -> InvalidGridError:
    nearest = sorted(sorted(valid, key=lambda g: (abs(g - grid), g))[:3])
    hint = f"nearest valid: {', '.join(map(str, nearest))}" if nearest else "this stem has no grid for this size"
    return InvalidGridError(f"the {stem} stem makes no {grid}x{grid} grid from {size} px; {hint}")


class PatchStem(nn.Module):
    """One strided convolution, as in ViT and DeiT.

    At 224 px the grids 7, 10 and 14 use the DVT paper's convolutions (32/32, 23/23 with padding 3, 16/16).
    Any other grid resizes the image to grid x patch pixels first.
    """

    def __init__(self, size: int, grid: int, dim: int, patch: int, in_chans: int, bias: bool = True) -> None:
        super().__init__()
        kernel, stride, padding = _PATCH_224.get(grid, (0, 0, 0)) if size == 224 else (0, 0, 0)
        self.resize = None if kernel or size == grid * patch else ImageResize((grid * patch, grid * patch), "bilinear")
        if not kernel:
            kernel, stride = patch, patch
        self.proj = nn.Conv2d(in_chans, dim, kernel, stride, padding, bias=bias)

    def forward(self, image: Tensor) -> Tensor:
        if self.resize is not None:
            image = self.resize(image)
        return self.proj(image).flatten(2).transpose(1, 2)


class ConvStem(nn.Module):
    """A few convolutions with batch norm and ReLU between, for small images."""

    def __init__(self, size: int, grid: int, dim: int, in_chans: int) -> None:
        super().__init__()
        table = _CONV.get(size, {})
        if grid not in table:
            raise _refuse(grid, table, "conv", size)
        body, last = table[grid]
        layers: list[nn.Module] = []
        width = in_chans
        for out, kernel, stride, padding in body:
            layers += [nn.Conv2d(width, out, kernel, stride, padding, bias=False), nn.BatchNorm2d(out)]
            layers += [nn.ReLU(inplace=True)]
            width = out
        self.body = nn.Sequential(*layers)
        self.proj = nn.Conv2d(width, dim, *last)

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(self.body(image)).flatten(2).transpose(1, 2)


def valid_grids(stem: str, size: int) -> tuple[int, ...] | None:
    """The grids a stem can make from `size` px; None where every positive grid will do."""
    if stem == "patch":
        return None
    table = _CONV if stem == "conv" else _T2T
    return tuple(sorted(table.get(size, {})))


def make_stem(stem: str, size: int, grid: int, dim: int, patch: int, in_chans: int, bias: bool) -> nn.Module:
    """Builds a stem that maps (B, in_chans, size, size) to (B, grid*grid, dim).

    Raises:
        InvalidGridError: the stem makes no such grid from this size; the message names the nearest ones.
    """
    if stem == "patch":
        if grid < 1:
            raise _refuse(grid, range(1, 4), stem, size)
        module: nn.Module = PatchStem(size, grid, dim, patch, in_chans, bias)
    elif stem == "conv":
        module = ConvStem(size, grid, dim, in_chans)
    elif stem in ("t2t", "t2t_softmax"):
        table = _T2T.get(size, {})
        if grid not in table:
            raise _refuse(grid, table, stem, size)
        module = TokensToToken(table[grid], dim, in_chans, performer=stem == "t2t")
    else:
        raise TokensworthError(f"unknown stem {stem!r}; choose one of {', '.join(STEMS)}")
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    # As timm's own stems name them.
    module.grid_size, module.num_patches = (grid, grid), grid * grid  # type: ignore[assignment]
    return module
