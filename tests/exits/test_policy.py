import json

import pytest

import tokensworth as tw
from small import random_answers


def test_a_policy_is_a_small_json_that_says_what_it_is_for(tmp_path):
    policy = tw.solve(random_answers(200, 3), tw.Macs(5.0))
    policy.save(tmp_path / "p.json")
    assert tw.Policy.load(tmp_path / "p.json") == policy
    saved = json.loads((tmp_path / "p.json").read_text())
    assert saved["goal"] == "at most 5 MACs on average"
    assert saved["unit"] == "MACs"


@pytest.mark.parametrize("text", ["", "[]", '{"thresholds": [0.5], "what": 1}', '{"thresholds": ["x"]}'])
def test_a_damaged_policy_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(tw.PolicyError, match="not a policy"):
        tw.Policy.load(tmp_path / "p.json")
    with pytest.raises(tw.PolicyError, match="not a policy"):
        tw.Policy.load(tmp_path / "none.json")


def test_a_policy_for_another_model_is_refused():
    policy = tw.Policy((0.5, 0.5), model="abc")
    with pytest.raises(tw.PolicyError, match="solved for model abc, this is def"):
        policy.check(3, "def")
    with pytest.raises(tw.PolicyError, match="for 3 exits, the model has 2"):
        policy.check(2, "abc")
    assert policy.check(3, "abc") == []


def test_milliseconds_measured_elsewhere_warn():
    policy = tw.Policy((0.5,), unit="ms", context={"threads": 8, "batch": 64})
    warnings = policy.check(2, "", {"threads": 2, "batch": 64})
    assert len(warnings) == 1
    assert "'threads': 8" in warnings[0]
    assert policy.check(2, "", {"threads": 8, "batch": 64}) == []


def test_thresholds_must_be_numbers():
    with pytest.raises(tw.PolicyError, match="finite"):
        tw.Policy((float("nan"),))
