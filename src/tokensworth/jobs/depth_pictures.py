"""`tokensworth depth`: depth images of a file or folder, bad files skipped."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokensworth.data.decode import decode_image
from tokensworth.dense.model import DepthModel
from tokensworth.errors import DataError
from tokensworth.files import atomic_path
from tokensworth.jobs.depth import depth_of_image
from tokensworth.run.inputs import list_images

# Near to far, dark to bright backwards: what is near stands out. Anchors in sRGB.
_COLOURS = np.array(
    [[253, 231, 37], [122, 209, 81], [34, 168, 132], [42, 120, 142], [65, 68, 135], [68, 1, 84]], dtype=np.float32
)


@dataclass(frozen=True)
class DepthPicture:
    """One image's depth on disk.

    Attributes:
        image: the image.
        depth: 16-bit PNG.
        coloured: the same for people.
        nearest, farthest: metres.
    """

    image: str
    depth: str
    coloured: str
    nearest: float
    farthest: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class DepthPictures:
    """What a run did; `unit` is metres of one step of the 16-bit images."""

    pictures: tuple[DepthPicture, ...]
    failed: int
    unit: float


def depth_unit(max_depth: float) -> float:
    """Metres of one step of a 16-bit depth image: NYU's millimetre where that reaches, else KITTI's 1/256."""
    return 1 / 1000 if max_depth * 1000 < 65536 else 1 / 256


def coloured(depth: np.ndarray) -> Image.Image:
    """Depth (H, W) in metres as a picture: its own range from bright (near) to dark (far), even in 1 / depth."""
    inverse = 1 / np.maximum(depth, 1e-3)
    low, high = np.quantile(inverse, [0.01, 0.99])
    place = ((high - inverse) / max(high - low, 1e-9)).clip(0, 1) * (len(_COLOURS) - 1)
    first = np.minimum(place.astype(int), len(_COLOURS) - 2)
    part = (place - first)[..., None]
    return Image.fromarray((_COLOURS[first] * (1 - part) + _COLOURS[first + 1] * part + 0.5).astype(np.uint8))


def depth_of_folder(
    model: DepthModel,
    source: Path,
    out: Path,
    *,
    short: int = 0,
    mirrored: bool = False,
    on_image: Callable[[int, int], None] = lambda _, __: None,
    on_problem: Callable[[str], None] = lambda _: None,
) -> DepthPictures:
    """Writes `NAME_depth.png` and `NAME_coloured.png` for every image below a folder, or for one image.

    Args:
        model: in evaluation mode.
        source: image file or folder.
        out: folder; the images' own folders are kept below it.
        short, mirrored: as in `depth_of_image`.
        on_image: told how many are done of how many.
        on_problem: told of each file that cannot be read; the rest goes on.

    Raises:
        DataError: no images.
    """
    files = [source] if source.is_file() else list_images(source)
    base = source.parent if source.is_file() else source
    unit = depth_unit(model.config.max_depth)
    pictures, failed = [], 0
    for number, file in enumerate(files, 1):
        try:
            depth = depth_of_image(model, decode_image(file), short, mirrored)
        except DataError as error:
            failed += 1
            on_problem(str(error))
            continue
        # The suffix stays, so that a.jpg and a.png do not meet.
        place = out / file.relative_to(base).parent / file.name.replace(".", "_")
        paths = [place.with_name(f"{place.name}_{kind}.png") for kind in ("depth", "coloured")]
        steps = np.rint(depth / unit).clip(0, 65535).astype(np.uint16)
        for path, picture in zip(paths, (Image.fromarray(steps), coloured(depth)), strict=True):
            with atomic_path(path) as temporary:
                picture.save(temporary, "PNG")
        low, high = float(depth.min()), float(depth.max())
        pictures.append(DepthPicture(str(file), str(paths[0]), str(paths[1]), low, high))
        on_image(number, len(files))
    return DepthPictures(tuple(pictures), failed, unit)
