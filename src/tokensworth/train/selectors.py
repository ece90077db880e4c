"""Phase 1 of ToSA: each selector learns, from a frozen model alone, to predict the next layer's attention map."""

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensworth.data.batches import derive_seed
from tokensworth.errors import DataError, TrainingError
from tokensworth.files import clear_leftovers
from tokensworth.tokens.capture import Pair, dense_pairs
from tokensworth.tokens.overlap import LayerReport, overlap_report
from tokensworth.tokens.tosa import tosa_of
from tokensworth.train.state import TrainState, load_state, save_state

STATE_NAME = "selectors.state.safetensors"
Batch = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class SelectorRecipe:
    """How to fit.

    Attributes:
        epochs: passes over the images, at most.
        lr: peak learning rate of Adam; a cosine ends at zero.
        rows: share of the query rows that each step learns from, drawn anew.
        patience: stop when the held-out divergence has not fallen by a thousandth for so many epochs.
        clip: largest gradient norm of one selector.
        seed: of the drawn rows.
    """

    epochs: int = 8
    lr: float = 1e-2
    rows: float = 0.25
    patience: int = 2
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.lr <= 0 or not 0 < self.rows <= 1 or self.patience < 1:
            raise TrainingError("fitting needs epochs >= 1, lr > 0, 0 < rows <= 1 and patience >= 1")


@dataclass(frozen=True)
class SelectorFit:
    """What came of it.

    Attributes:
        history: one entry per epoch: divergence by layer, on the images and on the held-out ones.
        report: overlap and divergence of each ToSA layer on the held-out images, or on the images themselves
            where none were held out.
        on_held_out: whether the report is on held-out images.
    """

    history: list[dict[str, Any]]
    report: list[LayerReport]
    on_held_out: bool


@dataclass(frozen=True)
class SelectorProgress:
    """What the caller is told after each step."""

    step: int
    total: int
    kl: float


def _images(batch: Batch) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch[0]


def _divergences(pairs: list[Pair], rows: Tensor) -> dict[str, Tensor]:
    """KL(true || predicted) of each pair, mean over images, heads and the given rows."""
    out = {}
    for pair in pairs:
        truth = pair.following.logits(rows).log_softmax(dim=-1)
        predicted = pair.layer.selector(pair.current.logits(rows))
        out[pair.name] = (truth.exp() * (truth - predicted)).sum(dim=-1).mean()
    return out


def _draw(tokens: int, share: float, seed: int, device: torch.device) -> Tensor:
    """Query rows of one step (R,)."""
    count = max(1, round(share * tokens))
    return torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[:count].sort().values.to(device)


