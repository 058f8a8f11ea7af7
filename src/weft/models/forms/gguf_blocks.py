"""Blocks of ggml as codes that the kernels multiply with: scales and minimums keep their bits.

    form                   codes                          scale                    minimum
    Q8_0                   int8                           d
    Q4_0                   int4, middle 8                 d
    Q1_0                   int4: 7 and 9 for -1 and 1     d, of 128 columns
    Q5_0                   int6: five bits less 16        d
    IQ4_NL                 int4 with a table              d
    MXFP4                  int4 with a table              a power of two
    IQ4_XS                 int4 with a table              d x six bits less 32
    Q4_1, Q5_1             int4, int6                     d                        -m
    Q4_K, Q5_K             int4, int6                     d x six bits             dmin x six bits
    Q6_K                   int6, middle 32                d x eight bits
    Q3_K                   int4, middle 8                 d x six bits less 32
    Q2_K                   int4: two bits                 d x four bits            dmin x four bits

A scale is for 32 columns, in the last three forms for 16. K forms, IQ4_XS and MXFP4 (with d = 1/2) keep d and the bits
apart (``BlockNumbers``). Products of a float16 and eight bits are exact in float32, so values are those of
``gguf.quants``, bit for bit. Forms with codebooks (IQ1 to IQ3) are not here.

Source: the block structures of ggml (``ggml-common.h``), as gguf's ``quants`` decodes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.tensor.weights.quantized import E2M1, LINE, ZERO_POINT, BlockNumbers, Codes, Numbers

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_Decoded = tuple[torch.Tensor, Numbers, Numbers | None]


@dataclass(frozen=True, slots=True)
class BlockForm:
    """One form of ggml's blocks. ``columns`` in ``block_bytes``, ``group`` of them per scale. ``by_blocks``: scales
    are ``BlockNumbers``; ``table``: values of the codes. ``decode``: blocks uint8 [N, bytes] -> codes uint8 [N,
    columns], scales [N, groups], float32 or ``BlockNumbers``, and minimums as the scales, or None.
    """

    bits: int
    columns: int
    block_bytes: int
    has_minimums: bool
    decode: Callable[[torch.Tensor], _Decoded]
    group: int = LINE
    by_blocks: bool = False
    table: tuple[int, ...] = ()

    @property
    def of_cpus(self) -> bool:
        """Whether kernels of GPUs read neither this form nor the same values in bytes."""
        return self.has_minimums or (self.by_blocks and not self.table)

    def _numbers(self, device: torch.device | str) -> torch.Tensor | None:
        if not self.table:
            return None
        return torch.tensor([value + ZERO_POINT[8] for value in self.table], dtype=torch.uint8, device=device)

    def codes(self, by_row: torch.Tensor) -> Codes:
        """Return the codes of rows uint8 [rows, bytes]."""
        rows = by_row.shape[0]

        def of_rows(numbers: Numbers) -> Numbers:
            if isinstance(numbers, BlockNumbers):
                shared = numbers.shared.reshape(rows, -1)
                # Scales of powers of two share the factor 1/2.
                return BlockNumbers(
                    numbers.each.reshape(rows, -1), shared if shared.dtype == torch.float16 else shared[:, :1]
                )
            return numbers.reshape(rows, -1)

        codes, scales, minimums = self.decode(by_row.reshape(-1, self.block_bytes))
        return Codes(
            self.bits,
            codes.view(rows, -1),
            of_rows(scales),
            None,
            self.group,
            minimums=None if minimums is None else of_rows(minimums),
            table=self._numbers(by_row.device),
        )

    def empty(self, rows: int, columns: int) -> Codes:
        """Return codes without values, for headers."""
        each = torch.empty((rows, -(-columns // self.group)), device="meta")
        numbers: Numbers = each
        if self.by_blocks:
            powers = self.columns == LINE
            shared = torch.empty(
                (rows, 1 if powers else columns // self.columns),
                device="meta",
                dtype=torch.float32 if powers else torch.float16,
            )
            numbers = BlockNumbers(each.to(torch.float8_e8m0fnu if powers else torch.int8), shared)
        return Codes(
            self.bits,
            torch.empty((rows, columns), dtype=torch.uint8, device="meta"),
            numbers,
            None,
            self.group,
            minimums=numbers if self.has_minimums else None,
            table=self._numbers("meta"),
        )


def _half(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the float16 at byte ``first`` of each block, as float32 [N, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N, 2 bytes] of ``packed`` uint8 [N, bytes]: the low halves of 16 bytes are columns, then their
    high halves.
    """
    cut = packed.reshape(len(packed), -1, 16)
    return torch.cat((cut & 15, cut >> 4), dim=2).flatten(1)


