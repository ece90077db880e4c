"""Rays from a camera into a scene: depth along the optical axis, exact, and light."""

import numpy as np

from tokensworth.data.scenes.scene import Camera, Scene
from tokensworth.data.scenes.solids import Solid


def cast(scene: Scene, camera: Camera, focal: float, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Depth (H, W) in metres along the optical axis, and linear RGB (H, W, 3)."""
    rows = (np.arange(height, dtype=np.float32) + 0.5 - height / 2) / np.float32(focal)
    columns = (np.arange(width, dtype=np.float32) + 0.5 - width / 2) / np.float32(focal)
    x, y = np.meshgrid(columns.astype(np.float32), -rows.astype(np.float32))
    # The third coordinate is one, so that a ray's t is the depth.
    rays = np.stack([x, y, np.ones_like(x)], axis=-1) @ camera.turn.T
    solids: list[Solid] = [scene.room, *scene.things]
    depth = scene.room.meet(camera.place, rays)
    which = np.zeros((height, width), dtype=np.int64)
    for number, solid in enumerate(scene.things, 1):
        window = _window(solid, camera, focal, height, width)
        if window is not None:
            found = solid.meet(camera.place, rays[window])
            nearer = found < depth[window]
            depth[window][nearer] = found[nearer]
            which[window][nearer] = number
    points = camera.place + depth[..., None] * rays
    return depth, _light(scene, solids, which.ravel(), points.reshape(-1, 3)).reshape(height, width, 3)


def _window(solid: Solid, camera: Camera, focal: float, height: int, width: int) -> tuple[slice, slice] | None:
    """The part of the image that a solid may be seen in; None where it is behind the camera."""
    seen = (solid.bounds() - camera.place) @ camera.turn
    front = seen[:, 2]
    if front.max() <= 0.01:
        return None
    if front.min() <= 0.01:
        return slice(0, height), slice(0, width)
    x = width / 2 + focal * seen[:, 0] / front
    y = height / 2 - focal * seen[:, 1] / front
    left, right = max(0, int(x.min()) - 1), min(width, int(x.max()) + 2)
    top, bottom = max(0, int(y.min()) - 1), min(height, int(y.max()) + 2)
    return (slice(top, bottom), slice(left, right)) if left < right and top < bottom else None


def _light(scene: Scene, solids: list[Solid], which: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Linear RGB (N, 3) of points on the solids of these numbers."""
    normal, colour = np.empty_like(points), np.empty_like(points)
    glow = np.zeros(len(points), dtype=np.float32)
    for number in np.unique(which):
        here = np.flatnonzero(which == number)
        hits = solids[number].hits(points[here])
        normal[here] = hits.normal
        for face in np.unique(hits.face):
            on = here[hits.face == face]
            look = solids[number].materials[face]
            colour[on], glow[on] = look.colour(hits.place[hits.face == face]), look.glow
    # From above more than from below, as where ceilings are bright.
    light = np.float32(scene.ambient) * (np.float32(0.75) + np.float32(0.25) * normal[:, 1:2]).repeat(3, axis=1)
    for index, lamp in enumerate(scene.lights):
        way = lamp.place - points
        square = (way * way).sum(1)
        facing = np.maximum((normal * way).sum(1) / np.sqrt(square), 0)
        strength = facing / (1 + square)
        if index == 0:
            lit = np.flatnonzero(strength > 1e-3)
            strength[lit] *= ~_shaded(scene, points[lit] + normal[lit] * np.float32(2e-3), way[lit])
        light += strength[:, None] * lamp.colour
    return colour * light * (1 - glow[:, None]) + colour * glow[:, None]


def _shaded(scene: Scene, points: np.ndarray, way: np.ndarray) -> np.ndarray:
    """Whether something that gives no light is between points (N, 3) and what lies at their `way` (N, 3)."""
    shaded = np.zeros(len(points), dtype=bool)
    for thing in scene.things:
        if thing.material.glow == 0:
            shaded |= thing.meet(points, way) < 1
    return shaded
