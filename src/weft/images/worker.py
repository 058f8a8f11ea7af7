"""Work of a picture process: a ``data:`` URL to the patches that a tower reads (``weft.text.workers``).

    start:  PictureStart      job:  b"u" URL | b"f" the bytes of a file | b"v" VideoJob
                                  -> b"+" Picture | b"-" the reason that it is refused

A video is one file, or a list of frames that are pictures. ``data:video/jpeg;base64,FRAME,FRAME`` is such a list too,
as in other engines.

Decoders read untrusted files, and the header of a file decides how much time and memory they take. So they run here, in
a process with a limit of memory that is killed when a picture takes too long.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.families import read_architecture
from weft.families.vision import TowerKind
from weft.files import read_json
from weft.images import containers, lfm2_vl, qwen3_5, video
from weft.images.decoding import ImageLimits, decode
from weft.images.picture import Picture, Pixels
from weft.images.settings import ImageSettings, VideoSettings, read_settings, read_video_settings
from weft.images.video import Sampling

URL, FILE, VIDEO = b"u", b"f", b"v"
_ACCEPTED, _REFUSED = b"+", b"-"
PREPARE: dict[TowerKind, Callable[[Pixels, ImageSettings], Picture]] = {
    "siglip2": lfm2_vl.prepare,
    "qwen3_5": qwen3_5.prepare,
    "lfm3": qwen3_5.prepare,
}

Source = str | bytes
"""An address, or the bytes of a file."""


class PictureStart(msgspec.Struct):
    settings: ImageSettings
    limits: ImageLimits
    videos: VideoSettings | None = None


class VideoJob(msgspec.Struct, array_like=True):
    """Job to prepare a video. ``source``: a ``Source``, or the list of the sources of its frames."""

    source: Any
    sampling: Sampling


def start_of(directory: Path, limits: ImageLimits) -> PictureStart:
    """Return the settings of a checkpoint with a vision tower. Raises CheckpointError."""
    tower = read_architecture(read_json(directory / "config.json")).vision
    assert tower is not None
    return PictureStart(read_settings(directory, tower), limits, read_video_settings(directory, tower))


def read_picture(source: str | bytes, settings: ImageSettings, limits: ImageLimits) -> Picture:
    """Return a prepared picture. ``source``: a ``data:`` URL, or the bytes of a file. Raises RequestError."""
    data = data_of(source, limits) if isinstance(source, str) else source
    return PREPARE[settings.kind](decode(data, limits), settings)


def read_video(source: Source | Sequence[Source], sampling: Sampling, start: PictureStart) -> Picture:
    """Return a prepared video. ``source``: as in ``VideoJob``. Raises RequestError."""
    settings, limits = start.videos, start.limits
    assert settings is not None
    if isinstance(source, str) and source[:17].lower() == "data:video/jpeg;b":
        head, _, frames = source.partition(",")
        source = [f"{head},{frame}" for frame in frames.split(",")]
    if isinstance(source, str | bytes):
        data = data_of(source, limits, "video") if isinstance(source, str) else source
        return containers.with_frames(
            data,
            limits,
            lambda total, fps: video.sampled(total, fps, sampling, settings),
            lambda frames, seconds: video.prepare(frames, seconds, settings),
        )
    if len(source) > limits.video_frames:
        raise RequestError(
            f"the video has {len(source)} frames; the limit is {limits.video_frames} (limits.video_frames)"
        )
    seconds = [index / (sampling.fps or settings.fps) for index in range(len(source))]
    return video.prepare((_frame(*numbered, limits) for numbered in enumerate(source)), seconds, settings)


def _frame(number: int, source: Source, limits: ImageLimits) -> Pixels:
    try:
        return decode(data_of(source, limits) if isinstance(source, str) else source, limits)
    except RequestError as error:
        raise RequestError(f"frame {number}: {error.message}") from None


def data_of(url: str, limits: ImageLimits, what: str = "picture") -> bytes:
    """Return the bytes of a ``data:`` URL in base64. Raises RequestError for every other address."""
    scheme, _, rest = url.partition(":")
    head, comma, text = rest.partition(",")
    kind, most, name = (
        ("image/png", limits.image_bytes, "limits.image_bytes")
        if what == "picture"
        else ("video/mp4", limits.video_bytes, "limits.video_bytes")
    )
    if scheme.lower() != "data":
        raise RequestError(f"the {what} is at {url[:100]!r}; it must be a data: URL (data:{kind};base64,...)")
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"the data: URL begins {url[:60]!r}; it must be data:{kind[:6]}TYPE;base64,DATA")
    if len(text) > most // 3 * 4 + 4:
        raise RequestError(f"the {what} has {len(text)} characters of base64; the limit is {most} bytes ({name})")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the data: URL is not base64: {error}") from None


def decoded(answer: bytes) -> Picture:
    """Return the picture of an answer. Raises RequestError."""
    if answer[:1] != _ACCEPTED:
        raise RequestError(answer[1:].decode())
    return Picture.from_bytes(memoryview(answer)[1:])


def prepare(start: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    pictures = msgspec.msgpack.decode(start, type=PictureStart)
    return b"", lambda body: _answer(body, pictures)


def _answer(body: bytes, start: PictureStart) -> bytes:
    try:
        if body[:1] == VIDEO:
            job = msgspec.msgpack.decode(memoryview(body)[1:], type=VideoJob)
            return _ACCEPTED + read_video(job.source, job.sampling, start).to_bytes()
        source = body[1:].decode() if body[:1] == URL else body[1:]
        return _ACCEPTED + read_picture(source, start.settings, start.limits).to_bytes()
    except RequestError as error:
        return _REFUSED + error.message.encode()
    except (MemoryError, UnicodeDecodeError) as error:
        return _REFUSED + f"the picture cannot be read: {type(error).__name__}".encode()
