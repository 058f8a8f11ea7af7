"""Processes of ranks that serve one checkpoint after the other: torch is imported once in each.

four     ranks 1, 2 and 3, started when a test first needs them
two      rank 1 of the same processes
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.ranks.peers import Peer, Peers

TIMEOUT_S = 30.0


class WidenedPeers(Peers):
    """``size`` ranks that begin with those of ``narrow``."""

    def __init__(self, narrow: Peers, size: int) -> None:
        super().__init__(1, narrow.timeout_s)
        self.size = size
        self.added = [Peer(rank) for rank in range(narrow.size, size)]
        for peer in self.added:
            peer.limit_sends(narrow.timeout_s)
        self.ranks = [*narrow.ranks, *self.added]

    def close(self) -> None:
        self.ranks = self.added
        super().close()


@pytest.fixture(scope="package")
def two() -> Iterator[Peers]:
    peers = Peers(2, TIMEOUT_S)
    yield peers
    peers.close()


@pytest.fixture(scope="package")
def four(two: Peers) -> Iterator[Peers]:
    peers = WidenedPeers(two, 4)
    yield peers
    peers.close()
