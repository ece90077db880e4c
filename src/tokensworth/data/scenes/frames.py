"""Frames of generated scenes, on disk as NYU Depth V2 is: JPEG, 16-bit PNG in millimetres, a split file."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from tokensworth.data.scenes.render import cast
from tokensworth.data.scenes.scene import make_camera, make_scene
from tokensworth.errors import DataError
from tokensworth.files import atomic_path, write_json, write_text

# Horizontal field of view of the Kinect's camera, by which metric depth can be told from one image.
_VIEW = 60.0
SPLIT_NAME = "files.txt"


@dataclass(frozen=True)
class Frame:
    """One view of a scene.

    Attributes:
        image: (H, W, 3) uint8.
        depth: (H, W) float32, metres along the optical axis.
        focal: in pixels.
    """

    image: np.ndarray
    depth: np.ndarray
    focal: float


def render_frame(seed: int, scene: int, view: int, height: int, width: int) -> Frame:
    """One view of one scene; the same numbers give the same frame.

    Args:
        seed: of all scenes.
        scene: which scene.
        view: which of its cameras.
        height, width: in pixels.
    """
    random = np.random.default_rng([seed, scene, view])
    room = make_scene(seed, scene)
    focal = width / 2 / np.tan(np.radians(_VIEW / 2))
    depth, light = cast(room, make_camera(room, random), focal, height, width)
    for _ in range(20):
        if depth.min() > 0.2 and np.median(depth) > 0.8:
            break
        depth, light = cast(room, make_camera(room, random), focal, height, width)
    return Frame(_develop(light, random), depth, float(focal))


def _develop(light: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Linear RGB to what a camera would store: exposure, white balance, falling off to the corners, noise, gamma."""
    height, width = light.shape[:2]
    exposure = random.uniform(0.25, 0.5) / max(float(light.mean()), 1e-3)
    y, x = np.linspace(-1, 1, height), np.linspace(-1, 1, width)
    corner = 1 - random.uniform(0, 0.25) * (y[:, None] ** 2 + x**2) / 2
    values = light * (exposure * random.uniform(0.93, 1.07, 3)) * corner[..., None]
    spread = np.sqrt(random.uniform(1e-4, 2e-3) * np.maximum(values, 0) + random.uniform(0, 0.01) ** 2)
    values = values + spread * random.standard_normal(values.shape, dtype=np.float32)
    return (255 * values.clip(0, 1) ** (1 / 2.2) + 0.5).astype(np.uint8)


def _write(root: Path, seed: int, views: int, height: int, width: int, number: int) -> str:
    """Renders and writes one frame, unless it is there; its line of the split file."""
    scene, view = divmod(number, views)
    folder = f"scene_{scene:05d}"
    color, depth = f"{folder}/rgb_{view:05d}.jpg", f"{folder}/sync_depth_{view:05d}.png"
    focal = width / 2 / np.tan(np.radians(_VIEW / 2))
    if not ((root / color).exists() and (root / depth).exists()):
        frame = render_frame(seed, scene, view, height, width)
        with atomic_path(root / color) as path:
            Image.fromarray(frame.image).save(path, "JPEG", quality=92)
        with atomic_path(root / depth) as path:
            Image.fromarray((frame.depth * 1000 + 0.5).astype(np.uint16)).save(path, "PNG", compress_level=1)
    return f"{color} {depth} {focal:.4f}"


def write_frames(
    root: Path,
    count: int,
    *,
    seed: int = 0,
    size: tuple[int, int] = (240, 320),
    views: int = 4,
    workers: int = 0,
    on_frame: Callable[[int], None] | None = None,
) -> Path:
    """Writes frames in the layout of NYU Depth V2; run again, it goes on where it stopped.

    Args:
        root: folder for them.
        count: how many frames.
        seed: of the scenes; other seeds give other scenes.
        size: height and width in pixels.
        views: frames of one scene.
        workers: processes; as many as there are processors where 0.
        on_frame: told how many are done.

    Returns:
        The split file, one line for each frame: colour image, depth image, focal length in pixels.

    Raises:
        DataError: the folder holds other frames.
    """
    if count < 1 or views < 1 or min(size) < 16:
        raise DataError(f"{count} frames of {size[0]}x{size[1]} pixels, {views} of a scene: give more")
    record = {"seed": seed, "size": list(size), "views": views}
    known = root / "scenes.json"
    if known.exists() and json.loads(known.read_text()) != record:
        raise DataError(f"{root}: holds frames of another seed or size; use another folder")
    write_json(known, record)
    lines = []
    with ProcessPoolExecutor(workers or os.cpu_count(), get_context("spawn")) as pool:
        job = partial(_write, root, seed, views, *size)
        for line in pool.map(job, range(count), chunksize=8):
            lines.append(line)
            if on_frame:
                on_frame(len(lines))
    write_text(root / SPLIT_NAME, "".join(line + "\n" for line in lines))
    return root / SPLIT_NAME
