import pytest

from weft.schedule.budget import Budget, step_tokens_bound


@pytest.mark.parametrize(
    ("left", "start", "end", "stops"),
    [
        (256, 0, 100, 100),  # reaches the end: no grid
        (100, 0, 100, 100),
        (99, 0, 100, 64),  # does not: back to the grid
        (127, 0, 500, 64),
        (128, 0, 500, 128),
        (130, 64, 500, 192),
        (63, 64, 500, 64),  # less than a chunk is no run
        (63, 64, 127, 127),
    ],
)
def test_a_prefill_that_does_not_end_stops_on_the_grid(left: int, start: int, end: int, stops: int) -> None:
    budget = Budget(left, 0)
    budget.left = left
    assert budget.chunk_end(start, end) == stops


def test_decodes_never_starve_a_prefill() -> None:
    assert Budget(100, 100).chunk_end(0, 1000) == 64
    assert Budget(16, 3).chunk_end(64, 1000) == 128


@pytest.mark.parametrize(("asked", "rows", "bound"), [(1024, 256, 1024), (100, 90, 154), (1, 4, 68)])
def test_a_step_is_never_longer_than_its_bound(asked: int, rows: int, bound: int) -> None:
    assert step_tokens_bound(asked, rows) == bound
    for decodes in range(rows + 1):
        assert decodes + Budget(asked, decodes).left <= bound
