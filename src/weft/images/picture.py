"""A picture or a video that is ready for a tower, with patches, text in the prompt, and a digest.

    Picture.tiles   Tile(rows 32, columns 32)   patches  uint8 [1024, 16 x 16 x 3]
                    Tile(rows 20, columns 40)   ...
    Picture.text    "<|image_start|>" "<|img_row_1_col_1|>" 256 "<|img_thumbnail|>" 200 "<|image_end|>"
                    a string is text of special tokens, a number is that many rows of the tower

Patches have 8 bits: they are resized here, and the tower scales and normalises them. So a picture is as small as its
pixels, and two machines that resize alike hand the same bytes to a tower.

Laws: rows are in ``text`` in the order of ``tiles``; ``digest`` is that of the settings and of all pixels with their
shape, so equal digests mean equal rows. The digest is computed here and in no other place.

Rejected: a digest of the file's bytes. The same picture comes as PNG and as JPEG with other metadata, and a processor
with other settings makes other rows of the same file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.request import PictureKind

Pixels = NDArray[np.uint8]
"""RGB, [height, width, 3]; or patches of it, [patches, values]."""
TextPart = str | int
"""Text of special tokens, or a count of rows."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One grid of patches. ``patches``: uint8 [rows * columns, patch * patch * 3], row by row of the grid. A patch is
    row by row of its pixels, red, green and blue of each; a patch of a video has several frames, one after the other.
    ``rows``, ``columns``: size of the grid.
    """

    patches: Pixels
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A prepared picture. ``digest``: 32 bytes. ``text``: see above. ``width`` and ``height``: pixels before resizing.
    ``kind``: the kind whose token the template writes for it.
    """

    digest: bytes
    tiles: tuple[Tile, ...]
    text: tuple[TextPart, ...]
    width: int
    height: int
    kind: PictureKind = "image"

    @property
    def rows(self) -> int:
        """Rows that the tower makes of the picture: positions in the prompt without a token."""
        return sum(part for part in self.text if isinstance(part, int))

    def to_bytes(self) -> bytes:
        """Return the picture as bytes for another process; ``from_bytes`` reads them."""
        return _ENCODER.encode(
            _Packed(
                self.digest,
                [(tile.rows, tile.columns, tile.patches.data.cast("B")) for tile in self.tiles],
                list(self.text),
                self.width,
                self.height,
                self.kind,
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Picture:
        """Return the picture that ``to_bytes`` wrote. Raises ValueError for other data."""
        try:
            packed = _DECODER.decode(data)
            tiles = tuple(
                Tile(np.frombuffer(patches, np.uint8).reshape(rows * columns, -1), rows, columns)
                for rows, columns, patches in packed.tiles
            )
        except (msgspec.MsgspecError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"no picture: {error}") from None
        return cls(packed.digest, tiles, tuple(packed.text), packed.width, packed.height, packed.kind)


class _Packed(msgspec.Struct, array_like=True):
    digest: bytes
    tiles: list[tuple[int, int, memoryview]]
    text: list[TextPart]
    width: int
    height: int
    kind: PictureKind


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Packed)


def digest_of(settings_digest: bytes, rgb: Pixels) -> bytes:
    """Return the sha256 over the settings, the shape (so that a row of 12 pixels differs from a column of 12) and the
    pixels.
    """
    digest = hashlib.sha256(settings_digest)
    digest.update(np.asarray(rgb.shape, "<u8").tobytes())
    digest.update(np.ascontiguousarray(rgb).data)
    return digest.digest()


def patches_of(rgb: Pixels, patch_size: int) -> Tile:
    """Return ``rgb`` cut into patches; both sides are multiples of ``patch_size``."""
    height, width, channels = rgb.shape
    rows, columns = height // patch_size, width // patch_size
    cut = rgb.reshape(rows, patch_size, columns, patch_size, channels).transpose(0, 2, 1, 3, 4)
    return Tile(np.ascontiguousarray(cut).reshape(rows * columns, -1), rows, columns)
