"""What is cached is compressed as soon as it can be, where the rules of a server would keep it as it is."""

from __future__ import annotations

from typing import Any

import pytest

from weft.assemble import room
from weft.memory.frames.plan import ArenaPlan, plan_arena, with_compressed_kv, with_compression
from weft.memory.relief import Relief
from weft.memory.reservation import Moves
from weft.memory.values import Eviction
from weft.spec import CompressedKvName, ModelSpec


def plan_small_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines plan for compressed states even where that saves little, as in tiny models."""

    def planned(spec: ModelSpec, memory_bytes: int, *, compress: bool = False,
                compress_kv: CompressedKvName = "int8", **more: Any) -> ArenaPlan:
        arena = plan_arena(spec, memory_bytes, **more)
        return with_compressed_kv(with_compression(arena, spec), compress_kv) if compress else arena
    monkeypatch.setattr(room, "plan_arena", planned)


def compress_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as they are kept, as far as there are pages."""
    choose = Relief.choose

    def choosing(relief: Relief) -> tuple[list[Eviction], Moves]:
        chosen, moves = choose(relief)
        if chosen or moves or relief._flushed or not relief._memory.plan.compressed_pages:
            return chosen, moves
        busy = relief._opened_on | relief._sharing.visited
        room = relief._page_walk.room // relief._memory.plan.compressed_pages
        nodes = [node for node in relief._memory.cache.order.in_slots if node not in busy]
        return [Eviction(node, "slot") for node in nodes[:room]], moves
    monkeypatch.setattr(Relief, "choose", choosing)


def compress_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as nobody reads it, if that makes a page free."""
    choose = Relief.choose

    def choosing(relief: Relief) -> tuple[list[Eviction], Moves]:
        chosen, moves = choose(relief)
        if chosen or moves or relief._flushed:
            return chosen, moves
        kv, in_use = relief._memory.cache.compressed_kv, relief._nodes_in_use()
        return [Eviction(name, "pages") for name, node in kv.idle.items()
                if name not in in_use and kv.gain(node) and not node.bare], moves
    monkeypatch.setattr(Relief, "choose", choosing)


def compress_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as no sequence reads it, KV and states by turns."""
    choose = Relief.choose

    def choosing(relief: Relief) -> tuple[list[Eviction], Moves]:
        chosen, moves = choose(relief)
        if chosen or moves or relief._flushed:
            return chosen, moves
        cache, plan, in_use = relief._memory.cache, relief._memory.plan, relief._nodes_in_use()
        kv = [Eviction(name, "pages") for name, node in cache.compressed_kv.idle.items()
              if name not in in_use and cache.compressed_kv.gain(node) and not node.bare]
        if kv or not plan.compressed_pages:
            return kv, moves
        room = relief._page_walk.room // plan.compressed_pages
        return [Eviction(node, "slot") for node in cache.order.in_slots if node not in in_use][:room], moves
    monkeypatch.setattr(Relief, "choose", choosing)
