"""Sizes and pixels of Qwen3.5's pictures are those of transformers' processor, made by
``tests.support.library_pictures``; all pixels are compared with torch's resize, which torchvision's calls."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.library_pictures import FILE, places
from tests.support.pictures import KINDS, drawn
from tests.unit.images.test_lfm2_vl import whole
from weft.errors import CheckpointError, RequestError
from weft.families.vision import Projector, VisionTower
from weft.images.picture import Picture
from weft.images.qwen3_5 import prepare
from weft.images.settings import ImageSettings, read_settings

STORED = np.load(FILE)
ROWS: list[dict[str, Any]] = json.loads(bytes(STORED["qwen_rows"]))
TOWER = VisionTower(
    64,
    2,
    4,
    64,
    16,
    256,
    1e-6,
    "gelu_tanh",
    Projector(256, "gelu", True, False, 2),
    400,
    kind="qwen3_5",
    frames=2,
    sections=(11, 11, 10),
)


def settings_of(directory: Path, written: dict[str, Any]) -> ImageSettings:
    (directory / "preprocessor_config.json").write_text(json.dumps(written))
    return read_settings(directory, TOWER)


def worst_step(picture: Picture, number: int) -> int:
    """In steps of 8 bits."""
    values = picture.tiles[0].patches.reshape(-1)
    stored = STORED[f"qwen.{number}"].astype(int)
    return int(np.abs(values[places(values.size, number)] - stored).max())


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_picture_is_what_the_processor_makes_of_it(number: int, tmp_path: Path) -> None:
    row = ROWS[number]
    picture = prepare(drawn(row["kind"], *row["size"], seed=number), settings_of(tmp_path, row["settings"]))
    [tile] = picture.tiles
    assert [tile.rows, tile.columns] == row["grid"]
    assert picture.text == (tile.rows * tile.columns // 4,)
    assert worst_step(picture, number) == 0


def test_pixels_in_another_order_are_noticed(tmp_path: Path) -> None:
    number = next(at for at, row in enumerate(ROWS) if row["size"] == [2000, 1400])
    row = ROWS[number]
    picture = prepare(drawn(row["kind"], *row["size"], seed=number), settings_of(tmp_path, row["settings"]))
    [tile] = picture.tiles
    turned = dataclasses.replace(tile, patches=np.ascontiguousarray(tile.patches[:, ::-1]))
    assert worst_step(dataclasses.replace(picture, tiles=(turned,)), number) > 1


@pytest.mark.parametrize(
    ("kind", "width", "height"),
    [*((kind, 1000, 400) for kind in KINDS), ("noise", 40, 30), ("photo", 300, 900), ("gradient", 2000, 1400)],
)
def test_every_pixel_is_within_one_step_of_torchs_resize(kind: str, width: int, height: int, tmp_path: Path) -> None:
    """Weights come from the sizes and roundings from what is shown: each size once, each kind at one size."""
    rgb = drawn(kind, width, height, seed=7)
    [tile] = prepare(rgb, settings_of(tmp_path, {})).tiles
    image = torch.from_numpy(rgb).permute(2, 0, 1)[None].contiguous()
    truth = F.interpolate(image, (tile.rows * 16, tile.columns * 16), mode="bicubic", antialias=True)
    ours = whole(tile.patches, tile.rows).astype(int)
    assert np.abs(ours - truth[0].permute(1, 2, 0).numpy()).max() <= 1


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 300)])
def test_a_picture_that_is_too_long_is_one_line(width: int, height: int, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"{width} x {height} pixels, too long and narrow: .* 200 times"):
        prepare(drawn("noise", width, height), settings_of(tmp_path, {}))


def test_silence_means_what_the_releases_say(tmp_path: Path) -> None:
    settings = read_settings(tmp_path, TOWER)
    assert settings.pixel_bounds == (65_536, 16_777_216)
    assert (settings.filter, settings.grain, settings.mean) == ("bicubic", 32, (0.5, 0.5, 0.5))
    own = settings_of(tmp_path, {"size": {"shortest_edge": 4096, "longest_edge": 8192}, "max_pixels": 10_000})
    assert own.pixel_bounds == (4096, 10_000)
    assert own.digest() != settings.digest()


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"patch_size": 14}, "patch_size is 14: config.json has 16"),
        ({"merge_size": 4}, "merge_size is 4"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1"),
        ({"do_resize": False}, "do_resize is False"),
        ({"size": 7}, "size is 7: it must be an object"),
        ({"image_std": [1, 0, 1]}, "divided by it"),
        ({"size": {"shortest_edge": 8192, "longest_edge": 4096}}, "the least first"),
    ],
)
def test_a_setting_that_is_not_served_is_named(tmp_path: Path, written: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: .*{reason}"):
        settings_of(tmp_path, written)
