"""The records of frames, pages and slots: which are free, and the owners of the others.

    free frames, by the kind whose bytes they last held        claimed
    [never used]  [pages]  [slots]                   <----->   a key of one pool's ``stacks``

    stacks    frame -> its free items, next one last       (a claimed frame is a key; full: empty stack)
    by_used   [used] -> frames with ``used`` items held    (1 .. per_frame - 1: the partly used ones)
    occupied  bit u is set if by_used[u] is not empty      (the fullest partly used frame in O(1))

    owner     FREE = 0                   free
              seq + 1                    the lease of a sequence
              -1 - id                    the prefix tree: an edge for a page, a node for a slot
              COMPRESSED_KV - id         the prefix tree: a node, for a page of its compressed KV
              COMPRESSED_STATE - id      the prefix tree: a node, for a page of its compressed state

**Frames** change hands between pages and slots. A free frame is in exactly one of three stacks, a claimed one is a key
of exactly one pool (law L1). The stack of a free frame tells the kind of its bytes, so law L6 needs no flag: a frame of
another kind, or one never used, is zeroed before first use. A frame just released is the next one taken.

**Items** of one size are packed into frames: item i is in frame i // per_frame, and nothing stores that. They come from
the fullest partly used frame, so that the emptiest ones drain and become free for either kind. One place decides the
order: ``Walk``, which only reads. ``pop`` takes exactly the items it is given and asserts that they are on top, so
there is no predictor to agree with (law L2). If the model lacks a kind, its per_frame is 0.

**Owners** are one number for each item, written when it changes hands and at no other time. So the owner of a page that
moves is known without a scan. ``indexes`` has the number of each page in its sequence, from the front. Sharing is not a
count: a lease that reads the tree's pages holds the node where they end (law L7). A claim on a slot is the pair (slot,
epoch). The epoch goes up whenever the slot is given back, so a claim that outlived its owner is caught at its use (law
L5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Generic, TypeVar, cast

from weft.memory.values import FrameClaim, FrameKind
from weft.units import FrameId, PageId, SeqId, SlotId

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
        frame = self.free[claim.former_kind].pop()
        assert frame == claim.frame, f"planned frame {claim.frame} but frame {frame} is next"

    def release(self, frame: FrameId, kind: FrameKind) -> None:
        """Release ``frame``, which is empty and whose bytes are of ``kind``."""
        self.free[kind].append(frame)

    def forget(self) -> None:
        """Mark every frame as never used: the bytes of the arena are new."""
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
        """Return a walk that continues from here and does not change this one; it has no claims yet."""
        fork = FrameWalk.__new__(FrameWalk)
        fork._free, fork._depth, fork.left, fork.claims = self._free, dict(self._depth), self.left, []
        return fork

    def claim(self, kind: FrameKind) -> FrameId:
        """Return the next free frame for ``kind``; the caller has checked that ``left`` is not 0."""
        for former_kind in _PREFERENCE[kind]:
            stack, depth = self._free[former_kind], self._depth[former_kind]
            if depth < len(stack):
                frame = stack[-1 - depth]
                self._depth[former_kind] = depth + 1
                self.left -= 1
                self.claims.append(FrameClaim(frame, kind, former_kind))
                return frame
        raise AssertionError("no free frame is left to this transaction")


Item = TypeVar("Item", bound=int)


class Packing(Generic[Item]):
    """Items of one size, packed into frames. ``held_count`` items are held, ``free_count`` are free inside claimed
    frames."""

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
        """Return all items of ``frame`` as a stack: the lowest on top."""
        first = frame * self.per_frame
        return cast("list[Item]", list(range(first + self.per_frame - 1, first - 1, -1)))

    def add(self, frame: FrameId) -> None:
        """Add an empty frame; the commit that calls this takes items of it right after."""
        self.stacks[frame] = self.items_of(frame)
        self.free_count += self.per_frame
        self._enter(frame, 0)

    def pop(self, items: Sequence[Item]) -> None:
        """Take ``items``, which are on top of their frames' stacks in this order."""
        for frame, group in groupby(items, key=self._frame_of):
            popped = list(group)
            stack = self.stacks[frame]
            count = len(popped)
            self._leave(frame, self.per_frame - len(stack))
            assert stack[-count:] == popped[::-1], f"planned {popped} of frame {frame}, which differ on top"
            del stack[-count:]
            self._enter(frame, self.per_frame - len(stack))
            self.held_count += count
            self.free_count -= count

    def push(self, items: Sequence[Item]) -> list[FrameId]:
        """Take ``items`` back; return the frames that are empty now and have left this packing."""
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
        """Yield the partly used frames, in the opposite order."""
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
    """The items that a transaction would take, in order, without taking them.

    ``items`` are those taken so far. ``left`` counts the free items ahead, in partly used frames and in
    frames that this walk has claimed. ``room`` adds the frames that are free for either kind. Both walks of a
    transaction share its ``FrameWalk``.
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
        """Return the next ``count`` items; the caller has checked ``room``."""
        if count == 1 and self._depth < len(self._stack):  # a decode that crosses into its next page
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
            chunk = self._stack[max(0, end - (count - len(items))) : end]
            chunk.reverse()
            self._depth += len(chunk)
            self.left -= len(chunk)
            items += chunk
        self.items += items
        return items

    def ahead(self) -> Iterator[Item]:
        """Yield the ``left`` items that ``take`` would give next without claiming a frame."""
        passed = len(self.items)
        claimed = (
            self._packing.items_of(claim.frame) for claim in self._frames.claims if claim.kind is self._packing.kind
        )
        for stack in chain(self._packing.fullest_first(), claimed):
            yield from reversed(stack[: max(0, len(stack) - passed)])
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


FREE = 0
COMPRESSED_KV = -1 << 61
COMPRESSED_STATE = -1 << 62


def of_lease(seq: SeqId) -> int:
    return seq + 1


def of_tree(tree_id: int) -> int:
    """Return the owner number of the tree. ``tree_id``: the id of an edge (pages) or of a node (slots)."""
    return -1 - tree_id


def of_compressed_state(node: int) -> int:
    """Return the owner number of pages of the compressed state of ``node``."""
    return COMPRESSED_STATE - node


def of_compressed_kv(node: int) -> int:
    """Return the owner number of pages of the compressed KV of ``node``."""
    return COMPRESSED_KV - node


def kv_node_of(owner: int) -> int | None:
    """Return the node of a page of compressed KV; None for other pages."""
    return COMPRESSED_KV - owner if COMPRESSED_STATE < owner <= COMPRESSED_KV else None


def state_node_of(owner: int) -> int | None:
    """Return the node of a page of a compressed state; None for other pages."""
    return COMPRESSED_STATE - owner if owner <= COMPRESSED_STATE else None


def is_compressed(owner: int) -> bool:
    """Return whether a page holds compressed data."""
    return owner <= COMPRESSED_KV


def lease_of(owner: int) -> SeqId | None:
    """Return the sequence of ``owner``; None for the tree."""
    assert owner != FREE
    return SeqId(owner - 1) if owner > 0 else None


def tree_id_of(owner: int) -> int:
    assert COMPRESSED_KV < owner < 0, "it is free, or belongs to a lease or to compressed data"
    return -1 - owner


class Pages:
    __slots__ = ("indexes", "owners", "packing")

    def __init__(self, pages_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[PageId] = Packing(FrameKind.PAGES, pages_per_frame)
        self.owners = [FREE] * (pages_per_frame * frame_count)
        self.indexes = [0] * (pages_per_frame * frame_count)

    def take(self, pages: Sequence[PageId]) -> None:
        """Take free pages from the pool; ``give`` sets their owner."""
        self.packing.pop(pages)
        for page in pages:
            assert self.owners[page] == FREE, f"page {page} is held and was planned as free"

    def give(self, pages: Sequence[PageId], owner: int, first_index: int) -> None:
        """Give ``pages`` to ``owner`` as its pages number ``first_index``, ``first_index + 1``, ..."""
        for index, page in enumerate(pages, start=first_index):
            self.owners[page] = owner
            self.indexes[page] = index

    def drop(self, pages: Sequence[PageId]) -> list[FrameId]:
        """Free ``pages``. Return emptied frames."""
        for page in pages:
            assert self.owners[page] != FREE, f"page {page} is free and was given back"
            self.owners[page] = FREE
        return self.packing.push(pages)


class Slots:
    __slots__ = ("epochs", "owners", "packing")

    def __init__(self, slots_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[SlotId] = Packing(FrameKind.SLOTS, slots_per_frame)
        self.owners = [FREE] * (slots_per_frame * frame_count)
        self.epochs = [0] * (slots_per_frame * frame_count)

    def take(self, slots: Sequence[SlotId]) -> None:
        """Take free slots from the pool; ``give`` sets their owner."""
        self.packing.pop(slots)
        for slot in slots:
            assert self.owners[slot] == FREE, f"slot {slot} is held and was planned as free"

    def give(self, slot: SlotId, owner: int) -> None:
        self.owners[slot] = owner

    def drop(self, slot: SlotId, epoch: int) -> list[FrameId]:
        """Give a claim back. Returns the frame if it is empty now."""
        self.check(slot, epoch)
        self.owners[slot] = FREE
        self.epochs[slot] += 1
        return self.packing.push([slot])

    def check(self, slot: SlotId, epoch: int) -> None:
        """Assert that the claim (slot, epoch) is alive (law L5)."""
        assert self.owners[slot] != FREE, f"stale claim on slot {slot}: it is free"
        assert self.epochs[slot] == epoch, (
            f"stale claim on slot {slot}: of epoch {epoch}, and the slot is at {self.epochs[slot]}"
        )
