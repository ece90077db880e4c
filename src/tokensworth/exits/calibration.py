"""What each exit said of each calibration image: all that a solver needs, and no image any more."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional as F

from tokensworth.cascade import Cascade, model_hash
from tokensworth.errors import DataError, PolicyError
from tokensworth.exits.learned import LEARNED, Rule, fit_rule, remember
from tokensworth.exits.scores import make_judge, read_answer, softmax
from tokensworth.files import atomic_path
from tokensworth.measure.macs import stage_macs


@dataclass(frozen=True)
class Calibration:
    """Per exit and image: how sure, what answer; per image: the truth; per stage: the cost.

    Attributes:
        scores: (S, N) float32, higher is surer.
        confidences: (S, N) float32, the largest probability, for calibration errors.
        predictions: (S, N) int64.
        labels: (N,) int64.
        stage_costs: cost of running each stage on one image.
        unit: of the costs: `MACs` or `ms`.
        score: name of the score.
        temperatures: per exit; logits are divided by them.
        model: hash of the model.
        context: for times: engine, batch, threads, dtype and machine they were measured with.
        rule: of the learned score.
    """

    scores: np.ndarray
    confidences: np.ndarray
    predictions: np.ndarray
    labels: np.ndarray
    stage_costs: tuple[float, ...]
    unit: str = "MACs"
    score: str = "confidence"
    temperatures: tuple[float, ...] = ()
    model: str = ""
    context: tuple[tuple[str, Any], ...] = ()
    rule: Rule = ()

    def __post_init__(self) -> None:
        stages, count = self.scores.shape
        shapes = {self.confidences.shape, self.predictions.shape, (len(self.stage_costs), len(self.labels))}
        if shapes != {(stages, count)} or count == 0:
            raise DataError("calibration: scores, predictions, labels and costs do not fit together, or are empty")
        if not np.isfinite(self.scores).all():
            raise DataError("calibration: scores that are not finite; the model's weights may be damaged")

    @property
    def right(self) -> np.ndarray:
        """(S, N) bool: whether each exit's answer is right."""
        return self.predictions == self.labels

    @property
    def exit_costs(self) -> np.ndarray:
        """(S,) cost of leaving at each exit: the stages up to it, summed."""
        return np.cumsum(np.asarray(self.stage_costs, dtype=np.float64))

    @property
    def anytime(self) -> list[float]:
        """Accuracy of each exit alone, as shares."""
        return [float(row.mean()) for row in self.right]

    def with_costs(self, stage_costs: Sequence[float], unit: str, context: dict[str, Any]) -> "Calibration":
        """The same answers under other costs, for example measured milliseconds."""
        items = tuple(sorted(context.items()))
        return replace(self, stage_costs=tuple(stage_costs), unit=unit, context=items)

    def select(self, index: np.ndarray) -> "Calibration":
        """The images at `index` (K,) only."""
        rows = {k: getattr(self, k)[:, index] for k in ("scores", "confidences", "predictions")}
        return replace(self, labels=self.labels[index], **rows)

    def calibration_errors(self, bins: int = 15) -> list[float]:
        """Expected calibration error of each exit: mean gap of confidence and accuracy over equal bins."""
        return [expected_calibration_error(c, r, bins) for c, r in zip(self.confidences, self.right, strict=True)]

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file atomically."""
        arrays = {k: np.ascontiguousarray(getattr(self, k)) for k in _ARRAYS}
        rest = {k: getattr(self, k) for k in _REST}
        with atomic_path(path) as temporary:
            save_file(arrays, temporary, metadata={"calibration": json.dumps(rest)})

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Reads what `save` wrote.

        Raises:
            DataError: missing, cut short or not a calibration.
        """
        try:
            with safe_open(str(path), framework="np") as file:
                rest = json.loads(file.metadata()["calibration"])
                arrays = {key: file.get_tensor(key) for key in _ARRAYS}
            for key in ("stage_costs", "temperatures"):
                rest[key] = tuple(rest[key])
            rest["context"] = tuple((k, v) for k, v in rest["context"])
            rest["rule"] = tuple(tuple(numbers) for numbers in rest.get("rule", ()))
            return cls(**arrays, **rest)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is not a calibration ({error}); make it with `tokensworth calibrate`") from None


