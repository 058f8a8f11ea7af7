"""Compressed KV: how large, when, in which order, and what is inexact behind it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.memory.geometry import (
    GRANITE_H_SMALL,
    JAMBA_MINI,
    LFM2_1_2B,
    NEMOTRON_H_8B,
    QWEN3_NEXT_80B,
    QWEN35_397B,
    picture,
    small_memory,
)
from weft.memory.arena_work import CompressKv, KvForm, RestoreKv
from weft.memory.frames.plan import plan_arena
from weft.memory.memory import Memory
from weft.memory.prefix.compressed_kv import CompressedPages
from weft.memory.prefix.edge import Node
from weft.memory.reservation import Reservation
from weft.memory.values import NodeId
from weft.spec import ModelSpec
from weft.units import PAGE_TOKENS, PageId, SeqId

GIB = 1 << 30


@pytest.mark.parametrize("spec", [QWEN35_397B, QWEN3_NEXT_80B, NEMOTRON_H_8B, JAMBA_MINI, LFM2_1_2B, GRANITE_H_SMALL])
def test_a_compressed_page_is_nearly_half_of_one_in_sixteen_bits(spec: ModelSpec) -> None:
    arena = plan_arena(spec, 80 * GIB, compress=True)
    assert 1.8 < arena.page_bytes / arena.compressed_kv_bytes < 2
    last = arena.compressed_kv_fields[-1]
    scales = last.field.kv_heads * PAGE_TOKENS * 4 * (1 + (last.field.v_offset_bytes is not None))
    assert 0 <= arena.compressed_kv_bytes - last.scale_offset_bytes - scales < 64


@pytest.mark.parametrize("spec", [QWEN35_397B, QWEN3_NEXT_80B, NEMOTRON_H_8B, JAMBA_MINI, LFM2_1_2B, GRANITE_H_SMALL])
def test_in_four_bits_it_is_under_a_third_and_the_last_row_ends_with_the_record(spec: ModelSpec) -> None:
    arena = plan_arena(spec, 80 * GIB, compress=True, compress_kv="int4")
    assert 2.9 < arena.page_bytes / arena.compressed_kv_bytes < 3.2
    last = arena.compressed_kv_fields[-1]
    rows = last.field.kv_heads * (last.field.head_dim + PAGE_TOKENS)
    assert 0 <= arena.compressed_kv_bytes - last.scale_offset_bytes - rows * 4 < 64


def test_kv_is_compressed_only_where_it_is_asked_for_and_wider_than_eight_bits() -> None:
    assert plan_arena(QWEN35_397B, 80 * GIB).compressed_kv_bytes == 0
    assert plan_arena(QWEN35_397B, 80 * GIB, kv_dtype="int8", compress=True).compressed_kv_bytes == 0
    wide = plan_arena(QWEN35_397B, 80 * GIB, kv_dtype="float32", compress=True)
    assert 3.6 < wide.page_bytes / wide.compressed_kv_bytes < 4
    assert plan_arena(QWEN35_397B, 80 * GIB, compress_kv="int4").compressed_kv_bytes == 0
    narrow = plan_arena(QWEN35_397B, 80 * GIB, kv_dtype="int8", compress=True, compress_kv="int4")
    assert narrow.compressed_kv_bytes == 0


def kept(count: int, *, kv_share: float = 0.5, pages: int = 4, frames: int = 16) -> Memory:
    """``count`` prompts of so many pages each, which nobody reads any more, on frames of ten pages."""
    memory = small_memory(10, 1, frames, cache=True, compressed_kv_share=kv_share)
    for seq in range(count):
        keep(memory, seq, tokens_of(seq, pages * PAGE_TOKENS))
    return memory


def tokens_of(seq: int, count: int) -> np.ndarray:
    return np.full(count, 100 + seq, dtype=np.int32)


def keep(memory: Memory, seq: int, tokens: np.ndarray) -> None:
    assert start(memory, seq, tokens) is not None
    transaction = memory.transaction()
    transaction.close(SeqId(seq), keep=tokens)
    memory.commit(transaction.seal())


def start(memory: Memory, seq: int, tokens: np.ndarray) -> Reservation | None:
    transaction = memory.transaction()
    if not transaction.open(SeqId(seq), memory.match(tokens, salt=""), len(tokens)):
        return None
    reservation = transaction.seal()
    memory.commit(reservation)
    memory.audit()
    return reservation


def short(memory: Memory, pages: int) -> Reservation:
    transaction = memory.transaction()
    transaction.reclaim(pages=pages)
    reservation = transaction.seal()
    memory.commit(reservation)
    memory.audit()
    return reservation


def node_of(memory: Memory, seq: int) -> Node:
    nodes, first = memory._state.cache.tree.nodes(), tokens_of(seq, 1).tobytes()
    [node] = [node for node in nodes if node.tokens[: len(first)] == first]
    return node


def test_kv_is_compressed_in_its_own_pages_before_any_state_goes_the_longest_unread_first() -> None:
    memory = kept(8)
    before = [tuple(node_of(memory, seq).pages) for seq in range(8)]
    free = memory.usage().pages_available
    reservation = short(memory, free + 1)
    assert [compress.pages for compress in reservation.arena_work.kv_compressions] == before[:6]
    assert not reservation.evicted
    assert not reservation.pages, "it takes none"
    usage = memory.usage()
    assert (usage.pages_compressed, usage.compressed_kv_bytes) == (24, 12 * memory.plan.page_bytes)
    assert usage.pages_available == free + 12
    assert memory._state.cache.compressed_kv.by_node[node_of(memory, 0).id].pages == list(before[0][:2])
    assert usage.cached_bytes == usage.evictable_bytes


def test_what_a_store_reads_from_a_place_on_is_the_pages_of_each_form_behind_it() -> None:
    memory = small_memory(10, 1, 24, cache=True, compressed_kv_share=0.5)
    keep(memory, 0, tokens_of(0, 64))
    keep(memory, 1, np.concatenate([tokens_of(0, 64), tokens_of(1, 64)]))
    assert start(memory, 2, np.concatenate([tokens_of(0, 64), tokens_of(2, 16)])) is not None  # it reads the front
    for seq in range(3, 9):
        keep(memory, seq, tokens_of(seq, 64))
    assert not short(memory, memory.usage().pages_available + 1).evicted
    state = memory._state.cache
    [node] = [node for node in state.tree.nodes() if node.end == 128]
    front, packed = node_of(memory, 0).pages, state.compressed_kv.by_node[node.id].pages
    assert len(packed) == 2, "four records in the bytes of two pages"
    cases = ((0, front, packed), (16, front[1:], packed), (80, [], packed), (96, [], packed[1:]))
    for begin, exact, compressed in cases:
        contents = memory.snapshot_contents(node.id, begin)
        assert contents is not None
        assert list(contents.pages) == [*exact, *compressed]
        assert [(part.start, part.end, part.row_count) for part in contents.parts] == [
            part for part in ((begin, 64, len(exact)), (max(begin, 64), 128, len(compressed))) if part[2]
        ]


def test_what_somebody_is_sure_to_come_for_is_not_compressed() -> None:
    memory = kept(8)
    transaction = memory.transaction()
    transaction.evict_last([node_of(memory, 0).id])
    assert transaction.reclaim(pages=memory.usage().pages_available + 1)
    compressed = [compress.node for compress in transaction.seal().arena_work.kv_compressions]
    assert compressed == [node_of(memory, seq).id for seq in range(1, 7)]


def test_without_it_the_same_shortage_evicts_and_nothing_is_marked() -> None:
    memory = kept(8, kv_share=0)
    reservation = short(memory, memory.usage().pages_available + 1)
    assert not reservation.arena_work.kv_compressions
    assert reservation.evicted
    assert not any(node.kv_inexact or node.state_inexact for node in memory._state.cache.tree.nodes())
    assert memory.usage().compressed_kv_bytes == 0


def test_who_begins_behind_it_reads_it_wide_and_so_does_who_comes_with_him() -> None:
    memory = kept(8)
    short(memory, memory.usage().pages_available + 1)
    prompt = np.append(tokens_of(0, 4 * PAGE_TOKENS), [7, 7]).astype(np.int32)
    match = memory.match(prompt, salt="")
    assert (match.cached_tokens, match.restore_pages) == (4 * PAGE_TOKENS, 2)
    transaction = memory.transaction()
    for seq in (10, 11):
        assert transaction.open(SeqId(seq), match, len(prompt))
    reservation = transaction.seal()
    [restore] = reservation.arena_work.kv_restores
    assert transaction.shared_pages(SeqId(10)) == transaction.shared_pages(SeqId(11)) == list(restore.pages)
    assert len(reservation.pages) == 2 + 2, "two to make it wide, and one for the end of each"
    memory.commit(reservation)
    memory.audit()
    assert node_of(memory, 0).pages == list(restore.pages)
    assert memory.usage().cache.restored_pages == 4
    assert memory.match(prompt, salt="").restore_pages == 0


def test_where_there_is_no_room_to_make_it_wide_opening_says_no_and_changes_nothing() -> None:
    memory = kept(8)
    short(memory, memory.usage().pages_available + 1)
    prompt = np.append(tokens_of(0, 4 * PAGE_TOKENS), [7, 7]).astype(np.int32)
    match, before = memory.match(prompt, salt=""), picture(memory)
    transaction = memory.transaction()
    room = transaction._relief.room()
    all_but_two = room.pages + (room.frames - 1) * 10 - 2
    assert transaction.open(SeqId(9), memory.match([], salt=""), all_but_two * PAGE_TOKENS)
    sealed = transaction.seal()
    assert not transaction.open(SeqId(10), match, len(prompt))
    assert transaction.seal() == sealed
    assert picture(memory) == before
    assert memory.transaction().open(SeqId(10), match, len(prompt)), "the control: with room it opens"


def test_what_is_left_behind_compressed_kv_is_inexact_and_computing_it_anew_makes_it_exact() -> None:
    memory = kept(8)
    short(memory, memory.usage().pages_available + 1)
    longer = np.append(tokens_of(0, 4 * PAGE_TOKENS), tokens_of(50, 3 * PAGE_TOKENS)).astype(np.int32)
    keep(memory, 10, longer)
    tree = memory._state.cache.tree
    behind = next(node for node in tree.nodes() if node.end == 7 * PAGE_TOKENS)
    assert (behind.kv_inexact, behind.state_inexact) == (True, True)
    assert not node_of(memory, 7).kv_inexact
    assert memory.usage().cache.hits_inexact == 1
    assert sum(one.total.inexact for one in memory.cache_shape(lambda version: 0.0).salts) == 7
    # one that begins before it, and computes it all, publishes over what is compressed
    transaction = memory.transaction()
    assert transaction.open(SeqId(11), memory.match([], salt=""), 4 * PAGE_TOKENS)
    memory.commit(transaction.seal())
    assert node_of(memory, 1).id in memory._state.cache.compressed_kv.by_node
    transaction = memory.transaction()
    transaction.close(SeqId(11), keep=tokens_of(1, 4 * PAGE_TOKENS))
    memory.commit(transaction.seal())
    memory.audit()
    assert node_of(memory, 1).id not in memory._state.cache.compressed_kv.by_node
    assert not node_of(memory, 1).kv_inexact


def test_who_has_computed_it_exactly_gives_up_nothing_for_what_was_compressed_once() -> None:
    memory = kept(8)
    short(memory, memory.usage().pages_available + 1)
    keep(memory, 10, np.append(tokens_of(0, 4 * PAGE_TOKENS), [7, 7]).astype(np.int32))
    node = node_of(memory, 0)
    assert node.id not in memory._state.cache.compressed_kv.by_node, "it was read, and is wide"
    assert node.kv_inexact
    before, transaction = node.pages, memory.transaction()
    assert transaction.open(SeqId(11), memory.match([], salt=""), 5 * PAGE_TOKENS)
    memory.commit(transaction.seal())
    own, transaction = memory.lease(SeqId(11)).pages[:4], memory.transaction()
    transaction.publish(SeqId(11), tokens_of(0, 4 * PAGE_TOKENS))
    reservation = transaction.seal()
    assert not reservation.table_patches
    memory.commit(reservation)
    memory.audit()
    assert node.pages == own != before
    assert not node.kv_inexact
    assert not memory.lease(SeqId(11)).inexact


def test_a_fork_in_the_middle_makes_the_front_wide_and_cuts_what_is_compressed() -> None:
    memory = kept(3, pages=8)
    short(memory, memory.usage().pages_available + 1)
    lower = node_of(memory, 0)
    assert lower.id in memory._state.cache.compressed_kv.by_node
    forked = np.append(tokens_of(0, 5 * PAGE_TOKENS), tokens_of(60, 2 * PAGE_TOKENS)).astype(np.int32)
    transaction = memory.transaction()
    assert transaction.open(SeqId(10), memory.match([], salt=""), len(forked))
    memory.commit(transaction.seal())
    own = list(memory.lease(SeqId(10)).pages)
    transaction = memory.transaction()
    transaction.close(SeqId(10), keep=forked)
    memory.commit(transaction.seal())
    memory.audit()
    compressed = memory._state.cache.compressed_kv.by_node[lower.id]
    assert (compressed.count, compressed.cut, compressed.skip_bytes) == (3, 2, memory.plan.page_bytes // 2)
    assert lower.parent is not None
    assert (lower.parent.pages, lower.parent.kv_inexact) == (own[:5], False)


@pytest.mark.parametrize("record_bytes", [128, 144, 192])
@pytest.mark.parametrize("skip_bytes", [0, 64, 240])
def test_rows_write_only_what_those_before_them_have_read(record_bytes: int, skip_bytes: int) -> None:
    """Byte by byte: compressed row by row, and restored row by row, in place."""
    form = KvForm(256, record_bytes)
    for count in (1, 2, 3, 4, 7, 20):
        pages = [PageId(page) for page in np.random.default_rng(count).permutation(count + 3)]
        memory = np.zeros((count + 4, 256), dtype=np.int64)
        lies_on = -(-(skip_bytes + count * record_bytes) // 256)
        compressed = CompressedPages(pages[:lies_on], 0, skip_bytes, -9, count)
        bytes_of = [np.full(record_bytes, 10 + record) for record in range(count)]
        for record in range(count):
            for at in range(record_bytes):
                place = skip_bytes + record * record_bytes + at
                memory[compressed.pages[place // 256], place % 256] = bytes_of[record][at]
        wide = compressed.restore_into(pages[lies_on : lies_on + compressed.missing], form)
        assert len(set(wide)) == count
        restore = RestoreKv(NodeId(1), tuple(compressed.pages), skip_bytes, wide, form)
        for page, first, last, start in restore.ids.tolist():
            both = np.concatenate([memory[first], memory[last]])
            record = wide.index(page)
            assert (both[start : start + record_bytes] == bytes_of[record]).all()
            memory[page] = -1
    compress = CompressKv(NodeId(1), tuple(pages), -(-len(pages) * record_bytes // 256), form)
    written: set[int] = set()
    for page, first, last, _ in compress.ids.tolist():
        assert page not in written, "it was written before it was read"
        written |= {first, last}


def compressed_pages(memory: Memory) -> CompressedPages:
    return next(iter(memory._state.cache.compressed_kv.by_node.values()))


def swap_two_pages(memory: Memory) -> None:
    compressed_pages(memory).pages.reverse()


def count_a_page_more(memory: Memory) -> None:
    memory._state.cache.compressed_kv.page_count += 1


def count_a_record_less(memory: Memory) -> None:
    memory._state.cache.compressed_kv.record_count -= 1


def lose_a_page(memory: Memory) -> None:
    compressed_pages(memory).pages.pop()


def name_another_record(memory: Memory) -> None:
    compressed_pages(memory).first_id -= 1


def begin_elsewhere(memory: Memory) -> None:
    compressed_pages(memory).skip_bytes += memory.plan.page_bytes


def take_it_for_exact(memory: Memory) -> None:
    node_of(memory, 0).kv_inexact = False


def forget_what_nobody_reads(memory: Memory) -> None:
    memory._state.cache.compressed_kv.idle.popitem()


def compress_what_is_gone(memory: Memory) -> None:
    memory._state.cache.compressed_kv.by_node[NodeId(10**6)] = compressed_pages(memory)


@pytest.mark.parametrize(
    "corrupt",
    [
        swap_two_pages,
        count_a_page_more,
        count_a_record_less,
        lose_a_page,
        name_another_record,
        begin_elsewhere,
        take_it_for_exact,
        forget_what_nobody_reads,
        compress_what_is_gone,
    ],
    ids=lambda corrupt: corrupt.__name__,
)
def test_the_audit_sees(corrupt: Callable[[Memory], None]) -> None:
    memory = kept(8)
    short(memory, memory.usage().pages_available + 1)
    corrupt(memory)
    with pytest.raises(AssertionError):
        memory.audit()
