"""Errors and loss of depth against plain NumPy, and the mirrored mean."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokensworth.dense import SILogLoss, depth_errors, mean_errors, mirrored_mean
from tokensworth.errors import DataError


def by_hand(p, t, low, high):
    """The measures as the papers write them, pixel lists in NumPy."""
    use = [
        (max(low, min(high, float(a))), float(b)) for a, b in zip(p.ravel(), t.ravel(), strict=True) if low < b < high
    ]
    if not use:
        return None
    p, t = np.array(use).T
    log = np.log(p) - np.log(t)
    ratio = np.where(p > t, p / t, t / p)
    return {
        "abs_rel": np.mean(np.abs(p - t) / t),
        "sq_rel": np.mean((p - t) ** 2 / t),
        "rms": np.sqrt(np.mean((p - t) ** 2)),
        "log_rms": np.sqrt(np.mean(log**2)),
        "log10": np.mean(np.abs(np.log10(p) - np.log10(t))),
        "silog": 100 * np.sqrt(max(0.0, np.mean(log**2) - np.mean(log) ** 2)),
        "delta1": np.mean(ratio < 1.25),
        "delta2": np.mean(ratio < 1.25**2),
        "delta3": np.mean(ratio < 1.25**3),
    }


@given(st.integers(0, 10_000), st.sampled_from([10.0, 80.0]), st.floats(0, 1))
def test_errors_are_those_of_numpy(seed, high, unknown):
    random = np.random.default_rng(seed)
    t = random.uniform(-0.1, 1.1 * high, (7, 9)).astype(np.float32) * (random.random((7, 9)) > unknown)
    p = (t + random.normal(0, 0.3 * high, t.shape)).astype(np.float32)
    t = t.astype(np.float32)
    found, wanted = depth_errors(torch.from_numpy(p), torch.from_numpy(t), high), by_hand(p, t, 1e-3, high)
    assert (found is None) == (wanted is None)
    if found is not None:
        assert found.to_dict() == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_edge_cases():
    t = torch.full((4, 5), 2.0)
    assert depth_errors(t, torch.zeros(4, 5), 10) is None
    perfect = depth_errors(t, t, 10)
    assert perfect.to_dict() == {**dict.fromkeys(perfect.to_dict(), 0.0), "delta1": 1.0, "delta2": 1.0, "delta3": 1.0}
    # All clipped: every prediction is beyond the range, or not a number.
    far, lost = depth_errors(t * 100, t, 10), depth_errors(t * math.nan, t, 10)
    assert far.abs_rel == pytest.approx(4.0)
    assert lost.rms == pytest.approx(2 - 1e-3)
    assert depth_errors(-t, t, 10) == lost
    # Depth on the border of the range does not count.
    assert depth_errors(t, torch.full((4, 5), 10.0), 10) is None
    crop = (slice(1, 3), slice(0, 2))
    wrong = t.clone()
    wrong[0] = 5
    assert depth_errors(wrong, t, 10, judged=crop) == perfect
    with pytest.raises(DataError, match="against a truth"):
        depth_errors(t, t[:2], 10)
    assert mean_errors([None, perfect, far]).abs_rel == pytest.approx(2.0)
    with pytest.raises(DataError, match="no image"):
        mean_errors([None])


def test_the_loss_is_the_published_formula():
    torch.manual_seed(0)
    p, t = torch.rand(2, 1, 5, 6) * 9 + 0.5, torch.rand(2, 1, 5, 6) * 9 + 0.5
    t[0, :, :2] = 0
    known = t > 0
    d = p[known].log() - t[known].log()
    wanted = 10 * (d.square().mean() - 0.85 * d.mean() ** 2).sqrt()
    assert torch.allclose(SILogLoss()(p, t), wanted)
    teacher = t.clamp(min=1.0)
    e = p.log() - teacher.log()
    both = wanted + 0.5 * 10 * (e.square().mean() - 0.85 * e.mean() ** 2).sqrt()
    assert torch.allclose(SILogLoss(teach=0.5)(p, t, teacher), both)
    assert torch.allclose(SILogLoss(focus=1.0)(3 * t, t), torch.tensor(0.0), atol=1e-2)
    p.requires_grad_(True)
    SILogLoss()(p, torch.zeros_like(t)).backward()
    assert p.grad.isfinite().all()


def test_the_mirrored_mean_by_the_pixel():
    direct, mirrored = torch.zeros(1, 1, 2, 41), torch.ones(1, 1, 2, 41)
    mean = mirrored_mean(direct, mirrored)[0, 0]
    place = np.arange(41) / 40
    wanted = np.full(41, 0.5)
    wanted[place <= 0.05] = 1
    wanted[place >= 0.95] = 0
    fading = (place > 0.05) & (place < 0.1)
    wanted[fading] = 1 - 0.5 * (place[fading] - 0.05) / 0.05
    fading = fading[::-1]
    wanted[fading] = 0.5 * (1 - place[fading] - 0.05) / 0.05
    assert np.allclose(mean.numpy(), wanted, atol=1e-6)
    ramp = torch.arange(41.0).expand(1, 1, 2, 41)
    assert torch.allclose(mirrored_mean(ramp, ramp.flip(3)), ramp)
