"""Float matrices in the order of the C++ kernels: tiles, tiles in 12 bits per weight, separate experts.

    tile 0 | column 0 of rows 0..15 | column 1 of rows 0..15 | ...        64 bytes each
    tile 1 | ...                      (bfloat16: columns 0-1, columns 2-3, ...)

Sixteen rows are the lanes of a vector: one instruction multiplies a column of them (bfloat16: a pair) by a number of x
and adds. Nothing is added across lanes, and a row of x gives the same bits whatever other rows there are. Tiles are
also operands of a matrix unit (AMX): it multiplies many rows, and vectors multiply few in its order
(csrc/matrix_products.hpp). Tiles replace the rows.

**12 bits per weight**, lossless, of bfloat16. Weights of a trained layer are within sixteen powers of two, except one
in some ten thousand:

    bfloat16   s e e e e e e e | e m m m m m m m    sixteen upper bytes make up nearly all of a tile's weights

    unit       lower bytes, columns 0-3 | lower bytes, columns 4-7 | codes of the upper bytes
               of 8 columns of 16 rows, 64 bytes each; units of two tiles alternate
    odd        the weights with another upper byte than their tile's sixteen, in full

The time of a step of few rows is the time to read the weights, and these are three quarters of the bytes. The
kernel (csrc/twelve_bit.hpp) unpacks in registers, and its sums have the bits of the tiles' sums.

**Experts** are packed one after the other, straight from a mapped file. The kernel (csrc/moe_tiles.hpp) finds an
expert by its row of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.ops.linear import NativeWeight, Weight
from weft.tensor.weights import large_pages
from weft.tensor.weights.quantized import Codes

TILE_ROWS = 16
_FORMS = {torch.bfloat16: 4, torch.float32: 5}
"""Dtype -> its number among the forms of csrc/kernels.hpp."""


class Tiles(Weight):
    """Base of tiles of values, in which a row of the table can be read by itself."""

    __slots__ = ()
    gates = True

    @staticmethod
    def stack(experts: Sequence[InTiles]) -> ExpertTiles:
        return ExpertTiles.of(experts)

    def fits(self, x: torch.Tensor) -> bool:
        return native.in_use() and x.dtype == self.dtype and x.is_cpu

    def rows_at(self, rows_T: torch.Tensor, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        if not native.in_use():
            return super().rows_at(rows_T)
        return table_rows(self.native(), self.dtype, rows_T, out_TD)


@dataclass(frozen=True, slots=True)
class TiledWeight(Tiles):
    """A weight in tiles. ``tiles`` [tiles, columns / pack, 16, pack], float32 (pack 1) or bfloat16 (pack 2); rows are
    padded to full tiles.
    """

    tiles: torch.Tensor
    rows: int
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tiles.dtype

    @property
    def body(self) -> torch.Tensor:
        return self.tiles

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.tiles.itemsize

    def native(self) -> NativeWeight:
        assert self.tiles.is_contiguous()
        form, columns = _FORMS[self.dtype], self.columns
        return self.tiles.data_ptr(), form, columns, self.rows, 0, 0, 0, columns, 0, native.NO_MINIMUMS

    def dense(self) -> torch.Tensor:
        return self.tiles.transpose(1, 2).reshape(-1, self.columns)[: self.rows].contiguous()

    def first_rows(self, count: int) -> TiledWeight:
        return replace(self, tiles=self.tiles[: count // TILE_ROWS], rows=min(count, self.rows))


def table_rows(
    weight: NativeWeight, dtype: torch.dtype, rows_T: torch.Tensor, out_TD: torch.Tensor | None
) -> torch.Tensor:
    """Return rows ``rows_T`` (int64 [T]) of ``weight``, [T, columns] of ``dtype``, in ``out_TD`` if it is given.
    Raises IndexError for a row beyond the table. This is one call into C++: torch needs four operators for tiles, and
    in a small step even the first of these takes more time than the rows.
    """
    rows_T = rows_T.contiguous()
    assert rows_T.dtype == torch.int64
    if out_TD is None:
        out_TD = torch.empty((rows_T.shape[0], weight[2]), dtype=dtype)
    if not native.extension().table_rows(weight, rows_T.data_ptr(), rows_T.shape[0], out_TD.data_ptr()):
        raise IndexError(f"rows {rows_T.tolist()} of a table of {weight[3]}")
    return out_TD


def native_rows(weight: torch.Tensor) -> NativeWeight:
    """Return the extension's arguments of dense rows [rows, columns]."""
    assert weight.is_contiguous()
    rows, columns = weight.shape
    return (weight.data_ptr(), native.DTYPES[weight.dtype], columns, rows, 0, 0, 0, columns, 0, native.NO_MINIMUMS)


