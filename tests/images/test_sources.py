import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import tokensworth as tw
from tokensworth.data.batches import FileBatches, TensorBatches
from tokensworth.data.sources import hold_out, open_images
from tokensworth.data.tensors import TensorSet, crop_and_flip, load_tensors, normalize, to_tensor


@pytest.fixture
def folder(tmp_path):
    for i in range(6):
        place = tmp_path / "set" / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 50), (i * 40, 0, 0)).save(place / f"{i}.png")
    return tmp_path / "set"


def _parquet(path, images, labels, names=("cat", "dog")):
    table = pa.table({"img": [{"bytes": b, "path": None} for b in images], "label": labels})
    info = {"info": {"features": {"label": {"names": list(names), "_type": "ClassLabel"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), path)
    return path


def test_folders_and_parquet_files_hold_the_same(folder, tmp_path):
    images = open_images(folder)
    assert images.class_names == ("cat", "dog")
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    path = _parquet(tmp_path / "a.parquet", [p.read_bytes() for p in images.items], images.labels.tolist())
    again = open_images(path)
    assert again.class_names == ("cat", "dog")
    for i in range(6):
        assert np.array_equal(np.asarray(images.read(i)), np.asarray(again.read(i)))
    assert again.digest() == open_images(path).digest() != again.select(np.arange(5)).digest()


def test_sources_that_cannot_be_used_say_why(tmp_path, folder):
    with pytest.raises(tw.DataError, match="one sub-folder of images per class"):
        open_images(tmp_path / "set" / "cat")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(tw.DataError, match="not a readable Parquet file"):
        open_images(tmp_path / "bad.parquet")
    with pytest.raises(tw.DataError, match="no such file"):
        open_images(tmp_path / "none.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(tw.DataError, match="no image column among x"):
        open_images(tmp_path / "x.parquet")
    with pytest.raises(tw.DataError, match="label 7 but only 2 class names"):
        open_images(_parquet(tmp_path / "y.parquet", [b"x"], [7]))
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(tw.DataError, match=r"neither a folder nor a \.parquet file"):
        open_images(tmp_path / "file.txt")


def test_hold_out_is_a_seeded_split():
    kept, held = hold_out(100, 20, 3)
    assert sorted([*kept, *held]) == list(range(100))
    assert len(held) == 20
    assert (held == hold_out(100, 20, 3)[1]).all()
    assert (held != hold_out(100, 20, 4)[1]).any()
    with pytest.raises(tw.DataError, match="cannot hold 100"):
        hold_out(100, 100, 0)


def test_images_are_resized_by_their_shorter_side_and_cut_in_the_middle():
    image = Image.new("RGB", (64, 32))
    image.paste((255, 255, 255), (16, 0, 48, 32))
    assert to_tensor(image, 32).float().mean() == 255
    assert to_tensor(image.resize((128, 64)), 32).shape == (3, 32, 32)


def test_crop_and_flip_only_moves_pixels():
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.int32).view(2, 3, 8, 8)
    out = crop_and_flip(images, 2, torch.Generator().manual_seed(0))
    assert out.shape == images.shape
    for a, b in zip(images, out, strict=True):
        assert set(b[0].flatten().tolist()) <= set(a[0].flatten().tolist())
    still = torch.Generator().manual_seed(1)
    for _ in range(20):
        moved = crop_and_flip(images[:1], 0, still)
        assert torch.equal(moved, images[:1]) or torch.equal(moved, images[:1].flip(3))


def test_normalize_gives_zero_mean_and_unit_deviation():
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
    flat = images.transpose(0, 1).flatten(1).double() / 255
    out = normalize(images, tuple(flat.mean(1).tolist()), tuple(flat.std(1).tolist()))
    assert out.mean().abs() < 1e-5
    assert out.std() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("kind", ["tensors", "files"])
def test_batches_depend_on_seed_epoch_and_step_alone(folder, kind):
    images = open_images(folder)

    def make(seed=0, rank=0, world=1):
        if kind == "tensors":
            data = load_tensors(images, 32)
            return TensorBatches(data, 2, (0.5,) * 3, (0.5,) * 3, seed, rank=rank, world=world)
        from timm.data.transforms_factory import create_transform

        return FileBatches(images, 2, create_transform(32, is_training=True), seed, rank=rank, world=world)

    whole = list(make().epoch(1))
    assert make().steps() == len(whole) == 3
    resumed = list(make().epoch(1, first=1))
    for (a, x), (b, y) in zip(whole[1:], resumed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(x, y)
    assert any(not torch.equal(a, b) for (a, _), (b, _) in zip(whole, make().epoch(2), strict=True))
    first, second = next(make(rank=0, world=2).epoch(0))[1], next(make(rank=1, world=2).epoch(0))[1]
    assert len(first) == len(second) == 2


def test_too_few_images_for_a_batch():
    data = TensorSet(torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, dtype=torch.long))
    with pytest.raises(tw.DataError, match="do not fill one batch of 4"):
        TensorBatches(data, 4, (0,), (1,), 0)
