"""What ships with the package: a CIFAR-10 cascade, its static references, a deeper plain ViT, and sample images."""

from importlib.resources import files
from pathlib import Path

from tokensworth.data.sources import ImageSet, open_images
from tokensworth.errors import DataError

STATIC_GRIDS = (3, 5, 8)


def packaged_folder() -> Path:
    """Folder of the packaged CIFAR-10 model."""
    return Path(str(files("tokensworth"))) / "assets" / "cifar10"


def packaged_statics() -> dict[int, Path]:
    """Folders of the static references by grid."""
    return {grid: packaged_folder() / f"static_{grid}" for grid in STATIC_GRIDS}


def packaged_vit() -> Path:
    """Folder of the packaged 12-layer CIFAR-10 ViT, for token methods to work on."""
    return packaged_folder() / "vit"


def packaged_images(split: str) -> ImageSet:
    """The packaged sample: `calibration` (held out of training) or `test` (of CIFAR-10's test split)."""
    path = packaged_folder() / f"{split}.parquet"
    if not path.exists():
        raise DataError(f"the package holds no {split} images; reinstall it")
    return open_images(path)
