"""Colours on surfaces: a few patterns, all with a little noise, so that no surface is quite even."""

from dataclasses import dataclass

import numpy as np

PATTERNS = ("plain", "checker", "stripes", "bricks", "wood", "blotches")
_TABLE = np.random.default_rng(20220601).random(4096, dtype=np.float32)


@dataclass(frozen=True)
class Material:
    """How a surface looks.

    Attributes:
        pattern: one of `PATTERNS`.
        colours: (2, 3), linear RGB.
        scale: metres of one period.
        offset: shifts the noise.
        glow: light that the surface itself gives.
    """

    pattern: str
    colours: np.ndarray
    scale: float = 0.3
    offset: int = 0
    glow: float = 0.0

    def colour(self, place: np.ndarray) -> np.ndarray:
        """Linear RGB (N, 3) at places (N, 2) in metres."""
        share = self._share(place / np.float32(self.scale))[:, None]
        mixed = self.colours[0] * (1 - share) + self.colours[1] * share
        grain = noise(place * np.float32(23), self.offset) - np.float32(0.5)
        return mixed * (1 + np.float32(0.25) * grain[:, None])

    def _share(self, place: np.ndarray) -> np.ndarray:
        """How much of the second colour, (N,)."""
        x, y = place[:, 0], place[:, 1]
        if self.pattern == "checker":
            return ((np.floor(x) + np.floor(y)) % 2).astype(np.float32)
        if self.pattern == "stripes":
            return (x % 1 < 0.5).astype(np.float32)
        if self.pattern == "bricks":
            row = np.floor(2 * y)
            along = x + np.float32(0.5) * (row % 2)
            return ((along % 1 < 0.05) | ((2 * y) % 1 < 0.1)).astype(np.float32)
        if self.pattern == "wood":
            plank = np.floor(x)
            rings = noise(np.stack([x * 12, y * 0.8 + 17 * plank], axis=1), self.offset + 1)
            return np.where(x % 1 < 0.02, np.float32(1), rings)
        if self.pattern == "blotches":
            return noise(place, self.offset + 2)
        return np.zeros(len(place), dtype=np.float32)


def noise(place: np.ndarray, offset: int) -> np.ndarray:
    """Smooth noise in [0, 1] at places (N, 2), with a period of one."""
    corner = np.floor(place).astype(np.int64)
    part = place - corner
    part = part * part * (3 - 2 * part)

    def value(dx: int, dy: int) -> np.ndarray:
        mixed = (corner[:, 0] + dx) * 73856093 ^ (corner[:, 1] + dy) * 19349663 ^ offset * 83492791
        return _TABLE[(mixed ^ mixed >> 13) & 4095]

    x, y = part[:, 0], part[:, 1]
    low = value(0, 0) * (1 - x) + value(1, 0) * x
    high = value(0, 1) * (1 - x) + value(1, 1) * x
    return (low * (1 - y) + high * y).astype(np.float32)
