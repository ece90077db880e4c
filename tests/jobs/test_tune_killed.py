"""`tune` killed outright, in a process of its own, at one step after another: it goes on and ends the same."""

import json
import subprocess
import sys
import time

import pytest

from timm_models import make
from tokensworth.data.packaged import packaged_folder
from tokensworth.tokens import storage

pytestmark = pytest.mark.slow

# Each exists from a later moment on.
MOMENTS = ("passes/*/2-*.safetensors", "steps/head-2.json", "steps/grids.json", "last-*/state.safetensors")
SECONDS = 120


def test_killed_at_every_step_and_run_again(tmp_path):
    storage.save_pretrained(make("test_vit2", 3), tmp_path / "vit")
    data = packaged_folder() / "calibration.parquet"

    def start(out: str) -> subprocess.Popen:
        words = ["tune", "--model", tmp_path / "vit", "--data", data, "--grids", "2,3,4", "--held-out", 80]
        words += ["--limit", 160, "--cached-epochs", 3, "--last-layers", 1, "--train-batch", 32, "--threads", 1]
        words += ["--timed-images", 8, "--repeats", 1, "--precision", "fp32", "--out", tmp_path / out, "--json"]
        command = [sys.executable, "-m", "tokensworth", *map(str, words)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def finished(out: str) -> dict:
        process = start(out)
        assert process.wait(SECONDS) == 0
        return json.loads((tmp_path / out / "tune.json").read_text())

    for moment in MOMENTS:
        process, until = start("killed"), time.monotonic() + SECONDS
        while not list((tmp_path / "killed").glob(moment)) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        process.kill()
        process.wait()
    killed, whole = finished("killed"), finished("whole")
    for key in ("heads", "grids", "lists", "policy", "rules"):
        assert killed[key] == whole[key]
    assert killed["study"]["curve"] == whole["study"]["curve"]
