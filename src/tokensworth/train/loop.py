"""The training loop: small, resumable in mid-epoch, the same on one process or many."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tokensworth.data.batches import Batches, derive_seed
from tokensworth.errors import MissingExtraError, TrainingError
from tokensworth.files import clear_leftovers
from tokensworth.tokens.method import adapted_vits, method_penalties
from tokensworth.tokens.vit import find_vits
from tokensworth.train.loss import CascadeLoss
from tokensworth.train.precision import choose_precision
from tokensworth.train.state import STATE_NAME, TrainState, load_state, save_state


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: passes over the data.
        batch_size: images per step and process.
        optimizer: a name that timm knows, such as `adamw` or `muon` (Jordan et al. 2024: orthogonalized
            momentum for matrices, AdamW for the rest; reaches an accuracy in far fewer epochs).
        lr: peak learning rate.
        token_lr: learning rate of what a token method adds (gates, predictors), relative to `lr`.
        layer_decay: learning rate of a layer relative to that of the one after it; the head's is `lr`.
        min_lr: where the cosine ends.
        warmup: epochs of linear warm-up.
        weight_decay: of matrices; biases, norms and embeddings are not decayed.
        clip: largest gradient norm; 0 for none.
        ema: decay of the averaged weights, which are what is saved; 0 for none.
        label_smoothing, mixup, cutmix: regularization of the targets.
        exit_weights: weight of each exit's loss; empty for equal weights.
        distill: weight of distillation from the last exit.
        teach: weight of distillation from a teacher model, where one is given.
        temperature: of either distillation.
        precision: `auto`, `fp32` or `bf16`.
        seed: of initialization, order, augmentation and drop-path.
    """

    epochs: int = 20
    batch_size: int = 128
    optimizer: str = "adamw"
    lr: float = 1e-3
    token_lr: float = 10.0
    layer_decay: float = 1.0
    min_lr: float = 1e-5
    warmup: float = 1.0
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999
    label_smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    exit_weights: tuple[float, ...] = ()
    distill: float = 0.0
    teach: float = 0.0
    temperature: float = 1.0
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or self.lr <= 0 or self.token_lr <= 0:
            raise TrainingError("epochs, batch size and learning rate must be positive")
        if not 0 < self.layer_decay <= 1:
            raise TrainingError(f"layer decay {self.layer_decay}: it lies above 0 and is at most 1")


@dataclass(frozen=True)
class Progress:
    """What the loop tells its caller after each step."""

    step: int
    total: int
    epoch: int
    loss: float
    history: list[dict[str, Any]]


_EMBEDDINGS = ("cls_token", "pos_embed", "reg_token", "balance", "bias_table")


def _layer_scale(name: str, layers: int, decay: float) -> float:
    """The learning rate of a parameter relative to the head's, as in BEiT: smaller the nearer to the image."""
    parts = name.split(".")
    if "blocks" in parts:
        return decay ** (layers - int(parts[parts.index("blocks") + 1]))
    return decay ** (layers + 1) if {"patch_embed", *_EMBEDDINGS} & set(parts) else 1.0


