"""EngineConfig meets the arena: what is shrunk, what is said, and that what is said is true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.memory.geometry import (
    ATTENTION_ONLY,
    GRANITE_H_SMALL,
    LFM2_1_2B,
    QWEN35_397B,
    RECURRENT_ONLY,
    model,
    open_in,
)
from weft.config import EngineConfig, Sizes
from weft.errors import ConfigError
from weft.memory.frames.plan import default_memory_bytes, fit_sizes, plan_arena
from weft.memory.memory import Memory
from weft.spec import ModelSpec, attention, gated_delta, short_conv
from weft.units import SeqId, parse_bytes

TINY = model([attention(1, 16), gated_delta(1, 2, 16, 16, 4), short_conv(40, 3)], max_positions=4096)
SPECS = {
    "tiny": TINY,
    "attention": ATTENTION_ONLY,
    "recurrent": RECURRENT_ONLY,
    "lfm2": LFM2_1_2B,
    "granite": GRANITE_H_SMALL,
}


def typed_memory(text: str) -> int:
    """The number of the ``--memory X`` that a sentence tells the user to type."""
    found = re.search(r"--memory (\d+(?:[KMG]i)?B)(?=[ ;,.]|$)", text)
    assert found, text
    return parse_bytes(found.group(1), flag="--memory")


def sizes_in(spec: ModelSpec, memory_bytes: int, config: EngineConfig | None = None) -> Sizes:
    return fit_sizes(config or EngineConfig(), spec, plan_arena(spec, memory_bytes))


def test_what_fits_is_left_as_asked_and_nothing_is_said() -> None:
    sizes = sizes_in(LFM2_1_2B, 8 * 10**9)
    assert (sizes.max_model_len, sizes.rows_max, sizes.step_tokens_max) == (262_144, 256, 1024)
    assert sizes.notes == ()
    assert sizes.memory_bytes <= 8 * 10**9


def test_a_context_that_does_not_fit_is_shrunk_and_the_memory_for_all_of_it_is_named() -> None:
    sizes = sizes_in(QWEN35_397B, 2 * 10**9)
    assert sizes.max_model_len == 9 * 391 * 16
    [length_note, rows_note] = sizes.notes
    assert "--max-model-len 262144 shrunk to 56304" in length_note
    assert "--max-num-seqs 256 shrunk to 9" in rows_note
    enough = typed_memory(length_note)
    assert sizes_in(QWEN35_397B, enough).max_model_len == 262_144
    assert sizes_in(QWEN35_397B, int(enough * 0.97)).max_model_len < 262_144, "and not much less would do"


def test_what_fits_exactly_is_not_said_to_be_shrunk() -> None:
    memory_bytes = 10 * plan_arena(QWEN35_397B, 80 * 10**9).frame_bytes
    exactly = EngineConfig(max_model_len=9 * 391 * 16, max_num_seqs=9)
    assert sizes_in(QWEN35_397B, memory_bytes, exactly).notes == ()
    one_more = EngineConfig(max_model_len=9 * 391 * 16 + 1, max_num_seqs=10)
    assert len(sizes_in(QWEN35_397B, memory_bytes, one_more).notes) == 2


def test_a_context_beyond_the_models_positions_is_shrunk_to_them() -> None:
    sizes = sizes_in(TINY, 10**9, EngineConfig(max_model_len=5000))
    assert sizes.max_model_len == 4096
    assert any("--max-model-len 5000 shrunk to 4096" in note for note in sizes.notes)


def test_a_step_always_has_room_for_all_decodes_and_one_chunk_of_prefill() -> None:
    for asked in (1, 64, 65, 100, 1024):
        sizes = sizes_in(TINY, 10**9, EngineConfig(max_num_batched_tokens=asked, max_num_seqs=512))
        assert sizes.rows_max >= 1
        assert sizes.rows_max + 64 <= sizes.step_tokens_max
        assert bool(sizes.notes) == (asked < 512 + 64)
    few = sizes_in(TINY, 10**9, EngineConfig(max_num_batched_tokens=128, max_num_seqs=100))
    assert few.rows_max == 64
    assert "--max-num-seqs 100 shrunk to 64: a step of --max-num-batched-tokens 128" in few.notes[0]


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_model_len"])
def test_a_size_below_one_is_an_error_that_names_its_flag(field: str) -> None:
    flag = "limits." + field if field == "max_queued_requests" else "--" + field.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is 0") as caught:
        sizes_in(TINY, 10**9, replace(EngineConfig(), **{field: 0}))  # type: ignore[arg-type]
    assert caught.value.param == flag


@pytest.mark.parametrize("name", SPECS)
def test_too_little_memory_is_an_error_whose_flag_works_when_typed(name: str) -> None:
    for given_bytes in (0, 1, 5000):
        with pytest.raises(ConfigError) as caught:
            sizes_in(SPECS[name], min(given_bytes, plan_arena(SPECS[name], 1).frame_bytes - 1))
        assert caught.value.param == "--memory"
        sizes = sizes_in(SPECS[name], typed_memory(caught.value.message))
        assert sizes.rows_max >= 1
        assert sizes.max_model_len >= 16


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(SPECS)),
    frames=st.floats(0.1, 40),
    length=st.integers(1, 5000),
    seqs=st.integers(1, 300),
)
def test_a_sequence_of_the_served_length_fits_alone_and_all_rows_fit_together(
    name: str, frames: float, length: int, seqs: int
) -> None:
    spec, config = SPECS[name], EngineConfig(max_model_len=length, max_num_seqs=seqs)
    memory_bytes = int(frames * plan_arena(spec, 1).frame_bytes)
    arena = plan_arena(spec, memory_bytes)
    try:
        sizes = fit_sizes(config, spec, arena)
    except ConfigError as error:
        memory_bytes = typed_memory(error.message)
        arena = plan_arena(spec, memory_bytes)
        sizes = fit_sizes(config, spec, arena)
    assert sizes.max_model_len <= length
    assert sizes.rows_max <= seqs
    memory = Memory(arena)
    alone = memory.transaction()
    assert open_in(alone, memory, 0, sizes.max_model_len)
    together = memory.transaction()
    assert all(open_in(together, memory, seq, 1) for seq in range(sizes.rows_max))
    for note in sizes.notes:
        if "would hold" in note:
            enlarged = plan_arena(spec, typed_memory(note.rpartition(";")[2]))
            assert fit_sizes(config, spec, enlarged).max_model_len == min(length, spec.max_positions)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(SPECS)),
    free=st.integers(10**5, 10**11),
    length=st.integers(1, 5000),
    seqs=st.integers(1, 40),
)
def test_the_default_memory_is_a_share_of_free_ram_and_no_more_than_could_be_used(
    name: str, free: int, length: int, seqs: int
) -> None:
    spec, config = SPECS[name], EngineConfig(max_model_len=length, max_num_seqs=seqs)
    memory_bytes = default_memory_bytes(free, spec, config)
    assert memory_bytes <= 0.4 * free
    if memory_bytes < int(0.4 * free):
        sizes = fit_sizes(config, spec, plan_arena(spec, memory_bytes))
        assert sizes.max_model_len == min(length, spec.max_positions)
        assert sizes.rows_max == seqs
        memory = Memory(plan_arena(spec, memory_bytes))
        transaction = memory.transaction()
        assert all(open_in(transaction, memory, seq, sizes.max_model_len) for seq in range(seqs))
        exact = seqs * (
            spec.state_bytes_per_sequence("bfloat16") + sizes.max_model_len * spec.kv_bytes_per_token("bfloat16")
        )
        slack = 3 * memory._state.plan.frame_bytes + seqs * memory._state.plan.page_bytes
        assert memory_bytes <= 2 * exact + slack, "more than twice of what could be used is too much"


def test_the_arena_takes_what_the_config_says_in_kv_dtype_too() -> None:
    wide, narrow = (plan_arena(LFM2_1_2B, 10**9, kv_dtype=kv) for kv in ("float32", "bfloat16"))
    assert wide.page_bytes == 2 * narrow.page_bytes
    assert wide.slot_bytes == narrow.slot_bytes, "states keep the model's dtype"


def test_a_lone_sequence_grows_to_the_served_length_token_by_token() -> None:
    arena = plan_arena(TINY, 60_000)
    sizes = fit_sizes(EngineConfig(), TINY, arena)
    memory = Memory(arena)
    transaction = memory.transaction()
    assert open_in(transaction, memory, 0, 1)
    memory.commit(transaction.seal())
    for tokens in range(2, sizes.max_model_len + 1):
        transaction = memory.transaction()
        assert transaction.extend(SeqId(0), tokens)
        memory.commit(transaction.seal())
    assert not memory.transaction().extend(SeqId(0), sizes.max_model_len + 16) or sizes.max_model_len == 4096
