"""The router without memory."""

from __future__ import annotations

import pytest

from weft.router.least_loaded import LeastLoaded
from weft.router.protocol import ReplicaLoad, RoutedRequest

REQUEST = RoutedRequest("a", [1, 2, 3])


@pytest.mark.parametrize(("loads", "chosen"), [
    ([(0, 3, 10), (1, 2, 900)], 1),     # sequences before tokens
    ([(0, 2, 500), (1, 2, 400)], 1),    # then tokens
    ([(1, 2, 400), (4, 2, 400)], 1),    # then the number
    ([(3, 0, 0)], 3),
])
def test_the_replica_with_the_least_in_flight_is_chosen(loads: list[tuple[int, int, int]],
                                                        chosen: int) -> None:
    candidates = [ReplicaLoad(replica, sequences, tokens, rows=8) for replica, sequences, tokens in loads]
    assert LeastLoaded().choose(REQUEST, candidates) == chosen
