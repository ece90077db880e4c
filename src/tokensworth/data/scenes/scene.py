"""A room with things in it, lights, and cameras that see something; all from one seed."""

from dataclasses import dataclass

import numpy as np

from tokensworth.data.scenes.furniture import ALONG_WALLS, ANYWHERE, Frame, Part, Random, material, on_wall
from tokensworth.data.scenes.solids import Room

# Nearest that a camera may be to a thing, and to a wall, in metres.
_CLEAR, _FROM_WALL = 0.35, 0.4


@dataclass(frozen=True)
class Light:
    """A point light.

    Attributes:
        place: (3,) metres.
        colour: (3,) linear RGB times its strength at one metre.
    """

    place: np.ndarray
    colour: np.ndarray


@dataclass(frozen=True)
class Camera:
    """A pinhole camera.

    Attributes:
        place: (3,) metres.
        turn: (3, 3); its columns are the camera's right, up and forward in the room.
    """

    place: np.ndarray
    turn: np.ndarray


@dataclass(frozen=True)
class Scene:
    """A room.

    Attributes:
        room: its walls.
        things: what stands in it.
        lights: the first throws shadows.
        ambient: light from everywhere.
    """

    room: Room
    things: tuple[Part, ...]
    lights: tuple[Light, ...]
    ambient: float


def make_scene(seed: int, number: int) -> Scene:
    """The scene of a number under a seed."""
    random = np.random.default_rng([seed, number])
    size = np.array([random.uniform(2.8, 7.5), random.uniform(2.3, 3.4), random.uniform(2.8, 8.5)], dtype=np.float32)
    wall, other = (material(random, ("plain", "plain", "plain", "stripes", "bricks", "blotches"), 0.8) for _ in "ab")
    floor = material(random, ("wood", "checker", "plain", "blotches"), 0.4)
    ceiling = material(random, ("plain",), 0.95)
    room = Room(size, (wall, other if random.random() < 0.4 else wall, floor, ceiling, wall, wall))
    things: list[Part] = []
    for _ in range(random.integers(1, 4)):
        things += _along_wall(room, random)
    for _ in range(random.integers(1, 5)):
        frame = Frame(random.uniform(0.5, size[0] - 0.5), random.uniform(0.5, size[2] - 0.5), random.uniform(0, 6.28))
        random.choice(ANYWHERE)(frame, random)  # type: ignore[arg-type]
        things += frame.parts
    for _ in range(random.integers(0, 4)):
        frame = _against_wall(room, random, 0.0)
        on_wall(frame, random, float(size[1]))
        things += frame.parts
    return Scene(room, tuple(things), _lights(room, random), float(random.uniform(0.15, 0.5)))


def _against_wall(room: Room, random: Random, apart: float) -> Frame:
    """A frame whose back is to one of the walls."""
    width, _, deep = room.size
    side = random.integers(4)
    along = random.uniform(0.15, 0.85)
    if side == 0:
        return Frame(along * width, apart, 0.0)
    if side == 1:
        return Frame(apart, along * deep, np.pi / 2)
    if side == 2:
        return Frame(along * width, deep - apart, np.pi)
    return Frame(width - apart, along * deep, -np.pi / 2)


def _along_wall(room: Room, random: Random) -> list[Part]:
    frame = _against_wall(room, random, random.uniform(0.3, 0.6))
    random.choice(ALONG_WALLS)(frame, random)  # type: ignore[arg-type]
    return frame.parts


def _lights(room: Room, random: Random) -> tuple[Light, ...]:
    lights = []
    for _ in range(random.integers(1, 4)):
        place = room.size * np.array(
            [random.uniform(0.15, 0.85), random.uniform(0.8, 0.97), random.uniform(0.15, 0.85)]
        )
        warm = np.array([1.0, random.uniform(0.75, 1.0), random.uniform(0.5, 1.1)])
        lights.append(Light(place.astype(np.float32), (random.uniform(1.0, 4.0) * warm).astype(np.float32)))
    return tuple(lights)


def make_camera(scene: Scene, random: Random) -> Camera:
    """A camera at about eye height that is in nothing's way."""
    size = scene.room.size
    place = size / 2
    for _ in range(50):
        low, high = np.array([_FROM_WALL, 0.8, _FROM_WALL]), size - np.array([_FROM_WALL, 0.3, _FROM_WALL])
        high[1] = min(high[1], 1.8)
        place = random.uniform(low, high).astype(np.float32)
        if all(thing.apart(place) > _CLEAR for thing in scene.things):
            break
    # Towards a point beyond the middle, so that a view is seldom of one near wall.
    goal = size * random.uniform(0.1, 0.9, 3)
    yaw = np.arctan2(goal[0] - place[0], goal[2] - place[2]) + random.normal(0, 0.4)
    pitch, roll = random.normal(-0.15, 0.15), random.normal(0, 0.03)
    return Camera(place, _turn(float(yaw), float(pitch), float(roll)))


def _turn(yaw: float, pitch: float, roll: float) -> np.ndarray:
    forward = np.array([np.sin(yaw) * np.cos(pitch), np.sin(pitch), np.cos(yaw) * np.cos(pitch)])
    right = np.array([np.cos(yaw), 0.0, -np.sin(yaw)])
    up = np.cross(forward, right)
    right, up = np.cos(roll) * right + np.sin(roll) * up, np.cos(roll) * up - np.sin(roll) * right
    return np.stack([right, up, forward], axis=1).astype(np.float32)
