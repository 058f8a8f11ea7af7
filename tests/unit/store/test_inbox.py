"""Prefixes that other engines sent: what is taken, what goes on from what, and for how many bytes."""

from __future__ import annotations

import pytest

from weft.memory.prefix_store import StoredPrefix, token_bytes
from weft.store.inbox import FULL, STALE_S, Inbox, parcel_of

MODEL = bytes(16)
STATE, PAGE = memoryview(bytes(500)), memoryview(bytes(64))
ONE_PAGE = len(STATE) + len(PAGE)


def send(inbox: Inbox, handoff: str, tokens: range, *, start: int = 0, salt: str = "", model: bytes = MODEL) -> str:
    """Why KV of ``tokens`` from ``start`` on, a page or the part of one each, and a state are refused."""
    end = len(tokens)
    pieces = [(at, min(at + 16, end), 0, PAGE) for at in range(start, end, 16)] + [(end, end, 0, STATE)]
    parcel = parcel_of(model, handoff, salt, token_bytes(tokens), start, pieces, exact=True)
    return inbox.accept(parcel, memoryview(b"".join(payload for *_, payload in pieces)))


def found(inbox: Inbox, tokens: range, *, salt: str | None = None, above: int = 0) -> StoredPrefix | None:
    return inbox.match(salt, list(tokens), above)


@pytest.mark.parametrize(("spare", "refusal"), [(0, ""), (-1, FULL)])
def test_arrivals_never_hold_a_byte_more_than_the_limit(spare: int, refusal: str) -> None:
    inbox = Inbox(MODEL, 2 * ONE_PAGE + spare, lambda: 0.0)
    assert send(inbox, "a", range(16)) == ""
    assert send(inbox, "b", range(100, 116)) == refusal
    assert inbox.held_bytes == (ONE_PAGE if refusal else 2 * ONE_PAGE)


def test_a_full_inbox_refuses_for_now_which_is_not_counted_and_other_records_for_good_which_is() -> None:
    inbox = Inbox(MODEL, ONE_PAGE, lambda: 0.0)
    assert send(inbox, "a", range(16)) == ""
    assert send(inbox, "b", range(100, 116)) == FULL
    assert inbox.refused == 0
    assert "another model" in send(inbox, "c", range(16), model=bytes(15) + b"x")
    assert "there is room for" in send(inbox, "d", range(48))
    assert inbox.refused == 2


def test_a_further_parcel_goes_on_where_the_one_before_ended() -> None:
    inbox = Inbox(MODEL, 1 << 20, lambda: 0.0)
    salt = "tenant"
    assert send(inbox, "a", range(16), salt=salt) == ""
    assert send(inbox, "a", range(40), start=16, salt="".join(salt)) == ""
    prefix = found(inbox, range(64), salt=salt)
    assert prefix is not None
    assert (prefix.position, [span.start for span in prefix.spans]) == (40, [0, 16, 32])
    assert inbox.held_bytes == len(STATE) + 3 * len(PAGE), "one state, the last"
    assert found(inbox, range(64)) is None, "the salt is another"


@pytest.mark.parametrize("other", ["salt", "tokens", "start"])
def test_a_parcel_that_does_not_go_on_stands_for_itself(other: str) -> None:
    inbox = Inbox(MODEL, 1 << 20, lambda: 0.0)
    assert send(inbox, "a", range(16), salt="x") == ""
    tokens = range(100, 148) if other == "tokens" else range(48)
    start = 32 if other == "start" else 16
    assert send(inbox, "a", tokens, start=start, salt="y" if other == "salt" else "x") == ""
    salt = "y" if other == "salt" else "x"
    assert found(inbox, tokens, salt=salt) is None, "what comes before is not here"
    prefix = found(inbox, tokens, salt=salt, above=start)
    assert prefix is not None
    assert (prefix.position, prefix.spans[0].start) == (48, start)


def test_what_waits_too_long_goes_for_what_comes() -> None:
    now_s = 0.0
    inbox = Inbox(MODEL, ONE_PAGE, lambda: now_s)
    assert send(inbox, "a", range(16)) == ""
    now_s = STALE_S + 0.1
    assert send(inbox, "b", range(100, 116)) == ""
    assert found(inbox, range(32)) is None
    assert found(inbox, range(100, 132)) is not None
