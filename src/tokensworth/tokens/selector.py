"""ToSA's token selector (arXiv 2406.08816): from a layer's attention logits to the next layer's attention map."""

import torch
from torch import Tensor, nn


class Selector(nn.Module):
    """Two 1-D convolutions along the keys, heads as channels, ReLU between, then log-softmax.

    The first has a kernel of several keys, the second of one: a second wide kernel fits a little better and costs
    half as much time again. The second has no bias, which would shift whole rows and so change nothing. It starts as
    the identity (x = relu(x) - relu(-x)): unfitted, the prediction is the current layer's own map.

    Args:
        heads: H.
        width: hidden channels, at least 2 H.
        kernel: odd kernel size of the first convolution.
    """

    fitted: Tensor

    def __init__(self, heads: int, width: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        # As products over keys: the first tap by tap, each over all heads.
        self.first = nn.Parameter(torch.empty(width, kernel, heads))
        self.bias = nn.Parameter(torch.empty(width))
        self.second = nn.Parameter(torch.zeros(heads, width))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        # The usual uniform start of a convolution, by the number of its inputs.
        bound = (kernel * heads) ** -0.5
        nn.init.uniform_(self.first, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)
        one = torch.cat([torch.eye(heads), -torch.eye(heads)])
        with torch.no_grad():
            self.first[: 2 * heads].zero_()
            self.first[: 2 * heads, kernel // 2] = one
            self.bias[: 2 * heads].zero_()
            self.second[:, : 2 * heads] = one.T

    def maps(self, logits: Tensor) -> Tensor:
        """Both convolutions, heads first and before softmax: logits (H, B, R, N) -> (H, B, R, N).

        Two products over all rows of all images at once, which with so few channels takes a third of the time of
        `conv1d` on a CPU.
        """
        margin = self.kernel // 2
        padded = nn.functional.pad(logits, (margin, margin)) if margin else logits
        # (H, B, R, kernel, N) -> (kernel H, B R N): each key beside its neighbours.
        near = padded.unfold(3, logits.shape[3], 1).permute(3, 0, 1, 2, 4).flatten(2).flatten(0, 1)
        hidden = torch.addmm(self.bias.unsqueeze(1), self.first.flatten(1), near)
        return (self.second @ hidden.relu_()).view(logits.shape)

    def forward(self, logits: Tensor) -> Tensor:
        """Logits (B, H, R, N) of R query rows to the next layer's predicted log-attention (B, H, R, N)."""
        return self.maps(logits.transpose(0, 1)).log_softmax(dim=-1).transpose(0, 1)
