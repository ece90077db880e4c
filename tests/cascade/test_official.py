import numpy as np
import pytest
import torch

import tokensworth as tw
from golden import DATA, golden_images, golden_state
from tokensworth.cascade.official import read_official

MODELS = ("dvt_t2t_vit_12", "dvt_t2t_vit_14", "dvt_deit_small")


@pytest.mark.parametrize("name", MODELS)
def test_released_models_agree_with_the_authors_at_every_exit(name, tmp_path):
    saved = {
        "model_state_dict": golden_state(name),
        "flops": [1.0, 2.0, 3.0],
        "anytime_classification": [70.0, 75.0, 80.0],
        "dynamic_threshold": [[0.5, 0.6, -1e8]],
        "budgeted_batch_classification": [[1.5, 78.0]],
    }
    path = tmp_path / f"{name}.pth.tar"
    torch.save(saved, path)
    model, results = read_official(path)
    with torch.inference_mode():
        logits = torch.stack(model(golden_images())).numpy()
    expected = np.load(DATA / f"{name}.npz")["logits"]
    assert logits.shape == expected.shape == (3, 2, 1000)
    assert np.abs(logits - expected).max() < 1e-4
    assert results.flops == [1.0, 2.0, 3.0]
    assert results.thresholds == [[0.5, 0.6, -1e8]]


def test_a_checkpoint_with_a_pickle_payload_is_refused_without_running_it(tmp_path):
    import pickle

    class Payload:
        def __reduce__(self):
            return (print, ("ran",))

    path = tmp_path / "bad.pth.tar"
    path.write_bytes(pickle.dumps({"model_state_dict": Payload()}))
    with pytest.raises(tw.CheckpointError, match="more than plain tensors"):
        tw.Cascade.from_official(path)


def test_other_checkpoints_are_refused_by_name(tmp_path):
    path = tmp_path / "other.pth.tar"
    torch.save({"model": {}}, path)
    with pytest.raises(tw.CheckpointError, match="no model_state_dict"):
        tw.Cascade.from_official(path)
    with pytest.raises(tw.CheckpointError, match="no such file"):
        tw.Cascade.from_official(tmp_path / "none.pth.tar")
