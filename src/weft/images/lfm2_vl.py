"""Conversion of pixels to the patches that LFM2-VL was trained on: one resized picture, or tiles and a thumbnail.

    small   1,000 x 400      --> the nearest size of 64 to 256 rows                              one tile
    large   2,000 x 1,400    --> a grid of 3 x 2 tiles of 512 x 512, its aspect ratio nearest    six tiles
                             --> the complete picture at 64 to 256 rows                          a thumbnail

A picture is large if it has over twice the pixels that 256 rows show. Each side of a tower's input is a multiple of 32
pixels: patches of 16, of which 2 x 2 become a row.

Sizes, grids and their order are those of transformers' ``Lfm2VlImageProcessor``, down to which of two equally near
grids wins; the special tokens between rows are those of its ``Lfm2VlProcessor``. Pixels are the same too
(``resizing``).
"""

from __future__ import annotations

import math
from functools import lru_cache

from weft.images.picture import Picture, Pixels, TextPart, Tile, digest_of, patches_of
from weft.images.resizing import fitted, resize
from weft.images.settings import ImageSettings, check_patches

IMAGE_START, IMAGE_END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


def prepare(rgb: Pixels, settings: ImageSettings) -> Picture:
    """Return the patches of one picture. ``rgb``: uint8 [height, width, 3], of any size.

    Raises RequestError for a picture so long and narrow that its patches are more than the tower takes.
    """
    height, width, _ = rgb.shape
    whole_height, whole_width = resized(height, width, settings)
    check_patches(height, width, whole_height * whole_width, settings)
    parts: list[tuple[str, Pixels]] = []
    columns, rows = grid(height, width, settings) if is_large(height, width, settings) else (1, 1)
    if columns * rows > 1:
        side = settings.tile_size
        tiled = resize(rgb, columns * side, rows * side, settings.filter)
        parts = [
            (
                f"<|img_row_{row + 1}_col_{column + 1}|>",
                tiled[row * side : (row + 1) * side, column * side : (column + 1) * side],
            )
            for row in range(rows)
            for column in range(columns)
        ]
        if settings.thumbnail:
            parts.append((THUMBNAIL, resize(rgb, whole_width, whole_height, settings.filter)))
    else:
        parts = [("", resize(rgb, whole_width, whole_height, settings.filter))]
    tiles = tuple(patches_of(pixels, settings.patch_size) for _, pixels in parts)
    names = [name for name, _ in parts]
    return Picture(digest_of(settings.digest(), rgb), tiles, _text(names, tiles, settings), width, height)


def resized(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Return (height, width) of the resized picture: the aspect ratio as near as multiples of ``grain`` allow, and
    rows within the bounds of the settings.
    """
    grain = settings.grain
    return fitted(height, width, grain, *settings.pixel_bounds, smallest=grain)


def is_large(height: int, width: int, settings: ImageSettings) -> bool:
    """Return whether the picture is divided into tiles."""
    if not settings.split or settings.min_tiles == settings.max_tiles == 1:
        return False
    grain = settings.grain
    near_height = max(settings.patch_size, round(height / grain) * grain)
    near_width = max(settings.patch_size, round(width / grain) * grain)
    return near_height * near_width > settings.pixel_bounds[1] * settings.pixels_tolerance


def grid(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Return (columns, rows) of tiles, by the nearest aspect ratio. Among equally near grids, the last one whose tiles
    the picture fills by more than half wins.
    """
    best, least_gap = (1, 1), math.inf
    for columns, rows in _grids(settings.min_tiles, settings.max_tiles):
        gap = abs(width / height - columns / rows)
        fills = width * height > 0.5 * settings.tile_size**2 * columns * rows
        if gap < least_gap or (gap == least_gap and fills):
            best, least_gap = (columns, rows), gap
    return best


@lru_cache(maxsize=8)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    # Grids with the same number of tiles are in the order of a set, which decides between equally near grids. So the
    # set is filled in the same order as in transformers.
    grids = {
        (columns, rows)
        for count in range(least, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if least <= columns * rows <= most
    }
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


def _text(names: list[str], tiles: tuple[Tile, ...], settings: ImageSettings) -> tuple[TextPart, ...]:
    counts = [tile.rows * tile.columns // settings.downsample_factor**2 for tile in tiles]
    if not settings.special_tokens:
        return (sum(counts),)
    parts: list[TextPart] = [IMAGE_START]
    for name, count in zip(names, counts, strict=True):
        if name:
            parts.append(name)
        parts.append(count)
    return (*parts, IMAGE_END)
