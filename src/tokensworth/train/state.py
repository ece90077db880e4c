"""The training state on disk: one safetensors file whose header holds the rest as JSON. No pickle.

The random state is a function of the seed and the step, so the step stands for it and for the data position.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tokensworth.errors import TrainingError
from tokensworth.files import atomic_path

STATE_NAME = "state.safetensors"


@dataclass
class TrainState:
    """Where a run stands.

    Attributes:
        step: optimizer steps done; it fixes the epoch, the place in it and all random numbers to come.
        history: one entry per finished epoch.
        partial: sums of the epoch under way, for its entry.
        recipe: the settings of the run; a state of other settings is refused.
    """

    recipe: dict[str, Any]
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    partial: dict[str, float] = field(default_factory=dict)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    out = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            out[f"optimizer.{names[id(parameter)]}|{key}"] = torch.as_tensor(value)
    return out


def save_state(
    path: Path, state: TrainState, model: nn.Module, ema: nn.Module | None, optimizer: torch.optim.Optimizer
) -> None:
    """Writes the whole state atomically."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    if ema is not None:
        tensors |= {f"ema.{k}": v for k, v in ema.state_dict().items()}
    tensors |= _optimizer_tensors(model, optimizer)
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    rest = {"recipe": state.recipe, "step": state.step, "history": state.history, "partial": state.partial}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"state": json.dumps(rest)})


def load_state(
    path: Path,
    recipe: dict[str, Any],
    model: nn.Module,
    ema: nn.Module | None,
    optimizer: torch.optim.Optimizer,
) -> TrainState:
    """Restores model, average and optimizer in place.

    Raises:
        TrainingError: not a state file, or one of another recipe (the differing settings are named).
    """
    try:
        with safe_open(path, framework="pt") as file:
            rest = json.loads(file.metadata()["state"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{path} is not a training state ({error}); delete it to start anew") from None
    saved = rest.pop("recipe")
    # As JSON, since a saved tuple comes back as a list.
    wanted = json.loads(json.dumps(recipe))
    other = sorted(k for k in saved.keys() | wanted.keys() if saved.get(k) != wanted.get(k))
    if other:
        raise TrainingError(f"{path} is of a run with another {', '.join(other)}; use another --out")
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
    for key, value in tensors.items():
        kind, name = key.split(".", 1)
        parts[kind][name] = value
    model.load_state_dict(parts["model"])
    if ema is not None:
        ema.load_state_dict(parts["ema"])
    parameters = dict(model.named_parameters())
    for key, value in parts["optimizer"].items():
        name, entry = key.rsplit("|", 1)
        parameter = parameters[name]
        if value.dtype == torch.bool:
            place: Tensor | bool = bool(value)
        else:
            # Step counts stay on the CPU.
            place = value if entry == "step" else value.to(parameter.device)
        optimizer.state.setdefault(parameter, {})[entry] = place  # type: ignore[attr-defined]
    return TrainState(recipe, **rest)
