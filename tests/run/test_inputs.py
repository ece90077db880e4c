import numpy as np
import pytest
import torch
from PIL import Image

import tokensworth as tw
from small import small_cascade
from tokensworth.data.sources import open_images


@pytest.fixture(scope="module")
def runner():
    return tw.Runner(small_cascade(), tw.Policy((0.5, 0.5)), batch_size=4)


def _photo(seed=0, size=(40, 36)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8))


def test_every_kind_of_source_gives_the_same_answers(runner, tmp_path):
    photos = [_photo(i) for i in range(5)]
    for i, photo in enumerate(photos):
        folder = tmp_path / "set" / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        photo.save(folder / f"{i}.png")
    paths = sorted((tmp_path / "set").rglob("*.png"))
    order = [int(p.stem) for p in paths]
    wanted = [r.label for r in runner.predict([photos[i] for i in order])]
    assert [r.label for r in runner.predict(tmp_path / "set")] == wanted
    assert [r.label for r in runner.predict(str(tmp_path / "set"))] == wanted
    assert [r.label for r in runner.predict(paths)] == wanted
    assert [r.label for r in runner.predict([p.read_bytes() for p in paths])] == wanted
    assert [r.label for r in runner.predict(open_images(tmp_path / "set"))] == wanted
    assert [r.label for r in runner.predict(paths[0])] == wanted[:1]
    assert [r.name for r in runner.predict(paths)] == [str(p) for p in paths]


def test_arrays_of_either_layout(runner):
    images = np.random.default_rng(0).integers(0, 255, (6, 32, 32, 3), dtype=np.uint8)
    a = [r.label for r in runner.predict(images)]
    b = [r.label for r in runner.predict(torch.from_numpy(images).permute(0, 3, 1, 2))]
    assert a == b
    with pytest.raises(tw.DataError, match=r"expected \(N, 3, 32, 32\)"):
        list(runner.predict(np.zeros((2, 3, 16, 16), dtype=np.uint8)))


def test_bad_images_become_error_results_and_the_rest_goes_on(runner, tmp_path):
    good, bad, empty = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.jpg"
    _photo().save(good)
    bad.write_text("not an image")
    empty.write_bytes(b"")
    results = list(runner.predict([good, bad, empty, tmp_path / "none.png", good]))
    assert [bool(r.error) for r in results] == [False, True, True, True, False]
    assert results[0].label == results[4].label
    assert "not an image in a known format" in results[1].error
    assert "empty file" in results[2].error
    assert "no such file" in results[3].error
    assert results[1].exit == 0


def test_empty_and_missing_folders_are_refused(runner, tmp_path):
    with pytest.raises(tw.DataError, match="no images"):
        list(runner.predict(tmp_path))
    with pytest.raises(tw.DataError, match="cannot read an image from int"):
        list(runner.predict([1]))
