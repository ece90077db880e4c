"""The runner's answers equal the all-exits model plus the policy."""

import numpy as np
import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokensworth as tw
from small import randomize, small_cascade
from tokensworth.exits.outcome import leaving_exit
from tokensworth.exits.solve import make_policy
from tokensworth.run.runner import _LAG

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")
COUNT = 100
ROUNDING = 1e-5


@pytest.fixture(scope="module", params=["plain", "layer", "per_head", "mass", "shared"])
def setting(request):
    """A cascade, plain, with ToSA in every stage, or of shared weights."""
    torch.manual_seed(1)
    model = small_cascade()
    if request.param == "shared":
        reuse = tw.Reuse(joint_norm=False, hidden=8)
        backbone = timm.create_model("test_vit2")
        model = tw.Cascade.from_timm(backbone, (2, 3, 4), 4, share=True, reuse=reuse, image_size=32)
        randomize(model, 0.1)
    elif request.param != "plain":
        scope, mass = ("layer", 0.7) if request.param == "mass" else (request.param, 0.0)
        tw.adapt(model, tw.ToSA(layers=(2,), keep=0.5, scope=scope, mass=mass))
    images = torch.randn(COUNT, 3, 32, 32)
    with torch.no_grad():
        # The last exit is right more often than chance, as of a trained model.
        last = model(images)[-1].argmax(1)
    labels = torch.where(torch.rand(COUNT) < 0.6, last, torch.randint(0, 4, (COUNT,)))
    calibrations = {
        score: tw.calibrate(model, [(images, labels)], score=score)
        for score in ("confidence", "entropy", "margin", "random", "learned")
    }
    return model, images, calibrations


def _check(model, images, known, policy, **options):
    runner = tw.Runner(model, policy, **options)
    results = list(runner.predict(images))
    exits = leaving_exit(known.scores, np.array(policy.thresholds))
    gaps = np.abs(known.scores[:-1] - np.array(policy.thresholds)[:, None]).min(axis=0)
    assert [r.index for r in results] == list(range(len(images)))
    for i, result in enumerate(results):
        if gaps[i] < ROUNDING:
            continue  # within rounding of a threshold
        assert result.exit == exits[i] + 1
        assert result.label == known.predictions[exits[i]][i]
        assert result.confidence == pytest.approx(known.confidences[exits[i]][i], abs=1e-4)
        assert result.macs == known.exit_costs[exits[i]]
    labels, confidences, left = runner.run(images)
    sure = gaps >= ROUNDING
    assert (left.numpy() == exits)[sure].all()
    assert (labels.numpy() == known.predictions[exits, np.arange(len(exits))])[sure].all()
    assert np.allclose(confidences.numpy()[sure], known.confidences[exits, np.arange(len(exits))][sure], atol=1e-4)


def test_every_policy_on_the_frontier(setting):
    model, images, calibrations = setting
    policies = tw.frontier(calibrations["confidence"]).policies
    assert len(policies) > 5
    for policy in policies:
        _check(model, images, calibrations["confidence"], policy, batch_size=32)


