import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokensworth as tw
from small import random_answers
from tokensworth.exits.exact import ExactSolver, all_thresholds
from tokensworth.exits.genetic import evaluate_many
from tokensworth.exits.outcome import evaluate, evaluate_grid, leaving_exit

cases = st.builds(
    random_answers, st.integers(1, 60), st.integers(2, 4), st.just(4), st.integers(0, 10**6), st.booleans()
)


def _brute(calibration, budget):
    """The best accuracy within a budget over every combination of thresholds, one by one."""
    axes = [all_thresholds(s) for s in calibration.scores[:-1]]
    outcomes = (evaluate(calibration, np.array(c)) for c in itertools.product(*axes))
    return max((float(o.accuracy) for o in outcomes if o.cost <= budget), default=None)


@given(cases, st.data())
@settings(max_examples=60, deadline=None)
def test_the_histogram_agrees_with_images_one_by_one(calibration, data):
    axes = []
    for scores in calibration.scores[:-1]:
        every = all_thresholds(scores)
        size = data.draw(st.integers(1, min(6, len(every))))
        axes.append(np.sort(np.random.default_rng(size).choice(every, size, replace=False)))
    grid = evaluate_grid(calibration, axes)
    for place in np.ndindex(grid.cost.shape):
        one = evaluate(calibration, np.array([axis[i] for axis, i in zip(axes, place, strict=True)]))
        assert grid.accuracy[place] == pytest.approx(float(one.accuracy))
        assert grid.cost[place] == pytest.approx(float(one.cost))
        assert grid.shares[place] == pytest.approx(one.shares)
        assert grid.deviation[place] == pytest.approx(float(one.deviation), abs=1e-6)


@given(cases)
@settings(max_examples=60, deadline=None)
def test_thresholds_cover_every_way_to_split_the_scores(calibration):
    for scores in calibration.scores[:-1]:
        thresholds = all_thresholds(scores)
        counts = {int((scores >= t.astype(np.float32)).sum()) for t in thresholds}
        assert counts == {int((scores >= s).sum()) for s in scores} | {0}


@given(st.integers(0, 10**6), st.integers(2, 3), st.booleans(), st.floats(0, 1))
@settings(max_examples=15, deadline=None)
def test_ours_equals_brute_force_on_few_images(seed, stages, ties, share):
    calibration = random_answers(25, stages, seed=seed, ties=ties)
    costs = calibration.exit_costs
    budget = float(costs[0] + share * (costs[-1] - costs[0]))
    policy = tw.solve(calibration, tw.Macs(budget))
    assert policy.cost <= budget
    assert policy.accuracy == pytest.approx(_brute(calibration, budget))


def test_a_coarse_grid_is_refined_to_nearly_brute_force():
    calibration = random_answers(1500, 3, seed=3)
    exact = ExactSolver(calibration)
    assert exact.resolution == 0
    coarse = ExactSolver(calibration, cells=64**2)
    assert coarse.resolution == pytest.approx(1 / 63)
    budget = 5.0
    best = exact.points.outcome.accuracy[exact.points.outcome.cost <= budget].max()
    fits = coarse.points.outcome.cost <= budget
    start = coarse.points.thresholds[fits][coarse.points.outcome.accuracy[fits].argmax()]
    refined = coarse.refine(start)
    got = refined.outcome.accuracy[refined.outcome.cost <= budget].max()
    assert got >= coarse.points.outcome.accuracy[fits].max()
    assert best - got < 0.003


def test_the_cheapest_policy_that_reaches_a_target():
    calibration = random_answers(400, 3, seed=1)
    axes = [all_thresholds(s) for s in calibration.scores[:-1]]
    grid = evaluate_grid(calibration, axes)
    for target in (0.7, 0.8, 0.85):
        policy = tw.solve(calibration, target=tw.Accuracy(target))
        assert policy.accuracy >= target
        assert policy.cost == pytest.approx(grid.cost[grid.accuracy >= target].min())


def test_an_upper_bound_on_cost_is_more_careful():
    calibration = random_answers(400, 3, seed=1)
    plain = tw.solve(calibration, tw.Macs(5.0))
    careful = tw.solve(calibration, tw.Macs(5.0), cost_confidence=0.99)
    assert careful.cost < plain.cost <= 5.0


def test_the_genetic_solver_keeps_the_budget_and_converges():
    calibration = random_answers(500, 3, seed=2)
    seen = []
    policy = tw.solve(
        calibration, tw.Macs(5.0), solver="genetic", seed=1, on_generation=lambda n, best: seen.append((n, best))
    )
    ours = tw.solve(calibration, tw.Macs(5.0))
    assert policy.cost <= 5.0
    assert ours.accuracy - 0.02 < policy.accuracy <= ours.accuracy
    assert [n for n, _ in seen] == list(range(1, 201))
    assert seen[-1][1] == pytest.approx(policy.accuracy)


def test_the_walk_stays_within_the_budget():
    calibration = random_answers(500, 3, seed=2)
    policy = tw.solve(calibration, tw.Macs(6.0), solver="walk")
    assert policy.cost <= 6.0
    assert policy.accuracy <= tw.solve(calibration, tw.Macs(6.0)).accuracy


def test_the_frontier_grows_and_holds_what_it_says():
    calibration = random_answers(800, 3, seed=4)
    line = tw.frontier(calibration)
    costs, accuracies = [p.cost for p in line.policies], [p.accuracy for p in line.policies]
    assert costs == sorted(costs)
    assert accuracies == sorted(set(accuracies))
    for policy in line.policies:
        outcome = evaluate(calibration, np.array(policy.thresholds))
        assert (float(outcome.accuracy), float(outcome.cost)) == (policy.accuracy, policy.cost)
    assert line.within(5.0).cost <= 5.0
    with pytest.raises(tw.BudgetError, match="below the first exit's cost"):
        line.within(0.5)


@given(cases)
@settings(max_examples=30, deadline=None)
def test_many_thresholds_at_once_agree_with_one_by_one(calibration):
    random = np.random.default_rng(0)
    thresholds = random.random((7, len(calibration.scores) - 1))
    many = evaluate_many(calibration, thresholds)
    for row, accuracy in zip(thresholds, many.accuracy, strict=True):
        assert accuracy == pytest.approx(float(evaluate(calibration, row).accuracy))


def test_leaving_exit_takes_the_first_that_is_sure():
    scores = np.array([[0.9, 0.1, 0.1], [0.1, 0.9, 0.1], [0.0, 0.0, 0.0]], dtype=np.float32)
    assert leaving_exit(scores, np.array([0.5, 0.5])).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: tw.solve(c), "one goal"),
        (lambda c: tw.solve(c, tw.Macs(5), target=tw.Accuracy(0.5)), "one goal"),
        (lambda c: tw.solve(c, tw.Macs(0.5)), "below the first exit's cost"),
        (lambda c: tw.solve(c, tw.Millis(5.0)), "in ms, but the calibration's costs are in MACs"),
        (lambda c: tw.solve(c, target=tw.Accuracy(1.0)), "no policy reaches"),
        (lambda c: tw.solve(c, tw.Macs("many")), "not a number of MACs"),
        (lambda c: tw.solve(c, target=tw.Accuracy(80)), "not a share"),
    ],
)
def test_goals_that_cannot_be_met_say_why(call, message):
    with pytest.raises(tw.BudgetError, match=message):
        call(random_answers(200, 3))


def test_units_of_macs():
    assert tw.Macs("1.2G").amount == 1.2e9
    assert tw.Macs("350M").amount == 3.5e8
    assert tw.Macs(5).amount == 5
