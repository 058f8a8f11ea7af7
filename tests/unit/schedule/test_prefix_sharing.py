"""Who waits for whom: tables. Tokens are counted from 0, so two arrays share their shorter length unless one
is changed."""

from __future__ import annotations

import numpy as np
import pytest

from weft.schedule.plan import Int32s
from weft.schedule.prefix_sharing import PrefixProducer, PrefixWait, common_tokens, wait_for
from weft.units import SeqId

AHEAD, BEHIND = (0, 0, 0), (0, 9, 0)
WAITER = (0, 5, 0)


def tokens(length: int, own: int = 0) -> Int32s:
    """``length`` tokens, the last ``own`` of them unlike those of any other."""
    made = np.arange(length, dtype=np.int32)
    made[length - own :] += 10_000
    return made


def producer(
    length: int = 1000,
    *,
    computed: int = 0,
    own: int = 0,
    arriving: tuple[int, ...] = (),
    rank: tuple[int, int, int] | None = AHEAD,
    seq: int = 1,
) -> PrefixProducer:
    return PrefixProducer(SeqId(seq), "", rank, tokens(length, own), computed, arriving)


@pytest.mark.parametrize(("left", "right", "expected"), [(0, 10, 0), (10, 10, 10), (10, 20, 10), (20, 10, 10)])
def test_common_tokens_end_with_the_shorter(left: int, right: int, expected: int) -> None:
    assert common_tokens(tokens(left), tokens(right)) == expected


def test_common_tokens_end_at_the_first_difference() -> None:
    assert common_tokens(tokens(50, own=20), tokens(50)) == 30
    assert common_tokens(tokens(5, own=5), tokens(5)) == 0


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # The last grid point that both share, and not the follower's last token.
        ({"producer": producer(1000), "known": tokens(1050, own=50)}, PrefixWait(SeqId(1), 960)),
        ({"producer": producer(1000), "known": tokens(960)}, PrefixWait(SeqId(1), 896)),
        ({"producer": producer(1000), "known": tokens(961)}, PrefixWait(SeqId(1), 960)),
        # The producer is past it, and has nothing on the way.
        ({"producer": producer(1000, computed=960), "known": tokens(1050, own=50)}, None),
        ({"producer": producer(1000, computed=959), "known": tokens(1050, own=50)}, PrefixWait(SeqId(1), 960)),
        # It is on the way.
        (
            {"producer": producer(1000, computed=1000, arriving=(448, 960)), "known": tokens(1050, own=50)},
            PrefixWait(SeqId(1)),
        ),
        ({"producer": producer(1000, computed=1000, arriving=(992,)), "known": tokens(1050, own=80)}, None),
        # Saves too little.
        ({"producer": producer(1000), "known": tokens(1050, own=50), "cached": 897}, None),
        (
            {"producer": producer(1000, computed=900), "known": tokens(1050, own=50), "cached": 896},
            PrefixWait(SeqId(1), 960),
        ),
        ({"producer": producer(63), "known": tokens(63)}, None),
        # The follower has more of it cached than the producer has computed: it is faster itself.
        ({"producer": producer(1000, computed=64), "known": tokens(1050, own=50), "cached": 512}, None),
        (
            {"producer": producer(1000, computed=512), "known": tokens(1050, own=50), "cached": 512},
            PrefixWait(SeqId(1), 960),
        ),
        # Rank: nobody waits for who is behind; who ends is waited for by all, one step.
        ({"producer": producer(1000, rank=BEHIND), "known": tokens(1050, own=50)}, None),
        ({"producer": producer(1000, rank=None, computed=500), "known": tokens(1050, own=50)}, None),
        (
            {"producer": producer(1000, rank=None, computed=500, arriving=(500,)), "known": tokens(1050, own=50)},
            PrefixWait(SeqId(1)),
        ),
        # A page is enough if the producer ends, a chunk if it runs; the first 16 tokens are the least of a key.
        (
            {"producer": producer(36, rank=None, arriving=(36,)), "known": tokens(50), "cached": 20},
            PrefixWait(SeqId(1)),
        ),
        ({"producer": producer(36, rank=None, arriving=(36,)), "known": tokens(50), "cached": 21}, None),
        ({"producer": producer(120, computed=120, arriving=(120,)), "known": tokens(150), "cached": 60}, None),
    ],
)
def test_a_follower_waits_when_that_saves_more_than_it_costs(
    case: dict[str, object], expected: PrefixWait | None
) -> None:
    assert (
        wait_for(
            case["known"],
            case.get("cached", 0),
            WAITER,
            [case["producer"]],  # type: ignore
            stateful=True,
        )
        == expected
    )


def test_the_leader_that_saves_most_is_waited_for() -> None:
    several = [producer(300, seq=1), producer(900, seq=2), producer(900, seq=3), producer(500, seq=4)]
    assert wait_for(tokens(1000), 0, WAITER, several, stateful=True) == PrefixWait(SeqId(2), 896)
    ends = producer(480, seq=5, rank=None, arriving=(480,))
    assert wait_for(tokens(1000), 448, WAITER, [producer(500, seq=4), ends], stateful=True) == PrefixWait(SeqId(5))


@pytest.mark.parametrize(
    ("at", "arriving", "expected"),
    [
        (0, (), PrefixWait(SeqId(1))),
        (990, (), PrefixWait(SeqId(1))),
        (992, (), None),
        (992, (992,), PrefixWait(SeqId(1))),
        (1000, (1000,), PrefixWait(SeqId(1))),
    ],
)
def test_without_states_pages_are_waited_for_and_nothing_is_demanded(
    at: int, arriving: tuple[int, ...], expected: PrefixWait | None
) -> None:
    one = producer(1000, computed=at, arriving=arriving)
    assert wait_for(tokens(1050, own=50), 0, WAITER, [one], stateful=False) == expected
