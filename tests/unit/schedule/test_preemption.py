import pytest

from weft.schedule.admission import headroom_pages, victim_count

S = True


@pytest.mark.parametrize(
    ("pages", "short", "freed", "victims"),
    [
        # Nobody short; or what finished sequences free is enough.
        ([3, 3, 3], [0, 0, 0], 0, 0),
        ([3, 3, 3], [S, 0, 0], 1, 0),
        ([3, 3, 3], [S, S, 0], 2, 0),
        # The worst gives way, and no more than needed.
        ([3, 3, 3], [S, 0, 0], 0, 1),
        ([3, 3, 3], [S, S, 0], 0, 1),
        ([3, 3, 1], [S, S, 0], 0, 2),
        ([3, 3, 1], [S, S, 0], 1, 1),
        # The worst is short itself: it waits, and goes only for another.
        ([3, 3, 3], [0, 0, S], 0, 0),
        ([3, 1, 1], [S, 0, S], 0, 1),
        ([9, 1, 1], [S, S, S], 0, 2),
        ([9, 1, 1, 1, 1], [S, S, S, S, S], 0, 3),
        # A victim that was short claims no page any more, whatever others of its rank from the top do.
        ([9, 1, 1, 0, 1], [S, 0, 0, S, 0], 0, 2),
        # Alone: nobody to take from, nobody is taken.
        ([3], [S], 0, 0),
    ],
)
def test_just_enough_of_the_worst_give_way(pages: list[int], short: list[bool], freed: int, victims: int) -> None:
    assert victim_count(pages, [bool(one) for one in short], freed) == victims


def test_the_best_is_never_a_victim() -> None:
    for length in range(1, 7):
        for mask in range(2**length):
            short = [bool(mask >> at & 1) for at in range(length)]
            assert victim_count([1] * length, short, 0) < length


def test_a_sequence_returns_to_room_to_spare_unless_it_is_alone() -> None:
    assert headroom_pages(0, 0) == headroom_pages(0, 9) == 0
    assert headroom_pages(3, 0) == 3
    assert headroom_pages(3, 1) == 6
    assert headroom_pages(3, 9) == 12
