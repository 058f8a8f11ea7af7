"""Conversion of pixels to the patches that Qwen3.5 was trained on: one tile, of about the picture's own size.

    1,000 x 400     --> 992 x 416: the nearest multiples of 32                          31 x 13 rows
    200 x 100       --> 384 x 192: grown to ``min_pixels``                              12 x 6
    9,000 x 6,000   --> shrunk to ``max_pixels``

Patches of 16 pixels are in row order, and 2 x 2 of them become a row. Templates write the tokens around a picture
themselves, ``<|vision_start|>`` and ``<|vision_end|>``, so its text is only its rows.

Sizes and pixels are the same as those of transformers' ``Qwen2VLImageProcessor`` (``resizing``). It repeats a patch
for each of two frames and puts neighbours side by side. Here the tower does both.

Rejected: tiles for large pictures, as LFM2-VL has them. The model was trained on undivided pictures.
"""

from __future__ import annotations

from weft.errors import RequestError
from weft.images.picture import Picture, Pixels, digest_of, patches_of
from weft.images.resizing import fitted, resize
from weft.images.settings import ImageSettings, check_patches

ASPECT_MAX = 200
"""Ratio, longer side to shorter side: the processor's own limit."""


def prepare(rgb: Pixels, settings: ImageSettings) -> Picture:
    """Return the patches of one picture. ``rgb``: uint8 [height, width, 3], of any size.

    Raises RequestError for a picture that is too long and narrow.
    """
    height, width, _ = rgb.shape
    if max(height, width) > ASPECT_MAX * min(height, width):
        raise RequestError(
            f"the picture is {width:,} x {height:,} pixels, too long and narrow: the longer "
            f"side may be {ASPECT_MAX} times the shorter one",
            param="image",
        )
    resized_height, resized_width = fitted(height, width, settings.grain, *settings.pixel_bounds)
    check_patches(height, width, resized_height * resized_width, settings)
    tile = patches_of(resize(rgb, resized_width, resized_height, settings.filter), settings.patch_size)
    rows = tile.rows * tile.columns // settings.downsample_factor**2
    return Picture(digest_of(settings.digest(), rgb), (tile,), (rows,), width, height)
