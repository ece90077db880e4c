"""`tune`: from a pretrained ViT and images to a policy that keeps its promise, resumable, for any head and backbone."""

import json

import numpy as np
import pytest
import torch

import tokensworth as tw
from commands import run_command
from timm_models import NAMES, make
from tokensworth.cascade.config import NO_REUSE, Reuse
from tokensworth.data.packaged import packaged_folder, packaged_images
from tokensworth.errors import TokensworthError
from tokensworth.exits.goals import Macs
from tokensworth.jobs.tune import TuneJob, Tuning
from tokensworth.jobs.tune.heads import Examples, fit_cosine, fit_linear
from tokensworth.tokens import storage

DATA = str(packaged_folder() / "calibration.parquet")
TWELVE = (
    "vit_medium_patch32_clip_224",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_siglip_gap_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_base_patch16_rpn_224",
    "vit_wee_patch16_reg1_gap_256",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_rope_mixed_224",
    "vit_pe_core_tiny_patch16_384",
)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vit")
    storage.save_pretrained(make("test_vit2", 3), folder)
    return str(folder)


def job(model: str, out, **options) -> TuneJob:
    small = {"grids": (2, 3, 4), "held": 80, "limit": 160, "batch_size": 32, "precision": "fp32"}
    return TuneJob(model, DATA, out, **{**small, "timed_images": 8, "repeats": 1, **options})


TRAININGS = {
    "heads": {},
    "last layers": {
        "cached_epochs": 2,
        "last_layers": 2,
        "blocks": True,
        "reuse": Reuse(relation="matching", joint_norm=False, hidden=8, layers=2),
    },
    "everything": {"epochs": 2, "fine_tune_static": True, "reuse": Reuse(joint_norm=False, hidden=8)},
}


@pytest.mark.parametrize("training", TRAININGS)
def test_the_saved_model_and_policy_do_what_the_record_says(pretrained, tmp_path, training):
    tuned = Tuning(job(pretrained, tmp_path, **TRAININGS[training])).run()
    record = json.loads((tmp_path / "tune.json").read_text())
    assert record["images"] == {"fit": 160, "calibration": 40, "test": 40}
    model, policy = tw.Cascade.from_pretrained(tmp_path / "model"), tw.Policy.load(tmp_path / "policy.json")
    results = list(tw.Runner(model, policy).predict(tuned.study.images))
    right = np.mean([r.label == y for r, y in zip(results, tuned.study.images.labels, strict=True)])
    promised = record["study"]["timed"][0]
    assert right == pytest.approx(promised["accuracy"], abs=0.026)
    assert np.mean([r.macs for r in results]) == pytest.approx(promised["macs"], rel=0.1)
    assert policy.cost <= tuned.study.calibration.exit_costs[-1]
    assert len(record["study"]["statics"]) == (1 if training == "everything" else 3)


class StopError(Exception):
    pass


@pytest.mark.parametrize("training", TRAININGS)
def test_stopped_anywhere_and_run_again_it_ends_the_same(pretrained, tmp_path, training):
    """Stopped at ever later moments until it comes through."""
    whole = Tuning(job(pretrained, tmp_path / "whole", **TRAININGS[training])).run()
    told = 0

    def tell(limit: int):
        seen = 0

        def count(*_):
            nonlocal seen, told
            seen += 1
            told = max(told, seen)
            if seen == limit:
                raise StopError

        return count

    for limit in (1, 2, 3, 5, 8, 13, 21, 34):
        try:
            again = Tuning(job(pretrained, tmp_path / "parts", **TRAININGS[training]), tell(limit)).run()
        except StopError:
            continue
        break
    else:
        again = Tuning(job(pretrained, tmp_path / "parts", **TRAININGS[training])).run()
    assert told > 5
    for one, other in zip(whole.cascade.parameters(), again.cascade.parameters(), strict=True):
        assert torch.equal(one, other)
    assert whole.policy == again.policy
    assert whole.study.curve == again.study.curve


def test_what_is_kept_is_not_computed_again_unless_it_depends_on_what_changed(pretrained, tmp_path):
    steps = []
    Tuning(job(pretrained, tmp_path)).run()
    Tuning(job(pretrained, tmp_path), lambda step, *_: steps.append(step)).run()
    assert not [s for s in steps if s.startswith("head-") or s == "grids"]
    steps.clear()
    Tuning(job(pretrained, tmp_path, budget=Macs("5M")), lambda step, *_: steps.append(step)).run()
    assert "grids" in steps
    assert not [s for s in steps if s.startswith("head-")]


@pytest.mark.parametrize("name", TWELVE)
def test_backbones_of_all_kinds(name, tmp_path):
    assert name in NAMES
    storage.save_pretrained(make(name, 1), tmp_path / "vit")
    tuned = Tuning(job(str(tmp_path / "vit"), tmp_path / "out", grids=(1, 2), limit=40, held=40)).run()
    assert len(tuned.study.statics) == 2
    loaded = tw.Cascade.from_pretrained(tmp_path / "out" / "model")
    image = torch.randn(1, 3, loaded.config.image_size, loaded.config.image_size)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(loaded(image), tuned.cascade(image), strict=True))


