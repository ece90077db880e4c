"""Four scales from the one of a plain ViT, by transposed and strided convolutions."""

from collections.abc import Sequence

from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn


class Pyramid(nn.Module):
    """A token grid to maps of four, two, one and half its sides, as a simple feature pyramid (Li et al., ECCV 2022).

    Args:
        dim: channels of the grid.
        widths: channels of the maps, fine to coarse.
    """

    def __init__(self, dim: int, widths: Sequence[int]) -> None:
        super().__init__()
        middle = max(widths[0], dim // 2)
        scales = (
            [
                nn.ConvTranspose2d(dim, middle, 2, 2),
                LayerNorm2d(middle),
                nn.GELU(),
                nn.ConvTranspose2d(middle, widths[0], 2, 2),
            ],
            [nn.ConvTranspose2d(dim, widths[1], 2, 2)],
            [nn.Conv2d(dim, widths[2], 1)],
            [nn.Conv2d(dim, widths[3], 3, 2, 1)],
        )
        pairs = zip(scales, widths, strict=True)
        self.scales = nn.ModuleList(nn.Sequential(*layers, LayerNorm2d(width)) for layers, width in pairs)

    def forward(self, grid: Tensor) -> list[Tensor]:
        """(B, D, h, w), h and w even, to maps of 4h, 2h, h and h / 2 rows."""
        return [scale(grid) for scale in self.scales]
