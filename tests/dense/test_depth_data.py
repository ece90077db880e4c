"""NYU and KITTI layouts made here: metres, crops, augmentations, and bad files."""

import numpy as np
import pytest
import torch
from PIL import Image

from tokensworth.data.crops import eigen_crop, garg_crop, kb_crop
from tokensworth.data.depth import LAYOUTS, open_depth
from tokensworth.data.depth_batches import DepthBatches, augment
from tokensworth.errors import DataError

STANDARD = ((0.5,) * 3, (0.5,) * 3)


def write_pair(root, color, depth, size, steps):
    """A colour image whose red tells the column and green the row, and a 16-bit depth image."""
    height, width = size
    for name in (color, depth):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width) % 251, (np.arange(height) % 251)[:, None]
    Image.fromarray(pixels).save(root / color)
    Image.fromarray(np.broadcast_to(steps, size).astype(np.uint16)).save(root / depth)


@pytest.fixture
def nyu(tmp_path):
    steps = np.arange(480)[:, None] * 10 + np.arange(640)[None]
    write_pair(tmp_path, "bathroom/rgb_00045.png", "bathroom/sync_depth_00045.png", (480, 640), steps)
    write_pair(tmp_path, "office/rgb_00001.png", "office/sync_depth_00001.png", (480, 640), 2000)
    lines = "/bathroom/rgb_00045.png /bathroom/sync_depth_00045.png 518.8579\n\noffice/rgb_00001.png "
    (tmp_path / "test.txt").write_text(lines + "office/sync_depth_00001.png 518.8579\n")
    return tmp_path


@pytest.fixture
def kitti(tmp_path):
    color = "2011_09_26/2011_09_26_drive_0002_sync/image_02/data/0000000069.png"
    depth = "2011_09_26_drive_0002_sync/proj_depth/groundtruth/image_02/0000000069.png"
    steps = np.zeros((375, 1242))
    steps[200:210, 300:900] = 256 * 12.5
    write_pair(tmp_path / "raw", color, "unused.png", (375, 1242), 0)
    write_pair(tmp_path / "depth", "unused.png", depth, (375, 1242), steps)
    (tmp_path / "eigen.txt").write_text(f"{color} {depth} 721.5377\n{color} None 721.5377\n")
    return tmp_path


def test_nyu_is_read_in_metres(nyu):
    data = open_depth(f"nyu:{nyu / 'test.txt'}")
    assert len(data) == 2
    assert not data.problems
    image, depth = data.read(0)
    assert depth.shape == (480, 640)
    assert image.size == (640, 480)
    assert depth[100, 7] == pytest.approx(1.007)
    assert depth.max() == pytest.approx(5.429)
    assert data.layout.max_depth == 10


def test_kitti_is_read_in_metres_and_cut_to_its_benchmark(kitti):
    data = open_depth(f"kitti:{kitti / 'eigen.txt'}", kitti / "raw", kitti / "depth")
    assert len(data) == 1
    image, depth = data.read(0)
    assert depth.shape == (352, 1216)
    assert image.size == (1216, 352)
    known = np.argwhere(depth > 0)
    # 375 - 352 = 23 rows and (1242 - 1216) / 2 = 13 columns less.
    assert known.min(0).tolist() == [200 - 23, 300 - 13]
    assert known.max(0).tolist() == [209 - 23, 899 - 13]
    assert depth.max() == pytest.approx(12.5)
    assert image.getpixel((0, 0)) == (13, 23, 0)


def test_crops_to_the_pixel():
    assert eigen_crop(480, 640) == (slice(45, 471), slice(41, 601))
    assert eigen_crop(154, 154) == (slice(0, 154), slice(0, 154))
    assert kb_crop(375, 1242) == (slice(23, 375), slice(13, 1229))
    assert garg_crop(352, 1216) == (slice(143, 349), slice(43, 1172))
    with pytest.raises(DataError, match="352x1216"):
        kb_crop(300, 1242)


def test_augmentation_keeps_image_and_depth_together():
    """Depth here is a function of the colour, so that they tell whether they were moved alike."""
    height, width = 60, 80
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width) * 3, (np.arange(height) * 4)[:, None]
    depth = (np.arange(width) * 0.01 + np.arange(height)[:, None] + 0.2).astype(np.float32) / 8
    for seed in range(20):
        color, found = augment(Image.fromarray(pixels), depth, LAYOUTS["nyu"], (40, 50), np.random.default_rng(seed))
        assert color.shape == (40, 50, 3)
        assert found.shape == (40, 50)
        known = found > 0
        assert known.mean() > 0.8
        assert found[known].min() > 0.1
        rows = np.corrcoef(color[..., 1][known].astype(float), found[known])[0, 1]
        assert rows > 0.99


def test_batches_depend_on_seed_and_step_alone(nyu):
    def make(seed):
        return DepthBatches(open_depth(f"nyu:{nyu / 'test.txt'}"), 1, (416, 544), *STANDARD, seed)

    first, again = list(make(3).epoch(0)), list(make(3).epoch(0, 1))
    assert len(first) == 2
    assert torch.equal(first[1][0], again[0][0])
    assert torch.equal(first[1][1], again[0][1])
    assert first[0][0].shape == (1, 3, 416, 544)
    assert first[0][1].shape == (1, 1, 416, 544)
    assert not torch.equal(first[1][0], list(make(4).epoch(0))[1][0])


def test_training_leaves_out_what_is_too_near_or_too_far():
    depth = np.array([[0.05, 0.2, 9.9, 10.5]] * 4, np.float32)
    image = Image.new("RGB", (4, 4))
    layout = LAYOUTS["kitti"]
    _, found = augment(image, depth * 8, layout, (4, 4), np.random.default_rng(0))
    assert set(np.unique(found)) <= {np.float32(0), np.float32(0.2 * 8), np.float32(9.9 * 8)}


def test_bad_files_give_one_line_each(nyu):
    (nyu / "office/sync_depth_00001.png").write_bytes(b"no image")
    Image.new("RGB", (640, 480)).save(nyu / "eight.png")
    Image.fromarray(np.zeros((48, 64), np.uint16)).save(nyu / "small.png")
    good = "bathroom/rgb_00045.png bathroom/sync_depth_00045.png 518.8579"
    lines = [good, "office/rgb_00001.png office/sync_depth_00001.png 1", "gone.png gone_depth.png 1", "lonely.png"]
    lines += ["office/rgb_00001.png eight.png 1", "office/rgb_00001.png small.png 1"]
    (nyu / "bad.txt").write_text("\n".join(lines))
    data = open_depth(f"nyu:{nyu / 'bad.txt'}")
    assert len(data) == 1
    assert len(data.problems) == 5
    for line, words in zip(
        data.problems,
        ("not an image", "no such file", "expected a colour image", "one channel of 16 bits", "for an image of"),
        strict=True,
    ):
        assert words in line
        assert "\n" not in line


def test_a_damaged_depth_file_is_named(nyu):
    path = nyu / "office/sync_depth_00001.png"
    path.write_bytes(path.read_bytes()[:-600])
    data = open_depth(f"nyu:{nyu / 'test.txt'}")
    with pytest.raises(DataError, match=r"sync_depth_00001.png: damaged"):
        data.read(1)


@pytest.mark.parametrize("source", ["test.txt", "other:x", "nyu:", "nyu:missing.txt"])
def test_sources_that_are_none(source):
    with pytest.raises(DataError):
        open_depth(source)
