"""Video files to frames, by PyAV (FFmpeg), which the extra ``weft[video]`` installs.

    bytes --first bytes--> MP4, WebM, AVI --header--> sides, rate, count --sampling--> decoder --> RGB frames
                           nothing else opened        before any frame is decoded

Files come from untrusted clients. FFmpeg detects formats by itself, and some formats are lists of other files or
addresses. So the demuxer is chosen here, by the first bytes, and may open nothing else. Only a short list of decoders
is allowed. Sides are checked before a frame is decoded, and again by the decoder. Run it only in a worker that has a
limit of memory and of time.

Frames are counted if the file does not state their number. A file with fewer frames than stated is read again, with the
true count.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from weft.errors import RequestError
from weft.images.decoding import ImageLimits, check_size, one_line
from weft.images.picture import Pixels
from weft.units import format_bytes

CODECS = "h264,hevc,vp8,vp9,libdav1d,av1,mpeg4,mjpeg"
_UNKNOWN_FPS = 24.0
"""Frames per second of a file that names no rate, as in transformers."""
Result = TypeVar("Result")


def with_frames(
    data: bytes,
    limits: ImageLimits,
    choose: Callable[[int, float], list[int]],
    use: Callable[[Iterator[Pixels], list[float]], Result],
) -> Result:
    """Return ``use(frames, seconds)`` over the frames [height, width, 3] that ``choose(count, frames a second)``
    names, ascending.

    Raises RequestError with one line for a file that is not a video, is too large, or cannot be decoded.
    """
    if len(data) > limits.video_bytes:
        _refuse(
            f"the video has {format_bytes(len(data))}; the limit is {format_bytes(limits.video_bytes)} "
            "(limits.video_bytes)"
        )
    form, total = _form(data), None
    try:
        import av
    except ImportError:
        _refuse(
            "files of videos are read with PyAV, which is not installed here (pip install "
            '\'weft[video]\'); send frames as pictures: {"type": "video", "video": [URL, ...]}'
        )
    for _ in range(2):
        try:
            with av.open(
                io.BytesIO(data), format=form, options={"protocol_whitelist": "none", "codec_whitelist": CODECS}
            ) as container:
                if not container.streams.video:
                    _refuse("the file has no video in it")
                stream = container.streams.video[0]
                check_size(stream.width, stream.height, limits, "video")
                stream.codec_context.options = {"max_pixels": str(limits.image_pixels), "codec_whitelist": CODECS}
                stream.codec_context.thread_count = 1
                fps = float(stream.average_rate or _UNKNOWN_FPS)
                total = total or stream.frames or _counted(container, stream)
                wanted = choose(total, fps)
                if len(wanted) > limits.video_frames:
                    _refuse(
                        f"{len(wanted)} frames of the video would be read; the limit is "
                        f"{limits.video_frames} (limits.video_frames): lower fps or max_frames"
                    )
                return use(_frames(container, stream, wanted, limits), [index / fps for index in wanted])
        except RequestError:
            raise
        except _Fewer as fewer:
            total = fewer.count
        except MemoryError:
            _refuse("reading the video takes more memory than it may use")
        except Exception as error:  # a decoder may raise anything for a broken file
            reason = getattr(error, "strerror", None) or one_line(error)  # FFmpeg's own words
            _refuse(f"the video cannot be decoded: {reason}")
    _refuse("the video cannot be decoded: each attempt finds another number of frames")


class _Fewer(Exception):
    """A file has ``count`` frames, fewer than it states."""

    def __init__(self, count: int) -> None:
        self.count = count


def _frames(container: Any, stream: Any, wanted: list[int], limits: ImageLimits) -> Iterator[Pixels]:
    count, places = 0, iter(wanted)
    place = next(places, None)
    for frame in container.decode(stream):
        if place is None:
            return
        if count == place:
            check_size(frame.width, frame.height, limits, "video")
            yield _upright(frame)
            place = next(places, None)
        count += 1
    if place is not None:
        if not count:
            _refuse("the video has no frame that can be decoded")
        raise _Fewer(count)


def _upright(frame: Any) -> Pixels:
    """Return the frame as players show it: phones record the angle they were held at."""
    import numpy as np

    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4))


def _counted(container: Any, stream: Any) -> int:
    count: int = sum(packet.size > 0 for packet in container.demux(stream))
    container.seek(0)
    return max(count, 1)


def _form(data: bytes) -> str:
    """Return the name of FFmpeg's demuxer."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mov"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    _refuse("the video is in no known format; MP4, MOV, WebM, Matroska and AVI are read")


def _refuse(reason: str) -> NoReturn:
    raise RequestError(reason, param="video")
