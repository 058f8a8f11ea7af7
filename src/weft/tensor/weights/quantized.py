"""Weights in 8, 6 or 4 bits, in the order in which the kernels read them.

    value[row, column] = (code - zero) * scale        scale, zero: one for each ``group`` columns of a row
                       = code * scale - minimum       ggml's blocks; minimum: one for each ``group``
                       = (code - 8) * scale - minimum torchao's int4 (``signed``)
                       = e4m3(code) * scale           fp8 (only GPUs)
                       = table[code] * scale          int4 whose sixteen numbers are not in steps

    codes   tile 0 | columns 0-3 of rows 0..15 | columns 4-7 of rows 0..15 | ...        int8: 64 bytes each
            tile 1 | ...                                              int4: 64 bytes hold two, low half first
                                     int6: for 16 columns the low halves as in int4, then four times two bits
    scales  tile 0 | group 0 of rows 0..15 | group 1 of rows 0..15 | ...

Sixteen rows are the sixteen lanes of a vector: nothing is added across lanes, and one load brings sixteen
scales. Rows are padded to tiles, columns to lines of 32. Without ``zeros`` the zero point is the middle code
(128, 32, 8). Every tensor may have a leading dim (experts): codes [E, rows, columns] and so on.

Kernels read groups of neighbouring columns. A file may have a group's columns anywhere (act-order):

    file      columns 0 1 2 3 4 5      groups 1 0 0 1 0 1
    memory    columns 1 2 4 0 3 5      groups 0 0 0 1 1 1       order = [1 2 4 0 3 5]
    product   x[..., order] by the matrix in memory

A product has the same factors as in the file's order; only the order of its sum differs.

In torch one block of weight rows after the other is dequantised and multiplied. Weights with ``byte_inputs``
are int8 times int8 on every machine, with the same bits:

    x      each row in parts of 128 columns: codes -127..127, to nearest even, and a scale, largest / 127
    sum    of a part: an integer below 2^24, which float32 represents exactly, in any order of addition
    y      sum * (scale of the weight * scale of x), part after part, then the bias: each step rounded

Weights in fp8 with ``byte_inputs`` are multiplied with x in e4m3, largest / 448. The bits of their sums are the
machine's.

Groups are 16 columns or a number of lines. Scales and minimums are floats, or ``BlockNumbers``: a byte for each group
times a float of many. So Q4_K takes 4.6 bits a weight, where floats would take 6, and NVFP4 4.5.

``Codes`` holds the same values by plain rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.ops.linear import WIDENED_ROWS, NativeWeight, Weight, by_matrix_unit, is_x86, take_columns
from weft.tensor.weights import large_pages

TILE_ROWS = 16
LINE = 32
"""Columns that share a scale of the input; groups are multiples of it, or half of it."""
BLOCK = 256
"""Columns that share the float16 of ``BlockNumbers``."""
PART = 128
"""Columns that share a scale of the input if inputs are always rounded (``byte_inputs``)."""
ZERO_POINT: dict[int, int] = {8: 128, 6: 32, 4: 8}
"""Codes are unsigned, because the byte products of CPUs take an unsigned left operand."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of floats of four bits, which are integers."""
_FORMS: dict[int, int] = {8: 2, 6: 8, 4: 3}
"""Bits -> their number in csrc/kernels.hpp."""
_SCALES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e8m0fnu: 4,
}
"""Dtype of scales -> its number there."""
_DIVIDED = 5
"""Number of e4m3 that a float divides."""
_BOTH = 6
"""Number of int8 with ``byte_inputs``."""
_BLOCK_ELEMENTS = 1 << 18
_BYTE_BLOCK_ELEMENTS = 1 << 20
_LEAST = 1e-30
"""Least magnitude: a part with a smaller largest number counts as zeros, as its scale would underflow float32."""


