"""Figures that others report of themselves, and the design's table of them: reproduced to the digit."""

from __future__ import annotations

import pytest

from weft.memory.frames.plan import plan_arena
from weft.planning.geometries import GEOMETRIES, find_geometry
from weft.planning.model_plan import ModelPlan, PlanOptions, make_plan
from weft.spec import CacheDTypeName

GIB = 1 << 30


def plan_of(name: str, *, tp: int = 1, kv_dtype: CacheDTypeName = "bfloat16",
            state_dtype: CacheDTypeName = "float32", arena_bytes: int = 40 * GIB) -> ModelPlan:
    geometry = find_geometry(name)
    assert geometry is not None
    return make_plan(geometry.name, geometry.config,
                     PlanOptions(arena_bytes=arena_bytes, tp=tp, kv_dtype=kv_dtype, state_dtype=state_dtype))


@pytest.mark.parametrize(("name", "state_dtype", "kv", "state_mb"), [
    ("Qwen3.5-397B-A17B", "float32", 30720, 192.1), ("Qwen3-Next-80B-A3B", "float32", 24576, 77.3),
    ("Granite-4.0-H-Small", "bfloat16", 16384, 77.3), ("Nemotron-H-8B", "float32", 16384, 102.1),
    ("LFM2-1.2B", "float32", 12288, 0.082), ("AI21-Jamba-1.5-Mini", "float32", 16384, 16.1),
])
def test_a_token_and_a_sequence_cost_what_the_table_says(
        name: str, state_dtype: CacheDTypeName, kv: int, state_mb: float) -> None:
    plan = plan_of(name, state_dtype=state_dtype)
    assert plan.kv_token_bytes == kv
    assert round(plan.state_bytes / 1e6, 1 if state_mb > 1 else 3) == state_mb


@pytest.mark.parametrize(("name", "state_dtype", "exact"), [
    ("Qwen3.5-397B-A17B", "float32", 195.1), ("Qwen3-Next-80B-A3B", "float32", 79.7),
    ("Granite-4.0-H-Small", "bfloat16", 79.0),
])
def test_a_request_of_100_tokens_costs_what_the_table_says(
        name: str, state_dtype: CacheDTypeName, exact: float) -> None:
    plan = plan_of(name, state_dtype=state_dtype)
    assert round((plan.state_bytes + 100 * plan.kv_token_bytes) / 1e6, 1) == exact
    assert exact < plan.arena.sequence_bytes(100) / 1e6 < exact * 1.01      # whole pages, the slot's stride


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.short_name)
def test_as_many_sequences_fit_as_the_arena_says_and_not_one_more(geometry) -> None:
    arena = make_plan(geometry.name, geometry.config, PlanOptions(arena_bytes=20 * GIB)).arena
    for tokens in (1, 100, 4096):
        count = arena.sequences_of(tokens)
        assert arena.frames_for(count, tokens) <= arena.frame_count < arena.frames_for(count + 1, tokens)
        assert count * arena.sequence_bytes(tokens) <= arena.arena_bytes


@pytest.mark.parametrize(("name", "state_dtype", "pages", "slots", "tokens"), [
    ("Qwen3.5-397B-A17B", "float32", 391, 1, 6256), ("LFM2-1.2B", "float32", 5, 12, 6),
    ("Granite-4.0-H-Small", "bfloat16", 295, 1, 4720), ("AI21-Jamba-1.5-Mini", "float32", 123, 2, 984),
])
def test_frames_and_the_cost_of_a_checkpoint(
        name: str, state_dtype: CacheDTypeName, pages: int, slots: int, tokens: int) -> None:
    plan = plan_of(name, state_dtype=state_dtype)
    assert (plan.arena.pages_per_frame, plan.arena.slots_per_frame) == (pages, slots)
    assert plan.snapshot_tokens == tokens
    assert plan.arena == plan_arena(plan.spec, 40 * GIB, kv_dtype="bfloat16")
