"""Training: the loss, the state, and runs that are killed and go on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import tokensworth as tw
from small import small_config
from tokensworth.cascade import Cascade
from tokensworth.data.batches import TensorBatches
from tokensworth.data.tensors import TensorSet
from tokensworth.train.loop import Recipe, Trainer
from tokensworth.train.precision import choose_precision


def _png(array) -> bytes:
    import io

    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Ninety-six images in four classes, told apart by colour."""
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    random_ = np.random.default_rng(0)
    labels = random_.integers(0, 4, 96)
    images = []
    for label in labels:
        image = random_.integers(0, 120, (32, 32, 3), dtype=np.uint8)
        image[..., label % 3] += np.uint8(60 + 60 * (label // 3))
        images.append({"bytes": _png(image), "path": None})
    pq.write_table(pa.table({"img": images, "label": labels}), path)
    return path


def _train(data, out, *more, **options):
    sizes = ["--stem", "conv", "--grids", "3,5", "--dim", "16", "--depth", "1", "--heads", "2", "--classes", "4"]
    run = ["--epochs", "6", "--batch-size", "8", "--save-every", "1", "--hold-out", "16", "--threads", "1"]
    drop = ["--drop-path", "0.2", "--mixup", "0.4", "--json"]
    command = [sys.executable, "-m", "tokensworth", "train", "--data", str(data), "--out", str(out)]
    return [*command, *sizes, *run, *drop, *more]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_run_killed_at_a_random_step_ends_bit_equal_when_resumed(data, tmp_path, optimizer):
    more = ("--optimizer", optimizer)
    whole = subprocess.run(_train(data, tmp_path / "whole", *more), capture_output=True, text=True, check=True)
    killed_at = None
    for _ in range(5):
        process = subprocess.Popen(_train(data, tmp_path / "cut", *more), stdout=subprocess.DEVNULL)
        state = tmp_path / "cut" / "state.safetensors"
        while not state.exists() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not (tmp_path / "cut" / "model.safetensors").exists():
            from safetensors import safe_open

            with safe_open(state, "pt") as file:
                killed_at = json.loads(file.metadata()["state"])["step"]
            break
    assert killed_at is not None
    assert killed_at < 60
    resumed = subprocess.run(_train(data, tmp_path / "cut", *more), capture_output=True, text=True, check=True)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    histories = [json.loads(run.stdout)["history"] for run in (whole, resumed)]
    assert histories[0] == histories[1]
    assert not list((tmp_path / "cut").glob("*.tmp"))
    assert not any(p.read_bytes()[:2] == b"\x80\x04" for p in (tmp_path / "cut").iterdir())


def test_bfloat16_trains_and_saves(data, tmp_path):
    command = _train(data, tmp_path / "out", "--precision", "bf16", "--epochs", "1")
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    (entry,) = json.loads(run.stdout)["history"]
    assert np.isfinite(entry["loss"])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(v.isfinite().all() for v in weights.values())


def _trainer(out, model=None, **options) -> Trainer:
    torch.manual_seed(0)
    model = model or Cascade(small_config((3, 5)))
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = (images[:, 0].float().mean((1, 2)) > 127.5).long()
    data = TensorSet(images, labels)
    recipe = Recipe(**{"epochs": 2, "batch_size": 16, "precision": "fp32", **options})

    def batches(rank, world):
        return TensorBatches(data, recipe.batch_size, (0.5,) * 3, (0.5,) * 3, recipe.seed, rank=rank, world=world)

    return Trainer(model, batches, recipe, out)


def test_training_learns(tmp_path):
    trainer = _trainer(tmp_path, epochs=15, lr=3e-3, ema=0.9, label_smoothing=0.0)
    losses = []
    trainer.run(lambda p: losses.append(p.loss))
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(tmp_path):
    trainer = _trainer(tmp_path)
    calls = iter(range(100))
    loss = trainer.loss
    trainer.loss = lambda *a: loss(*a) * (float("nan") if next(calls) == 5 else 1)  # type: ignore[assignment]
    with pytest.raises(tw.TrainingError, match="loss is nan at step 5"):
        trainer.run()
    again = _trainer(tmp_path)
    assert again.state.step == 5
    assert all(v.isfinite().all() for v in again.model.state_dict().values())
    again.run()
    assert again.state.step == 8


def test_a_state_of_another_run_is_refused(tmp_path):
    _trainer(tmp_path).save()
    with pytest.raises(tw.TrainingError, match="another lr"):
        _trainer(tmp_path, lr=0.5)
    (tmp_path / "state.safetensors").write_bytes(b"junk")
    with pytest.raises(tw.TrainingError, match="not a training state"):
        _trainer(tmp_path)


@pytest.mark.parametrize("options", [{"mixup": 0.8, "cutmix": 1.0}, {"distill": 1.0}, {"exit_weights": (1.0, 2.0)}])
def test_every_switch_of_the_recipe_changes_the_weights(tmp_path, options):
    plain, other = _trainer(tmp_path / "a").run(), _trainer(tmp_path / "b", **options).run()
    a, b = plain.state_dict(), other.state_dict()
    assert any(not torch.equal(a[k], b[k]) for k in a)


def test_the_loss_is_the_sum_over_exits():
    exits, target = [torch.randn(6, 4) for _ in range(3)], torch.randint(0, 4, (6,))
    each = [torch.nn.functional.cross_entropy(x, target) for x in exits]
    assert torch.allclose(tw.CascadeLoss()(exits, target), sum(each))
    weighted = tw.CascadeLoss((1, 0, 2))(exits, target)
    assert torch.allclose(weighted, each[0] + 2 * each[2])
    soft = torch.nn.functional.one_hot(target, 4).float()
    assert torch.allclose(tw.CascadeLoss(label_smoothing=0.1)(exits, soft), sum(each))
    assert tw.CascadeLoss(label_smoothing=0.1)(exits, target) != tw.CascadeLoss()(exits, target)
    with pytest.raises(tw.TrainingError, match="2 exit weights for 3 exits"):
        tw.CascadeLoss((1, 1))(exits, target)


def test_distillation_moves_the_earlier_exits_only():
    exits = [torch.randn(6, 4, requires_grad=True) for _ in range(2)]
    target = torch.randint(0, 4, (6,))
    (tw.CascadeLoss((0, 0), distill=1.0, temperature=2.0)(exits, target)).backward()
    assert exits[0].grad is not None
    assert exits[0].grad.abs().max() > 0
    assert exits[1].grad is None or exits[1].grad.abs().max() == 0
    same = [exits[1], exits[1]]
    assert tw.CascadeLoss((0, 0), distill=1.0)(same, target).abs() < 1e-6


def test_one_process_trains_in_one_precision_after_another(tmp_path):
    for precision in ("bf16", "fp32", "bf16"):
        trainer = _trainer(tmp_path / precision, precision=precision, epochs=1)
        assert trainer.accelerator.mixed_precision == {"fp32": "no"}.get(precision, precision)


def test_precision_names():
    cpu = torch.device("cpu")
    assert choose_precision("fp32", cpu) == "no"
    assert choose_precision("bf16", cpu) == "bf16"
    assert choose_precision("auto", cpu) in ("no", "bf16")
    with pytest.raises(tw.TrainingError, match="auto, fp32, bf16"):
        choose_precision("fp8", cpu)


@pytest.mark.slow
def test_two_processes_train_one_model(data, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--module"]
    command = _train(data, tmp_path / "out")
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    subprocess.run([*launch, *command[2:]], check=True, capture_output=True, env=environment)
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert len(record["history"]) == 6
