"""Any image a user may have, as upright RGB: EXIF rotation, grayscale, CMYK, palette, alpha, 16 bits."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from tokensworth.errors import DataError

MAX_PIXELS = 64_000_000
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
        # 16-bit grayscale: keep the high byte, as a viewer would.
        values = np.asarray(image).astype(np.int64)
        image = Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(np.asarray(image).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        # What shows through is white, as on a page.
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def decode_image(source: bytes | str | Path, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decodes one image to upright RGB.

    Args:
        source: the encoded bytes, or a path.
        name: what to call it in an error; the path where empty.
        max_pixels: larger images are refused before they are decoded (decompression bombs).

    Raises:
        DataError: not an image, empty, cut short or too large; the message names the image.
    """
    name = name or (str(source) if not isinstance(source, bytes) else "image")
    limit = Image.MAX_IMAGE_PIXELS
    try:
        # Our own limit is checked below, on the size that the header declares.
        Image.MAX_IMAGE_PIXELS = None
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not data:
            raise DataError(f"{name}: empty file")
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > max_pixels:
                size = f"{image.width}x{image.height}"
                raise DataError(f"{name}: {size} pixels is over the limit of {max_pixels:,}; shrink it first")
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name}: not an image in a known format") from None
    except FileNotFoundError:
        raise DataError(f"{name}: no such file") from None
    except PermissionError:
        raise DataError(f"{name}: not readable") from None
    except IsADirectoryError:
        raise DataError(f"{name}: a folder, not an image") from None
    except Exception as error:  # decoders raise many kinds on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: damaged or cut short ({reason})") from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit
