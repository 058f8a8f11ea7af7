"""Nothing that the engine does around the model changes a token of a released model in bfloat16.

All are compared with the answers of five prompts, one after another in an engine that guesses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.reference import Original
from tests.real.text import TEXT
from tests.support.arena_fills import fill_pages
from tests.support.given_costs import GIVEN_COSTS
from weft import Engine
from weft.api import Completion

PROMPT_TOKENS = (24, 90, 200, 410)
ANSWER_TOKENS = 32
COSTS = {"step_costs": GIVEN_COSTS}
REPEATED = (
    "Count the ferries.\n"
    + "".join(f"Ferry {at}: 7 passengers, 2 bicycles, no horse.\n" for at in range(1, 9))
    + "Ferry"
)
"""A text that goes on as it began, so drafts are right."""


@contextmanager
def engine_of(model: Path, **more: Any) -> Iterator[Engine]:
    """``step_costs``: what is stored and guessed is decided alike on every machine."""
    settings = {"memory": "128MiB", "threads": 1, "speculate": "off", "max_model_len": 512, **COSTS, **more}
    with Engine(model=str(model), **settings) as engine:
        yield engine


def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[Completion]:
    return engine.generate(prompts, temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, progress=False)


def tokens_of(given: Sequence[Completion]) -> list[list[int]]:
    return [list(answer.tokens) for answer in given]


@pytest.fixture(scope="module")
def prompts(original: Original) -> list[list[int]]:
    whole = original.encode(TEXT)
    return [*(whole[:length] for length in PROMPT_TOKENS), original.encode(REPEATED)]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with engine_of(model) as made:
        yield made


@pytest.fixture(scope="module")
def cold(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """One at a time, each from nothing."""
    found = []
    for prompt in prompts:
        engine.flush_cache()
        [answer] = answers(engine, [prompt])
        assert answer.cached_tokens == 0
        found.append(list(answer.tokens))
    assert len({token for tokens in found for token in tokens}) > 40, "equal tokens would prove little"
    return found


def test_a_prefix_hit_changes_no_token(engine: Engine, prompts: list[list[int]], cold: list[list[int]]) -> None:
    engine.flush_cache()
    answers(engine, prompts)
    warm = [answers(engine, [prompt])[0] for prompt in prompts]
    for prompt, answer in zip(prompts, warm, strict=True):
        assert answer.cached_tokens > len(prompt) - 32
    assert tokens_of(warm) == cold


def test_a_spoiled_page_of_the_cache_would_be_noticed(
    engine: Engine, prompts: list[list[int]], cold: list[list[int]]
) -> None:
    """The control of the test above."""
    engine.flush_cache()
    answers(engine, prompts[-2:])
    arena = engine._core.executor.arena  # type: ignore[attr-defined]
    fill_pages(arena, list(range(len(prompts[-2]) // 16)), 0)
    spoiled = answers(engine, prompts[-2:])
    engine.flush_cache()
    assert tokens_of(spoiled) != cold[-2:]


def test_company_in_a_step_changes_no_token(engine: Engine, prompts: list[list[int]], cold: list[list[int]]) -> None:
    engine.flush_cache()
    assert tokens_of(answers(engine, prompts)) == cold


def test_preemption_changes_no_token(model: Path, prompts: list[list[int]], cold: list[list[int]]) -> None:
    with engine_of(model, memory="16.5MiB", max_model_len=512) as small:
        together = answers(small, prompts)
        assert small.stats().preemptions > 0
    assert tokens_of(together) == cold


def test_speculation_changes_no_token(model: Path, prompts: list[list[int]], cold: list[list[int]]) -> None:
    with engine_of(model, speculate="suffix,tree") as guessing:
        found = tokens_of([answers(guessing, [prompt])[0] for prompt in prompts[-3:]])
        sources = guessing.stats().speculation.sources
    assert sum(source.accepted for source in sources.values()) > 10
    assert found == cold[-3:]


def test_a_restart_that_reads_the_store_changes_no_token(
    model: Path, prompts: list[list[int]], cold: list[list[int]], tmp_path: Path
) -> None:
    store = {"store": str(tmp_path / "store"), "store_size": "128MiB"}
    with engine_of(model, **store) as first:
        # Each prompt begins with the one before it, and what came back is worth a record.
        assert tokens_of([answers(first, [prompt])[0] for prompt in prompts[:-1]]) == cold[:-1]
    with engine_of(model, **store) as second:
        [restored] = answers(second, [prompts[-2]])
        assert second.stats().memory.cache.loaded_tokens > PROMPT_TOKENS[-2] - 32
    assert list(restored.tokens) == cold[-2]
