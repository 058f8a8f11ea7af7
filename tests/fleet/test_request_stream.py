"""A stream of events: as they come, or all at the end of the answers."""

from __future__ import annotations

import asyncio
import time

import pytest

from weft.errors import EngineUnavailableError
from weft.fleet.live_request import RequestStream
from weft.request import FinishReason, LostTokens, TokenEvent
from weft.server.generation import joined


def event(index: int, tokens: list[int], finish_reason: FinishReason | None = None, **facts: int) -> TokenEvent:
    return TokenEvent(request_id="a", index=index, tokens=tokens, finish_reason=finish_reason, **facts)


async def test_the_rest_comes_once_with_the_times_of_arrival() -> None:
    stream = RequestStream(["a"])
    stream.put(event(0, [1]))
    begin_s = time.perf_counter()
    waiting = asyncio.create_task(stream.rest(2))
    await asyncio.sleep(0)
    stream.put(event(0, [2], "stop"))
    stream.put(event(1, [3]))
    await asyncio.sleep(0.03)
    assert not waiting.done(), "one answer is open"
    later_s = time.perf_counter()
    stream.put(event(1, [4], "length"))
    rest = await waiting
    assert [one.tokens for _, one in rest] == [[1], [2], [3], [4]]
    arrivals_s = [arrived_s for arrived_s, _ in rest]
    assert arrivals_s == sorted(arrivals_s)
    assert begin_s <= arrivals_s[0] < later_s <= arrivals_s[-1]


async def test_answers_that_ended_before_the_wait_are_the_rest() -> None:
    stream = RequestStream(["a"])
    stream.put(event(0, [1], "stop"))
    assert len(await stream.rest(1)) == 1


async def test_an_answer_that_failed_ends_the_wait() -> None:
    stream = RequestStream(["a"])
    stream.put(event(0, [], "error"))
    assert len(await stream.rest(2)) == 1


@pytest.mark.parametrize("before", [True, False])
async def test_a_failure_of_the_engines_is_raised(before: bool) -> None:
    stream = RequestStream(["a"])
    stream.put(event(0, [1]))
    if before:
        stream.fail("a", EngineUnavailableError("gone"))
    waiting = asyncio.create_task(stream.rest(1))
    await asyncio.sleep(0)
    if not before:
        stream.fail("a", EngineUnavailableError("gone"))
    with pytest.raises(EngineUnavailableError):
        await waiting


def test_joined_events_say_what_each_said() -> None:
    first = TokenEvent(
        request_id="a", index=0, tokens=[1, 2], cached_tokens=64, queued_s=0.5, lost=LostTokens(no_checkpoint=3)
    )
    last = event(0, [3], "stop", recomputed_tokens=5, accepted_drafts=2)
    both = joined([first, event(0, [9], accepted_drafts=1), last])
    assert (both.tokens, both.finish_reason, both.cached_tokens) == ([1, 2, 9, 3], "stop", 64)
    assert (both.recomputed_tokens, both.accepted_drafts) == (5, 2)
    assert both.lost == first.lost
