"""Settings of a checkpoint's image processor: both files, their order, and what does not fit the tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.errors import CheckpointError
from weft.families.vision import Projector, VisionTower
from weft.images.settings import ImageSettings, read_settings

TOWER = VisionTower(32, 2, 4, 64, 16, 256, 1e-6, "gelu_tanh", Projector(64, "gelu", True, True, 2), 396)


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value))


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    assert read_settings(tmp_path, TOWER) == ImageSettings()


def test_the_file_of_a_release_is_read(tmp_path: Path) -> None:
    write(tmp_path, "processor_config.json", {"processor_class": "Lfm2VlProcessor"})
    write(
        tmp_path,
        "preprocessor_config.json",
        {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "use_thumbnail": False,
            "max_tiles": 6,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": 0.25,
            "resample": 3,
            "tile_size": 256,
            "size": None,
        },
    )
    assert read_settings(tmp_path, TOWER) == ImageSettings(
        thumbnail=False, max_tiles=6, mean=(0.5, 0.4, 0.3), std=(0.25, 0.25, 0.25), resample=3, tile_size=256
    )


def test_nested_settings_win(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", {"max_tiles": 6})
    write(
        tmp_path,
        "processor_config.json",
        {"image_processor": {"max_tiles": 4, "do_normalize": False}, "use_image_special_tokens": False},
    )
    settings = read_settings(tmp_path, TOWER)
    assert (settings.max_tiles, settings.special_tokens) == (4, False)
    assert (settings.mean, settings.std) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("encoder_patch_size", 14, "the tower's patches have 16"),
        ("downsample_factor", 3, "config.json has 2"),
        ("tile_size", 500, "a multiple of 32"),
        ("min_tiles", 11, "max_tiles is 10"),
        ("resample", 5, "from 2 to 3"),
        ("use_thumbnail", 1, "true or false"),
        ("image_std", [1, 0, 1], "divided by it"),
        ("image_mean", [1, 2], "three numbers"),
        ("max_pixels_tolerance", "2", "a number above 0"),
        ("min_image_tokens", 300, "max_image_tokens is 256"),
    ],
)
def test_a_setting_that_is_not_served_is_named(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    write(tmp_path, "preprocessor_config.json", {key: value})
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {key} is .*{reason}"):
        read_settings(tmp_path, TOWER)


def test_each_setting_changes_the_digest() -> None:
    settings = [
        ImageSettings(),
        ImageSettings(split=False),
        ImageSettings(max_tiles=9),
        ImageSettings(resample=3),
        ImageSettings(mean=(0.5, 0.5, 0.4)),
        ImageSettings(special_tokens=False),
    ]
    assert len({one.digest() for one in settings}) == len(settings)
    assert ImageSettings().digest() == ImageSettings().digest()
