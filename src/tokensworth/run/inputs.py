"""From arrays, files, folders and data sets to one stream of tensors, bad images included as errors."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokensworth.cascade import CascadeConfig
from tokensworth.data.decode import IMAGE_SUFFIXES, decode_image
from tokensworth.data.sources import ImageSet, open_images
from tokensworth.data.tensors import to_tensor
from tokensworth.errors import DataError

Source = Tensor | np.ndarray | str | Path | ImageSet | Iterable


@dataclass(frozen=True, slots=True)
class Batch:
    """Some images on their way.

    Attributes:
        names: of all images of the batch; empty strings for arrays.
        good: places within the batch of the images that could be read.
        images: those images, uint8 or normalized float (G, C, S, S); None where there are none.
        errors: what is wrong with the others, by place.
    """

    names: list[str]
    good: list[int]
    images: Tensor | None
    errors: dict[int, str]


def list_images(folder: Path) -> list[Path]:
    """All image files below a folder, sorted.

    Raises:
        DataError: no such folder, not readable, or no images in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
    if not files:
        raise DataError(f"{folder}: no images ({', '.join(sorted(IMAGE_SUFFIXES))}) in this folder")
    return files


def make_transform(config: CascadeConfig) -> Callable[[Image.Image], Tensor]:
    """The evaluation transform of a model: RGB image to uint8 (3, S, S).

    Up to 64 px the shorter side is resized to the model's size; above, as usual for ImageNet models, the
    middle nine tenths are cut out.
    """
    size = config.image_size
    if size <= 64:
        return lambda image: to_tensor(image, size)
    outer = round(size / 0.9)
    edge = (outer - size) // 2
    return lambda image: to_tensor(image, outer)[:, edge : edge + size, edge : edge + size]


Opener = tuple[str, Callable[[], Image.Image]]


def _opened(items: Iterable[Opener], config: CascadeConfig, size: int) -> Iterator[Batch]:
    transform = make_transform(config)
    stream = iter(items)
    while chunk := list(islice(stream, size)):
        good: list[int] = []
        tensors: list[Tensor] = []
        errors: dict[int, str] = {}
        for place, (_, read) in enumerate(chunk):
            try:
                tensors.append(transform(read()))
                good.append(place)
            except DataError as error:
                errors[place] = str(error)
        yield Batch([name for name, _ in chunk], good, torch.stack(tensors) if tensors else None, errors)


def _arrays(images: Tensor, config: CascadeConfig, size: int) -> Iterator[Batch]:
    wanted = (config.in_chans, config.image_size, config.image_size)
    if images.ndim == 4 and images.shape[1] != config.in_chans and images.shape[3] == config.in_chans:
        images = images.permute(0, 3, 1, 2)
    if images.ndim != 4 or tuple(images.shape[1:]) != wanted:
        raise DataError(f"images of shape {list(images.shape)}; expected (N, {', '.join(map(str, wanted))})")
    for part in images.split(size):
        yield Batch([""] * len(part), list(range(len(part))), part, {})


def _one(source: object) -> Opener:
    if isinstance(source, Image.Image):
        return "", lambda: source.convert("RGB")
    if isinstance(source, (str, Path)):
        return str(source), lambda: decode_image(Path(source))
    if isinstance(source, bytes):
        return "", lambda: decode_image(source)
    raise DataError(f"cannot read an image from {type(source).__name__}")


def read_batches(source: Source, config: CascadeConfig, size: int) -> Iterator[Batch]:
    """Streams any source, `size` images at a time.

    Args:
        source: arrays (N, C, S, S) or (N, S, S, C), uint8 or normalized float; a file, a folder (searched in
            depth), a Parquet file; an `ImageSet`; or an iterable of paths, encoded bytes or PIL images.
        config: of the model.
        size: images per batch.

    Raises:
        DataError: a source of an unknown kind, or arrays of another shape. Single bad images become errors
            of their batch.
    """
    if isinstance(source, (Tensor, np.ndarray)):
        return _arrays(torch.as_tensor(source), config, size)
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.suffix == ".parquet":
            source = open_images(path)
        elif path.is_dir():
            source = list_images(path)
        else:
            source = [path]
    if isinstance(source, ImageSet):
        images = source
        pairs = ((images.name(i), lambda i=i: images.read(i)) for i in range(len(images)))
        return _opened(pairs, config, size)
    return _opened(map(_one, source), config, size)
