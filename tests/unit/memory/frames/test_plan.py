"""The geometry: what pages, slots and frames are for published models and for small ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.memory.geometry import (
    ATTENTION_ONLY,
    GRANITE_H_SMALL,
    JAMBA_MINI,
    LFM2_1_2B,
    NEMOTRON_H_8B,
    QWEN3_NEXT_80B,
    QWEN35_397B,
    RECURRENT_ONLY,
    model,
)
from weft.memory.frames.plan import FRAMES_WANTED, ArenaPlan, choose_frame, plan_arena
from weft.spec import ITEM_BYTES, ModelSpec, attention, gated_delta, short_conv
from weft.units import ALIGN_BYTES, PAGE_TOKENS

GB = 10**9


@pytest.mark.parametrize(
    ("spec", "kv_bytes_per_token", "state_megabytes"),
    [
        (QWEN35_397B, 30_720, 192.1),
        (QWEN3_NEXT_80B, 24_576, 77.3),
        (GRANITE_H_SMALL, 16_384, 77.3),
        (NEMOTRON_H_8B, 16_384, 102.1),
        (LFM2_1_2B, 12_288, 0.082),
        (JAMBA_MINI, 16_384, 16.1),
    ],
)
def test_a_published_model_costs_what_the_design_says(
    spec: ModelSpec, kv_bytes_per_token: int, state_megabytes: float
) -> None:
    digits = 3 if state_megabytes < 1 else 1
    arena = plan_arena(spec, 80 * GB)
    assert spec.kv_bytes_per_token("bfloat16") == kv_bytes_per_token
    assert round(spec.state_bytes_per_sequence("bfloat16") / 1e6, digits) == state_megabytes
    assert arena.page_bytes == PAGE_TOKENS * kv_bytes_per_token, "alignment adds nothing to these pages"
    assert round(arena.slot_bytes / 1e6, digits) == state_megabytes, "nor to these slots"


@pytest.mark.parametrize(
    ("spec", "pages", "slots", "megabytes"),
    [
        (QWEN35_397B, 391, 1, 192.2),
        (QWEN3_NEXT_80B, 197, 1, 77.5),
        (GRANITE_H_SMALL, 295, 1, 77.3),
        (NEMOTRON_H_8B, 390, 1, 102.2),
        (LFM2_1_2B, 5, 12, 0.98),
        (JAMBA_MINI, 123, 2, 32.2),
    ],
)
def test_a_frame_is_what_the_documentation_says(spec: ModelSpec, pages: int, slots: int, megabytes: float) -> None:
    arena = plan_arena(spec, 80 * GB)
    assert (arena.pages_per_frame, arena.slots_per_frame) == (pages, slots)
    assert round(arena.frame_bytes / 1e6, 2 if megabytes < 1 else 1) == megabytes


def test_a_request_of_100_tokens_costs_its_state_and_its_tokens() -> None:
    """The table's "exact" column, in MB: 195, 79.7, 79.0."""
    for spec, megabytes in ((QWEN35_397B, 195), (QWEN3_NEXT_80B, 79.7), (GRANITE_H_SMALL, 79.0)):
        exact = spec.state_bytes_per_sequence("bfloat16") + 100 * spec.kv_bytes_per_token("bfloat16")
        arena = plan_arena(spec, 80 * GB)
        held = arena.slot_stride_bytes + arena.pages_for(100) * arena.page_bytes
        assert exact / 1e6 == pytest.approx(megabytes, rel=0.002)
        assert held / exact < 1.01, "pages of 16 tokens and slot padding add under 1 %"


def assert_laws(arena: ArenaPlan) -> None:
    n, m = arena.pages_per_frame, arena.slots_per_frame
    if n:
        assert arena.frame_bytes == n * arena.page_bytes
        assert arena.page_bytes % ALIGN_BYTES == 0
    if m:
        assert arena.frame_bytes == m * arena.slot_stride_bytes
        assert arena.slot_stride_bytes >= arena.slot_bytes
        assert arena.slot_stride_bytes % ALIGN_BYTES == 0
    assert arena.page_count == arena.frame_count * n
    assert arena.slot_count == arena.frame_count * m
    assert arena.page_tokens == PAGE_TOKENS


units_of_256 = st.integers(1, 3000)