def test_zero_shot_heads_are_clips_own_cosines_and_nothing_is_fitted(tmp_path):
    from safetensors.torch import save_file

    clip = make("vit_medium_patch32_clip_224", 1)  # its head projects to 10 dimensions here
    storage.save_pretrained(clip, tmp_path / "clip")
    text = torch.randn(10, 10)
    np.save(tmp_path / "text.npy", text.numpy())
    save_file({"text": text}, tmp_path / "text.safetensors")
    for file in ("text.npy", "text.safetensors"):
        options = {"head": "cosine", "text": str(tmp_path / file), "grids": (1, 7), "limit": 20, "held": 20}
        tuned = Tuning(job(str(tmp_path / "clip"), tmp_path / file.replace(".", "-"), **options)).run()
        assert tuned.record["heads"] == []
        image = torch.randn(2, 3, 224, 224)
        with torch.no_grad():
            last = tuned.cascade(image)[-1]
            embedded = torch.nn.functional.normalize(clip(image), dim=1)
        torch.testing.assert_close(last, 100 * embedded @ torch.nn.functional.normalize(text, dim=1).T)
    np.save(tmp_path / "short.npy", text[:9].numpy())
    with pytest.raises(TokensworthError, match="one row for each of the 10 classes"):
        Tuning(job(str(tmp_path / "clip"), tmp_path / "x", head="cosine", text=str(tmp_path / "short.npy")))


def test_cosine_heads_are_fitted(pretrained, tmp_path):
    tuned = Tuning(job(pretrained, tmp_path, head="cosine")).run()
    assert {fit["strength"] for fit in tuned.record["heads"]} <= {8.0, 16.0, 32.0, 64.0}


@pytest.mark.parametrize("fit", [fit_linear, fit_cosine])
def test_heads_separate_what_can_be_separated_and_are_held_back_where_nothing_can(fit):
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 16, generator=random)
    labels = torch.arange(400) % 4

    def examples(noise: float) -> Examples:
        return Examples(centres[labels] + noise * torch.randn(400, 16, generator=random), labels)

    easy = fit(examples(0.3), examples(0.3), 4)
    assert easy.accuracy > 0.98
    hopeless = fit(examples(30.0), examples(30.0), 4)
    assert hopeless.strength == (0.1 if fit is fit_linear else 8.0)


def test_linear_heads_are_an_optimum_of_their_penalized_loss():
    """Against the gradient of an independent computation on standardized features."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(300, 5)) * [1, 2, 3, 4, 5] + 1, random.integers(0, 3, 300)
    seen = Examples(torch.tensor(x).float(), torch.tensor(y))
    head = fit_linear(seen, seen, 3)
    mean, deviation = x.mean(0), x.std(0, ddof=1)
    weight = head.weight.double().numpy() * deviation
    logits = x @ head.weight.double().numpy().T + head.bias.double().numpy()
    chance = np.exp(logits - logits.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    slope = (chance - np.eye(3)[y]).T @ ((x - mean) / deviation) / len(y) + head.strength * weight
    assert np.abs(slope).max() < 1e-4


def test_the_command_writes_everything_and_says_what_is_wrong(pretrained, tmp_path):
    words = ["tune", "--model", pretrained, "--data", DATA, "--grids", "2,4", "--held-out", "40", "--limit", "40"]
    words += ["--timed-images", "8", "--repeats", "1", "--out", tmp_path / "out", "--test", DATA, "--json"]
    found = run_command(*words)
    assert found["images"]["test"] == len(packaged_images("calibration"))
    for name in ("model/model.safetensors", "policy.json", "calibration.safetensors", "report.html", "tune.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grids": (4, 2)}, "candidates that grow"),
        ({"text": "x.npy"}, "needs --head cosine"),
        ({"cached_epochs": 1}, "--last-layers"),
        ({"model": "vit_nowhere"}, "neither a folder nor a timm model"),
        ({"model": "test_vit", "weights": "nothing.safetensors"}, "nothing.safetensors is missing"),
        ({"held": 1}, "calibrate on"),
        ({"budget": Macs("1K")}, "below the first exit"),
    ],
)
def test_bad_jobs_give_one_line(pretrained, tmp_path, options, message):
    model = options.pop("model", pretrained)
    with pytest.raises(TokensworthError, match=message) as found:
        Tuning(job(model, tmp_path, **options)).run()
    assert "\n" not in str(found.value)


def test_a_folder_of_photos_is_held_at_the_largest_grids_size(pretrained, tmp_path):
    random = np.random.default_rng(0)
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            pixels = random.integers(0, 255, (90, 120, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    options = {"grids": (2, 4), "held": 8, "limit": 0, "reuse": NO_REUSE}
    small = TuneJob(pretrained, str(tmp_path / "photos"), tmp_path / "out", timed_images=2, repeats=1, **options)
    tuned = Tuning(small).run()
    assert tuned.cascade.config.image_size == 4 * 16
    assert tuned.cascade.config.class_names == ("cat", "dog")
