"""Relief: what a draft does about memory that is short, so that the next draft has more.

    wanted = what open and extend were refused, and a reserve ahead of need

    room has it          -->  nothing, as in nearly every step
    demand is met        -->  free space is scattered: moves           (compaction.py)
    demand is not met    -->  compression, then evictions              (prefix/eviction.py)

A reading of the draft: it shares the walks and the dicts of its ``Draft`` and changes none of them. The
answer is frozen into the reservation. What it frees is free from the next draft on, because the step in
flight may still read it. So a step that is short makes room, and the one after it has the memory. Each
``seal`` also makes a little room ahead, so a step is seldom short.

Whether moving is enough is arithmetic (frames/pressure.py). Moves and compression never happen in one step:
both would take the next free pages.

Laws: L3 (a shortage ends: compression is chosen only if it reduces the demand), L11 (evictions, moves and
compressed bytes are bounded by step).

Rejected: making room inside ``open`` (the step in flight still reads what would be freed); evicting ahead of
every wish (the reserve is a page for each lease and a few slots, not a share of the arena).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from weft.memory.arena_work import CompressState
from weft.memory.books import Books
from weft.memory.compaction import Compaction, Fixed
from weft.memory.frames.arena import FrameWalk
from weft.memory.frames.packing import Walk
from weft.memory.frames.pressure import UNMEETABLE, Demand, Room
from weft.memory.lease import Lease
from weft.memory.prefix.compressed_kv import KvCompression
from weft.memory.prefix.compressed_state import COMPRESS_BYTES_PER_STEP, CompressionRoom, pages_beyond
from weft.memory.prefix.eviction import EVICTIONS_PER_STEP, choose
from weft.memory.prefix.sharing import Sharing
from weft.memory.reservation import Moves
from weft.memory.values import NO_SLOT, Eviction, FrameClaim, Match, NodeId
from weft.units import PageId, SeqId, SlotId

_NO_MOVES = Moves()


class Relief:
    """``opened``, ``gained``, ``closed`` and ``opened_on`` are those of the draft, which fills them.
    ``frames``, ``page_walk`` and ``slot_walk`` are its walks."""

    __slots__ = ("_books", "_closed", "_compacting", "_flushed", "_frames", "_gained", "_last", "_needed",
                 "_opened", "_opened_on", "_page_walk", "_sharing", "_slot_walk")

    def __init__(self, books: Books, frames: FrameWalk, page_walk: Walk[PageId], slot_walk: Walk[SlotId],
                 sharing: Sharing, opened: Mapping[SeqId, tuple[Lease, Match]],
                 gained: Mapping[SeqId, list[PageId]], closed: Mapping[SeqId, None],
                 opened_on: set[NodeId]) -> None:
        self._books = books
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
        self._last = tuple(dict.fromkeys(node for node in nodes if node in self._books.cache.tree.by_id))

    def reclaim(self, pages: int, slots: int, sparing: Iterable[NodeId]) -> bool:
        wanted = self._needed[0] + pages, self._needed[1] + slots
        if not any(self.room().short(*wanted)):
            return False
        demand = self._demand(*wanted)
        if not demand.met(*self._books.cache.evictable_except(sparing)):
            return False
        if not demand.met() and not self._choose(demand):
            return False
        self._needed = wanted
        return True

    def compact(self) -> None:
        self._compacting = True

    def flush(self) -> None:
        self._flushed = True

    # ------------------------------------------------------------------ readings of the draft

    def room(self) -> Room:
        """What the draft can hand out now."""
        plan = self._books.plan
        return Room(self._page_walk.left, self._slot_walk.left, self._frames.left,
                    plan.pages_per_frame, plan.slots_per_frame)

    def reserve_pages(self) -> int:
        """A page for each sequence that runs: all of them may cross into a new page in the same step."""
        return len(self._books.leases) + len(self._opened)

    def _demand(self, pages: int, slots: int) -> Demand:
        """``pages`` and ``slots`` have to fit beside everything that is held after this draft."""
        plan, books = self._books.plan, self._books
        pages_freed, slots_freed = self._freed()
        return Demand(plan.frame_count, plan.pages_per_frame, plan.slots_per_frame,
                      books.pages.packing.held_count + len(self._page_walk.items) - pages_freed + pages,
                      books.slots.packing.held_count + len(self._slot_walk.items) - slots_freed + slots)

    def _freed(self) -> tuple[int, int]:
        """Pages and slots that closings and publications of this draft free; a lower bound."""
        pages, slots = self._sharing.freed_count, 0
        publications = {publication.seq: publication for publication in self._sharing.publications}
        for seq in self._closed:
            lease = self._books.leases.get(seq) or self._opened[seq][0]
            own = len(lease.pages) + len(self._gained.get(seq, ())) - self._books.plan.pages_for(
                lease.shared_tokens)
            publication = publications.get(seq)
            if publication is not None:
                pages += max(0, own - len(publication.pages) - 1)
            else:
                pages += own
                slots += lease.slot != NO_SLOT
        return pages, slots

    def _nodes_in_use(self) -> set[NodeId]:
        """Nodes that this draft opens on or publishes through."""
        nodes = self._opened_on | self._sharing.visited
        for _, match in self._opened.values():
            nodes |= self._books.cache.tree.path_ids(match.anchor)
        return nodes

    # ------------------------------------------------------------------ the choice

    def choose(self) -> tuple[list[Eviction], Moves]:
        """Evictions and moves after which the next draft has what is wanted."""
        if self._flushed:
            return self._choose(UNMEETABLE), _NO_MOVES  # perhaps between steps, where nothing makes copies
        room = self.room()
        most = max(self._needed[0], self.reserve_pages()) + self._books.plan.compressed_pages
        if not (self._compacting or any(room.short(most, self._needed[1] + self._books.slots_ahead))):
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
            frames = (self._books.plan.frame_count,) * 2
        return evictions, self._moves(*frames)

    def compress_states(self, chosen: Iterable[Eviction]) -> tuple[tuple[CompressState, ...], list[PageId],
                                                                   list[FrameClaim]]:
        """The states that go from a slot into pages, those pages, and frames to claim for them."""
        by_id = self._books.cache.tree.by_id
        nodes = [by_id[eviction.node] for eviction in chosen if eviction.what == "slot"]
        each = self._books.plan.compressed_pages
        pages, frames = pages_beyond(self._page_walk, self._frames, each * len(nodes))
        return tuple(CompressState(node.id, node.slot, tuple(pages[at * each:(at + 1) * each]))
                     for at, node in enumerate(nodes)), pages, frames

    def _wanted(self) -> tuple[int, int]:
        """Pages and slots that were reclaimed, and a reserve ahead of need: pages, and slots for the next
        sequence and its checkpoints. The reserve applies only if it needs none of what goes last. A draft
        that closes something frees memory anyway."""
        cache = self._books.cache
        pages, slots = self._needed
        if self._closed or not any(cache.evictable):
            return pages, slots
        reserve, ahead = max(pages, self.reserve_pages()), self._books.slots_ahead
        to_compress_in = self._books.plan.compressed_pages if cache.order.in_slots else 0
        evictable = cache.evictable_except(self._last)
        for wanted in ((reserve + to_compress_in, slots + ahead), (reserve, slots + ahead), (reserve, slots)):
            if not any(self.room().short(*wanted)) or self._demand(*wanted).met(*evictable):
                return wanted
        return pages, slots

    def _moves(self, frames_of_pages: int, frames_of_slots: int) -> Moves:
        if not frames_of_pages and not frames_of_slots:
            return _NO_MOVES
        published = {publication.seq for publication in self._sharing.publications}
        fixed = Fixed(published, self._nodes_in_use(), self._closed)
        compaction = Compaction(self._books, self._page_walk, self._slot_walk, fixed)
        return compaction.moves(frames_of_pages, frames_of_slots)

    def _choose(self, demand: Demand) -> list[Eviction]:
        cache, plan = self._books.cache, self._books.plan
        at_once = 0
        if plan.compressed_pages and not self._flushed:
            room = self._page_walk.room - self.reserve_pages()
            bound = max(1, COMPRESS_BYTES_PER_STEP // plan.slot_stride_bytes)
            at_once = min(room // plan.compressed_pages, bound)
        return choose(cache.order, demand, ranked=cache.policy.order(cache.order.states),
                      spared=self._nodes_in_use(), last=self._last,
                      limit=len(cache.tree.by_id) * 2 if self._flushed else EVICTIONS_PER_STEP,
                      compression=CompressionRoom(plan.compressed_pages, at_once),
                      kv_compression=KvCompression(cache.compressed_kv, enabled=not self._flushed))
