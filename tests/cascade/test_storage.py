import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tokensworth as tw
from small import small_cascade


def test_a_saved_cascade_answers_the_same(tmp_path):
    model, images = small_cascade(), torch.randn(2, 3, 32, 32)
    model.save_pretrained(tmp_path)
    again = tw.Cascade.from_pretrained(tmp_path)
    assert again.config == model.config
    with torch.inference_mode():
        for a, b in zip(model(images), again(images), strict=True):
            assert torch.equal(a, b)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_half_precision_halves_the_file_and_loads_as_float32(tmp_path):
    model = small_cascade()
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", dtype=torch.float16)
    full, half = ((tmp_path / f / "model.safetensors").stat().st_size for f in "ab")
    assert half < 0.7 * full
    assert next(tw.Cascade.from_pretrained(tmp_path / "b").parameters()).dtype == torch.float32


def _spoil(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("stages.0.vit.head.bias"), "misses stages.0.vit.head.bias"),
        (lambda t: t.update(extra=torch.zeros(1)), "has unknown extra"),
        (lambda t: t.update({"stages.0.vit.head.bias": torch.zeros(9)}), r"is \[9\], expected \[4\]"),
        (lambda t: t["stages.0.vit.head.bias"].fill_(float("nan")), "not finite: stages.0.vit.head.bias"),
    ],
)
def test_weights_of_another_model_are_refused_by_key(tmp_path, change, message):
    small_cascade().save_pretrained(tmp_path)
    _spoil(tmp_path, change)
    with pytest.raises(tw.CheckpointError, match=message):
        tw.Cascade.from_pretrained(tmp_path)


def test_files_cut_short_or_missing_are_refused(tmp_path):
    small_cascade().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(tw.CheckpointError, match="not a whole safetensors file"):
        tw.Cascade.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(tw.CheckpointError, match="missing"):
        tw.Cascade.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(tw.CheckpointError, match="not a model's configuration"):
        tw.Cascade.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"backbone": "vit"}))
    with pytest.raises(tw.CheckpointError, match="not a cascade's configuration"):
        tw.Cascade.from_pretrained(tmp_path)


def test_push_to_hub_uploads_the_saved_folder(monkeypatch):
    uploaded = {}

    def upload(self, **options):
        uploaded["repo_id"] = options["repo_id"]
        uploaded["files"] = sorted(p.name for p in options["folder_path"].iterdir())

    monkeypatch.setattr(
        "huggingface_hub.hub_mixin.HfApi.create_repo", lambda *a, **k: type("R", (), {"repo_id": "me/x"})
    )
    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi.upload_folder", upload)
    small_cascade().push_to_hub("me/x")
    assert uploaded["repo_id"] == "me/x"
    assert uploaded["files"] == ["config.json", "model.safetensors"]
