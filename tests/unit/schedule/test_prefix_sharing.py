"""Who waits for whom: tables. Tokens are counted from 0, so two arrays share their shorter length unless one
is changed."""

from __future__ import annotations

import numpy as np
import pytest

from weft.schedule.plan import Int32s
from weft.schedule.prefix_sharing import Leader, Wait, common_tokens, wait_for
from weft.units import SeqId

AHEAD, BEHIND = (0, 0, 0), (0, 9, 0)
FOLLOWER = (0, 5, 0)


def tokens(length: int, own: int = 0) -> Int32s:
    """``length`` tokens, the last ``own`` of them unlike anybody else's."""
    made = np.arange(length, dtype=np.int32)
    made[length - own:] += 10_000
    return made


def leader(length: int = 1000, *, at: int = 0, own: int = 0, arriving: tuple[int, ...] = (),
           rank: tuple[int, int, int] | None = AHEAD, seq: int = 1) -> Leader:
    return Leader(SeqId(seq), "", rank, tokens(length, own), at, arriving)


@pytest.mark.parametrize(("left", "right", "expected"), [
    (0, 10, 0), (10, 10, 10), (10, 20, 10), (20, 10, 10),
])
def test_common_tokens_end_with_the_shorter(left: int, right: int, expected: int) -> None:
    assert common_tokens(tokens(left), tokens(right)) == expected


def test_common_tokens_end_at_the_first_difference() -> None:
    assert common_tokens(tokens(50, own=20), tokens(50)) == 30
    assert common_tokens(tokens(5, own=5), tokens(5)) == 0


@pytest.mark.parametrize(("case", "expected"), [
    # The last grid point that both share, and not the follower's last token.
    ({"leader": leader(1000), "known": tokens(1050, own=50)}, Wait(SeqId(1), 960)),
    ({"leader": leader(1000), "known": tokens(960)}, Wait(SeqId(1), 896)),
    ({"leader": leader(1000), "known": tokens(961)}, Wait(SeqId(1), 960)),
    # The leader is past it, and has nothing on the way.
    ({"leader": leader(1000, at=960), "known": tokens(1050, own=50)}, None),
    ({"leader": leader(1000, at=959), "known": tokens(1050, own=50)}, Wait(SeqId(1), 960)),
    # It is on the way.
    ({"leader": leader(1000, at=1000, arriving=(448, 960)), "known": tokens(1050, own=50)}, Wait(SeqId(1))),
    ({"leader": leader(1000, at=1000, arriving=(992,)), "known": tokens(1050, own=80)}, None),
    # Saves too little.
    ({"leader": leader(1000), "known": tokens(1050, own=50), "cached": 897}, None),
    ({"leader": leader(1000, at=900), "known": tokens(1050, own=50), "cached": 896}, Wait(SeqId(1), 960)),
    ({"leader": leader(63), "known": tokens(63)}, None),
    # The follower has more of it cached than the leader has computed: it is faster itself.
    ({"leader": leader(1000, at=64), "known": tokens(1050, own=50), "cached": 512}, None),
    ({"leader": leader(1000, at=512), "known": tokens(1050, own=50), "cached": 512}, Wait(SeqId(1), 960)),
    # Rank: nobody waits for who is behind; who ends is waited for by all, one step.
    ({"leader": leader(1000, rank=BEHIND), "known": tokens(1050, own=50)}, None),
    ({"leader": leader(1000, rank=None, at=500), "known": tokens(1050, own=50)}, None),
    ({"leader": leader(1000, rank=None, at=500, arriving=(500,)), "known": tokens(1050, own=50)},
     Wait(SeqId(1))),
])
def test_a_follower_waits_when_that_saves_more_than_it_costs(case: dict[str, object],
                                                             expected: Wait | None) -> None:
    assert wait_for(case["known"], case.get("cached", 0), FOLLOWER, [case["leader"]],  # type: ignore
                    stateful=True) == expected


def test_the_leader_that_saves_most_is_waited_for() -> None:
    several = [leader(300, seq=1), leader(900, seq=2), leader(900, seq=3), leader(500, seq=4)]
    assert wait_for(tokens(1000), 0, FOLLOWER, several, stateful=True) == Wait(SeqId(2), 896)


@pytest.mark.parametrize(("at", "arriving", "expected"), [
    (0, (), Wait(SeqId(1))), (990, (), Wait(SeqId(1))), (992, (), None), (992, (992,), Wait(SeqId(1))),
    (1000, (1000,), Wait(SeqId(1))),
])
def test_without_states_pages_are_waited_for_and_nothing_is_demanded(at: int, arriving: tuple[int, ...],
                                                                     expected: Wait | None) -> None:
    one = leader(1000, at=at, arriving=arriving)
    assert wait_for(tokens(1050, own=50), 0, FOLLOWER, [one], stateful=False) == expected
