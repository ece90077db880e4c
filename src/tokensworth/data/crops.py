"""Parts of an image that the field trains and evaluates depth on, as slices of rows and columns."""

from collections.abc import Callable

from tokensworth.errors import DataError

Crop = Callable[[int, int], tuple[slice, slice]]
"""From height and width in pixels to rows and columns."""


def whole(height: int, width: int) -> tuple[slice, slice]:
    """All of it."""
    return slice(0, height), slice(0, width)


def eigen_crop(height: int, width: int) -> tuple[slice, slice]:
    """NYU Depth V2's evaluation crop (Eigen et al., 2014): rows 45 to 471, columns 41 to 601 of 480x640.

    Images of another size, which that crop was not made for, are evaluated whole.
    """
    return (slice(45, 471), slice(41, 601)) if (height, width) == (480, 640) else whole(height, width)


def kb_crop(height: int, width: int) -> tuple[slice, slice]:
    """KITTI's benchmark crop: the 352x1216 at the bottom, in the middle.

    Raises:
        DataError: a smaller image.
    """
    if height < 352 or width < 1216:
        raise DataError(f"KITTI's benchmark crop is 352x1216; this image is {height}x{width}")
    top, left = height - 352, (width - 1216) // 2
    return slice(top, top + 352), slice(left, left + 1216)


def garg_crop(height: int, width: int) -> tuple[slice, slice]:
    """KITTI's evaluation crop (Garg et al., 2016), as shares of the image."""
    rows = slice(int(0.40810811 * height), int(0.99189189 * height))
    return rows, slice(int(0.03594771 * width), int(0.96405229 * width))
