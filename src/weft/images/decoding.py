"""Decoding of picture files to RGB pixels, within limits that are checked before anything is decoded.

    bytes --length--> header --width, height--> decoder --> EXIF orientation --> RGB
          image_bytes        image_side, image_pixels

The format is found in the content, never in a name or a media type: PNG, JPEG, WebP, GIF (its first frame) and BMP.
Orientation, palettes, transparency and grey are converted by ``image.convert("RGB")`` of Pillow, as in transformers'
loader.

Files come from untrusted clients: a small one may say that it has a billion pixels (a decompression bomb), and a
broken one may raise anything in a decoder. Sides and pixels are read from the header first, and any error of a decoder
becomes one line. Decoding takes time and memory in proportion to ``image_pixels``, so it belongs in a worker.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from weft.errors import RequestError
from weft.images.picture import Pixels
from weft.units import format_bytes

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one picture, or one video. ``image_side``: pixels of the longer side, also of a frame;
    ``image_pixels``: width times height. ``video_frames``: frames that are read. Errors name the fields of ``[limits]``
    with the same names.
    """

    image_bytes: int = 32 << 20
    image_pixels: int = 50_000_000
    image_side: int = 16_384
    video_bytes: int = 64 << 20
    video_frames: int = 768


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the transposition that undoes it."""


def decode(data: bytes, limits: ImageLimits = ImageLimits()) -> Pixels:
    """Return the picture as uint8 [height, width, 3].

    Raises RequestError with one line that names the limit, or says that the bytes are not a picture.
    """
    if not data:
        _refuse("the picture is empty")
    if len(data) > limits.image_bytes:
        _refuse(
            f"the picture has {format_bytes(len(data))}; the limit is {format_bytes(limits.image_bytes)} "
            "(limits.image_bytes)"
        )
    if (canvas := _webp_size(data[:30])) is not None:  # Pillow allocates it before it tells the size
        check_size(*canvas, limits)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_size(*image.size, limits)
            turn = _UPRIGHT.get(_orientation(image))
            upright = image if turn is None else image.transpose(turn)
            return np.array(upright.convert("RGB"))
    except RequestError:
        raise
    except Image.DecompressionBombError:
        _refuse(f"the picture has too many pixels; the limit is {limits.image_pixels:,} (limits.image_pixels)")
    except UnidentifiedImageError:
        _refuse("the picture is in no known format; PNG, JPEG, WebP, GIF and BMP are read")
    except MemoryError:
        _refuse("the picture takes more memory than decoding may use")
    except Exception as error:  # a decoder may raise anything for a broken file
        _refuse(f"the picture cannot be decoded: {one_line(error)}")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 if the EXIF block is broken, since the picture itself may be complete."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises errors of many types
        return 1


def _webp_size(head: bytes) -> tuple[int, int] | None:
    """Return width and height of the canvas, as the first chunk of a WebP file says; None for another file."""
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    if head[12:16] == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF


def check_size(width: int, height: int, limits: ImageLimits, what: str = "picture") -> None:
    """Raise RequestError for a picture with no pixels, or one larger than ``limits``."""
    if width < 1 or height < 1:
        _refuse(f"the {what} is {width} x {height} pixels")
    if max(width, height) > limits.image_side:
        _refuse(
            f"the {what} is {width:,} x {height:,} pixels; the limit is {limits.image_side:,} on a side "
            "(limits.image_side)"
        )
    if width * height > limits.image_pixels:
        _refuse(
            f"the {what} is {width:,} x {height:,}, {width * height:,} pixels; the limit is "
            f"{limits.image_pixels:,} (limits.image_pixels)"
        )


def one_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return (said or type(error).__name__)[:200]


def _refuse(reason: str) -> NoReturn:
    raise RequestError(reason, param="image")
