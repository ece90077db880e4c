"""Things that stand in rooms, each a few boxes and balls. Sizes are metres."""

from collections.abc import Callable

import numpy as np

from tokensworth.data.scenes.solids import Ball, Box
from tokensworth.data.scenes.texture import PATTERNS, Material

Part = Box | Ball
Random = np.random.Generator


def colour(random: Random, light: float = 0.5) -> np.ndarray:
    """A linear RGB colour; mostly muted, as in rooms."""
    grey = random.uniform(0.05, 1) ** (1 / max(light, 0.1) - 0.8)
    return (grey * (1 + random.choice([0.15, 0.5]) * random.uniform(-1, 1, 3))).clip(0.02, 0.95).astype(np.float32)


def material(random: Random, patterns: tuple[str, ...] = PATTERNS, light: float = 0.5) -> Material:
    """A random surface."""
    pattern = str(random.choice(patterns))
    first = colour(random, light)
    near = (first * random.uniform(0.5, 1.4)).clip(0.02, 0.95).astype(np.float32)
    second = near if random.random() < 0.6 else colour(random, light)
    return Material(pattern, np.stack([first, second]), float(random.uniform(0.08, 0.6)), int(random.integers(1 << 20)))


class Frame:
    """A place on the floor and a direction, in which parts are put by their own coordinates."""

    def __init__(self, x: float, z: float, yaw: float) -> None:
        self.x, self.z, self.yaw = x, z, yaw
        self.parts: list[Part] = []

    def _at(self, x: float, y: float, z: float) -> np.ndarray:
        cos, sin = np.cos(self.yaw), np.sin(self.yaw)
        return np.array([self.x + cos * x + sin * z, y, self.z + cos * z - sin * x], dtype=np.float32)

    def box(self, x: float, y: float, z: float, size: tuple[float, float, float], look: Material) -> None:
        """A box whose bottom's middle is at (x, y, z)."""
        half = np.array(size, dtype=np.float32) / 2
        self.parts.append(Box(self._at(x, y + size[1] / 2, z), half, look, self.yaw))

    def ball(self, x: float, y: float, z: float, radius: float, look: Material) -> None:
        """A ball that rests at (x, y, z)."""
        self.parts.append(Ball(self._at(x, y + radius, z), radius, look))


def _legs(frame: Frame, width: float, deep: float, high: float, look: Material) -> None:
    for i in (-1, 1):
        for j in (-1, 1):
            frame.box(i * (width / 2 - 0.04), 0, j * (deep / 2 - 0.04), (0.06, high, 0.06), look)


def table(frame: Frame, random: Random) -> None:
    width, deep, high = random.uniform(0.8, 1.8), random.uniform(0.6, 1.0), random.uniform(0.4, 0.8)
    look = material(random, ("wood", "plain"))
    frame.box(0, high, 0, (width, 0.05, deep), look)
    _legs(frame, width, deep, high, look)
    for _ in range(random.integers(0, 3)):
        x, z = random.uniform(-0.35, 0.35) * width, random.uniform(-0.35, 0.35) * deep
        if random.random() < 0.5:
            frame.ball(x, high + 0.05, z, random.uniform(0.05, 0.14), material(random))
        else:
            size = (random.uniform(0.08, 0.3), random.uniform(0.05, 0.4), random.uniform(0.08, 0.3))
            frame.box(x, high + 0.05, z, size, material(random))


def chair(frame: Frame, random: Random) -> None:
    side, high = random.uniform(0.4, 0.5), random.uniform(0.4, 0.5)
    look = material(random)
    frame.box(0, high, 0, (side, 0.06, side), look)
    frame.box(0, high, -side / 2, (side, random.uniform(0.4, 0.6), 0.05), look)
    _legs(frame, side, side, high, material(random, ("plain",)))


def sofa(frame: Frame, random: Random) -> None:
    width, deep, high = random.uniform(1.4, 2.4), random.uniform(0.8, 1.0), random.uniform(0.38, 0.46)
    look = material(random, ("plain", "blotches", "stripes", "checker"))
    frame.box(0, 0, 0, (width, high, deep), look)
    frame.box(0, high, -deep / 2 + 0.1, (width, 0.45, 0.2), look)
    for side in (-1, 1):
        frame.box(side * (width / 2 - 0.1), high, 0.05, (0.2, 0.2, deep - 0.1), look)


