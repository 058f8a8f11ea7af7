"""Adapters in memory: which of them may go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.adapters import AdapterPool
from weft.errors import RequestError


def test_an_adapter_goes_unless_a_live_sequence_has_it() -> None:
    removed: list[str] = []
    host: Any = SimpleNamespace(
        install_adapter=lambda loaded: None, remove_adapter=lambda loaded: removed.append(loaded.adapter.digest)
    )
    running = {"one"}
    pool = AdapterPool(host, budget_bytes=100, rank_max=8, running=lambda: running)
    for digest in ("one", "two"):
        loaded: Any = SimpleNamespace(adapter=SimpleNamespace(digest=digest), held_bytes=40)
        assert pool.keep(loaded)
    assert pool.drop("never loaded")
    assert not pool.drop("one")
    assert pool.drop("two")
    assert (removed, pool.held_bytes) == (["two"], 40)
    running.clear()
    assert pool.drop("one")
    assert (removed, pool.held_bytes) == (["two", "one"], 0)


def pool_of(removed: list[str], running: set[str]) -> AdapterPool:
    host: Any = SimpleNamespace(
        install_adapter=lambda loaded: None,
        remove_adapter=lambda loaded: removed.append(loaded.adapter.digest),
        read_adapter=lambda adapter: SimpleNamespace(adapter=adapter, held_bytes=adapter.bytes),
    )
    return AdapterPool(host, budget_bytes=100, rank_max=8, running=lambda: running)


def loaded(digest: str, held_bytes: int) -> Any:
    return SimpleNamespace(adapter=SimpleNamespace(digest=digest), held_bytes=held_bytes)


def test_an_adapter_finds_room_among_those_that_nobody_uses_and_else_drops_none() -> None:
    removed: list[str] = []
    pool = pool_of(removed, {"running"})
    assert pool.keep(loaded("running", 40))
    assert pool.keep(loaded("idle", 40))
    assert not pool.keep(loaded("large", 70)), "all that is idle would not be enough"
    assert (removed, pool.held_bytes) == ([], 80)
    assert pool.keep(loaded("fits", 20))
    assert pool.keep(loaded("next", 60))
    assert (sorted(removed), pool.held_bytes) == (["fits", "idle"], 100)


def test_the_limits_of_an_adapter_are_what_it_may_have_at_most() -> None:
    pool = pool_of([], set())

    def adapter(rank: int, held_bytes: int) -> Any:
        return SimpleNamespace(name="a", digest="a", rank=rank, bytes=held_bytes)

    assert pool.read(adapter(8, 100)).held_bytes == 100
    with pytest.raises(RequestError, match="has rank 9; the limit is 8"):
        pool.read(adapter(9, 100))
    with pytest.raises(RequestError, match="takes 101 B"):
        pool.read(adapter(8, 101))
