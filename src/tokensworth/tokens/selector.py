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


def row_weights(patches: int, prefix: int, rows: int, device: torch.device) -> Tensor:
    """How many queries each scored row stands for, (1, R): a prefix token for itself, a patch for several."""
    weights = torch.full((1, rows), patches / (rows - prefix), device=device)
    weights[:, :prefix] = 1
    return weights


def received(maps: Tensor, weights: Tensor) -> Tensor:
    """How much attention each token receives from all N queries: scored rows (..., R, N) -> (..., N).

    Args:
        maps: attention of the scored rows, as probabilities.
        weights: `row_weights`, (1, R).
    """
    flat = maps.flatten(0, -3)
    return torch.bmm(weights.to(maps.dtype).expand(len(flat), -1, -1), flat).view(*maps.shape[:-2], -1)


class Selector(nn.Module):
    """Two 1-D convolutions along the keys, heads as channels, ReLU between, then log-softmax.

    The first has a kernel of several keys, the second of one: a second wide kernel fits a little better and costs
    half as much time again. It starts as the identity (x = relu(x) - relu(-x)): unfitted, the prediction is the
    current layer's own map.

    Args:
        heads: H.
        width: hidden channels, at least 2 H.
        kernel: odd kernel size of the first convolution.
    """

    fitted: Tensor

    def __init__(self, heads: int, width: int, kernel: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(heads, width, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv1d(width, heads, 1)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        one = torch.eye(heads)
        with torch.no_grad():
            self.conv1.weight[: 2 * heads].zero_()
            self.conv1.weight[: 2 * heads, :, kernel // 2] = torch.cat([one, -one])
            self.conv1.bias[: 2 * heads].zero_()  # type: ignore[index]
            self.conv2.weight.zero_()
            self.conv2.weight[:, : 2 * heads, 0] = torch.cat([one, -one], dim=1)
            self.conv2.bias.zero_()  # type: ignore[union-attr]

    @property
    def margin(self) -> int:
        """Zeros that the first convolution wants at both ends of a row."""
        return self.conv1.kernel_size[0] // 2

    def maps(self, padded: Tensor) -> Tensor:
        """Both convolutions, before softmax: logits (H, B, R, margin + N + margin) -> (H, B, R, N).

        As two products over all rows of all images at once, which with so few channels takes a third of the time of
        `conv1d` on a CPU.
        """
        keys = padded.shape[3] - 2 * self.margin
        # (H, B, R, kernel, N) -> (H kernel, B R N): each key beside its neighbours.
        neighbours = padded.unfold(3, keys, 1).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
        hidden = torch.addmm(self.conv1.bias.unsqueeze(1), self.conv1.weight.flatten(1), neighbours)  # type: ignore[union-attr]
        out = torch.addmm(self.conv2.bias.unsqueeze(1), self.conv2.weight.flatten(1), hidden.relu_())  # type: ignore[union-attr]
        return out.view((*padded.shape[:3], keys))

    def forward(self, logits: Tensor) -> Tensor:
        """Logits (B, H, R, N) of R query rows to the next layer's predicted log-attention (B, H, R, N)."""
        padded = nn.functional.pad(logits.transpose(0, 1), (self.margin, self.margin))
        return self.maps(padded).log_softmax(dim=-1).transpose(0, 1)