def bed(frame: Frame, random: Random) -> None:
    width, long, high = random.uniform(0.9, 1.8), random.uniform(1.9, 2.1), random.uniform(0.35, 0.6)
    frame.box(0, 0, 0, (width, high, long), material(random))
    frame.box(0, high, -long / 2 + 0.25, (width * 0.8, 0.12, 0.4), material(random, ("plain",), 0.9))
    frame.box(0, 0, -long / 2, (width, high + random.uniform(0.3, 0.7), 0.06), material(random, ("wood",)))


def cabinet(frame: Frame, random: Random) -> None:
    size = (random.uniform(0.5, 1.6), random.uniform(0.6, 2.1), random.uniform(0.35, 0.65))
    frame.box(0, 0, 0, size, material(random, ("wood", "plain", "stripes")))


def shelf(frame: Frame, random: Random) -> None:
    width, high, deep = random.uniform(0.7, 1.4), random.uniform(1.2, 2.1), random.uniform(0.25, 0.35)
    look = material(random, ("wood", "plain"))
    for side in (-1, 1):
        frame.box(side * width / 2, 0, 0, (0.03, high, deep), look)
    levels = int(random.integers(3, 5))
    for level in range(levels + 1):
        y = level * (high - 0.03) / levels
        frame.box(0, y, 0, (width, 0.03, deep), look)
        if level < levels:
            size = (random.uniform(0.2, 0.8) * width, random.uniform(0.15, 0.28), deep * 0.7)
            frame.box(random.uniform(-0.08, 0.08), y + 0.03, 0, size, material(random))


def crates(frame: Frame, random: Random) -> None:
    top = 0.0
    for _ in range(random.integers(1, 4)):
        side, high = random.uniform(0.25, 0.6), random.uniform(0.2, 0.5)
        frame.box(random.uniform(-0.05, 0.05), top, random.uniform(-0.05, 0.05), (side, high, side), material(random))
        top += high


def ball(frame: Frame, random: Random) -> None:
    frame.ball(0, 0, 0, random.uniform(0.1, 0.4), material(random))


def lamp(frame: Frame, random: Random) -> None:
    high = random.uniform(1.2, 1.7)
    frame.box(0, 0, 0, (0.04, high, 0.04), material(random, ("plain",)))
    frame.box(0, 0, 0, (0.3, 0.03, 0.3), material(random, ("plain",)))
    frame.ball(0, high, 0, random.uniform(0.12, 0.22), Material("plain", np.ones((2, 3), np.float32), glow=0.9))


def column(frame: Frame, random: Random) -> None:
    side = random.uniform(0.2, 0.5)
    frame.box(0, 0, 0, (side, 6.0, side), material(random))


Thing = Callable[[Frame, Random], None]
ALONG_WALLS: tuple[Thing, ...] = (sofa, bed, cabinet, shelf, table)
ANYWHERE: tuple[Thing, ...] = (table, chair, chair, crates, ball, lamp, column, cabinet)


def on_wall(frame: Frame, random: Random, high: float) -> None:
    """A picture, a mirror-like panel, a door or a bright window, flat against a wall behind the frame."""
    kind = random.choice(["picture", "picture", "door", "window"])
    if kind == "door":
        frame.box(0, 0, 0, (random.uniform(0.8, 1.0), min(2.05, high - 0.1), 0.06), material(random, ("wood", "plain")))
        return
    width, tall = random.uniform(0.3, 1.6), random.uniform(0.3, min(1.3, high - 1.1))
    y = random.uniform(0.9, high - tall - 0.1)
    if kind == "window":
        sky = np.array([[0.75, 0.85, 1.0], [1.0, 1.0, 1.0]], dtype=np.float32)
        frame.box(0, y, 0, (width, tall, 0.04), Material("blotches", sky, 1.0, int(random.integers(99)), glow=0.8))
    else:
        frame.box(0, y, 0, (width, tall, 0.03), material(random))
