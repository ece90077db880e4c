"""`export` and `check`: the folder is whole, its graphs agree with the model, and what was tampered with is named."""

import json

import numpy as np
import pytest
import torch

import tokensworth as tw
from commands import run_command
from small import small_cascade
from tokensworth.data.packaged import packaged_images
from tokensworth.data.tensors import normalize
from tokensworth.errors import CheckpointError, PolicyError
from tokensworth.exits.policy import Policy
from tokensworth.jobs.exporting import agreement, check_folder, run_export
from tokensworth.run.exported import Exported, write_manifest
from tokensworth.run.results import Result

pytest.importorskip("onnxscript")
pytest.importorskip("openvino")
IMAGES = packaged_images("test").select(np.arange(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    model = small_cascade((3, 5), classes=10)
    policy = tw.solve(tw.calibrate(model, [(torch.randn(40, 3, 32, 32), torch.arange(40) % 10)]), tw.Macs("2M"))
    run_export(model, policy, IMAGES, out, int8=True, repeats=1)
    return out


def test_the_folder_is_whole_and_agrees(folder):
    measured = json.loads((folder / "measured.json").read_text())
    rows = {row["engine"]: row for row in measured["rows"]}
    assert {"torch", "onnx", "openvino", "onnx int8", "openvino int8"} <= rows.keys()
    for name in ("onnx", "openvino"):
        assert rows[name]["same"] == 1
        assert rows[name]["gap"] < 1e-4
    assert rows["onnx int8"]["same"] > 0.5
    card = (folder / "README.md").read_text()
    assert all(name in card for name in rows)
    assert check_folder(folder)["good"]


def test_preprocessing_is_said_well_enough_to_do_it_elsewhere(folder):
    """From an image file to the graph's input with Pillow and NumPy alone."""
    said = json.loads((folder / "preprocessing.json").read_text())
    image = np.asarray(IMAGES.read(0)).astype(np.float32) * said["scale"]
    mine = ((image - said["mean"]) / said["std"]).transpose(2, 0, 1)[None].astype(np.float32)
    exported = Exported.open(folder)
    config = exported.cascade.config
    np.testing.assert_allclose(mine, normalize(exported.samples()[:1], config.mean, config.std), atol=1e-6)


def test_the_graphs_run_without_this_package(folder):
    import onnxruntime

    exported = Exported.open(folder)
    images = torch.randn(3, 3, 32, 32)
    given = {"images": images.numpy()}
    for index, path in enumerate(exported.graphs()):
        session = onnxruntime.InferenceSession(str(path))
        names = [port.name for port in session.get_inputs()]
        found = dict(
            zip([p.name for p in session.get_outputs()], session.run(None, {n: given[n] for n in names}), strict=True)
        )
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(found["logits"]), exported.cascade(images)[index], atol=1e-4, rtol=1e-4
            )
        given |= {name.removeprefix("next_"): array for name, array in found.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "graphs" / "stage_2.onnx").write_bytes(b"x"), "graphs/stage_2.onnx"),
        (lambda f: (f / "policy.json").unlink(), "policy.json"),
        (lambda f: (f / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda f: (f / "manifest.json").write_text('{"../../etc/passwd": "0"}'), "passwd"),
    ],
)
def test_what_was_changed_or_is_missing_is_named(folder, tmp_path, change, message):
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    change(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=message):
        Exported.open(tmp_path / "copy")


def test_int8_graphs_that_were_not_exported_are_asked_for(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "graphs_int8")
    write_manifest(tmp_path / "copy")
    with pytest.raises(CheckpointError, match="--int8"):
        Exported.open(tmp_path / "copy").runner("onnx", int8=True)


def test_a_policy_of_another_model_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(PolicyError, match="was solved for"):
        run_export(small_cascade((3, 5)), Policy((0.5,), model="0" * 16), IMAGES, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_disagreement_is_counted_and_told_from_rounding():
    policy = Policy((0.8,))
    plain = [Result(i, "", 1, "", sure, exit_) for i, (sure, exit_) in enumerate([(0.9, 1), (0.80001, 1), (0.5, 2)])]
    other = [Result(i, "", 1, "", sure, exit_) for i, (sure, exit_) in enumerate([(0.9, 1), (0.7, 2), (0.3, 1)])]
    found = agreement(plain, other, policy)
    assert found.same == pytest.approx(1 / 3)
    assert [e["image"] for e in found.exceptions] == [1, 2]
    assert found.near == 1


def test_commands(folder):
    found = run_command("check", folder, "--json")
    assert found["good"]
    assert found["images"] == 40


def test_predict_runs_on_any_engine(folder, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for i in range(6):
        (pictures / f"{i}.png").write_bytes(IMAGES.items[i])
    answers = []
    for backend in ("torch", "onnx", "openvino"):
        out = tmp_path / f"{backend}.jsonl"
        words = ("--model", folder, "--policy", folder / "policy.json", "--backend", backend, "--out", out, "--json")
        run_command("predict", pictures, *words)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        answers.append([(row["name"], row["label"], row["exit"]) for row in rows])
    assert answers[0] == answers[1] == answers[2]
