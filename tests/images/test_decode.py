import io

import numpy as np
import pytest
from PIL import Image

import tokensworth as tw
from tokensworth.data.decode import decode_image


def _encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _ramp(shape=(4, 6)):
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) * 10


def test_gray_palette_and_16_bit_images_show_what_a_viewer_shows():
    ramp = _ramp()
    wanted = np.repeat(ramp[:, :, None], 3, axis=2)
    sixteen = Image.fromarray(ramp.astype(np.uint16) * 257)
    for image in (Image.fromarray(ramp), Image.fromarray(ramp).convert("P"), sixteen):
        got = decode_image(_encoded(image))
        assert got.mode == "RGB"
        assert np.array_equal(np.asarray(got), wanted)


def test_transparent_pixels_are_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 255, 255))
    assert np.asarray(decode_image(_encoded(image))).tolist() == [[[255, 255, 255], [0, 0, 255]]]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([10, 20, 30])
    assert decode_image(_encoded(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_becomes_rgb():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, green, blue = decode_image(_encoded(image, "JPEG", quality=95)).getpixel((4, 4))
    assert red > 200
    assert max(green, blue) < 60


def test_exif_rotation_is_applied():
    image = Image.fromarray(_ramp())
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    got = decode_image(_encoded(image, exif=exif))
    assert np.array_equal(np.asarray(got)[:, :, 0], np.rot90(_ramp(), -1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file"),
        (b"hello", "not an image in a known format"),
        (_encoded(Image.new("RGB", (64, 64)))[:60], "damaged or cut short"),
        (_encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")[:700], "damaged or cut short"),
    ],
)
def test_damaged_images_are_named(data, message):
    with pytest.raises(tw.DataError, match=f"photo.jpg: {message}"):
        decode_image(data, "photo.jpg")


def test_a_decompression_bomb_is_refused_by_its_header():
    bomb = _encoded(Image.new("1", (12000, 12000)))
    assert len(bomb) < 100_000
    with pytest.raises(tw.DataError, match="12000x12000 pixels is over the limit"):
        decode_image(bomb)


def test_a_wrong_name_does_not_matter(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(_encoded(Image.fromarray(_ramp())))
    assert decode_image(path).size == (6, 4)
    with pytest.raises(tw.DataError, match="a folder, not an image"):
        decode_image(tmp_path)
