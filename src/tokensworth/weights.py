"""Weights on disk: safetensors files, written atomically and checked when read. Nothing is unpickled."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokensworth.errors import CheckpointError
from tokensworth.files import atomic_path

_NAMED_KEYS = 3


def _first(keys: list[str]) -> str:
    more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
    return ", ".join(keys[:_NAMED_KEYS]) + more


@dataclass(frozen=True)
class Weights:
    """Named tensors and the file they came from."""

    tensors: dict[str, Tensor]
    source: str

    def copy_into(self, model: nn.Module) -> None:
        """Fills a model strictly.

        Raises:
            CheckpointError: missing, unexpected or differently shaped keys, or values that are not finite.
        """
        wanted = model.state_dict()
        missing = sorted(wanted.keys() - self.tensors.keys())
        unexpected = sorted(self.tensors.keys() - wanted.keys())
        if missing or unexpected:
            parts = [f"misses {_first(missing)}"] if missing else []
            parts += [f"has unknown {_first(unexpected)}"] if unexpected else []
            raise CheckpointError(f"{self.source} is of another model: it {'; '.join(parts)}")
        other = [
            f"{key} is {list(value.shape)}, expected {list(wanted[key].shape)}"
            for key, value in self.tensors.items()
            if value.shape != wanted[key].shape
        ]
        if other:
            raise CheckpointError(f"{self.source} has other shapes: {_first(other)}")
        bad = [key for key, value in self.tensors.items() if value.is_floating_point() and not value.isfinite().all()]
        if bad:
            raise CheckpointError(f"{self.source} holds values that are not finite: {_first(bad)}")
        model.load_state_dict(self.tensors)


def read_weights(path: Path) -> Weights:
    """Reads a safetensors file; nothing is unpickled.

    Raises:
        CheckpointError: missing, cut short or not a safetensors file.
    """
    try:
        return Weights(load_file(path), str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; name a folder that save_pretrained wrote") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); copy it again") from None


def write_weights(path: Path, state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Writes a state dict atomically; floating-point tensors as `dtype` where given."""
    tensors = {
        key: (value.to(dtype) if dtype and value.is_floating_point() else value).detach().cpu().contiguous()
        for key, value in state.items()
    }
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
