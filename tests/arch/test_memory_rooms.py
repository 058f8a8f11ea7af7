"""The rooms of memory/: imports between them run one way, TYPE_CHECKING included.

ground (GROUND below)  <-  frames/  <-  prefix/  <-  the other files of the root
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.arch.rules import Source, imported_modules, weft_sources

GROUND = {"values", "prefix_store", "usage", "arena_work", "reservation"}
ROOMS = ("ground", "frames", "prefix", "root")


def room_of(module: str) -> str | None:
    """Return the room of a module below weft.memory; None for other modules."""
    parts = module.split(".")
    if parts[:2] != ["weft", "memory"] or len(parts) < 3:
        return None
    if parts[2] in ("frames", "prefix"):
        return parts[2]
    return "ground" if parts[2] in GROUND else "root"


def room_complaints(sources: Iterable[Source]) -> list[str]:
    """Return a complaint for each import that leads from a room into a higher one."""
    complaints = []
    for source in sources:
        room = room_of(source.module)
        if room is None:
            continue
        for line, module in imported_modules(source):
            target = room_of(module)
            if target is not None and ROOMS.index(target) > ROOMS.index(room):
                complaints.append(f"{source.path}:{line}: {room} imports {module}, which is in {target}")
    return complaints


def test_the_rooms_of_memory_import_one_way() -> None:
    sources = weft_sources()
    assert {room_of(source.module) for source in sources} >= set(ROOMS)
    assert room_complaints(sources) == []


def test_an_import_into_a_higher_room_is_a_complaint() -> None:
    guarded = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from weft.memory.prefix.tree import PrefixTree\n"
    )
    assert len(room_complaints([Source("src/weft/memory/frames/arena.py", guarded)])) == 1
    assert (
        len(
            room_complaints(
                [
                    Source("src/weft/memory/values.py", "from weft.memory.frames.arena import Arena\n"),
                    Source("src/weft/memory/prefix/cache.py", "from weft.memory.state import MemoryState\n"),
                ]
            )
        )
        == 2
    )
    assert not room_complaints(
        [
            Source("src/weft/memory/transaction.py", guarded),
            Source("src/weft/memory/prefix/cache.py", "from weft.memory.reservation import Lease\n"),
        ]
    )