@settings(max_examples=300, deadline=None)
@given(page=units_of_256, slot=units_of_256)
def test_a_frame_pads_its_slots_by_less_than_one_percent_and_none_smaller_does(page: int, slot: int) -> None:
    page_bytes, slot_bytes = 256 * page, 256 * slot
    n, m = choose_frame(page_bytes, slot_bytes, 2**60)
    frame = n * page_bytes

    def padding(pages: int) -> float:
        """Dull: the padding of a frame of so many pages with the most slots that divide it."""
        slots = max((s for s in range(1, pages * page_bytes // slot_bytes + 1) if pages * page % s == 0), default=0)
        return 1 - slots * slot_bytes / (pages * page_bytes)

    assert frame % (256 * m) == 0
    assert frame // m >= slot_bytes
    assert 1 - m * slot_bytes / frame < 0.01
    smaller = range(max(1, slot_bytes // page_bytes), n)
    assert not any(padding(pages) < 0.01 for pages in (smaller if n < 400 else smaller[:20]))


@settings(max_examples=300, deadline=None)
@given(page=st.integers(0, 400), slot=st.integers(0, 4000), megabytes=st.integers(0, 64))
def test_a_coarse_arena_has_two_frames_where_two_are_possible(page: int, slot: int, megabytes: int) -> None:
    page_bytes, slot_bytes, memory_bytes = 256 * page, 256 * slot, megabytes * 2**20
    n, m = choose_frame(page_bytes, slot_bytes, memory_bytes)
    frame = n * page_bytes or m * slot_bytes
    assert (n > 0, m > 0) == (page > 0, slot > 0)
    if n and m:
        assert frame // m >= slot_bytes
        assert frame % (256 * m) == 0
        smallest = -(-slot_bytes // page_bytes) * page_bytes
        assert memory_bytes // frame >= min(2, memory_bytes // smallest)


def test_of_two_slot_counts_that_fit_a_frame_the_larger_is_taken() -> None:
    """100 slots of 101 units and 101 slots of 100 fill the same page; both pad under 1 %."""
    assert choose_frame(256 * 100 * 101, 256 * 100, 2**40) == (1, 101)


def test_a_coarse_arena_trades_padding_for_smaller_frames() -> None:
    """S = 3.2 P: 5 slots in 16 pages pad nothing, 1 in 4 pages pads a fifth."""
    page, slot = 256 * 10, 256 * 32
    assert choose_frame(page, slot, FRAMES_WANTED * 16 * page) == (16, 5)
    assert choose_frame(page, slot, FRAMES_WANTED * 16 * page - 1) == (16, 5), "a frame is 2 %"
    assert choose_frame(page, slot, 4 * 16 * page) == (7, 2), "8.6 % padding + 10.9 % a frame, against 25 %"
    assert choose_frame(page, slot, 2 * 4 * page) == (4, 1)
    assert choose_frame(page, slot, 0) == (4, 1), "too little for anything: the least that could do"


def test_a_model_without_attention_has_frames_of_one_slot_and_no_pages() -> None:
    arena = plan_arena(RECURRENT_ONLY, 4 * GB)
    assert_laws(arena)
    assert (arena.page_bytes, arena.page_count, arena.slots_per_frame) == (0, 0, 1)
    assert arena.slot_count == 4 * GB // arena.slot_bytes
    assert arena.pages_for(10_000) == 0


def test_a_model_without_recurrent_layers_has_frames_of_one_page_and_no_slots() -> None:
    arena = plan_arena(ATTENTION_ONLY, 4 * GB)
    assert_laws(arena)
    assert (arena.slot_bytes, arena.slot_stride_bytes, arena.slot_count) == (0, 0, 0)
    assert arena.page_count == 4 * GB // arena.page_bytes


def test_fields_are_aligned_and_tile_their_page_and_slot() -> None:
    """Odd shapes, so that every field needs padding: bytes may lie in one field only."""
    spec = model([attention(1, 6), gated_delta(1, 3, 5, 7, 4), short_conv(9, 3), attention(3, 10)])
    for kv_dtype in ("float32", "bfloat16"):
        arena = plan_arena(spec, 2**20, kv_dtype=kv_dtype)
        assert_laws(arena)
        spans = []
        for kv in arena.kv_fields:
            block = kv.kv_heads * kv.head_dim * PAGE_TOKENS * ITEM_BYTES[kv_dtype]
            spans += [(kv.k_offset_bytes, block), (kv.v_offset_bytes, block)]
        assert_tiles(spans, arena.page_bytes)
        assert [kv.layer for kv in arena.kv_fields] == [0, 3]
        spans = []
        for state in arena.state_fields:
            size = ITEM_BYTES[state.dtype]
            for extent in state.shape:
                size *= extent
            spans.append((state.offset_bytes, size))
        assert_tiles(spans, arena.slot_bytes)
        assert [(s.layer, s.name, s.dtype) for s in arena.state_fields] == [
            (1, "conv", "bfloat16"),
            (1, "recurrent", "float32"),
            (2, "conv", "bfloat16"),
        ]


def assert_tiles(spans: list[tuple[int, int]], total: int) -> None:
    end = 0
    for offset, size in spans:
        assert offset % ALIGN_BYTES == 0
        assert end <= offset < end + ALIGN_BYTES, "no overlap, and no gap but alignment"
        end = offset + size
    assert end <= total < end + ALIGN_BYTES


@settings(max_examples=100, deadline=None)
@given(
    heads=st.integers(0, 3),
    dim=st.integers(1, 33),
    key_heads=st.integers(0, 2),
    value_dim=st.integers(1, 40),
    megabytes=st.integers(0, 9),
)
def test_every_arena_keeps_the_laws_of_its_geometry(
    heads: int, dim: int, key_heads: int, value_dim: int, megabytes: int
) -> None:
    layers = [attention(heads, dim)] * (heads > 0) * 2
    layers += [gated_delta(key_heads, 2 * key_heads, 8, value_dim, 4)] * (key_heads > 0) * 3
    arena = plan_arena(model(layers), megabytes * 2**20)
    assert_laws(arena)
    assert arena.arena_bytes <= megabytes * 2**20 < arena.arena_bytes + arena.frame_bytes or not layers
