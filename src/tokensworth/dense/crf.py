"""Neural window fully-connected CRFs (Yuan et al., CVPR 2022, arXiv 2203.01502): attention that moves a prediction.

Queries and keys come from image features, values from the prediction so far. Names of parameters are the authors', so
that their checkpoints load. Maps are channels last here: (B, H, W, C).
"""

from functools import lru_cache

import torch
from timm.layers.mlp import Mlp
from timm.layers.pos_embed_rel import gen_relative_position_index
from torch import Tensor, nn
from torch.nn import functional as F

WINDOW = 7
_APART = -100.0


def _cut(x: Tensor) -> Tensor:
    """(B, H, W, C) into windows (B, n, 49, C); H and W are multiples of the window."""
    images, height, width, channels = x.shape
    parts = x.view(images, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels)
    return parts.transpose(2, 3).reshape(images, -1, WINDOW * WINDOW, channels)


def _join(windows: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `_cut`."""
    images, _, _, channels = windows.shape
    parts = windows.view(images, height // WINDOW, width // WINDOW, WINDOW, WINDOW, channels)
    return parts.transpose(2, 3).reshape(images, height, width, channels)


@lru_cache(maxsize=64)
def _apart(height: int, width: int, shift: int, device: torch.device) -> Tensor:
    """(n, 1, 49, 49): -100 between places that only the cyclic shift brought into one window."""
    with torch.inference_mode(False):
        regions = []
        for size in (height, width):
            place = torch.arange(size, device=device)
            regions.append((place >= size - WINDOW).long() + (place >= size - shift).long())
        region = _cut((3 * regions[0][:, None] + regions[1])[None, :, :, None])[0, :, :, 0]
        return ((region[:, None, :, None] != region[:, None, None, :]) * _APART).float()


class WindowAttention(nn.Module):
    """Attention within windows of 7 x 7: queries and keys of one map, values of another.

    Args:
        dim: channels C of both maps.
        heads: attention heads.
    """

    relative_position_index: Tensor

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, heads))
        self.register_buffer("relative_position_index", gen_relative_position_index((WINDOW, WINDOW)))
        self.qk = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor, v: Tensor, apart: Tensor | None) -> Tensor:
        """Windows of x and v (B, n, 49, C), and a mask (n, 1, 49, 49) or None, to (B, n, 49, C)."""
        images, count = x.shape[:2]
        q, k = self.qk(x).unflatten(3, (2, self.heads, -1)).permute(3, 0, 1, 4, 2, 5).unbind(0)
        v = v.unflatten(3, (self.heads, -1)).transpose(2, 3).to(q.dtype)
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
        bias = bias.view(WINDOW * WINDOW, WINDOW * WINDOW, self.heads).permute(2, 0, 1).unsqueeze(0)
        if apart is None:
            mixed = _attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bias)
        else:
            # One image's windows and heads side by side, so that all images share one mask.
            mask = (bias + apart).flatten(0, 1).unsqueeze(0)
            mixed = _attend(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), mask)
        mixed = mixed.view(images, count, self.heads, WINDOW * WINDOW, -1)
        return self.proj(mixed.transpose(2, 3).flatten(3))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype)).contiguous()


class CRFBlock(nn.Module):
    """One window CRF and an MLP, both with residuals.

    Args:
        dim: channels.
        heads: attention heads.
        shift: by how much the windows are moved; 0 for none.
    """

    def __init__(self, dim: int, heads: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        """x and v (B, H, W, C), any H and W, to (B, H, W, C)."""
        height, width = x.shape[1:3]
        below, right = -height % WINDOW, -width % WINDOW
        maps = [F.pad(part, (0, 0, 0, right, 0, below)) for part in (self.norm1(x), v)]
        apart = None
        if self.shift:
            maps = [part.roll((-self.shift, -self.shift), dims=(1, 2)) for part in maps]
            apart = _apart(height + below, width + right, self.shift, x.device)
        mixed = _join(self.attn(*(_cut(part) for part in maps), apart), height + below, width + right)
        if self.shift:
            mixed = mixed.roll((self.shift, self.shift), dims=(1, 2))
        x = x + mixed[:, :height, :width]
        return x + self.mlp(self.norm2(x))


class CRFLayer(nn.Module):
    """Two blocks, the second with shifted windows, that share the prediction they move."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CRFBlock(dim, heads, 0), CRFBlock(dim, heads, WINDOW // 2)])

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, v)
        return x


def _same_or_convolution(channels: int, dim: int) -> nn.Module:
    return nn.Identity() if channels == dim else nn.Conv2d(channels, dim, 3, padding=1)


class CRFLevel(nn.Module):
    """One scale: brings features and prediction to one width and runs the CRFs.

    Args:
        channels: of the image features.
        dim: width of the level.
        coming: channels of the incoming prediction.
        heads: attention heads.
    """

    def __init__(self, channels: int, dim: int, coming: int, heads: int) -> None:
        super().__init__()
        self.proj_x = _same_or_convolution(channels, dim)
        self.proj_v = _same_or_convolution(coming, dim)
        self.crf_layer = CRFLayer(dim, heads)
        self.norm_crf = nn.LayerNorm(dim)

    def forward(self, features: Tensor, prediction: Tensor) -> Tensor:
        """Features (B, channels, H, W) and prediction (B, coming, H, W) to (B, dim, H, W)."""
        x, v = self.proj_x(features).permute(0, 2, 3, 1), self.proj_v(prediction).permute(0, 2, 3, 1)
        return self.norm_crf(self.crf_layer(x, v)).permute(0, 3, 1, 2)
