"""Compaction: moving live items so that a frame becomes free, if enough is free and scattered.

    frames of pages   [ A A A A ]  [ B . C C ]  [ . . D . ]      3 + 1 holes are a frame: D moves into the
                                       ^------------'            hole of the fuller frame, and the emptiest
                                                                 frame may become one of slots

Pages are handed out from the fullest frames, so the emptiest ones are the last to be used. Compaction works
from that other end. It moves the fewest items, into the very holes that would be filled next. A kind with a
frame's worth of holes can always give a frame: the emptiest one has no more items than the others have holes.
So moving settles every case that ``pressure.Demand`` calls settled, and neither kind can keep frames from the
other.

A move is a copy in the step's plan: performed before anything is computed, its destination new in this step,
its source free from the next draft on. Every name of the old page changes. The lease or edge that owns it is
known by owner number (owners.py). The page table of each reader gets a patch. A slot that moves gets a new
epoch, and the sequence computes in the new slot from this step on.

Items that the draft itself changes stay where they are (``Fixed``): it opens on them, publishes or closes
them. Items that end with this draft are not moved; the frame empties when they go.

Bytes, moves and patches of a step are bounded (law L11). A frame beyond the bounds is emptied over several
steps. Each move goes from an emptier frame to a fuller one, so no step undoes another and the moves come to
an end.

Rejected: evicting the contents of the emptiest frame, not the least valuable data (it costs a prefill where a
copy would do); moving in the background whenever there are holes (copies for frames that no request needs);
separate streams of allocation for running tails and cached prefixes (decision 0002).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Generic

from weft.memory.arena_work import PageCopy, SlotCopy
from weft.memory.books import Books
from weft.memory.frames.owners import (
    FREE,
    is_compressed,
    kv_node_of,
    lease_of,
    state_node_of,
    tree_id_of,
)
from weft.memory.frames.packing import Item, Packing, Walk
from weft.memory.prefix.edge import Node
from weft.memory.reservation import Moves, SlotPatch, TablePatch
from weft.memory.values import NodeId
from weft.units import PAGE_TOKENS, FrameId, PageId, SeqId, SlotId

MOVE_BYTES_PER_STEP = 64 << 20
"""Some 0.1 ms on a device that copies 1 TB a second. One item of any size may move."""
MOVES_PER_STEP = 1024
PATCHES_PER_STEP = 4096
"""Entries of page tables; a page with many readers has an entry for each."""
FRAMES_LOOKED_AT = 16


@dataclass(frozen=True, slots=True)
class Fixed:
    """Items that a draft changes itself: sequences that publish, nodes in use, sequences that it closes."""

    published: Container[SeqId]
    nodes: Container[NodeId]
    closed: Container[SeqId]

    def leaves(self, owner: int) -> bool:
        """The items of ``owner`` become free with this draft."""
        seq = lease_of(owner)
        return seq in self.closed and seq not in self.published


@dataclass(slots=True)
class _Budget:
    bytes: int
    patches: int
    moves: int
    spent: int = 0

    def spend(self, item_bytes: int, patches: int) -> bool:
        """Whether one more item fits; the first one always does."""
        if self.spent and (self.bytes < item_bytes or self.patches < patches or self.spent == self.moves):
            return False
        self.bytes -= item_bytes
        self.patches -= patches
        self.spent += 1
        return True


class _Emptying(Generic[Item]):
    """Frames of one kind, the emptiest first. ``cost(item)``: table entries to patch if it moves, None if it
    has to stay. ``free(item)``: it is free, or becomes free with this draft."""

    def __init__(self, packing: Packing[Item], walk: Walk[Item], item_bytes: int,
                 cost: Callable[[Item], int | None], free: Callable[[Item], bool]) -> None:
        self._packing = packing
        self._walk = walk
        self._item_bytes = item_bytes
        self._cost = cost
        self._free = free
        self.moved: list[tuple[Item, Item]] = []

    def run(self, frames_wanted: int, budget: _Budget) -> None:
        """Empty up to ``frames_wanted`` frames, as far as ``budget`` goes."""
        packing, per_frame = self._packing, self._packing.per_frame
        in_use = {FrameId(item // per_frame) for item in self._walk.items}
        emptied: set[FrameId] = set()
        holes = self._walk.left
        into = (item for item in self._walk.ahead() if item // per_frame not in emptied)
        for looked, frame in enumerate(packing.emptiest_first()):
            if not frames_wanted or looked == FRAMES_LOOKED_AT:
                break
            items = None if frame in in_use else self._movable(frame)
            if items is None:
                continue
            holes -= len(packing.stacks[frame])
            if len(items) > holes:
                break
            emptied.add(frame)
            holes -= len(items)
            frames_wanted -= 1
            if not self._move(items, into, in_use, budget):
                break

    def _movable(self, frame: FrameId) -> list[tuple[Item, int]] | None:
        """The items of ``frame`` that have to move, with their costs; None if one has to stay."""
        items = []
        for item in self._packing.items_of(frame):
            if not self._free(item):
                cost = self._cost(item)
                if cost is None:
                    return None
                items.append((item, cost))
        return items

    def _move(self, items: list[tuple[Item, int]], into: Iterator[Item], in_use: set[FrameId],
              budget: _Budget) -> bool:
        for item, cost in items:
            if not budget.spend(self._item_bytes, cost):
                return False
            place = next(into)
            in_use.add(FrameId(place // self._packing.per_frame))
            self.moved.append((item, place))
        return True


class Compaction:
    """The moves of one draft. It reads ``books`` and the walks, and changes neither."""

    def __init__(self, books: Books, page_walk: Walk[PageId], slot_walk: Walk[SlotId], fixed: Fixed) -> None:
        self._books = books
        self._fixed = fixed
        self._readers: dict[NodeId, list[SeqId]] = {}
        pages, slots, plan = books.pages, books.slots, books.plan
        self._pages = _Emptying(pages.packing, page_walk, plan.page_bytes, self._page_cost,
                                lambda page: (pages.owners[page] == FREE
                                              or fixed.leaves(pages.owners[page])))
        self._slots = _Emptying(slots.packing, slot_walk, plan.slot_stride_bytes, self._slot_cost,
                                lambda slot: (slots.owners[slot] == FREE
                                              or fixed.leaves(slots.owners[slot])))

    def moves(self, frames_of_pages: int, frames_of_slots: int) -> Moves:
        """Moves towards emptying ``frames_of_pages`` and ``frames_of_slots`` frames."""
        budget = _Budget(MOVE_BYTES_PER_STEP, PATCHES_PER_STEP, MOVES_PER_STEP)
        self._pages.run(frames_of_pages, budget)
        self._slots.run(frames_of_slots, budget)
        return Moves(tuple(PageCopy(src, dst) for src, dst in self._pages.moved),
                     tuple(SlotCopy(src, dst) for src, dst in self._slots.moved),
                     tuple(self._table_patches()), tuple(self._slot_patches()))

    # ------------------------------------------------------------------ tables

    def _page_cost(self, page: PageId) -> int | None:
        owner = self._books.pages.owners[page]
        seq = lease_of(owner)
        if seq is not None:
            return None if seq in self._fixed.published else 1
        for node_id in (state_node_of(owner), kv_node_of(owner)):
            if node_id is not None:
                return None if NodeId(node_id) in self._fixed.nodes else 0
        node = self._node_of(page)
        return None if node.id in self._fixed.nodes else len(self._readers_of(node))

    def _slot_cost(self, slot: SlotId) -> int | None:
        owner = self._books.slots.owners[slot]
        seq = lease_of(owner)
        if seq is not None:
            return None if seq in self._fixed.published else 0
        return None if NodeId(tree_id_of(owner)) in self._fixed.nodes else 0

    def _node_of(self, page: PageId) -> Node:
        pages = self._books.pages
        return self._books.cache.tree.node_of_page(pages.owners[page], pages.indexes[page])

    def _readers_of(self, node: Node) -> list[SeqId]:
        """Sequences with the pages of ``node`` in their page table, except those that close. One look at each
        lease is enough, because a lease reads all of a node or nothing."""
        readers = self._readers.get(node.id)
        if readers is None:
            readers = self._readers[node.id] = []
            if node.holds:
                index = node.start // PAGE_TOKENS
                [first] = node.edge.pages_between(node.start, node.start + PAGE_TOKENS)
                readers += [lease.seq for lease in self._books.leases.values()
                            if lease.shared_tokens > node.start and lease.pages[index] == first
                            and lease.seq not in self._fixed.closed]
        return readers

    def _table_patches(self) -> Iterator[TablePatch]:
        """By sequence; adjacent entries form one patch."""
        pages = self._books.pages
        by_seq: dict[SeqId, dict[int, PageId]] = {}
        for src, dst in self._pages.moved:
            seq = lease_of(pages.owners[src])
            if is_compressed(pages.owners[src]):
                continue
            for reader in self._readers_of(self._node_of(src)) if seq is None else [seq]:
                by_seq.setdefault(reader, {})[pages.indexes[src]] = dst
        for seq, entries in by_seq.items():
            run: list[PageId] = []
            first = -1
            for index in sorted(entries):
                if index != first + len(run) and run:
                    yield TablePatch(seq, first, tuple(run))
                    run = []
                if not run:
                    first = index
                run.append(entries[index])
            yield TablePatch(seq, first, tuple(run))

    def _slot_patches(self) -> Iterator[SlotPatch]:
        for src, dst in self._slots.moved:
            seq = lease_of(self._books.slots.owners[src])
            if seq is not None and self._books.leases[seq].slot == src:
                yield SlotPatch(seq, dst)
