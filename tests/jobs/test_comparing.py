"""`compare`: differences, Pareto points, recommendations, and a comparison that goes on where it stopped."""

import csv
import json

import numpy as np
import pytest
import torch

from small import small_cascade
from tokensworth.cascade import Cascade
from tokensworth.data.packaged import packaged_folder, packaged_images
from tokensworth.errors import DataError, UnsupportedModelError
from tokensworth.jobs import comparing
from tokensworth.jobs.choosing import best_within, cheapest_within, paired_difference, pareto
from tokensworth.jobs.comparing import Comparison, Images, Measured, check_images
from tokensworth.jobs.ranking import rank, recommend
from tokensworth.jobs.sides import Side, parse_method, plan, what_differs
from tokensworth.measure.describe import describe
from tokensworth.report.comparison import as_csv, recommended, write_comparison
from tokensworth.tokens import ToSA, adapt, method_from_dict
from tokensworth.tokens.vit import find_vits

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")
VIT = str(packaged_folder() / "vit")


def few(part: str, count: int):
    return packaged_images(part).select(np.arange(count))


@pytest.fixture
def images():
    return Images(few("calibration", 48), few("test", 40))


def test_the_bootstrap_is_that_of_resampled_images():
    random = np.random.default_rng(0)
    reference = random.random(400) < 0.8
    right = reference ^ (random.random(400) < 0.1)
    found = paired_difference(right, reference)
    change = right.astype(int) - reference.astype(int)
    by_hand = change[random.integers(0, 400, (10_000, 400))].mean(1)
    assert found.mean == pytest.approx(change.mean())
    assert [found.low, found.high] == pytest.approx(np.quantile(by_hand, [0.025, 0.975]), abs=0.003)
    assert paired_difference(right, right) == paired_difference(reference, reference)
    assert paired_difference(right, right).high == 0


def test_pareto_and_choice():
    costs, values = [1.0, 2.0, 2.0, 3.0, 4.0], [0.5, 0.7, 0.6, 0.7, 0.9]
    assert pareto(costs, values) == [True, True, False, False, True]
    assert cheapest_within(costs, values, 0.6) == 1
    assert cheapest_within(costs, values, 0.95) is None
    assert best_within(costs, values, 3.5) == 1
    assert best_within(costs, values, 0.5) is None


def test_methods_are_read_from_text():
    vit = find_vits(Cascade.from_pretrained(VIT))[0]
    assert parse_method("tome:r=4", vit) == [method_from_dict({"name": "tome", "r": 4})]
    assert parse_method("evit:keep=0.7,0.8;layers=3,6", vit)[0].keep == (0.7, 0.8)
    assert [m.keep for m in parse_method("tosa", vit)] == [0.8, 0.5, 0.3]
    assert parse_method("tosa", vit)[0].layers == (2, 4, 6, 8, 10)
    assert parse_method("topk", vit)[0].layers == (4, 7, 10)
    assert what_differs(parse_method("tosa:keep=0.5;scope=per_head", vit)[0]) == "keep=0.5, scope=per_head"
    for wrong, match in (("nonsense", "no token method"), ("tome:r", "name=value"), ("tome:s=1", "do not fit")):
        with pytest.raises(UnsupportedModelError, match=match):
            parse_method(wrong, vit)


def test_what_must_be_trained_is_named_and_what_is_adapted_is_refused(tmp_path):
    sides, left_out = plan(VIT, ["all"], [str(packaged_folder())])
    curves = [side.curve for side in sides]
    assert curves[0] == "plain"
    assert curves.count("tome") == 3
    assert curves.count("cascade 3-5-8") == 7
    assert [line.split()[0] for line in left_out] == ["dynamicvit", "svit"]
    adapt(Cascade.from_pretrained(VIT), ToSA()).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="--trained"):
        plan(str(tmp_path), ["tome"], [])


