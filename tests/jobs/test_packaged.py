"""The packaged cascade does what its results say, and the demo runs on it."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import tokensworth as tw
from tokensworth.data.packaged import packaged_folder, packaged_images, packaged_statics, packaged_vit
from tokensworth.exits.outcome import evaluate
from tokensworth.jobs.answers import answers
from tokensworth.jobs.demo import BUDGETS, run_demo
from tokensworth.report.page import write_report


@pytest.fixture(scope="module")
def cascade():
    return tw.Cascade.from_pretrained(packaged_folder())


@pytest.fixture(scope="module")
def known(cascade):
    return answers(cascade, packaged_images("calibration"))


def test_the_sample_is_as_accurate_as_the_whole_test_split(cascade):
    results = json.loads((packaged_folder() / "results.json").read_text())
    seen = answers(cascade, packaged_images("test"))
    assert len(seen.labels) == 2000
    for here, whole in zip(seen.anytime, results["test_accuracy"], strict=True):
        assert here == pytest.approx(whole, abs=0.03)
    assert seen.anytime == sorted(seen.anytime)
    assert results["test_accuracy"][-1] >= 0.85


def test_the_packaged_vit_is_twelve_layers_that_token_methods_work_on():
    model = tw.Cascade.from_pretrained(packaged_vit())
    results = json.loads((packaged_folder() / "results.json").read_text())
    images = packaged_images("test")
    assert len(model.stages[0].vit.blocks) == 12
    plain = answers(model, images)
    assert plain.anytime[0] == pytest.approx(results["vit_test_accuracy"], abs=0.03)
    with pytest.warns(UserWarning, match="not fitted"):
        adapted = answers(tw.adapt(model, tw.ToSA(keep=0.8)), images)
    assert adapted.exit_costs[0] < plain.exit_costs[0]
    assert adapted.anytime[0] > plain.anytime[0] - 0.1


def test_calibration_and_test_images_are_different():
    a, b = (set(packaged_images(split).items) for split in ("calibration", "test"))
    assert len(a) == len(b) == 2000
    assert not a & b


def test_every_packaged_policy_fits_the_packaged_model(cascade, known):
    saved = json.loads((packaged_folder() / "frontier.json").read_text())["policies"]
    assert len(saved) > 20
    for entry in saved:
        policy = tw.Policy(**entry)
        policy.check(cascade.num_stages, known.model)
        outcome = evaluate(known, np.array(policy.thresholds))
        # The sample is a part of the images they were solved on.
        assert float(outcome.accuracy) == pytest.approx(policy.accuracy, abs=0.03)


def test_runner_equals_all_exits_plus_policy_on_real_images(cascade):
    images = packaged_images("test").select(np.arange(400))
    seen = answers(cascade, images)
    saved = json.loads((packaged_folder() / "frontier.json").read_text())["policies"]
    for entry in saved[:: max(1, len(saved) // 6)]:
        policy = tw.Policy(**entry)
        from tokensworth.exits.outcome import leaving_exit

        exits = leaving_exit(seen.scores, np.array(policy.thresholds))
        gaps = np.abs(seen.scores[:-1] - np.array(policy.thresholds)[:, None]).min(axis=0)
        results = list(tw.Runner(cascade, policy).predict(images))
        differing = [r.index for r in results if r.exit != exits[r.index] + 1]
        assert all(gaps[i] < 1e-5 for i in differing)
        same = [r for r in results if r.index not in differing]
        assert all(r.label == seen.predictions[exits[r.index]][r.index] for r in same)


def test_the_demo_keeps_its_budgets_and_writes_the_report(tmp_path):
    study = run_demo(repeats=1)
    for share, point in zip(BUDGETS, study.timed, strict=False):
        assert point.policy is not None
        assert point.policy.cost <= share * study.everything.macs
        assert point.macs == pytest.approx(point.policy.cost, rel=0.15)
        assert point.rate > 0
    assert len(study.statics) == len(packaged_statics()) == 3
    write_report(study, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Who leaves where" in page
    assert len(page) > 1_000_000
    if shutil.which("chromium"):
        assert _shown(tmp_path / "report.html", tmp_path / "profile") == study.cascade.num_stages


def _shown(page, profile) -> int:
    """Opens a report in headless Chromium; how many exits the budget slider's bar shows."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command = [
        "chromium",
        *flags,
        f"--user-data-dir={profile}",
        "--virtual-time-budget=9000",
        "--dump-dom",
        f"file://{page}",
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r'<b id="accuracy">\d+\.\d\d %</b>', dom)
    assert dom.count("main-svg") >= 3
    return len(re.findall(r">exit \d: \d+ %<", dom))


def test_the_weights_stay_small():
    weights = sum(f.stat().st_size for f in packaged_folder().rglob("*.safetensors"))
    assert weights < 12e6
