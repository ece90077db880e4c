"""`tokensworth tune`: from one pretrained ViT and labelled images to a calibrated cascade, a policy and a report."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensworth.cascade import Cascade, model_hash
from tokensworth.cascade.config import NO_REUSE, Reuse
from tokensworth.cascade.sharing import copy_backbone, shared_config
from tokensworth.data.sources import ImageSet
from tokensworth.errors import BudgetError
from tokensworth.exits.calibration import Calibration, calibrate_logits
from tokensworth.exits.learned import LEARNED
from tokensworth.exits.policy import Policy
from tokensworth.exits.solve import frontier
from tokensworth.files import write_json
from tokensworth.jobs.rules import compare_rules
from tokensworth.jobs.study import Study, run_study
from tokensworth.jobs.tune import finetune, lastlayers
from tokensworth.jobs.tune.choice import Goal, rank_grids
from tokensworth.jobs.tune.features import Passes
from tokensworth.jobs.tune.heads import Examples, FittedHead, fit_cosine, fit_linear, head_logits, set_head
from tokensworth.jobs.tune.job import TuneJob, open_source, read_text
from tokensworth.jobs.tune.parts import natural_size, open_parts
from tokensworth.jobs.tune.steps import Steps
from tokensworth.measure.machine import machine
from tokensworth.measure.macs import stage_macs
from tokensworth.measure.timing import stage_millis
from tokensworth.tokens.vit import find_vits
from tokensworth.train.precision import choose_precision
from tokensworth.weights import read_weights, write_weights

# How many policies of the frontier are timed, besides the goal's.
_TIMED = 4

# Told of each step: its name, how much is done, of how much.
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tuned:
    """What came out.

    Attributes:
        cascade: the model.
        policy: for the goal.
        study: the cascade beside the static models of every candidate grid.
        record: plain values: goal, heads, lists of grids, machine.
    """

    cascade: Cascade
    policy: Policy
    study: Study
    record: dict[str, Any]


class Tuning:
    """One run, step by step; what a step brings is kept in the job's folder, so that a stopped run goes on.

    Args:
        job: what to do.
        tell: told of progress.

    Raises:
        TokensworthError: anything wrong with the job, the model or the data.
    """

    def __init__(self, job: TuneJob, tell: Tell = lambda *_: None) -> None:
        self.job, self.tell = job, tell
        self.parts = open_parts(job.data, job.test, job.held, job.limit, job.seed)
        self.device = torch.device(job.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = torch.bfloat16 if choose_precision(job.precision, self.device) == "bf16" else None
        self.passes = Passes(job.out / "passes", self.dtype)
        self.steps = Steps(job.out / "steps", lambda name: tell(name, 0, 0))
        vit = open_source(job)
        self.source = model_hash(vit)
        stem: Any = vit.patch_embed
        size = job.image_size or natural_size(self.parts.fit, job.grids[-1] * stem.feat_ratio(as_scalar=False)[0])
        names, classes = self.parts.fit.class_names, self.parts.classes
        options: dict[str, Any] = {"image_size": size, "class_names": names, "head": job.head}
        text = read_text(job.text, classes) if job.text else None
        if text is not None:
            options["head_width"] = text.shape[1]
        torch.manual_seed(job.seed)
        # Every candidate grid, to fit heads and choose among; weights shared, so it costs no memory.
        self.candidates = copy_backbone(vit, Cascade(shared_config(vit, job.grids, classes, NO_REUSE, options)))
        self.candidates.to(self.device)
        if text is not None:
            for stage in self.candidates.stages:
                stage.vit.head.weight.data.copy_(text)  # type: ignore[union-attr,operator]
        fitted_on = [part.digest() for part in (self.parts.fit, self.parts.calibration)]
        self.base = [self.source, self.candidates.config.to_dict(), str(self.dtype), job.seed, fitted_on]

    def _gather(self, part: str) -> dict[int, Tensor]:
        images = getattr(self.parts, part)
        chunks = self.passes.features(self.candidates, images, self.source)
        rows = chunks.gather(lambda done: self.tell(f"features of the {part} images", done, len(images)))
        return {int(grid): features for grid, features in rows.items()}

    def fit_heads(self) -> list[dict[str, Any]]:
        """Features of every grid, once, and heads on them; zero-shot heads stay as they are.

        Returns:
            Of each grid: how strongly its head was held back, held-out loss and accuracy.
        """
        features = {part: self._gather(part) for part in ("calibration", "test")}
        fits: list[dict[str, Any]] = []
        if not self.job.text:
            features["fit"] = self._gather("fit")
            for grid, stage in zip(self.job.grids, self.candidates.stages, strict=True):
                head = self._fit_head(grid, {part: rows[grid] for part, rows in features.items()})
                set_head(stage.vit, head)  # type: ignore[arg-type]
                fits.append({"grid": grid, "strength": head.strength, "loss": head.loss, "accuracy": head.accuracy})
        self.logits = {
            part: {
                grid: head_logits(stage.vit, features[part][grid])  # type: ignore[arg-type]
                for grid, stage in zip(self.job.grids, self.candidates.stages, strict=True)
            }
            for part in ("calibration", "test")
        }
        return fits

    def _fit_head(self, grid: int, features: dict[str, Tensor]) -> FittedHead:
        path = self.job.out / "steps" / f"head-{grid}.safetensors"

        def make() -> dict[str, Any]:
            fit = fit_cosine if self.job.head == "cosine" else fit_linear
            seen = Examples(features["fit"], labels_of(self.parts.fit))
            held = Examples(features["calibration"], labels_of(self.parts.calibration))
            found = fit(seen, held, self.parts.classes)
            write_weights(path, {"weight": found.weight, "bias": found.bias})
            return {k: getattr(found, k) for k in ("kind", "strength", "loss", "accuracy")}

        result = self.steps.run(f"head-{grid}", [self.base, grid], make)
        tensors = read_weights(path).tensors
        return FittedHead(weight=tensors["weight"], bias=tensors["bias"], **result)

    def goal(self) -> Goal:
        """What the user wants, in numbers."""
        budget = self.job.budget
        if budget is not None:
            return Goal(budget, 0.0, f"at most {budget.value} {budget.unit}")
        grid = self.job.grids[-1]
        return Goal(None, self._right("calibration")[grid], f"as accurate as the static {grid}x{grid}")

    def _right(self, part: str) -> dict[int, float]:
        """Share of right answers of the static model of each grid."""
        truth = labels_of(getattr(self.parts, part))
        return {grid: float((rows.argmax(1) == truth).double().mean()) for grid, rows in self.logits[part].items()}

    def tune_static(self) -> Cascade:
        """The static model of the largest grid, fine-tuned as the cascade is; its answers replace the frozen one's."""
        grid = self.job.grids[-1]
        start = self.build((grid,))
        out = self._folder("static", start, asdict(finetune.recipe_of(self.job)))
        static = finetune.fine_tune(self.job, self.parts, start, out, self.tell).to(self.device)
        for part, exits in self._pass(static).items():
            self.logits[part][grid] = exits[0]
        return static

    def choose_grids(self, goal: Goal) -> list[dict[str, Any]]:
        """Every short list of candidate grids that reaches the goal on the calibration images, the best first."""
        unit = goal.budget.unit if goal.budget is not None else "MACs"

        def make() -> dict[str, Any]:
            costs = dict(zip(self.job.grids, self._stage_costs(self.candidates, unit), strict=True))
            ranked = rank_grids(self.logits["calibration"], labels_of(self.parts.calibration), costs, goal, unit)
            return {"lists": [asdict(c) for c in ranked]}

        return self.steps.run("grids", [self.base, model_hash(self.candidates), goal.words, goal.target], make)["lists"]

    def _stage_costs(self, cascade: Cascade, unit: str) -> list[float]:
        if unit == "MACs":
            return [float(stage.total) for stage in stage_macs(cascade)]
        size = (self.job.timed_batch, cascade.config.in_chans, *[cascade.config.image_size] * 2)
        images = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            return stage_millis(cascade, images, self.job.repeats)

    def build(self, grids: tuple[int, ...], reuse: Reuse = NO_REUSE) -> Cascade:
        """A cascade of some of the candidate grids, their heads fitted."""
        config = replace(self.candidates.config, grids=grids, reuse=reuse)
        torch.manual_seed(self.job.seed)
        cascade = Cascade(config)
        for grid, stage in zip(grids, cascade.stages, strict=True):
            fitted: Any = self.candidates.stages[self.job.grids.index(grid)].vit
            stage.vit.load_state_dict(fitted.state_dict())  # type: ignore[union-attr]
        return cascade.to(self.device).eval()

    def calibrate(
        self, cascade: Cascade, logits: dict[str, list[Tensor]], unit: str, score: str
    ) -> dict[str, Calibration]:
        """Answers on the calibration images, temperatures fitted, and on the test images under the same ones."""
        macs = self._stage_costs(cascade, "MACs")
        model = model_hash(cascade)
        known = calibrate_logits(
            logits["calibration"], labels_of(self.parts.calibration), macs, temperature=True, score=score, model=model
        )
        fitted = {"temperature": known.temperatures, "rule": known.rule}
        test = calibrate_logits(logits["test"], labels_of(self.parts.test), macs, score=score, model=model, **fitted)
        if unit == "ms":
            known = known.with_costs(self._stage_costs(cascade, unit), unit, {"batch": self.job.timed_batch})
        return {"calibration": known, "test": test}

    def run(self) -> Tuned:
        """All steps."""
        job, begun = self.job, time.monotonic()
        fits = self.fit_heads()
        # Grids are chosen by fitted heads alone, before anything is trained.
        lists = self.choose_grids(self.goal())
        statics = {grid: self.build((grid,)) for grid in job.grids}
        if job.fine_tune_static:
            statics = {job.grids[-1]: self.tune_static()}
        goal = self.goal()
        grids = job.grids if job.keep_grids else tuple(lists[0]["grids"])
        cascade = self.build(grids, job.reuse)
        cascade = self.train(cascade)
        logits = self._exit_logits(cascade)
        unit = goal.budget.unit if goal.budget is not None else "MACs"
        known = self.calibrate(cascade, logits, unit, job.score)
        pair = [self.calibrate(cascade, logits, "MACs", score) for score in ("confidence", LEARNED)]
        rules = compare_rules(*(tuple(k[part] for k in pair) for part in ("calibration", "test")), job.seed)  # type: ignore[arg-type]
        policy = self._solve(goal, known["calibration"])
        cascade.save_pretrained(job.out / "model")
        known["calibration"].save(job.out / "calibration.safetensors")
        policy.save(job.out / "policy.json")
        study = self._study(cascade, known, policy, statics)
        record = {
            "model": job.model,
            "data": job.data,
            "images": {part: len(getattr(self.parts, part)) for part in ("fit", "calibration", "test")},
            "goal": goal.words,
            "heads": fits,
            "grids": list(grids),
            "lists": lists,
            "policy": asdict(policy),
            "rules": [asdict(row) for row in rules],
            "precision": "bf16" if self.dtype else "fp32",
            "seed": job.seed,
            "machine": machine(),
            # Of this run alone: steps that were kept from an earlier one took no time.
            "seconds": round(time.monotonic() - begun, 1),
            "study": study.to_dict(),
        }
        write_json(job.out / "tune.json", record)
        return Tuned(cascade, policy, study, record)

    def train(self, cascade: Cascade) -> Cascade:
        """The last layers on kept tokens, then everything, each where the job says so."""
        job = self.job
        if job.cached_epochs:
            layer = len(find_vits(cascade)[0].blocks) - job.last_layers
            chosen = self.build(cascade.config.grids)
            chunks = self.passes.tokens(chosen, self.parts.fit, self.source, layer)
            for start in chunks.starts:
                chunks.read(start)
                self.tell("tokens of the fit images", start, len(self.parts.fit))
            out = self._folder("last", cascade, asdict(lastlayers.recipe_of(job)), job.blocks, job.last_layers)
            cascade = lastlayers.train_last_layers(job, cascade, chunks, labels_of(self.parts.fit), out, self.tell)
        if job.epochs:
            out = self._folder("finetuned", cascade, asdict(finetune.recipe_of(job)))
            cascade = finetune.fine_tune(job, self.parts, cascade, out, self.tell)
        return cascade.to(self.device)

    def _folder(self, name: str, cascade: Cascade, *depends_on: Any) -> Path:
        """A folder for a training that depends on a starting model and more: another training has another."""
        key = json.dumps([self.base, model_hash(cascade), *depends_on], sort_keys=True, default=str)
        return self.job.out / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def _exit_logits(self, cascade: Cascade) -> dict[str, list[Tensor]]:
        """What every exit says of the calibration and test images: from the kept features, or after a pass."""
        if not (self.job.epochs or self.job.cached_epochs):
            return {part: [rows[grid] for grid in cascade.config.grids] for part, rows in self.logits.items()}
        return self._pass(cascade)

    def _pass(self, cascade: Cascade) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {}
        for part in ("calibration", "test"):
            images = getattr(self.parts, part)
            chunks = self.passes.answers(cascade, images, model_hash(cascade))
            rows = chunks.gather(lambda done: self.tell(f"answers on the {part} images", done, len(images)))  # noqa: B023
            found[part] = list(rows.values())
        return found

    def _solve(self, goal: Goal, known: Calibration) -> Policy:
        """The policy for the goal; the most accurate one where the goal is out of reach."""
        try:
            return replace(goal.solve(known), goal=goal.words)
        except BudgetError:
            if goal.budget is not None:
                raise
            best = frontier(known).policies[-1]
            return replace(best, goal=f"{goal.words} (out of reach: the nearest)")

    def _study(
        self, cascade: Cascade, known: dict[str, Calibration], policy: Policy, statics: dict[int, Cascade]
    ) -> Study:
        right = self._right("test")
        return run_study(
            cascade,
            known["calibration"],
            self.parts.test,
            list(statics.values()),
            batch=self.job.timed_batch,
            repeats=self.job.repeats,
            timed=_TIMED,
            extra=[policy],
            test=known["test"],
            static_accuracies=[right[grid] for grid in statics],
            dtype=self.dtype,
            timed_images=self.job.timed_images,
            say=lambda text: self.tell(text, 0, 0),
        )


def labels_of(images: ImageSet) -> Tensor:
    """Labels (N,)."""
    return torch.from_numpy(images.labels.copy())
