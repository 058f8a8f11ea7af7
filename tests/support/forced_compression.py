"""Patches that compress cached data as soon as possible, in cases where a server would keep it exact."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest

from weft.assemble import room
from weft.memory.frames.plan import ArenaPlan, plan_arena, with_compressed_kv, with_compression
from weft.memory.relief import Relief
from weft.memory.reservation import Moves
from weft.memory.values import Eviction
from weft.spec import CompressedKvName, ModelSpec


def plan_small_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines plan for compressed states even if that saves little, as in tiny models."""

    def planned(
        spec: ModelSpec,
        memory_bytes: int,
        *,
        compress: bool = False,
        compress_kv: CompressedKvName = "int8",
        **more: Any,
    ) -> ArenaPlan:
        arena = plan_arena(spec, memory_bytes, **more)
        return with_compressed_kv(with_compression(arena, spec), compress_kv) if compress else arena

    monkeypatch.setattr(room, "plan_arena", planned)


def compress_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress states as soon as they are cached, while pages are left."""
    _choose_too(monkeypatch, lambda relief: _states(relief, relief._opened_on | relief._sharing.visited))


def compress_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress KV as soon as no sequence reads it, if that frees a page."""
    _choose_too(monkeypatch, _kv)


def compress_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress all cached data as soon as no sequence reads it, KV and states by turns."""
    _choose_too(monkeypatch, lambda relief: _kv(relief) or _states(relief, relief._nodes_in_use()))


def _choose_too(monkeypatch: pytest.MonkeyPatch, choose_too: Callable[[Relief], list[Eviction]]) -> None:
    """Evict the choice of ``choose_too`` when the usual rules choose nothing."""
    choose = Relief.choose

    def choosing(relief: Relief) -> tuple[list[Eviction], Moves]:
        chosen, moves = choose(relief)
        return (chosen if chosen or moves or relief._flushed else choose_too(relief)), moves

    monkeypatch.setattr(Relief, "choose", choosing)


def _kv(relief: Relief) -> list[Eviction]:
    kv, in_use = relief._memory.cache.compressed_kv, relief._nodes_in_use()
    return [
        Eviction(name, "pages")
        for name, node in kv.idle.items()
        if name not in in_use and kv.gain(node) and not node.bare
    ]


def _states(relief: Relief, in_use: Container[int]) -> list[Eviction]:
    plan = relief._memory.plan
    if not plan.compressed_pages:
        return []
    nodes = [node for node in relief._memory.cache.order.in_slots if node not in in_use]
    return [Eviction(node, "slot") for node in nodes[: relief._page_walk.room // plan.compressed_pages]]
