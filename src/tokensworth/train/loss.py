"""The loss of a cascade: every exit must answer well."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.errors import TrainingError


class CascadeLoss(nn.Module):
    """Weighted sum of the exits' cross-entropies (DVT, equation 2), usable in anybody's loop.

    Args:
        weights: one weight per exit; equal weights of 1 where None, as in the paper.
        label_smoothing: for hard labels; soft targets are taken as they are.
        distill: weight of the earlier exits' divergence from the last one, which is not moved by it.
        teach: weight of every exit's divergence from a teacher's logits, where `forward` is given them.
        temperature: softens both sides of either distillation.

    Example:
        >>> loss = CascadeLoss()([torch.zeros(4, 10), torch.zeros(4, 10)], torch.arange(4))
        >>> round(loss.item(), 3)
        4.605
    """

    def __init__(
        self,
        weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        distill: float = 0.0,
        teach: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.weights = None if weights is None else tuple(weights)
        self.label_smoothing = label_smoothing
        self.distill, self.teach = distill, teach
        self.temperature = temperature

    def forward(self, exits: Sequence[Tensor], target: Tensor, teacher: Tensor | None = None) -> Tensor:
        """The loss of a batch.

        Args:
            exits: logits of each exit, (B, C) each.
            target: labels (B,), or soft targets (B, C) as mixup and cutmix make them.
            teacher: another model's logits (B, C), for `teach`.

        Raises:
            TrainingError: another number of weights than exits.
        """
        weights = self.weights or (1.0,) * len(exits)
        if len(weights) != len(exits):
            raise TrainingError(f"{len(weights)} exit weights for {len(exits)} exits")
        smoothing = self.label_smoothing if target.ndim == 1 else 0.0
        losses = [F.cross_entropy(logits.float(), target, label_smoothing=smoothing) for logits in exits]
        total = torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()
        if self.distill and len(exits) > 1:
            total = total + self.distill * self._divergence(exits[:-1], exits[-1].detach())
        if self.teach and teacher is not None:
            total = total + self.teach * self._divergence(exits, teacher)
        return total

    def _divergence(self, exits: Sequence[Tensor], teacher: Tensor) -> Tensor:
        """Sum over exits of KL(teacher || exit), scaled by temperature squared."""
        wanted = F.log_softmax(teacher.float() / self.temperature, dim=1)
        students = [F.log_softmax(logits.float() / self.temperature, dim=1) for logits in exits]
        each = [F.kl_div(s, wanted, reduction="batchmean", log_target=True) for s in students]
        return torch.stack(each).sum() * self.temperature**2
