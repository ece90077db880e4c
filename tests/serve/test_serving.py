"""The service: every accepted image answered once and rightly, limits kept, nothing that is sent can break it."""

import base64
import io
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import tokensworth as tw
from small import small_cascade
from tokensworth.data.packaged import packaged_images

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from tokensworth.serve.app import Settings, make_app
from tokensworth.serve.governor import Governor, Limits
from tokensworth.serve.scheduler import Busy, Late, Scheduler
from tokensworth.serve.uploads import UploadLimits

FILES = [packaged_images("test").items[i] for i in range(12)]
TOKEN = {"Authorization": "Bearer secret"}


def model() -> tuple[tw.Cascade, tw.Policy]:
    cascade = small_cascade(classes=10)
    known = tw.calibrate(cascade, [(torch.randn(60, 3, 32, 32), torch.arange(60) % 10)])
    return cascade, tw.Policy([float(np.median(s)) for s in known.scores[:-1]], model=known.model)


def frontier_of(cascade: tw.Cascade) -> list[tw.Policy]:
    return list(tw.frontier(tw.calibrate(cascade, [(torch.randn(60, 3, 32, 32), torch.arange(60) % 10)])).policies)


@pytest.fixture
def runner():
    cascade, policy = model()
    return tw.Runner(cascade, policy, batch_size=8)


@pytest.fixture(scope="module")
def client():
    cascade, policy = model()
    limits = UploadLimits(images=4, bytes=200_000, pixels=100_000)
    app = make_app(tw.Runner(cascade, policy, batch_size=8), Settings(token="secret", uploads=limits))
    with TestClient(app) as found:
        yield found


def test_every_image_of_many_requests_is_answered_once_and_as_the_runner_does(runner):
    images = torch.randn(120, 3, 32, 32)
    wanted = list(tw.Runner(runner.cascade, runner.policy).predict(images))
    scheduler = Scheduler(runner)
    sizes = np.random.default_rng(0).multinomial(120, [1 / 30] * 30)
    ends = np.cumsum(sizes)
    futures: dict[int, object] = {}

    def send(places):
        for place in places:
            futures[place] = scheduler.submit(images[ends[place] - sizes[place] : ends[place]], 60.0)

    threads = [threading.Thread(target=send, args=(range(start, 30, 3),)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = [reply for place in range(30) for reply in futures[place].result(60)]
    assert [(r.label, r.exit) for r in got] == [(w.label, w.exit) for w in wanted]
    scheduler.close()
    assert len(scheduler) == 0
    assert sum(scheduler.counts.exits) == scheduler.counts.accepted == 120


def test_survivors_of_different_requests_share_a_batch(runner):
    runner.policy = tw.Policy((2.0, 2.0))  # nobody leaves early
    seen = []
    scheduler = Scheduler(runner, on_stage=lambda stage, images, _: seen.append((stage, images)))
    hold = scheduler.call(lambda: time.sleep(0.2))
    futures = [scheduler.submit(torch.randn(1, 3, 32, 32), 60.0) for _ in range(16)]
    for future in [hold, *futures]:
        future.result(60)
    assert seen == [(0, 8), (1, 8), (2, 8), (0, 8), (1, 8), (2, 8)]
    scheduler.close()


def test_full_queues_refuse_and_recover(runner):
    scheduler = Scheduler(runner, capacity=10)
    scheduler.call(lambda: time.sleep(0.3))
    first = scheduler.submit(torch.randn(10, 3, 32, 32), 60.0)
    with pytest.raises(Busy, match="10 of 10") as refused:
        scheduler.submit(torch.randn(1, 3, 32, 32), 60.0)
    assert refused.value.retry_after > 0
    assert len(first.result(60)) == 10
    assert len(scheduler.submit(torch.randn(10, 3, 32, 32), 60.0).result(60)) == 10
    scheduler.close()
    with pytest.raises(Busy, match="going down"):
        scheduler.submit(torch.randn(1, 3, 32, 32), 60.0)


def test_a_deadline_brings_the_last_answer_there_is_or_none(runner):
    runner.policy = tw.Policy((2.0, 2.0))
    slow = runner.step

    def step(index, group):
        time.sleep(0.2)
        return slow(index, group)

    runner.step = step
    scheduler = Scheduler(runner)
    hurried = scheduler.submit(torch.randn(2, 3, 32, 32), 0.1)
    assert [(r.exit, r.hurried) for r in hurried.result(60)] == [(1, True)] * 2
    scheduler.call(lambda: time.sleep(0.2))
    with pytest.raises(Late):
        scheduler.submit(torch.randn(2, 3, 32, 32), 0.05).result(60)
    assert scheduler.counts.late == 2
    scheduler.close()


def test_an_engine_that_fails_fails_its_images_only(runner):
    good = runner.step
    runner.step = lambda index, group: (_ for _ in ()).throw(RuntimeError("out of memory"))
    scheduler = Scheduler(runner)
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.submit(torch.randn(2, 3, 32, 32), 60.0).result(60)
    runner.step = good
    assert len(scheduler.submit(torch.randn(2, 3, 32, 32), 60.0).result(60)) == 2
    assert len(scheduler) == 0
    scheduler.close()


def test_closing_answers_what_was_accepted(runner):
    scheduler = Scheduler(runner)
    scheduler.call(lambda: time.sleep(0.1))
    futures = [scheduler.submit(torch.randn(5, 3, 32, 32), 60.0) for _ in range(6)]
    scheduler.close()
    assert all(len(f.result(0)) == 5 for f in futures)


def test_the_budget_follows_the_load_between_its_limits_and_comes_back():
    policies = [tw.Policy((0.5,), cost=float(c)) for c in range(10)]
    governor = Governor(policies, patience=1.0, limits=Limits(2, 8), calm=1.0)
    assert governor.place == 8
    assert governor.update(1.2, 0.0)
    assert governor.place == 7
    governor.update(10.0, 0.1)
    assert governor.place == 2
    assert not governor.update(10.0, 0.2)
    assert not governor.update(0.8, 5.0)  # short, but not short enough
    assert not governor.update(0.1, 5.5)
    assert governor.update(0.1, 6.1)
    assert governor.place == 3
    for second in range(20):
        governor.update(0.0, 8.0 + 2 * second)
    assert governor.place == 8


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=50))
def test_the_governor_never_leaves_its_limits(moves):
    governor = Governor([tw.Policy((0.5,))] * 10, 1.0, Limits(3, 6))
    now = 0.0
    for wait, step in moves:
        now += step
        governor.update(wait, now)
        assert 3 <= governor.place <= 6


