"""Memory of tokenizing: what a text may take, shares of it by API key, and texts that are cut before they are read."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.unit.text.test_text_parts import PATTERNS, trained
from weft.errors import QueueFullError
from weft.text.current_request import API_KEY
from weft.text.dialect import Dialect
from weft.text.renderer import Renderer
from weft.text.template_worker import ChatPrompt
from weft.text.text_parts import PART_CHARS, PARTS_TOGETHER
from weft.text.tokenize_budget import TextTooLongError, TokenizeBudget
from weft.text.tokenizer import LONG_TEXT_CHARS, Tokenizer

MIB = 1 << 20
WORDS = "the cat sat on the mat and saw "


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(trained(PATTERNS[1]))


def of_key(key: str, function: Callable[[], Any]) -> Any:
    def run() -> Any:
        API_KEY.set(key)
        return function()

    return contextvars.copy_context().run(run)


def test_a_text_without_cuts_takes_more_memory_than_one_in_parts() -> None:
    chars = 4 * PARTS_TOGETHER * PART_CHARS
    words, letters = (WORDS * chars)[:chars], "a" * chars
    assert tokenizer().memory_of(words, whole=False) < 110 * chars
    assert tokenizer().memory_of(letters, whole=False) > 200 * chars
    assert tokenizer().memory_of(words, whole=True) == tokenizer().memory_of(letters, whole=True)


def test_a_text_that_takes_more_than_the_budget_is_refused_with_the_setting() -> None:
    budget = TokenizeBudget(1000 * MIB, 1000 * MIB)
    with pytest.raises(TextTooLongError, match=r"limits\.tokenize_memory"), budget.spending(32 * MIB, 6500 * MIB):
        pass
    with pytest.raises(TextTooLongError, match=r"limits\.max_tokenize_chars"), budget.spending(1001 * MIB, 1):
        pass


def test_a_key_takes_half_of_the_budget_and_leaves_the_rest_to_others() -> None:
    budget = TokenizeBudget(1000, 1000 * MIB)
    held = [of_key("attacker", lambda: budget.spending(1, 250 * MIB)) for _ in range(2)]
    for one in held:
        of_key("attacker", one.__enter__)
    with pytest.raises(QueueFullError, match=r"limits\.tokenize_memory"):
        of_key("attacker", budget.spending(1, 1 * MIB).__enter__)
    with pytest.raises(TextTooLongError, match="an API key, half of"):
        of_key("attacker", budget.spending(1, 501 * MIB).__enter__)
    other = budget.spending(1, 500 * MIB)
    of_key("bystander", other.__enter__)
    other.__exit__(None, None, None)
    for one in held:
        one.__exit__(None, None, None)
    with budget.spending(1000, 1000 * MIB):  # the control: without keys all of it is for all
        pass


def test_a_text_that_is_done_gives_its_own_part_back_and_no_more() -> None:
    budget = TokenizeBudget(100, 1000 * MIB)
    with budget.spending(60, 1 * MIB):
        with budget.spending(30, 1 * MIB):
            pass
        with pytest.raises(QueueFullError, match="texts with 60 characters"), budget.spending(50, 1 * MIB):
            pass
        with budget.spending(40, 1 * MIB):
            pass


class Reading(Tokenizer):
    """The tokenizer, which counts the characters that it reads."""

    chars = 0

    def encode(self, text: str, **fields: Any) -> list[int]:
        self.chars += len(text)
        return super().encode(text, **fields)


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("text", [WORDS * 40_000, "a" * 1_200_000], ids=["words", "letters"])
async def test_a_text_that_is_cut_is_not_read_to_its_end(text: str, at_start: bool) -> None:
    reading = Reading(tokenizer()._backend)
    dialect = Dialect(None, reading)
    renderer = Renderer(reading, None, dialect, 4096, budget=TokenizeBudget(32_000_000, 1 << 30))
    part = await renderer.part_for_cut(text, 2000, at_start=at_start)
    assert reading.chars < 200_000
    assert text.startswith(part) if at_start else text.endswith(part)
    if text.startswith(WORDS):  # its tokens are those of the whole
        whole, tokens = tokenizer().encode(text), tokenizer().encode(part)
        assert (tokens[:2000] == whole[:2000]) if at_start else (tokens[-2000:] == whole[-2000:])
    assert await asyncio.wait_for(renderer.part_for_cut("short", 2000, at_start=at_start), 1) == "short"


@pytest.mark.parametrize("places", [{"ends": [9]}, {"marks": [9]}, {}])
def test_a_long_conversation_with_places_is_tokenized_as_a_whole(places: dict[str, list[int]]) -> None:
    """Tokens of parts would not say which of them ends at a place."""
    asked: list[bool] = []

    class Asked(Tokenizer):
        def memory_of(self, text: str, *, whole: bool) -> int:
            asked.append(whole)
            return super().memory_of(text, whole=whole)

    backend = Asked(tokenizer()._backend)
    renderer = Renderer(backend, None, Dialect(None, backend), 4096, budget=TokenizeBudget(32_000_000, 1 << 40))
    prompt = ChatPrompt(text=WORDS * (LONG_TEXT_CHARS // len(WORDS) + 1), **{"ends": [], "marks": [], **places})
    asyncio.run(renderer.encode_chat(prompt))
    assert asked == [bool(places)]
