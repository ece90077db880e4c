"""Resizing of token grids and images. A grid's is a sum of a few weighted rows for each row.

DVT's released code resizes in two steps: nearest to twice the coarse side, then adaptive average pooling
to the wanted side (7 -> 14 -> 10, 10 -> 20 -> 14). Both are linear and separable, so a side is resized by one
matrix. Its rows hold few numbers that are not zero (two where a side at least keeps its length), so each row of a
resized grid is the weighted sum of a few rows (four): less work than any product, and nothing is copied.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@lru_cache(maxsize=64)
def side_matrix(coarse: int, fine: int) -> Tensor:
    """The matrix (fine, coarse) that resizes one side of a grid, float32 on the CPU."""
    basis = torch.eye(coarse).unsqueeze(1)
    doubled = F.interpolate(basis, size=2 * coarse, mode="nearest")
    return F.adaptive_avg_pool1d(doubled, fine).squeeze(1).T.contiguous()


class _Terms(NamedTuple):
    """Sums over rows of a batch laid out as one: where each sum's terms start, and each term's row and weight."""

    places: Tensor
    starts: Tensor
    weights: Tensor

    def suits(self, like: Tensor) -> bool:
        return self.weights.dtype == like.dtype and self.weights.device == like.device

    def first(self, sums: int) -> "_Terms":
        """Those of the first `sums` sums."""
        end = sums * (len(self.places) // len(self.starts))
        return _Terms(self.places[:end], self.starts[:sums], self.weights[:end])


class _SumsOfRows(nn.Module):
    """Each row of a sparse matrix (R, M) times a batch (B, M, W), as a weighted sum of rows: (B, R, W)."""

    places: Tensor
    weights: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.taken = matrix.shape[1]
        # Rows of fewer terms are filled up with weights of zero.
        weights, places = matrix.topk(int(matrix.count_nonzero(dim=1).max()), dim=1)
        self.register_buffer("places", places.int(), persistent=False)
        self.register_buffer("weights", weights, persistent=False)
        self.ready: _Terms | None = None

    def _everywhere(self, count: int, dtype: torch.dtype) -> _Terms:
        device, (rows, each) = self.places.device, self.places.shape
        first = torch.arange(count, dtype=torch.int32, device=device) * self.taken
        places = (self.places + first.view(-1, 1, 1)).flatten()
        starts = torch.arange(0, count * rows * each, each, dtype=torch.int32, device=device)
        return _Terms(places, starts, self.weights.to(dtype).expand(count, -1, -1).flatten())

    def terms(self, count: int, like: Tensor) -> _Terms:
        """For a batch of `count`, ready since one at least as large: a single image would notice the cost."""
        if torch.compiler.is_compiling():
            return self._everywhere(count, like.dtype)
        ready, end = self.ready, count * len(self.places)
        if ready is None or len(ready.starts) < end or not ready.suits(like):
            ready = self.ready = self._everywhere(count, like.dtype)
        return ready.first(end)


def _weighted_sums(rows: Tensor, terms: _Terms) -> Tensor:
    """(B, M, W) -> (B, R, W)."""
    flat = rows.reshape(-1, rows.shape[2])
    sums = torch.embedding_bag(flat, terms.places, terms.starts, False, 0, False, terms.weights)[0]
    return sums.view(len(rows), -1, rows.shape[2])


class _Differentiable(torch.autograd.Function):
    """`_weighted_sums` whose gradient is a weighted sum too, by the transposed matrix: faster than PyTorch's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, terms: _Terms, back: _Terms) -> Tensor:
        ctx.back = back
        return _weighted_sums(rows, terms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _weighted_sums(grads[0], ctx.back), None, None


class RowResize(nn.Module):
    """Resizes the rows of relation maps or features: (B, prefix + c*c, W) -> (B, prefix + f*f, W).

    Args:
        coarse, fine: sides c and f of the grids.
        prefix: number of prefix tokens, whose rows pass through.
        naive: resize the rows as a line, which mixes unrelated tokens (DVT's ablation).
        zeros: rows of zeros put before all others, (B, zeros + prefix + f*f, W).
    """

    def __init__(self, coarse: int, fine: int, prefix: int, naive: bool = False, zeros: int = 0) -> None:
        super().__init__()
        side = side_matrix(coarse, fine)
        # For engines that know products alone; see `SeparableResize`.
        self.prefix, self.zeros = prefix, zeros
        self.side = side_matrix(coarse**2, fine**2) if naive else side
        grid = side_matrix(coarse**2, fine**2) if naive else torch.kron(side, side)
        matrix = F.pad(torch.block_diag(torch.eye(prefix), grid), (0, 0, zeros, 0))
        self.ahead, self.back = _SumsOfRows(matrix), _SumsOfRows(matrix.T)

    def forward(self, maps: Tensor) -> Tensor:
        count = maps.shape[0]
        terms = self.ahead.terms(count, maps)
        if not (torch.is_grad_enabled() and maps.requires_grad):
            return _weighted_sums(maps, terms)
        return _Differentiable.apply(maps, terms, self.back.terms(count, maps))  # type: ignore[return-value]


class SeparableResize(nn.Module):
    """The same resizing as two products with the matrix of one side, which every engine knows and keeps dense.

    (B, prefix + c*c, W) -> (B, zeros + prefix + f*f, W).

    Args:
        resize: what to stand in for.
    """

    side: Tensor

    def __init__(self, resize: RowResize) -> None:
        super().__init__()
        self.prefix, self.zeros = resize.prefix, resize.zeros
        self.register_buffer("side", resize.side.clone(), persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        fine, coarse = self.side.shape
        width = maps.shape[2]
        grid = maps[:, self.prefix :]
        if grid.shape[1] == coarse:
            # Resized as a line.
            resized = self.side @ grid
        else:
            rows = self.side @ grid.reshape(-1, coarse, coarse * width)
            resized = (self.side @ rows.reshape(-1, coarse, width)).reshape(-1, fine * fine, width)
        head = F.pad(maps[:, : self.prefix], (0, 0, self.zeros, 0))
        return torch.cat([head, resized], dim=1) if self.prefix + self.zeros else resized


class ImageResize(nn.Module):
    """An image at another size, antialiased: (B, C, S, S) -> (B, C, *size).

    Args:
        size: height and width in pixels.
        mode: `bilinear` or `bicubic`.
    """

    def __init__(self, size: tuple[int, int], mode: str) -> None:
        super().__init__()
        self.size, self.mode = size, mode

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[2:] == self.size:
            return image
        return F.interpolate(image, self.size, mode=self.mode, align_corners=False, antialias=True)


class MatrixImageResize(nn.Module):
    """The same as two products with fixed matrices, for engines that lack antialiasing.

    Args:
        resize: what to stand in for.
        side: of the square image that comes in.
    """

    def __init__(self, resize: ImageResize, side: int) -> None:
        super().__init__()
        basis = torch.eye(side).view(1, 1, side, side)
        for name, length in zip(("rows", "columns"), resize.size, strict=True):
            matrix = ImageResize((length, side), resize.mode)(basis)[0, 0]
            self.register_buffer(name, matrix.contiguous(), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        return self.rows @ image @ self.columns.T  # type: ignore[operator,union-attr]
