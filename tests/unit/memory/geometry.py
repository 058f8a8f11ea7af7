"""Small arenas, published models as specs, and a picture of everything that memory writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from weft.memory.draft import Draft
from weft.memory.memory import Memory
from weft.memory.plan import ArenaPlan
from weft.memory.reservation import Reservation
from weft.spec import LayerSpec, ModelSpec, StatePart, attention, gated_delta, mamba2, short_conv
from weft.units import SeqId


def small_arena(pages_per_frame: int, slots_per_frame: int, frame_count: int) -> ArenaPlan:
    """An arena of the least bytes with so many items to a frame; 0 leaves a kind out."""
    n, m = pages_per_frame, slots_per_frame
    page_bytes, slot_bytes = 256 * (m or 1) * (n > 0), 256 * (n or 1) * (m > 0)
    return ArenaPlan(page_bytes=page_bytes, pages_per_frame=n, slot_bytes=slot_bytes,
                     slot_stride_bytes=slot_bytes, slots_per_frame=m,
                     frame_bytes=n * page_bytes or m * slot_bytes, frame_count=frame_count,
                     kv_dtype="float32", model_dtype="float32", kv_fields=(), state_fields=())


def small_memory(pages_per_frame: int, slots_per_frame: int, frame_count: int, *,
                 cache: bool = False) -> Memory:
    return Memory(small_arena(pages_per_frame, slots_per_frame, frame_count), cache=cache)


def open_in(draft: Draft, memory: Memory, seq: int, tokens: int, headroom_pages: int = 0) -> bool:
    return draft.open(SeqId(seq), memory.match([], salt=""), tokens, headroom_pages=headroom_pages)


def open_now(memory: Memory, *sizes: tuple[int, int]) -> Reservation:
    """Open (seq, tokens) pairs in one commit; all of them must fit."""
    draft = memory.draft()
    for seq, tokens in sizes:
        assert open_in(draft, memory, seq, tokens)
    reservation = draft.seal()
    memory.commit(reservation)
    return reservation


def close_now(memory: Memory, *seqs: int) -> Reservation:
    draft = memory.draft()
    for seq in seqs:
        draft.close(SeqId(seq))
    reservation = draft.seal()
    memory.commit(reservation)
    return reservation


def picture(memory: Memory) -> dict[str, Any]:
    """Everything a commit can write, copied into plain values; orders included, as they are behaviour."""
    books = memory._books
    packings = {}
    for what, packing in (("pages", books.pages.packing), ("slots", books.slots.packing)):
        packings[what] = ([(frame, list(stack)) for frame, stack in packing.stacks.items()],
                          [list(bucket) for bucket in packing.by_used], packing.occupied,
                          packing.held_count, packing.free_count)
    return {
        "version": books.version,
        "free": {held: list(stack) for held, stack in books.arena.free.items()},
        "packings": packings,
        "page holders": list(books.pages.holders),
        "slot holders": list(books.slots.holders),
        "slot epochs": list(books.slots.epochs),
        "leases": [(seq, *astuple(lease)) for seq, lease in books.leases.items()],
        "tree": [(node.id, node.start, node.tokens, list(node.pages), list(node.children), node.tail_count,
                  node.slot, node.epoch, node.holds, node.state_lost, dict(node.ghosts))
                 for node in books.cache.tree.nodes()],
        "orders": (list(books.cache.order.states), list(books.cache.order.bare)),
        "usage": memory.usage(),
    }


def model(layers: Sequence[LayerSpec], max_positions: int = 262_144) -> ModelSpec:
    return ModelSpec("row", vocab_size=1, hidden_size=1, max_positions=max_positions, dtype="bfloat16",
                     layers=tuple(layers))


def mamba2_bfloat16(heads: int, head_dim: int, groups: int, state_dim: int, conv_kernel: int) -> LayerSpec:
    """Mamba-2 whose state is kept in the model's dtype, as Granite's row of the table has it."""
    conv, recurrent = mamba2(heads, head_dim, groups, state_dim, conv_kernel).state
    return LayerSpec("mamba2", state=(conv, StatePart(recurrent.name, recurrent.shape, "model")))


def mamba1(d_inner: int, state_dim: int, conv_kernel: int) -> LayerSpec:
    return LayerSpec("mamba1", state=(StatePart("conv", (d_inner, conv_kernel - 1), "model"),
                                      StatePart("recurrent", (d_inner, state_dim), "float32")))


QWEN35_397B = model([attention(2, 256)] * 15 + [gated_delta(16, 64, 128, 128, 4)] * 45)
QWEN3_NEXT_80B = model([attention(2, 256)] * 12 + [gated_delta(16, 32, 128, 128, 4)] * 36)
GRANITE_H_SMALL = model([attention(8, 128)] * 4 + [mamba2_bfloat16(128, 64, 1, 128, 4)] * 36)
NEMOTRON_H_8B = model([attention(8, 128)] * 4 + [mamba2(128, 64, 8, 128, 4)] * 24)
LFM2_1_2B = model([attention(8, 64)] * 6 + [short_conv(2048, 3)] * 10)
JAMBA_MINI = model([attention(8, 128)] * 4 + [mamba1(8192, 16, 4)] * 28)
ATTENTION_ONLY = model([attention(8, 128)] * 28)
RECURRENT_ONLY = model([mamba2(64, 64, 1, 128, 4)] * 24)
