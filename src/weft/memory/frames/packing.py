"""Items of one size packed into frames: the shared part of pages and slots.

    stacks    frame -> its free items, next one last       (a claimed frame is a key; full: empty stack)
    by_used   [used] -> frames with ``used`` items held    (1 .. per_frame - 1: the partly used ones)
    occupied  bit u is set if by_used[u] is not empty      (the fullest partly used frame in O(1))

Items come from the fullest partly used frame, so that the emptiest ones drain and their frames become free
for either kind. One place decides the order: ``Walk``, which only reads. ``pop`` takes exactly the items it
is given and asserts that they lie on top. So there is no predictor to agree with (law L2).

Item i is in frame i // per_frame, and nothing stores that. per_frame = 0 is a kind that the model does not
have: no frame is ever claimed, no item exists.

Rejected: a heap of frames (lazy deletion, and the k-th best cannot be read without popping); one free list of
all items (frames never drain); a bitmap per frame (finding a bit costs more than a pop).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Generic, TypeVar, cast

from weft.memory.frames.arena import FrameWalk
from weft.memory.values import FrameKind
from weft.units import FrameId

Item = TypeVar("Item", bound=int)


class Packing(Generic[Item]):
    """``held_count`` items are held, ``free_count`` are free inside claimed frames."""

    __slots__ = ("by_used", "free_count", "held_count", "kind", "occupied", "per_frame", "stacks")

    def __init__(self, kind: FrameKind, per_frame: int) -> None:
        self.kind = kind
        self.per_frame = per_frame
        self.stacks: dict[FrameId, list[Item]] = {}
        self.by_used: list[dict[FrameId, None]] = [{} for _ in range(per_frame)]  # dict: an ordered set
        self.occupied = 0
        self.held_count = 0
        self.free_count = 0

    def items_of(self, frame: FrameId) -> list[Item]:
        """All items of ``frame`` as a stack: the lowest on top."""
        first = frame * self.per_frame
        return cast("list[Item]", list(range(first + self.per_frame - 1, first - 1, -1)))

    def add(self, frame: FrameId) -> None:
        """An empty frame joins; the commit that calls this takes items of it right after."""
        self.stacks[frame] = self.items_of(frame)
        self.free_count += self.per_frame
        self._enter(frame, 0)

    def pop(self, items: Sequence[Item]) -> None:
        """Take ``items``, which lie on top of their frames' stacks in this order."""
        for frame, group in groupby(items, key=self._frame_of):
            popped = list(group)
            stack = self.stacks[frame]
            count = len(popped)
            self._leave(frame, self.per_frame - len(stack))
            assert stack[-count:] == popped[::-1], f"drafted {popped} of frame {frame}, which differ on top"
            del stack[-count:]
            self._enter(frame, self.per_frame - len(stack))
            self.held_count += count
            self.free_count -= count

    def push(self, items: Sequence[Item]) -> list[FrameId]:
        """Take ``items`` back; returns the frames that are empty now and have left this packing."""
        emptied = []
        for frame, group in groupby(items, key=self._frame_of):
            freed = list(group)
            stack = self.stacks[frame]
            self._leave(frame, self.per_frame - len(stack))
            stack.extend(reversed(freed))
            self.held_count -= len(freed)
            self.free_count += len(freed)
            if len(stack) == self.per_frame:
                del self.stacks[frame]
                self.free_count -= self.per_frame
                emptied.append(frame)
            else:
                self._enter(frame, self.per_frame - len(stack))
        return emptied

    def fullest_first(self) -> Iterator[list[Item]]:
        """Stacks of the partly used frames, the fullest frame first."""
        left = self.occupied
        while left:
            used = left.bit_length() - 1
            for frame in self.by_used[used]:
                yield self.stacks[frame]
            left ^= 1 << used

    def emptiest_first(self) -> Iterator[FrameId]:
        """The partly used frames, in the opposite order."""
        left = self.occupied
        while left:
            used = (left & -left).bit_length() - 1
            yield from reversed(self.by_used[used])
            left ^= 1 << used

    def _frame_of(self, item: Item) -> FrameId:
        return FrameId(item // self.per_frame)

    def _enter(self, frame: FrameId, used: int) -> None:
        if used < self.per_frame:
            self.by_used[used][frame] = None
            self.occupied |= 1 << used

    def _leave(self, frame: FrameId, used: int) -> None:
        if used < self.per_frame:
            bucket = self.by_used[used]
            del bucket[frame]
            if not bucket:
                self.occupied ^= 1 << used


class Walk(Generic[Item]):
    """The items that a draft would take, in order, without taking them.

    ``items`` are those taken so far. ``left`` counts the free items ahead, in partly used frames and in
    frames that this walk has claimed. ``room`` adds the frames that are free for either kind. Both walks of a
    draft share its ``FrameWalk``.
    """

    __slots__ = ("_ahead", "_depth", "_frames", "_packing", "_stack", "items", "left")

    def __init__(self, packing: Packing[Item], frames: FrameWalk) -> None:
        self._packing = packing
        self._frames = frames
        self._ahead = packing.fullest_first()
        self._stack: list[Item] = []
        self._depth = 0
        self.left = packing.free_count
        self.items: list[Item] = []

    @property
    def room(self) -> int:
        return self.left + self._frames.left * self._packing.per_frame

    def take(self, count: int) -> list[Item]:
        """The next ``count`` items; the caller has checked ``room``."""
        if count == 1 and self._depth < len(self._stack):   # a decode that crosses into its next page
            self._depth += 1
            self.left -= 1
            self.items.append(self._stack[-self._depth])
            return [self._stack[-self._depth]]
        items: list[Item] = []
        while len(items) < count:
            end = len(self._stack) - self._depth
            if not end:
                self._advance()
                continue
            chunk = self._stack[max(0, end - (count - len(items))):end]
            chunk.reverse()
            self._depth += len(chunk)
            self.left -= len(chunk)
            items += chunk
        self.items += items
        return items

    def ahead(self) -> Iterator[Item]:
        """The ``left`` items that ``take`` would give next without claiming a frame."""
        passed = len(self.items)
        claimed = (self._packing.items_of(claim.frame) for claim in self._frames.claims
                   if claim.kind is self._packing.kind)
        for stack in chain(self._packing.fullest_first(), claimed):
            yield from reversed(stack[:max(0, len(stack) - passed)])
            passed = max(0, passed - len(stack))

    def items_of(self, frame: FrameId) -> list[Item]:
        return self._packing.items_of(frame)

    def _advance(self) -> None:
        stack = next(self._ahead, None)
        if stack is None:
            stack = self._packing.items_of(self._frames.claim(self._packing.kind))
            self.left += self._packing.per_frame
        self._stack = stack
        self._depth = 0
