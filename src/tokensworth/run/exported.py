"""A folder that holds all that serving needs: graphs, model, policy, preprocessing, sample images, checksums."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokensworth.cascade import Cascade
from tokensworth.errors import CheckpointError, PolicyError
from tokensworth.exits.policy import Policy
from tokensworth.files import atomic_path, write_json
from tokensworth.run.runner import Runner
from tokensworth.weights import read_weights

MANIFEST, POLICY, FRONTIER = "manifest.json", "policy.json", "frontier.json"
SAMPLES = "samples.safetensors"
GRAPHS = {False: "graphs", True: "graphs_int8"}


def _digest(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST and not p.name.startswith("."))


def write_manifest(folder: Path) -> None:
    """Writes the SHA-256 of every file of a folder."""
    write_json(folder / MANIFEST, {str(p.relative_to(folder)): _digest(p) for p in _files(folder)})


def check_manifest(folder: Path) -> int:
    """Compares every file with its checksum.

    Returns:
        How many files there are.

    Raises:
        CheckpointError: no manifest, or files that are missing or changed; the first few are named.
    """
    try:
        known: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        wrong = [name for name, digest in known.items() if _changed(folder, name, digest)]
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} has no readable {MANIFEST} ({error}); make the folder with `tokensworth export`"
        ) from None
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{folder}: missing or changed since the export: {', '.join(wrong[:3])}{more}")
    return len(known)


def _changed(folder: Path, name: str, digest: str) -> bool:
    path = (folder / name).resolve()
    inside = path.is_relative_to(folder.resolve())
    return not inside or not path.is_file() or _digest(path) != digest


@dataclass(frozen=True)
class Exported:
    """An opened folder.

    Attributes:
        folder: where it is.
        cascade: the model.
        policy: the one it was exported with.
    """

    folder: Path
    cascade: Cascade
    policy: Policy

    @classmethod
    def open(cls, folder: str | Path) -> "Exported":
        """Checks and opens a folder that `tokensworth export` wrote.

        Raises:
            CheckpointError: files missing or changed.
            PolicyError: a policy for another model.
        """
        folder = Path(folder)
        check_manifest(folder)
        return cls(folder, Cascade.from_pretrained(folder), Policy.load(folder / POLICY))

    def graphs(self, int8: bool = False) -> list[Path]:
        """The stages as ONNX files.

        Raises:
            CheckpointError: exported without int8 variants.
        """
        found = [self.folder / GRAPHS[int8] / f"stage_{i + 1}.onnx" for i in range(self.cascade.num_stages)]
        if not all(path.is_file() for path in found):
            kind = "int8 " if int8 else ""
            raise CheckpointError(f"{self.folder} holds no {kind}graphs; export them{' with --int8' if int8 else ''}")
        return found

    def runner(self, backend: str = "onnx", *, int8: bool = False, **options: Any) -> Runner:
        """A runner under the folder's policy; `options` as `Runner` takes them."""
        graphs = self.graphs(int8) if backend in ("onnx", "openvino") else None
        options.setdefault("policy", self.policy)
        return Runner(self.cascade, backend=backend, graphs=graphs, **options)

    def frontier(self) -> list[Policy]:
        """The policies of the frontier by growing cost; empty where it was exported without.

        Raises:
            PolicyError: policies of another model.
        """
        path = self.folder / FRONTIER
        if not path.is_file():
            return []
        return load_frontier(path)

    def samples(self) -> Tensor:
        """The sample images, uint8 (N, C, S, S)."""
        return read_weights(self.folder / SAMPLES).tensors["images"]


def load_frontier(path: Path) -> list[Policy]:
    """What `tokensworth solve --frontier` wrote.

    Raises:
        PolicyError: not a list of policies.
    """
    try:
        return [Policy(**values) for values in json.loads(path.read_text(encoding="utf-8"))["policies"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{path} is no frontier ({error}); make one with `tokensworth solve --frontier`") from None


def write_samples(folder: Path, images: Tensor) -> None:
    """Keeps sample images (N, C, S, S) in the folder, to check engines with."""
    with atomic_path(folder / SAMPLES) as temporary:
        save_file({"images": images.to(torch.uint8).contiguous()}, temporary)


def exported_graphs(folder: str | Path) -> list[Path] | None:
    """The graphs of an exported folder, checked; None for anything else, whose graphs are yet to be made.

    Raises:
        CheckpointError: files missing or changed.
    """
    return Exported.open(folder).graphs() if (Path(folder) / MANIFEST).is_file() else None
