"""Conversion of video frames to the patches that Qwen3.5 was trained on: two frames per tile, and times as text.

    frames   0.0 s  0.5 s | 1.0 s  1.5 s | 2.0 s         resized alike, the last one twice where it is alone
    tiles    16 x 9       | 16 x 9       | 16 x 9        a patch is the same 16 x 16 pixels of both frames
    text     <0.2 seconds><|vision_start|> 36 <|vision_end|><1.2 seconds><|vision_start|> 36 <|vision_end|>...

For the rest of weft a video is a ``Picture`` with a sequence of tiles: the rows have one digest over all frames, and
each tile has its own positions in the prompt, with ordinary text between tiles. In the tower a tile sees no other tile.
The template writes one video token, within its own ``<|vision_start|>`` and ``<|vision_end|>``.

The processor samples frames of a file evenly, some for each second; it takes all frames of a list. All frames together
have at most ``max_pixels``, so a longer video has smaller frames.

Sizes, sampling, times and pixels (``resizing``) are those of transformers' ``Qwen3VLVideoProcessor`` and
``Qwen3VLProcessor``, from 5.10 on. Frames are resized one by one, so a video takes the memory of its patches and of
one frame.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

import msgspec
import numpy as np

from weft.errors import RequestError
from weft.images.picture import Picture, Pixels, TextPart, Tile, patches_of
from weft.images.qwen3_5 import ASPECT_MAX
from weft.images.resizing import resize
from weft.images.settings import VideoSettings

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"


class Sampling(msgspec.Struct, frozen=True):
    """Sampling that a request asks for; None: as the checkpoint says. ``fps``: frames per second that are taken from a
    file, or that a list of frames has.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None


def sampled(total: int, file_fps: float, sampling: Sampling, settings: VideoSettings) -> list[int]:
    """Return the indices of the frames to take, of ``total`` frames of a file."""
    if not settings.sample:
        return list(range(total))
    count = int(total / file_fps * (sampling.fps or settings.fps))
    count = min(
        max(count, sampling.min_frames or settings.min_frames), sampling.max_frames or settings.max_frames, total
    )
    places: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return places


def prepare(frames: Iterable[Pixels], seconds: Sequence[float], settings: VideoSettings) -> Picture:
    """Return the patches of one video. ``frames``: uint8 [height, width, 3], of one size; ``seconds``: the time at
    which each frame is shown.

    Raises RequestError for frames that differ in size, too few of them, and a shape that is too long.
    """
    if len(seconds) < settings.frames:
        _refuse(f"the video has {len(seconds)} frame{'s' * (len(seconds) != 1)}; it needs {settings.frames} at least")
    digest, patches = hashlib.sha256(b"video" + settings.digest()), []
    shape, height, width = None, 0, 0
    for number, rgb in enumerate(frames):
        if shape is None:
            shape = rgb.shape
            height, width = resized(len(seconds), shape[0], shape[1], settings)
            digest.update(np.asarray((len(seconds), *shape), "<u8").tobytes())
        if rgb.shape != shape:
            _refuse(
                f"frame {number} of the video has {rgb.shape[1]} x {rgb.shape[0]} pixels, the first "
                f"{shape[1]} x {shape[0]}; all frames need one size"
            )
        digest.update(np.ascontiguousarray(rgb).data)
        patches.append(patches_of(resize(rgb, width, height, settings.filter), settings.patch_size))
    assert shape is not None
    assert len(patches) == len(seconds)
    each, missing = settings.frames, -len(patches) % settings.frames
    patches += patches[-1:] * missing
    times = [*seconds, *[seconds[-1]] * missing]
    tiles = tuple(_joined(patches[first : first + each]) for first in range(0, len(patches), each))
    rows = tiles[0].rows * tiles[0].columns // settings.downsample_factor**2
    text: list[TextPart] = []
    for first in range(0, len(times), each):
        middle = (times[first] + times[first + each - 1]) / 2
        text += [f"{VISION_END * bool(first)}<{middle:.1f} seconds>{VISION_START}", rows]
    return Picture(digest.digest(), tiles, (*text, VISION_END), shape[1], shape[0], "video")


def resized(frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int]:
    """Return (height, width) of each frame: the aspect ratio as near as multiples of ``grain`` allow, and the pixels
    of all frames within the bounds. Source: ``smart_resize`` of transformers' ``qwen3_vl`` videos.
    """
    grain, least, most = settings.grain, settings.min_pixels, settings.max_pixels
    if settings.cap_frames:
        most = frames * max(min(settings.frame_tokens * grain**2, most // frames), int(least * 1.05))
    if min(height, width) < grain:
        scale = max(grain / height, grain / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > ASPECT_MAX * min(height, width):
        _refuse(
            f"the video is {width:,} x {height:,} pixels, too long and narrow: the longer side may be "
            f"{ASPECT_MAX} times the shorter one"
        )
    near_height, near_width = round(height / grain) * grain, round(width / grain) * grain
    near = round(frames / settings.frames) * settings.frames * near_height * near_width
    if near > most:
        shrink = math.sqrt(frames * height * width / most)
        return (
            max(grain, math.floor(height / shrink / grain) * grain),
            max(grain, math.floor(width / shrink / grain) * grain),
        )
    if near < least:
        grow = math.sqrt(least / (frames * height * width))
        return math.ceil(height * grow / grain) * grain, math.ceil(width * grow / grain) * grain
    return near_height, near_width


def _joined(frames: Sequence[Tile]) -> Tile:
    """Return one tile that has the same patches of each frame."""
    first = frames[0]
    return Tile(np.concatenate([frame.patches for frame in frames], 1), first.rows, first.columns)


def _refuse(reason: str) -> NoReturn:
    raise RequestError(reason, param="video")
