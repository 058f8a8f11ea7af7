"""Weights in 8 or 4 bits, in the order in which the kernels read them.

    value[row, column] = (code - zero) * scale        scale, zero: one for each ``group`` columns of a row
                       = code * scale - minimum       ggml's blocks; minimum: float, one for each 32 columns
                       = e4m3(code) * scale           fp8 (GPUs alone)

    codes   tile 0 | columns 0-3 of rows 0..15 | columns 4-7 of rows 0..15 | ...        int8: 64 bytes each
            tile 1 | ...                                              int4: 64 bytes hold two, low half first
    scales  tile 0 | group 0 of rows 0..15 | group 1 of rows 0..15 | ...

Sixteen rows are the sixteen lanes of a vector: nothing is added across lanes, and one load brings sixteen
scales. Rows are padded to tiles, columns to lines of 32. Codes are unsigned, because the byte products of
CPUs take an unsigned left operand. Without ``zeros`` the zero point is the middle code (128, 8).

Codes of fp8 are bytes of e4m3. Checkpoints have one scale for a block of 128 x 128 weights, so the rows of a
tile nearly always share theirs: then it is stored once (the last dim of ``scales`` is 1).

``Codes`` holds the same values by plain rows, as checkpoints store them and as rounding produces them.
Weights that weft rounds have groups of 128 (int8) and 32 (int4), symmetric: docs/quantization.md has the
measurements.

Every tensor may have a leading dim (experts): codes [E, rows, columns] and so on.

Rejected: one layout for the kernels and one for torch. The torch path unpacks tiles with a view and a
permute; two layouts would be two sets of bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from weft.tensor.weights import large_pages

TILE_ROWS = 16
LINE = 32
"""Columns that share a scale of the input; groups are multiples of it."""
PART = 128
"""Columns that share a scale of the input if inputs are always rounded (``byte_inputs``)."""
GROUPS: dict[int, int] = {8: 128, 4: 32}
"""Bits -> columns per scale, for weights that weft rounds."""
ZERO_POINT: dict[int, int] = {8: 128, 4: 8}
_HALF_MAX = 65504.0
_REACHES = (7.5, 8.0, 8.5, 9.0, 10.0)
"""Candidates in int4 for the steps from zero to a group's largest weight; beyond 8 it saturates."""
_ROUNDED_ELEMENTS = 1 << 18
"""Elements rounded at once, so that the temporaries stay in the cache."""


