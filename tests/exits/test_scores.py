import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tokensworth as tw
from tokensworth.exits.calibration import expected_calibration_error, fit_temperature
from tokensworth.exits.scores import SCORES, find_score, softmax


@given(st.integers(2, 6), st.integers(0, 1000))
def test_every_score_is_between_zero_and_one_and_surest_on_a_sure_answer(classes, seed):
    logits = torch.randn(8, classes, generator=torch.Generator().manual_seed(seed))
    logits[0] = 0
    logits[1] = torch.tensor([50.0] + [0.0] * (classes - 1))
    positions = torch.arange(8)
    for name, rule in SCORES.items():
        score = rule(softmax(logits), positions, 0)
        assert score.shape == (8,)
        assert ((score >= 0) & (score <= 1)).all()
        if name != "random":
            assert score.argmax() == 1
            assert score.argmin() == 0


def test_chance_depends_on_position_and_exit_alone():
    rule, p = find_score("random"), torch.full((1000, 3), 1 / 3)
    a, b = rule(p, torch.arange(1000), 0), rule(p, torch.arange(1000), 1)
    assert torch.equal(rule(p[:5], torch.tensor([9, 3, 7, 0, 2]), 0), a[[9, 3, 7, 0, 2]])
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 0.1
    assert abs(float(a.mean()) - 0.5) < 0.03
    assert abs(float(a.std()) - 12**-0.5) < 0.02


def test_an_unknown_score_lists_the_known_ones():
    with pytest.raises(tw.PolicyError, match="confidence, entropy, margin, random"):
        find_score("hope")


def test_temperature_mends_overconfident_logits():
    truth = torch.randn(4000, 5) * 2
    labels = torch.distributions.Categorical(logits=truth).sample()
    assert fit_temperature(truth * 3, labels) == pytest.approx(3, rel=0.1)


def test_calibration_error_of_known_cases():
    sure, right = np.full(100, 0.9), np.arange(100) < 90
    assert expected_calibration_error(sure, right) == pytest.approx(0, abs=1e-9)
    assert expected_calibration_error(sure, np.zeros(100, bool)) == pytest.approx(0.9)
    assert expected_calibration_error(np.ones(10), np.ones(10, bool)) == 0
