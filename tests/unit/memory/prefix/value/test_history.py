"""What the policy remembers of prompts: how far they were seen, and what hung where."""

from __future__ import annotations

import numpy as np

from weft.memory.prefix.value.history import History
from weft.units import PAD, SeqId


def tokens(*parts: tuple[int, int]) -> bytes:
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts]).tobytes()


def seen(history: History, *parts: tuple[int, int], salt: str = "") -> tuple[int, int]:
    return history.find(salt, tokens(*parts))


def test_a_record_is_found_and_how_far_was_seen_until_it_is_forgotten() -> None:
    history, seq = History(), SeqId(1)
    history.published(seq, "", 0, tokens((1, 64), (2, 32)))
    place = history.place(seq, 64, b"")
    assert place is not None
    history.record(place, 7)
    assert seen(history, (1, 64), (2, 32), (9, 9)) == (96, 7)
    assert seen(history, (1, 80)) == (64, 7)
    assert seen(history, (1, 64), salt="other") == (0, PAD)
    history.closed(seq)
    assert seen(history, (1, 64), (2, 32)) == (64, 7), "what nobody needs any more is not remembered"
    history.forget(place)
    assert seen(history, (1, 64)) == (0, PAD)
    assert history.token_count == 0


def test_a_record_inside_a_page_stands_where_its_request_ended() -> None:
    history, seq = History(), SeqId(1)
    history.published(seq, "", 0, tokens((1, 32), (2, 5)))
    rest = tokens((2, 5))
    place = history.place(seq, 37, rest)
    assert place is not None
    history.record(place, 3)
    history.closed(seq)
    assert history.token_count == 37
    assert seen(history, (1, 32), (2, 5), (4, 30)) == (37, 3)
    assert seen(history, (1, 32), (2, 4), (4, 30)) == (32, PAD)
    again = SeqId(2)
    history.opened(again, place)
    history.published(again, "", 32, tokens((2, 5), (4, 27)))
    assert seen(history, (1, 32), (2, 5), (4, 27))[0] == 64


def test_what_was_forgotten_beneath_a_request_makes_no_record_and_no_harm() -> None:
    history, seq = History(), SeqId(1)
    history.published(seq, "", 32, tokens((1, 32)))
    assert history.place(seq, 64, b"") is None
    assert history.token_count == 0
    history.closed(seq)


def test_what_two_requests_share_counts_once_and_stays_for_the_other() -> None:
    history, places = History(), []
    for number, own in enumerate((2, 3)):
        seq = SeqId(number)
        history.published(seq, "", 0, tokens((1, 64), (own, 32)))
        place = history.place(seq, 96, b"")
        assert place is not None
        history.record(place, number)
        history.closed(seq)
        places.append(place)
    assert history.token_count == 128
    history.forget(places[0])
    assert history.token_count == 96
    assert seen(history, (1, 64), (2, 32)) == (64, PAD)
    assert seen(history, (1, 64), (3, 32)) == (96, 1)


def test_a_request_holds_the_last_of_its_places_alone() -> None:
    history, seq = History(), SeqId(1)
    history.published(seq, "", 0, tokens((1, 32)))
    history.published(seq, "", 32, tokens((2, 32)))
    assert history.token_count == 64
    history.closed(seq)
    assert history.token_count == 0