def _fifth_bits(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the fifth bits of 32 columns, from byte ``first`` on: uint8 [N, 32], each 0 or 16."""
    four = blocks[:, first : first + 4].unsqueeze(2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((four >> shifts & 1) << 4).flatten(1)


def _q8_0(blocks: torch.Tensor) -> _Decoded:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None  # two's complement, plus 128


def _q4_0(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q1_0(blocks: torch.Tensor) -> _Decoded:
    """Decode Q1_0: the bits of a byte, lowest first, are columns, each one of the two neighbours of the middle."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    ones = blocks[:, 2:].unsqueeze(2) >> shifts & 1
    return (2 * ones + (ZERO_POINT[4] - 1)).flatten(1), _half(blocks, 0).repeat(1, 4), None


def _q4_1(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> _Decoded:
    codes = _nibbles(blocks[:, 6:]) + _fifth_bits(blocks, 2)
    return codes + (ZERO_POINT[6] - 16), _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> _Decoded:
    return _nibbles(blocks[:, 8:]) + _fifth_bits(blocks, 4), _half(blocks, 0), -_half(blocks, 2)


def _iq4_xs(blocks: torch.Tensor) -> _Decoded:
    shifts = torch.arange(0, 16, 2, device=blocks.device)
    high = blocks[:, 2:4].contiguous().view(torch.int16).int() >> shifts & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    scales = ((low.int() | high << 4) - 32).to(torch.int8)
    return _nibbles(blocks[:, 8:]), BlockNumbers(scales, _shared(blocks, 0)), None


def _mxfp4(blocks: torch.Tensor) -> _Decoded:
    """Decode MXFP4. The scale is the exponent's power of two, halved: for 0 and 1 a denormal number. 255 is the next
    power, not NaN.
    """
    powers = blocks[:, :1].contiguous().view(torch.float8_e8m0fnu)
    return _nibbles(blocks[:, 1:]), BlockNumbers(powers, torch.full((len(blocks), 1), 0.5)), None


def apart(by_row: torch.Tensor) -> torch.Tensor:
    """Return blocks of MXFP4, uint8 [rows, bytes], in ggml's order of columns, from blocks in which the two columns of
    a byte are neighbours.
    """
    blocks = by_row.reshape(-1, BLOCK_FORMS["MXFP4"].block_bytes)
    first, second = blocks[:, 1:9], blocks[:, 9:]
    even, odd = first & 15 | second << 4, first >> 4 | second & 240
    return torch.cat((blocks[:, :1], torch.stack((even, odd), dim=2).flatten(1)), dim=1).reshape(by_row.shape)


def _shared(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return the float16 at byte ``first`` unconverted, [N, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _six_bits(blocks: torch.Tensor) -> tuple[BlockNumbers, BlockNumbers]:
    """Return the 8 scales and 8 minimums of Q4_K and Q5_K, in 12 bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, high & 15 | (low >> 6) << 4), dim=1)
    minimums = torch.cat((middle & 63, high >> 4 | (middle >> 6) << 4), dim=1)
    return (
        BlockNumbers(scales.view(torch.int8), _shared(blocks, 0)),
        BlockNumbers(minimums.view(torch.int8), _shared(blocks, 2)),
    )


_NIBBLES, _HIGH = 0x0F0F0F0F0F0F0F0F, 0x3030303030303030


def _by_eight(packed: torch.Tensor) -> torch.Tensor:
    """Return int64 [N, bytes / 8] of uint8 [N, bytes]: torch is several times faster on words than on bytes."""
    return packed.contiguous().view(torch.int64)


def _halves_of_lines(packed: torch.Tensor) -> torch.Tensor:
    """Return [N, 8, 32] of uint8 [N, 128]: the low halves of 32 bytes are a line, their high halves the next."""
    cut = _by_eight(packed).reshape(-1, 4, 1, LINE // 8)
    return torch.cat((cut & _NIBBLES, cut >> 4 & _NIBBLES), dim=2).view(torch.uint8).flatten(1, 2)


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """Return [N, 8, 32] of uint8 [N, 64]: two bits of 32 bytes are a line, from the lowest on."""
    cut = packed.reshape(-1, 2, 1, LINE)
    return torch.cat([cut >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1, 2)


def _q4_k(blocks: torch.Tensor) -> _Decoded:
    return _halves_of_lines(blocks[:, 16:]).flatten(1), *_six_bits(blocks)


def _q5_k(blocks: torch.Tensor) -> _Decoded:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4
    return (_halves_of_lines(blocks[:, 48:]) + fifth).flatten(1), *_six_bits(blocks)


def _q6_k(blocks: torch.Tensor) -> _Decoded:
    """Decode Q6_K. In 128 columns, 64 bytes have two lines in their low halves and the next two in their high
    halves.
    """
    low = _by_eight(blocks[:, :128]).reshape(-1, 2, 1, 8)
    high = _by_eight(blocks[:, 128:192]).reshape(-1, 2, 1, 4)
    codes = torch.cat((low & _NIBBLES, low >> 4 & _NIBBLES), dim=2).view(-1, 2, 4, 4)
    codes |= torch.cat([(high << 4 - bit if bit < 4 else high >> bit - 4) & _HIGH for bit in (0, 2, 4, 6)], dim=2)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return codes.view(torch.uint8).flatten(1), BlockNumbers(scales, _shared(blocks, 208)), None


def _q3_k(blocks: torch.Tensor) -> _Decoded:
    """Decode Q3_K, three bits less 4: the third bits of a line are one bit of 32 bytes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    third = (blocks[:, :32].unsqueeze(1) >> shifts & 1) << 2
    codes = (_quarters(blocks[:, 32:96]) | third) + (ZERO_POINT[4] - 4)
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    four = torch.cat((low & 15, low >> 4), dim=1)
    two = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = (four | two << 4).view(torch.int8) - 32
    return codes.flatten(1), BlockNumbers(scales, _shared(blocks, 108)), None


def _q2_k(blocks: torch.Tensor) -> _Decoded:
    both = blocks[:, :16]
    return (
        _quarters(blocks[:, 16:80]).flatten(1),
        BlockNumbers((both & 15).view(torch.int8), _shared(blocks, 80)),
        BlockNumbers((both >> 4).view(torch.int8), _shared(blocks, 82)),
    )


BLOCK_FORMS: dict[str, BlockForm] = {
    "Q8_0": BlockForm(8, 32, 34, False, _q8_0),
    "Q4_0": BlockForm(4, 32, 18, False, _q4_0),
    "Q1_0": BlockForm(4, 128, 18, False, _q1_0),
    "Q4_1": BlockForm(4, 32, 20, True, _q4_1),
    "Q5_0": BlockForm(6, 32, 22, False, _q5_0),
    "Q5_1": BlockForm(6, 32, 24, True, _q5_1),
    "IQ4_NL": BlockForm(4, 32, 18, False, _q4_0, table=_IQ4),
    "IQ4_XS": BlockForm(4, 256, 136, False, _iq4_xs, by_blocks=True, table=_IQ4),
    "MXFP4": BlockForm(4, 32, 17, False, _mxfp4, by_blocks=True, table=E2M1),
    "Q4_K": BlockForm(4, 256, 144, True, _q4_k, by_blocks=True),
    "Q5_K": BlockForm(6, 256, 176, True, _q5_k, by_blocks=True),
    "Q6_K": BlockForm(6, 256, 210, False, _q6_k, 16, by_blocks=True),
    "Q3_K": BlockForm(4, 256, 110, False, _q3_k, 16, by_blocks=True),
    "Q2_K": BlockForm(4, 256, 84, True, _q2_k, 16, by_blocks=True),
}
