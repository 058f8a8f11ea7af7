"""Figures that others report of themselves, and the design's table of them: reproduced to the digit."""

from __future__ import annotations

import pytest

from weft.memory.frames.plan import plan_arena
from weft.planning.geometries import find_geometry
from weft.planning.layouts import Load, PaddedPages, draft_log_bytes, padded_pages
from weft.planning.model_plan import ModelPlan, PlanOptions, make_plan
from weft.spec import CacheDTypeName

GIB = 1 << 30


def plan_of(
    name: str,
    *,
    tp: int = 1,
    kv_dtype: CacheDTypeName = "bfloat16",
    state_dtype: CacheDTypeName = "float32",
    arena_bytes: int = 40 * GIB,
) -> ModelPlan:
    geometry = find_geometry(name)
    assert geometry is not None
    return make_plan(
        geometry.name,
        geometry.config,
        PlanOptions(arena_bytes=arena_bytes, tp=tp, kv_dtype=kv_dtype, state_dtype=state_dtype),
    )


def padded(plan: ModelPlan) -> PaddedPages:
    [layout] = [layout for layout in plan.layouts if layout.name == "padded pages"]
    assert isinstance(layout, PaddedPages)
    return layout


@pytest.mark.parametrize(
    ("name", "tp", "state_dtype", "block"),
    [
        ("Qwen3.5-397B-A17B", 1, "float32", 2096),
        ("Qwen3.5-397B-A17B", 2, "float32", 2096),
        ("Qwen3.5-397B-A17B", 8, "float32", 528),
        ("Qwen3.5-4B", 1, "float32", 528),
        ("Qwen3-Next-80B-A3B", 1, "float32", 1056),
        ("Granite-4.0-H-Small", 1, "bfloat16", 528),
        ("Nemotron-H-8B", 1, "float32", 1040),
        ("LFM2-1.2B", 1, "float32", 16),
        ("AI21-Jamba-1.5-Mini", 1, "float32", 144),
        ("NVIDIA-Nemotron-Nano-9B-v2", 1, "bfloat16", 672),
    ],
)
def test_the_block_elsewhere_is_the_one_that_is_reported(
    name: str, tp: int, state_dtype: CacheDTypeName, block: int
) -> None:
    assert padded(plan_of(name, tp=tp, state_dtype=state_dtype)).block_tokens == block


def test_fp8_kv_doubles_the_block_elsewhere_and_not_here() -> None:
    plan = plan_of("Qwen3.5-397B-A17B", tp=2, kv_dtype="float8_e4m3")
    assert padded(plan).block_tokens == 4176
    assert plan.layouts[0].block_tokens == 16


@pytest.mark.parametrize(
    ("name", "state_dtype", "kv", "state_mb"),
    [
        ("Qwen3.5-397B-A17B", "float32", 30720, 192.1),
        ("Qwen3-Next-80B-A3B", "float32", 24576, 77.3),
        ("Granite-4.0-H-Small", "bfloat16", 16384, 77.3),
        ("Nemotron-H-8B", "float32", 16384, 102.1),
        ("LFM2-1.2B", "float32", 12288, 0.082),
        ("AI21-Jamba-1.5-Mini", "float32", 16384, 16.1),
    ],
)
def test_a_token_and_a_sequence_cost_what_the_table_says(
    name: str, state_dtype: CacheDTypeName, kv: int, state_mb: float
) -> None:
    plan = plan_of(name, state_dtype=state_dtype)
    assert plan.kv_token_bytes == kv
    assert round(plan.state_bytes / 1e6, 1 if state_mb > 1 else 3) == state_mb


