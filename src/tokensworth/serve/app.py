"""The service's addresses: /predict, /health, /ready, /metrics, /policy, and a page to try it on."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from torch import Tensor

from tokensworth.data.decode import decode_image
from tokensworth.data.tensors import normalize
from tokensworth.errors import DataError, TokensworthError
from tokensworth.exits.goals import Macs
from tokensworth.exits.policy import Policy
from tokensworth.exits.scores import read_answer
from tokensworth.run.inputs import make_transform
from tokensworth.run.runner import Runner
from tokensworth.serve.governor import Governor, Limits
from tokensworth.serve.metrics import Metrics
from tokensworth.serve.scheduler import Busy, Late, Scheduler
from tokensworth.serve.uploads import BadRequest, Upload, UploadLimits, read_uploads


@dataclass(frozen=True)
class Settings:
    """How a service behaves.

    Attributes:
        capacity: images that may be in the house; more are refused with 503.
        deadline: seconds that a request may take; one that asks for less gets less.
        token: what a change of the policy must carry as its bearer token; empty forbids changes.
        uploads: limits on what a request may bring.
    """

    capacity: int = 1024
    deadline: float = 5.0
    token: str = ""
    uploads: UploadLimits = field(default_factory=UploadLimits)


class Service:
    """All that the addresses share."""

    def __init__(self, runner: Runner, settings: Settings, governor: Governor | None) -> None:
        self.runner, self.settings = runner, settings
        self.metrics = Metrics()
        self.scheduler = Scheduler(runner, settings.capacity, governor, self.metrics.on_stage)
        self.transform = make_transform(runner.cascade.config)
        self.ready = False

    def warm_up(self) -> None:
        """Runs every stage once at batch 1 and at the full batch, so that the first request does not pay for it."""
        config = self.runner.cascade.config
        for count in (1, self.runner.batch_size):
            images = torch.zeros(count, config.in_chans, config.image_size, config.image_size)
            self.scheduler.call(lambda images=images: self.all_exits(images)).result()
        self.ready = True

    def decode(self, upload: Upload) -> Tensor:
        """uint8 (C, S, S).

        Raises:
            DataError: not an image, or too large.
        """
        return self.transform(decode_image(upload.data, upload.name, self.settings.uploads.pixels))

    def all_exits(self, images: Tensor) -> list[list[dict[str, Any]]]:
        """What every exit says: per image and exit label, confidence, MACs. Only the engine's thread may call it."""
        policy, state = self.runner.policy, None
        rows: list[list[dict[str, Any]]] = [[] for _ in images]
        with torch.inference_mode():
            for index in range(self.runner.cascade.num_stages):
                logits, state = self.runner.engine.run_stage(index, images, state)
                heat = policy.temperatures[index] if policy.temperatures else 1.0
                _, sure, labels = read_answer(logits, heat)
                for row, label, confidence in zip(rows, labels.tolist(), sure.tolist(), strict=True):
                    row.append(self.named(label, confidence) | {"macs": self.runner.exit_macs[index]})
        return rows

    def named(self, label: int, confidence: float) -> dict[str, Any]:
        """A label with its name, where it has one."""
        names = self.runner.cascade.config.class_names
        return {"label": label, "class_name": names[label] if names else "", "confidence": round(confidence, 6)}

    async def predict(self, request: Request) -> dict[str, Any]:
        """Answers a request.

        Raises:
            BadRequest, Busy, Late: it cannot be answered.
        """
        uploads = await read_uploads(request, self.settings.uploads)
        deadline = self._deadline(request)
        found: list[Tensor | DataError] = await run_in_threadpool(lambda: [self._try_decode(u) for u in uploads])
        good = [image for image in found if isinstance(image, Tensor)]
        if not good:
            first = next(error for error in found if isinstance(error, DataError))
            raise BadRequest(422, str(first))
        if len(good) > self.settings.capacity:
            raise BadRequest(413, f"{len(good)} images; at most {self.settings.capacity} in a request")
        config = self.runner.cascade.config
        images = normalize(torch.stack(good), config.mean, config.std)
        replies = iter(await asyncio.wrap_future(self.scheduler.submit(images, deadline)))
        answers: list[dict[str, Any]] = []
        for upload, image in zip(uploads, found, strict=True):
            if isinstance(image, DataError):
                answers.append({"name": upload.name, "error": str(image)})
                continue
            reply = next(replies)
            said = self.named(reply.label, reply.confidence)
            rest = {"exit": reply.exit, "macs": reply.macs, "hurried": reply.hurried}
            answers.append({"name": upload.name, **said, **rest})
        if request.query_params.get("all_exits") in ("1", "true"):
            every = iter(await asyncio.wrap_future(self.scheduler.call(lambda: self.all_exits(images))))
            for answer in answers:
                if "error" not in answer:
                    answer["exits"] = next(every)
        return {"results": answers}

    def _try_decode(self, upload: Upload) -> Tensor | DataError:
        try:
            return self.decode(upload)
        except DataError as error:
            return error

    def _deadline(self, request: Request) -> float:
        text = request.headers.get("x-deadline-ms")
        if text is None:
            return self.settings.deadline
        try:
            wanted = float(text) / 1000
        except ValueError:
            raise BadRequest(400, "X-Deadline-Ms is not a number") from None
        if not 0 < wanted <= 3600:
            raise BadRequest(400, "X-Deadline-Ms must lie above 0 and be at most an hour")
        return min(wanted, self.settings.deadline)

    def policy(self) -> dict[str, Any]:
        """The policy in force and where it may move."""
        value: dict[str, Any] = {"policy": asdict(self.runner.policy)}
        governor = self.scheduler.governor
        if governor is not None:
            costs = [policy.cost for policy in governor.policies]
            value |= {"place": governor.place, "limits": asdict(governor.limits), "costs": costs}
        return value

    def set_policy(self, wanted: Any) -> None:
        """Changes the policy: `{"budget": "1.2G"}`, `{"limits": [cheapest, best]}` or `{"thresholds": [...]}`.

        Raises:
            BadRequest: none of these, or out of range.
        """
        if not isinstance(wanted, dict) or len(wanted) != 1:
            raise BadRequest(422, 'expected one of {"budget": "1.2G"}, {"limits": [0, 9]} or {"thresholds": [0.8]}')
        (name, value), governor = next(iter(wanted.items())), self.scheduler.governor
        try:
            if name == "thresholds":
                if governor is not None:
                    raise BadRequest(409, "the budget follows the load: set its limits, or a budget")
                policy = Policy(
                    tuple(value),
                    self.runner.policy.score,
                    self.runner.policy.temperatures,
                    rule=self.runner.policy.rule,
                    goal="set by hand",
                )
                policy.check(self.runner.cascade.num_stages, self.runner.model)
                self.scheduler.call(lambda: setattr(self.runner, "policy", policy)).result()
                return
            if governor is None:
                raise BadRequest(409, "exported without a frontier: only thresholds can be set")
            limits = self._limits(name, value, governor)
            self.scheduler.call(lambda: self.scheduler.limit(limits)).result()
        except (TypeError, ValueError, TokensworthError) as error:
            raise BadRequest(422, str(error).splitlines()[0]) from None

    @staticmethod
    def _limits(name: str, value: Any, governor: Governor) -> Limits:
        if name == "budget":
            amount = Macs(value).amount
            fitting = [i for i, policy in enumerate(governor.policies) if policy.cost <= amount]
            if not fitting:
                raise BadRequest(
                    422, f"the budget is below the cheapest policy's cost, {governor.policies[0].cost:.4g}"
                )
            return Limits(fitting[-1], fitting[-1])
        if name == "limits":
            low, high = value
            return Limits(int(low), int(high))
        raise BadRequest(422, f"unknown entry {name!r}")