@dataclass(frozen=True, slots=True)
class BlockNumbers:
    """Scales or minimums: ``each`` a byte [..., rows, groups] times ``shared`` [..., rows, blocks].

    int8 times float16, one for 256 columns: ggml's K forms; exact in float32. e4m3 without signs, or e8m0,
    times float32, one for a row, or divided by it (``divides``): NVFP4 and MXFP4."""

    each: torch.Tensor
    shared: torch.Tensor
    divides: bool = False

    def floats(self) -> torch.Tensor:
        """Return float32 [..., rows, groups]."""
        groups = -(-self.each.shape[-1] // self.shared.shape[-1])
        shared = _per_column(self.shared, groups, self.each.shape[-1])
        return self.each.float() / shared if self.divides else self.each.float() * shared


Numbers = torch.Tensor | BlockNumbers


def floats_of(numbers: Numbers) -> torch.Tensor:
    """Return float32 [..., rows, groups]."""
    return numbers.floats() if isinstance(numbers, BlockNumbers) else numbers.float()


def _each(numbers: Numbers, change: Callable[[torch.Tensor], torch.Tensor]) -> Numbers:
    if isinstance(numbers, BlockNumbers):
        return replace(numbers, each=change(numbers.each), shared=change(numbers.shared))
    return change(numbers)


def _below(parts: Sequence[Numbers]) -> Numbers:
    """Return the rows of all, stacked; all in the same form."""
    if all(isinstance(part, BlockNumbers) for part in parts):
        blocks = [part for part in parts if isinstance(part, BlockNumbers)]
        assert len({(part.each.dtype, part.divides) for part in blocks}) == 1, "bytes of other kinds"
        return replace(
            blocks[0],
            each=_joined_rows([part.each for part in blocks]),
            shared=_joined_rows([part.shared for part in blocks]),
        )
    powers = [
        part.view(torch.uint8)
        for part in parts
        if isinstance(part, torch.Tensor) and part.dtype == torch.float8_e8m0fnu
    ]
    if len(powers) == len(parts):
        return _joined_rows(powers).view(torch.float8_e8m0fnu)
    return _joined_rows([floats_of(part) for part in parts])


def _joined_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    if first.is_meta:  # joining meta tensors imports torch's compiler, which takes seconds
        return first.new_empty((*first.shape[:-2], sum(part.shape[-2] for part in parts), first.shape[-1]))
    return torch.cat(list(parts), dim=-2)


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of a matrix by plain rows. ``codes`` uint8 [..., rows, columns]; ``scales`` float32 [..., rows, groups];
    ``zeros`` uint8 of the same shape, None for the middle code. ``group``: columns per scale. ``fp8``: codes are bytes
    of e4m3, and there are no zeros. ``minimums``: as the scales, subtracted; then zeros are None, which means 0, or
    the middle code if codes are ``signed``. ``table``: uint8 [16], of int4 without zeros and minimums: the value of
    each code plus 128. Or float32 [16], the numbers themselves (nf4). Scales of fp8 may be e8m0. ``order``: int32
    [columns], the column of the matrix at each place; None if all are at their own.
    """

    bits: int
    codes: torch.Tensor
    scales: Numbers
    zeros: torch.Tensor | None
    group: int
    fp8: bool = False
    minimums: Numbers | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None
    signed: bool = False

    def dense(self) -> torch.Tensor:
        """Return the values, float32 [..., rows, columns], in the matrix's order of columns."""
        values = self._values()
        return values if self.order is None else in_stored_order(values, self.order)

    def _values(self) -> torch.Tensor:
        """Return the values in the stored order of columns."""
        columns = self.codes.shape[-1]
        scales = _per_column(floats_of(self.scales), self.group, columns)
        if self.fp8:
            return self.codes.view(torch.float8_e4m3fn).float() * scales
        if self.minimums is not None:
            assert self.zeros is None, "codes with minimums have no zeros"
            numbers = self.codes.float() - (ZERO_POINT[self.bits] if self.signed else 0)
            return numbers * scales - _per_column(floats_of(self.minimums), self.group, columns)
        if self.table is not None:
            numbers = self.table[self.codes.int()].float()
            return numbers * scales if self.table.is_floating_point() else (numbers - ZERO_POINT[8]) * scales
        zeros = ZERO_POINT[self.bits] if self.zeros is None else _per_column(self.zeros, self.group, columns)
        return (self.codes.float() - zeros) * scales

    def of(self, index: int) -> Codes:
        """Return matrix ``index`` of a stack without zeros and minimums, whose scales are one tensor."""
        assert isinstance(self.scales, torch.Tensor)
        assert self.zeros is None
        assert self.minimums is None
        return replace(self, codes=self.codes[index], scales=self.scales[index])

    def in_bytes(self) -> Codes:
        """Return the same values in int8 with floats for scales, of codes without zeros and minimums."""
        assert self.zeros is None
        assert self.minimums is None
        if self.codes.is_meta:
            codes = self.codes
        elif self.table is not None:
            codes = self.table[self.codes.int()]
        else:
            codes = self.codes + (ZERO_POINT[8] - ZERO_POINT[self.bits])
        return Codes(8, codes, floats_of(self.scales), None, self.group)

    def reordered(self, order: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        """Return the codes with rows in another order: ``order`` takes [rows, anything]."""
        return replace(
            self,
            codes=order(self.codes),
            scales=_each(self.scales, order),
            zeros=None if self.zeros is None else order(self.zeros),
            minimums=None if self.minimums is None else _each(self.minimums, order),
        )

    def above(self, *others: Codes) -> Codes:
        """Return these rows followed by the rows of ``others``; all have the same bits, groups and order of columns,
        and minimums or none.
        """
        parts = (self, *others)
        assert all((part.table is None) == (self.table is None) for part in parts), "tables and steps"
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = _joined_rows(
                [
                    torch.full(
                        floats_of(part.scales).shape, ZERO_POINT[self.bits], dtype=torch.uint8, device=part.codes.device
                    )
                    if part.zeros is None
                    else part.zeros
                    for part in parts
                ]
            )
        minimums = [part.minimums for part in parts if part.minimums is not None]
        assert len(minimums) in (0, len(parts)), "some have minimums, others none"
        return replace(
            self,
            codes=_joined_rows([part.codes for part in parts]),
            zeros=zeros,
            scales=_below([part.scales for part in parts]),
            minimums=_below(minimums) if minimums else None,
        )


def in_stored_order(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return ``values`` [..., columns], whose columns are in ``order``, with each at its own place; or a stack of
    both.
    """
    if order.ndim > 1:
        return torch.stack([in_stored_order(*both) for both in zip(values, order, strict=True)])
    return torch.empty_like(values).index_copy_(-1, order.long(), values)


def _per_column(of_groups: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return of_groups.float().repeat_interleave(group, dim=-1)[..., :columns]


@dataclass(frozen=True, slots=True)
class QuantizedWeight(Weight):
    """A quantised weight in tiles, or a stack. ``codes`` uint8 [..., tiles, lines x 8, 6 or 4, 16, 4]; ``scales``
    float16 or float32 [..., tiles, groups, 16], or with fp8 also [..., tiles, groups, 1]; ``zeros`` uint8 of the same
    shape or None. ``exact``: inputs are never rounded to int8, whatever the kernels could do. ``byte_inputs``: inputs
    are rounded to int8 everywhere, by parts of 128 columns, and the product has the same bits on every machine; of a
    weight in fp8, they are rounded to fp8. ``fp8``: codes are bytes of e4m3; kernels of CPUs do not read them.
    ``minimums``: as the scales. Both may be bytes, times ``block_scales`` and ``block_minimums``, [..., tiles, blocks,
    16], or divided by them (``BlockNumbers``). ``table``, ``signed``: as in ``Codes``. ``order``: int32 [..., columns],
    the column of x that each column is multiplied with; None if all are at their own places. Kernels of GPUs read no
    minimums, bytes, tables or groups of 16, and experts without an order. ``dtype``: of the rows of a table.
    """

    bits: int
    rows: int
    columns: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    exact: bool = False
    byte_inputs: bool = False
    fp8: bool = False
    minimums: torch.Tensor | None = None
    block_scales: torch.Tensor | None = None
    block_minimums: torch.Tensor | None = None
    divides: bool = False
    table: torch.Tensor | None = None
    signed: bool = False
    order: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def form(self) -> str:
        """Name of the form: ``int8``, ``int6``, ``int4``, ``w8a8``, ``fp8``, ``fp8 x fp8``."""
        if self.fp8:
            return "fp8 x fp8" if self.byte_inputs else "fp8"
        return "w8a8" if self.byte_inputs else f"int{self.bits}"

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.minimums, self.block_scales, self.block_minimums, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def body(self) -> torch.Tensor:
        return self.codes

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns) if self.codes.ndim == 4 else (self.codes.shape[0], self.rows, self.columns)

    def native(self) -> NativeWeight:
        assert self.codes.is_contiguous()
        assert self.scales.is_contiguous()
        of_rows = self.block_scales is not None and self.block_scales.dtype == torch.float32
        of_blocks = _at(self.block_scales)
        return (
            self.codes.data_ptr(),
            _BOTH if self.byte_inputs else _FORMS[self.bits],
            self.columns,
            self.rows,
            self.scales.data_ptr(),
            _DIVIDED if self.divides else _SCALES[self.scales.dtype],
            _at(self.zeros),
            self.group,
            0,
            (
                _at(self.minimums),
                0 if of_rows else of_blocks,
                _at(self.block_minimums),
                of_blocks if of_rows else 0,
                _at(self.table),
                self.signed,
                _at(self.order),
            ),
        )

    def native_experts(self) -> tuple[NativeWeight, int]:
        """Return the arguments of the extension for a stack, and the address of its table of experts: none."""
        return self.native(), 0

    def fits(self, x: torch.Tensor) -> bool:
        return native.in_use() and not self.fp8 and x.is_cpu and x.dtype in (*native.DTYPES, torch.float16)

    def fits_experts(self, x: torch.Tensor) -> bool:
        """Return whether the kernels of experts take ``x`` and this stack."""
        return not self.fp8 and self.rows % TILE_ROWS == self.columns % TILE_ROWS == 0

    def widens(self, rows: int, dtype: torch.dtype) -> bool:
        # An x86 CPU without byte products (only AVX2) never does: a row of x would get other bits in a prompt than
        # in a decode.
        if rows < WIDENED_ROWS or self.byte_inputs or by_matrix_unit(dtype):
            return False
        return self.exact if native.extension().has_byte_products() else not is_x86()

    @staticmethod
    def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return weights of one shape, stacked along a new first dim: experts, whose kernels ignore ``byte_inputs``."""
        zeros = None
        if any(weight.zeros is not None for weight in weights):
            zeros = torch.stack(
                [
                    torch.full(weight.scales.shape, ZERO_POINT[weight.bits], dtype=torch.uint8, device=weight.device)
                    if weight.zeros is None
                    else weight.zeros
                    for weight in weights
                ]
            )

        def together(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            tensors = [part for part in parts if part is not None]
            if not tensors:
                return None
            wide = len({part.dtype for part in tensors}) > 1
            return torch.stack([part.float() if wide else part for part in tensors])

        scales = [weight.scales for weight in weights]
        if len({part.shape for part in scales}) > 1:
            # Some experts store one scale a tile, others sixteen.
            scales = [part.expand(*part.shape[:-1], TILE_ROWS) for part in scales]
        stack = together(scales)
        assert stack is not None
        orders = [weight.order for weight in weights]
        if any(order is not None for order in orders):
            places = torch.arange(weights[0].columns, dtype=torch.int32, device=weights[0].device)
            orders = [places if order is None else order for order in orders]
        minimums = together([weight.minimums for weight in weights])
        if minimums is not None and minimums.dtype != stack.dtype:
            minimums, stack = minimums.float(), stack.float()
        return replace(
            weights[0],
            codes=torch.stack([weight.codes for weight in weights]),
            zeros=zeros,
            scales=stack,
            minimums=minimums,
            byte_inputs=False,
            block_scales=together([weight.block_scales for weight in weights]),
            block_minimums=together([weight.block_minimums for weight in weights]),
            order=together(orders),
        )

    def __getitem__(self, index: int) -> QuantizedWeight:
        """Return weight ``index`` of a stack."""
        order = None if self.order is None else self.order[index]
        return replace(self._changed(lambda part: part[index]), order=order)

    def in_memory_order(self) -> QuantizedWeight:
        """Return the weight without its order: it multiplies an x whose columns are in that order."""
        return replace(self, order=None)

    def rows_at(self, rows_T: torch.Tensor, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        assert self.order is None, "tables have no order of columns"
        tiles_T, lanes_T = rows_T // TILE_ROWS, rows_T % TILE_ROWS
        own = self._changed(lambda part: part[tiles_T, :, lanes_T if part.shape[2] == TILE_ROWS else 0].unsqueeze(2))
        return own._plain(1).dense()[:, : self.columns].to(self.dtype)

    def dense(self, first: int = 0, last: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return rows [first, last) as values [..., last - first, columns]; ``first`` a multiple of 16."""
        last = self.rows if last is None else last
        values = self.by_rows(first, last).dense()[..., : last - first, : self.columns].to(dtype)
        return values if self.order is None else in_stored_order(values, self.order)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.order is not None:
            return self.in_memory_order().product(take_columns(x, self.order), bias)
        if self.byte_inputs:
            return self.byte_product(x, bias)
        out = x.new_empty(*x.shape[:-1], self.rows)
        # A block stays in the cache between dequantising and product; a full dense matrix would cost more than the
        # product.
        for first, last in self._blocks(_BLOCK_ELEMENTS):
            out[..., first:last] = F.linear(x, self.dense(first, last, x.dtype))
        return out if bias is None else out.add_(bias.to(x.dtype))

    def byte_product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``product`` of an ``x`` that is rounded as the weight."""
        codes_PRK, scales_PR = rounded_inputs(x.reshape(-1, self.columns), fp8=self.fp8)
        out = scales_PR.new_empty(scales_PR.shape[1], self.rows)
        for first, last in self._blocks(_BYTE_BLOCK_ELEMENTS):
            block = self.by_rows(first, last)
            numbers = block.codes.view(torch.float8_e4m3fn).float() if self.fp8 else block.codes.float() - ZERO_POINT[8]
            values_NPK = in_parts(numbers[: last - first, : self.columns])
            total = out[:, first:last].zero_()
            for part, (codes, scales) in enumerate(zip(codes_PRK, scales_PR, strict=True)):
                both = floats_of(block.scales)[: last - first, part * PART // self.group] * scales[:, None]
                # Scale times scale first, then the sum: the order of the C++ kernel, whose bits these are.
                total += (codes @ values_NPK[:, part].T).mul_(both)
        return (out if bias is None else out.add_(bias)).to(x.dtype).view(*x.shape[:-1], self.rows)

    def _blocks(self, elements: int) -> list[tuple[int, int]]:
        """Return blocks [first, last) of rows with about ``elements`` elements."""
        step = max(TILE_ROWS, elements // max(self.columns, 1) // TILE_ROWS * TILE_ROWS)
        return [(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]

    def by_rows(self, first: int, last: int) -> Codes:
        """Return the tiles of rows [first, last) by plain rows, columns in the order of memory, including the padding
        of the last tile and the last line.
        """
        assert first % TILE_ROWS == 0, "tiles are taken whole"
        tiles = slice(first // TILE_ROWS, -(-last // TILE_ROWS))
        lead = self.codes.ndim - 4
        return self._changed(lambda part: part[(slice(None),) * lead + (tiles,)])._plain(TILE_ROWS)

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """Return the weight with each of the tensors changed but ``order``, which has no tiles."""

        def maybe(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else change(part)

        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=maybe(self.zeros),
            minimums=maybe(self.minimums),
            block_scales=maybe(self.block_scales),
            block_minimums=maybe(self.block_minimums),
        )

    def _plain(self, lanes: int) -> Codes:
        """Return all tiles by plain rows; a tile has ``lanes`` of them."""
        plain = _unpacked(self.codes, self.bits).transpose(-3, -2).flatten(-2).flatten(-3, -2)

        def numbers(each: torch.Tensor, shared: torch.Tensor | None) -> Numbers:
            if shared is None:
                return _by_row(each, lanes).float()
            return BlockNumbers(_by_row(each, lanes), _by_row(shared, lanes), self.divides)

        return Codes(
            self.bits,
            plain,
            numbers(self.scales, self.block_scales),
            None if self.zeros is None else _by_row(self.zeros, lanes),
            self.group,
            self.fp8,
            None if self.minimums is None else numbers(self.minimums, self.block_minimums),
            self.table,
            signed=self.signed,
        )


def _at(numbers: torch.Tensor | None) -> int:
    assert numbers is None or numbers.is_contiguous()
    return 0 if numbers is None else numbers.data_ptr()


_TILED_BYTES = 1 << 18
"""Bytes of codes that are put into tiles at once."""
_NIBBLES, _QUARTERS = 0x0F0F0F0F0F0F0F0F, 0x0303030303030303


def _tiles(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [..., tiles, quads, 16, 4] of uint8 [..., rows, columns] in ``bits`` bits, some tiles at a time: their
    temporaries stay in the cache.
    """
    rows, columns = codes.shape[-2:]
    count, quads = _up(rows, TILE_ROWS) // TILE_ROWS, _up(columns, LINE) // 4 * bits // 8
    shape = (*codes.shape[:-2], count, quads, TILE_ROWS)
    if codes.is_meta:  # shifts of meta tensors import torch's compiler too
        return codes.new_empty((*shape, 4))
    if codes.device.type == "cpu":
        tiles = large_pages.empty(shape, torch.int32)
        step = max(1, _TILED_BYTES // max(1, TILE_ROWS * columns * math.prod(codes.shape[:-2])))
    else:
        tiles, step = torch.empty(shape, dtype=torch.int32, device=codes.device), max(1, count)
    for first in range(0, count, step):
        plain = codes[..., first * TILE_ROWS : (first + step) * TILE_ROWS, :]
        plain = _pad(plain, _up(plain.shape[-2], TILE_ROWS), _up(columns, LINE))
        # Four columns of a row are moved as one word.
        words = _packed(plain.contiguous(), bits)
        tiles[..., first : first + step, :, :] = _cut(words, -2, TILE_ROWS).transpose(-2, -1)
    return _cut(tiles.view(torch.uint8), -1, 4)


def _packed(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes uint8 [..., columns] in ``bits`` bits: int32 [..., words], where a word is four columns. Two words
    with four bits each become one. After two such words comes one with the further bits of all four.
    """
    if bits == 8:
        return rows.view(torch.int32)
    pairs = rows.view(torch.int64)  # the later word is the higher half
    low = pairs & _NIBBLES if bits == 6 else pairs
    low = (low | low >> 28).view(torch.int32)[..., ::2]
    if bits == 4:
        return low
    high = pairs >> 4 & _QUARTERS
    high = high | high >> 30
    high = (high[..., ::2] | high[..., 1::2] << 4).view(torch.int32)[..., ::2]
    out = low.new_empty((*low.shape[:-1], low.shape[-1] // 2 * 3))
    out[..., 0::3], out[..., 1::3], out[..., 2::3] = low[..., ::2], low[..., 1::2], high
    return out


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in bytes, [..., quads, 16, 4]."""
    if bits == 8:
        return codes
    if bits == 4:
        return torch.stack((codes & 15, codes >> 4), dim=-3).flatten(-4, -3)
    parts = _cut(codes, -3, 3)
    low, high = parts[..., :2, :, :], parts[..., 2, :, :]
    highs = torch.stack([high << shift & 48 if shift > 0 else high >> -shift & 48 for shift in (4, 2, 0, -2)], dim=-3)
    return (torch.stack((low & 15, low >> 4), dim=-3).flatten(-4, -3) | highs).flatten(-4, -3)


def _by_row(of_tiles: torch.Tensor, lanes: int) -> torch.Tensor:
    """Return [..., rows, groups] of [..., tiles, groups, 16 or 1]."""
    return of_tiles.expand(*of_tiles.shape[:-1], lanes).transpose(-2, -1).flatten(-3, -2)


def in_tiles(
    codes: Codes, *, exact: bool = False, byte_inputs: bool = False, dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Return the same values in tiles. Scales become float16 if none of them changes by it. ``dtype``: of the rows of
    a table.
    ``byte_inputs`` is for int8 without zeros, with groups of one or more full parts of 128 columns. It is for fp8 of
    full tiles and full parts too. Other weights ignore it, and so do experts in fp8.
    """
    rows, columns = codes.codes.shape[-2:]
    assert codes.group % LINE == 0 or codes.group == LINE // 2, f"groups of {codes.group} columns"
    assert not codes.signed or isinstance(codes.scales, torch.Tensor), "kernels read floats as scales of signed codes"
    group = min(codes.group, _up(columns, LINE))
    tiles = _tiles(codes.codes, codes.bits)
    scales, block_scales = _scales_by_tile(codes.scales, _up(columns, LINE) // group, codes.fp8)
    minimums = block_minimums = None
    if codes.minimums is not None:
        minimums, block_minimums = _scales_by_tile(codes.minimums, _up(columns, LINE) // group)
        if minimums.dtype != scales.dtype:  # the kernels read both in one form
            minimums, scales = minimums.float(), scales.float()
    zeros = None if codes.zeros is None else _by_tile(codes.zeros)
    if zeros is not None and not zeros.is_meta and bool((zeros == ZERO_POINT[codes.bits]).all()):
        zeros = None
    return QuantizedWeight(
        codes.bits,
        rows,
        columns,
        group,
        tiles,
        scales,
        None if zeros is None else zeros.contiguous(),
        exact,
        byte_inputs
        and codes.bits == 8
        and zeros is None
        and minimums is None
        and (group % PART == 0 or group >= columns)
        and (not codes.fp8 or _meets_fp8(codes)),
        codes.fp8,
        minimums,
        block_scales,
        block_minimums,
        isinstance(codes.scales, BlockNumbers) and codes.scales.divides,
        codes.table,
        codes.signed,
        codes.order,
        dtype,
    )


def _meets_fp8(codes: Codes) -> bool:
    """Return whether torch's product of fp8 by blocks takes the matrix."""
    rows, columns = codes.codes.shape[-2:]
    return codes.codes.ndim == 2 and rows % TILE_ROWS == 0 and columns % PART == 0


def _scales_by_tile(numbers: Numbers, groups: int, fp8: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(numbers, BlockNumbers):
        return _by_tile(numbers.each, groups).contiguous(), _by_tile(numbers.shared).contiguous()
    by_row = numbers.float()
    if fp8:  # rows of padding have the last row's scale, so that a tile may have one
        padding = by_row[..., -1:, :].expand(*by_row.shape[:-2], -by_row.shape[-2] % TILE_ROWS, by_row.shape[-1])
        by_row = torch.cat((by_row, padding), dim=-2)
    scales = _by_tile(by_row, groups)
    if not scales.is_meta:
        half = scales.half()
        scales = half if torch.equal(half.float(), scales) else scales
        # Checkpoints scale blocks of 128 x 128 weights, so the rows of a tile nearly always share one: stored
        # once.
        if fp8 and bool((scales == scales[..., :1]).all()):
            scales = scales[..., :1]
    return scales.contiguous(), None


def _by_tile(of_rows: torch.Tensor, groups: int = 0) -> torch.Tensor:
    padded = _pad(of_rows, _up(of_rows.shape[-2], TILE_ROWS), max(groups, of_rows.shape[-1]))
    return _cut(padded, -2, TILE_ROWS).transpose(-2, -1)


def _cut(x: torch.Tensor, dim: int, into: int) -> torch.Tensor:
    """Split ``dim`` in two: blocks, and the ``into`` elements of each."""
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], -1, into, *x.shape[dim + 1 :])


def _pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    by = (0, columns - x.shape[-1], 0, rows - x.shape[-2])
    if x.dtype == torch.float8_e8m0fnu:  # torch cannot pad it with a zero, which it does not have
        return F.pad(x.view(torch.uint8), by).view(x.dtype)
    return F.pad(x, by)


def _up(count: int, of: int) -> int:
    return -(-count // of) * of


def rounded_inputs(x_RI: torch.Tensor, *, fp8: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [parts, R, 128] and scales [parts, R], both float32. A part with a non-finite number has codes 0
    and a scale of NaN. ``fp8``: codes are numbers of e4m3, not integers.
    """
    x_PRK = in_parts(x_RI.float()).transpose(0, 1)
    reach = x_PRK.abs().amax(-1, keepdim=True)
    finite = reach.isfinite()  # the maximum of numbers with a NaN is NaN
    some = finite & (reach >= _LEAST)
    most = 448 if fp8 else 127
    exact = x_PRK * torch.full_like(reach, most).div_(reach)  # torch computes 127 / reach through 1 / reach
    codes = torch.where(some, exact.to(torch.float8_e4m3fn).float() if fp8 else exact.round_(), 0)
    scales = torch.where(some, reach / most, torch.where(finite, 0.0, torch.nan))
    return codes, scales.squeeze(-1)


def in_parts(x_RI: torch.Tensor) -> torch.Tensor:
    """Return [R, parts, 128] of [R, columns], filled with zeros."""
    parts = -(-x_RI.shape[1] // PART)
    return F.pad(x_RI, (0, parts * PART - x_RI.shape[1])).view(x_RI.shape[0], parts, PART)
