"""A stream of events: as they come, or all at the end of the answers."""

from __future__ import annotations

import asyncio
import time

import pytest

from weft.errors import EngineUnavailableError, SlowClientError
from weft.fleet.live_request import EVENTS_MAX, RequestStream, UnreadAnswers
from weft.request import FinishReason, LostTokens, TokenEvent, TokenLogprobs
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


WIDE = TokenEvent("a", 0, [1], logprobs=[TokenLogprobs(1, -1.0, 0, [(token, -2.0) for token in range(20)])])
"""An event of about 2.8 KB."""


def bounded(unread: UnreadAnswers, ended: list[str], name: str) -> RequestStream:
    stream = RequestStream([name])
    stream.bound(unread, lambda: ended.append(name))
    return stream


async def test_the_stream_that_holds_the_most_ends_and_the_others_go_on() -> None:
    unread, ended = UnreadAnswers(limit_bytes=1_000_000), list[str]()
    slow, slower = bounded(unread, ended, "slow"), bounded(unread, ended, "slower")
    for _ in range(150):
        slow.put(WIDE)
    for _ in range(1500):
        slower.put(WIDE)
    assert ended == ["slower"]
    with pytest.raises(SlowClientError, match=r"limits\.max_unread_mb"):
        await slower.events()
    assert len(await slow.events()) == EVENTS_MAX
    assert 100_000 < unread.total_bytes < 500_000, "what one stream held is free, and what the other holds is counted"


async def test_a_client_that_keeps_up_may_read_any_number_of_events() -> None:
    unread, ended = UnreadAnswers(limit_bytes=1_000_000), list[str]()
    stream = bounded(unread, ended, "a")
    for _ in range(20):
        for _ in range(3 * EVENTS_MAX):
            stream.put(WIDE)
        for _ in range(3):
            assert len(await stream.events()) == EVENTS_MAX
    assert (ended, unread.total_bytes) == ([], 0)


async def test_a_closed_stream_holds_nothing() -> None:
    unread = UnreadAnswers(limit_bytes=10_000_000)
    stream = bounded(unread, [], "a")
    for _ in range(3 * EVENTS_MAX):
        stream.put(WIDE)
    assert unread.total_bytes > 400_000
    stream.close()
    stream.close()
    assert unread.total_bytes == 0


async def test_events_that_wait_keep_their_order() -> None:
    stream = bounded(UnreadAnswers(10_000_000), [], "a")
    for token in range(150):
        stream.put(event(0, [token]))
    read = [one.tokens[0] for _ in range(3) for one in await stream.events()]
    assert read == list(range(150))


@pytest.mark.parametrize("interval", [1, 2, 5])
async def test_a_listener_is_called_for_the_first_event_for_each_interval_and_for_the_end(interval: int) -> None:
    stream, calls = RequestStream(["a"]), []
    stream.listen(lambda: calls.append([token for one in stream.next_events() for token in one.tokens]), interval)
    for token in range(8):
        stream.put(event(0, [token], "stop" if token == 7 else None))
        stream.deliver()
    wanted = {
        1: [[0], [1], [2], [3], [4], [5], [6], [7]],
        2: [[0], [1, 2], [3, 4], [5, 6], [7]],
        5: [[0], [1, 2, 3, 4, 5], [6, 7]],
    }
    assert calls == wanted[interval]


async def test_the_events_of_a_report_are_one_call() -> None:
    stream, calls = RequestStream(["a"]), []
    stream.listen(lambda: calls.append(len(stream.next_events())), 1)
    for index in range(3):
        stream.put(event(index, [1]))
    assert calls == []
    stream.deliver()
    assert calls == [3]


async def test_events_before_the_listener_and_errors_call_it() -> None:
    stream, errors = RequestStream(["a"]), []
    stream.put(event(0, [1]))

    def listen() -> None:
        try:
            errors.append([one.tokens for one in stream.next_events()])
        except EngineUnavailableError as error:
            errors.append(error.message)

    stream.listen(listen, 100)
    await asyncio.sleep(0)
    stream.fail("a", EngineUnavailableError("gone"))
    await asyncio.sleep(0)
    assert errors == [[[1]], "gone"]
    stream.close()
    stream.fail("a", EngineUnavailableError("again"))
    await asyncio.sleep(0)
    assert len(errors) == 2, "a closed stream calls no listener"