def test_a_comparison_goes_on_where_it_stopped(tmp_path, images, monkeypatch):
    sides, _ = plan(VIT, ["tome:r=4", "star:keep=0.7", "random"], [str(packaged_folder()), VIT])
    real, done = Comparison._measure, []

    def stops(self, model, side):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(side)
        return real(self, model, side)

    monkeypatch.setattr(Comparison, "_measure", stops)
    with pytest.raises(KeyboardInterrupt):
        Comparison(tmp_path, images, batch_size=8, repeats=1).run(sides)
    assert len(list((tmp_path / "sides").glob("*.json"))) == 3
    monkeypatch.setattr(Comparison, "_measure", lambda self, m, s: done.append(s) or real(self, m, s))
    measured = Comparison(tmp_path, images, batch_size=8, repeats=1).run(sides)
    assert [s.setting for s in done] == [s.setting for s in sides if s.source != VIT or s.curve != "trained, plain"]
    monkeypatch.setattr(Comparison, "_measure", stops)
    again = Comparison(tmp_path, images, batch_size=8, repeats=1).run(sides)
    assert [m.to_dict() for m in again] == [m.to_dict() for m in measured]
    plain = measured[0]
    dense = Cascade.from_pretrained(VIT)
    assert plain.macs == describe(dense).macs
    assert measured[1].macs < plain.macs
    assert len(plain.test) == 40
    assert len(plain.calibration) == 48
    assert plain.keeps_grid
    assert not measured[1].keeps_grid
    # The plain model given once more is the plain model: same answers, and only the first is measured.
    assert np.array_equal(measured[-1].test, plain.test)
    assert measured[-1].curve == "trained, plain"
    rows = rank(measured)
    assert rows[0].difference.mean == rows[0].difference.high == 0
    assert rows[1].macs_ratio == plain.macs / measured[1].macs
    found = recommend(rows, 100.0, None, False)
    assert found.row.time_ratio == max(r.time_ratio for r in rows)
    assert "no setting reaches it" in recommended(recommend(rows, None, 1e-9, True))
    assert recommend(rows, None, None, False) is None
    write_comparison(rows, found, tmp_path / "page.html", images=40, batch=8, title="<test>")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;test&gt;" in page
    assert recommended(found).split(";")[0] in page
    lines = list(csv.DictReader(as_csv(rows).splitlines()))
    assert [float(line["accuracy"]) for line in lines] == [r.accuracy for r in rows]


def test_what_depends_on_the_image_is_counted_image_by_image(tmp_path, images):
    model = adapt(Cascade.from_pretrained(VIT), method_from_dict({"name": "svit", "bias": 0.0}))
    torch.manual_seed(0)
    for gate in model.stages[0].vit.token_method.gates.values():
        torch.nn.init.normal_(gate.fc2.weight)
    model.save_pretrained(tmp_path / "svit")
    measured = Comparison(tmp_path, images, batch_size=8, repeats=1).run(plan(VIT, ["tome:r=1"], [])[0][:1])
    found = Comparison(tmp_path, images, batch_size=8, repeats=1).measure(
        Side("svit, tuned", "", str(tmp_path / "svit")), Side("plain", "dense", VIT)
    )
    assert 0.3 * measured[0].macs < found.macs < describe(model).macs


def test_a_cascade_answers_as_its_policy_says(tmp_path, images):
    torch.manual_seed(0)
    small_cascade(classes=10).save_pretrained(tmp_path / "cascade")
    sides, _ = plan(VIT, ["tome:r=1"], [str(tmp_path / "cascade")])
    measured = Comparison(tmp_path, images, batch_size=8, repeats=1).run([sides[0], *sides[2:]])
    costs = [m.macs for m in measured[1:]]
    assert len(costs) == 7
    assert costs == sorted(costs)


def test_calibration_and_test_images_must_differ():
    with pytest.raises(DataError, match="8 of the test images"):
        check_images(Images(few("test", 20), few("test", 8)))


def test_results_are_kept_bit_by_bit():
    right = np.random.default_rng(0).random(37) < 0.5
    one = Measured("a", "b", right, ~right, 1.0, 2.0, 3.0, 4.0, 5.0, 6, True)
    again = Measured.from_dict(json.loads(json.dumps(one.to_dict())))
    assert np.array_equal(again.test, right)
    assert np.array_equal(again.calibration, ~right)
    assert comparing._learning(ToSA(keep=0.5)) == comparing._learning(ToSA(keep=0.8))
    assert comparing._learning(ToSA(rows=4)) != comparing._learning(ToSA(rows=9))
