"""A model on disk: `config.json` beside `model.safetensors`, checked when read."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokensworth.cascade.config import CascadeConfig
from tokensworth.errors import CheckpointError, TokensworthError
from tokensworth.files import atomic_path, write_json

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
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


def save_folder(
    folder: Path, config: CascadeConfig, state: dict[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Writes both files atomically; floating-point tensors as `dtype` where given."""
    tensors = {
        key: (value.to(dtype) if dtype and value.is_floating_point() else value).detach().cpu().contiguous()
        for key, value in state.items()
    }
    with atomic_path(folder / WEIGHTS_NAME) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(folder / CONFIG_NAME, config.to_dict())


def load_folder(path: str | Path, revision: str | None = None) -> tuple[CascadeConfig, Weights]:
    """Reads a local folder, or the same two files of a Hub repository.

    Raises:
        CheckpointError: a file is missing, unreadable or not what it should be.
    """
    folder = Path(path)
    if folder.is_dir():
        config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    else:
        try:
            config_path = Path(hf_hub_download(str(path), CONFIG_NAME, revision=revision))
            weights_path = Path(hf_hub_download(str(path), WEIGHTS_NAME, revision=revision))
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"no model at {path}: neither a folder nor on the Hub ({reason})") from None
    try:
        config = CascadeConfig.from_dict(json.loads(config_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{config_path} is not a model's configuration: {error}") from None
    except TokensworthError as error:
        raise CheckpointError(f"{config_path}: {error}") from None
    return config, read_weights(weights_path)


def model_hash(model: nn.Module) -> str:
    """Sixteen hex digits over names, shapes and values, by which a policy knows its model."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:16]
