"""ToSA's token selector (arXiv 2406.08816): from a layer's attention logits to the next layer's attention map."""

import math

import torch
from torch import Tensor, nn

def _slant(every: int) -> int:
    """How far the sample moves sideways from one grid row to the next; without a common factor, so that it
    reaches every column, and near a golden share of `every`, so that neighbours are far apart."""
    return min((a for a in range(1, every + 1) if math.gcd(a, every) == 1), key=lambda a: abs(a - 0.382 * every))


def staggered_rows(patches: int, width: int, prefix: int, every: int, device: torch.device) -> Tensor:
    """The query rows that are scored, (R,): all prefix tokens, and one patch of every `every` on a slanted lattice.

    Patch (y, x) of the grid is taken where y * slant + x is a multiple of `every`.

    Args:
        patches: number of patches.
        width: of the patch grid.
        prefix: number of prefix tokens.
        every: how many patches one stands for; 1 scores all rows.
        device: of the result.
    """
    slant, height = _slant(every), -(-patches // width)
    lattice = [y * width + x for y in range(height) for x in range(-y * slant % every, width, every)]
    rows = [*range(prefix), *(prefix + place for place in lattice if place < patches)]
    return torch.tensor(rows, device=device)


def row_weights(patches: int, prefix: int, rows: int, device: torch.device) -> Tensor:
    """How many queries each scored row stands for: (R,), summing to all N = prefix + patches."""
    weights = torch.full((rows,), patches / (rows - prefix), device=device)
    weights[:prefix] = 1
    return weights


class Selector(nn.Module):
    """Two 1-D convolutions along the keys, heads as channels, ReLU between, then log-softmax.

    It starts as the identity (x = relu(x) - relu(-x)): unfitted, the prediction is the current layer's own map.

    Args:
        heads: H.
        width: hidden channels, at least 2 H.
        kernel: odd kernel size along the keys.
    """

    fitted: Tensor

    def __init__(self, heads: int, width: int, kernel: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(heads, width, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv1d(width, heads, kernel, padding=kernel // 2)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        one = torch.eye(heads)
        middle = kernel // 2
        with torch.no_grad():
            self.conv1.weight[: 2 * heads].zero_()
            self.conv1.weight[: 2 * heads, :, middle] = torch.cat([one, -one])
            self.conv1.bias[: 2 * heads].zero_()  # type: ignore[index]
            self.conv2.weight.zero_()
            self.conv2.weight[:, : 2 * heads, middle] = torch.cat([one, -one], dim=1)
            self.conv2.bias.zero_()  # type: ignore[union-attr]

    def forward(self, logits: Tensor) -> Tensor:
        """Logits (B, H, R, N) of R query rows to the next layer's predicted log-attention (B, H, R, N)."""
        maps = logits.transpose(1, 2).flatten(0, 1)
        maps = self.conv2(nn.functional.relu(self.conv1(maps)))
        return maps.log_softmax(dim=-1).unflatten(0, (logits.shape[0], -1)).transpose(1, 2)
