"""What a scene is made of: boxes turned about the vertical, balls and the room, and where rays meet them.

Lengths are metres; x and z lie in the floor, y points up. Rays are o + t d; all arrays are float32.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokensworth.data.scenes.texture import Material

_FAR = np.float32(np.inf)


@dataclass(frozen=True)
class Hits:
    """Points on a solid, with what colours them.

    Attributes:
        normal: (N, 3), towards the viewer's side.
        place: (N, 2), metres along the surface.
        face: (N,), which of the solid's faces.
    """

    normal: np.ndarray
    place: np.ndarray
    face: np.ndarray


class Solid(Protocol):
    """Something that rays can meet."""

    @property
    def materials(self) -> tuple[Material, ...]:
        """One for each face."""
        ...

    def meet(self, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
        """The least t > 0 at which rays (..., 3) from origins that broadcast to them meet it; infinity where none."""
        ...

    def hits(self, points: np.ndarray) -> Hits:
        """What is at points (N, 3) on its surface."""
        ...

    def bounds(self) -> np.ndarray:
        """Points (M, 3) whose hull holds it."""
        ...


@dataclass(frozen=True)
class Box:
    """A box turned by `yaw` radians about the vertical."""

    centre: np.ndarray
    half: np.ndarray
    material: Material
    yaw: float = 0.0

    @property
    def materials(self) -> tuple[Material, ...]:
        return (self.material,)

    def _local(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors (..., 3) in the box's own axes."""
        if not self.yaw:
            return vectors
        cos, sin = np.float32(np.cos(self.yaw)), np.float32(np.sin(self.yaw))
        x, y, z = vectors[..., 0], vectors[..., 1], vectors[..., 2]
        return np.stack([cos * x - sin * z, y, sin * x + cos * z], axis=-1)

    def _world(self, vectors: np.ndarray) -> np.ndarray:
        cos, sin = np.float32(np.cos(self.yaw)), np.float32(np.sin(self.yaw))
        x, y, z = vectors[..., 0], vectors[..., 1], vectors[..., 2]
        return np.stack([cos * x + sin * z, y, cos * z - sin * x], axis=-1)

    def meet(self, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
        enter, leave = _slabs(self._local(origin - self.centre), self._local(rays), self.half)
        return np.where((enter < leave) & (enter > 1e-4), enter, _FAR)

    def hits(self, points: np.ndarray) -> Hits:
        local = self._local(points - self.centre)
        axis, side, place = _face(local, self.half)
        normal = np.zeros_like(local)
        normal[np.arange(len(local)), axis] = side
        return Hits(self._world(normal), place, np.zeros(len(local), dtype=np.int64))

    def bounds(self) -> np.ndarray:
        signs = np.array([[i, j, k] for i in (-1, 1) for j in (-1, 1) for k in (-1, 1)], dtype=np.float32)
        return self.centre + self._world(signs * self.half)

    def apart(self, point: np.ndarray) -> float:
        """Distance of a point from the box; 0 inside."""
        return float(np.linalg.norm(np.maximum(np.abs(self._local(point - self.centre)) - self.half, 0)))


@dataclass(frozen=True)
class Ball:
    """A sphere."""

    centre: np.ndarray
    radius: float
    material: Material

    @property
    def materials(self) -> tuple[Material, ...]:
        return (self.material,)

    def meet(self, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
        apart = origin - self.centre
        a, b = (rays * rays).sum(-1), (rays * apart).sum(-1)
        root = b * b - a * ((apart * apart).sum(-1) - np.float32(self.radius) ** 2)
        near = (-b - np.sqrt(np.maximum(root, 0))) / a
        return np.where((root > 0) & (near > 1e-4), near, _FAR)

    def hits(self, points: np.ndarray) -> Hits:
        normal = (points - self.centre) / np.float32(self.radius)
        around = np.arctan2(normal[:, 2], normal[:, 0])
        place = np.stack([around, np.arcsin(normal[:, 1].clip(-1, 1))], axis=1) * np.float32(self.radius)
        return Hits(normal, place, np.zeros(len(points), dtype=np.int64))

    def bounds(self) -> np.ndarray:
        signs = np.array([[i, j, k] for i in (-1, 1) for j in (-1, 1) for k in (-1, 1)], dtype=np.float32)
        return self.centre + signs * np.float32(self.radius)

    def apart(self, point: np.ndarray) -> float:
        """Distance of a point from the ball; 0 inside."""
        return max(0.0, float(np.linalg.norm(point - self.centre)) - self.radius)


@dataclass(frozen=True)
class Room:
    """The inside of a box from (0, 0, 0) to `size`: walls at low and high x, floor, ceiling, low and high z."""

    size: np.ndarray
    materials: tuple[Material, ...]

    def meet(self, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
        half = self.size / 2
        return _slabs(origin - half, rays, half)[1]

    def hits(self, points: np.ndarray) -> Hits:
        half = self.size / 2
        local = points - half
        axis, side, place = _face(local, half)
        normal = np.zeros_like(local)
        normal[np.arange(len(local)), axis] = -side
        return Hits(normal, place, 2 * axis + (side > 0))

    def bounds(self) -> np.ndarray:
        return np.zeros((0, 3), dtype=np.float32)


def _slabs(origin: np.ndarray, rays: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where rays enter and leave a box around (0, 0, 0), on one axis after the other."""
    enter, leave = None, None
    for axis in range(3):
        along = rays[..., axis]
        along = np.where(np.abs(along) < 1e-8, np.float32(1e-8), along)
        middle, reach = -origin[..., axis] / along, np.abs(half[axis] / along)
        enter = middle - reach if enter is None else np.maximum(enter, middle - reach)
        leave = middle + reach if leave is None else np.minimum(leave, middle + reach)
    assert enter is not None
    assert leave is not None
    return enter, leave


def _face(local: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The axis (N,) of the face that each point (N, 3) is on, its side -1 or 1, and the place (N, 2) on it."""
    axis = (np.abs(local) - half).argmax(axis=1)
    rows = np.arange(len(local))
    side = np.where(local[rows, axis] > 0, 1, -1)
    across = np.array([[2, 1], [0, 2], [0, 1]])[axis]
    return axis, side, np.stack([local[rows, across[:, 0]], local[rows, across[:, 1]]], axis=1)
