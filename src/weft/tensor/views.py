"""Strided views of the whole arena: from (bytes, integers) to the tensors that ops index.

    arena bytes   |-- frame 0 --|-- frame 1 --|-- frame 2 --| ...
    pages         |p0|p1|..     |             |             |      page i at i * P, in any frame
    slots         |s0   |s1   | |             |             |      slot j at j * S', in any frame

    k of layer l  = as_strided(arena as dtype, [pages, H, D/pack, 16, pack], stride P, offset k_offset)
    state part    = as_strided(arena as dtype, [slots, *shape],              stride S', offset)

A frame is a multiple of both. So one view per field covers every page (or slot) that the arena can hold, and no view
is created or moved while serving. Views alias: a write through a page that its frame does not own is a bug of the
caller. The ownership laws (L1, L5) and the NaN tests catch it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from weft.spec import KvLayoutName
from weft.tensor.inputs import LayerCache
from weft.tensor.layout import DTYPES, k_block_shape, v_block_shape
from weft.units import PAGE_TOKENS


class KvFieldLike(Protocol):
    """Fields of ``memory.plan.KvField`` that views use, by attribute, so that tensor imports no memory."""

    @property
    def layer(self) -> int: ...
    @property
    def k_offset_bytes(self) -> int: ...
    @property
    def v_offset_bytes(self) -> int | None: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale_offset_bytes(self) -> int | None: ...


class StateFieldLike(Protocol):
    """Fields of ``memory.plan.StateField`` that views use. ``dtype`` is a name such as "float32"."""

    @property
    def layer(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def strided_view(
    buffer: torch.Tensor, *, count: int, stride_bytes: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """View ``buffer`` (uint8, 1-d, contiguous) as ``[count, *shape]`` of ``dtype``, item i at
    ``i * stride_bytes + offset_bytes``. Asserts that the last item ends inside the buffer."""
    assert buffer.dtype == torch.uint8
    assert buffer.dim() == 1
    assert buffer.numel() % dtype.itemsize == 0, "the arena must be a multiple of the item size"
    size = dtype.itemsize
    assert stride_bytes % size == 0, "a field must be aligned to its item size"
    assert offset_bytes % size == 0, "a field must be aligned to its item size"
    elements = 1
    strides = []
    for length in reversed(shape):
        strides.append(elements)
        elements *= length
    if count:
        end_bytes = (count - 1) * stride_bytes + offset_bytes + elements * size
        assert end_bytes <= buffer.numel(), f"view ends at byte {end_bytes} of {buffer.numel()}"
    typed = buffer.view(dtype)
    return typed.as_strided(
        (count, *shape), (stride_bytes // size, *reversed(strides)), typed.storage_offset() + offset_bytes // size
    )


def kv_views(
    buffer: torch.Tensor,
    *,
    page_bytes: int,
    page_count: int,
    k_offset_bytes: int,
    v_offset_bytes: int | None,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: KvLayoutName,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return K ``[P, kv_heads, D/pack, 16, pack]`` and V ``[P, kv_heads, 16/pack, D, pack]`` of one layer; V is None
    for a layer without values.
    """
    k = strided_view(
        buffer,
        count=page_count,
        stride_bytes=page_bytes,
        offset_bytes=k_offset_bytes,
        shape=k_block_shape(kv_heads, head_dim, dtype, layout),
        dtype=dtype,
    )
    if v_offset_bytes is None:
        return k, None
    v = strided_view(
        buffer,
        count=page_count,
        stride_bytes=page_bytes,
        offset_bytes=v_offset_bytes,
        shape=v_block_shape(kv_heads, head_dim, dtype, layout),
        dtype=dtype,
    )
    return k, v


def state_view(
    buffer: torch.Tensor,
    *,
    slot_stride_bytes: int,
    slot_count: int,
    offset_bytes: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``[S, *shape]`` of one part of one layer's state."""
    return strided_view(
        buffer, count=slot_count, stride_bytes=slot_stride_bytes, offset_bytes=offset_bytes, shape=shape, dtype=dtype
    )


def build_layer_caches(
    buffer: torch.Tensor,
    *,
    layer_count: int,
    page_bytes: int,
    page_count: int,
    slot_stride_bytes: int,
    slot_count: int,
    kv_dtype: str,
    kv_layout: KvLayoutName = "vnni",
    kv_fields: Iterable[KvFieldLike],
    state_fields: Iterable[StateFieldLike],
) -> list[LayerCache]:
    """Return one ``LayerCache`` per layer, in depth order, empty for a layer without KV and states.

    ``buffer``: uint8 ``[arena_bytes]``. The other arguments are the integers of an ``ArenaPlan``; ``kv_dtype`` and
    each state field's ``dtype`` are names of ``layout.DTYPES``.
    """
    caches = [LayerCache(layer=layer) for layer in range(layer_count)]
    for kv in kv_fields:
        caches[kv.layer].k, caches[kv.layer].v = kv_views(
            buffer,
            page_bytes=page_bytes,
            page_count=page_count,
            k_offset_bytes=kv.k_offset_bytes,
            v_offset_bytes=kv.v_offset_bytes,
            kv_heads=kv.kv_heads,
            head_dim=kv.head_dim,
            dtype=DTYPES[kv_dtype],
            layout=kv_layout,
        )
        if kv.scale_offset_bytes is not None:
            parts = 1 if kv.v_offset_bytes is None else 2
            caches[kv.layer].token_scales = strided_view(
                buffer,
                count=page_count,
                stride_bytes=page_bytes,
                offset_bytes=kv.scale_offset_bytes,
                shape=(parts, kv.kv_heads, PAGE_TOKENS),
                dtype=torch.bfloat16,
            )
    for part in state_fields:
        caches[part.layer].state[part.name] = state_view(
            buffer,
            slot_stride_bytes=slot_stride_bytes,
            slot_count=slot_count,
            offset_bytes=part.offset_bytes,
            shape=part.shape,
            dtype=DTYPES[part.dtype],
        )
    return caches
