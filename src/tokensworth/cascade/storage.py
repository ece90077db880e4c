"""A model on disk: `config.json` beside `model.safetensors`, checked when read."""

import hashlib
import json
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from tokensworth.cascade.config import CascadeConfig
from tokensworth.errors import CheckpointError, TokensworthError
from tokensworth.files import write_json
from tokensworth.tokens.method import method_of
from tokensworth.weights import Weights, read_weights, write_weights

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"


def save_folder(
    folder: Path, config: CascadeConfig, state: dict[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Writes both files atomically; floating-point tensors as `dtype` where given."""
    write_weights(folder / WEIGHTS_NAME, state, dtype)
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
    """Sixteen hex digits over names, shapes, values and token method, by which a policy knows its model."""
    digest = hashlib.sha256()
    method = method_of(model)
    if method is not None:
        digest.update(json.dumps(method.to_dict(), sort_keys=True).encode())
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().float().numpy().tobytes())
    return digest.hexdigest()[:16]
