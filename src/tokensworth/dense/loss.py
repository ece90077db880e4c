"""The loss of metric depth."""

import torch
from torch import Tensor, nn

# Predictions and targets below this many metres are taken as this, so that their logarithm is finite.
_NEAREST = 1e-3


class SILogLoss(nn.Module):
    """Scale-invariant logarithmic loss (Eigen et al., 2014), weighted as in BTS and NeWCRFs.

    With d = log(predicted) - log(true) over all pixels of known depth: 10 sqrt(mean(d^2) - 0.85 mean(d)^2).

    Args:
        focus: share of the mean's square that is forgiven: 1 forgives a wrong scale altogether.
        teach: weight of the same loss against a teacher's depth, over all pixels, where `forward` is given one.
    """

    def __init__(self, focus: float = 0.85, teach: float = 0.0) -> None:
        super().__init__()
        self.focus, self.teach = focus, teach

    def forward(self, predicted: Tensor, target: Tensor, teacher: Tensor | None = None) -> Tensor:
        """The loss of a batch.

        Args:
            predicted: (B, 1, H, W) metres.
            target: (B, 1, H, W) metres, 0 where unknown; 0 is the loss where nothing is known.
            teacher: another model's depth (B, 1, H, W).
        """
        loss = self._apart(predicted, target)
        if self.teach and teacher is not None:
            loss = loss + self.teach * self._apart(predicted, teacher)
        return loss

    def _apart(self, predicted: Tensor, target: Tensor) -> Tensor:
        known = target > 0
        count = known.sum().clamp(min=1)
        apart = predicted.float().clamp(min=_NEAREST).log() - target.float().clamp(min=_NEAREST).log()
        # A sum over a mask, not a selection, whose size a compiler could not know.
        apart = torch.where(known, apart, 0.0)
        spread = apart.square().sum() / count - self.focus * (apart.sum() / count).square()
        return 10 * spread.clamp(min=1e-12).sqrt()
