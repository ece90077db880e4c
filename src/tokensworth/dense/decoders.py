"""What turns token grids into depth, by name: `newcrfs`, `dpt` and, as the floor, `linear`.

Each is made from the width D of the tokens, the number of prefix tokens, its own widths and the greatest depth. It
takes the grids (B, D, h, w) of some layers, h and w even, and their prefix tokens (B, P, D), and gives depth in metres
(B, 1, s h, s w), s whole.
"""

from torch import Tensor, nn

from tokensworth.dense.newcrfs import NeWCRFs
from tokensworth.dense.pyramid import Pyramid
from tokensworth.errors import MissingExtraError, UnsupportedModelError


class Decoder(nn.Module):
    """From token grids to depth.

    Args:
        dim: width of the tokens.
        prefix: how many prefix tokens there are.
        widths: of the decoder's four scales, fine to coarse.
        max_depth: metres.
    """

    def __init__(self, dim: int, prefix: int, widths: tuple[int, ...], max_depth: float) -> None:
        super().__init__()
        self.max_depth = max_depth

    @staticmethod
    def layers(depth: int) -> tuple[int, ...]:
        """Which layers' tokens it wants, from 1, of a model of so many."""
        return (depth,)

    def forward(self, grids: list[Tensor], prefix: list[Tensor]) -> Tensor:
        raise NotImplementedError


class PyramidNeWCRFs(Decoder):
    """NeWCRFs over a pyramid of the last layer's grid; the pyramid pooling is half as wide as the coarsest level."""

    def __init__(self, dim: int, prefix: int, widths: tuple[int, ...], max_depth: float) -> None:
        super().__init__(dim, prefix, widths, max_depth)
        self.decoder = NeWCRFs(widths, widths, widths[-1] // 2, max_depth)
        self.pyramid = Pyramid(dim, widths)

    def forward(self, grids: list[Tensor], prefix: list[Tensor]) -> Tensor:
        return self.decoder(self.pyramid(grids[0]))


class DPT(Decoder):
    """Dense prediction transformer (Ranftl et al., ICCV 2021), from segmentation-models-pytorch.

    The first prefix token is read into every place where there is one; the fusion is as wide as the finest scale.

    Raises:
        MissingExtraError: segmentation-models-pytorch is not installed.
    """

    def __init__(self, dim: int, prefix: int, widths: tuple[int, ...], max_depth: float) -> None:
        super().__init__(dim, prefix, widths, max_depth)
        try:
            from segmentation_models_pytorch.decoders.dpt.decoder import DPTDecoder, DPTSegmentationHead
        except ImportError:
            raise MissingExtraError("a DPT decoder", "dense") from None
        # Strides of 16 whatever the patch: the grid is resized to four, two, one and half its sides.
        readout = "cat" if prefix else "ignore"
        self.decoder = DPTDecoder((dim,) * 4, (16,) * 4, bool(prefix), readout, widths, widths[0])
        self.head = DPTSegmentationHead(widths[0], 1)

    @staticmethod
    def layers(depth: int) -> tuple[int, ...]:
        return tuple(max(1, depth * quarter // 4) for quarter in (1, 2, 3, 4))

    def forward(self, grids: list[Tensor], prefix: list[Tensor]) -> Tensor:
        read = [tokens if tokens.shape[1] else None for tokens in prefix]
        return self.head(self.decoder(grids, read)).float().sigmoid() * self.max_depth


class LinearHead(Decoder):
    """One linear layer on every token of the last layer."""

    def __init__(self, dim: int, prefix: int, widths: tuple[int, ...], max_depth: float) -> None:
        super().__init__(dim, prefix, widths, max_depth)
        self.head = nn.Conv2d(dim, 1, 1)

    def forward(self, grids: list[Tensor], prefix: list[Tensor]) -> Tensor:
        return self.head(grids[0]).float().sigmoid() * self.max_depth


DECODERS: dict[str, type[Decoder]] = {"newcrfs": PyramidNeWCRFs, "dpt": DPT, "linear": LinearHead}


def make_decoder(name: str, dim: int, prefix: int, widths: tuple[int, ...], max_depth: float) -> Decoder:
    """A decoder by its name, with the arguments of `Decoder`.

    Raises:
        UnsupportedModelError: no such decoder, or widths that it cannot have.
    """
    if name not in DECODERS:
        raise UnsupportedModelError(f"no decoder {name!r}; there are {', '.join(DECODERS)}")
    if len(widths) != 4 or min(widths) < 1:
        raise UnsupportedModelError(f"decoder widths {list(widths)}: four are needed, fine to coarse")
    return DECODERS[name](dim, prefix, widths, max_depth)
