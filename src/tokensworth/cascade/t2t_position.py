"""T2T-ViT's fixed position embedding."""

import torch
from torch import Tensor


def sinusoid(positions: int, dim: int) -> Tensor:
    """(1, positions, dim): sine on even channels, cosine on odd ones, base 10000."""
    place = torch.arange(positions, dtype=torch.float64).unsqueeze(1)
    channel = torch.arange(dim, dtype=torch.float64)
    angle = place / 10000 ** (2 * torch.div(channel, 2, rounding_mode="floor") / dim)
    even = torch.arange(dim) % 2 == 0
    return torch.where(even, angle.sin(), angle.cos()).float().unsqueeze(0)
