"""Images with depth, in the layouts and split files of NYU Depth V2 and KITTI.

A line of a split file is `colour depth focal`: paths below the root, and the focal length in pixels; KITTI's writes
`None` where there is no depth.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from tokensworth.data.crops import Crop, eigen_crop, garg_crop, kb_crop, whole
from tokensworth.data.decode import decode_image
from tokensworth.data.sources import ImageSet
from tokensworth.errors import DataError


@dataclass(frozen=True)
class DepthLayout:
    """How a data set keeps depth, and what its field does with it.

    Attributes:
        name: of the layout.
        unit: metres of one step of its 16-bit depth images.
        max_depth: metres; what is deeper is not evaluated.
        train_min: metres; what is nearer is not learned from.
        read: cut out of image and depth when they are read.
        blank: cut out of training images, whose borders are blank.
        judged: cut out of a read image for evaluation.
        turn: most degrees that training images are turned.
        brightness: how far training images are made brighter or darker, as a share.
    """

    name: str
    unit: float
    max_depth: float
    train_min: float
    read: Crop = whole
    blank: Crop = whole
    judged: Crop = whole
    turn: float = 0.0
    brightness: float = 0.1


def _without_border(height: int, width: int) -> tuple[slice, slice]:
    """NYU Depth V2's images of 480x640 have blank borders, since colour was warped to depth."""
    return (slice(45, 472), slice(43, 608)) if (height, width) == (480, 640) else whole(height, width)


LAYOUTS = {
    "nyu": DepthLayout("nyu", 1 / 1000, 10.0, 0.1, whole, _without_border, eigen_crop, 2.5, 0.25),
    "kitti": DepthLayout("kitti", 1 / 256, 80.0, 1.0, kb_crop, whole, garg_crop, 1.0, 0.1),
}


@dataclass(frozen=True)
class DepthSet:
    """Images and depth images on disk, read one at a time.

    Attributes:
        pairs: colour and depth files.
        layout: how to read them.
        problems: one line on each line of the split file that cannot be used.
        origin: where they come from, for messages.
    """

    pairs: Sequence[tuple[Path, Path]]
    layout: DepthLayout
    problems: tuple[str, ...]
    origin: str

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """An RGB image and its depth (H, W) in metres, 0 where unknown.

        Raises:
            DataError: one cannot be decoded, or they are not of one size; the message names the file.
        """
        color, file = self.pairs[index]
        image, depth = decode_image(color), read_depth(file, self.layout.unit)
        if (image.height, image.width) != depth.shape:
            size = f"{depth.shape[1]}x{depth.shape[0]}"
            raise DataError(f"{file}: depth of {size} for an image of {image.width}x{image.height}")
        rows, columns = self.layout.read(*depth.shape)
        box = (columns.start or 0, rows.start or 0, columns.stop or image.width, rows.stop or image.height)
        return image.crop(box), depth[rows, columns]

    def select(self, index: np.ndarray) -> "DepthSet":
        """The pairs at `index` (K,), in that order."""
        return replace(self, pairs=[self.pairs[i] for i in index])

    def images(self) -> ImageSet:
        """The colour images alone, without labels."""
        return ImageSet([color for color, _ in self.pairs], np.full(len(self), -1), (), self.origin)

    def digest(self) -> str:
        """SHA-256 over file names and sizes."""
        total = hashlib.sha256(self.layout.name.encode())
        for pair in self.pairs:
            for file in pair:
                total.update(f"{file.parent.name}/{file.name}{file.stat().st_size}".encode())
        return total.hexdigest()


def read_depth(path: Path, unit: float) -> np.ndarray:
    """A 16-bit depth image as metres (H, W) float32.

    Raises:
        DataError: missing, damaged, or not of 16 bits with one channel.
    """
    try:
        with Image.open(path) as image:
            if not image.mode.startswith("I"):
                raise DataError(f"{path}: a depth image has one channel of 16 bits, this is {image.mode}")
            return np.asarray(image).astype(np.float32) * np.float32(unit)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise DataError(f"{path}: not an image in a known format") from None
    except Exception as error:  # decoders raise many kinds on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: damaged or cut short ({reason})") from None


def _problem(color: Path, depth: Path) -> str:
    """What the headers of a pair tell against it; empty where nothing does."""
    sizes = []
    for file in (color, depth):
        try:
            with Image.open(file) as image:
                sizes.append(f"{image.width}x{image.height}")
                if file is depth and not image.mode.startswith("I"):
                    return f"{file}: a depth image has one channel of 16 bits, this is {image.mode}"
        except FileNotFoundError:
            return f"{file}: no such file"
        except (OSError, ValueError):
            return f"{file}: not an image in a known format"
    return "" if sizes[0] == sizes[1] else f"{depth}: depth of {sizes[1]} for an image of {sizes[0]}"


def open_depth(source: str, root: Path | None = None, depth_root: Path | None = None) -> DepthSet:
    """Opens a set by its layout and split file.

    Args:
        source: `nyu:FILE` or `kitti:FILE`; FILE is a split file, or a folder with one named `files.txt`.
        root: folder that colour paths start from; the split file's where None.
        depth_root: folder that depth paths start from; `root` where None.

    Raises:
        DataError: an unknown layout, no split file, or no usable line in it.
    """
    kind, _, name = source.partition(":")
    if kind not in LAYOUTS or not name:
        raise DataError(f"{source}: write nyu:FILE or kitti:FILE, FILE being a split file or a folder with files.txt")
    path = Path(name)
    path = path / "files.txt" if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no readable split file ({error})") from None
    below = root or path.parent
    pairs, problems = [], []
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts or parts[1:2] == ["None"]:
            continue
        if len(parts) < 2:
            problems.append(f"{path}, line {number}: expected a colour image and a depth image, found {line.strip()!r}")
            continue
        # Published split files start their paths with a slash.
        pair = below / parts[0].lstrip("/"), (depth_root or below) / parts[1].lstrip("/")
        problem = _problem(*pair)
        if problem:
            problems.append(f"{problem} ({path}, line {number})")
        else:
            pairs.append(pair)
    if not pairs:
        first = f"; the first: {problems[0]}" if problems else ""
        raise DataError(f"{path}: none of its {len(lines)} lines can be used{first}")
    return DepthSet(pairs, LAYOUTS[kind], tuple(problems), source)
