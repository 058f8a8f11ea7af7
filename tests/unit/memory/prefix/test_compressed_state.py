"""Compressed states: how large, when, and what the audit sees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.memory.geometry import (
    ATTENTION_ONLY,
    GRANITE_H_SMALL,
    JAMBA_MINI,
    LFM2_1_2B,
    NEMOTRON_H_8B,
    QWEN3_NEXT_80B,
    QWEN35_397B,
    RECURRENT_ONLY,
    small_memory,
)
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.memory.memory import Memory
from weft.memory.prefix.edge import Node
from weft.memory.prefix.eviction import CompressionRoom, Demand
from weft.memory.prefix.policies import POLICIES, make_policy
from weft.memory.prefix.policy import Policy, PrefillCost
from weft.spec import ModelSpec
from weft.units import PAGE_TOKENS, SeqId

GIB = 1 << 30


@pytest.mark.parametrize(
    ("spec", "times_smaller"), [(QWEN35_397B, 3.6), (QWEN3_NEXT_80B, 3.6), (NEMOTRON_H_8B, 3.6), (JAMBA_MINI, 2.6)]
)
def test_a_compressed_state_is_so_many_times_smaller(spec: ModelSpec, times_smaller: float) -> None:
    """Codes, scales, windows and the rest of the last page. Jamba has a scale for each 16 numbers."""
    arena = plan_arena(spec, 80 * GIB, compress=True)
    assert times_smaller < arena.slot_stride_bytes / arena.compressed_bytes < times_smaller + 0.4
    last = arena.compressed_fields[-1]
    assert max(last.offset_bytes, last.scale_offset_bytes or 0) < arena.compressed_bytes
    offsets = [
        at for one in arena.compressed_fields for at in (one.offset_bytes, one.scale_offset_bytes) if at is not None
    ]
    assert offsets == sorted(set(offsets))
    assert all(at % 256 == 0 for at in offsets)


@pytest.mark.parametrize("spec", [ATTENTION_ONLY, RECURRENT_ONLY])
def test_without_pages_or_states_nothing_is_compressed(spec: ModelSpec) -> None:
    assert plan_arena(spec, GIB, compress=True) == plan_arena(spec, GIB)


@pytest.mark.parametrize("spec", [LFM2_1_2B, GRANITE_H_SMALL])
def test_without_wide_accumulators_states_are_not_compressed(spec: ModelSpec) -> None:
    arena = plan_arena(spec, GIB, compress=True)
    assert not arena.compressed_pages
    assert arena.compressed_kv_bytes


def test_compression_is_only_where_it_is_asked_for() -> None:
    assert plan_arena(QWEN35_397B, 80 * GIB).compressed_pages == 0


@pytest.mark.parametrize(
    ("pages", "slots", "at_once", "expected"),
    [
        (0, 4, 9, 0),  # 4 frames of slots, 4 there are: nothing is missing, and nobody asks
        (10, 4, 9, 2),  # 5 frames wanted: two compressed give two frames and take 6 pages, 16 in all: one each
        (0, 5, 9, 2),  # one is compressed: 3 pages take the frame it gave. Two: still one
        (0, 5, 1, 0),  # only one can be: nothing gained
        (40, 4, 9, 3),  # out of reach: as far as it helps
    ],
)
def test_as_many_are_compressed_as_it_takes(pages: int, slots: int, at_once: int, expected: int) -> None:
    demand = Demand(frames=4, pages_per_frame=10, slots_per_frame=1, pages=pages, slots=slots)
    nodes = _nodes(9)
    chosen = CompressionRoom(3, at_once).choose(nodes, {nodes[0].id}, demand, 0, 0)
    assert chosen == nodes[1 : 1 + expected]


def _nodes(count: int) -> list[Node]:
    memory = kept(count)
    return list(memory._state.cache.order.in_slots.values())


def kept(count: int, *, frames: int = 20, compressed_pages: int = 3) -> Memory:
    """``count`` states of a page of tokens each, on frames of ten pages or a state."""
    memory = small_memory(10, 1, frames, cache=True, compressed_pages=compressed_pages)
    for seq in range(count):
        one(memory, seq)
    return memory


def tokens_of(seq: int, count: int = PAGE_TOKENS) -> np.ndarray:
    return np.full(count, 100 + seq, dtype=np.int32)


def one(memory: Memory, seq: int) -> None:
    tokens = tokens_of(seq)
    transaction = memory.transaction()
    assert transaction.open(SeqId(seq), memory.match(tokens, salt=""), PAGE_TOKENS)
    memory.commit(transaction.seal())
    transaction = memory.transaction()
    transaction.close(SeqId(seq), keep=tokens)
    memory.commit(transaction.seal())


def short(memory: Memory, pages: int) -> tuple[int, int]:
    """Somebody wants so many pages; what is compressed and evicted for it in one step."""
    transaction = memory.transaction()
    transaction.reclaim(pages=pages)
    reservation = transaction.seal()
    memory.commit(reservation)
    memory.audit()
    return len(reservation.arena_work.state_compressions), len(reservation.evicted)


def test_states_are_compressed_before_any_is_evicted_the_longest_unused_first() -> None:
    memory = kept(8, frames=10)
    compressed, evicted = short(memory, 30)
    assert compressed > 0
    assert evicted == 0
    compressed = memory.usage().states_compressed
    tree = memory._state.cache.tree
    in_pages = [tree.by_id[node].tokens for node in memory._state.cache.compressed_states.pages]
    assert in_pages == [tokens_of(seq).tobytes() for seq in range(compressed)]
    match = memory.match(tokens_of(0, 20), salt="")
    assert match.cached_tokens == PAGE_TOKENS
    transaction = memory.transaction()
    assert transaction.open(SeqId(50), match, 20)
    [restore] = transaction.seal().arena_work.state_restores
    assert list(restore.pages) == memory._state.cache.compressed_states.pages[match.anchor]
    assert restore.slot == transaction.slot_of(SeqId(50))
    assert not transaction.seal().arena_work.slot_copies


def test_what_is_compressed_is_evicted_when_nothing_else_is_left_and_gives_its_pages() -> None:
    memory = kept(8, frames=10)
    for _ in range(20):
        short(memory, 90)
    assert memory.usage().states_compressed == memory.usage().slots_cached == 0
    assert memory.usage().frames_free >= 9


def test_without_compression_the_same_shortage_evicts() -> None:
    compressed, evicted = short(kept(8, frames=10, compressed_pages=0), 30)
    assert compressed == 0
    assert evicted > 0


def test_usage_adds_up_with_compressed_states() -> None:
    memory = kept(8, frames=10)
    assert short(memory, 30)[0]
    usage = memory.usage()
    compressed = usage.states_compressed
    assert compressed + usage.slots_cached == 8
    assert usage.compressed_bytes == 3 * compressed * memory.plan.page_bytes
    assert usage.pages_cached == 8 + 3 * compressed
    assert usage.cached_bytes == usage.evictable_bytes
    assert usage.page_bytes + usage.slot_bytes + usage.open_bytes + usage.free_bytes == usage.arena_bytes
    memory.flush()
    assert memory.usage().free_bytes == memory.usage().arena_bytes


def test_a_policy_counts_the_bytes_that_a_state_has_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is compressed before it is evicted."""
    found: list[int] = []

    class Told(Policy):
        def __init__(self, plan: ArenaPlan, *_: object) -> None:
            found.append(plan.slot_stride_bytes)

    monkeypatch.setitem(POLICIES, "told", Told)
    for compress in (False, True):
        arena = plan_arena(QWEN35_397B, 80 * GIB, compress=compress)
        make_policy("told", arena, PrefillCost(), lambda: 0.0)
        assert found.pop() == (arena.compressed_bytes if compress else arena.slot_stride_bytes)


