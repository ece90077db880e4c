"""`tokensworth compare`: many ways to run, on the same images, machine and minute, one file for each as it is done."""

import base64
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tokensworth.cascade import Cascade, model_hash
from tokensworth.data.depth import DepthSet
from tokensworth.data.sources import ImageSet
from tokensworth.dense.model import DepthModel
from tokensworth.errors import DataError
from tokensworth.exits.calibration import Calibration
from tokensworth.exits.outcome import leaving_exit
from tokensworth.exits.policy import Policy
from tokensworth.exits.solve import frontier
from tokensworth.files import write_json
from tokensworth.jobs.answers import answers, labelled_batches
from tokensworth.jobs.depth import depth_input, evaluate_depth
from tokensworth.jobs.models import ImageBatches, evaluation_transform, open_model, save_model
from tokensworth.jobs.sides import Side
from tokensworth.measure.describe import describe
from tokensworth.measure.machine import machine
from tokensworth.measure.macs import count_macs
from tokensworth.measure.memory import peak_memory
from tokensworth.measure.timing import alternate
from tokensworth.run.runner import Runner
from tokensworth.tokens.method import Method, adapt, method_from_dict, method_of, readapt
from tokensworth.train.unlabelled import can_fit, fit_unlabelled

# Images run alone where what one costs depends on it; images timed alone; images that selectors are fitted to.
_ALONE, _SINGLES, _FITTED = 256, 32, 1500
# Options that what a method learns does not depend on.
_FREE = ("keep", "mass", "alpha")


@dataclass(frozen=True)
class Images:
    """Images with labels, or with depth: settings are chosen on some and reported on others."""

    calibration: ImageSet | DepthSet
    test: ImageSet | DepthSet


@dataclass(frozen=True)
class Measured:
    """What one side did.

    Attributes:
        curve, setting: of the side.
        test, calibration: (N,), whether each image was answered rightly; of depth, the share of its pixels within a
            factor of 1.25.
        macs: mean MACs per image of the test images; exact where they do not depend on the image.
        millis, reference_millis: per image, median, in batches; of this side and of the plain model beside it.
        p50, reference_p50: milliseconds of one image alone, median; of this side and of the plain model beside it.
        peak_bytes: most tensor memory of one batch.
        keeps_grid: whether the whole token grid is there in the end.
        errors: of depth, the field's measures of each test image.
    """

    curve: str
    setting: str
    test: np.ndarray
    calibration: np.ndarray
    macs: float
    millis: float
    reference_millis: float
    p50: float
    reference_p50: float
    peak_bytes: int
    keeps_grid: bool
    errors: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; right or wrong as bits in base64."""
        return {**asdict(self), "test": _packed(self.test), "calibration": _packed(self.calibration)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Measured":
        """The inverse of `to_dict`."""
        return cls(**{**values, "test": _bits(values["test"]), "calibration": _bits(values["calibration"])})


def _packed(right: np.ndarray) -> dict[str, Any]:
    if right.dtype != bool:
        return {"values": right.tolist()}
    return {"count": len(right), "bits": base64.b64encode(np.packbits(right).tobytes()).decode()}


def _bits(value: dict[str, Any]) -> np.ndarray:
    if "values" in value:
        return np.array(value["values"])
    return np.unpackbits(np.frombuffer(base64.b64decode(value["bits"]), dtype=np.uint8), count=value["count"]) > 0


def _logits(out: Any) -> Tensor:
    return out[-1] if isinstance(out, (list, tuple)) else out


class _Way:
    """A model, ready to answer batches of normalized images with labels."""

    def __init__(self, model: nn.Module, policy: Policy | None, batch_size: int) -> None:
        self.model, self.policy = model.eval(), policy
        several = isinstance(model, Cascade) and model.num_stages > 1
        self.runner = Runner(model, policy, batch_size=batch_size) if several else None  # type: ignore[arg-type]

    def __call__(self, images: Tensor) -> Tensor:
        if self.runner is not None:
            return self.runner.run(images)[0]
        with torch.inference_mode():
            out = self.model(images)
            return out if isinstance(self.model, DepthModel) else _logits(out).argmax(dim=1)


def batches_of(model: nn.Module, images: ImageSet | DepthSet, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images as a model wants them, with labels, or with depth (B, H, W)."""
    if isinstance(model, DepthModel):
        if not isinstance(images, DepthSet):
            raise DataError(f"{images.origin}: a depth model needs images with depth")
        for start in range(0, len(images), batch_size):
            pairs = [images.read(i) for i in range(start, min(start + batch_size, len(images)))]
            if len({image.size for image, _ in pairs}) > 1:
                raise DataError(f"{images.origin}: to be timed, images must be of one size")
            inputs = torch.stack([depth_input(image, model.config) for image, _ in pairs])
            yield inputs, torch.stack([torch.from_numpy(depth) for _, depth in pairs])
        return
    if isinstance(images, DepthSet):
        raise DataError(f"{images.origin}: images with depth need a depth model")
    if isinstance(model, Cascade):
        yield from labelled_batches(images, model.config, batch_size)
    else:
        yield from ImageBatches(images, evaluation_transform(model), batch_size)