def tiled(weight: torch.Tensor, *, apart: bool = False) -> TiledWeight | None:
    """Return ``weight`` [rows, columns] in tiles; None if the kernels do not serve it. ``apart``: in separate memory,
    for weights that are freed while the model serves.
    """
    rows, columns = weight.shape
    if not can_be_tiled(weight.device, weight.dtype, columns):
        return None
    if weight.dtype == torch.bfloat16 and not apart:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        return bf16_tiles((rows_of(weight),))
    padded, pack = F.pad(weight, (0, 0, 0, -rows % TILE_ROWS)), 4 // weight.itemsize
    by_tile = padded.view(-1, TILE_ROWS, columns // pack, pack).transpose(1, 2)
    return TiledWeight(by_tile.contiguous() if apart else large_pages.copied(by_tile), rows, columns)


def can_be_tiled(device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """Return whether a matrix of that dtype and width goes into tiles. Even small matrices do, because the bits of
    torch's products depend on the other rows.
    """
    return device.type == "cpu" and serves(dtype) and not columns % (4 // dtype.itemsize)


def bf16_tiles(parts: Sequence[MatrixRows]) -> TiledWeight:
    """Return matrices, stacked, in tiles."""
    rows, columns = sum(len(part.addresses) for part in parts), parts[0].columns
    addresses = row_addresses(parts, TILE_ROWS)
    count = addresses.numel() // TILE_ROWS
    tiles = large_pages.empty((count, columns // 2, TILE_ROWS, 2), torch.bfloat16)
    native.extension().pack_tiles(addresses.data_ptr(), count, columns, tiles.data_ptr())
    return TiledWeight(tiles, rows, columns)


class MatrixRows(NamedTuple):
    """Rows of bfloat16 in place, in a tensor or a mapped file. ``owner`` keeps them alive. ``addresses``: int64
    [rows].
    """

    owner: object
    addresses: torch.Tensor
    columns: int

    def reordered(self, order: Callable[[torch.Tensor], torch.Tensor]) -> MatrixRows:
        """Return the rows in another order; ``order`` takes [rows, anything]."""
        return self._replace(addresses=order(self.addresses[:, None]).flatten())


def rows_of(weight: torch.Tensor) -> MatrixRows:
    assert weight.dtype == torch.bfloat16
    assert weight.stride(1) == 1
    return rows_from(weight, weight.data_ptr(), weight.shape[0], weight.shape[1], 2 * weight.stride(0))


def rows_from(owner: object, address: int, rows: int, columns: int, stride_bytes: int) -> MatrixRows:
    """Return ``rows`` at equal distances from ``address`` on."""
    return MatrixRows(owner, address + torch.arange(rows) * stride_bytes, columns)


def row_addresses(parts: Sequence[MatrixRows], multiple: int) -> torch.Tensor:
    """Return the addresses of the rows of ``parts``, followed by zeros up to a ``multiple`` of them."""
    each = [part.addresses for part in parts]
    return F.pad(torch.cat(each), (0, -sum(map(len, each)) % multiple))


def serves(dtype: torch.dtype) -> bool:
    """Return whether the kernel is the faster one for ``dtype`` on this CPU."""
    if not native.in_use() or dtype not in _FORMS or native.extension().instruction_set() == "portable":
        return False
    # On a CPU with AMX that these kernels cannot use, oneDNN uses it.
    return dtype == torch.float32 or native.matrix_unit() != "none" or not torch.cpu._is_amx_tile_supported()


UNIT_COLUMNS = 8
TWELVE_BIT_SIZE_MIN = 1 << 19
"""Elements of the smallest weight that is read from memory and not from a cache."""
ODD_MOST = 1 / 256
"""Largest share of odd weights in a matrix: each costs a separate write."""
_FORM = 7
"""Number of the form in csrc/kernels.hpp."""


@dataclass(frozen=True, slots=True)
class TwelveBitWeight(Tiles):
    """A weight in 12 bits. ``units`` uint8 [tiles / 2, columns / 8, 2, 3, 64], for an even number of tiles. ``highs``
    uint8 [tiles, 16]: the upper byte of each code. ``odd`` int64 [tiles + n] begins with an index per tile: the start
    of the tile's entries in ``odd``. The entries follow: place in the tile << 16 | bits, ordered by place. A last
    entry beyond all places ends each tile.
    """

    units: torch.Tensor
    highs: torch.Tensor
    odd: torch.Tensor
    rows: int
    columns: int

    @property
    def body(self) -> torch.Tensor:
        return self.units

    @property
    def form(self) -> str:
        return "bfloat16 in 12 bits"

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * 3 // 2 + self.highs.numel() + self.odd.numel() * 8

    def native(self) -> NativeWeight:
        return (
            self.units.data_ptr(),
            _FORM,
            self.columns,
            self.rows,
            self.highs.data_ptr(),
            0,
            0,
            self.columns,
            self.odd.data_ptr(),
            native.NO_MINIMUMS,
        )

    def tiled(self) -> TiledWeight:
        """Return the tiles that were packed."""
        by_tile = self.units.transpose(1, 2).flatten(0, 1)
        tiles, units = by_tile.shape[:2]
        codes = torch.stack((by_tile[:, :, 2] & 15, by_tile[:, :, 2] >> 4), 2)
        highs = self.highs.gather(1, codes.view(tiles, -1).long()).view_as(codes)
        # 64 bytes are 4 x 4 rows, each with both pairs of columns, 2 columns per pair.
        words = torch.stack((by_tile[:, :, :2], highs), -1).view(tiles, units, 2, 4, 2, 4, 2, 2)
        plain = words.permute(0, 1, 2, 4, 3, 5, 6, 7).contiguous().view(torch.int16).view(tiles, -1)
        for tile, begin in enumerate(self.odd[:tiles].tolist()):
            end = int(self.odd[tile + 1]) if tile + 1 < tiles else self.odd.shape[0]
            own = self.odd[begin : end - 1]
            # The weights with another upper byte are stored in full, and replace those from codes.
            plain[tile, own >> 16] = own.to(torch.int16)
        whole = plain.view(torch.bfloat16).view(tiles, -1, TILE_ROWS, 2)
        return TiledWeight(whole[: -(-self.rows // TILE_ROWS)], self.rows, self.columns)

    def dense(self) -> torch.Tensor:
        return self.tiled().dense()

    def fits(self, x: torch.Tensor) -> bool:
        # A sealed twelve-bit weight has no other reader than these kernels.
        return Tiles.fits(self, x) and bool(native.extension().has_twelve_bit_products())

    def first_rows(self, count: int) -> TwelveBitWeight:
        tiles = count // TILE_ROWS
        units, highs = self.units[: tiles // 2], self.highs[:tiles]
        return replace(self, units=units, highs=highs, rows=min(count, self.rows))


_CODED_FORMS = {8: 9, 4: 10}
"""Bits of codes -> number of the form."""
_SCALE_FORMS = {torch.float32: 0, torch.float8_e8m0fnu: 4}
_ONE_A_TILE = 6
"""Number, in csrc/kernels.hpp, of scales that all rows of a tile share."""
FP8_SCALE_MAX = 100.0
"""Largest scale of codes in fp8: the kernel multiplies it by 2^120."""


@dataclass(frozen=True, slots=True)
class CodedTiles(Weight):
    """Tiles of bfloat16 that are codes in memory: weight = bfloat16(number of the code x scale), widened as by the
    library that wrote them (csrc/coded_numbers.hpp).

    ``units`` uint8 [tiles / 2, columns / 8, 2, 128 or 64]: e4m3, or four bits whose numbers are ``table``
    float32 [16]. Those in words have four sums for each row in a product (csrc/coded_words.hpp), and others
    the bits of plain tiles. ``scales`` float32 [tiles, groups, 16], or [tiles, groups, 1] where the rows of
    a tile share one, or e8m0 [tiles, groups, 16]; ``group`` columns share one. ``small`` uint8 [tiles,
    columns / 512 rounded up, 8] of e4m3 in words: a bit for each unit that has codes without an exponent.
    """

    units: torch.Tensor
    scales: torch.Tensor
    table: torch.Tensor | None
    group: int
    rows: int
    columns: int
    form: str
    small: torch.Tensor | None = None

    @property
    def body(self) -> torch.Tensor:
        return self.units

    @property
    def in_words(self) -> bool:
        return self.table is not None or _have_words(self.scales)

    @property
    def nbytes(self) -> int:
        bits = 8 if self.table is None else 4
        small = 0 if self.small is None else self.small.numel()
        return self.rows * self.columns * bits // 8 + self.scales.numel() * self.scales.itemsize + small

    def native(self) -> NativeWeight:
        shared = self.scales.shape[2] == 1
        return (
            self.units.data_ptr(),
            _CODED_FORMS[8 if self.table is None else 4],
            self.columns,
            self.rows,
            self.scales.data_ptr(),
            _ONE_A_TILE if shared else _SCALE_FORMS[self.scales.dtype],
            0,
            self.group,
            0 if self.small is None else self.small.data_ptr(),
            (0, 0, 0, 0, 0 if self.table is None else self.table.data_ptr(), False, 0),
        )

    def dense(self) -> torch.Tensor:
        codes = self._codes()
        plain = codes.view(torch.float8_e4m3fn).float() if self.table is None else self.table[codes.int()]
        tiles = self.scales.shape[0]
        plain = plain.view(tiles, TILE_ROWS, self.columns)
        scales = self.scales.float().transpose(1, 2).expand(tiles, TILE_ROWS, -1)
        wide = scales.repeat_interleave(self.group, 2)[:, :, : self.columns]
        return (plain * wide).flatten(0, 1)[: self.rows].to(torch.bfloat16)

    def fits(self, x: torch.Tensor) -> bool:
        return native.in_use() and x.dtype == self.dtype and x.is_cpu and bool(native.extension().has_coded_tiles())

    @staticmethod
    def stack(experts: Sequence[CodedTiles]) -> ExpertTiles:
        if len({expert.scales.shape[2] for expert in experts}) > 1:  # the kernel takes them in one form
            experts = [expert.with_scales_of_rows() for expert in experts]
        return ExpertTiles.of(experts)

    def with_scales_of_rows(self) -> CodedTiles:
        """Return the same weight with a scale for each row, if the rows of a tile share one. In fp8 the order of the
        codes depends on the scales.
        """
        if self.scales.shape[2] > 1:
            return self
        changed = replace(self, scales=self.scales.expand(-1, -1, TILE_ROWS).contiguous())
        if self.in_words:
            return changed
        codes = self._codes()
        return replace(changed, units=_coded_units(codes, 8, in_words=True), small=_small_units(codes))

    def _codes(self) -> torch.Tensor:
        """Return uint8 [rows of all tiles, columns], the codes before ``_coded_units``."""
        pairs, columns = self.units.shape[:2]
        if self.table is not None:  # tile, four rows, two rows, row, unit, column
            codes = torch.stack((self.units & 15, self.units >> 4)).view(2, pairs, columns, 2, 4, 8, 2)
            rows = codes.permute(1, 3, 4, 6, 0, 2, 5)
        elif self.in_words:
            rows = self.units.view(pairs, columns, 2, 2, 4, 8, 2).permute(0, 2, 4, 3, 6, 1, 5)
        else:  # tile, four rows, row, unit, half, pair, column
            rows = self.units.view(pairs, columns, 2, 2, 4, 2, 4, 2).permute(0, 2, 4, 6, 1, 3, 5, 7)
        return rows.reshape(pairs * 2 * TILE_ROWS, self.columns)


def _coded_units(codes: torch.Tensor, bits: int, *, in_words: bool) -> torch.Tensor:
    """Return the units of uint8 [rows of full pairs of tiles, columns], as in csrc/coded_numbers.hpp."""
    pairs, columns = codes.shape[0] // (2 * TILE_ROWS), codes.shape[1] // UNIT_COLUMNS
    if bits == 4:
        both = codes.view(pairs, 2, 4, 2, 2, columns, 8).permute(4, 0, 5, 1, 2, 6, 3)
        units = both[0] | both[1] << 4
    elif in_words:
        units = codes.view(pairs, 2, 4, 2, 2, columns, 8).permute(0, 5, 1, 3, 2, 6, 4)
    else:
        units = codes.view(pairs, 2, 4, 4, columns, 2, 2, 2).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return units.reshape(pairs, columns, 2, 16 * bits)


def _small_units(codes: torch.Tensor) -> torch.Tensor:
    """Return ``CodedTiles.small`` of e4m3 [rows of full tiles, columns]."""
    units = codes.shape[1] // UNIT_COLUMNS
    small = ((codes & 0x78) == 0).view(-1, TILE_ROWS, units, UNIT_COLUMNS).any(3).any(1)
    bits = F.pad(small, (0, -units % 64)).view(small.shape[0], -1, 8, 8)
    return (bits * torch.tensor([1 << bit for bit in range(8)])).sum(3).to(torch.uint8)


def has_float_table(codes: Codes) -> bool:
    return codes.table is not None and codes.table.dtype == torch.float32


def coded_tiles(codes: Codes) -> CodedTiles | None:
    """Return fp8, or four bits with a table of floats, in the kernels' order; None if no kernel serves them, or rows
    are not a number of full units.
    """
    rows, columns = codes.codes.shape
    group = min(codes.group, -(-columns // UNIT_COLUMNS) * UNIT_COLUMNS)
    scales = codes.scales
    assert isinstance(scales, torch.Tensor)
    if columns % UNIT_COLUMNS or group % UNIT_COLUMNS:
        return None
    # No kernel serves NaN. A scale of NaN passes no comparison, and the code 127 (NaN) would be read as 480.
    if (
        codes.fp8
        and not scales.is_meta
        and not (float(scales.float().abs().amax()) <= FP8_SCALE_MAX and bool(((codes.codes & 127) < 127).all()))
    ):
        return None
    tiles = -(-rows // (2 * TILE_ROWS)) * 2
    first = None if codes.table is None or codes.table.is_meta else float(codes.table[0])
    form = "fp8" if codes.fp8 else "fp4" if first == 0 else "nf4"
    if codes.codes.is_meta:
        units = codes.codes.new_empty((tiles // 2, columns // UNIT_COLUMNS, 2, 16 * codes.bits))
        by_tile = scales.new_empty((tiles, scales.shape[1], TILE_ROWS))
        return CodedTiles(units, by_tile, codes.table, group, rows, columns, form)
    # No row of padding has codes without an exponent.
    padded = F.pad(codes.codes, (0, 0, 0, tiles * TILE_ROWS - rows), value=0 if codes.bits == 4 else 0x38)
    bits = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales.float()
    # Rows of padding have the last row's scale, so that a tile may have one.
    whole = torch.cat((bits, bits[-1:].expand(tiles * TILE_ROWS - rows, -1)))
    by_tile = whole.view(tiles, TILE_ROWS, -1).transpose(1, 2)
    if bits.dtype == torch.float32 and bool((by_tile == by_tile[:, :, :1]).all()):
        by_tile = by_tile[:, :, :1]
    by_tile = by_tile.contiguous()
    if bits.dtype == torch.uint8:
        by_tile = by_tile.view(torch.float8_e8m0fnu)
    words = codes.bits == 4 or _have_words(by_tile)
    units = large_pages.copied(_coded_units(padded, codes.bits, in_words=words))
    small = _small_units(padded) if words and codes.bits == 8 else None
    return CodedTiles(units, by_tile, codes.table, group, rows, columns, form, small)


def _have_words(scales: torch.Tensor) -> bool:
    """Return whether codes of fp8 with ``scales`` [tiles, groups, 16 or 1] are in words."""
    return scales.dtype == torch.float32 and scales.shape[2] > 1


def serves_coded(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels multiply by codes of fp8 and of floats in four bits."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and serves(dtype)
        and bool(native.extension().has_coded_tiles())
    )


InTiles = TiledWeight | TwelveBitWeight | CodedTiles


def in_best_tiles(weight: torch.Tensor, *, twelve_bit: bool = True, copies: int = 1) -> InTiles | None:
    """Return ``weight`` [rows, columns] in the kernels' order; None if the kernels do not serve it. ``copies``: how
    many of this size a layer has (experts).
    """
    rows, columns = weight.shape
    if twelve_bit and gains_by_twelve_bits(weight.device, weight.dtype, copies * rows, columns):
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        packed = to_twelve_bit((rows_of(weight),))
        if packed is not None:
            return packed
    return tiled(weight)


def gains_by_twelve_bits(device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Return whether a matrix of that dtype and size goes into 12 bits, apart from odd weights."""
    return (
        dtype == torch.bfloat16
        and can_be_tiled(device, dtype, columns)
        and rows * columns >= TWELVE_BIT_SIZE_MIN
        and columns % UNIT_COLUMNS == 0
        and bool(native.extension().has_twelve_bit_products())
    )


def to_twelve_bit(parts: Sequence[MatrixRows], *, finite: bool = False) -> TwelveBitWeight | None:
    """Return matrices with full units, stacked, in 12 bits. None if they have too many odd weights, or with ``finite``
    a NaN or infinite one.
    """
    rows, columns = sum(len(part.addresses) for part in parts), parts[0].columns
    assert columns % UNIT_COLUMNS == 0
    addresses = row_addresses(parts, 2 * TILE_ROWS)
    extension, tiles = native.extension(), addresses.numel() // TILE_ROWS
    highs = torch.empty((tiles, 16), dtype=torch.uint8)
    units = large_pages.empty((tiles // 2, columns // UNIT_COLUMNS, 2, 3, 64), torch.uint8)
    odd_words = extension.pack_twelve_bit(
        addresses.data_ptr(),
        tiles,
        columns,
        int(ODD_MOST * tiles * TILE_ROWS * columns),
        finite,
        highs.data_ptr(),
        units.data_ptr(),
    )
    if odd_words is None:
        large_pages.give_back(units)
        return None
    odd = torch.empty(odd_words.size(), dtype=torch.int64)
    odd_words.write(odd.data_ptr())
    return TwelveBitWeight(units, highs, odd, rows, columns)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Experts in tiles. ``experts`` have one shape and dtype. ``table``: see above; it is valid as long as ``experts``
    live. ``kinds``: an expert of each class.
    """

    experts: tuple[InTiles, ...]
    table: torch.Tensor
    kinds: tuple[InTiles, ...]

    @classmethod
    def of(cls, experts: Sequence[InTiles]) -> ExpertTiles:
        assert len({(expert.shape, expert.dtype) for expert in experts}) == 1
        table = []
        for expert in experts:
            address, form, _, _, highs, _, _, _, odd, _ = expert.native()
            table.append((address, highs, odd, form))
        kinds = {type(expert): expert for expert in experts}
        return cls(tuple(experts), torch.tensor(table, dtype=torch.int64), tuple(kinds.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.experts[0].dtype

    def __getitem__(self, index: int) -> InTiles:
        return self.experts[index]

    def native_experts(self) -> tuple[NativeWeight, int]:
        """Return the sizes of an expert as arguments of the extension, and the address of the table."""
        return self.experts[0].native(), self.table.data_ptr()

    def fits_experts(self, x: torch.Tensor) -> bool:
        """Return whether the kernels of experts take ``x`` and these experts."""
        return all(expert.fits(x) for expert in self.kinds)

    def dense(self) -> torch.Tensor:
        """Return [experts, rows, columns], a copy."""
        return torch.stack([expert.dense() for expert in self.experts])
