"""Sizes, grids, prompts and pixels are those of transformers' processor.

``tests.support.library_pictures`` made the stored values, with the processor itself. All pixels are compared
with torch's resize, which torchvision's calls.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.library_pictures import FILE, places
from tests.support.pictures import KINDS, drawn
from weft.errors import RequestError
from weft.images.lfm2_vl import grid, is_large, prepare, resized
from weft.images.picture import Picture, Pixels, patches_of
from weft.images.resizing import FILTERS, resize
from weft.images.settings import ImageSettings

STORED = np.load(FILE)
ROWS: list[dict[str, Any]] = json.loads(bytes(STORED["rows"]))
FIELDS = {
    "use_thumbnail": "thumbnail",
    "do_image_splitting": "split",
    "min_tiles": "min_tiles",
    "max_tiles": "max_tiles",
    "resample": "resample",
    "min_image_tokens": "min_tokens",
    "max_image_tokens": "max_tokens",
    "tile_size": "tile_size",
    "use_image_special_tokens": "special_tokens",
}


def prepared(number: int) -> Picture:
    row = ROWS[number]
    settings = ImageSettings(**{FIELDS[name]: value for name, value in row["settings"].items()})
    return prepare(drawn(row["kind"], *row["size"], seed=number), settings)


def worst_step(picture: Picture, number: int) -> int:
    """The largest difference from the stored values, in steps of 8 bits."""
    worst = 0
    for index, tile in enumerate(picture.tiles):
        values = tile.patches.reshape(-1)
        stored = STORED[f"{number}.{index}"].astype(int)
        worst = max(worst, int(np.abs(values[places(values.size, index)] - stored).max()))
    return worst


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_picture_is_what_the_processor_makes_of_it(number: int) -> None:
    row, picture = ROWS[number], prepared(number)
    assert [[tile.rows, tile.columns] for tile in picture.tiles] == row["grids"]
    assert "".join("." * part if isinstance(part, int) else part for part in picture.text) == row["text"]
    patches = sum(tile.rows * tile.columns for tile in picture.tiles)
    assert picture.rows == row["text"].count(".") == patches // 4
    assert worst_step(picture, number) == 0


def test_patches_in_another_order_are_noticed() -> None:
    number = next(i for i, row in enumerate(ROWS) if row["kind"] == "photo" and len(row["grids"]) > 2)
    picture = prepared(number)
    turned = [
        patches_of(np.ascontiguousarray(whole(tile.patches, tile.rows).transpose(1, 0, 2)), 16)
        for tile in picture.tiles
    ]
    spoiled = Picture(picture.digest, tuple(turned), picture.text, picture.width, picture.height)
    assert worst_step(spoiled, number) > 1


def whole(patches: Pixels, rows: int, side: int = 16) -> Pixels:
    """The pixels of a tile, out of its patches."""
    cut = patches.reshape(rows, -1, side, side, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * side, -1, 3)


def of_torch(rgb: Pixels, height: int, width: int) -> Pixels:
    image = torch.from_numpy(rgb).permute(2, 0, 1)[None].contiguous()
    resized = F.interpolate(image, (height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("kind", "width", "height"),
    [
        *((kind, 1000, 400) for kind in KINDS),
        ("noise", 40, 30),
        ("photo", 300, 900),
        ("text", 1024, 1024),
        ("gradient", 2000, 1400),
    ],
)
def test_every_pixel_is_within_one_step_of_torchs_resize(kind: str, width: int, height: int) -> None:
    """Weights come from the sizes and roundings from what is shown: each size once, each kind at one size."""
    settings, rgb = ImageSettings(), drawn(kind, width, height, seed=7)
    picture = prepare(rgb, settings)
    tiles = [whole(tile.patches, tile.rows) for tile in picture.tiles]
    last = of_torch(rgb, *tiles[-1].shape[:2])
    assert np.abs(tiles[-1].astype(int) - last).max() <= 1
    if len(tiles) == 1:
        return
    assert is_large(height, width, settings)
    columns, rows = grid(height, width, settings)
    tiled = of_torch(rgb, rows * 512, columns * 512)
    for number, tile in enumerate(tiles[:-1]):
        top, left = number // columns * 512, number % columns * 512
        assert np.abs(tile.astype(int) - tiled[top : top + 512, left : left + 512]).max() <= 1


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((5, 900), (32, 200)),
        ((333, 77), (77, 333)),
        ((640, 480), (640, 96)),
        ((500, 400), (400, 320)),
        ((1200, 70), (16, 16)),
    ],
)
def test_resizing_is_torchs(name: str, size: tuple[int, int], wanted: tuple[int, int]) -> None:
    rgb = drawn("noise", *size, seed=3)
    image = torch.from_numpy(rgb).permute(2, 0, 1)[None].contiguous()
    truth = F.interpolate(image, wanted[::-1], mode=name, antialias=True)[0].permute(1, 2, 0).numpy()
    assert np.abs(resize(rgb, *wanted, name).astype(int) - truth).max() <= 1


def test_a_resize_without_antialiasing_is_noticed() -> None:
    rgb = drawn("photo", 1000, 400, seed=7)
    [tile] = prepare(rgb, ImageSettings()).tiles
    plain = F.interpolate(
        torch.from_numpy(rgb).permute(2, 0, 1)[None].float(), (tile.rows * 16, tile.columns * 16), mode="bilinear"
    )
    worst = np.abs(whole(tile.patches, tile.rows) - plain[0].permute(1, 2, 0).numpy()).max()
    assert worst > 1


def test_a_digest_names_pixels_shape_and_settings() -> None:
    rgb = drawn("photo", 60, 40)
    settings = ImageSettings()
    one = prepare(rgb, settings).digest
    assert len(one) == 32
    assert prepare(rgb.copy(), settings).digest == one
    other = rgb.copy()
    other[3, 5, 1] ^= 1
    turned = rgb.reshape(60, 40, 3)
    assert (
        len(
            {
                one,
                prepare(other, settings).digest,
                prepare(turned, settings).digest,
                prepare(rgb, ImageSettings(thumbnail=False)).digest,
            }
        )
        == 4
    )


def test_a_picture_crosses_a_process_boundary() -> None:
    picture = prepare(drawn("photo", 1300, 900), ImageSettings())
    back = Picture.from_bytes(picture.to_bytes())
    assert (back.digest, back.text, back.width, back.height) == (
        picture.digest,
        picture.text,
        picture.width,
        picture.height,
    )
    for ours, theirs in zip(picture.tiles, back.tiles, strict=True):
        assert (ours.rows, ours.columns) == (theirs.rows, theirs.columns)
        np.testing.assert_array_equal(ours.patches, theirs.patches)
    for broken in (b"", b"\x90", picture.to_bytes()[:-1]):
        with pytest.raises(ValueError, match="no picture"):
            Picture.from_bytes(broken)


def test_long_and_narrow_pictures_are_refused_or_fit() -> None:
    settings = ImageSettings()
    with pytest.raises(
        RequestError, match="20,000 x 10 pixels, too long and narrow: it makes 2,860 patches, and the model takes 1,024"
    ):
        prepare(np.zeros((10, 20_000, 3), np.uint8), settings)
    for width, height in [(1, 1), (1, 500), (16_000, 40), (8_000, 30), (3, 16_000)]:
        tall, wide = resized(height, width, settings)
        assert tall % 32 == wide % 32 == 0
        if tall * wide <= settings.max_patches * 256:
            picture = prepare(np.zeros((height, width, 3), np.uint8), settings)
            assert all(len(tile.patches) <= settings.max_patches for tile in picture.tiles)
