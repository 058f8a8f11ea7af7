"""The grid of kept states is a number: nothing of the schedule believes that it is 64."""

from __future__ import annotations

import pytest

from tests.unit.schedule.test_prefix_sharing import AHEAD, WAITER, tokens
from weft.schedule.prefix_sharing import PrefixProducer, PrefixWait, position_in_flight, wait_for
from weft.schedule.snapshots import AUTO, PROMPT, SnapshotPolicy, near_end_position, on_grid, wanted_positions
from weft.units import SeqId


@pytest.mark.parametrize("grid", [16, 64])
def test_every_wish_lies_on_the_grid(grid: int) -> None:
    found = wanted_positions(
        AUTO,
        known_tokens=3001,
        start=0,
        boundaries=[77, 1000],
        marks=[511],
        kv_tokens=700,
        insurance_first=512,
        grid=grid,
    )
    assert found
    assert all(position % grid == 0 for position in found)
    assert (992 in found) == (grid == 16)
    assert (960 in found) == (grid == 64)


def test_a_finer_grid_keeps_the_end_of_a_prompt_nearer_to_it() -> None:
    assert wanted_positions(PROMPT, known_tokens=1050, start=0, grid=16) == [1040]
    assert wanted_positions(PROMPT, known_tokens=1050, start=0) == [1024]
    assert wanted_positions(SnapshotPolicy(near_end=True), known_tokens=60, start=0, grid=16) == [48]
    assert wanted_positions(SnapshotPolicy(near_end=True), known_tokens=60, start=0) == []


def test_the_tail_of_a_long_prompt_does_not_depend_on_it() -> None:
    for known in (2000, 10_000, 100_000):
        assert near_end_position(known, 16) == near_end_position(known)


def test_a_follower_waits_for_the_last_common_position_of_its_grid() -> None:
    producer = PrefixProducer(SeqId(1), "", AHEAD, tokens(1050, own=50), 0)
    known = tokens(1050)
    expected = PrefixWait(SeqId(1), on_grid(1000, 16))
    assert wait_for(known, 0, WAITER, [producer], stateful=True, grid=16) == expected
    assert wait_for(known, 0, WAITER, [producer], stateful=True) == PrefixWait(SeqId(1), 960)
    assert position_in_flight(known, 0, [producer], stateful=True, grid=16) == 992
