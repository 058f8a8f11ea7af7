"""Relief: the answer of a transaction to memory that is short, so that the next transaction has more.

    wanted = what open and extend were refused, and a reserve ahead of need

    room has it          -->  nothing, as in nearly every step
    demand is met        -->  free space is scattered: moves
    demand is not met    -->  compression, then evictions              (prefix/eviction.py)

    moves   frames of pages   [ A A A A ]  [ B . C C ]  [ . . D . ]    3 + 1 holes are a frame: D moves into
                                               ^------------'          the hole of the fuller frame, and the
                                                                       emptiest may become one of slots

Relief reads the walks and the dicts of its ``Transaction`` and changes nothing. The answer is frozen into the
reservation. Freed memory is available from the next transaction on, because the step in flight may still read from it.
Each ``seal`` also makes a little room ahead, so a step is seldom short.

**Compaction** moves live items so that a frame becomes free. Pages are handed out from the fullest frames, so
the emptiest ones are the last to be used. Compaction works from that other end: the fewest items, into the
very holes that would be filled next. A kind with a frame's worth of holes can always give a frame. So moving
settles every case that ``Demand`` calls settled, and neither kind can keep frames from the other. A move is a
copy in the step's plan: its destination is new in this step, its source free from the next transaction on.
Every name of the old page changes: its owner's, by owner number, and the page table of each reader gets a
patch. A slot that moves gets a new epoch.

Items that the transaction itself changes stay where they are (``Fixed``). Moves and compression never happen
in one step: both would take the next free pages.

Laws: L3 (a shortage ends: compression must reduce the demand, and a move goes to a fuller frame), L11
(evictions, moves, patches and compressed bytes are bounded by step).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic

from weft.memory.arena_work import CompressState, PageCopy, SlotCopy
from weft.memory.frames.arena import (
    FREE,
    FrameWalk,
    Item,
    Packing,
    Walk,
    is_compressed,
    kv_node_of,
    lease_of,
    state_node_of,
    tree_id_of,
)
from weft.memory.prefix.compressed_kv import KvCompression
from weft.memory.prefix.edge import Node
from weft.memory.prefix.eviction import (
    COMPRESS_BYTES_PER_STEP,
    EVICTIONS_PER_STEP,
    UNMEETABLE,
    CompressionRoom,
    Demand,
    Room,
    choose,
    pages_beyond,
)
from weft.memory.prefix.sharing import Sharing
from weft.memory.reservation import Lease, Moves, SlotPatch, TablePatch
from weft.memory.state import MemoryState
from weft.memory.values import NO_SLOT, Eviction, FrameClaim, Match, NodeId
from weft.units import PAGE_TOKENS, FrameId, PageId, SeqId, SlotId

MOVE_BYTES_PER_STEP = 64 << 20
"""Most bytes that moves copy in a step, some 0.1 ms on a device that copies 1 TB a second. One item of any size may
move."""
MOVES_PER_STEP = 1024
PATCHES_PER_STEP = 4096
"""Most entries of page tables that a step patches; a page with many readers has an entry for each."""
FRAMES_LOOKED_AT = 16


@dataclass(frozen=True, slots=True)
class Fixed:
    """Items that a transaction changes itself: sequences that it publishes or closes, nodes in use."""

    published: Container[SeqId]
    nodes: Container[NodeId]
    closed: Container[SeqId]

    def leaves(self, owner: int) -> bool:
        """Return whether the items of ``owner`` become free with this transaction."""
        seq = lease_of(owner)
        return seq in self.closed and seq not in self.published


@dataclass(slots=True)
class _Budget:
    bytes: int
    patches: int
    moves: int
    spent: int = 0

    def spend(self, item_bytes: int, patches: int) -> bool:
        """Spend the cost of one more item, and return whether it fits; the first one always does."""
        if self.spent and (self.bytes < item_bytes or self.patches < patches or self.spent == self.moves):
            return False
        self.bytes -= item_bytes
        self.patches -= patches
        self.spent += 1
        return True


class _Emptying(Generic[Item]):
    """Frames of one kind, the emptiest first. ``cost(item)``: table entries to patch if it moves, None if it
    has to stay. ``free(item)``: it is free, or becomes free with this transaction."""

    def __init__(
        self,
        packing: Packing[Item],
        walk: Walk[Item],
        item_bytes: int,
        cost: Callable[[Item], int | None],
        free: Callable[[Item], bool],
    ) -> None:
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
        """Return the items of ``frame`` that have to move, with their costs; None if one has to stay."""
        items = []
        for item in self._packing.items_of(frame):
            if not self._free(item):
                cost = self._cost(item)
                if cost is None:
                    return None
                items.append((item, cost))
        return items

    def _move(self, items: list[tuple[Item, int]], into: Iterator[Item], in_use: set[FrameId], budget: _Budget) -> bool:
        for item, cost in items:
            if not budget.spend(self._item_bytes, cost):
                return False
            place = next(into)
            in_use.add(FrameId(place // self._packing.per_frame))
            self.moved.append((item, place))
        return True


class Compaction:
    """The moves of one transaction. It reads ``memory`` and the walks, and changes neither."""

    def __init__(self, memory: MemoryState, page_walk: Walk[PageId], slot_walk: Walk[SlotId], fixed: Fixed) -> None:
        self._memory = memory
        self._fixed = fixed
        self._readers: dict[NodeId, list[SeqId]] = {}
        pages, slots, plan = memory.pages, memory.slots, memory.plan
        self._pages = _Emptying(
            pages.packing,
            page_walk,
            plan.page_bytes,
            self._page_cost,
            lambda page: pages.owners[page] == FREE or fixed.leaves(pages.owners[page]),
        )
        self._slots = _Emptying(
            slots.packing,
            slot_walk,
            plan.slot_stride_bytes,
            self._slot_cost,
            lambda slot: slots.owners[slot] == FREE or fixed.leaves(slots.owners[slot]),
        )

    def moves(self, frames_of_pages: int, frames_of_slots: int) -> Moves:
        """Return moves towards emptying ``frames_of_pages`` and ``frames_of_slots`` frames."""
        budget = _Budget(MOVE_BYTES_PER_STEP, PATCHES_PER_STEP, MOVES_PER_STEP)
        self._pages.run(frames_of_pages, budget)
        self._slots.run(frames_of_slots, budget)
        return Moves(
            tuple(PageCopy(src, dst) for src, dst in self._pages.moved),
            tuple(SlotCopy(src, dst) for src, dst in self._slots.moved),
            tuple(self._table_patches()),
            tuple(self._slot_patches()),
        )

    # ------------------------------------------------------------------ tables

    def _page_cost(self, page: PageId) -> int | None:
        owner = self._memory.pages.owners[page]
        seq = lease_of(owner)
        if seq is not None:
            return None if seq in self._fixed.published else 1
        for node_id in (state_node_of(owner), kv_node_of(owner)):
            if node_id is not None:
                return None if NodeId(node_id) in self._fixed.nodes else 0
        node = self._node_of(page)
        return None if node.id in self._fixed.nodes else len(self._readers_of(node))

    def _slot_cost(self, slot: SlotId) -> int | None:
        owner = self._memory.slots.owners[slot]
        seq = lease_of(owner)
        if seq is not None:
            return None if seq in self._fixed.published else 0
        return None if NodeId(tree_id_of(owner)) in self._fixed.nodes else 0

    def _node_of(self, page: PageId) -> Node:
        pages = self._memory.pages
        return self._memory.cache.tree.node_of_page(pages.owners[page], pages.indexes[page])

    def _readers_of(self, node: Node) -> list[SeqId]:
        """Return the sequences with the pages of ``node`` in their page table, except those that close. One look at
        each lease is enough, because a lease reads all of a node or nothing."""
        readers = self._readers.get(node.id)
        if readers is None:
            readers = self._readers[node.id] = []
            if node.holds:
                index = node.start // PAGE_TOKENS
                [first] = node.edge.pages_between(node.start, node.start + PAGE_TOKENS)
                readers += [
                    lease.seq
                    for lease in self._memory.leases.values()
                    if lease.shared_tokens > node.start
                    and lease.pages[index] == first
                    and lease.seq not in self._fixed.closed
                ]
        return readers

    def _table_patches(self) -> Iterator[TablePatch]:
        """Yield the patches by sequence; adjacent entries form one patch."""
        pages = self._memory.pages
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
            seq = lease_of(self._memory.slots.owners[src])
            if seq is not None and self._memory.leases[seq].slot == src:
                yield SlotPatch(seq, dst)


_NO_MOVES = Moves()


class Relief:
    """The relief of one transaction. ``opened``, ``gained``, ``closed`` and ``opened_on`` are those of the transaction,
    which fills them. ``frames``, ``page_walk`` and ``slot_walk`` are its walks."""

    __slots__ = (
        "_closed",
        "_compacting",
        "_flushed",
        "_frames",
        "_gained",
        "_last",
        "_memory",
        "_needed",
        "_opened",
        "_opened_on",
        "_page_walk",
        "_sharing",
        "_slot_walk",
    )

    def __init__(
        self,
        memory: MemoryState,
        frames: FrameWalk,
        page_walk: Walk[PageId],
        slot_walk: Walk[SlotId],
        sharing: Sharing,
        opened: Mapping[SeqId, tuple[Lease, Match]],
        gained: Mapping[SeqId, list[PageId]],
        closed: Mapping[SeqId, None],
        opened_on: set[NodeId],
    ) -> None:
        self._memory = memory
        self._frames = frames
        self._page_walk = page_walk
        self._slot_walk = slot_walk
        self._sharing = sharing
        self._opened = opened
        self._gained = gained
        self._closed = closed
        self._opened_on = opened_on
        self._last: tuple[NodeId, ...] = ()
        self._needed = 0, 0
        self._flushed = self._compacting = False

    # ------------------------------------------------------------------ wishes

    def evict_last(self, nodes: Iterable[NodeId]) -> None:
        self._last = tuple(dict.fromkeys(node for node in nodes if node in self._memory.cache.tree.by_id))

    def reclaim(self, pages: int, slots: int, sparing: Iterable[NodeId]) -> bool:
        wanted = self._needed[0] + pages, self._needed[1] + slots
        if not any(self.room().short(*wanted)):
            return False
        demand = self._demand(*wanted)
        if not demand.met(*self._memory.cache.evictable_except(sparing)):
            return False
        if not demand.met() and not self._choose(demand):
            return False
        self._needed = wanted
        return True

    def compact(self) -> None:
        self._compacting = True

    def flush(self) -> None:
        self._flushed = True

    # ------------------------------------------------------------------ readings of the transaction

    def room(self) -> Room:
        """Return the pages and slots that the transaction can hand out now."""
        plan = self._memory.plan
        return Room(
            self._page_walk.left, self._slot_walk.left, self._frames.left, plan.pages_per_frame, plan.slots_per_frame
        )

    def reserve_pages(self) -> int:
        """Return a page for each sequence that runs: all of them may cross into a new page in the same step."""
        return len(self._memory.leases) + len(self._opened)

    def _demand(self, pages: int, slots: int) -> Demand:
        """Return the demand of ``pages`` and ``slots`` in addition to everything that is held after this
        transaction."""
        plan, memory = self._memory.plan, self._memory
        pages_freed, slots_freed = self._freed()
        return Demand(
            plan.frame_count,
            plan.pages_per_frame,
            plan.slots_per_frame,
            memory.pages.packing.held_count + len(self._page_walk.items) - pages_freed + pages,
            memory.slots.packing.held_count + len(self._slot_walk.items) - slots_freed + slots,
        )

    def _freed(self) -> tuple[int, int]:
        """Return the pages and slots that closings and publications of this transaction free; a lower bound."""
        pages, slots = self._sharing.freed_count, 0
        publications = {publication.seq: publication for publication in self._sharing.publications}
        for seq in self._closed:
            lease = self._memory.leases.get(seq) or self._opened[seq][0]
            own = len(lease.pages) + len(self._gained.get(seq, ())) - self._memory.plan.pages_for(lease.shared_tokens)
            publication = publications.get(seq)
            if publication is not None:
                pages += max(0, own - len(publication.pages) - 1)
            else:
                pages += own
                slots += lease.slot != NO_SLOT
        return pages, slots

    def _nodes_in_use(self) -> set[NodeId]:
        """Return the nodes that this transaction opens on or publishes through."""
        nodes = self._opened_on | self._sharing.visited
        for _, match in self._opened.values():
            nodes |= self._memory.cache.tree.path_ids(match.anchor)
        return nodes

    # ------------------------------------------------------------------ the choice

    def choose(self) -> tuple[list[Eviction], Moves]:
        """Return evictions and moves that give the next transaction the wanted pages and slots."""
        if self._flushed:
            return self._choose(UNMEETABLE), _NO_MOVES  # perhaps between steps, where nothing makes copies
        room = self.room()
        most = max(self._needed[0], self.reserve_pages()) + self._memory.plan.compressed_pages
        if not (self._compacting or any(room.short(most, self._needed[1] + self._memory.slots_ahead))):
            return [], _NO_MOVES  # room for the most that can be wanted, as in nearly every step
        pages, slots = self._wanted()
        frames, evictions = (0, 0), []
        if any(room.short(pages, slots)):
            demand = self._demand(pages, slots)
            if demand.met():
                pages_freed, slots_freed = self._freed()
                room = replace(room, pages=room.pages + pages_freed, slots=room.slots + slots_freed)
                frames = room.frames_to_empty(pages, slots)
            else:
                evictions = self._choose(demand)
        if any(eviction.compresses for eviction in evictions):
            return evictions, _NO_MOVES  # both would take the next pages, or name the same ones
        if self._compacting:
            frames = (self._memory.plan.frame_count,) * 2
        return evictions, self._moves(*frames)

    def compress_states(
        self, chosen: Iterable[Eviction]
    ) -> tuple[tuple[CompressState, ...], list[PageId], list[FrameClaim]]:
        """Return the states that go from a slot into pages, those pages, and frames to claim for them."""
        by_id = self._memory.cache.tree.by_id
        nodes = [by_id[eviction.node] for eviction in chosen if eviction.what == "slot"]
        each = self._memory.plan.compressed_pages
        pages, frames = pages_beyond(self._page_walk, self._frames, each * len(nodes))
        return (
            tuple(
                CompressState(node.id, node.slot, tuple(pages[index * each : (index + 1) * each]))
                for index, node in enumerate(nodes)
            ),
            pages,
            frames,
        )

    def _wanted(self) -> tuple[int, int]:
        """Return the pages and slots that were reclaimed, and a reserve ahead of need: pages, and slots for the next
        sequence and its snapshots. The reserve applies only if it needs none of the nodes that go last. A transaction
        that closes something frees memory anyway."""
        cache = self._memory.cache
        pages, slots = self._needed
        if self._closed or not any(cache.evictable):
            return pages, slots
        reserve, ahead = max(pages, self.reserve_pages()), self._memory.slots_ahead
        to_compress_in = self._memory.plan.compressed_pages if cache.order.in_slots else 0
        evictable, pinned = cache.evictable_except(self._last), cache.pins.usage
        evictable = max(0, evictable[0] - pinned[0]), max(0, evictable[1] - pinned[1])
        for wanted in ((reserve + to_compress_in, slots + ahead), (reserve, slots + ahead), (reserve, slots)):
            if not any(self.room().short(*wanted)) or self._demand(*wanted).met(*evictable):
                return wanted
        return pages, slots

    def _moves(self, frames_of_pages: int, frames_of_slots: int) -> Moves:
        if not frames_of_pages and not frames_of_slots:
            return _NO_MOVES
        published = {publication.seq for publication in self._sharing.publications}
        fixed = Fixed(published, self._nodes_in_use(), self._closed)
        compaction = Compaction(self._memory, self._page_walk, self._slot_walk, fixed)
        return compaction.moves(frames_of_pages, frames_of_slots)

    def _choose(self, demand: Demand) -> list[Eviction]:
        cache, plan = self._memory.cache, self._memory.plan
        at_once = 0
        if plan.compressed_pages and not self._flushed:
            room = self._page_walk.room - self.reserve_pages()
            bound = max(1, COMPRESS_BYTES_PER_STEP // plan.slot_stride_bytes)
            at_once = min(room // plan.compressed_pages, bound)
        return choose(
            cache.order,
            demand,
            ranked=cache.policy.order(cache.order.states),
            spared=self._nodes_in_use(),
            last=() if self._flushed else (*self._last, *cache.pins.last),
            limit=len(cache.tree.by_id) * 2 if self._flushed else EVICTIONS_PER_STEP,
            compression=CompressionRoom(plan.compressed_pages, at_once),
            kv_compression=KvCompression(cache.compressed_kv, enabled=not self._flushed),
        )
