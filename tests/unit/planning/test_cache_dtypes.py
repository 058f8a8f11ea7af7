"""What KV and states weigh in each dtype: halves that are halves, for every public geometry."""

from __future__ import annotations

import pytest

from tests.fixtures.checkpoints import CHECKPOINTS, checkpoint
from tests.unit.planning.test_as_the_engine_allocates import ARENA_BYTES, buffer_bytes, planned
from weft.assemble import assemble
from weft.assemble.room import cache_dtypes
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.planning.geometries import GEOMETRIES, Geometry
from weft.planning.model_plan import ModelPlan, PlanOptions, make_plan
from weft.spec import KV_DTYPES, CacheDTypeName, ModelSpec, attention

GIB = 1 << 30
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.short_name)


def plan_of(geometry: Geometry, kv: CacheDTypeName, **asked: object) -> ModelPlan:
    return make_plan(geometry.name, geometry.config, PlanOptions(arena_bytes=64 * GIB, kv_dtype=kv, **asked))


@each_geometry
def test_a_page_in_fp8_is_exactly_half_and_twice_the_tokens_fit(geometry: Geometry) -> None:
    longest = 2048
    wide, half = (plan_of(geometry, kv, lengths=(100, longest)) for kv in ("bfloat16", "float8_e4m3"))
    assert 2 * half.arena.page_bytes == wide.arena.page_bytes
    assert 2 * half.kv_token_bytes == wide.kv_token_bytes
    for tokens in (1, 100, 1000, longest):
        assert 2 * half.arena.pages_for(tokens) * half.arena.page_bytes == (
            wide.arena.pages_for(tokens) * wide.arena.page_bytes
        )
    if not wide.kv_token_bytes:
        return
    # Of what is not slots, up to a frame that is not full of whole pages.
    tokens_wide, tokens_half = (plan.arena.page_count * 16 for plan in (wide, half))
    frame_tokens = half.arena.pages_per_frame * 16
    assert abs(tokens_half - 2 * tokens_wide) <= 2 * max(frame_tokens, wide.arena.pages_per_frame * 16)
    assert half.fits[1].sequences >= wide.fits[1].sequences


@each_geometry
def test_int8_takes_two_bytes_more_for_each_token_and_head_and_block(geometry: Geometry) -> None:
    eight, int8 = (plan_of(geometry, kv) for kv in ("float8_e4m3", "int8"))
    blocks = sum((1 + layer.has_values) * layer.kv_heads for layer in eight.spec.layers)
    assert int8.kv_token_bytes - eight.kv_token_bytes == 2 * blocks
    attention_layers = len(eight.spec.attention_layers)
    assert 0 <= int8.arena.page_bytes - 16 * int8.kv_token_bytes < 256 * 2 * max(1, attention_layers)


@each_geometry
def test_states_in_half_the_bits_are_half_without_their_convolutions(geometry: Geometry) -> None:
    wide, half = (plan_of(geometry, "bfloat16", state_dtype=state) for state in ("float32", "float16"))
    windows = sum(
        part.part_bytes(wide.spec.dtype)
        for layer in wide.spec.layers
        for part in layer.state
        if part.dtype not in ("float32", "float16")
    )
    assert 2 * (half.state_bytes - windows) == wide.state_bytes - windows


@pytest.mark.parametrize(
    ("name", "kv", "state"),
    [
        ("qwen3_5", "fp8", "float16"),
        ("granite", "int8", "bfloat16"),
        ("kimi_linear", "int8", "float32"),
        ("mistral", "fp8", "float32"),
        ("mistral", "int8", "float32"),
    ],
)
def test_the_engine_allocates_what_the_plan_says_in_these_dtypes_too(name: str, kv: str, state: str) -> None:
    assert name in CHECKPOINTS
    made = assemble(
        EngineConfig(model=str(checkpoint(name)), memory=str(ARENA_BYTES), threads=1, kv_dtype=kv, state_dtype=state)
    )  # type: ignore[arg-type]
    plan = planned(name, kv_dtype=KV_DTYPES[kv], state_dtype=state)
    assert plan.arena == made.core.memory.plan
    assert plan.arena.arena_bytes == buffer_bytes(made.core)
    rows = {row.name: row for row in made.info.memory}
    assert rows["a token's KV"].size_bytes == plan.kv_token_bytes
    assert KV_DTYPES[kv] in rows["a token's KV"].remark
    made.core.close()


def test_a_head_that_cannot_be_packed_names_the_flag() -> None:
    spec = ModelSpec("odd", 100, 64, 1024, "float32", (attention(2, 18),))
    with pytest.raises(ConfigError, match=r"--kv-dtype is int8.* 18 .*--kv-dtype float32"):
        cache_dtypes(EngineConfig(kv_dtype="int8"), spec)
    assert cache_dtypes(EngineConfig(kv_dtype="bfloat16"), spec)[1] == "bfloat16"
