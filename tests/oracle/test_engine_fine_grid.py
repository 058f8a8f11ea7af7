"""States kept at every page, where the recurrent kernels go token by token: a hit there is no worse than one
on the grid of chunks (the recurrences are bit for bit the same from anywhere: tests/ops/test_native; products
of other row counts are not)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.oracle.serving import RECURRENT_FAMILIES, Serving, loaded
from tests.oracle.test_engine_prefix_cache import SHORT, TOLERANCE, cold, gap, one_by_one, tapped, text, warm
from tests.support.arena_fills import fill_slots
from weft.schedule.plan import StepPlan
from weft.schedule.snapshots import on_grid
from weft.spec import StatePart
from weft.tensor import native
from weft.tensor.chunks import grid_tokens
from weft.units import CHUNK_TOKENS, PAGE_TOKENS

FAMILIES = (*RECURRENT_FAMILIES, "falcon_h1", "kimi_linear", "jamba", "mamba")
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_between_two_chunks_changes_no_token(family: str) -> None:
    spec = loaded(family).model.spec
    if native.MISSING is None:
        assert grid_tokens(spec, CPU) == PAGE_TOKENS
    serving = warm(family, snapshots="prompt", grid_tokens=grid_tokens(spec, CPU))
    prompts = [text(length, length) for length in (17, 40, 64, 100, 213)]
    first, again = one_by_one(serving, prompts), one_by_one(serving, prompts)
    for prompt, computed, hit in zip(prompts, first, again, strict=True):
        expected = cold(family, prompt)
        assert hit.cached_tokens == on_grid(len(prompt) - 1, serving.core.sizes.grid_tokens)
        assert hit.tokens == computed.tokens == expected.tokens
        assert gap(hit, expected) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", "granite"])
def test_twins_begin_where_the_page_ends_in_which_they_part(family: str) -> None:
    if native.MISSING is not None:
        pytest.fail("without the C++ kernels the grid is 64; see tests/ops/conftest.py")
    common = text(7, 250)
    prompts = [common + text(100 + i, 30) for i in range(4)]
    serving = warm(family, grid_tokens=PAGE_TOKENS)
    answers = serving.run(prompts, SHORT)
    assert [answer.cached_tokens for answer in answers] == [0, 240, 240, 240]
    assert 240 in tapped(serving)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == cold(family, prompt).tokens


def test_a_damaged_state_between_two_chunks_is_noticed() -> None:
    damaged = []

    def spoil(serving: Serving, plan: StepPlan) -> None:
        for copy in plan.arena_work.slot_copies:
            damaged.append(copy)
            fill_slots(serving.executor.arena, [copy.src], 1)

    prompt = text(3, 100)
    serving = warm("qwen3_5", snapshots="prompt", grid_tokens=PAGE_TOKENS, before_step=spoil)
    serving.run([prompt], SHORT)
    [hit] = serving.run([prompt], SHORT)
    assert damaged
    assert hit.cached_tokens == 96
    assert not torch.allclose(hit.logits, cold("qwen3_5", prompt).logits, rtol=1e-3)


def test_the_grid_is_that_of_chunks_where_a_kernel_works_in_chunks() -> None:
    spec = loaded("qwen3_5").model.spec
    native.choose("torch")
    try:
        assert grid_tokens(spec, CPU) == CHUNK_TOKENS
    finally:
        native.choose("auto")
    assert grid_tokens(spec, torch.device("cuda")) == CHUNK_TOKENS
    odd = replace(spec.layers[0], state=(StatePart("recurrent", (2, 24, 24), "float32"),))
    assert grid_tokens(replace(spec, layers=(odd,)), CPU) == CHUNK_TOKENS
