"""ToSA's token selector (arXiv 2406.08816): from a layer's attention logits to the next layer's attention map."""

import math

import torch
from torch import Tensor, nn


def _slant(every: int) -> int:
    """How far the sample moves sideways from one grid row to the next; without a common factor, so that it
    reaches every column, and near a golden share of `every`, so that neighbours are far apart."""
    return min((a for a in range(1, every + 1) if math.gcd(a, every) == 1), key=lambda a: abs(a - 0.382 * every))


def staggered_rows(patches: int, width: int, prefix: int, count: int, device: torch.device) -> Tensor:
    """The query rows that are scored, (R,): all prefix tokens, and about `count` patches on a slanted lattice.

    Patch (y, x) of the grid is taken where y * slant + x is a multiple of the number of patches that one stands for.

    Args:
        patches: number of patches.
        width: of the patch grid.
        prefix: number of prefix tokens.
        count: how many patches, about; 0 for all.
        device: of the result.
    """
    every = max(1, patches // count) if count else 1
    slant, height = _slant(every), -(-patches // width)
    lattice = [y * width + x for y in range(height) for x in range(-y * slant % every, width, every)]
    rows = [*range(prefix), *(prefix + place for place in lattice if place < patches)]
    return torch.tensor(rows, device=device)


def received(maps: Tensor, patches: int, prefix: int) -> Tensor:
    """How much attention each token receives from all N queries: scored rows (B, H, R, N) -> (B, H, N).

    Args:
        maps: attention of the scored rows, as probabilities, the prefix tokens' rows first.
        patches: number of patches; each scored patch stands for several.
        prefix: number of prefix tokens, which stand for themselves.
    """
    return maps[:, :, prefix:].sum(2) * (patches / (maps.shape[2] - prefix)) + maps[:, :, :prefix].sum(2)


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

    def maps(self, logits: Tensor) -> Tensor:
        """Both convolutions, as products over all rows at once: (B, H, R, N) -> (B, H, R, N), before softmax.

        With so few channels this takes half the time of `conv1d` on a CPU.
        """
        size, heads = self.conv1.kernel_size[0], self.conv1.in_channels
        keys, middle = logits.shape[3], size // 2
        padded = nn.functional.pad(logits.transpose(0, 1), (middle, middle))
        shifted = torch.stack([padded[..., i : i + keys] for i in range(size)]).view(size * heads, -1)
        weight = self.conv1.weight.permute(0, 2, 1).reshape(-1, size * heads)
        hidden = torch.addmm(self.conv1.bias.unsqueeze(1), weight, shifted).relu_()  # type: ignore[union-attr]
        weight = self.conv2.weight.permute(2, 0, 1).reshape(size * heads, -1)
        parts = (weight @ hidden).view(size, heads, *padded.shape[1:3], keys)
        out = parts[middle] + self.conv2.bias.view(-1, 1, 1, 1)  # type: ignore[union-attr]
        for i in range(1, middle + 1):
            out[..., i:] += parts[middle - i][..., :-i]
            out[..., :-i] += parts[middle + i][..., i:]
        return out.transpose(0, 1)

    def forward(self, logits: Tensor) -> Tensor:
        """Logits (B, H, R, N) of R query rows to the next layer's predicted log-attention (B, H, R, N)."""
        return self.maps(logits).log_softmax(dim=-1)
