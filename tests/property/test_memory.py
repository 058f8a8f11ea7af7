"""Memory beside the dull model: as it is, and broken in known ways, where the comparison must fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.memory_machine import MemoryMachine, Pair, walk
from weft.memory import state
from weft.memory.frames import arena
from weft.memory.frames.arena import Arena, Packing, Pages, Slots, Walk
from weft.memory.reservation import Reservation
from weft.memory.state import MemoryState
from weft.memory.transaction import Transaction
from weft.memory.values import FrameClaim, FrameKind
from weft.units import FrameId, PageId

QUICK = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


WALKS = 250


def walk_all(seeds: range) -> list[Pair]:
    return [walk(seed) for seed in seeds]


def test_memory_does_what_the_dull_model_says() -> None:
    run_state_machine_as_test(MemoryMachine, settings=QUICK)


@pytest.mark.parametrize("tenth", range(10))
def test_memory_does_what_the_dull_model_says_on_long_walks(tenth: int) -> None:
    walk_all(range(tenth * WALKS // 10, (tenth + 1) * WALKS // 10))


def test_the_walks_go_where_it_matters() -> None:
    """What is never met is never checked: kinds change both ways, frames come back to their own kind,
    verbs fail for want of memory, and transactions that took something are dropped."""
    pairs = walk_all(range(WALKS // 5))
    claims = Counter(
        (claim.former_kind, claim.kind)
        for pair in pairs
        for _, reservation in pair.shelf
        for claim in reservation.frames
    )
    for held in (None, *FrameKind):
        for kind in FrameKind:
            assert claims[held, kind] >= 10, f"frames of {held} became {kind} {claims[held, kind]} times"
    assert sum(pair.refused for pair in pairs) >= 100
    assert sum(pair.dropped for pair in pairs) >= 20


Break = Callable[[pytest.MonkeyPatch], None]


def a_page_is_leaked_on_close(patch: pytest.MonkeyPatch) -> None:
    drop = Pages.drop
    patch.setattr(Pages, "drop", lambda self, items: drop(self, items[:-1]))


def a_transaction_writes_the_state(patch: pytest.MonkeyPatch) -> None:
    take = Walk.take

    def taking(self: Walk[PageId], count: int) -> list[PageId]:
        items = take(self, count)
        self._packing.held_count += 0 if not items else 1
        return items

    patch.setattr(Walk, "take", taking)


def the_epoch_never_moves(patch: pytest.MonkeyPatch) -> None:
    drop = Slots.drop

    def dropping(self: Slots, slot: Any, epoch: int) -> list[FrameId]:
        frames = drop(self, slot, epoch)
        self.epochs[slot] = epoch
        return frames

    patch.setattr(Slots, "drop", dropping)


def nothing_is_ever_zeroed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrameClaim, "needs_zero", property(lambda self: False))


def only_untouched_frames_are_zeroed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrameClaim, "needs_zero", property(lambda self: self.former_kind is None))


def every_claim_is_zeroed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrameClaim, "needs_zero", property(lambda self: True))


def the_emptiest_frame_comes_first(patch: pytest.MonkeyPatch) -> None:
    fullest = Packing.fullest_first
    patch.setattr(Packing, "fullest_first", lambda self: iter(list(fullest(self))[::-1]))


def the_other_kinds_frames_come_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arena, "_PREFERENCE", {kind: order[::-1] for kind, order in arena._PREFERENCE.items()})


def room_is_one_page_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Walk, "room", property(lambda self: self.left + self._frames.left * self._packing.per_frame - 1))


def headroom_is_ignored(patch: pytest.MonkeyPatch) -> None:
    opening = Transaction.open
    patch.setattr(
        Transaction, "open", lambda self, seq, match, tokens, headroom_pages=0: opening(self, seq, match, tokens)
    )


def a_failed_open_keeps_its_slot(patch: pytest.MonkeyPatch) -> None:
    opening = Transaction.open

    def open(self: Transaction, *args: Any, **more: Any) -> bool:
        done = opening(self, *args, **more)
        if not done and self._slot_walk.left:
            self._slot_walk.take(1)
        return done

    patch.setattr(Transaction, "open", open)


def versions_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    applying = state.apply

    def apply(memory: MemoryState, reservation: Reservation) -> None:
        applying(memory, reservation)
        memory.version = 0

    patch.setattr("weft.memory.memory.apply", apply)


def an_emptied_frame_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "_release", lambda arena, frames, kind: None)


def a_frame_is_released_as_the_other_kind(patch: pytest.MonkeyPatch) -> None:
    other = {FrameKind.PAGES: FrameKind.SLOTS, FrameKind.SLOTS: FrameKind.PAGES}
    patch.setattr(Arena, "release", lambda self, frame, kind: self.free[other[kind]].append(frame))


BROKEN: list[Break] = [
    a_page_is_leaked_on_close,
    a_transaction_writes_the_state,
    the_epoch_never_moves,
    nothing_is_ever_zeroed,
    only_untouched_frames_are_zeroed,
    every_claim_is_zeroed,
    the_emptiest_frame_comes_first,
    the_other_kinds_frames_come_first,
    room_is_one_page_too_much,
    headroom_is_ignored,
    a_failed_open_keeps_its_slot,
    versions_are_not_counted,
    an_emptied_frame_is_kept,
    a_frame_is_released_as_the_other_kind,
]


@pytest.mark.parametrize("broken", BROKEN, ids=[b.__name__ for b in BROKEN])
def test_the_model_notices_when(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, pytest.fail.Exception)):
        walk_all(range(WALKS))
