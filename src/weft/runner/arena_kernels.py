"""Arena work on a GPU, one launch each: fill frames, copy slots or pages, compress and restore states.

    fill      program (item, block)     words of item i at i x stride               a byte, 8 times in a word
    copy      program (item, block)     item a -> item b
    compress  program (piece, state)    rows of a slot -> codes, scales in pages     restore: the way back

The arena is seen as 64-bit words: everything in it is aligned to 256 bytes. Addresses are 64 bits wide, as an arena
may have more than 2^31 words. PAD as an item means no work (L4).

A copy reads every source before it writes anything. One launch does that if no destination is also a source. If one is
(a moves to b while b moves to c), the programs of one launch would race. Then some words of every item are copied to a
buffer of fixed size and back, then the next ones: word w of an item only ever becomes word w of another.

A compressed state is scattered over pages, so each of its bytes is looked up: byte b of compressed state k is at
``pages[k, b // page_bytes] * page_bytes + b % page_bytes``. A row's codes may be on two pages; no single number is. A
*piece* is the work of one program: some rows of an accumulator, or some words of a field that is kept as it is; the
pieces of a geometry are one table on the device, made once.

Rounding is that of ``ops.state_codes``: to the nearest, halves to the even one. Adding and taking away 1.5 x 2^23
rounds so in float32, by the hardware's own addition, in every backend of Triton. The kernels call ``div_rn``, because
``/`` on a GPU may be off by two units in the last place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weft.memory.frames.plan import ArenaPlan
from weft.tensor.gpu.launch import launch

Int64s = npt.NDArray[np.int64]

WORD_BYTES = 8
BLOCK_WORDS = 2048
UNIT_WORDS = 32
"""Words in a unit. Everything in the arena is a multiple of units and begins at one, so pieces are aligned as items
are.
"""
PIECE_NUMBERS = 4096
"""Most numbers that one program compresses."""
_TL_TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@triton.jit(do_not_specialize=["value"], do_not_specialize_on_alignment=["items"])
def _fill_kernel(words, items, value, item_words, BLOCK: tl.constexpr):
    item = tl.load(items + tl.program_id(0)).to(tl.int64)
    word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if item >= 0:
        tl.store(words + item * item_words + word, tl.zeros((BLOCK,), tl.int64) + value, mask=word < item_words)


@triton.jit(do_not_specialize_on_alignment=["source_items", "target_items"])
def _copy_kernel(
    sources,
    source_items,
    targets,
    target_items,
    item_words,
    words,
    FROM_SCRATCH: tl.constexpr,
    TO_SCRATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    source = number.to(tl.int64) if FROM_SCRATCH else tl.load(source_items + number).to(tl.int64)
    target = number.to(tl.int64) if TO_SCRATCH else tl.load(target_items + number).to(tl.int64)
    word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if (source >= 0) & (target >= 0):
        source_words = words if FROM_SCRATCH else item_words
        target_words = words if TO_SCRATCH else item_words
        copied = tl.load(sources + source * source_words + word, mask=word < words)
        tl.store(targets + target * target_words + word, copied, mask=word < words)


@triton.jit
def codes_of(wide_RC, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return int8 codes of ``wide_RC``, float32 [ROWS, COLUMNS], and the step of each row [ROWS], as
    ``state_codes.encode_state``.
    """
    scale_R = tl.math.div_rn(tl.max(tl.abs(wide_RC), axis=1), tl.full((ROWS,), 127.0, tl.float32))
    step_R = tl.where(scale_R > 0, scale_R, 1.0)
    step_RC = tl.broadcast_to(step_R[:, None], (ROWS, COLUMNS))
    # Adding 1.5 x 2^23 leaves no bits for a fraction, so the sum is rounded to the nearest even number.
    nearest_RC = (tl.math.div_rn(wide_RC, step_RC) + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(nearest_RC, -127.0), 127.0).to(tl.int8), scale_R


