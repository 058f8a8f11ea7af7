"""Frames: the unit that changes hands between pages and slots.

    free, by the kind whose bytes they last held        claimed
    [never used]  [pages]  [slots]           <----->    a key of one pool's ``stacks`` (packing.py)

A free frame is in exactly one of the three stacks here. A claimed frame is a key of exactly one pool (law
L1). Nothing else records it: the stack of a free frame says what its bytes are, so law L6 needs no flag. A
frame from the stack of another kind, or one never used, must be zeroed before first use. A frame of one's own
kind need not.

Order: own kind first (nothing to zero), then never used, then the other kind. Stacks are last in, first out:
a frame just released is warm.

Rejected: one free list with a ``last_kind`` per frame (zeroes more, and is a status beside a membership);
zeroing on release (pays for frames that go back to their own kind, which is nearly all of them).
"""

from __future__ import annotations

from weft.memory.values import FrameClaim, FrameKind
from weft.units import FrameId

_PREFERENCE: dict[FrameKind, tuple[FrameKind | None, ...]] = {
    FrameKind.PAGES: (FrameKind.PAGES, None, FrameKind.SLOTS),
    FrameKind.SLOTS: (FrameKind.SLOTS, None, FrameKind.PAGES),
}


class Arena:
    """The free frames. Only a commit calls ``claim`` and ``release``; ``forget`` runs between steps."""

    __slots__ = ("frame_count", "free")

    def __init__(self, frame_count: int) -> None:
        self.frame_count = frame_count
        self.free: dict[FrameKind | None, list[FrameId]] = _never_used(frame_count)

    @property
    def free_count(self) -> int:
        never_used, pages, slots = self.free.values()
        return len(never_used) + len(pages) + len(slots)

    def claim(self, claim: FrameClaim) -> None:
        frame = self.free[claim.held].pop()
        assert frame == claim.frame, f"drafted frame {claim.frame} but frame {frame} is next"

    def release(self, frame: FrameId, kind: FrameKind) -> None:
        """``frame`` is empty, and its bytes are of ``kind``."""
        self.free[kind].append(frame)

    def forget(self) -> None:
        """The bytes of the arena are new: no frame was ever used."""
        assert self.free_count == self.frame_count, "a frame is in use while the arena is replaced"
        self.free = _never_used(self.frame_count)


def _never_used(frame_count: int) -> dict[FrameKind | None, list[FrameId]]:
    untouched = [FrameId(frame) for frame in reversed(range(frame_count))]
    return {None: untouched, FrameKind.PAGES: [], FrameKind.SLOTS: []}


class FrameWalk:
    """The frames that claims would take, in order, without taking them: a depth into each stack."""

    __slots__ = ("_depth", "_free", "claims", "left")

    def __init__(self, arena: Arena) -> None:
        self._free = arena.free
        self._depth: dict[FrameKind | None, int] = dict.fromkeys(arena.free, 0)
        self.left = arena.free_count
        self.claims: list[FrameClaim] = []

    def fork(self) -> FrameWalk:
        """A walk that continues from here and leaves this one alone; it has no claims yet."""
        fork = FrameWalk.__new__(FrameWalk)
        fork._free, fork._depth, fork.left, fork.claims = self._free, dict(self._depth), self.left, []
        return fork

    def claim(self, kind: FrameKind) -> FrameId:
        """The next free frame for ``kind``; the caller has checked that ``left`` is not 0."""
        for held in _PREFERENCE[kind]:
            stack, depth = self._free[held], self._depth[held]
            if depth < len(stack):
                frame = stack[-1 - depth]
                self._depth[held] = depth + 1
                self.left -= 1
                self.claims.append(FrameClaim(frame, kind, held))
                return frame
        raise AssertionError("no free frame is left to this draft")