def _parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Matrices; other decayed weights; and what is not decayed. Muon steps the first kind, AdamW the rest.

    What a token method adds is small and new: AdamW too, at a learning rate of its own.
    """
    own = {id(p) for _, part in adapted_vits(model) for p in part.backbone_parameters()}
    layers = max((len(vit.blocks) for vit in find_vits(model)), default=0) if recipe.layer_decay < 1 else 0
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = _layer_scale(name, layers, recipe.layer_decay)
        if "token_method" in name.split(".") and id(parameter) not in own:
            kind, scale = "added", recipe.token_lr
        elif parameter.ndim < 2 or name.endswith((*_EMBEDDINGS, "bias")):
            kind = "plain"
        else:
            # Relation mixers (groups, out, in) are no matrices to be made orthogonal as a whole.
            kind = "mixers" if parameter.ndim == 3 else "matrices"
        groups.setdefault((kind, scale), []).append(parameter)
    kinds: dict[str, dict[str, Any]] = {
        "matrices": {"weight_decay": recipe.weight_decay},
        "mixers": {"weight_decay": recipe.weight_decay, "use_fallback": True},
        "plain": {"weight_decay": 0.0, "use_fallback": True},
        "added": {"weight_decay": 0.0, "use_fallback": True},
    }
    return [
        {"params": parameters, "lr_scale": scale, **options}
        for kind, options in kinds.items()
        for (of, scale), parameters in groups.items()
        if of == kind
    ]


class Trainer:
    """Trains a model: a cascade, whose forward pass returns the logits of every exit, or another with its own loss.

    Args:
        model: moved to the device in place.
        batches: makes the batches of a process: `batches(rank, world)`.
        recipe: how to train.
        out: folder of the training state.
        evaluate: called with the averaged model at the end of each epoch; its entries join the history.
        save_every: steps between saved states, besides the end of each epoch.
        identity: what else must be the same for a saved state to be resumed, such as the model's
            configuration and the data's digest.
        teacher: a model whose answer (its last exit's) each exit learns from too, with weight `recipe.teach`.
        loss: of the model's output, the target, and the teacher's answer or None; a cascade's where None.

    Raises:
        MissingExtraError: Accelerate is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int, int], Batches],
        recipe: Recipe,
        out: Path,
        *,
        evaluate: Callable[[nn.Module], dict[str, Any]] | None = None,
        save_every: int = 200,
        identity: dict[str, Any] | None = None,
        teacher: nn.Module | None = None,
        loss: nn.Module | None = None,
    ) -> None:
        try:
            from accelerate import Accelerator, PartialState
            from accelerate.state import AcceleratorState
        except ImportError:
            raise MissingExtraError("training", "train") from None
        from timm.optim._optim_factory import create_optimizer_v2
        from timm.scheduler.cosine_lr import CosineLRScheduler
        from timm.utils.model_ema import ModelEmaV3

        device = torch.device(PartialState().device or "cpu")
        # Accelerate fixes the precision of the whole process with the first Accelerator; a later run may want another.
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(mixed_precision=choose_precision(recipe.precision, device))
        self.recipe, self.path = recipe, out / STATE_NAME
        self.evaluate, self.save_every = evaluate, save_every
        self.batches = batches(self.accelerator.process_index, self.accelerator.num_processes)
        self.model = model.to(device=device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.ema = ModelEmaV3(self.model, decay=recipe.ema, use_warmup=True) if recipe.ema else None
        groups = _parameter_groups(self.model, recipe)
        self.optimizer = create_optimizer_v2(groups, opt=recipe.optimizer, lr=recipe.lr)
        self.wrapped, self.stepper = self.accelerator.prepare(self.model, self.optimizer)
        steps = self.batches.steps()
        self.total = recipe.epochs * steps
        warmup = min(round(recipe.warmup * steps), self.total - 1)
        self.scheduler = CosineLRScheduler(
            self.optimizer,
            t_initial=self.total,
            lr_min=recipe.min_lr,
            warmup_t=warmup,
            warmup_lr_init=min(1e-6, recipe.lr),
            t_in_epochs=False,
        )
        self.loss = loss or CascadeLoss(
            recipe.exit_weights or None, recipe.label_smoothing, recipe.distill, recipe.teach, recipe.temperature
        )
        self.teacher = None if teacher is None else teacher.to(device).eval()
        self.mixup = self._mixup()
        settings = {**asdict(recipe), **(identity or {}), "world": self.accelerator.num_processes}
        self.state = TrainState(settings)
        if self.accelerator.is_main_process:
            clear_leftovers(self.path)
        if self.path.exists():
            average = self.ema.module if self.ema else None
            self.state = load_state(self.path, settings, self.model, average, self.optimizer)

    def _mixup(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        if not (self.recipe.mixup or self.recipe.cutmix):
            return None
        from timm.data.mixup import Mixup

        classes = self.model.config.num_classes  # type: ignore[union-attr]
        return Mixup(
            self.recipe.mixup,
            self.recipe.cutmix,
            label_smoothing=self.recipe.label_smoothing,
            num_classes=classes,  # type: ignore[arg-type]
        )

    @property
    def averaged(self) -> nn.Module:
        """The model to keep: the averaged weights, or the plain ones where there is no average."""
        return self.ema.module if self.ema else self.model

    def save(self) -> None:
        """Writes the state; only the main process does."""
        if self.accelerator.is_main_process:
            average = self.ema.module if self.ema else None
            save_state(self.path, self.state, self.model, average, self.optimizer)

    def run(self, on_step: Callable[[Progress], None] | None = None) -> nn.Module:
        """Trains to the end and returns the averaged model.

        Raises:
            TrainingError: the loss or the gradient is not finite; the state before that step is kept.
        """
        steps = self.batches.steps()
        while self.state.step < self.total:
            epoch, first = divmod(self.state.step, steps)
            self.model.train()
            for images, target in self.batches.epoch(epoch, first):
                loss = self._step(images, target)
                if on_step:
                    on_step(Progress(self.state.step, self.total, epoch, loss, self.state.history))
                if self.state.step % self.save_every == 0 and self.state.step % steps:
                    self.save()
            self._close_epoch(epoch)
            self.save()
        self.accelerator.wait_for_everyone()
        return self.averaged.eval()

    def _step(self, images: Tensor, target: Tensor) -> float:
        seed = derive_seed(self.recipe.seed, self.state.step, self.accelerator.process_index, 1)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        device = self.accelerator.device
        images = images.to(device, memory_format=torch.channels_last)
        target = target.to(device)
        if self.mixup:
            images, target = self.mixup(images, target)
        self.scheduler.step_update(self.state.step)
        with self.accelerator.autocast():
            loss = self.loss(self.wrapped(images), target, self._teaching(images))
            for penalty in method_penalties(self.model):
                loss = loss + penalty
        value = loss.item()
        self._check("loss", value)
        self.accelerator.backward(loss)
        limit = self.recipe.clip or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self._check("gradient norm", float(norm))  # type: ignore[arg-type]
        self.stepper.step()
        self.stepper.zero_grad()
        self.state.step += 1
        if self.ema:
            self.ema.update(self.model, self.state.step)
        partial = self.state.partial
        partial["loss"] = partial.get("loss", 0.0) + value
        partial["steps"] = partial.get("steps", 0.0) + 1
        return value

    @torch.no_grad()
    def _teaching(self, images: Tensor) -> Tensor | None:
        if self.teacher is None:
            return None
        answer = self.teacher(images)
        return answer[-1] if isinstance(answer, list) else answer

    def _check(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        # The weights have not been touched by this step, so they are still good.
        self.save()
        raise TrainingError(
            f"the {what} is {value} at step {self.state.step}; the state before it is kept in {self.path}. "
            "Lower the learning rate, or train with precision fp32"
        )

    def _close_epoch(self, epoch: int) -> None:
        partial = self.state.partial
        entry: dict[str, Any] = {
            "epoch": epoch + 1,
            "loss": partial.get("loss", 0.0) / max(partial.get("steps", 1.0), 1.0),
            "lr": self.optimizer.param_groups[0]["lr"] / self.optimizer.param_groups[0]["lr_scale"],
        }
        if self.evaluate and self.accelerator.is_main_process:
            entry |= self.evaluate(self.averaged.eval())
        self.state.history.append(entry)
        self.state.partial = {}
