"""The tokens-to-token stem of T2T-ViT (Yuan et al. 2021): three soft splits with attention between.

A soft split is an unfold with overlap. After the first and the second, a cheap attention mixes the unfolded
windows and shrinks them to 64 channels.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKEN_DIM = 64
_PERFORMER_FEATURES = TOKEN_DIM // 2
_EPSILON = 1e-8


def _orthogonal_features(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns)) * math.sqrt(rows)


class TokenPerformer(nn.Module):
    """Linear attention by positive random features, one head, skip connection from the values.

    The projection yields keys, queries and values in that order. (B, N, width) -> (B, N, 64).
    """

    w: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.kqv = nn.Linear(width, 3 * TOKEN_DIM)
        self.proj = nn.Linear(TOKEN_DIM, TOKEN_DIM)
        self.norm2 = nn.LayerNorm(TOKEN_DIM)
        self.mlp = nn.Sequential(nn.Linear(TOKEN_DIM, TOKEN_DIM), nn.GELU(), nn.Linear(TOKEN_DIM, TOKEN_DIM))
        self.register_buffer("w", _orthogonal_features(_PERFORMER_FEATURES, TOKEN_DIM))

    def _features(self, x: Tensor) -> Tensor:
        """exp(w x - |x|^2 / 2) / sqrt(m), shape (B, N, m)."""
        shift = x.square().sum(dim=-1, keepdim=True) / 2
        return torch.exp(x @ self.w.T - shift) / math.sqrt(self.w.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        keys, queries, values = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        keys, queries = self._features(keys), self._features(queries)
        normalizer = queries @ keys.sum(dim=1).unsqueeze(-1) + _EPSILON
        mixed = queries @ (keys.transpose(1, 2) @ values) / normalizer
        x = values + self.proj(mixed)
        return x + self.mlp(self.norm2(x))


class TokenTransformer(nn.Module):
    """One-head softmax attention scaled by the *input* width, skip connection from the values.

    (B, N, width) -> (B, N, 64).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {
                "qkv": nn.Linear(width, 3 * TOKEN_DIM, bias=False),
                "proj": nn.Linear(TOKEN_DIM, TOKEN_DIM),
            }
        )
        self.norm2 = nn.LayerNorm(TOKEN_DIM)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(TOKEN_DIM, TOKEN_DIM), "fc2": nn.Linear(TOKEN_DIM, TOKEN_DIM)})

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.attn["qkv"](self.norm1(x)).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=self.scale)
        x = (values + self.attn["proj"](mixed)).squeeze(1)
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class TokensToToken(nn.Module):
    """Image (B, C, S, S) to tokens (B, g*g, dim).

    Args:
        split: kernel, stride and padding of the first soft split; the other two are always (3, 2, 1).
        dim: token width of the transformer behind.
        in_chans: channels of the image.
        performer: Performer attention; otherwise softmax (the `t` variants of T2T-ViT).
    """

    def __init__(self, split: tuple[int, int, int], dim: int, in_chans: int, performer: bool) -> None:
        super().__init__()
        attention = TokenPerformer if performer else TokenTransformer
        self.split = split
        self.attention1 = attention(in_chans * split[0] ** 2)
        self.attention2 = attention(TOKEN_DIM * 9)
        self.project = nn.Linear(TOKEN_DIM * 9, dim)

    @staticmethod
    def _soft_split(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        return F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2)

    @staticmethod
    def _as_image(tokens: Tensor) -> Tensor:
        side = math.isqrt(tokens.shape[1])
        return tokens.transpose(1, 2).unflatten(2, (side, side))

    def forward(self, image: Tensor) -> Tensor:
        x = self.attention1(self._soft_split(image, *self.split))
        x = self.attention2(self._soft_split(self._as_image(x), 3, 2, 1))
        return self.project(self._soft_split(self._as_image(x), 3, 2, 1))