class Comparison:
    """Measures sides one after the other; what is done is kept in a folder and not done again.

    Args:
        out: folder of the results.
        images: calibration and test images.
        batch_size: of the timings.
        repeats: timed rounds, each side and the plain model in turn; medians count.
        seed: of random token choices.
        device: where to run; what is available where empty.
        say: told how many sides are done and which is under way.
    """

    def __init__(
        self,
        out: Path,
        images: Images,
        *,
        batch_size: int = 64,
        repeats: int = 5,
        seed: int = 0,
        device: str = "",
        say: Callable[[int, str], None] = lambda _, __: None,
    ) -> None:
        self.out, self.images, self.seed, self.device, self.say = out, images, seed, device, say
        self.batch_size, self.repeats = batch_size, repeats
        self.data = images.calibration.digest() + images.test.digest()
        self._reference: _Way | None = None
        self._cascade: tuple[str, Calibration, Calibration] | None = None

    def run(self, sides: list[Side]) -> list[Measured]:
        """All sides, the plain model first among them."""
        found = []
        for number, side in enumerate(sides):
            self.say(number, f"{side.curve}, {side.setting}")
            found.append(self.measure(side, sides[0]))
        return found

    def measure(self, side: Side, plain: Side) -> Measured:
        """One side, from its file where it has been measured before under the same circumstances."""
        torch.manual_seed(self.seed)
        model = self._open(side)
        place = self._identity(model, side)
        path = self.out / "sides" / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"
        if path.exists():
            known = Measured.from_dict(json.loads(path.read_text())["measured"])
            return replace(known, curve=side.curve, setting=side.setting)
        if self._reference is None:
            self._reference = _Way(self._open(plain), None, self.batch_size)
        found = self._measure(model, side)
        write_json(path, {"identity": place, "machine": machine(), "measured": found.to_dict()})
        return found

    def _identity(self, model: nn.Module, side: Side) -> str:
        """What a result depends on."""
        parts = (model_hash(model), side.place, self.data, self.batch_size, self.repeats, self.seed)
        return json.dumps([*parts, str(next(model.parameters()).device), torch.get_num_threads()])

    def _open(self, side: Side) -> nn.Module:
        model = open_model(side.source, self.device)
        if side.method is None:
            return model
        if not can_fit(side.method):
            return adapt(model, side.method)
        fitted = self._fitted(model, side)
        known = method_of(fitted)
        assert known is not None
        free = {k: v for k, v in side.method.to_dict().items() if k in _FREE}
        return readapt(fitted, method_from_dict({**known.to_dict(), **free}))

    def _fitted(self, model: nn.Module, side: Side) -> nn.Module:
        """The model with a method that has learned what it learns without labels, on calibration images."""
        assert side.method is not None
        known = hashlib.sha256(f"{model_hash(model)}{_learning(side.method)}{self.data}".encode()).hexdigest()[:16]
        folder = self.out / "fitted" / known
        if not folder.exists():
            adapt(model, side.method)
            count = min(_FITTED, len(self.images.calibration))
            few = self.images.calibration.select(np.arange(count))
            fit_unlabelled(model, list(batches_of(model, few, self.batch_size)))
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            save_model(model, part)
            part.rename(folder)
        return open_model(str(folder), self.device)

    def _measure(self, model: nn.Module, side: Side) -> Measured:
        assert self._reference is not None
        policy, macs, right, errors = None, 0.0, {}, {}
        if side.place is not None:
            assert isinstance(model, Cascade)
            policy, macs, right = self._policy(model, side)
        way = _Way(model, policy, self.batch_size)
        if policy is None:
            for name, images in (("calibration", self.images.calibration), ("test", self.images.test)):
                right[name], errors = self._judge(way, images)
            macs = self._macs(model)
        millis, reference_millis = self._times(way, self.batch_size, 1)
        p50, reference_p50 = self._times(way, 1, _SINGLES)
        first = self._first(model, self.batch_size)
        method = method_of(model)
        return Measured(
            curve=side.curve,
            setting=side.setting,
            test=right["test"],
            calibration=right["calibration"],
            macs=macs,
            millis=millis,
            reference_millis=reference_millis,
            p50=p50,
            reference_p50=reference_p50,
            peak_bytes=peak_memory(lambda: way(first), first.device),
            keeps_grid=policy is None and (method is None or method.keeps_grid),
            errors=errors,
        )

    def _judge(self, way: _Way, images: ImageSet | DepthSet) -> tuple[np.ndarray, dict[str, list[float]]]:
        """What `Measured` says of each image."""
        if isinstance(way.model, DepthModel) and isinstance(images, DepthSet):
            found = evaluate_depth(way.model, images, batch_size=self.batch_size, mirrored=False)
            rows = [e.to_dict() for e in found if e is not None]
            if not rows:
                raise DataError(f"{images.origin}: no image has a pixel of known depth in the range that counts")
            return np.array([row["delta1"] for row in rows]), {name: [row[name] for row in rows] for name in rows[0]}
        place = self._place(way.model)
        hits = [way(x.to(place)).cpu() == y for x, y in batches_of(way.model, images, self.batch_size)]
        return torch.cat(hits).numpy(), {}

    @staticmethod
    def _place(model: nn.Module) -> torch.device:
        return next(model.parameters()).device

    def _first(self, model: nn.Module, count: int) -> Tensor:
        """The first test images as one batch, gone over again where there are too few."""
        few = self.images.test.select(np.arange(count) % len(self.images.test))
        return next(batches_of(model, few, count))[0].to(self._place(model))

    def _times(self, way: _Way, batch_size: int, batches: int) -> tuple[float, float]:
        """Milliseconds per image of a side and of the plain model, in turn, medians."""
        assert self._reference is not None
        sides = {"this": way, "plain": self._reference}
        images = {name: self._first(w.model, batch_size * batches).split(batch_size) for name, w in sides.items()}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(batches):
            calls = {name: (lambda w=w, x=images[name][number]: w(x)) for name, w in sides.items()}
            lead = int(batch_size == 1)
            for name, times in alternate(calls, self.repeats, device=self._place(way.model), lead=lead).items():
                taken[name] += times.seconds
        return tuple(1000 * float(np.median(taken[name])) / batch_size for name in ("this", "plain"))  # type: ignore[return-value]

    def _macs(self, model: nn.Module) -> float:
        method = method_of(model)
        if method is None or not method.per_image:
            return float(describe(model).macs)
        alone = self._first(model, min(_ALONE, len(self.images.test))).split(1)
        return float(np.mean([count_macs(lambda x=x: model(x)) for x in alone]))

    def _policy(self, cascade: Cascade, side: Side) -> tuple[Policy, float, dict[str, np.ndarray]]:
        """A policy of a cascade's frontier; its mean MACs and right answers."""
        known = model_hash(cascade)
        if self._cascade is None or self._cascade[0] != known:
            calibration, test = self.images.calibration, self.images.test
            if isinstance(calibration, DepthSet) or isinstance(test, DepthSet):
                raise DataError(f"{test.origin}: images with depth need a depth model")
            self._cascade = (known, answers(cascade, calibration), answers(cascade, test))
        _, calibration, test = self._cascade
        policies = frontier(calibration).policies
        costs = np.array([p.cost for p in policies])
        wanted = costs[0] + (side.place or 0.0) * (costs[-1] - costs[0])
        policy = policies[int(np.abs(costs - wanted).argmin())]
        right, macs = {}, 0.0
        for name, seen in (("calibration", calibration), ("test", test)):
            exits = leaving_exit(seen.scores, np.asarray(policy.thresholds))
            right[name] = np.take_along_axis(seen.right, exits[None], axis=0)[0].astype(bool)
            macs = float(np.asarray(seen.exit_costs)[exits].mean())
        return policy, macs, right


def _learning(method: Method) -> str:
    """Options that what a method learns depends on."""
    return json.dumps({k: v for k, v in method.to_dict().items() if k not in _FREE})


def check_images(images: Images) -> None:
    """Refuses test images that settings were chosen on.

    Raises:
        DataError: the two sets share images.
    """

    def names(part: ImageSet | DepthSet) -> set[bytes | str]:
        if isinstance(part, DepthSet):
            return {str(color.resolve()) for color, _ in part.pairs}
        return {hashlib.sha256(i).digest() if isinstance(i, bytes) else str(i.resolve()) for i in part.items}

    shared = len(names(images.calibration) & names(images.test))
    if shared:
        raise DataError(f"{shared} of the test images are among the calibration images; choose on others")