def test_under_load_the_scheduler_moves_to_cheaper_policies():
    cascade, _ = model()
    policies = frontier_of(cascade)
    runner = tw.Runner(cascade, batch_size=4)
    slow = runner.step

    def step(index, group):
        time.sleep(0.01)
        return slow(index, group)

    runner.step = step
    scheduler = Scheduler(runner, governor=Governor(policies, patience=0.05, calm=0.1))
    assert runner.policy == policies[-1]
    futures = [scheduler.submit(torch.randn(4, 3, 32, 32), 60.0) for _ in range(40)]
    lowest = len(policies)
    while not futures[-1].done():
        lowest = min(lowest, scheduler.governor.place)
        time.sleep(0.005)
    assert lowest < len(policies) - 1
    until = time.monotonic() + 30
    while scheduler.governor.place < len(policies) - 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert scheduler.governor.place == len(policies) - 1
    scheduler.close()


def multipart(*files: bytes) -> list:
    return [("images", (f"{i}.png", data, "image/png")) for i, data in enumerate(files)]


def test_three_ways_to_send_an_image_give_the_same_answer(client):
    form = client.post("/predict", files=multipart(*FILES[:2])).json()["results"]
    encoded = [base64.b64encode(data).decode() for data in FILES[:2]]
    as_json = client.post("/predict", json={"images": encoded}).json()["results"]
    urls = client.post("/predict", json={"images": [f"data:image/png;base64,{e}" for e in encoded]}).json()["results"]
    bare = client.post("/predict", content=FILES[0], headers={"Content-Type": "image/png"}).json()["results"]
    plain = [{k: v for k, v in row.items() if k != "name"} for row in form]
    assert [{k: v for k, v in row.items() if k != "name"} for row in as_json] == plain
    assert [{k: v for k, v in row.items() if k != "name"} for row in urls] == plain
    assert {k: v for k, v in bare[0].items() if k != "name"} == plain[0]
    runner = client.app.state.service.runner
    wanted = list(tw.Runner(runner.cascade, runner.policy).predict(FILES[:2]))
    assert [(row["label"], row["exit"], row["macs"]) for row in plain] == [(w.label, w.exit, w.macs) for w in wanted]


def test_all_exits_show_what_a_larger_budget_would_answer(client):
    found = client.post("/predict?all_exits=1", files=multipart(FILES[0])).json()["results"][0]
    assert len(found["exits"]) == 3
    assert found["exits"][found["exit"] - 1]["label"] == found["label"]


def test_one_bad_image_among_good_ones_is_said_and_the_others_answered(client):
    rows = client.post("/predict", files=multipart(FILES[0], b"no image", FILES[1])).json()["results"]
    assert "error" in rows[1]
    assert "label" in rows[0]
    assert "label" in rows[2]


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("send", "status", "message"),
    [
        ({"content": b""}, 422, "no images"),
        ({"content": b"not an image"}, 422, "known format"),
        ({"content": FILES[0][:60]}, 422, "image"),
        ({"content": png(400, 400)}, 422, "over the limit"),
        ({"content": bytes(200_001)}, 413, "over 200,000 bytes"),
        ({"files": multipart(*FILES[:5])}, 400, "Too many files"),
        ({"files": multipart(b"")}, 422, "empty"),
        ({"json": {"images": [base64.b64encode(FILES[0]).decode()] * 5}}, 413, "at most 4"),
        ({"json": {"images": ["?"]}}, 400, "not base64"),
        ({"json": {"images": "x"}}, 422, "expected"),
        ({"json": []}, 422, "expected"),
        ({"json": {"images": []}}, 422, "no images"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "not JSON"),
        ({"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}, 400, "not JSON"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "multipart"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=a"}}, 400, "multipart"),
        ({"content": FILES[0], "headers": {"X-Deadline-Ms": "soon"}}, 400, "not a number"),
        ({"content": FILES[0], "headers": {"X-Deadline-Ms": "-1"}}, 400, "above 0"),
    ],
)
def test_malformed_requests_get_one_clear_line(client, send, status, message):
    response = client.post("/predict", **send)
    assert response.status_code == status, response.text
    said = response.json()["error"]
    assert message in said
    assert "\n" not in said
    assert "Traceback" not in response.text


