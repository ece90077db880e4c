"""The learned exit rule: what it looks at, what it is good for, and that it travels with a policy."""

import numpy as np
import pytest
import torch

import tokensworth as tw
from tokensworth.exits.calibration import calibrate_logits
from tokensworth.exits.learned import WIDTH, evidence, fit_rule, learned_score, remember


def answers(count=4000, seed=0):
    """Logits of three exits: confidence says nothing of who is right, agreement with the exit before does."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=random)
    easy = torch.rand(count, generator=random) < 0.5
    exits = []
    for stage in range(3):
        right = easy | (stage == 2)
        guess = torch.where(right, labels, torch.randint(0, 3, (count,), generator=random))
        height = 1 + torch.rand(count, generator=random)
        exits.append(torch.zeros(count, 3).scatter_(1, guess.unsqueeze(1), height.unsqueeze(1)))
    return exits, labels


def test_evidence_is_what_it_says():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.5, 0.25]])
    first = evidence(p, torch.empty(2, 0, 2))
    assert first.shape == (2, WIDTH)
    expected = [np.log(0.7 / 0.3), np.log(0.7 / 0.3) ** 2, 0.5, -(p[0] * p[0].log()).sum() / np.log(3), 0, 0]
    np.testing.assert_allclose(first[0], expected, rtol=1e-5)
    earlier = torch.empty(2, 0, 2)
    for labels, confidences in ((torch.tensor([0, 0]), torch.tensor([0.4, 0.6])), (torch.tensor([1, 1]), p[:, 0])):
        earlier = remember(earlier, labels, confidences)
    later = evidence(p, earlier)
    np.testing.assert_allclose(later[:, 4], [0.5, 0.5])
    np.testing.assert_allclose(later[:, 5], torch.logit(p[:, 0]), rtol=1e-5)


def test_it_finds_what_confidence_cannot_see():
    exits, labels = answers()
    fresh, truth = answers(seed=1)
    costs = (1.0, 2.0, 4.0)
    rule = calibrate_logits(exits, labels, costs, score="learned").rule
    found = {}
    for score, numbers in (("confidence", ()), ("learned", rule)):
        known = calibrate_logits(exits, labels, costs, score=score, rule=numbers)
        test = calibrate_logits(fresh, truth, costs, score=score, rule=numbers)
        policy = tw.solve(known, tw.Macs(4.5))
        leaving = tw.exits.outcome.leaving_exit(test.scores, np.array(policy.thresholds))
        found[score] = test.right[leaving, np.arange(len(truth))].mean()
    assert found["learned"] > found["confidence"] + 0.02


def test_scores_are_probabilities_and_higher_where_less_is_to_be_gained():
    exits, labels = answers()
    probabilities = [logits.softmax(1) for logits in exits]
    rule = fit_rule(probabilities, labels)
    assert len(rule) == 2
    first = torch.stack([probabilities[0].argmax(1).float(), probabilities[0].amax(1)], dim=1).unsqueeze(1)
    score = learned_score(rule[1], probabilities[1], first)
    assert 0 <= score.min() <= score.max() <= 1
    needless = probabilities[1].argmax(1) == labels
    assert score[needless].mean() > score[~needless].mean()


def test_constant_evidence_has_no_weight():
    exits = [torch.zeros(50, 4), torch.zeros(50, 4)]
    rule = fit_rule([e.softmax(1) for e in exits], torch.arange(50) % 4)
    assert all(np.isfinite(rule[0]))
    assert rule[0][1:] == (0.0,) * WIDTH


def test_the_rule_is_saved_with_calibration_and_policy(tmp_path):
    exits, labels = answers(200)
    known = calibrate_logits(exits, labels, (1.0, 2.0, 4.0), score="learned")
    known.save(tmp_path / "known.safetensors")
    assert tw.Calibration.load(tmp_path / "known.safetensors").rule == known.rule
    policy = tw.solve(known, tw.Macs(3.0))
    policy.save(tmp_path / "policy.json")
    assert tw.Policy.load(tmp_path / "policy.json") == policy
    assert policy.rule == known.rule


@pytest.mark.parametrize("rule", [(), ((1.0, 2.0),)])
def test_a_learned_policy_without_a_whole_rule_is_refused(rule):
    with pytest.raises(tw.PolicyError, match=r"rule"):
        tw.Policy((0.5,), score="learned", rule=rule)
