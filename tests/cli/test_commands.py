"""The command line from end to end on a small model, and its answers to bad input."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import tokensworth as tw
from commands import run_command
from small import small_cascade
from tokensworth.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A saved model, a static one, and a labelled folder."""
    root = tmp_path_factory.mktemp("cli")
    model = small_cascade()
    model.save_pretrained(root / "model")
    tw.Cascade(model.config.static(5)).save_pretrained(root / "static")
    random = np.random.default_rng(0)
    for label in range(4):
        (root / "set" / f"class{label}").mkdir(parents=True)
        for i in range(12):
            array = random.integers(0, 256, (36, 40, 3), dtype=np.uint8)
            Image.fromarray(array).save(root / "set" / f"class{label}" / f"{i}.png")
    return root


def _fail(capsys, *words) -> str:
    import sys

    argv, sys.argv = sys.argv, ["tokensworth", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        sys.argv = argv
    assert stop.value.code not in (0, None)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("tokensworth: ")
    return line


@pytest.fixture(scope="module")
def solved(place):
    out = place / "cal.safetensors"
    run_command("calibrate", "--model", place / "model", "--data", place / "set", "--out", out, "--json")
    run_command("solve", "--calibration", out, "--budget", "5M", "--out", place / "policy.json", "--json")
    return place


def test_train_on_a_folder_of_larger_images(place, tmp_path):
    words = ("--image-size", 72, "--grids", "3,6", "--dim", 16, "--depth", 1, "--heads", 2, "--classes", 4)
    run = ("--epochs", 1, "--batch-size", 8, "--hold-out", 8, "--weighting", "--class-token", "--distill", 0.5)
    value = run_command("train", "--data", place / "set", "--out", tmp_path / "t", *words, *run, "--json")
    assert len(value["history"][0]["held_out_accuracy"]) == 2
    model = tw.Cascade.from_pretrained(tmp_path / "t")
    assert model.config.class_names == ("class0", "class1", "class2", "class3")
    assert [s.vit.patch_embed.proj.kernel_size for s in model.stages] == [(12, 12), (12, 12)]
    assert [getattr(s.vit.patch_embed.resize, "size", None) for s in model.stages] == [(36, 36), None]


def test_calibrate_solve_and_eval(solved):
    value = run_command(
        "eval", "--model", solved / "model", "--data", solved / "set", "--policy", solved / "policy.json", "--json"
    )
    policy = tw.Policy.load(solved / "policy.json")
    assert [p["name"] for p in value["points"]][:3] == ["exit 1 alone", "exit 2 alone", "exit 3 alone"]
    assert value["points"][3]["accuracy"] == pytest.approx(policy.accuracy)
    assert value["points"][3]["macs"] == pytest.approx(policy.cost)
    assert policy.cost <= 5e6
    text = run_command("eval", "--model", solved / "model", "--data", solved / "set")["text"]
    assert "exit 3 alone" in text


@pytest.mark.parametrize("solver", ["exact", "walk"])
def test_solve_for_a_target_and_the_frontier(solved, solver, tmp_path):
    calibration = solved / "cal.safetensors"
    known = tw.Calibration.load(calibration)
    target = min(known.anytime)
    words = ("--target", target, "--solver", solver, "--out", tmp_path / "p.json", "--json")
    assert run_command("solve", "--calibration", calibration, *words)["accuracy"] >= target
    line = run_command("solve", "--calibration", calibration, "--frontier", "--out", tmp_path / "f.json", "--json")
    assert json.loads((tmp_path / "f.json").read_text())["policies"] == line["policies"]


def test_times_as_costs(solved, tmp_path):
    words = ("--time", "--batch-size", 8, "--out", tmp_path / "c.safetensors", "--json")
    value = run_command("calibrate", "--model", solved / "model", "--data", solved / "set", *words)
    assert value["unit"] == "ms"
    assert value["exit_costs"] == sorted(value["exit_costs"])
    cost = value["exit_costs"][-1]
    run_command(
        "solve", "--calibration", tmp_path / "c.safetensors", "--millis", cost, "--out", tmp_path / "p.json", "--json"
    )
    assert tw.Policy.load(tmp_path / "p.json").context["batch"] == 8


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_predict_skips_bad_files_and_resumes(solved, suffix, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for i, path in enumerate(sorted((solved / "set").rglob("*.png"))[:9]):
        (folder / f"{i}.png").write_bytes(path.read_bytes())
    (folder / "bad.jpg").write_bytes(b"nope")
    (folder / "notes.txt").write_text("not an image, not tried")
    out = tmp_path / f"labels.{suffix}"
    words = ("predict", folder, "--model", solved / "model", "--policy", solved / "policy.json", "--out", out, "--json")
    first = run_command(*words)
    assert (first["done"], first["failed"], first["resumed"]) == (9, 1, 0)
    rows = (
        pq.read_table(out).to_pylist()
        if suffix == "parquet"
        else [json.loads(line) for line in out.read_text().splitlines()]
    )
    assert len(rows) == 10
    assert sum(bool(r["error"]) for r in rows) == 1
    assert all(r["exit"] in (1, 2, 3) and r["macs"] > 0 for r in rows if not r["error"])
    if suffix == "jsonl":
        # Stopped in the middle: half a line at the end.
        lines = out.read_text().splitlines()
        good = [line for line in lines if not json.loads(line)["error"]]
        out.write_text("\n".join(good[:4]) + "\n" + good[4][:20])
        second = run_command(*words)
        assert (second["done"], second["failed"], second["resumed"]) == (5, 1, 4)
        again = {r["name"]: r for r in map(json.loads, out.read_text().splitlines())}
        assert again == {r["name"]: r for r in rows}


def test_anytime_prediction_stops_at_an_exit(solved, tmp_path):
    value = run_command(
        "predict", solved / "set", "--model", solved / "model", "--max-exit", 2, "--out", tmp_path / "a.jsonl", "--json"
    )
    assert value["exits"] == [0, 48, 0]


def test_bench_measures_every_side(solved):
    value = run_command(
        "bench", "--model", solved / "model", "--data", solved / "set", "--policy", solved / "policy.json",
        "--static", solved / "static", "--repeats", 1, "--batch-size", 16, "--json",
    )  # fmt: skip
    assert set(value["sides"]) == {"cascade", "never leaves early", "static 5x5"}
    assert all(side["rate"] > 0 and side["p99"] >= side["p50"] > 0 for side in value["sides"].values())
    assert value["sides"]["never leaves early"]["peak_bytes"] > value["sides"]["static 5x5"]["peak_bytes"]


def test_report_is_one_page_that_needs_nothing_else(solved, tmp_path):
    out = tmp_path / "report.html"
    value = run_command(
        "report", "--model", solved / "model", "--calibration", solved / "cal.safetensors", "--data", solved / "set",
        "--static", solved / "static", "--timed", 2, "--repeats", 1, "--out", out, "--json",
    )  # fmt: skip
    html = out.read_text()
    assert value["test_images"] == 48
    assert "Choose a budget" in html
    assert "data:image/png;base64," in html
    assert "<script src=" not in html
    assert "<link" not in html


def test_help_shows_an_example_for_every_command():
    for command in ("train", "calibrate", "solve", "eval", "predict", "bench", "report", "demo"):
        assert "Example:" in run_command(command, "--help")["text"]


def test_bad_input_gets_one_line(solved, tmp_path, capsys):
    model, cal, data = solved / "model", solved / "cal.safetensors", solved / "set"
    out = ("--out", tmp_path / "x.json")
    assert "below the first exit's cost" in _fail(capsys, "solve", "--calibration", cal, "--budget", "10", *out)
    assert "one goal" in _fail(capsys, "solve", "--calibration", cal, *out)
    assert "not a number of MACs" in _fail(capsys, "solve", "--calibration", cal, "--budget", "lots", *out)
    assert "not a calibration" in _fail(capsys, "solve", "--calibration", data, "--budget", "1M", *out)
    assert "neither a folder nor on the Hub" in _fail(capsys, "eval", "--model", "no/such", "--data", data)
    missing = _fail(capsys, "predict", tmp_path / "none", "--model", model, "--out", tmp_path / "o.jsonl")
    assert "no such file or folder" in missing
    (tmp_path / "empty").mkdir()
    assert "no images" in _fail(capsys, "predict", tmp_path / "empty", "--model", model, "--out", tmp_path / "o.jsonl")
    assert ".jsonl or .parquet" in _fail(capsys, "predict", data, "--model", model, "--out", tmp_path / "o.csv")
    train = ("train", "--data", data, "--classes", "4", "--out", tmp_path / "t")
    assert "no 9x9 grid" in _fail(capsys, *train, "--stem", "conv", "--grids", "3,9")
    assert "not a list of whole numbers" in _fail(capsys, *train, "--grids", "a,b")
    assert "labels run from 0 to 3" in _fail(capsys, "train", "--data", data, "--classes", "2", *out, "--stem", "conv")
    other = tmp_path / "other"
    small_cascade(seed=3).save_pretrained(other)
    words = ("--data", data, "--policy", solved / "policy.json")
    assert "solve it again" in _fail(capsys, "eval", "--model", other, *words)
    tensors = load_file(other / "model.safetensors")
    tensors["stages.0.vit.head.bias"].fill_(float("nan"))
    save_file(tensors, other / "model.safetensors")
    assert "not finite" in _fail(capsys, "eval", "--model", other, *words)
    assert not (tmp_path / "x.json").exists()
