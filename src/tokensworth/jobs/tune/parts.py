"""The data of a tuning run: images to fit on, to calibrate with and to report on, and the size they are held in."""

from dataclasses import dataclass, replace

import numpy as np

from tokensworth.data.sources import ImageSet, hold_out, open_images
from tokensworth.errors import DataError

# Small images are held as they are; each grid's stage enlarges them for itself.
SMALL = 64
_PROBED = 32


@dataclass(frozen=True)
class Parts:
    """Three sets that share no image.

    Attributes:
        fit: for heads, reuse and fine-tuning.
        calibration: for regularization, temperatures, thresholds and the choice of grids.
        test: for the report alone.
        classes: number of classes.
        held: how many images of the data are held out of fitting.
    """

    fit: ImageSet
    calibration: ImageSet
    test: ImageSet
    classes: int
    held: int


def open_parts(data: str, test: str, held: int, limit: int, seed: int) -> Parts:
    """Opens and splits the data.

    Args:
        data: source of labelled images, as `open_images` takes it.
        test: another one to report on; `split:test` for the same source's test split; empty for half of what is held
            out.
        held: images held out of fitting; 0 for a fifth, at most 5,000.
        limit: fit on so many images only; 0 for all.
        seed: of the split.

    Raises:
        DataError: too few images, unlabelled ones, or test images of other classes.
    """
    images = open_images(data, "train")
    if images.labels.min() < 0:
        raise DataError(f"{images.origin}: images without labels; tuning needs them all labelled")
    count = held or min(len(images) // 5, 5000)
    kept, out = hold_out(len(images), count, seed)
    fit, calibration = images.select(kept), images.select(out)
    if limit and limit < len(fit):
        fit = fit.select(hold_out(len(fit), len(fit) - limit, seed)[0])
    if test:
        reported = open_images(data if test == "split:test" else test, "test")
    else:
        first, second = hold_out(len(calibration), len(calibration) // 2, seed)
        calibration, reported = calibration.select(first), calibration.select(second)
    classes = len(images.class_names) or int(images.labels.max()) + 1
    for name, part in (("fit", fit), ("calibrate", calibration), ("report", reported)):
        if len(part) < 2:
            raise DataError(f"{images.origin}: {len(part)} images to {name} on; give more, or set --held-out")
    if reported.labels.min() < 0 or reported.labels.max() >= classes:
        raise DataError(
            f"{reported.origin}: labels up to {reported.labels.max()}, but {images.origin} has {classes} classes"
        )
    return Parts(fit, calibration, replace(reported, class_names=images.class_names), classes, count)


def natural_size(images: ImageSet, largest: int) -> int:
    """The side in pixels that images are held in: their own where small, or else what the largest grid takes."""
    probe = np.linspace(0, len(images) - 1, min(_PROBED, len(images))).astype(int)
    side = int(np.median([min(images.read(int(i)).size) for i in probe]))
    return side if side <= SMALL else largest
