"""Processes of ranks that serve one checkpoint after the other: torch is imported once in each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.ranks.peers import Peers


@pytest.fixture(scope="package")
def two() -> Iterator[Peers]:
    peers = Peers(2, 30.0)
    yield peers
    peers.close()


@pytest.fixture(scope="package")
def four() -> Iterator[Peers]:
    peers = Peers(4, 30.0)
    yield peers
    peers.close()