@pytest.mark.parametrize(
    ("name", "state_dtype", "exact", "elsewhere", "speculating"),
    [
        ("Qwen3.5-397B-A17B", "float32", 195.1, 258, 837),
        ("Qwen3-Next-80B-A3B", "float32", 79.7, 104, 337),
        ("Granite-4.0-H-Small", "bfloat16", 79.0, 87, 320),
    ],
)
def test_a_request_of_100_tokens_costs_what_the_table_says(
    name: str, state_dtype: CacheDTypeName, exact: float, elsewhere: int, speculating: int
) -> None:
    plan = plan_of(name, state_dtype=state_dtype)
    assert round((plan.state_bytes + 100 * plan.kv_token_bytes) / 1e6, 1) == exact
    assert round(padded(plan).request_bytes(Load(100)) / 1e6) == elsewhere
    assert round(padded(plan).request_bytes(Load(100, drafts=3)) / 1e6) == speculating
    ours = plan.layouts[0].request_bytes(Load(100)) / 1e6
    assert exact < ours < exact * 1.01  # whole pages, and the slot's stride


def test_lfm2_pads_its_states_by_300_percent_elsewhere() -> None:
    plan = plan_of("LFM2-1.2B")
    assert padded(plan).page_bytes == 4 * plan.state_bytes // 10


def test_the_log_of_a_draft_token_is_the_inputs_of_its_gated_delta_layers() -> None:
    assert draft_log_bytes(plan_of("Qwen3.5-397B-A17B").spec) == 1_117_440


def test_a_request_that_speculates_costs_less_than_a_hundredth_more() -> None:
    """All requests of a step share one log. A request alone pays for it by itself: 1.4 % of 4,096 tokens, and
    less than a hundredth of 8,304 and more."""
    frames = plan_of("Qwen3.5-397B-A17B").layouts[0]
    bare = frames.request_bytes(Load(4096))
    assert frames.sequences(Load(4096)) > 100
    assert bare < frames.request_bytes(Load(4096, drafts=3)) < 1.002 * bare
    assert frames.sequences(Load(4096, drafts=3)) >= 0.995 * frames.sequences(Load(4096)) - 1
    alone = plan_of("Qwen3.5-397B-A17B", arena_bytes=int(1.5 * bare)).layouts[0]
    assert alone.sequences(Load(4096, drafts=3)) <= 1
    assert 1.01 * bare < alone.request_bytes(Load(4096, drafts=3)) == bare + 4 * 1_117_440 < 1.015 * bare
    small = plan_of("Qwen3.5-397B-A17B", arena_bytes=8 * GIB).layouts[0]
    assert small.request_bytes(Load(4096, drafts=3)) < 1.01 * bare
    long = alone.request_bytes(Load(8304))
    assert 1.009 * long < alone.request_bytes(Load(8304, drafts=3)) < 1.01 * long


def test_packing_n_layers_in_a_page_divides_the_block_by_n() -> None:
    spec = plan_of("Qwen3.5-397B-A17B").spec
    blocks = {packed: padded_pages(spec, "bfloat16", GIB, packed=packed).block_tokens for packed in (1, 3, 5, 15)}
    assert blocks == {1: 2096, 3: 704, 5: 432, 15: 144}  # 2096 / N, rounded up to the kernel's 16


@pytest.mark.parametrize(
    ("name", "state_dtype", "pages", "slots", "tokens"),
    [
        ("Qwen3.5-397B-A17B", "float32", 391, 1, 6256),
        ("LFM2-1.2B", "float32", 5, 12, 6),
        ("Granite-4.0-H-Small", "bfloat16", 295, 1, 4720),
        ("AI21-Jamba-1.5-Mini", "float32", 123, 2, 984),
    ],
)
def test_frames_and_the_cost_of_a_checkpoint(
    name: str, state_dtype: CacheDTypeName, pages: int, slots: int, tokens: int
) -> None:
    plan = plan_of(name, state_dtype=state_dtype)
    assert (plan.arena.pages_per_frame, plan.arena.slots_per_frame) == (pages, slots)
    assert plan.snapshot_tokens == tokens
    assert plan.arena == plan_arena(plan.spec, 40 * GIB, kv_dtype="bfloat16")
