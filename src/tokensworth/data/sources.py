"""Labelled image sets from wherever they are: Parquet, folders, CIFAR, the Hugging Face Hub."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokensworth.data.decode import IMAGE_SUFFIXES, decode_image
from tokensworth.errors import DataError, MissingExtraError

_IMAGE_COLUMNS, _LABEL_COLUMNS = ("image", "img"), ("label", "fine_label", "labels")


@dataclass(frozen=True)
class ImageSet:
    """Encoded images with labels, decoded one at a time.

    Attributes:
        items: encoded bytes or paths.
        labels: (N,) int64; -1 where unknown.
        class_names: names by label, or empty.
        origin: where it came from, for messages and reports.
    """

    items: Sequence[bytes | Path]
    labels: np.ndarray
    class_names: tuple[str, ...]
    origin: str

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        """What to call an image in messages and results."""
        item = self.items[index]
        return f"{self.origin}[{index}]" if isinstance(item, bytes) else str(item)

    def read(self, index: int) -> Image.Image:
        """One image, upright RGB.

        Raises:
            DataError: the image cannot be decoded; the message names it.
        """
        return decode_image(self.items[index], self.name(index))

    def select(self, index: np.ndarray) -> "ImageSet":
        """The images at `index` (K,), in that order."""
        return replace(self, items=[self.items[i] for i in index], labels=self.labels[index])

    def digest(self) -> str:
        """SHA-256 over encoded bytes (or file names and sizes) and labels."""
        total = hashlib.sha256()
        for item in self.items:
            total.update(item if isinstance(item, bytes) else f"{item.name}{item.stat().st_size}".encode())
        total.update(self.labels.astype(np.int64).tobytes())
        return total.hexdigest()


def _class_names(schema: Any, column: str) -> tuple[str, ...]:
    """Class names that Hugging Face datasets keep in a Parquet file's metadata."""
    import json

    try:
        info = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        return tuple(info["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _pick(columns: Sequence[str], wanted: Sequence[str], what: str, origin: str) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise DataError(f"{origin}: no {what} column among {', '.join(columns)}; expected {' or '.join(wanted)}")


def read_parquet(path: Path) -> ImageSet:
    """A Parquet file with the Hugging Face `Image` and `ClassLabel` columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None
    image = _pick(table.column_names, _IMAGE_COLUMNS, "image", str(path))
    label = _pick(table.column_names, _LABEL_COLUMNS, "label", str(path))
    cells = table.column(image).to_pylist()
    items = [cell["bytes"] if isinstance(cell, dict) else cell for cell in cells]
    if not items:
        raise DataError(f"{path}: holds no images")
    if not all(isinstance(item, bytes) for item in items):
        raise DataError(f"{path}: column {image} does not hold encoded images")
    labels = np.array(table.column(label).to_pylist(), dtype=np.int64)
    return ImageSet(items, labels, _class_names(table.schema, label), str(path))


def read_folder(path: Path) -> ImageSet:
    """A folder with one sub-folder of images per class (torchvision's `ImageFolder` layout)."""
    from torchvision.datasets.folder import find_classes, make_dataset

    try:
        names, to_index = find_classes(str(path))
        samples = make_dataset(str(path), to_index, extensions=tuple(IMAGE_SUFFIXES))
    except FileNotFoundError as error:
        raise DataError(f"{path}: expected one sub-folder of images per class ({error})") from None
    items = [Path(file) for file, _ in samples]
    labels = np.array([label for _, label in samples], dtype=np.int64)
    return ImageSet(items, labels, tuple(names), str(path))


def _read_cifar(name: str, split: str, root: Path) -> ImageSet:
    """CIFAR-10 or -100 by torchvision, downloaded where a network is."""
    import io

    from torchvision import datasets

    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    try:
        data = kind(str(root), train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise DataError(f"{name}: not in {root} and not downloadable ({error})") from None
    items = []
    for array in data.data:
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG")
        items.append(buffer.getvalue())
    return ImageSet(items, np.array(data.targets, dtype=np.int64), tuple(data.classes), f"{name}/{split}")


def _read_hub(name: str, split: str) -> ImageSet:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"reading {name!r} from the Hugging Face Hub", "train") from None
    try:
        data = datasets.load_dataset(name, split=split)
    except Exception as error:  # the hub client raises many kinds
        reason = str(error).splitlines()[0]
        raise DataError(f"{name}: neither a path here nor a data set on the Hub ({reason})") from None
    columns = list(data.column_names)  # type: ignore[union-attr,arg-type]
    image = _pick(columns, _IMAGE_COLUMNS, "image", name)
    label = _pick(columns, _LABEL_COLUMNS, "label", name)
    data = data.cast_column(image, datasets.Image(decode=False))  # type: ignore[union-attr]
    names = tuple(getattr(data.features[label], "names", ()) or ())  # type: ignore[union-attr]
    items = [cell["bytes"] or Path(cell["path"]).read_bytes() for cell in data[image]]
    return ImageSet(items, np.array(data[label], dtype=np.int64), names, f"{name}/{split}")


def open_images(source: str | Path, split: str = "train") -> ImageSet:
    """Opens a labelled image set.

    Args:
        source: a Parquet file, a folder with one sub-folder per class, `cifar10` or `cifar100`, or the name
            of a data set on the Hugging Face Hub.
        split: which part of a named data set.

    Raises:
        DataError: nothing there, nothing in it, or labels that do not match; the message says which.
    """
    path = Path(source)
    if path.is_dir():
        images = read_folder(path)
    elif path.suffix == ".parquet":
        if not path.exists():
            raise DataError(f"{path}: no such file")
        images = read_parquet(path)
    elif str(source) in ("cifar10", "cifar100"):
        images = _read_cifar(str(source), split, Path.home() / ".cache" / "tokensworth")
    elif path.exists():
        raise DataError(f"{path}: neither a folder nor a .parquet file")
    else:
        images = _read_hub(str(source), split)
    count = len(images.class_names)
    if count and len(images) and images.labels.max() >= count:
        raise DataError(f"{images.origin}: label {images.labels.max()} but only {count} class names")
    return images


def hold_out(count: int, held: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits range(count) into what is left and what is held out, both sorted, by a seeded permutation.

    Raises:
        DataError: more held out than there is.
    """
    if not 0 <= held < count:
        raise DataError(f"cannot hold {held} images out of {count}")
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[held:]), np.sort(order[:held])
