"""Tensors of many images on disk, a few hundred images to a file, so that a stopped run goes on behind the last one."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tokensworth.data.sources import ImageSet
from tokensworth.weights import write_weights

# Images per file.
CHUNK = 500

Compute = Callable[[ImageSet, Sequence[str]], dict[str, Tensor]]


class Chunks:
    """Named tensors, one row per image, of one set of images.

    Args:
        folder: where to keep them; files that depend on anything else than `key` says lie elsewhere below it.
        key: plain values that the tensors depend on, besides the images.
        images: the images.
        names: of the tensors, each in files of its own.
        compute: the tensors of some names for some images, on the CPU.
    """

    def __init__(self, folder: Path, key: Any, images: ImageSet, names: Sequence[str], compute: Compute) -> None:
        known = json.dumps([key, images.digest(), CHUNK], sort_keys=True, default=str)
        self.folder = folder / hashlib.sha256(known.encode()).hexdigest()[:16]
        self.images, self.names, self.compute = images, tuple(names), compute
        self.starts = range(0, len(images), CHUNK)

    def read(self, start: int) -> dict[str, Tensor]:
        """The rows of the images from `start` on, one file's worth; what is not on disk is computed and kept.

        Raises:
            DataError: an image that cannot be decoded; the message names it.
        """
        paths = {name: self.folder / f"{name}-{start:07d}.safetensors" for name in self.names}
        found = {name: kept for name, path in paths.items() if (kept := _whole(path)) is not None}
        missing = [name for name in self.names if name not in found]
        if missing:
            part = self.images.select(np.arange(start, min(start + CHUNK, len(self.images))))
            for name, rows in self.compute(part, missing).items():
                write_weights(paths[name], {"rows": rows})
                found[name] = rows
        return found

    def gather(self, on_image: Callable[[int], None] = lambda _: None) -> dict[str, Tensor]:
        """All rows in memory; `on_image` is told how many are there."""
        parts: list[dict[str, Tensor]] = []
        for start in self.starts:
            parts.append(self.read(start))
            on_image(min(start + CHUNK, len(self.images)))
        return {name: torch.cat([part[name] for part in parts]) for name in self.names}


def _whole(path: Path) -> Tensor | None:
    """A kept file; None where there is none that is whole."""
    try:
        return load_file(path)["rows"]
    except (OSError, SafetensorError, KeyError):
        return None
