"""States to 8 bits and back, between slots and pages; ``weft.memory.prefix.eviction`` plans it.

    slots [k]  --each part of each layer-->  staging uint8 [k, compressed bytes] --whole pages--> pages [k, p]
               <--                                                            <--

A compressed state lies in pages that need not be side by side. Each field of it is laid out in one piece of
staging memory (``ArenaPlan.compressed_fields``), and that is cut into pages. Accumulators become codes and
scales (``ops.state_codes``); windows are the same bytes.

At most GROUP states are in staging at a time. All of it happens before the step computes, on what was there
before the step: no source of it is written by the step's other copies, and no destination is read by them.

This is the form for every device; on a GPU ``arena_kernels`` does the same in one launch, without staging.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.memory.frames.plan import ArenaPlan
from weft.tensor.layout import DTYPES
from weft.tensor.ops.codes import decode_state, encode_state
from weft.tensor.views import state_view, strided_view

Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

GROUP = 8


def compress_states(buffer: torch.Tensor, plan: ArenaPlan, state_compressions: torch.Tensor) -> None:
    """``buffer``: the arena's bytes; ``state_compressions`` int64 [k, 1 + pages]: a slot, and where its state
    goes."""
    for slots_K, pages_KP, staging in _groups(buffer, plan, state_compressions):
        for state, compressed_K, scales_K in _fields(buffer, staging, plan):
            source_K = state.index_select(0, slots_K)
            if scales_K is None:
                compressed_K.copy_(source_K)
            else:
                encode_state(source_K, compressed_K, scales_K)
        _words(buffer, plan).index_copy_(0, pages_KP.flatten(), _words(staging, plan))


def restore_states(buffer: torch.Tensor, plan: ArenaPlan, state_restores: torch.Tensor) -> None:
    """``state_restores`` int64 [k, 1 + pages]: a slot, and the pages whose state it gets."""
    for slots_K, pages_KP, staging in _groups(buffer, plan, state_restores):
        _words(staging, plan).copy_(_words(buffer, plan).index_select(0, pages_KP.flatten()))
        for state, compressed_K, scales_K in _fields(buffer, staging, plan):
            wide_K = compressed_K if scales_K is None else decode_state(compressed_K, scales_K, state.dtype)
            state.index_copy_(0, slots_K, wide_K)


def _groups(buffer: torch.Tensor, plan: ArenaPlan,
            rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Slots int64 [g], pages int64 [g, p] and staging memory uint8 [g x compressed bytes], g up to GROUP."""
    for first in range(0, len(rows), GROUP):
        group = rows[first:first + GROUP]
        staging = torch.empty(len(group) * plan.compressed_bytes, dtype=torch.uint8, device=buffer.device)
        yield group[:, 0], group[:, 1:], staging


def _fields(buffer: torch.Tensor, staging: torch.Tensor, plan: ArenaPlan) -> Iterator[Views]:
    """Of each part of each layer: all slots [S, ...], what is staged [g, ...], its scales if it has any."""
    count = staging.numel() // plan.compressed_bytes
    for compressed in plan.compressed_fields:
        field = compressed.field
        dtype = DTYPES[field.dtype]
        state = state_view(buffer, slot_stride_bytes=plan.slot_stride_bytes, slot_count=plan.slot_count,
                           offset_bytes=field.offset_bytes, shape=field.shape, dtype=dtype)
        coded = compressed.scale_offset_bytes is not None
        staged = strided_view(staging, count=count, stride_bytes=plan.compressed_bytes,
                              offset_bytes=compressed.offset_bytes, shape=field.shape,
                              dtype=torch.int8 if coded else dtype)
        scales = None if compressed.scale_offset_bytes is None else strided_view(
            staging, count=count, stride_bytes=plan.compressed_bytes,
            offset_bytes=compressed.scale_offset_bytes, shape=field.shape[:-1], dtype=torch.float32)
        yield state, staged, scales


def _words(memory: torch.Tensor, plan: ArenaPlan) -> torch.Tensor:
    """``memory`` by pages, in words: everything is aligned to 256 bytes."""
    return memory.view(torch.int64).view(-1, plan.page_bytes // torch.int64.itemsize)
