"""From generated rooms to a trained, adapted, compared depth model, by commands."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

from commands import run_command
from tokensworth.cli import app
from tokensworth.data.depth import open_depth
from tokensworth.dense import mean_errors
from tokensworth.jobs.depth import evaluate_depth
from tokensworth.jobs.models import open_model
from tokensworth.tokens.storage import save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    root = tmp_path_factory.mktemp("rooms")
    for seed, count in ((0, 16), (1, 8)):
        run_command("scenes", "--out", root / str(seed), "--count", count, "--size", "48,64", "--seed", seed)
    return root


@pytest.fixture(scope="module")
def trained(rooms):
    torch.manual_seed(0)
    small = {"depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 0, "img_size": 48}
    save_pretrained(timm.create_model("vit_tiny_patch16_224", **small), rooms / "encoder", model_args=small)
    words = ["train", "--task", "depth", "--encoder", rooms / "encoder", "--data", f"nyu:{rooms / '0'}"]
    words += ["--validate", f"nyu:{rooms / '1'}", "--crop", "48,48", "--widths", "32,32,32,32", "--batch-size", 8]
    words += ["--epochs", 2, "--warmup", 0.5, "--layer-decay", 0.8, "--precision", "fp32", "--out", rooms / "dense"]
    found = run_command(*words, "--json")
    assert [set(entry) for entry in found["history"]] == [{"epoch", "loss", "lr", "validation"}] * 2
    assert run_command(*words, "--json")["history"] == found["history"]  # nothing is done twice
    return rooms / "dense"


def test_a_method_is_applied_fitted_tuned_and_compared(rooms, trained):
    thin, tuned = rooms / "thin", rooms / "tuned"
    run_command("adapt", "--model", trained, "--out", thin, "--set", "layers=2,4", "--set", "keep=0.5")
    data = f"nyu:{rooms / '0'}"
    run_command("fit", "--model", thin, "--data", data, "--out", thin, "--epochs", 1, "--batch-size", 8)
    words = ["--teacher", trained, "--teach", 0.5, "--crop", "48,48", "--batch-size", 8, "--epochs", 1]
    run_command("train", "--task", "depth", "--start", thin, "--data", data, *words, "--out", tuned)
    words = ["compare", "--task", "depth", "--model", trained, "--data", f"nyu:{rooms / '1'}", "--calibration", data]
    words += ["--trained", tuned, "--method", "tome:r=2", "--method", "evit:keep=0.5;layers=2", "--batch-size", 4]
    words += ["--repeats", 1, "--max-drop", 100, "--out", rooms / "compared", "--json"]
    found = run_command(*words)
    assert [r["curve"] for r in found["rows"]] == ["plain", "tome", "tosa, tuned"]
    assert found["left_out"] == ["evit loses tokens, which depth needs"]
    plain = found["rows"][0]
    assert plain["abs_rel_change"] == 0
    assert all(r["keeps_grid"] for r in found["rows"])
    assert found["rows"][2]["macs"] < plain["macs"]
    model = open_model(str(trained), "cpu")
    errors = mean_errors(evaluate_depth(model, open_depth(f"nyu:{rooms / '1'}"), mirrored=False))
    assert plain["abs_rel"] == pytest.approx(errors.abs_rel, rel=1e-5)
    assert json.loads((rooms / "compared" / "compare.json").read_text())["rows"] == found["rows"]


def test_pictures_and_bad_files(rooms, trained, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (97, 131, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(photos / "one.png")
    (photos / "bad.jpg").write_bytes(b"nothing")
    result = CliRunner().invoke(app, ["depth", str(photos), "--model", str(trained), "--out", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert [line for line in result.stderr.splitlines() if "bad.jpg" in line]
    found = json.loads(result.stdout)
    (picture,) = found["pictures"]
    steps = np.asarray(Image.open(picture["depth"]))
    assert steps.shape == (97, 131)
    assert steps.dtype == np.uint16
    assert steps.max() * found["unit"] == pytest.approx(picture["farthest"], abs=1e-3)
    assert Image.open(picture["coloured"]).size == (131, 97)


def test_evaluation_goes_on_past_a_bad_file(rooms, trained, tmp_path):
    lines = (rooms / "1" / "files.txt").read_text() + "gone.jpg gone.png 1\n"
    (tmp_path / "split.txt").write_text(lines)
    words = ["evaluate", "--model", trained, "--data", f"nyu:{tmp_path / 'split.txt'}", "--root", rooms / "1", "--json"]
    result = CliRunner().invoke(app, [str(w) for w in words])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["images"] == 8
    assert len([line for line in result.stderr.splitlines() if "gone.jpg" in line]) == 1


@pytest.mark.parametrize("words", [["--task", "pose"], ["--task", "depth"], ["--task", "depth", "--encoder", "x"]])
def test_wrong_words(rooms, tmp_path, words):
    data = f"nyu:{rooms / '1'}"
    result = CliRunner().invoke(app, ["train", *words, "--data", data, "--out", str(tmp_path)])
    assert result.exit_code == 1
