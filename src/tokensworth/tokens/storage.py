"""An adapted timm model on disk: timm's own folder, which any timm user can load, and two small files beside it.

`config.json` and `model.safetensors` are the plain model, as timm's `local-dir:` and `hf-hub:` sources read it;
`tokens.json` and `tokens.safetensors` hold the token method and what it learned.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi, snapshot_download
from torch import nn

from tokensworth.errors import CheckpointError, UnsupportedModelError
from tokensworth.files import atomic_path, write_json
from tokensworth.tokens.method import adapt, adapted_vits, method_from_dict, token_keys
from tokensworth.weights import read_weights, write_weights

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
METHOD_NAME, LEARNED_NAME = "tokens.json", "tokens.safetensors"


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    model_args: dict[str, Any] | None = None,
) -> None:
    """Saves a timm model with its token method; every file is written atomically.

    Args:
        model: made by `timm.create_model`; adapted or not.
        folder: made if missing.
        dtype: store floating-point weights in this type.
        model_args: arguments that `timm.create_model` needs besides the name; recent timm knows them itself.

    Raises:
        UnsupportedModelError: not a model that timm made.
    """
    from timm.models._hub import save_config_for_hf

    folder = Path(folder)
    if not getattr(model, "pretrained_cfg", None):
        kind = type(model).__name__
        raise UnsupportedModelError(f"this {kind} was not made by timm.create_model; save its state_dict instead")
    found = adapted_vits(model)
    learned = token_keys(model)
    state = model.state_dict()
    write_weights(folder / WEIGHTS_NAME, {k: v for k, v in state.items() if k not in learned}, dtype)
    with atomic_path(folder / CONFIG_NAME) as temporary:
        save_config_for_hf(model, temporary, model_args=model_args)  # type: ignore[arg-type]
    if found:
        write_weights(folder / LEARNED_NAME, {k: state[k] for k in learned}, dtype)
        write_json(folder / METHOD_NAME, found[0][1].method.to_dict())
    else:
        for name in (METHOD_NAME, LEARNED_NAME):
            (folder / name).unlink(missing_ok=True)


def is_saved_timm(folder: Path) -> bool:
    """Whether a folder holds a timm model's configuration."""
    try:
        return "architecture" in json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def from_pretrained(path: str | Path, *, revision: str | None = None) -> nn.Module:
    """Loads what `save_pretrained` or `push_to_hub` wrote, in evaluation mode, adapted as it was.

    Args:
        path: a folder, or a repository of the Hugging Face Hub.
        revision: of the repository.

    Raises:
        CheckpointError: missing, unreadable, or of another shape.
        UnsupportedModelError: a token method that this version does not know.
    """
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(str(path), revision=revision, allow_patterns=["*.json", "*.safetensors"]))
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"no model at {path}: neither a folder nor on the Hub ({reason})") from None
    if not is_saved_timm(folder):
        raise CheckpointError(f"{folder / CONFIG_NAME} is not a timm model's configuration")
    weights = read_weights(folder / WEIGHTS_NAME)
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG_NAME}: timm cannot make this model ({error})") from None
    weights.copy_into(model)
    if (folder / METHOD_NAME).exists():
        try:
            options = json.loads((folder / METHOD_NAME).read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{folder / METHOD_NAME} is not JSON: {error}") from None
        adapt(model, method_from_dict(options))
        learned = read_weights(folder / LEARNED_NAME)
        plain = {k: v for k, v in model.state_dict().items() if k not in token_keys(model)}
        type(learned)(plain | learned.tensors, learned.source).copy_into(model)
    return model.eval()


def push_to_hub(model: nn.Module, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Uploads what `save_pretrained` writes to a repository of the Hugging Face Hub, made if missing.

    Returns:
        The commit's address.
    """
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder)
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="tokensworth model"))