def _a_page_less(memory: Memory) -> None:
    next(iter(memory._state.cache.compressed_states.pages.values())).pop()


def _a_page_of_another(memory: Memory) -> None:
    first, second, *_ = memory._state.cache.compressed_states.pages.values()
    first[0] = second[0]


def _forgotten(memory: Memory) -> None:
    memory._state.cache.compressed_states.pages.popitem()


def _counted_wrong(memory: Memory) -> None:
    memory._state.cache.compressed_states.page_count += 1


def _two_pages_changed_places(memory: Memory) -> None:
    pages = next(iter(memory._state.cache.compressed_states.pages.values()))
    pages[0], pages[1] = pages[1], pages[0]


def _still_among_those_in_slots(memory: Memory) -> None:
    cache = memory._state.cache
    name = next(iter(cache.compressed_states.pages))
    cache.order.in_slots[name] = cache.tree.by_id[name]


@pytest.mark.parametrize(
    "broken",
    [
        _a_page_less,
        _a_page_of_another,
        _forgotten,
        _counted_wrong,
        _two_pages_changed_places,
        _still_among_those_in_slots,
    ],
    ids=lambda broken: broken.__name__.strip("_"),
)
def test_the_audit_sees(broken: Callable[[Memory], None]) -> None:
    memory = kept(8, frames=10)
    short(memory, 50)
    assert memory.usage().states_compressed >= 2
    memory.audit()
    broken(memory)
    with pytest.raises(AssertionError):
        memory.audit()
