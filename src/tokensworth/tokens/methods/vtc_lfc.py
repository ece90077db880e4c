"""VTC-LFC (Wang et al., NeurIPS 2022): keep the patches that carry low frequencies and are attended to.

A patch's score is the energy of its features after a low-pass filter along the sequence, times the attention that it
gets from the class token and from the other patches.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.halves import Seen
from tokensworth.tokens.narrow import narrow_mlps
from tokensworth.tokens.pruning import Pruning, PruningViT
from tokensworth.tokens.sequence import Tokens
from tokensworth.tokens.vit import ViT


@dataclass(frozen=True)
class VTCLFC(Pruning):
    """Options of VTC-LFC; see `Pruning` for its choice of tokens. Channels are chosen by `prune_channels`.

    Attributes:
        cutoff: width of the filter's stop band, as a share of the sequence.
        channels: share of the MLPs' hidden channels that `fit` and `compare` keep.
        hidden: hidden channels left in each layer; empty for all.
    """

    name: ClassVar[str] = "vtc_lfc"
    cutoff: float = 0.15
    channels: float = 1.0
    hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if not self.cutoff > 0 or not 0.1 <= self.channels <= 1:
            raise UnsupportedModelError(f"vtc_lfc cutoff {self.cutoff}, channels {self.channels}: above 0; 0.1 to 1")

    def attach(self, vit: ViT) -> "LowFrequencyViT":
        return LowFrequencyViT(self, vit)


class LowFrequencyViT(PruningViT):
    """VTC-LFC on one vision transformer."""

    method: VTCLFC  # type: ignore[assignment]

    def __init__(self, method: VTCLFC, vit: ViT) -> None:
        super().__init__(method, vit)
        self.narrow = narrow_mlps(vit, self, method.hidden)

    def backbone_parameters(self) -> list[nn.Parameter]:
        return list(self.narrow.parameters())

    def scores(self, layer: int, tokens: Tokens, seen: Seen) -> Tensor:
        energy = low_frequency_energy(tokens.x[:, self.prefix :], self.method.cutoff)
        attention = seen.map()
        if not self.has_class:
            return energy * attention.mean(dim=(1, 2))[:, self.prefix :]
        return energy * attended(attention, self.prefix)


def attended(attention: Tensor, prefix: int) -> Tensor:
    """Attention that patches get from the class token and from each other, (B, n).

    Args:
        attention: maps (B, H, N, N), the class token first.
        prefix: prefix tokens.
    """
    received = attention[:, :, prefix:].mean(dim=2)  # by each token from the patches, (B, H, N)
    direct = attention[:, :, 0, prefix:] * received[:, :, :1]
    through = received[:, :, prefix:] * attention[:, :, 0, :1]
    return (direct + through).mean(dim=1)


def _filter(count: int, cutoff: float) -> Tensor:
    """The low-pass filter as matrices (2, n, n), real and imaginary: its inverse transform, laid out in a circle."""
    at = torch.arange(count, dtype=torch.float64)
    passed = 1 - torch.exp(-((at - (count - 1) / 2) ** 2) / (2 * (count * cutoff / 2) ** 2))
    angle = 2 * math.pi * torch.outer(at, at) / count
    kernel = torch.stack([angle.cos() @ passed, angle.sin() @ passed]) / count
    turned = (at[:, None] - at[None, :]).long() % count
    return kernel[:, turned]


_known_filter = lru_cache(maxsize=64)(_filter)


def low_frequency_energy(x: Tensor, cutoff: float) -> Tensor:
    """Sum over channels of the magnitude that a low-pass filter along the sequence leaves: (B, n, D) -> (B, n).

    The filter's gain at frequency t of n is 1 - exp(-(t - (n-1)/2)^2 / (2 (n cutoff / 2)^2)).
    """
    make = _filter if torch.compiler.is_compiling() else _known_filter
    matrices = make(x.shape[1], cutoff).to(x.device, torch.float32)
    real, imaginary = matrices.unsqueeze(1) @ x.float()
    return torch.hypot(real, imaginary).sum(dim=-1)
