"""Settings of a checkpoint's picture and video processors, read once and checked.

    processor_config.json      {"image_processor": {...}, "use_image_special_tokens": true}   newer saves
    preprocessor_config.json   {"do_image_splitting": true, "tile_size": 512, ...}            LFM2-VL
                               {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}   Qwen3.5
                               neither: the defaults of transformers' Lfm2VlImageProcessor, and those of
                               the releases of Qwen3.5
    video_preprocessor_config.json   of videos, the same way: {"video_processor": {...}} wins, and
                               preprocessor_config.json is next; then Qwen3VLVideoProcessor's defaults

The nested settings win over the separate file, as in transformers. Settings that the tower's geometry repeats (the
side of a patch, how many patches become a row) must agree with config.json, or rows would be counted wrong.

``digest`` names the settings that decide the rows of a picture; it is a part of each picture's digest. Two
checkpoints with equal digests may still have other weights, which a prefix cache distinguishes by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError, RequestError
from weft.families.vision import TowerKind, VisionTower
from weft.files import read_json

_NESTED, _BESIDE = "processor_config.json", "preprocessor_config.json"
_OF_VIDEOS = "video_preprocessor_config.json"
RESAMPLINGS = {2: "bilinear", 3: "bicubic"}
"""Numbers of ``resample``, which are Pillow's."""
TILES_MAX = 256
TOKENS_MAX = 1 << 16
PIXELS_MAX = 1 << 28
FRAMES_MAX = 1 << 14


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings that processors of both kinds have."""

    patch_size: int = 16
    downsample_factor: int = 2
    resample: int = 2

    @property
    def grain(self) -> int:
        """Pixels. Side lengths of a tower's input are multiples of this."""
        return self.patch_size * self.downsample_factor

    @property
    def filter(self) -> str:
        """Name of the filter in ``resizing``."""
        return RESAMPLINGS[self.resample]

    def digest(self) -> bytes:
        """Return 32 bytes over all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


@dataclass(frozen=True, slots=True)
class ImageSettings(_Settings):
    """Settings with the names and defaults of transformers' ``Lfm2VlImageProcessor``. ``mean`` and ``std`` are for
    values in 0..1, after ``rescale_factor``; the tower normalises a picture with them. ``kind``: the kind of the
    tower. ``min_pixels``, ``max_pixels``: bounds of a picture that is always one tile, as Qwen3.5's are; for others
    ``min_tokens`` and ``max_tokens`` set the bounds.
    """

    split: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    thumbnail: bool = True
    min_tokens: int = 64
    max_tokens: int = 256
    tile_size: int = 512
    pixels_tolerance: float = 2.0
    rescale_factor: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    special_tokens: bool = True
    kind: TowerKind = "siglip2"
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def pixel_bounds(self) -> tuple[int, int]:
        """Least and most pixels of an undivided picture after resizing."""
        if self.max_pixels:
            return self.min_pixels, self.max_pixels
        return self.min_tokens * self.grain**2, self.max_tokens * self.grain**2

    @property
    def max_patches(self) -> int:
        """Most patches of one tile or thumbnail."""
        tile = (self.tile_size // self.patch_size) ** 2 if self.split else 0
        return max(self.pixel_bounds[1] // self.patch_size**2, tile)


@dataclass(frozen=True, slots=True)
class VideoSettings(_Settings):
    """Settings with the names and defaults of transformers' ``Qwen3VLVideoProcessor``. ``min_pixels`` and
    ``max_pixels``: bounds of all frames together. ``frames``: frames of a tile. ``sample``: False reads all frames of
    a file. ``cap_frames``: a frame has at most ``frame_tokens`` rows, and at most its share of ``max_pixels``. Values
    are scaled and normalised as those of pictures.
    """

    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 768 * 32 * 32
    min_frames: int = 4
    max_frames: int = 768
    fps: float = 2.0
    sample: bool = True
    cap_frames: bool = False
    frame_tokens: int = 768
    frames: int = 2
    resample: int = 3


def read_settings(directory: Path, tower: VisionTower) -> ImageSettings:
    """Return the picture settings of the checkpoint in ``directory``, whose tower is ``tower``.

    Raises CheckpointError naming file and key for a setting that is malformed, not served, or at odds with
    config.json.
    """
    nested = directory / _NESTED
    outer: dict[str, Any] = read_json(nested) if nested.exists() else {}
    keys = _keys_of(directory, "image_processor", _BESIDE)
    if tower.kind != "siglip2":
        return _read_qwen3_5(keys, tower)
    default = ImageSettings()
    settings = ImageSettings(
        split=keys.boolean("do_image_splitting", default.split),
        min_tiles=keys.integer("min_tiles", default.min_tiles, TILES_MAX),
        max_tiles=keys.integer("max_tiles", default.max_tiles, TILES_MAX),
        thumbnail=keys.boolean("use_thumbnail", default.thumbnail),
        min_tokens=keys.integer("min_image_tokens", default.min_tokens, TOKENS_MAX),
        max_tokens=keys.integer("max_image_tokens", default.max_tokens, TOKENS_MAX),
        patch_size=keys.integer("encoder_patch_size", default.patch_size, 1024),
        downsample_factor=keys.integer("downsample_factor", default.downsample_factor, 64),
        tile_size=keys.integer("tile_size", default.tile_size, 1 << 14),
        pixels_tolerance=keys.number("max_pixels_tolerance", default.pixels_tolerance),
        special_tokens=_Keys(outer, nested).boolean("use_image_special_tokens", True),
        **_of_pixels(keys, default.resample),
    )
    _check(settings, tower, keys)
    return settings


def read_video_settings(directory: Path, tower: VisionTower) -> VideoSettings | None:
    """Return the video settings, or None for a tower that only reads pictures. Raises CheckpointError as
    ``read_settings`` does.
    """
    if tower.video_token_id is None:
        return None
    keys = _keys_of(directory, "video_processor", _OF_VIDEOS, _BESIDE)
    default, size = VideoSettings(), keys.inner("size")
    settings = VideoSettings(
        min_pixels=size.integer("shortest_edge", default.min_pixels, PIXELS_MAX),
        max_pixels=size.integer("longest_edge", default.max_pixels, PIXELS_MAX),
        min_frames=keys.integer("min_frames", default.min_frames, FRAMES_MAX),
        max_frames=keys.integer("max_frames", default.max_frames, FRAMES_MAX),
        fps=keys.number("fps", default.fps),
        sample=keys.boolean("do_sample_frames", default.sample),
        cap_frames=keys.boolean("cap_pixels_per_frame", default.cap_frames),
        frame_tokens=keys.integer("max_video_tokens", default.frame_tokens, TOKENS_MAX),
        patch_size=keys.integer("patch_size", tower.patch_size, 1024),
        downsample_factor=keys.integer("merge_size", tower.projector.downsample_factor, 64),
        frames=keys.integer("temporal_patch_size", tower.frames, 64),
        resample=keys.integer("resample", default.resample, 3, least=2),
    )
    _check_qwen(settings, settings.frames, tower, keys)
    pictures, own = read_settings(directory, tower), _of_pixels(keys, settings.resample)
    for key, name in (("rescale_factor", "rescale_factor"), ("image_mean", "mean"), ("image_std", "std")):
        if own[name] != getattr(pictures, name):
            keys.fail(key, own[name], f"pictures have {getattr(pictures, name)}")
    if not settings.grain**2 <= settings.min_pixels <= settings.max_pixels:
        keys.fail(
            "size",
            {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
            f"pixels must be from {settings.grain**2} on, the least first",
        )
    return settings


def _keys_of(directory: Path, nested: str, *beside: str) -> _Keys:
    """Return the object ``nested`` of the one file, or else the first other file that exists."""
    outer = directory / _NESTED
    inner = read_json(outer).get(nested) if outer.exists() else None
    if isinstance(inner, Mapping):
        return _Keys(inner, outer)
    file = next((directory / name for name in beside if (directory / name).exists()), directory / beside[0])
    return _Keys(read_json(file) if file.exists() else {}, file)


def _read_qwen3_5(keys: _Keys, tower: VisionTower) -> ImageSettings:
    """Return the settings of Qwen3.5; missing ones have the values of its releases. ``min_pixels`` and ``max_pixels``
    win over ``size``, as in transformers.
    """
    size = keys.inner("size")
    settings = ImageSettings(
        kind=tower.kind,
        split=False,
        thumbnail=False,
        special_tokens=False,
        min_pixels=keys.integer("min_pixels", size.integer("shortest_edge", 1 << 16, PIXELS_MAX), PIXELS_MAX),
        max_pixels=keys.integer("max_pixels", size.integer("longest_edge", 1 << 24, PIXELS_MAX), PIXELS_MAX),
        patch_size=keys.integer("patch_size", tower.patch_size, 1024),
        downsample_factor=keys.integer("merge_size", tower.projector.downsample_factor, 64),
        **_of_pixels(keys, 3),
    )
    _check_qwen(settings, keys.integer("temporal_patch_size", tower.frames, 64), tower, keys)
    least, most = settings.pixel_bounds
    if not settings.grain**2 <= least <= most:
        keys.fail(
            "size",
            {"shortest_edge": least, "longest_edge": most},
            f"pixels must be from {settings.grain**2} on, the least first",
        )
    if 0.0 in settings.std:
        keys.fail("image_std", settings.std, "pixels are divided by it")
    return settings


def _check_qwen(settings: ImageSettings | VideoSettings, frames: int, tower: VisionTower, keys: _Keys) -> None:
    """Check settings that config.json repeats."""
    for key, value, known in (
        ("patch_size", settings.patch_size, tower.patch_size),
        ("merge_size", settings.downsample_factor, tower.projector.downsample_factor),
        ("temporal_patch_size", frames, tower.frames),
    ):
        if value != known:
            keys.fail(key, value, f"config.json has {known}")
    if not keys.boolean("do_resize", True):
        keys.fail("do_resize", False, "pictures are resized to the tower's sizes")


def _of_pixels(keys: _Keys, resample: int) -> dict[str, Any]:
    """Return the settings of pixel values, which every processor has."""
    if keys.boolean("do_center_crop", False):
        keys.fail("do_center_crop", True, "pictures are resized without cropping")
    identity, default = not keys.boolean("do_normalize", True), ImageSettings()
    return {
        "resample": keys.integer("resample", resample, 3, least=2),
        "rescale_factor": (
            keys.number("rescale_factor", default.rescale_factor) if keys.boolean("do_rescale", True) else 1.0
        ),
        "mean": (0.0, 0.0, 0.0) if identity else keys.channels("image_mean", default.mean),
        "std": (1.0, 1.0, 1.0) if identity else keys.channels("image_std", default.std),
    }


def check_patches(height: int, width: int, pixels: int, settings: ImageSettings) -> None:
    """Raise RequestError for a picture of ``width`` x ``height`` that becomes too many ``pixels``."""
    patches = pixels // settings.patch_size**2
    if patches > settings.max_patches:
        raise RequestError(
            f"the picture is {width:,} x {height:,} pixels, too long and narrow: it makes "
            f"{patches:,} patches, and the model takes {settings.max_patches:,}",
            param="image",
        )


def _check(settings: ImageSettings, tower: VisionTower, keys: _Keys) -> None:
    if settings.patch_size != tower.patch_size:
        keys.fail("encoder_patch_size", settings.patch_size, f"the tower's patches have {tower.patch_size}")
    if settings.downsample_factor != tower.projector.downsample_factor:
        keys.fail(
            "downsample_factor", settings.downsample_factor, f"config.json has {tower.projector.downsample_factor}"
        )
    if settings.tile_size % settings.grain:
        keys.fail("tile_size", settings.tile_size, f"it must be a multiple of {settings.grain}")
    if settings.split and settings.min_tiles > settings.max_tiles:
        keys.fail("min_tiles", settings.min_tiles, f"max_tiles is {settings.max_tiles}")
    if settings.min_tokens > settings.max_tokens:
        keys.fail("min_image_tokens", settings.min_tokens, f"max_image_tokens is {settings.max_tokens}")
    if 0.0 in settings.std:
        keys.fail("image_std", settings.std, "pixels are divided by it")


class _Keys:
    """Typed reader of one of the files; null counts as absent."""

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        self._config = config
        self._file = file

    def fail(self, key: str, value: object, reason: str) -> None:
        raise CheckpointError(f"{self._file}: {key} is {value!r:.100}: {reason}", param="model")

    def inner(self, key: str) -> _Keys:
        value = self._config.get(key) or {}
        if not isinstance(value, Mapping):
            self.fail(key, value, "it must be an object")
        return _Keys(value, self._file)

    def integer(self, key: str, default: int, most: int, *, least: int = 1) -> int:
        value = default if self._config.get(key) is None else self._config[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fail(key, value, f"it must be a whole number from {least} to {most}")
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = default if self._config.get(key) is None else self._config[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            self.fail(key, value, "it must be a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = default if self._config.get(key) is None else self._config[key]
        if not isinstance(value, bool):
            self.fail(key, value, "it must be true or false")
        return bool(value)

    def channels(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """Return a number for each of red, green and blue; a single number is for all."""
        value = default if self._config.get(key) is None else self._config[key]
        values = [value] * 3 if isinstance(value, int | float) else value
        if not (
            isinstance(values, list | tuple)
            and len(values) == 3
            and all(isinstance(number, int | float) and abs(number) < 1e6 for number in values)
        ):
            self.fail(key, value, "it must be three numbers")
        red, green, blue = values
        return float(red), float(green), float(blue)