@triton.jit
def _compressed_address(pages, offset, page_bytes, inside):
    """Return the address in the arena of byte ``offset`` of a compressed state (which has fewer than 2^31 bytes)."""
    offset = offset.to(tl.int32)
    page = tl.load(pages + offset // page_bytes, mask=inside, other=0).to(tl.int64)
    return page * page_bytes + offset % page_bytes


@triton.jit
def _compress_kernel(
    arena,
    states,
    states_stride,
    pieces,
    page_bytes,
    slot_bytes,
    STATE: tl.constexpr,
    UNIT: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    RESTORE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    state = states + tl.program_id(1).to(tl.int64) * states_stride
    slot = tl.load(state).to(tl.int64)
    pages = state + 1
    piece = pieces + tl.program_id(0).to(tl.int64) * 5
    slot_at, compressed_at, scales_at = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    count, width = tl.load(piece + 3), tl.load(piece + 4)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_slot = arena + slot * slot_bytes + slot_at
    if scales_at >= 0:
        inside_RC = (row[:, None] < count) & (column[None, :] < width)
        at_RC = row[:, None] * width + column[None, :]
        values_RC = in_slot.to(tl.pointer_type(STATE)) + at_RC
        codes_RC = arena + _compressed_address(pages, compressed_at + at_RC, page_bytes, inside_RC)
        codes_RC = codes_RC.to(tl.pointer_type(tl.int8))
        scale_at_R = scales_at + row.to(tl.int64) * 4
        scales_R = arena + _compressed_address(pages, scale_at_R, page_bytes, row < count)
        scales_R = scales_R.to(tl.pointer_type(tl.float32))
        if RESTORE:
            scale_R = tl.load(scales_R, mask=row < count, other=0.0)
            wide_RC = tl.load(codes_RC, mask=inside_RC, other=0).to(tl.float32) * scale_R[:, None]
            tl.store(values_RC, wide_RC.to(STATE), mask=inside_RC)
        else:
            wide_RC = tl.load(values_RC, mask=inside_RC, other=0.0).to(tl.float32)
            code_RC, scale_R = codes_of(wide_RC, ROWS, COLUMNS)
            tl.store(codes_RC, code_RC, mask=inside_RC)
            tl.store(scales_R, scale_R, mask=row < count)
    else:
        word_RC = row[:, None].to(tl.int64) * COLUMNS + column[None, :]
        inside_words_RC = word_RC < count
        offset_RC = compressed_at + word_RC * UNIT_BYTES
        packed_RC = arena + _compressed_address(pages, offset_RC, page_bytes, inside_words_RC)
        packed_RC = packed_RC.to(tl.pointer_type(UNIT))
        here_RC = in_slot.to(tl.pointer_type(UNIT)) + word_RC
        if RESTORE:
            tl.store(here_RC, tl.load(packed_RC, mask=inside_words_RC), mask=inside_words_RC)
        else:
            tl.store(packed_RC, tl.load(here_RC, mask=inside_words_RC), mask=inside_words_RC)


def fill(words: torch.Tensor, items: torch.Tensor, item_words: int, byte: int) -> None:
    """Write ``byte`` into every byte of ``items`` (int64 [k]). ``words``: int64, the complete arena; item i is at
    ``i * item_words``.
    """
    value = int.from_bytes(bytes([byte]) * WORD_BYTES, "little", signed=True)
    grid = (items.numel(), triton.cdiv(item_words, BLOCK_WORDS))
    launch(_fill_kernel, grid)(words, items, value, item_words, BLOCK=BLOCK_WORDS)


def copy(
    words: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, item_words: int, *, room: torch.Tensor | None
) -> None:
    """Copy item ``sources[k]`` to item ``targets[k]``; all are read before one is written. ``room``: int64, scratch
    for the copies; a larger one is made if it has less than ``UNIT_WORDS`` for each item. None: no target is also a
    source.
    """
    count = sources.numel()
    if room is None:
        _copied(words, sources, words, targets, item_words, item_words)
        return
    if room.numel() < count * UNIT_WORDS:
        room = torch.empty(count * UNIT_WORDS, dtype=torch.int64, device=words.device)
    step = room.numel() // count // UNIT_WORDS * UNIT_WORDS
    for first in range(0, item_words, step):
        some, piece = words[first:], min(step, item_words - first)
        _copied(some, sources, room, targets, item_words, piece, TO_SCRATCH=True)
        _copied(room, sources, some, targets, item_words, piece, FROM_SCRATCH=True)


def _copied(
    of: torch.Tensor,
    sources: torch.Tensor,
    to: torch.Tensor,
    targets: torch.Tensor,
    item_words: int,
    words: int,
    *,
    FROM_SCRATCH: bool = False,
    TO_SCRATCH: bool = False,
) -> None:
    launch(_copy_kernel, (sources.numel(), triton.cdiv(words, BLOCK_WORDS)))(
        of, sources, to, targets, item_words, words, FROM_SCRATCH=FROM_SCRATCH, TO_SCRATCH=TO_SCRATCH, BLOCK=BLOCK_WORDS
    )


class CompressionTable:
    """Pieces of ``plan``'s compressed states on ``device``: int64 [pieces, 5] of the offset in the slot, the offset in
    the compressed state, the offset of its scales (negative: copied as it is), rows or words, and columns.
    """

    def __init__(self, plan: ArenaPlan, device: torch.device) -> None:
        coded = [compressed for compressed in plan.compressed_fields if compressed.scale_offset_bytes is not None]
        dtypes = {compressed.field.dtype for compressed in coded}
        assert len(dtypes) <= 1, "accumulators of one model have one dtype"
        self.state_dtype = dtypes.pop() if dtypes else "float32"
        widest = max((compressed.field.shape[-1] for compressed in coded), default=1)
        self.columns = max(16, triton.next_power_of_2(widest))
        self.rows = max(1, PIECE_NUMBERS // self.columns)
        plain = [
            _field_bytes(compressed.field.shape, compressed.field.dtype)
            for compressed in plan.compressed_fields
            if compressed.scale_offset_bytes is None
        ]
        self.unit_bytes = 4 if all(size % 4 == 0 for size in plain) else 1
        self.pieces = torch.from_numpy(self._cut(plan)).to(device)

    def _cut(self, plan: ArenaPlan) -> Int64s:
        pieces = []
        for compressed in plan.compressed_fields:
            field, scales_at = compressed.field, compressed.scale_offset_bytes
            width = field.shape[-1]
            if scales_at is None:
                step = self.rows * self.columns
                words = _field_bytes(field.shape, field.dtype) // self.unit_bytes
                first = np.arange(0, words, step)
                slot_step = compressed_step = self.unit_bytes
                scale_at = np.full(len(first), -1)
                count = np.minimum(step, words - first)
            else:
                rows = int(np.prod(field.shape[:-1]))
                first = np.arange(0, rows, self.rows)
                slot_step, compressed_step = width * _ITEM_BYTES[field.dtype], width
                scale_at = scales_at + first * 4
                count = np.minimum(self.rows, rows - first)
            pieces.append(
                np.stack(
                    [
                        field.offset_bytes + first * slot_step,
                        compressed.offset_bytes + first * compressed_step,
                        scale_at,
                        count,
                        np.full(len(first), width),
                    ],
                    axis=1,
                )
            )
        return np.concatenate(pieces).astype(np.int64)


_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}


def _field_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * _ITEM_BYTES[dtype]


def compress(
    arena: torch.Tensor, plan: ArenaPlan, table: CompressionTable, states: torch.Tensor, *, restore: bool
) -> None:
    """Compress or restore ``states`` (int64 [k, 1 + pages]): slots, and the pages of their compressed form. ``arena``:
    uint8, all of it.
    """
    grid = (table.pieces.shape[0], states.shape[0])
    launch(_compress_kernel, grid)(
        arena,
        states,
        states.stride(0),
        table.pieces,
        plan.page_bytes,
        plan.slot_stride_bytes,
        STATE=_TL_TYPES[table.state_dtype],
        UNIT=tl.int32 if table.unit_bytes == 4 else tl.int8,
        UNIT_BYTES=table.unit_bytes,
        RESTORE=restore,
        ROWS=table.rows,
        COLUMNS=table.columns,
    )
