"""The service as a process of its own, on the loopback: it answers, and going down it finishes what it accepted."""

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import tokensworth as tw
from small import small_cascade
from tokensworth.data.packaged import packaged_images
from tokensworth.jobs.exporting import run_export

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow
SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("served")
    model = small_cascade((3, 5), classes=10)
    known = tw.calibrate(model, [(torch.randn(40, 3, 32, 32), torch.arange(40) % 10)])
    frontier = {"policies": [p.__dict__ for p in tw.frontier(known).policies]}
    (out.parent / "frontier.json").write_text(json.dumps(frontier))
    images = packaged_images("test").select(np.arange(8))
    run_export(model, tw.solve(known, tw.Macs("2M")), images, out, frontier=out.parent / "frontier.json", repeats=1)
    return out


@pytest.fixture
def service(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", folder, "--backend", "onnx", "--port", port, "--threads", 1, "--token", "secret"]
    process = subprocess.Popen([sys.executable, "-m", "tokensworth", *map(str, words)], stderr=subprocess.PIPE)
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
    while True:
        try:
            if httpx.get(f"{address}/ready").status_code == 200:
                break
        except httpx.TransportError:
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < until
            time.sleep(0.1)
    yield process, address
    process.kill()
    process.wait()


def test_it_answers_and_finishes_what_it_accepted_when_told_to_stop(service, folder):
    process, address = service
    data = packaged_images("test").items[0]
    files = [("images", ("a.png", data, "image/png"))] * 8

    def ask(_):
        try:
            return httpx.post(f"{address}/predict", files=files, timeout=SECONDS)
        except httpx.ConnectError:
            return None  # it listens no more

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(40)]
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        found = [a.result() for a in asked]
    answered = [r for r in found if r is not None and r.status_code == 200]
    assert answered
    assert all(len(r.json()["results"]) == 8 for r in answered)
    assert {r.status_code for r in found if r is not None} <= {200, 503}
    assert process.wait(SECONDS) in (0, -signal.SIGTERM)
    assert b"Traceback" not in process.stderr.read()


def test_the_frontier_came_along(service):
    _, address = service
    assert len(httpx.get(f"{address}/policy").json()["costs"]) >= 1
