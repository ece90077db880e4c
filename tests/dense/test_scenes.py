"""Generated rooms: exact depth, the same by seed, and files that load as NYU's do."""

import numpy as np
import pytest

from tokensworth.data.depth import open_depth
from tokensworth.data.scenes import make_scene, render_frame, write_frames
from tokensworth.data.scenes.render import cast
from tokensworth.data.scenes.scene import Camera, Light, Scene
from tokensworth.data.scenes.solids import Ball, Box, Room
from tokensworth.data.scenes.texture import Material
from tokensworth.errors import DataError

GREY = Material("plain", np.full((2, 3), 0.5, np.float32))


def vector(*values):
    return np.array(values, dtype=np.float32)


def empty_room(*things):
    light = Light(vector(2, 2.9, 3), vector(1, 1, 1))
    return Scene(Room(vector(4, 3, 6), (GREY,) * 6), things, (light,), 0.3)


def test_depth_is_exact():
    """A camera at (2, 1.5, 1) that looks along z: the wall at z = 6 is 5 m away, in every pixel that sees it."""
    camera = Camera(vector(2, 1.5, 1), np.eye(3, dtype=np.float32))
    depth, light = cast(empty_room(), camera, 200.0, 40, 60)
    assert np.allclose(depth, 5, atol=1e-5)
    assert np.isfinite(light).all()
    wide, _ = cast(empty_room(), camera, 10.0, 40, 60)
    rows = 10 * 1.5 / np.abs(np.arange(40) + 0.5 - 20)
    columns = 10 * 2.0 / np.abs(np.arange(60) + 0.5 - 30)
    assert np.allclose(wide, np.minimum(5, np.minimum(rows[:, None], columns)), atol=1e-4)


def test_a_ball_and_a_turned_box():
    camera = Camera(vector(2, 1.5, 1), np.eye(3, dtype=np.float32))
    ball = Ball(vector(2, 1.5, 4), 0.5, GREY)
    depth, _ = cast(empty_room(ball), camera, 200.0, 81, 81)
    y, x = (np.mgrid[:81, :81] + 0.5 - 40.5) / 200
    a, b, c = x**2 + y**2 + 1, -6, 9 - 0.25
    root = b * b - 4 * a * c
    wanted = np.where(root > 0, (-b - np.sqrt(np.maximum(root, 0))) / (2 * a), 5)
    assert np.abs(depth - wanted).max() < 1e-3
    # A box turned by 45 degrees shows an edge, nearer by half its diagonal.
    box = Box(vector(2, 1.5, 4), vector(0.5, 0.5, 0.5), GREY, np.pi / 4)
    depth, _ = cast(empty_room(box), camera, 200.0, 81, 81)
    assert depth[40, 40] == pytest.approx(3 - np.sqrt(0.5), abs=1e-3)
    assert depth[40, 0] == pytest.approx(depth[40, 80])
    assert depth[40, 20] > depth[40, 40]


def test_shadows_fall_away_from_the_light():
    below = Camera(vector(3.2, 2.8, 3), vector([1, 0, 0], [0, 0, -1], [0, 1, 0]))
    plate = Box(vector(2, 1.5, 3), vector(0.3, 0.01, 0.3), GREY)
    _, open_floor = cast(empty_room(), below, 40.0, 61, 61)
    _, shaded = cast(empty_room(plate), below, 40.0, 61, 61)
    darker = shaded.sum(-1) < 0.8 * open_floor.sum(-1)
    assert 0 < darker.sum() < 0.5 * darker.size


def test_a_frame_is_its_seed():
    first, again, other = (render_frame(seed, 2, 1, 40, 56) for seed in (5, 5, 6))
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(first.depth, again.depth)
    assert not np.array_equal(first.depth, other.depth)
    assert first.image.shape == (40, 56, 3)
    assert 0.2 < first.depth.min() < first.depth.max() < 13
    assert 20 < first.image.mean() < 235
    assert first.focal == pytest.approx(28 / np.tan(np.radians(30)))
    assert len(make_scene(5, 2).things) > 1


def test_frames_load_as_nyu_does_and_go_on(tmp_path):
    split = write_frames(tmp_path, 6, seed=3, size=(32, 48), views=4, workers=1)
    data = open_depth(f"nyu:{tmp_path}")
    assert len(data) == 6
    image, depth = data.read(5)
    frame = render_frame(3, 1, 1, 32, 48)
    assert np.abs(depth - frame.depth).max() <= 0.00051
    assert np.abs(np.asarray(image).astype(int) - frame.image).mean() < 12
    gone = data.pairs[4][0]
    kept = data.pairs[0][0].stat().st_mtime_ns
    gone.unlink()
    assert write_frames(tmp_path, 6, seed=3, size=(32, 48), views=4, workers=1) == split
    assert gone.exists()
    assert data.pairs[0][0].stat().st_mtime_ns == kept
    with pytest.raises(DataError, match="another seed"):
        write_frames(tmp_path, 6, seed=4, size=(32, 48))