def make_app(runner: Runner, settings: Settings | None = None, governor: Governor | None = None) -> FastAPI:
    """The service as an ASGI application.

    Args:
        runner: runs the stages.
        settings: limits, deadline, token.
        governor: a budget that follows the load; None for the runner's policy alone.
    """
    service = Service(runner, settings or Settings(), governor)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(service.warm_up)
        yield
        service.ready = False
        await run_in_threadpool(service.scheduler.close)

    app = FastAPI(title="tokensworth", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    app.state.service = service

    async def answered(work: Callable[[], Any]) -> Response:
        """What a piece of work gives, or its error as one line of JSON."""
        begun, retry = time.monotonic(), None
        try:
            value, status = await work(), 200
        except BadRequest as error:
            value, status = {"error": str(error)}, error.status
        except Busy as error:
            value, status, retry = {"error": str(error)}, 503, error.retry_after
        except Late as error:
            value, status = {"error": str(error)}, 504
        except Exception:  # whatever else: the client learns no details
            value, status = {"error": "the service failed on this request"}, 500
        service.metrics.requests.labels(str(status)).inc()
        if status == 200:
            service.metrics.latency.observe(time.monotonic() - begun)
        headers = {"Retry-After": str(max(1, round(retry)))} if retry is not None else None
        return JSONResponse(value, status, headers)

    @app.post("/predict", summary="Label images: multipart files, JSON with base64, or one image as the body")
    async def predict(request: Request) -> Response:
        return await answered(lambda: service.predict(request))

    @app.get("/health", summary="Whether the process lives")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", summary="Whether it takes requests")
    async def ready() -> Response:
        state = {"ready": service.ready, "waiting": service.scheduler.waiting}
        return JSONResponse(state, 200 if service.ready else 503)

    @app.get("/metrics", summary="For Prometheus")
    async def metrics() -> Response:
        return Response(service.metrics.text(service.scheduler), media_type="text/plain; version=0.0.4")

    @app.get("/policy", summary="The policy in force")
    async def policy() -> dict[str, Any]:
        return service.policy()

    @app.put("/policy", summary="Change the policy, behind the token")
    async def put_policy(request: Request) -> Response:
        async def work() -> dict[str, Any]:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not service.settings.token:
                raise BadRequest(403, "this service was started without a token, so its policy cannot be changed")
            if not hmac.compare_digest(given.encode(), service.settings.token.encode()):
                raise BadRequest(401, "wrong or missing bearer token")
            try:
                wanted = await request.json()
            except ValueError:
                raise BadRequest(400, "the body is not JSON") from None
            await run_in_threadpool(service.set_policy, wanted)
            return service.policy()

        return await answered(work)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse((files("tokensworth.serve") / "page.html").read_text(encoding="utf-8"))

    return app
