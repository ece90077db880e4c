"""The nine measures of metric depth, per image, and their means."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from tokensworth.errors import DataError


@dataclass(frozen=True)
class DepthErrors:
    """How far predicted depth p is from true depth t over an image's known pixels.

    Attributes:
        abs_rel: mean of |p - t| / t.
        sq_rel: mean of (p - t)^2 / t, metres.
        rms: root of the mean of (p - t)^2, metres.
        log_rms: root of the mean of (ln p - ln t)^2.
        log10: mean of |log10 p - log10 t|.
        silog: 100 times the standard deviation of ln p - ln t.
        delta1, delta2, delta3: share of pixels where max(p / t, t / p) is below 1.25, its square and its cube.
    """

    abs_rel: float
    sq_rel: float
    rms: float
    log_rms: float
    log10: float
    silog: float
    delta1: float
    delta2: float
    delta3: float

    def to_dict(self) -> dict[str, float]:
        """Plain values for JSON."""
        return asdict(self)


def depth_errors(
    predicted: Tensor,
    target: Tensor,
    max_depth: float,
    min_depth: float = 1e-3,
    judged: tuple[slice, slice] | None = None,
) -> DepthErrors | None:
    """The errors of one image; None where no pixel counts.

    Args:
        predicted: (H, W) metres; clamped to the range, what is not a number to its lower end.
        target: (H, W) metres; a pixel counts where it lies strictly within the range.
        max_depth, min_depth: the range in metres.
        judged: rows and columns that count; all where None.

    Raises:
        DataError: shapes that differ.
    """
    if predicted.shape != target.shape:
        raise DataError(f"depth of {tuple(predicted.shape)} against a truth of {tuple(target.shape)}")
    if judged is not None:
        predicted, target = predicted[judged], target[judged]
    known = (target > min_depth) & (target < max_depth)
    if not known.any():
        return None
    p = predicted[known].double().nan_to_num(min_depth, max_depth, min_depth).clamp(min_depth, max_depth)
    t = target[known].double()
    apart, log = p - t, p.log() - t.log()
    ratio = torch.maximum(p / t, t / p)
    return DepthErrors(
        abs_rel=float((apart.abs() / t).mean()),
        sq_rel=float((apart.square() / t).mean()),
        rms=float(apart.square().mean().sqrt()),
        log_rms=float(log.square().mean().sqrt()),
        log10=float((p.log10() - t.log10()).abs().mean()),
        silog=100 * float((log.square().mean() - log.mean().square()).clamp(min=0).sqrt()),
        delta1=float((ratio < 1.25).double().mean()),
        delta2=float((ratio < 1.25**2).double().mean()),
        delta3=float((ratio < 1.25**3).double().mean()),
    )


def mean_errors(errors: Iterable[DepthErrors | None]) -> DepthErrors:
    """The mean over images, those without a pixel that counts left out.

    Raises:
        DataError: no image has one.
    """
    found = [e for e in errors if e is not None]
    if not found:
        raise DataError("no image has a pixel of known depth in the range that counts")
    return DepthErrors(**{f.name: sum(getattr(e, f.name) for e in found) / len(found) for f in fields(DepthErrors)})


def mirrored_mean(direct: Tensor, mirrored: Tensor) -> Tensor:
    """A prediction and that of the mirrored image as one: their mean, but at the sides the one that saw more there.

    The outer 5 % at the left are the second's, at the right the first's; to 10 % they fade into the mean, as in the
    evaluation of Monodepth (Godard et al., 2017) that the field kept.

    Args:
        direct: (B, 1, H, W), of the image.
        mirrored: (B, 1, H, W), of the mirrored image, itself still mirrored.
    """
    back = mirrored.flip(3)
    place = torch.linspace(0, 1, direct.shape[3], dtype=direct.dtype, device=direct.device)
    left = 1 - (20 * (place - 0.05)).clamp(0, 1)
    right = left.flip(0)
    return right * direct + left * back + (1 - left - right) * (direct + back) / 2
