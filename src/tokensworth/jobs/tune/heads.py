"""Classifiers on kept features, by L-BFGS; how strongly they are held back is chosen on held-out images."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tokensworth.cascade.heads import CosineHead, heads_of, set_linear
from tokensworth.tokens.vit import ViT

# Weight of half the squared norm of linear weights on standardized features, strongest first.
PENALTIES = tuple(10 ** (-0.5 * step) for step in range(2, 11))
# What cosines are multiplied by; the smaller, the less can be fitted.
SCALES = (8.0, 16.0, 32.0, 64.0)
_STEPS = 100


@dataclass(frozen=True)
class FittedHead:
    """A classifier of (N, D) features.

    Attributes:
        kind: `linear` or `cosine`.
        weight: (classes, D).
        bias: (classes,) of a linear head.
        strength: the chosen penalty, or a cosine head's scale.
        loss: cross-entropy on the held-out images.
        accuracy: share of right answers there.
    """

    kind: str
    weight: Tensor
    bias: Tensor
    strength: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Examples:
    """Features (N, D) and labels (N,)."""

    features: Tensor
    labels: Tensor


def _minimize(parameters: list[Tensor], loss: Callable[[], Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.LBFGS(parameters, max_iter=_STEPS, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[arg-type]
    for parameter in parameters:
        parameter.requires_grad_(False)


def _judged(kind: str, weight: Tensor, bias: Tensor, strength: float, logits: Tensor, labels: Tensor) -> FittedHead:
    loss, right = F.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).float().mean()
    return FittedHead(kind, weight.clone(), bias.clone(), strength, float(loss), float(right))


def fit_linear(fit: Examples, held: Examples, classes: int) -> FittedHead:
    """Multinomial logistic regression on standardized features, the penalty of least held-out loss.

    Args:
        fit, held: images to fit on, and held-out ones to choose the penalty by.
        classes: number of classes.
    """
    mean, deviation = fit.features.mean(dim=0), fit.features.std(dim=0).clamp(min=1e-6)
    x, y = (fit.features - mean) / deviation, fit.labels
    # Each penalty starts from the result of the stronger one before it.
    weight, bias = torch.zeros(classes, x.shape[1]), torch.zeros(classes)
    best: FittedHead | None = None
    for penalty in PENALTIES:

        def loss(penalty: float = penalty) -> Tensor:
            return F.cross_entropy(F.linear(x, weight, bias), y) + penalty / 2 * weight.square().sum()

        _minimize([weight, bias], loss)
        # In terms of the features as they are.
        plain = weight / deviation
        shift = bias - plain @ mean
        found = _judged("linear", plain, shift, penalty, F.linear(held.features, plain, shift), held.labels)
        if best is None or found.loss < best.loss:
            best = found
    assert best is not None
    return best


def fit_cosine(fit: Examples, held: Examples, classes: int) -> FittedHead:
    """One direction per class, from the mean of its images on; the scale of least held-out loss."""
    x, y = F.normalize(fit.features, dim=1), fit.labels
    means = torch.zeros(classes, x.shape[1]).index_add_(0, y, x)
    best: FittedHead | None = None
    for scale in SCALES:
        weight = F.normalize(means, dim=1)
        _minimize([weight], lambda: F.cross_entropy(scale * F.linear(x, F.normalize(weight, dim=1)), y))  # noqa: B023
        unit = F.normalize(weight, dim=1)
        logits = scale * F.linear(F.normalize(held.features, dim=1), unit)
        found = _judged("cosine", unit, torch.zeros(classes), scale, logits, held.labels)
        if best is None or found.loss < best.loss:
            best = found
    assert best is not None
    return best


def set_head(vit: ViT, head: FittedHead) -> None:
    """Gives a stage's model the fitted classifier."""
    if head.kind == "linear":
        set_linear(vit, head.weight, head.bias)
        return
    for part, weight in zip(heads_of(vit).values(), head.weight.chunk(len(heads_of(vit)), dim=1), strict=True):
        assert isinstance(part, CosineHead)
        with torch.no_grad():
            part.weight.copy_(weight)
            part.log_scale.fill_(head.strength).log_()


@torch.no_grad()
def head_logits(vit: ViT, features: Tensor) -> Tensor:
    """Logits (N, classes) of kept features, as `FeatureStore` gathers them."""
    heads = heads_of(vit)
    parts = features.to(next(iter(vit.parameters())).device).chunk(len(heads), dim=1)
    answers = [head(part) for head, part in zip(heads.values(), parts, strict=True)]
    return torch.stack(answers).mean(dim=0).cpu()
