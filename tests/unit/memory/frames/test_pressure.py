"""Short, or lying badly: the numbers that tell them apart, as tables."""

from __future__ import annotations

import pytest

from weft.memory.prefix.eviction import UNMEETABLE, Demand, Room


@pytest.mark.parametrize(
    ("room", "wanted", "short"),
    [
        (Room(3, 1, 0, 4, 2), (3, 1), (0, 0)),
        (Room(3, 1, 0, 4, 2), (4, 2), (1, 1)),
        (Room(0, 0, 2, 4, 2), (4, 2), (0, 0)),  # a frame for each
        (Room(0, 0, 1, 4, 2), (4, 2), (4, 0)),  # slots are given first
        (Room(0, 0, 1, 4, 2), (0, 3), (0, 1)),
        (Room(5, 0, 0, 4, 0), (6, 9), (1, 0)),  # a kind that is not there is never short
        (Room(0, 1, 0, 0, 2), (9, 2), (0, 1)),
    ],
)
def test_what_is_short(room: Room, wanted: tuple[int, int], short: tuple[int, int]) -> None:
    assert room.short(*wanted) == short


@pytest.mark.parametrize(
    ("room", "wanted", "frames"),
    [
        (Room(4, 0, 0, 4, 2), (0, 1), (1, 0)),  # four holes are a frame
        (Room(3, 0, 0, 4, 2), (0, 1), (0, 0)),
        (Room(4, 0, 0, 4, 2), (1, 1), (0, 0)),  # but for what is wanted of them
        (Room(5, 0, 0, 4, 2), (1, 1), (1, 0)),
        (Room(9, 0, 0, 4, 2), (0, 3), (2, 0)),
        (Room(9, 0, 1, 4, 2), (0, 3), (1, 0)),  # one is free
        (Room(0, 5, 0, 4, 2), (3, 0), (0, 1)),
        (Room(0, 5, 0, 4, 2), (5, 0), (0, 2)),
        (Room(0, 5, 0, 4, 2), (9, 2), (0, 1)),  # as far as there are holes to spare
        (Room(0, 0, 0, 4, 1), (3, 0), (0, 0)),  # no hole of either kind
        (Room(9, 9, 0, 4, 2), (3, 2), (0, 0)),  # nothing is short
        (Room(9, 0, 0, 4, 0), (20, 0), (0, 0)),  # one kind only
    ],
)
def test_which_frames_to_empty(room: Room, wanted: tuple[int, int], frames: tuple[int, int]) -> None:
    assert room.frames_to_empty(*wanted) == frames


@pytest.mark.parametrize(
    ("demand", "freed", "met"),
    [
        (Demand(3, 4, 2, 8, 2), (0, 0), True),
        (Demand(3, 4, 2, 9, 2), (0, 0), False),
        (Demand(3, 4, 2, 9, 2), (1, 0), True),
        (Demand(3, 4, 2, 9, 2), (0, 1), False),  # half a frame of slots is no frame
        (Demand(3, 4, 2, 9, 2), (0, 2), True),
        (Demand(3, 4, 0, 12, 0), (0, 0), True),
        (Demand(3, 0, 2, 0, 7), (0, 0), False),
        (Demand(3, 0, 2, 0, 7), (0, 1), True),
        (Demand(1, 4, 2, 0, 4), (9, 0), False),  # pages that go do not make room for ever
    ],
)
def test_what_fits_when_everything_is_packed(demand: Demand, freed: tuple[int, int], met: bool) -> None:
    assert demand.met(*freed) == met
    assert not UNMEETABLE.met(*freed)


@pytest.mark.parametrize(
    ("pages_freed", "slots_freed", "missing"), [(0, 0, 3), (2, 0, 1), (5, 0, 0), (0, 1, 3), (0, 2, 0)]
)
def test_pages_that_are_missing_still(pages_freed: int, slots_freed: int, missing: int) -> None:
    assert Demand(4, 4, 2, 11, 4).pages_missing(pages_freed, slots_freed) == missing


@pytest.mark.parametrize(("slots", "freed", "to_go"), [(4, 0, 4), (5, 0, 1), (5, 1, 4), (7, 1, 2), (1, 0, 1)])
def test_slots_until_they_need_a_frame_less(slots: int, freed: int, to_go: int) -> None:
    assert Demand(9, 4, 4, 0, slots).slots_to_a_frame(freed) == to_go
    assert Demand(9, 4, 0, 0, 0).slots_to_a_frame(freed) == 1