@dataclass(frozen=True, slots=True)
class Codes:
    """``codes`` uint8 [..., rows, columns]; ``scales`` float32 [..., rows, groups]; ``zeros`` uint8 of the
    same shape, None for the middle code. ``group``: columns per scale. ``fp8``: codes are bytes of e4m3, and
    there are no zeros. ``minimums``: float32 as the scales, subtracted; then zeros are 0 and groups LINE."""

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    fp8: bool = False
    minimums: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """The values, float32 [..., rows, columns]."""
        columns = self.codes.shape[-1]
        if self.fp8:
            wide = self.codes.view(torch.float8_e4m3fn).float()
            return wide * _per_column(self.scales, self.group, columns)
        zeros = ZERO_POINT[self.bits] if self.zeros is None else _per_column(self.zeros, self.group, columns)
        values = (self.codes.float() - zeros) * _per_column(self.scales, self.group, columns)
        return values if self.minimums is None else values - _per_column(self.minimums, self.group, columns)

    def reordered(self, order: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        """Rows in another order: ``order`` takes [rows, anything]."""
        return replace(self, codes=order(self.codes), scales=order(self.scales),
                       zeros=None if self.zeros is None else order(self.zeros),
                       minimums=None if self.minimums is None else order(self.minimums))

    def above(self, *others: Codes) -> Codes:
        """These rows with the rows of ``others`` below; all have the same bits and groups."""
        parts = (self, *others)
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([torch.full(part.scales.shape, ZERO_POINT[self.bits], dtype=torch.uint8,
                                          device=part.scales.device) if part.zeros is None else part.zeros
                               for part in parts], dim=-2)
        minimums = None
        if any(part.minimums is not None for part in parts):
            minimums = torch.cat([torch.zeros_like(part.scales) if part.minimums is None else part.minimums
                                  for part in parts], dim=-2)
        return replace(self, codes=torch.cat([part.codes for part in parts], dim=-2), zeros=zeros,
                       scales=torch.cat([part.scales for part in parts], dim=-2), minimums=minimums)


def _per_column(of_groups: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return of_groups.float().repeat_interleave(group, dim=-1)[..., :columns]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """``codes`` uint8 [..., tiles, lines x 8 or 4, 16, 4]; ``scales`` float16 or float32 [..., tiles, groups,
    16], or with fp8 also [..., tiles, groups, 1]; ``zeros`` uint8 of the same shape or None. ``exact``:
    inputs are never rounded to int8, whatever the kernels could do. ``byte_inputs``: inputs are rounded to
    int8 everywhere, by parts of 128 columns, and the product has the same bits on every machine. ``fp8``:
    codes are bytes of e4m3; kernels of CPUs do not read them. ``minimums``: float32 as the scales; kernels of
    GPUs and experts do not read them."""

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

    @property
    def form(self) -> str:
        """``int8``, ``int4``, ``w8a8``, ``fp8``."""
        if self.fp8:
            return "fp8"
        return "w8a8" if self.byte_inputs else f"int{self.bits}"

    @property
    def held_bytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.minimums)
        return sum(part.numel() * part.itemsize for part in parts if part is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def of(self, index: int) -> QuantizedWeight:
        """Weight ``index`` of a stack."""
        return replace(self, codes=self.codes[index], scales=self.scales[index],
                       zeros=None if self.zeros is None else self.zeros[index])

    def dense(self, first: int = 0, last: int | None = None, dtype: torch.dtype = torch.float32,
              ) -> torch.Tensor:
        """Rows [first, last) as values [..., last - first, columns]; ``first`` a multiple of 16."""
        last = self.rows if last is None else last
        return self.by_rows(first, last).dense()[..., :last - first, :self.columns].to(dtype)

    def by_rows(self, first: int, last: int) -> Codes:
        """The tiles of rows [first, last) by plain rows, including the padding of the last tile and the last
        line."""
        assert first % TILE_ROWS == 0, "tiles are taken whole"
        tiles = slice(first // TILE_ROWS, -(-last // TILE_ROWS))
        codes = self.codes[..., tiles, :, :, :]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-3).flatten(-4, -3)
        lines = codes.shape[-3] * 4
        plain = codes.transpose(-3, -2).flatten(-2).flatten(-3, -2)          # [..., rows, columns]
        zeros = None if self.zeros is None else _by_row(self.zeros[..., tiles, :, :])
        assert plain.shape[-1] == lines
        minimums = None if self.minimums is None else _by_row(self.minimums[..., tiles, :, :])
        return Codes(self.bits, plain, _by_row(self.scales[..., tiles, :, :]).float(), zeros, self.group,
                     self.fp8, minimums)


def _by_row(of_tiles: torch.Tensor) -> torch.Tensor:
    """[..., tiles, groups, 16 or 1] -> [..., rows, groups]."""
    return _of_lanes(of_tiles).transpose(-2, -1).flatten(-3, -2)


def _of_lanes(of_tiles: torch.Tensor) -> torch.Tensor:
    """A number for each of the 16 rows of a tile."""
    return of_tiles.expand(*of_tiles.shape[:-1], TILE_ROWS)


def in_tiles(codes: Codes, *, exact: bool = False, byte_inputs: bool = False) -> QuantizedWeight:
    """The same values in the kernels' order. Scales become float16 if none of them changes by it.
    ``byte_inputs`` is for int8 without zeros, with groups of one or more whole parts of 128 columns; other
    weights ignore it."""
    rows, columns = codes.codes.shape[-2:]
    assert codes.group % LINE == 0, f"groups of {codes.group} columns are no whole lines of {LINE}"
    group = min(codes.group, _up(columns, LINE))
    plain = _pad(codes.codes, _up(rows, TILE_ROWS), _up(columns, LINE))
    tiles = _cut(_cut(plain, -2, TILE_ROWS), -1, 4).transpose(-3, -2)
    if codes.bits == 4:
        pairs = _cut(tiles, -3, 2)
        tiles = pairs[..., 0, :, :] | (pairs[..., 1, :, :] << 4)
    by_row = codes.scales.float()
    if codes.fp8:   # rows of padding have the last row's scale, so that a tile may have one
        padding = by_row[..., -1:, :].expand(*by_row.shape[:-2], -rows % TILE_ROWS, by_row.shape[-1])
        by_row = torch.cat((by_row, padding), dim=-2)
    scales = _by_tile(by_row)
    half = scales.half()
    zeros = None if codes.zeros is None else _by_tile(codes.zeros)
    if not scales.is_meta:
        scales = half if torch.equal(half.float(), scales) else scales
        if codes.fp8 and bool((scales == scales[..., :1]).all()):
            scales = scales[..., :1]
        if zeros is not None and bool((zeros == ZERO_POINT[codes.bits]).all()):
            zeros = None
    return QuantizedWeight(codes.bits, rows, columns, group, large_pages.copied(tiles), scales.contiguous(),
                           None if zeros is None else zeros.contiguous(), exact,
                           byte_inputs and codes.bits == 8 and zeros is None and not codes.fp8
                           and (group % PART == 0 or group >= columns), codes.fp8,
                           None if codes.minimums is None else _by_tile(codes.minimums).contiguous())


def _by_tile(of_rows: torch.Tensor) -> torch.Tensor:
    padded = _pad(of_rows, _up(of_rows.shape[-2], TILE_ROWS), of_rows.shape[-1])
    return _cut(padded, -2, TILE_ROWS).transpose(-2, -1)


def _cut(x: torch.Tensor, dim: int, into: int) -> torch.Tensor:
    """Split ``dim`` in two: blocks, and the ``into`` elements of each."""
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], -1, into, *x.shape[dim + 1:])


