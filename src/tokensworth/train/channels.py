"""VTC-LFC's channel pruning: hidden channels that low frequencies do not need are left out (Wang et al., NeurIPS 2022).

A channel's sensitivity is its first-order Taylor score, |activation x gradient|, on low-pass filtered images. The loss
is the cross-entropy to the model's own answer, so that no labels are needed.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.errors import DataError, UnsupportedModelError
from tokensworth.tokens.method import adapt, adapted_vits, dense, restore
from tokensworth.tokens.methods.vtc_lfc import LowFrequencyViT
from tokensworth.tokens.narrow import hidden_widths

# No layer keeps less than this share of its channels.
_LEAST = 0.1


def low_pass(images: Tensor, cutoff: float) -> Tensor:
    """Images (B, C, S, S) without the frequencies above a share `cutoff` of the highest, by a Gaussian."""
    height, width = images.shape[-2:]
    rows = torch.fft.fftfreq(height, device=images.device)[:, None]
    columns = torch.fft.rfftfreq(width, device=images.device)
    gain = torch.exp(-(rows**2 + columns**2) / (2 * (0.5 * cutoff) ** 2))
    return torch.fft.irfft2(torch.fft.rfft2(images.float()) * gain, s=(height, width)).to(images.dtype)


def channel_sensitivity(
    model: nn.Module, batches: Iterable[Tensor | tuple[Tensor, Tensor]], cutoff: float = 0.25
) -> list[Tensor]:
    """Mean sensitivity of the hidden channels of each layer, (width,) each.

    Args:
        model: with one vision transformer; it runs dense.
        batches: images (B, C, S, S), normalized, or pairs with labels, which are not looked at.
        cutoff: of the low-pass filter.

    Raises:
        DataError: no images.
        UnsupportedModelError: an MLP of another kind than `Mlp`.
    """
    vit: Any = adapted_vits(model)[0][0]
    scores = [torch.zeros(width) for width in hidden_widths(vit)]
    hidden: dict[int, Tensor] = {}

    def note(layer: int, out: Tensor) -> Tensor:
        hidden[layer] = out if out.requires_grad else out.detach().requires_grad_()
        return hidden[layer]

    handles = [
        block.mlp.act.register_forward_hook(lambda _, __, out, n=n: note(n, out)) for n, block in enumerate(vit.blocks)
    ]
    training, seen = model.training, 0
    model.eval()
    try:
        for batch in batches:
            images = (batch if isinstance(batch, Tensor) else batch[0]).to(next(model.parameters()).device)
            with dense(model), torch.enable_grad():
                out = model(low_pass(images, cutoff))
                logits = out[-1] if isinstance(out, (list, tuple)) else out
                loss = F.cross_entropy(logits, logits.argmax(dim=1), reduction="sum")
                gradients = torch.autograd.grad(loss, [hidden[n] for n in range(len(scores))])
            for n, gradient in enumerate(gradients):
                scores[n] += (hidden[n] * gradient).detach().abs().sum(dim=(0, 1)).cpu()
            seen += len(images)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    if not seen:
        raise DataError("channel sensitivities need at least one batch of images")
    return [score / seen for score in scores]


def prune_channels(
    model: nn.Module, batches: Iterable[Tensor | tuple[Tensor, Tensor]], share: float, cutoff: float = 0.25
) -> tuple[int, ...]:
    """Leaves the least sensitive hidden channels of a VTC-LFC-adapted model out, over all layers alike.

    Args:
        model: adapted with `VTCLFC`; with `keep=1` channels are pruned and tokens are not.
        batches: as in `channel_sensitivity`.
        share: of all hidden channels that is kept.
        cutoff: of the low-pass filter.

    Returns:
        The hidden channels left in each layer, which are the method's `hidden` from now on.

    Raises:
        UnsupportedModelError: not adapted with VTC-LFC, a share that cannot be, or an MLP of another kind.
        DataError: no images.
    """
    found = [added for _, added in adapted_vits(model) if isinstance(added, LowFrequencyViT)]
    if len(found) != 1 or not _LEAST <= share <= 1:
        raise UnsupportedModelError(
            f"prune_channels needs one transformer adapted with VTCLFC and a share from {_LEAST} to 1, not {share}"
        )
    scores = channel_sensitivity(model, batches, cutoff)
    # Layers differ in scale; each is judged by its own mean.
    level = torch.cat([score / score.mean().clamp(min=1e-12) for score in scores])
    threshold = level.sort(descending=True).values[max(1, round(share * len(level))) - 1]
    widths = []
    for score in scores:
        wanted = int((score / score.mean().clamp(min=1e-12) >= threshold).sum())
        widths.append(max(wanted, round(_LEAST * len(score))))
    adapt(restore(model), replace(found[0].method, hidden=tuple(widths)))
    vit, added = adapted_vits(model)[0]
    for layer, narrow in added.narrow.items():  # type: ignore[union-attr,operator]
        best = scores[int(layer) - 1].topk(widths[int(layer) - 1]).indices.sort().values
        narrow.take(vit.blocks[int(layer) - 1].mlp, best.to(narrow.fc1.weight.device))  # type: ignore[union-attr]
    return tuple(widths)
