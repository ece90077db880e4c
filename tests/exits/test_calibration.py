from dataclasses import replace

import numpy as np
import pytest
import torch

import tokensworth as tw
from small import random_answers, small_cascade


def _batches(count=20, size=8):
    images, labels = torch.randn(count, 3, 32, 32), torch.randint(0, 4, (count,))
    return [(images[i : i + size], labels[i : i + size]) for i in range(0, count, size)]


@pytest.mark.parametrize("score", ["confidence", "entropy", "margin", "random"])
def test_calibration_keeps_what_every_exit_said(score):
    model, batches = small_cascade(), _batches()
    known = tw.calibrate(model, batches, score=score)
    with torch.inference_mode():
        logits = [torch.cat(x) for x in zip(*(model(images) for images, _ in batches), strict=True)]
    assert known.scores.shape == (3, 20)
    for index, row in enumerate(logits):
        assert known.predictions[index].tolist() == row.argmax(1).tolist()
        assert np.allclose(known.confidences[index], row.softmax(1).amax(1))
    assert known.labels.tolist() == torch.cat([y for _, y in batches]).tolist()
    assert len(known.stage_costs) == 3


def test_temperatures_change_confidence_but_no_answer():
    model, batches = small_cascade(), _batches(60)
    plain, warm = tw.calibrate(model, batches), tw.calibrate(model, batches, temperature=True)
    assert (plain.predictions == warm.predictions).all()
    assert all(t != 1 for t in warm.temperatures)
    assert not np.allclose(plain.confidences, warm.confidences)
    again = tw.calibrate(model, batches, temperature=warm.temperatures)
    assert np.array_equal(again.scores, warm.scores)


def test_a_calibration_survives_the_disk(tmp_path):
    known = random_answers(50).with_costs((1.0, 2.0, 3.0), "ms", {"threads": 2})
    known.save(tmp_path / "c.safetensors")
    again = tw.Calibration.load(tmp_path / "c.safetensors")
    assert again.unit == "ms"
    assert again.context == (("threads", 2),)
    assert np.array_equal(again.scores, known.scores)
    data = (tmp_path / "c.safetensors").read_bytes()
    (tmp_path / "c.safetensors").write_bytes(data[:200])
    with pytest.raises(tw.DataError, match="not a calibration"):
        tw.Calibration.load(tmp_path / "c.safetensors")


def test_bad_calibration_input_is_refused():
    model = small_cascade()
    with pytest.raises(tw.DataError, match="no images"):
        tw.calibrate(model, [])
    with pytest.raises(tw.DataError, match="labels 9 to 9 for 4 classes"):
        tw.calibrate(model, [(torch.randn(1, 3, 32, 32), torch.tensor([9]))])
    with pytest.raises(tw.DataError, match="not finite"):
        tw.calibrate(model, [(torch.full((1, 3, 32, 32), float("nan")), torch.tensor([0]))])
    known = random_answers(10)
    with pytest.raises(tw.DataError, match="do not fit"):
        replace(known, labels=known.labels[:5])
