"""What a worker of pictures does: a ``data:`` URL to the patches that a tower reads (``weft.text.workers``).

    start:  PictureStart      job:  b"u" URL | b"f" the bytes of a file
                                  -> b"+" Picture | b"-" the reason that it is refused

Decoders read files of strangers, and take time and memory by what a file says of itself. So they run here, in
a process with a limit of memory that is ended when a picture takes too long.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from pathlib import Path

import msgspec

from weft.errors import RequestError
from weft.families import read_architecture
from weft.families.vision import TowerKind
from weft.files import read_json
from weft.images import lfm2_vl, qwen3_5
from weft.images.decoding import ImageLimits, decode
from weft.images.picture import Picture, Pixels
from weft.images.settings import ImageSettings, read_settings

URL, FILE = b"u", b"f"
_ACCEPTED, _REFUSED = b"+", b"-"
PREPARE: dict[TowerKind, Callable[[Pixels, ImageSettings], Picture]] = {
    "siglip2": lfm2_vl.prepare, "qwen3_5": qwen3_5.prepare}


class PictureStart(msgspec.Struct):
    settings: ImageSettings
    limits: ImageLimits


def settings_of(directory: Path) -> ImageSettings:
    """Of a checkpoint with a vision tower. Raises CheckpointError."""
    tower = read_architecture(read_json(directory / "config.json")).vision
    assert tower is not None
    return read_settings(directory, tower)


def read_picture(source: str | bytes, settings: ImageSettings, limits: ImageLimits) -> Picture:
    """``source``: a ``data:`` URL, or the bytes of a file. Raises RequestError."""
    data = data_of(source, limits) if isinstance(source, str) else source
    return PREPARE[settings.kind](decode(data, limits), settings)


def data_of(url: str, limits: ImageLimits) -> bytes:
    """The bytes of a ``data:`` URL in base64. Raises RequestError for every other address."""
    scheme, _, rest = url.partition(":")
    head, comma, text = rest.partition(",")
    if scheme.lower() != "data":
        raise RequestError(f"the picture is at {url[:100]!r}; it must be a data: URL "
                           "(data:image/png;base64,...)")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"the data: URL begins {url[:60]!r}; it must be data:image/TYPE;base64,DATA")
    if len(text) > limits.image_bytes // 3 * 4 + 4:
        raise RequestError(f"the picture has {len(text)} characters of base64; the limit is "
                           f"{limits.image_bytes} bytes (limits.image_bytes)")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the data: URL is no base64: {error}") from None


def decoded(answer: bytes) -> Picture:
    """The picture of an answer. Raises RequestError."""
    if answer[:1] != _ACCEPTED:
        raise RequestError(answer[1:].decode())
    return Picture.from_bytes(memoryview(answer)[1:])


def prepare(start: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    given = msgspec.msgpack.decode(start, type=PictureStart)
    return b"", lambda body: _answer(body, given)


def _answer(body: bytes, given: PictureStart) -> bytes:
    try:
        source = body[1:].decode() if body[:1] == URL else body[1:]
        return _ACCEPTED + read_picture(source, given.settings, given.limits).to_bytes()
    except RequestError as error:
        return _REFUSED + error.message.encode()
    except (MemoryError, UnicodeDecodeError) as error:
        return _REFUSED + f"the picture cannot be read: {type(error).__name__}".encode()
