"""What Prometheus reads."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokensworth.serve.scheduler import Scheduler

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counters of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        to = self.registry
        self.requests = Counter("tokensworth_requests", "Requests by HTTP status.", ["status"], registry=to)
        self.latency = Histogram(
            "tokensworth_request_seconds", "Seconds of answered requests.", buckets=_SECONDS, registry=to
        )
        self.stages = Histogram(
            "tokensworth_stage_seconds",
            "Seconds of a stage's call.",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.images = Counter("tokensworth_stage_images", "Images seen by each stage.", ["stage"], registry=to)
        self.exits = Gauge("tokensworth_exits", "Images that left at each exit so far.", ["exit"], registry=to)
        self.refused = Gauge("tokensworth_refused_images", "Images refused since the queues were full.", registry=to)
        self.queue = Gauge("tokensworth_queue_images", "Images that wait for each stage.", ["stage"], registry=to)
        self.wait = Gauge("tokensworth_expected_wait_seconds", "Seconds an image would wait now.", registry=to)
        self.place = Gauge("tokensworth_policy_place", "Place of the policy on the frontier, cheapest 0.", registry=to)
        self.cost = Gauge("tokensworth_policy_cost", "Mean cost that the policy promises.", registry=to)

    def on_stage(self, stage: int, images: int, seconds: float) -> None:
        """Told of every call of the engine."""
        self.stages.labels(str(stage + 1)).observe(seconds)
        self.images.labels(str(stage + 1)).inc(images)

    def text(self, scheduler: Scheduler) -> bytes:
        """The page, in Prometheus' text format."""
        for place, count in enumerate(scheduler.counts.exits):
            self.exits.labels(str(place + 1)).set(count)
        for place, count in enumerate(scheduler.waiting):
            self.queue.labels(str(place + 1)).set(count)
        self.refused.set(scheduler.counts.refused)
        self.wait.set(scheduler.expected_wait())
        if scheduler.governor is not None:
            self.place.set(scheduler.governor.place)
        self.cost.set(scheduler.runner.policy.cost)
        return generate_latest(self.registry)
