"""Strikes of a request, and what a client learns of a resume."""

from __future__ import annotations

import pytest

from weft.errors import DeadlyRequestError
from weft.fleet.live_request import LiveRequest
from weft.fleet.replica import BACKOFF_MAX_S, SHORT_LIFE_S, Lives
from weft.request import LostTokens, Request, SamplingParams, TokenEvent


def live(n: int = 1) -> LiveRequest:
    return LiveRequest(
        Request(request_id="a", prompt_tokens=[1, 2, 3], sampling=SamplingParams(n=n, seed=1, max_tokens=9)), 0
    )


def event(tokens: list[int], index: int = 0, **more: object) -> TokenEvent:
    return TokenEvent(request_id="a", index=index, tokens=tokens, **more)


def test_a_request_that_moves_on_between_deaths_gets_no_strike() -> None:
    one = live()
    for number in range(5):
        one.placed(0)
        one.take(event([number]))
        one.lost()
    assert (one.strikes, one.resumes) == (0, 5)
    resumption = one.resumable().resumption
    assert resumption is not None
    assert resumption.answers == {0: [0, 1, 2, 3, 4]}


def test_two_deaths_without_a_token_end_it() -> None:
    one = live()
    one.placed(0)
    one.begun = True
    one.lost()
    assert one.strikes == 1
    one.placed(1)
    one.begun = True
    assert one.suspect
    with pytest.raises(DeadlyRequestError, match="2 engines"):
        one.lost()


def test_a_token_clears_a_strike() -> None:
    one = live()
    one.placed(0)
    one.begun = True
    one.lost()
    one.placed(0)
    one.take(event([4]))
    assert not one.suspect
    one.lost()
    one.placed(0)
    one.begun = True
    one.lost()
    assert one.strikes == 1


def test_a_death_before_its_engine_took_it_up_counts_half() -> None:
    one = live()
    for replica in range(3):
        one.placed(replica)
        one.lost()
    assert one.strikes == 1.5
    one.placed(0)
    with pytest.raises(DeadlyRequestError, match="4 engines"):
        one.lost()


def test_an_engine_that_fails_ends_no_answer_but_a_grammar_does() -> None:
    one = live(n=2)
    one.placed(0)
    assert one.take(event([], finish_reason="error", error="the engine failed")) is None
    assert one.open_count == 2
    assert one.take(event([], finish_reason="error", own_fault=True)) is not None
    assert one.open_count == 1


def test_facts_are_those_of_the_first_engine_and_counts_add_up() -> None:
    one = live()
    one.placed(0)
    first = event([4], cached_tokens=2, queued_s=0.5, lost=LostTokens(not_ready=1))
    assert one.take(first) == first
    one.take(event([5], cached_tokens=2, preemptions=1, recomputed_tokens=6))
    one.lost()
    one.placed(0)
    said = one.take(event([6], cached_tokens=0, queued_s=0.1, preemptions=2, recomputed_tokens=4))
    assert said == event([6], cached_tokens=2, preemptions=3, recomputed_tokens=10)


def test_the_load_of_a_replica_is_what_it_has_to_compute_of_each_answer() -> None:
    one = live(n=2)
    one.placed(0)
    assert one.load == (2, 2 * 3)
    one.take(event([7, 8, 9], 0))
    one.take(event([7], 1))
    one.lost()
    one.placed(1)
    assert one.load == (2, (3 + 3) + (3 + 1)), "a prompt of three and the tokens of each answer"


def test_an_answer_that_the_client_gave_up_is_not_resumed() -> None:
    one = live(n=3)
    one.placed(0)
    one.take(event([4], index=2))
    one.cancel(1)
    one.take(event([], index=0, finish_reason="stop"))
    one.lost()
    resumption = one.resumable().resumption
    assert resumption is not None
    assert resumption.answers == {2: [4]}


def test_the_delay_grows_with_short_lives_and_has_a_bound() -> None:
    lives = Lives()
    assert lives.end(SHORT_LIFE_S) == 0.0
    delays = [lives.end(SHORT_LIFE_S / 2) for _ in range(20)]
    assert delays[:3] == [0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == BACKOFF_MAX_S
    assert lives.end(SHORT_LIFE_S) == 0.0


def test_an_engine_is_told_where_its_prompt_parts_from_others_besides_what_the_client_declared() -> None:
    one = LiveRequest(
        Request(request_id="a", prompt_tokens=[1, 2, 3], sampling=SamplingParams(seed=1), boundaries=[64, 128]), 0
    )
    one.placed(0, (128, 192))
    assert one.resumable().boundaries == [64, 128, 192]
    one.placed(1)
    assert one.resumable() is one.request, "another engine's router knows of none"
