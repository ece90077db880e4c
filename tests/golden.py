"""The rule by which the authors' outputs in `tests/data` were made, from `golden/README.md`."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).parent / "data"


def golden_weight(key: str, shape: list[int]) -> torch.Tensor:
    a = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape).astype(np.float32)
    if a.ndim <= 1:
        a = np.float32(0.02) * a
        if ("norm" in key and key.endswith("weight")) or key.endswith(".0.weight"):
            a = a + 1
    else:
        a = np.float32(0.05) * a
    return torch.from_numpy(np.asarray(a, dtype=np.float32))


def golden_state(name: str) -> dict[str, torch.Tensor]:
    shapes = json.loads((DATA / f"{name}.shapes.json").read_text())
    return {key: golden_weight(key, shape) for key, shape in shapes.items()}


def golden_images() -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(0).standard_normal((2, 3, 224, 224)).astype(np.float32))


def golden_weights(model: torch.nn.Module, names: dict[str, str] | None = None) -> torch.nn.Module:
    """Gives every entry of a model's state the value of the rule, under the authors' names where they differ."""
    state = {key: golden_weight((names or {}).get(key, key), list(v.shape)) for key, v in model.state_dict().items()}
    model.load_state_dict(state)
    return model