class _Fitter:
    def __init__(self, model: nn.Module, recipe: SelectorRecipe, steps: int, out: Path | None) -> None:
        self.model, self.recipe, self.steps = model, recipe, steps
        self.total = recipe.epochs * steps
        layers = [layer for added in tosa_of(model) for layer in added.layers.values()]
        self.selectors = nn.ModuleList(layer.selector for layer in layers)  # type: ignore[arg-type]
        self.optimizer = torch.optim.Adam(self.selectors.parameters(), lr=recipe.lr, betas=(0.9, 0.99))
        self.device = next(model.parameters()).device
        method = [added.method.to_dict() for added in tosa_of(model)]
        settings = {**asdict(recipe), "method": method, "steps": steps}
        self.state = TrainState(settings)
        self.path = out / STATE_NAME if out else None
        if self.path:
            clear_leftovers(self.path)
            if self.path.exists():
                self.state = load_state(self.path, settings, self.selectors, None, self.optimizer)

    def save(self) -> None:
        if self.path:
            save_state(self.path, self.state, self.selectors, None, self.optimizer)

    def step(self, images: Tensor) -> float:
        pairs = dense_pairs(self.model, images.to(self.device))
        seed = derive_seed(self.recipe.seed, self.state.step)
        rows = _draw(pairs[0].current.k.shape[2], self.recipe.rows, seed, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * 0.5 * (1 + math.cos(math.pi * self.state.step / self.total))
        with torch.enable_grad():
            parts = _divergences(pairs, rows)
            loss = torch.stack(list(parts.values())).sum()
        value = float(loss.detach()) / len(parts)
        if not math.isfinite(value):
            self.save()
            raise TrainingError(f"the divergence is {value} at step {self.state.step}; lower the learning rate")
        self.optimizer.zero_grad()
        loss.backward()
        for selector in self.selectors:
            nn.utils.clip_grad_norm_(selector.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.state.step += 1
        for name, part in parts.items():
            self.state.partial[name] = self.state.partial.get(name, 0.0) + float(part.detach())
        return value

    @torch.no_grad()
    def held_out(self, batches: Iterable[Batch]) -> dict[str, float]:
        sums: dict[str, float] = {}
        count = 0
        for batch in batches:
            images = _images(batch)
            pairs = dense_pairs(self.model, images.to(self.device))
            rows = _draw(pairs[0].current.k.shape[2], self.recipe.rows, self.recipe.seed, self.device)
            count += len(images)
            for name, part in _divergences(pairs, rows).items():
                sums[name] = sums.get(name, 0.0) + len(images) * float(part)
        return {name: total / count for name, total in sums.items()}

    def close_epoch(self, epoch: int, held_out: Iterable[Batch] | None) -> None:
        kl = {name: total / self.steps for name, total in self.state.partial.items()}
        entry: dict[str, Any] = {"epoch": epoch + 1, "kl": kl}
        if held_out is not None:
            entry["held_out_kl"] = self.held_out(held_out)
        self.state.history.append(entry)
        self.state.partial = {}
        self.save()

    def stale(self) -> bool:
        """Whether the last epochs brought nothing."""
        means = [_mean(entry.get("held_out_kl", entry["kl"])) for entry in self.state.history]
        wait = self.recipe.patience
        return len(means) > wait and min(means[-wait:]) > 0.999 * min(means[:-wait])


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


def fit_selectors(
    model: nn.Module,
    images: Iterable[Batch],
    *,
    held_out: Iterable[Batch] | None = None,
    recipe: SelectorRecipe | None = None,
    keep: float = 0.5,
    out: str | Path | None = None,
    save_every: int = 50,
    on_step: Callable[[SelectorProgress], None] = lambda _: None,
) -> SelectorFit:
    """Fits the selectors of a ToSA-adapted model in place; no labels are needed.

    The model is frozen and runs dense; each selector minimizes KL(true next map || predicted map)
    (arXiv 2406.08816, phase 1).

    Args:
        model: adapted with `ToSA`.
        images: batches (B, C, S, S), normalized, or (images, labels) pairs, whose labels are not looked at.
            Gone over once per epoch, so a generator will not do; in the same order each time if a stopped
            fit is to go on exactly.
        held_out: such batches for the report and the early stop.
        recipe: how to fit.
        keep: share of patches at which the report judges the choice.
        out: folder of the state; a stopped fit called again with it goes on.
        save_every: steps between saved states, besides the end of each epoch.
        on_step: told after each step.

    Raises:
        UnsupportedModelError: not adapted with ToSA.
        DataError: no batches, or batches that can be gone over only once.
        TrainingError: the divergence is not finite; a saved state of another recipe or method.
    """
    steps = len(images) if isinstance(images, Sized) else sum(1 for _ in images)
    if not steps or iter(images) is images:
        raise DataError("fit_selectors needs a list or loader of at least one batch, not a generator")
    training = model.training
    model.eval()
    fitter = _Fitter(model, recipe or SelectorRecipe(), steps, Path(out) if out else None)
    fitter.selectors.requires_grad_(True)
    try:
        while fitter.state.step < fitter.total and not fitter.stale():
            epoch, first = divmod(fitter.state.step, steps)
            for place, batch in enumerate(images):
                if place < first:
                    continue
                kl = fitter.step(_images(batch))
                on_step(SelectorProgress(fitter.state.step, fitter.total, kl))
                if fitter.state.step % save_every == 0 and fitter.state.step % steps:
                    fitter.save()
            fitter.close_epoch(epoch, held_out)
    finally:
        fitter.selectors.requires_grad_(False)
        fitter.selectors.zero_grad()
        model.train(training)
    for selector in fitter.selectors:
        selector.fitted.fill_(True)  # type: ignore[operator,union-attr]
    judged = held_out if held_out is not None else images
    report = overlap_report(model, (_images(b) for b in judged), keep, fitter.recipe.seed)
    return SelectorFit(fitter.state.history, report, held_out is not None)
