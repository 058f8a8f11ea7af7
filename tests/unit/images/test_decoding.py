"""Files of pictures: formats, orientation, transparency, limits before decoding, broken files."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.pictures import drawn, encoded
from weft.errors import RequestError
from weft.images.decoding import FORMATS, ImageLimits, decode

RGB = drawn("photo", 50, 30)


def refused(data: bytes, limits: ImageLimits | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        decode(data, limits or ImageLimits())
    assert "\n" not in str(caught.value)
    assert caught.value.param == "image"
    return str(caught.value)


def png_header(width: int, height: int) -> bytes:
    """A PNG of some bytes that says it is this large."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(64)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_found_in_the_content(form: str) -> None:
    lossless = {"WEBP": {"lossless": True}}.get(form, {})
    pixels = decode(encoded(RGB, form, **lossless))
    assert pixels.shape == RGB.shape
    assert pixels.dtype == np.uint8
    if form in ("PNG", "WEBP", "BMP"):
        np.testing.assert_array_equal(pixels, RGB)


def test_of_a_gif_the_first_frame() -> None:
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (10, 200)]
    assert decode(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])).max() <= 10


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("block", [b"garbage", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"II*\0\xff\xff\xff\xff", b""])
def test_a_broken_block_of_exif_leaves_the_picture_as_it_is(form: str, block: bytes) -> None:
    assert (decode(encoded(RGB, form, exif=block)) == decode(encoded(RGB, form))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(encoded(RGB, "PNG", exif=exif))
    upright = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: RGB.transpose(1, 0, 2),
        6: RGB.transpose(1, 0, 2)[:, ::-1],
        7: RGB.transpose(1, 0, 2)[::-1, ::-1],
        8: RGB.transpose(1, 0, 2)[::-1],
    }[orientation]
    assert pixels.tolist() == upright.tolist()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_other_modes_become_what_pillow_makes_of_them(mode: str) -> None:
    image = Image.fromarray(RGB)
    image = image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode)
    form = "JPEG" if mode == "CMYK" else "PNG"
    data = encoded(image, form)
    if form == "PNG":
        np.testing.assert_array_equal(decode(data), np.array(image.convert("RGB")))
    assert decode(data).shape == RGB.shape


def test_limits_are_named() -> None:
    long = refused(png_header(80_000, 1))
    assert "80,000 x 1 pixels; the limit is 16,384 on a side (limits.image_side)" in long
    small = ImageLimits(image_bytes=1000, image_pixels=2000, image_side=60)
    assert "(limits.image_bytes)" in refused(bytes(1001), small)
    square = refused(png_header(50, 50), small)
    assert "50 x 50, 2,500 pixels; the limit is 2,000 (limits.image_pixels)" in square
    assert decode(encoded(RGB), ImageLimits(image_pixels=1500)).shape == RGB.shape


@pytest.mark.parametrize("side", [10_000, 60_000, 2**31 - 1])
def test_a_bomb_is_refused_before_it_is_decoded(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(Image.Image, "convert", lambda self, mode: loaded.append(mode))
    monkeypatch.setattr(Image.Image, "load", lambda self: loaded.append(self))
    assert "limits.image_" in refused(png_header(side, side))
    assert loaded == []


@pytest.mark.parametrize(
    ("options", "chunk"), [({}, b"VP8 "), ({"lossless": True}, b"VP8L"), ({"xmp": b"<x/>"}, b"VP8X")]
)
def test_a_canvas_of_webp_is_refused_before_it_is_allocated(
    options: dict[str, Any], chunk: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(RGB, "WEBP", **options)
    assert data[12:16] == chunk
    height, width, _ = RGB.shape
    assert decode(data, ImageLimits(image_side=max(height, width))).shape == RGB.shape
    monkeypatch.setattr("PIL._webp.WebPAnimDecoder", None)  # calling it fails
    refusal = refused(data, ImageLimits(image_side=8))
    assert f"{width} x {height} pixels; the limit is 8 on a side (limits.image_side)" in refusal


@pytest.mark.parametrize("form", FORMATS)
def test_a_broken_file_is_one_line(form: str) -> None:
    data = encoded(RGB, form)
    for cut in (1, 4, 20, len(data) // 2):
        assert refused(data[:cut])
    random = np.random.default_rng(0)
    for _ in range(60):
        spoiled = bytearray(data)
        for place in random.integers(0, len(data), 8):
            spoiled[place] = int(random.integers(0, 256))
        lines: list[str] = []
        try:
            assert decode(bytes(spoiled)).ndim == 3
        except RequestError as error:
            lines = str(error).split("\n")
        assert len(lines) < 2


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"<svg/>", b"%PDF-1.7", encoded(RGB, "TIFF"), encoded(RGB, "PPM"), bytes(500)]
)
def test_what_is_no_picture_says_so(data: bytes) -> None:
    assert "the picture" in refused(data)
