"""How each layout counts: small cases worked out by hand, and what must hold for every model of the table."""

from __future__ import annotations

import pytest

from weft.memory.frames.plan import plan_arena
from weft.planning.geometries import GEOMETRIES
from weft.planning.layouts import Frames, Load, StaticPools, all_layouts, padded_pages
from weft.planning.model_plan import PlanOptions, make_plan
from weft.spec import LayerSpec, ModelSpec, attention, gated_delta, stateless, window_attention


def spec_of(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("test", 100, 64, 4096, "bfloat16", layers)


ATTENTION = attention(2, 32)  # 256 bytes per token in bf16
DELTA = gated_delta(2, 2, 16, 16, 3)  # 96 x 2 x 2 = 384 of conv, 2 x 16 x 16 x 4 = 2,048: 2,432
HYBRID = spec_of(DELTA, DELTA, ATTENTION, stateless(), DELTA, DELTA, ATTENTION)


def test_padded_pages_worked_out_by_hand() -> None:
    layout = padded_pages(HYBRID, "bfloat16", 100_000)
    assert (layout.block_tokens, layout.page_bytes) == (16, 4096)  # 10 tokens reach 2,432
    assert (layout.group_layers, layout.attention_groups, layout.state_groups) == (2, 1, 2)
    assert layout.request_bytes(Load(17)) == (2 + 2) * 2 * 4096
    assert layout.request_bytes(Load(17, drafts=3, cached=True)) == (2 + 2 * 5) * 2 * 4096
    assert layout.sequences(Load(17)) == (100_000 // 8192 - 1) // 4 == 2


def test_a_group_takes_the_larger_kind_where_the_two_are_nearly_as_many() -> None:
    nearly = spec_of(DELTA, DELTA, DELTA, DELTA, ATTENTION, ATTENTION, ATTENTION)
    layout = padded_pages(nearly, "bfloat16", 100_000)
    assert (layout.group_layers, layout.attention_groups, layout.state_groups) == (4, 1, 1)


def test_static_pools_worked_out_by_hand() -> None:
    layout = StaticPools("pools", arena_bytes=19_000, state_bytes=1000, kv_token_bytes=10)
    assert layout.sequences(Load(100)) == min(9_000 // 1000, 10_000 // 1000) == 9
    assert layout.sequences(Load(100, drafts=2)) == 9_000 // 4000  # its own and three verified
    assert layout.sequences(Load(100, cached=True)) == 9_000 // 5000
    assert layout.sequences(Load(1000)) == 1  # the other pool is empty first


def test_a_window_is_pages_of_its_window_elsewhere_and_never_more() -> None:
    layout = padded_pages(spec_of(ATTENTION, window_attention(2, 32, 64)), "bfloat16", 1 << 20)
    assert (layout.block_tokens, layout.state_groups, layout.window_groups) == (16, 0, (64,))
    assert layout.blocks(Load(16)) == 2
    assert layout.blocks(Load(1600)) == 100 + 5


def test_frames_count_as_the_arena_does_one_more_would_not_fit() -> None:
    plan = plan_arena(HYBRID, 1_000_000)
    layout = Frames(plan, log_bytes=0)
    for tokens in (1, 100, 1000):
        count = layout.sequences(Load(tokens))
        assert plan.frames_for(count, tokens) <= plan.frame_count < plan.frames_for(count + 1, tokens)


def test_a_log_of_drafts_costs_sequences_only_where_it_is_large() -> None:
    plan = plan_arena(HYBRID, 1_000_000)
    bare = Frames(plan, log_bytes=0).sequences(Load(100, drafts=3))
    assert Frames(plan, log_bytes=10_000).sequences(Load(100, drafts=3)) < bare
    assert Frames(plan, log_bytes=10_000).sequences(Load(100)) == bare


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.short_name)
def test_no_layout_claims_more_than_the_bytes_there_are(geometry) -> None:
    arena_bytes = 20 << 30
    plan = make_plan(geometry.name, geometry.config, PlanOptions(arena_bytes=arena_bytes))
    for layout in plan.layouts:
        counts = []
        for load in (Load(4096), Load(4096, 3), Load(4096, 3, cached=True)):
            counts.append(layout.sequences(load))
            assert counts[-1] * layout.request_bytes(load) <= arena_bytes
        assert counts == sorted(counts, reverse=True)
    assert plan.layouts[0].sequences(Load(4096, 3)) >= max(layout.sequences(Load(4096, 3)) for layout in plan.layouts)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (spec_of(ATTENTION, ATTENTION), ["weft: frames", "padded pages", "static pools"]),
        (spec_of(DELTA, DELTA), ["weft: frames", "padded pages", "static pools"]),
        (HYBRID, ["weft: frames", "padded pages", "2 layers a page", "static pools"]),
    ],
)
def test_a_model_of_one_kind_is_an_ordinary_case(spec: ModelSpec, names: list[str]) -> None:
    layouts = all_layouts(spec, plan_arena(spec, 1 << 20))
    assert [layout.name for layout in layouts] == names
    assert all(layout.sequences(Load(64)) > 0 for layout in layouts)