@given(data=st.data())
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_damaged_files_never_break_it(client, data):
    """Real files with bytes changed, cut or doubled, sent in every way."""
    file = bytearray(data.draw(st.sampled_from(FILES)))
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, len(file) - 1))
        file[place] = data.draw(st.integers(0, 255))
    file = bytes(file[: data.draw(st.integers(1, len(file)))]) * data.draw(st.integers(1, 2))
    way = data.draw(st.sampled_from(["form", "json", "bare", "wrong form"]))
    if way == "form":
        response = client.post("/predict", files=multipart(file))
    elif way == "json":
        response = client.post("/predict", json={"images": [base64.b64encode(file).decode()]})
    elif way == "bare":
        response = client.post("/predict", content=file)
    else:
        response = client.post("/predict", content=file, headers={"Content-Type": "multipart/form-data; boundary=IDAT"})
    assert response.status_code in (200, 400, 413, 422)
    assert "Traceback" not in response.text
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("name", ["../../etc/passwd", "..\\..\\boot.ini", "a\x00b.png", "x" * 1000, "\u202egnp.exe"])
def test_file_names_are_words_and_nothing_else(client, name):
    rows = client.post("/predict", files=[("images", (name, FILES[0], "image/png"))]).json()["results"]
    assert len(rows[0]["name"]) <= 100
    assert "/" not in rows[0]["name"]
    assert "label" in rows[0]


def test_health_ready_and_metrics(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json()["ready"]
    client.post("/predict", files=multipart(FILES[0]))
    text = client.get("/metrics").text
    for name in (
        "tokensworth_requests_total",
        "tokensworth_exits",
        "tokensworth_queue_images",
        "tokensworth_stage_seconds",
    ):
        assert name in text
    assert client.get("/openapi.json").json()["paths"].keys() >= {
        "/predict",
        "/health",
        "/ready",
        "/metrics",
        "/policy",
    }
    assert "drop" in client.get("/").text


def test_the_policy_is_read_by_all_and_changed_with_the_token_alone(client):
    before = client.get("/policy").json()["policy"]["thresholds"]
    wanted = {"thresholds": [0.0, 0.0]}
    assert client.put("/policy", json=wanted).status_code == 401
    assert client.put("/policy", json=wanted, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.put("/policy", json=wanted, headers=TOKEN).json()["policy"]["thresholds"] == [0.0, 0.0]
    assert client.post("/predict", files=multipart(FILES[0])).json()["results"][0]["exit"] == 1
    for bad in ({"thresholds": [0.5]}, {"thresholds": "x"}, {"hope": 1}, [], {"budget": "1G"}):
        response = client.put("/policy", json=bad, headers=TOKEN)
        assert response.status_code in (409, 422), bad
        assert "\n" not in response.json()["error"]
    client.put("/policy", json={"thresholds": before}, headers=TOKEN)


def test_a_budget_is_set_on_the_frontier():
    cascade, _ = model()
    policies = frontier_of(cascade)
    app = make_app(tw.Runner(cascade), Settings(token="secret"), Governor(policies, 1.0))
    with TestClient(app) as client:
        costs = client.get("/policy").json()["costs"]
        found = client.put("/policy", json={"budget": costs[1] + 1}, headers=TOKEN).json()
        assert found["limits"] == {"cheapest": 1, "best": 1}
        assert found["policy"]["cost"] == costs[1]
        assert (
            client.put("/policy", json={"limits": [0, len(costs) - 1]}, headers=TOKEN).json()["place"] == len(costs) - 1
        )
        for bad in ({"budget": 1}, {"limits": [3, 1]}, {"limits": 3}, {"thresholds": [0.5, 0.5]}):
            assert client.put("/policy", json=bad, headers=TOKEN).status_code in (409, 422)


def test_a_full_service_says_when_to_come_back():
    cascade, policy = model()
    app = make_app(tw.Runner(cascade, policy), Settings(capacity=4))
    with TestClient(app) as client:
        scheduler = client.app.state.service.scheduler
        scheduler.call(lambda: time.sleep(0.5))
        held = scheduler.submit(torch.randn(4, 3, 32, 32), 60.0)
        response = client.post("/predict", files=multipart(FILES[0]))
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        held.result(60)
        assert client.post("/predict", files=multipart(FILES[0])).status_code == 200
        assert client.put("/policy", json={"thresholds": [0, 0]}, headers=TOKEN).status_code == 403
