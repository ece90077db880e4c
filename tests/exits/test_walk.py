import json

import numpy as np
import pytest

from golden import DATA
from tokensworth.exits.calibration import Calibration
from tokensworth.exits.outcome import evaluate, leaving_exit
from tokensworth.exits.walk import walk_thresholds

GOLDEN = json.loads((DATA / "dvt_thresholds.json").read_text())


def _probabilities() -> tuple[np.ndarray, np.ndarray]:
    """The golden file's own rule."""
    random, classes, count, stages = np.random.RandomState(7), 10, 2000, 3
    labels = random.randint(0, classes, count)
    difficulty = random.rand(count)
    out = []
    for stage in range(stages):
        logits = random.randn(count, classes)
        logits[np.arange(count), labels] += (2 + 1.2 * stage) * (1.6 - difficulty)
        powers = np.exp(logits - logits.max(1, keepdims=True))
        out.append((powers / powers.sum(1, keepdims=True)).astype(np.float32))
    return np.stack(out), labels


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"p={c['p']}")
def test_the_walk_gives_the_authors_thresholds_exactly(case):
    probabilities, labels = _probabilities()
    confidences, answers = probabilities.max(2), probabilities.argmax(2)
    thresholds = walk_thresholds(confidences, case["p"])
    assert thresholds.tolist() == case["thresholds"]
    costs = np.diff(GOLDEN["flops"], prepend=0)
    calibration = Calibration(confidences, confidences, answers, labels, tuple(costs))
    outcome = evaluate(calibration, thresholds[:-1])
    assert 100 * outcome.accuracy == pytest.approx(case["accuracy"], abs=1e-9)
    # The authors sum the cost in float32.
    assert outcome.cost == pytest.approx(case["gflops"], rel=1e-5)
    assert (leaving_exit(confidences, thresholds[:-1]) < 3).all()
