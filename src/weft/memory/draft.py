"""A draft: one step's wishes for memory, as an overlay that writes nothing outside itself.

    open    a slot, and pages for all tokens; on a match the front of them is the tree's, read only
    extend  pages for more tokens
    save    a slot for the state at a position that this step passes
    publish what a sequence has computed goes into the tree, with the states it saved
    close   the lease ends; with ``keep`` its tokens and its running slot go into the tree first
    reclaim make room for what did not fit: move what lies badly, compress or evict
    seal    the frozen sum

It walks the free frames, pages and slots in the order in which they would be taken (``arena.FrameWalk``,
``packing.Walk``) and keeps what each sequence gets. What it closes, gives up, moves away from or evicts is
free from the next draft on: the step in flight may still read it. So a step that is short makes room, and
the one after it has the memory; and each ``seal`` makes a little ahead, so that a step seldom is. Whether
moving is enough or something must go is arithmetic (pressure.py).

The version of the books is checked at every use: a draft of an older one is a bug that is caught (law L5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weft.memory.arena_work import NO_WORK, ArenaWork, CompressState, PageCopy, RestoreState, SlotCopy
from weft.memory.books import Books
from weft.memory.compaction import Compaction, Fixed
from weft.memory.frames.arena import FrameWalk
from weft.memory.frames.packing import Walk
from weft.memory.frames.pressure import UNMEETABLE, Demand, Room
from weft.memory.lease import Lease
from weft.memory.prefix.compressed_kv import KvCompression, Unpacking
from weft.memory.prefix.compressed_state import COMPRESS_BYTES_PER_STEP, CompressionRoom, pages_beyond
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.prefix.eviction import EVICTIONS_PER_STEP, choose
from weft.memory.prefix.lookup import path_pages
from weft.memory.prefix.sharing import Sharing
from weft.memory.reservation import Extension, Moves, Opening, Reservation, Saving
from weft.memory.values import NO_NODE, NO_SLOT, Checkpoint, Eviction, FrameClaim, Match, NodeId
from weft.units import PAGE_TOKENS, FrameId, PageId, SeqId, SlotId, pages_for

Int32s = npt.NDArray[np.int32]
_NO_MOVES = Moves()


class Draft:
    """One step's wishes. Made by ``Memory.draft``; ends in ``seal`` or is dropped."""

    __slots__ = (
        "_books",
        "_closed",
        "_compacting",
        "_flushed",
        "_frames",
        "_gained",
        "_last",
        "_needed",
        "_opened",
        "_page_copies",
        "_page_walk",
        "_published",
        "_restored",
        "_saved",
        "_sharing",
        "_slot_copies",
        "_slot_walk",
        "_spared",
        "_unpacking",
        "_version",
    )

    def __init__(self, books: Books) -> None:
        self._books = books
        self._version = books.version
        self._frames = FrameWalk(books.arena)
        self._page_walk = Walk(books.pages.packing, self._frames)
        self._slot_walk = Walk(books.slots.packing, self._frames)
        self._opened: dict[SeqId, tuple[Lease, Match]] = {}
        self._gained: dict[SeqId, list[PageId]] = {}
        self._closed: dict[SeqId, None] = {}
        self._saved: list[Saving] = []
        self._published: dict[SeqId, list[Checkpoint]] = {}
        self._unpacking = Unpacking(books.cache.compressed_kv)
        self._sharing = Sharing(books.cache.tree, self._unpacking)
        self._page_copies: list[PageCopy] = []
        self._slot_copies: list[SlotCopy] = []
        self._restored: list[RestoreState] = []
        self._spared: set[NodeId] = set()
        self._last: tuple[NodeId, ...] = ()
        self._needed = 0, 0
        self._flushed = self._compacting = False

    # ------------------------------------------------------------------ the verbs

    def open(self, seq: SeqId, match: Match, tokens: int, *, headroom_pages: int = 0) -> bool:
        """A lease with a slot and pages for ``tokens`` tokens, or False and nothing. ``headroom_pages``
        must stay free after it. What ``match`` found is read in place, and made wide for that where it is
        compressed; a checkpoint inside a page has that page copied, and its state is copied into the slot."""
        self._check_current()
        assert seq not in self._books.leases, f"sequence {seq} has a lease"
        assert seq not in self._opened, f"sequence {seq} was opened in this draft"
        plan = self._books.plan
        shared_tokens = match.cached_tokens // PAGE_TOKENS * PAGE_TOKENS
        page_count = plan.pages_for(tokens) - plan.pages_for(shared_tokens)
        anchor = self._anchor(match)
        widened = self._unpacking.missing(anchor) if anchor is not None else 0
        if widened is None or any(self._room().short(page_count + widened + headroom_pages, 1)):
            return False
        slot, epoch = NO_SLOT, 0
        if plan.slots_per_frame:
            [slot] = self._slot_walk.take(1)
            epoch = self._books.slots.epochs[slot]
        lease = Lease(seq, [], slot, epoch, match.cached_tokens, match.salt)
        gained = self._page_walk.take(page_count)
        if anchor is not None:
            self._open_on(anchor, lease, shared_tokens, gained)
        self._opened[seq] = lease, match
        self._gained[seq] = gained
        return True

    def _anchor(self, match: Match) -> Node | None:
        if match.anchor == NO_NODE:
            return None
        assert match.version == self._version, (
            f"a match of version {match.version} was used on version {self._version}")
        return self._books.cache.tree.by_id[match.anchor]

    def _open_on(self, anchor: Node, lease: Lease, shared_tokens: int, gained: list[PageId]) -> None:
        self._unpacking.restore(anchor, self._page_walk.take)
        lease.pages = self._unpacking.resolve(path_pages(anchor, 0, shared_tokens))
        lease.shared_tokens = shared_tokens
        if anchor.is_tail and anchor.pages:
            self._page_copies.append(PageCopy(anchor.pages[0], gained[0]))
        if anchor.slot == COMPRESSED:
            compressed = self._books.cache.compressed_states.pages[anchor.id]
            self._restored.append(RestoreState(tuple(compressed), lease.slot))
        elif lease.slot != NO_SLOT:
            self._slot_copies.append(SlotCopy(anchor.slot, lease.slot))
        self._spared.add(anchor.id)

    def extend(self, seq: SeqId, tokens: int) -> bool:
        """Room for ``tokens`` tokens in all; True at once where the lease has it, False and nothing where
        the arena does not."""
        lease = self._lease(seq)
        gained = self._gained.get(seq)
        held = len(lease.pages) + (len(gained) if gained is not None else 0)
        if tokens <= held * PAGE_TOKENS or not self._books.plan.pages_per_frame:
            return True
        missing = pages_for(tokens) - held
        if self._page_walk.room < missing:
            return False
        pages = self._page_walk.take(missing)
        if gained is None:
            self._gained[seq] = pages
        else:
            gained += pages
        return True

    def save(self, seq: SeqId, position: int, *, spare: int = 1) -> SlotId | None:
        """A slot for the state of ``seq`` after ``position`` tokens (a multiple of a page), which a run of
        this step writes; ``publish`` or ``close`` of a later draft puts it into the tree.

        None, and nothing taken, unless it costs nobody else: best effort (law L9). ``spare`` slots more must
        stay free, and if it takes a frame, a page for each lease."""
        self._lease(seq)
        cache, slots = self._books.cache, self._slot_walk
        if not cache.enabled or not cache.stateful:
            return None
        assert position > 0, "there is no state after no tokens"
        assert position % PAGE_TOKENS == 0, f"a checkpoint at {position} is inside a page"
        if slots.room <= spare:
            return None
        per_frame = self._books.plan.pages_per_frame
        if per_frame and not slots.left and self._page_walk.room - per_frame < self._reserve_pages():
            return None
        [slot] = slots.take(1)
        self._saved.append(Saving(seq, Checkpoint(position, slot, self._books.slots.epochs[slot])))
        return slot

    def publish(self, seq: SeqId, tokens: Int32s) -> None:
        """``tokens``, the first ones of ``seq``, all computed, go into the tree as far as they fill pages,
        with the checkpoints saved in earlier steps up to there. The sequence goes on and reads the tree's
        pages from then on: ``table_patches`` says where those are not the ones it had."""
        lease = self._lease(seq)
        assert seq in self._books.leases, f"sequence {seq} was opened in this draft"
        assert seq not in self._published, f"sequence {seq} published in this draft"
        whole = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
        self._publish(lease, tokens[:whole], self._taps_up_to(lease, whole), patch=True)

    def close(self, seq: SeqId, *, keep: Int32s | None = None) -> None:
        """The lease ends; what it holds, and what this draft gave it, is free from the next draft on.

        ``keep``: the tokens that are computed, exactly: the running slot holds the state after the last of
        them. They go into the tree with that state and those saved on the way."""
        lease = self._lease(seq)
        if keep is not None and len(keep) and self._books.cache.enabled:
            assert seq in self._books.leases, f"sequence {seq} was opened in this draft"
            saves = self._taps_up_to(lease, len(keep))
            if lease.slot != NO_SLOT:
                saves = (*saves, Checkpoint(len(keep), lease.slot, lease.epoch))
            else:
                keep = keep[:len(keep) // PAGE_TOKENS * PAGE_TOKENS]
            self._publish(lease, keep, saves, patch=False)
        self._closed[seq] = None

    def _taps_up_to(self, lease: Lease, position: int) -> tuple[Checkpoint, ...]:
        done = self._published.get(lease.seq, ())
        return tuple(tap for tap in lease.taps if tap.position <= position and tap not in done)

    def _publish(self, lease: Lease, tokens: Int32s, saves: tuple[Checkpoint, ...], *, patch: bool) -> None:
        cache = self._books.cache
        new_kv = cache.tree.paged and len(tokens) > lease.shared_tokens
        if not cache.enabled or not (new_kv or saves):
            return
        self._published.setdefault(lease.seq, []).extend(saves)
        rest = np.ascontiguousarray(tokens[lease.shared_tokens:], dtype=np.int32)
        self._sharing.add(lease, rest.tobytes(), saves, patch=patch)

    def evict_last(self, nodes: Iterable[NodeId]) -> None:
        """Checkpoints (KV, in a model without states) that go when nothing else is left to evict, the first
        of ``nodes`` at the very end. Those that are gone by now are passed over."""
        self._last = tuple(dict.fromkeys(name for name in nodes if name in self._books.cache.tree.by_id))

    def reclaim(self, *, pages: int = 0, slots: int = 0, sparing: Iterable[NodeId] = ()) -> bool:
        """After a verb that needed so many pages and slots said no: make room for it, and for what was asked
        before, by moving things together and by evicting what that leaves short. True: the next draft has
        more. False: nothing helps, and nothing is done for this. ``sparing``: of what goes last, this is not
        worth it."""
        self._check_current()
        wanted = self._needed[0] + pages, self._needed[1] + slots
        if not any(self._room().short(*wanted)):
            return False
        demand = self._demand(*wanted)
        if not demand.met(*self._books.cache.evictable_except(sparing)):
            return False
        if not demand.met() and not self._choose(demand):
            return False
        self._needed = wanted
        return True

    def compact(self) -> None:
        """Empty as many frames as there are holes for and a step may, whether somebody needs them or not."""
        self._check_current()
        self._compacting = True

    def flush(self) -> None:
        """Drop whatever no lease reads."""
        self._check_current()
        self._flushed = True

    # ------------------------------------------------------------------ what it gives

    def new_pages(self, seq: SeqId) -> list[PageId]:
        """Pages that this draft gives ``seq``, in order; they follow those of its lease, and the tree's
        where it opened on a match."""
        return self._gained.get(seq, [])

    def shared_pages(self, seq: SeqId) -> list[PageId]:
        """The tree's pages that come first in ``seq``, which was opened in this draft."""
        return self._opened[seq][0].pages

    def slot_of(self, seq: SeqId) -> SlotId:
        """The slot of ``seq``, PAD in a model without recurrent layers."""
        lease = self._lease(seq)
        if seq in self._books.leases and self._books.plan.slots_per_frame:
            self._books.slots.check(lease.slot, lease.epoch)
        return lease.slot

    def seal(self) -> Reservation:
        """The frozen sum of this draft so far. A reading: what the draft takes later is not in it."""
        self._check_current()
        opened = tuple([Opening(seq, (*lease.pages, *self._gained[seq]), lease.slot, lease.epoch, match)
                        for seq, (lease, match) in self._opened.items()])
        extended = tuple([Extension(seq, tuple(pages))
                          for seq, pages in self._gained.items() if seq not in self._opened])
        chosen, moves = self._relief()
        if not (chosen or moves or opened or self._closed or self._saved or self._sharing.publications):
            frames = tuple(self._frames.claims)
            return Reservation(self._version, frames, tuple(self._page_walk.taken), (), (), extended, (),
                               arena_work=ArenaWork(_to_zero(frames)) if frames else NO_WORK)
        compressed, pages_compressed_in, frames_compressed_in = self._compress(chosen)
        tree, compressed_kv = self._books.cache.tree, self._books.cache.compressed_kv
        frames = (*self._frames.claims, *frames_compressed_in)
        patches = tuple(patch for patch in self._sharing.patches if patch.seq not in self._closed)
        return Reservation(
            version=self._version,
            frames=frames,
            pages=(*self._page_walk.taken, *(copy.dst for copy in moves.pages), *pages_compressed_in),
            slots=(*self._slot_walk.taken, *(copy.dst for copy in moves.slots)),
            opened=opened,
            extended=extended,
            closed=tuple(self._closed),
            saved=tuple(self._saved),
            published=tuple(self._sharing.publications),
            evicted=tuple(one for one in chosen if not one.compresses),
            table_patches=(*patches, *moves.table_patches),
            moves=moves,
            arena_work=ArenaWork(
                zero_frames=_to_zero(frames),
                state_restores=tuple(self._restored),
                kv_restores=tuple(self._unpacking.restored),
                state_compressions=compressed,
                kv_compressions=compressed_kv.compressions(
                    tree.by_id[one.node] for one in chosen if one.what == "pages"),
                slot_copies=(*self._slot_copies, *moves.slots),
                page_copies=(*self._page_copies, *moves.pages)),
        )

    # ------------------------------------------------------------------ when memory is short

    def _room(self) -> Room:
        plan = self._books.plan
        return Room(self._page_walk.left, self._slot_walk.left, self._frames.left,
                    plan.pages_per_frame, plan.slots_per_frame)

    def _demand(self, pages: int, slots: int) -> Demand:
        """That ``pages`` and ``slots`` fit beside what is held once this draft is true."""
        plan, books = self._books.plan, self._books
        pages_freed, slots_freed = self._freed()
        return Demand(plan.frame_count, plan.pages_per_frame, plan.slots_per_frame,
                      books.pages.packing.held_count + len(self._page_walk.taken) - pages_freed + pages,
                      books.slots.packing.held_count + len(self._slot_walk.taken) - slots_freed + slots)

    def _freed(self) -> tuple[int, int]:
        """Pages and slots that what is closed and published here gives back, besides evictions; at least."""
        pages, slots = self._sharing.freed_count, 0
        kept = {published.seq: published for published in self._sharing.publications}
        for seq in self._closed:
            lease = self._lease_of(seq)
            own = len(lease.pages) + len(self._gained.get(seq, ())) - self._books.plan.pages_for(
                lease.shared_tokens)
            publication = kept.get(seq)
            if publication is not None:
                pages += max(0, own - len(publication.pages) - 1)
            else:
                pages += own
                slots += lease.slot != NO_SLOT
        return pages, slots

    def _reserve_pages(self) -> int:
        """A page for each sequence that runs: all of them may cross into a new one in the same step."""
        return len(self._books.leases) + len(self._opened)

    def _relief(self) -> tuple[list[Eviction], Moves]:
        """What is done so that the next draft has what is wanted: nothing where it is there; moves where it
        would be if things lay well; compression or evictions where it would not."""
        if self._flushed:
            return self._choose(UNMEETABLE), _NO_MOVES  # perhaps between steps, where nobody makes copies
        room, most = self._room(), max(self._needed[0], self._reserve_pages()) + self._books.plan.compressed_pages
        if not (self._compacting or any(room.short(most, self._needed[1] + self._books.slots_ahead))):
            return [], _NO_MOVES  # the most that can be wanted is there, as in nearly every step
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
        if any(one.compresses for one in evictions):
            return evictions, _NO_MOVES  # both would take the next pages, or name the same
        if self._compacting:
            frames = (self._books.plan.frame_count,) * 2
        return evictions, self._moves(*frames)

    def _wanted(self) -> tuple[int, int]:
        """Pages and slots that were reclaimed, and a reserve to have free ahead of need: pages, and slots for
        whoever comes next and what it keeps on its way, where that can be had without what goes last. A draft
        that closes something frees anyway."""
        cache = self._books.cache
        pages, slots = self._needed
        if self._closed or not any(cache.evictable):
            return pages, slots
        reserve, ahead = max(pages, self._reserve_pages()), self._books.slots_ahead
        to_compress_in = self._books.plan.compressed_pages if cache.order.in_slots else 0
        evictable = cache.evictable_except(self._last)
        for wanted in ((reserve + to_compress_in, slots + ahead), (reserve, slots + ahead), (reserve, slots)):
            if not any(self._room().short(*wanted)) or self._demand(*wanted).met(*evictable):
                return wanted
        return pages, slots

    def _moves(self, frames_of_pages: int, frames_of_slots: int) -> Moves:
        if not frames_of_pages and not frames_of_slots:
            return _NO_MOVES
        published = {publication.seq for publication in self._sharing.publications}
        fixed = Fixed(published, self._read(), self._closed)
        compaction = Compaction(self._books, self._page_walk, self._slot_walk, fixed)
        return compaction.moves(frames_of_pages, frames_of_slots)

    def _read(self) -> set[NodeId]:
        """Nodes that this draft opens on or publishes through."""
        nodes = self._spared | self._sharing.visited
        for _, match in self._opened.values():
            nodes |= self._books.cache.tree.path_ids(match.anchor)
        return nodes

    def _choose(self, demand: Demand) -> list[Eviction]:
        cache, plan = self._books.cache, self._books.plan
        at_once = 0
        if plan.compressed_pages and not self._flushed:
            room = self._page_walk.room - self._reserve_pages()
            at_once = min(room // plan.compressed_pages, max(1, COMPRESS_BYTES_PER_STEP // plan.slot_stride_bytes))
        return choose(cache.order, demand, ranked=cache.policy.order(cache.order.states),
                      spared=self._read(), last=self._last,
                      limit=len(cache.tree.by_id) * 2 if self._flushed else EVICTIONS_PER_STEP,
                      compression=CompressionRoom(plan.compressed_pages, at_once),
                      kv_compression=KvCompression(cache.compressed_kv, enabled=not self._flushed))

    def _compress(self, chosen: list[Eviction]) -> tuple[tuple[CompressState, ...], list[PageId], list[FrameClaim]]:
        """What goes from its slot into pages, those pages, and frames to claim for them."""
        nodes = [self._books.cache.tree.by_id[one.node] for one in chosen if one.what == "slot"]
        each = self._books.plan.compressed_pages
        pages, frames = pages_beyond(self._page_walk, self._frames, each * len(nodes))
        return tuple(CompressState(node.id, node.slot, tuple(pages[at * each:(at + 1) * each]))
                     for at, node in enumerate(nodes)), pages, frames

    def _lease(self, seq: SeqId) -> Lease:
        self._check_current()
        assert seq not in self._closed, f"sequence {seq} was closed in this draft"
        return self._lease_of(seq)

    def _lease_of(self, seq: SeqId) -> Lease:
        lease = self._books.leases.get(seq)
        if lease is None and seq in self._opened:
            lease = self._opened[seq][0]
        assert lease is not None, f"sequence {seq} has no lease"
        return lease

    def _check_current(self) -> None:
        assert self._version == self._books.version, (
            f"a draft of version {self._version} was used on version {self._books.version}")


def _to_zero(frames: Iterable[FrameClaim]) -> tuple[FrameId, ...]:
    """Of claimed frames, those whose bytes are of another kind (law L6)."""
    return tuple(claim.frame for claim in frames if claim.needs_zero)