def _pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[-1], 0, rows - x.shape[-2]))


def _up(count: int, of: int) -> int:
    return -(-count // of) * of


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one shape stacked along a new first dim. For experts, whose kernels ignore
    ``byte_inputs``."""
    wide = any(weight.scales.dtype == torch.float32 for weight in weights)
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.stack([torch.full(weight.scales.shape, ZERO_POINT[weight.bits], dtype=torch.uint8,
                                        device=weight.device) if weight.zeros is None else weight.zeros
                             for weight in weights])
    scales = [weight.scales.float() if wide else weight.scales for weight in weights]
    if len({part.shape for part in scales}) > 1:
        scales = [_of_lanes(part) for part in scales]
    return replace(weights[0], codes=torch.stack([weight.codes for weight in weights]), zeros=zeros,
                   scales=torch.stack(scales), byte_inputs=False)


def rounded(weight: torch.Tensor, bits: int) -> Codes:
    """``weight`` [..., rows, columns] of any float dtype, rounded to ``bits``: symmetric, with scales that
    fit float16.

    int8: a scale maps the largest weight of its group to 127. int4: the largest, with its sign, becomes -8;
    then the scale of least squared error is chosen among a few smaller ones. A group's largest weight is an
    outlier more often than not."""
    group = GROUPS[bits]
    columns = weight.shape[-1]
    if weight.is_meta:
        scales = weight.new_empty((*weight.shape[:-1], -(-columns // group)), dtype=torch.float32)
        return Codes(bits, weight.to(torch.uint8), scales, None, group)
    codes = weight.new_empty((*weight.shape[:-1], _up(columns, group)), dtype=torch.uint8)
    groups, scales = codes.view(-1, group), weight.new_empty(codes.numel() // group, dtype=torch.float32)
    padded = torch.nn.functional.pad(weight, (0, _up(columns, group) - columns)).view(-1, group)
    step = _ROUNDED_ELEMENTS // group
    for first in range(0, padded.shape[0], step):
        at = slice(first, first + step)
        part = padded[at].float()
        scale = _scales(part, bits)
        groups[at] = _steps(part, scale, bits).add_(ZERO_POINT[bits]).to(torch.uint8)
        scales[at] = scale.squeeze(1)
    return Codes(bits, codes[..., :columns], scales.view(*weight.shape[:-1], -1), None, group)


def _scales(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """The scales of groups [n, columns]: float32 [n, 1], each representable in float16."""
    if bits == 8:
        return _stored(groups.abs().amax(1, keepdim=True) / 127)
    most = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    least = torch.full_like(most, torch.inf)
    scales = torch.zeros_like(most)
    for reach in _REACHES:
        tried = _stored(most / -reach)
        error = _steps(groups, tried, 4).mul_(tried).sub_(groups)
        error = torch.linalg.vecdot(error, error).unsqueeze(1)
        scales = torch.where(error < least, tried, scales)
        least = torch.minimum(error, least)
    return scales


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """Rounded to float16."""
    return scales.clamp(-_HALF_MAX, _HALF_MAX).half().float()


def _steps(groups: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Steps of the scale from zero, as floats; 0 where the scale is 0."""
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (groups * inverse).round_().clamp_(-8 if bits == 4 else -127, 7 if bits == 4 else 127)