_ARRAYS = ("scores", "confidences", "predictions", "labels")
_REST = ("stage_costs", "unit", "score", "temperatures", "model", "context", "rule")


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Mean over bins of |accuracy - confidence|, weighted by their size (Guo et al. 2017, equation 3)."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gap = np.bincount(place, right.astype(float) - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(right))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature that minimizes the cross-entropy of logits (N, C) under labels (N,) (Guo et al. 2017).

    Kept between 1/20 and 20, since answers no better than chance would drive it to infinity.
    """
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_t], max_iter=60, line_search_fn="strong_wolfe")
    logits, labels = logits.double().clone(), labels.clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / log_t.exp(), labels)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[arg-type]
    return min(max(float(log_t.detach().exp()), 0.05), 20.0)


def calibrate(
    cascade: Cascade,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    score: str = "confidence",
    temperature: bool | Sequence[float] = False,
    rule: Rule = (),
) -> Calibration:
    """Runs every exit on labelled images and keeps what the solvers need.

    Args:
        cascade: the model; it is put into evaluation mode.
        batches: pairs of normalized images (B, C, S, S) and labels (B,), for example a DataLoader.
        score: `confidence`, `entropy`, `margin`, `random` or `learned`.
        temperature: fit one temperature per exit first, which takes all logits in memory; or the temperatures to use.
        rule: of the learned score; fitted on these very images where empty, which takes all logits in memory.

    Raises:
        DataError: no images, labels outside the model's classes, or answers that are not finite.
        PolicyError: an unknown score.
    """
    cascade.eval()
    model, costs = model_hash(cascade), [float(s.total) for s in stage_macs(cascade)]
    if temperature is True or (score == LEARNED and not rule):
        pairs = list(_answers(cascade, batches))
        if not pairs:
            raise DataError("calibration: no images")
        exits = [torch.cat(rows) for rows in zip(*(exits for exits, _ in pairs), strict=True)]
        labels = torch.cat([labels for _, labels in pairs])
        return calibrate_logits(exits, labels, costs, score=score, temperature=temperature, rule=rule, model=model)
    temperatures = tuple(temperature) if temperature else (1.0,) * cascade.num_stages
    return _collect(_answers(cascade, batches), costs, score, temperatures, model, rule)


def calibrate_logits(
    exits: Sequence[Tensor],
    labels: Tensor,
    stage_costs: Sequence[float],
    *,
    score: str = "confidence",
    temperature: bool | Sequence[float] = False,
    rule: Rule = (),
    model: str = "",
) -> Calibration:
    """The same from logits that are already there.

    Args:
        exits: logits (N, C) of each exit, on the CPU.
        labels: (N,).
        stage_costs: MACs of running each stage on one image.
        score, temperature, rule: as `calibrate` takes them.
        model: hash of the model that gave them.

    Raises:
        DataError: no images, labels outside the classes, or answers that are not finite.
        PolicyError: an unknown score.
    """
    temperatures = (1.0,) * len(exits)
    if temperature is True:
        temperatures = tuple(fit_temperature(logits, labels) for logits in exits)
    elif temperature:
        temperatures = tuple(temperature)
    if score == LEARNED and not rule:
        rule = fit_rule([softmax(logits, heat) for logits, heat in zip(exits, temperatures, strict=True)], labels)
    return _collect([(list(exits), labels)], stage_costs, score, temperatures, model, rule)


def _collect(
    batches: Iterable[tuple[list[Tensor], Tensor]],
    stage_costs: Sequence[float],
    score: str,
    temperatures: tuple[float, ...],
    model: str,
    rule: Rule,
) -> Calibration:
    """What the solvers need of the logits of every exit and the labels, batch by batch."""
    judge = make_judge(score, rule)
    stages = len(stage_costs)
    parts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(stages)]
    truth: list[Tensor] = []
    seen = 0
    for exits, labels in batches:
        classes = exits[0].shape[1]
        if labels.min() < 0 or labels.max() >= classes:
            raise DataError(f"calibration: labels {int(labels.min())} to {int(labels.max())} for {classes} classes")
        positions = torch.arange(seen, seen + len(labels))
        earlier = torch.empty(len(labels), 0, 2)
        for index, logits in enumerate(exits):
            if not logits.isfinite().all():
                raise DataError(f"exit {index + 1} answers with values that are not finite: damaged weights?")
            probabilities, top, answer = read_answer(logits, temperatures[index])
            parts[index].append((judge(probabilities, positions, index, earlier), top, answer))
            earlier = remember(earlier, answer, top)
        truth.append(labels)
        seen += len(labels)
    if not seen:
        raise DataError("calibration: no images")
    columns = [[torch.cat(column).numpy() for column in zip(*rows, strict=True)] for rows in parts]
    scores, confidences, predictions = (np.stack(rows) for rows in zip(*columns, strict=True))
    return Calibration(
        scores,
        confidences,
        predictions,
        torch.cat(truth).numpy(),
        tuple(stage_costs),
        score=score,
        temperatures=temperatures,
        model=model,
        rule=rule if score == LEARNED else (),
    )


def _answers(cascade: Cascade, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Logits of every exit and labels, batch by batch, on the CPU."""
    device = next(cascade.parameters()).device
    with torch.inference_mode():
        for images, labels in batches:
            yield [logits.float().cpu() for logits in cascade(images.to(device))], labels.cpu().long()


def require_stages(calibration: Calibration, thresholds: np.ndarray) -> None:
    """Raises PolicyError where thresholds (..., S-1) are not one fewer than the exits."""
    wanted = len(calibration.stage_costs) - 1
    if thresholds.shape[-1] != wanted:
        raise PolicyError(f"{thresholds.shape[-1]} thresholds for {wanted + 1} exits; one fewer is needed")
