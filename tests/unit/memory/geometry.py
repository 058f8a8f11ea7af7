"""Small arenas, published models as specs, and a picture of everything that memory writes."""

from __future__ import annotations

from dataclasses import astuple
from itertools import count
from typing import Any

from benchmarks.useful_bytes import MODELS, model
from weft.memory.frames.plan import ArenaPlan
from weft.memory.memory import Memory
from weft.memory.prefix.policies import make_policy
from weft.memory.prefix.policy import PrefillCost
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.spec import attention, mamba2
from weft.units import SeqId


def small_arena(
    pages_per_frame: int,
    slots_per_frame: int,
    frame_count: int,
    *,
    compressed_pages: int = 0,
    compressed_kv_share: float = 0,
) -> ArenaPlan:
    """An arena of the least bytes with these items to a frame; 0 leaves a kind out. A compressed state takes
    ``compressed_pages``, and a compressed page of KV such a share of one; 0: none is ever compressed."""
    n, m = pages_per_frame, slots_per_frame
    page_bytes, slot_bytes = 256 * (m or 1) * (n > 0), 256 * (n or 1) * (m > 0)
    return ArenaPlan(
        page_bytes=page_bytes,
        pages_per_frame=n,
        slot_bytes=slot_bytes,
        slot_stride_bytes=slot_bytes,
        slots_per_frame=m,
        frame_bytes=n * page_bytes or m * slot_bytes,
        frame_count=frame_count,
        kv_dtype="float32",
        model_dtype="float32",
        kv_fields=(),
        state_fields=(),
        compressed_pages=compressed_pages,
        compressed_kv_bytes=int(page_bytes * compressed_kv_share),
    )


def small_memory(
    pages_per_frame: int,
    slots_per_frame: int,
    frame_count: int,
    *,
    cache: bool = False,
    compressed_pages: int = 0,
    compressed_kv_share: float = 0,
    policy: str = "lru",
    slots_ahead: int = 1,
) -> Memory:
    """``policy`` by name; its clock goes on by a second each time it is read. ``slots_ahead``: fewer than in
    service, so that tables of a few frames stay readable."""
    arena = small_arena(
        pages_per_frame,
        slots_per_frame,
        frame_count,
        compressed_pages=compressed_pages,
        compressed_kv_share=compressed_kv_share,
    )
    seconds = count()
    memory = Memory(
        arena, cache=cache, policy=make_policy(policy, arena, PrefillCost(1.0, 1e-4), lambda: float(next(seconds)))
    )
    memory._state.slots_ahead = slots_ahead
    return memory


def open_in(transaction: Transaction, memory: Memory, seq: int, tokens: int, headroom_pages: int = 0) -> bool:
    return transaction.open(SeqId(seq), memory.match([], salt=""), tokens, headroom_pages=headroom_pages)


def open_now(memory: Memory, *sizes: tuple[int, int]) -> Reservation:
    """Open (seq, tokens) pairs in one commit; all of them must fit."""
    transaction = memory.transaction()
    for seq, tokens in sizes:
        assert open_in(transaction, memory, seq, tokens)
    reservation = transaction.seal()
    memory.commit(reservation)
    return reservation


def close_now(memory: Memory, *seqs: int) -> Reservation:
    transaction = memory.transaction()
    for seq in seqs:
        transaction.close(SeqId(seq))
    reservation = transaction.seal()
    memory.commit(reservation)
    return reservation


def picture(memory: Memory) -> dict[str, Any]:
    """Everything a commit can write, copied into plain values; orders included, as they are behaviour."""
    state = memory._state
    packings = {}
    for what, packing in (("pages", state.pages.packing), ("slots", state.slots.packing)):
        packings[what] = (
            [(frame, list(stack)) for frame, stack in packing.stacks.items()],
            [list(bucket) for bucket in packing.by_used],
            packing.occupied,
            packing.held_count,
            packing.free_count,
        )
    return {
        "version": state.version,
        "free": {held: list(stack) for held, stack in state.arena.free.items()},
        "packings": packings,
        "page owners": list(state.pages.owners),
        "slot owners": list(state.slots.owners),
        "slot epochs": list(state.slots.epochs),
        "leases": [(seq, *astuple(lease)) for seq, lease in state.leases.items()],
        "tree": [
            (
                node.id,
                node.start,
                node.tokens,
                list(node.pages),
                list(node.children),
                node.tail_count,
                node.slot,
                node.epoch,
                node.holds,
                node.state_lost,
                dict(node.ghosts),
                node.kv_inexact,
                node.state_inexact,
            )
            for node in state.cache.tree.nodes()
        ],
        "orders": (list(state.cache.order.states), list(state.cache.order.bare), list(state.cache.order.in_slots)),
        "compressed": {node: list(pages) for node, pages in state.cache.compressed_states.pages.items()},
        "compressed_kv": {
            node: (list(one.pages), one.cut, one.skip_bytes, one.first_id, one.count)
            for node, one in state.cache.compressed_kv.by_node.items()
        },
        "idle": list(state.cache.compressed_kv.idle),
        "usage": memory.usage(),
    }


QWEN35_397B, QWEN3_NEXT_80B, GRANITE_H_SMALL, NEMOTRON_H_8B, LFM2_1_2B, JAMBA_MINI = (
    spec for spec, _ in MODELS.values()
)
ATTENTION_ONLY = model([attention(8, 128)] * 28)
RECURRENT_ONLY = model([mamba2(64, 64, 1, 128, 4)] * 24)
