"""Adapters in memory: which of them may go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.engine.adapters import AdapterPool


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