@given(
    st.tuples(st.floats(-0.1, 1.1), st.floats(-0.1, 1.1)),
    st.sampled_from(["confidence", "entropy", "margin", "random", "learned"]),
    st.integers(1, 70),
    st.booleans(),
    st.integers(1, COUNT),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_policy_score_batch_and_packing(setting, thresholds, score, batch, pack, count):
    model, images, calibrations = setting
    known = calibrations[score].select(np.arange(count))
    policy = tw.Policy(thresholds, score=score, rule=known.rule)
    _check(model, images[:count], known, policy, batch_size=batch, pack=pack)


def test_later_stages_see_survivors_only_and_packed(setting, monkeypatch):
    model, images, calibrations = setting
    known = calibrations["confidence"]
    threshold = float(np.median(known.scores[0]))
    sizes: dict[int, list[int]] = {0: [], 1: [], 2: []}
    run_stage = model.run_stage
    monkeypatch.setattr(
        model, "run_stage", lambda i, x, state: sizes[i].append(len(x)) or run_stage(i, x, state), raising=False
    )
    runner = tw.Runner(model, tw.Policy((threshold, 2.0)), batch_size=16)
    for size in sizes.values():
        size.clear()
    list(runner.predict(images))
    survivors = int((known.scores[0] < threshold).sum())
    assert sum(sizes[0]) == COUNT
    assert sum(sizes[1]) == sum(sizes[2]) == survivors
    assert sizes[1][:-1] == [16] * (len(sizes[1]) - 1)


def test_results_stream_with_bounded_memory(setting):
    model, images, _ = setting
    taken = 0

    def source():
        nonlocal taken
        for image in images.repeat(5, 1, 1, 1):
            taken += 1
            yield (image.clamp(-1, 1).add(1).mul(127)).byte().permute(1, 2, 0).numpy()

    from PIL import Image

    runner = tw.Runner(model, tw.Policy((0.999, 2.0)), batch_size=8)
    most = 0
    for count, _ in enumerate(runner.predict(Image.fromarray(x) for x in source())):
        most = max(most, taken - count)
    assert taken == COUNT * 5
    assert most <= (_LAG + 2) * 8 < COUNT * 5


def test_anytime_mode_lets_nobody_beyond_an_exit(setting):
    model, images, calibrations = setting
    known = calibrations["confidence"]
    everything = tw.Policy.run_all(3)
    for stop in range(3):
        results = list(tw.Runner(model, everything.up_to(stop)).predict(images))
        assert {r.exit for r in results} == {stop + 1}
        assert [r.label for r in results] == known.predictions[stop].tolist()


def test_the_policy_can_change_between_batches(setting):
    model, images, _ = setting
    runner = tw.Runner(model, tw.Policy((-1.0, -1.0)), batch_size=10, pack=False)
    stream = runner.predict(images)
    first = [next(stream) for _ in range(10)]
    runner.policy = tw.Policy.run_all(3)
    rest = list(stream)
    assert {r.exit for r in first} == {1}
    assert {r.exit for r in rest} == {3}


def test_drift_is_reported_when_inputs_get_harder(setting):
    model, images, calibrations = setting
    known = calibrations["confidence"]
    policy = make_policy(known, np.array([np.median(known.scores[0]), -1.0]), "half leave at exit 1")
    runner = tw.Runner(model, policy)
    list(runner.predict(images))
    assert not runner.drift.drifting
    hard = images[torch.from_numpy(known.scores[0]).argsort()[:40]]
    runner.policy = policy
    list(runner.predict(hard))
    assert runner.drift.drifting
    assert "harder than the calibration images" in str(runner.drift)


def test_a_policy_of_another_model_is_refused(setting):
    model, _, calibrations = setting
    policy = tw.solve(calibrations["confidence"], target=tw.Accuracy(0.3))
    with pytest.raises(tw.PolicyError, match="solve it again"):
        tw.Runner(small_cascade(seed=7), policy)
    with pytest.raises(tw.PolicyError, match="unknown backend"):
        tw.Runner(model, backend="abacus")


def test_milliseconds_of_other_settings_warn(setting):
    model, _, calibrations = setting
    timed = calibrations["confidence"].with_costs((1.0, 2.0, 3.0), "ms", {"batch": 1})
    with pytest.warns(UserWarning, match="milliseconds were measured with"):
        tw.Runner(model, tw.solve(timed, tw.Millis(3.0)), batch_size=64)


def test_bfloat16_answers_nearly_the_same(setting):
    model, images, calibrations = setting
    runner = tw.Runner(model, tw.Policy.run_all(3), dtype=torch.bfloat16)
    labels, _, _ = runner.run(images)
    assert (labels.numpy() == calibrations["confidence"].predictions[2]).mean() > 0.9


def test_a_static_model_runs_through_the_same_runner(setting):
    from tokensworth.cascade import Cascade

    model, images, _ = setting
    static = Cascade(model.config.static(5)).eval()
    results = list(tw.Runner(static).predict(images))
    with torch.inference_mode():
        assert [r.label for r in results] == static(images)[0].argmax(1).tolist()
