"""Zeros for the keys of the model's own head: in pages that it may read, never over other contents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.memory.arena_work import NO_WORK, ArenaWork, CompressState, PageCopy
from weft.memory.values import FrameClaim, FrameKind, NodeId
from weft.runner.mtp import HeadPages
from weft.units import FrameId, PageId, SlotId

PER_FRAME = 4


def admit(
    head: HeadPages, *pages: int, work: ArenaWork = NO_WORK, frames: tuple[FrameClaim, ...] = (), runs: bool = False
) -> list[int]:
    reservation = SimpleNamespace(pages=pages, frames=frames)
    plan: Any = SimpleNamespace(reservation=reservation, arena_work=work, mtp_drafts=1 if runs else None)
    return head.admit(plan)


def claim(frame: int, kind: FrameKind) -> tuple[FrameClaim, ...]:
    return (FrameClaim(FrameId(frame), kind, FrameKind.PAGES),)


def copies(*pairs: tuple[int, int]) -> ArenaWork:
    return ArenaWork(page_copies=tuple(PageCopy(PageId(src), PageId(dst)) for src, dst in pairs))


def test_pages_wait_for_the_head_and_get_zeros_once() -> None:
    head = HeadPages(PER_FRAME)
    assert admit(head, 0, 1) == admit(head) == admit(head, 1, 2) == []
    assert admit(head, 5, runs=True) == [0, 1, 2, 5]
    assert admit(head, runs=True) == []


def test_zeros_do_not_fall_into_states_of_a_frame_that_changed_kind() -> None:
    head = HeadPages(PER_FRAME)
    admit(head, 0, 3, 4)
    admit(head, frames=claim(0, FrameKind.SLOTS))
    assert admit(head, runs=True) == [4]


def test_a_claimed_frame_of_pages_waits_again_for_those_handed_out() -> None:
    head = HeadPages(PER_FRAME)
    admit(head, 0, 3, 4)
    assert admit(head, 1, frames=claim(0, FrameKind.PAGES), runs=True) == [1, 4]


def test_zeros_do_not_fall_into_a_compressed_state() -> None:
    """Neither where the page is new, nor where it waited since an earlier sequence."""
    head = HeadPages(PER_FRAME)
    admit(head, 1)
    work = ArenaWork(state_compressions=(CompressState(NodeId(0), SlotId(0), (PageId(1), PageId(2))),))
    assert admit(head, 1, 2, 3, work=work) == []
    assert admit(head, runs=True) == [3]


def test_a_copy_waits_as_its_source_does() -> None:
    head = HeadPages(PER_FRAME)
    admit(head, 0)
    assert admit(head, 8, 9, work=copies((0, 8), (1, 9))) == []  # page 1 has keys
    assert admit(head, runs=True) == [0, 8]


def test_the_source_of_a_copy_is_zero_before_it_is_copied() -> None:
    head = HeadPages(PER_FRAME)
    admit(head, 0)
    assert 0 in admit(head, 8, work=copies((0, 8)), runs=True)
    assert admit(head, runs=True) == []
