"""A transaction: one step's wishes for memory, as an overlay that writes nothing outside itself.

    open    a slot, and pages for all tokens; on a match the first pages are the tree's, read only
            or, for a load, with pages and state that come from a transfer buffer
    extend  pages for more tokens
    save    a slot for the state at a position that this step passes
    publish the computed tokens of a sequence enter the tree, with the states that it saved
    close   the lease ends; with ``keep`` its tokens and its running slot enter the tree first
    reclaim make room for what was refused: move, compress or evict (relief.py)
    seal    the frozen sum

    load    buffer   rows of pages:  | exact KV | int8 KV, side by side | exact KV | compressed state |
                                          |          |                       |             |
            lease    pages            [ 17 4 90 ]  [ 33 8 ] --restore-->  [ 12 ]      [ 60 61 ] --> slot
                                                    [ 8 51 33 70 ]

A transaction walks the free frames, pages and slots in the order of allocation and records those that each sequence
gets. The pools do not change, so dropping the transaction is the rollback. Memory that it closes, adopts from the tree,
moves or evicts is free from the next transaction on: the step in flight may still read it. Each use checks the version
of memory's state: a transaction of an older version is a bug that is caught (law L5).

A load copies codes into some of the pages that the lease gets, and the same step restores them there. A compressed
state takes pages of the lease too. These *spare* pages hold nothing once the step is computed. They come after the
pages of the tokens, and the close of the lease frees them.

Laws: L2 (all or nothing), L3 (no room is False or None), L5, L9 (``save`` costs no other request anything).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft.memory.arena_work import (
    NO_WORK,
    ArenaWork,
    KvForm,
    PageCopy,
    PageTransfer,
    RestoreKv,
    RestoreState,
    SlotCopy,
    SnapshotLoad,
    StateTransfer,
)
from weft.memory.frames.arena import FrameWalk, Walk
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.compressed_kv import CompressedPages, Restoring
from weft.memory.prefix.edge import COMPRESSED, Node, path_pages
from weft.memory.prefix.sharing import Sharing
from weft.memory.prefix_store import EXACT_FORM, KvRows
from weft.memory.relief import Relief
from weft.memory.reservation import Extension, Lease, Opening, Reservation, Saving
from weft.memory.state import MemoryState
from weft.memory.values import NO_NODE, NO_SLOT, FrameClaim, Match, NodeId, Snapshot
from weft.units import PAD, PAGE_TOKENS, FrameId, PageId, SeqId, SlotId, ceil_div, pages_for


@dataclass(slots=True)
class LoadWork:
    """The work of a load. ``pages``: the pages of the lease in the order of tokens, the spare pages last."""

    pages: list[PageId] = field(default_factory=list)
    page_loads: list[PageTransfer] = field(default_factory=list)
    state_loads: list[StateTransfer] = field(default_factory=list)
    kv_restores: list[RestoreKv] = field(default_factory=list)
    state_restores: list[RestoreState] = field(default_factory=list)


def spare_pages(load: SnapshotLoad, plan: ArenaPlan) -> int:
    """Return the pages that a lease of ``load`` takes besides those of its tokens: for a compressed state, and one for
    compressed rows of which a part is cached."""
    compressed = any(rows.form != EXACT_FORM for rows in load.rows)
    return compressed + (plan.compressed_pages if load.state_row != PAD else 0)


def plan_load(load: SnapshotLoad, plan: ArenaPlan, pages: Sequence[PageId], slot: SlotId, first: int) -> LoadWork:
    """Plan a load. ``pages``: one for each 16 tokens from position ``first`` on, and the spare ones."""
    work, pool = LoadWork(), deque(pages)
    if plan.pages_per_frame:
        for rows in load.rows:
            if rows.end > first:
                _plan_rows(work, load, rows, max(first, rows.start), plan, pool)
    if load.state_row != PAD:
        state_pages = tuple(pool.popleft() for _ in range(plan.compressed_pages))
        work.page_loads.append(PageTransfer(load.buffer, load.state_row, state_pages))
        work.state_restores.append(RestoreState(state_pages, slot))
        pool += state_pages
    elif slot != NO_SLOT:
        work.state_loads.append(StateTransfer(load.buffer, slot))
    work.pages += pool
    return work


def _plan_rows(
    work: LoadWork, load: SnapshotLoad, rows: KvRows, begin: int, plan: ArenaPlan, pool: deque[PageId]
) -> None:
    passed, count = (begin - rows.start) // PAGE_TOKENS, pages_for(rows.end) - begin // PAGE_TOKENS
    if rows.form == EXACT_FORM:
        pages = tuple(pool.popleft() for _ in range(count))
        work.page_loads.append(PageTransfer(load.buffer, rows.first + passed, pages))
        work.pages += pages
        return
    form = KvForm(plan.page_bytes, plan.compressed_kv_bytes)
    row, skip_bytes = divmod(passed * form.record_bytes, form.page_bytes)
    compressed = [pool.popleft() for _ in range(ceil_div(skip_bytes + count * form.record_bytes, form.page_bytes))]
    run = CompressedPages(compressed, 0, skip_bytes, 0, count)
    extra = [pool.popleft() for _ in range(run.missing)]
    restored = run.restore_into(extra, form)
    work.page_loads.append(PageTransfer(load.buffer, rows.first + row, tuple(compressed)))
    work.kv_restores.append(RestoreKv(NO_NODE, tuple(compressed), skip_bytes, restored, form))
    work.pages += restored
    pool += [page for page in (*compressed, *extra) if page not in set(restored)]


Int32s = npt.NDArray[np.int32]


class Transaction:
    """One step's wishes. ``Memory.transaction`` creates it; it ends in ``seal`` or is dropped."""

    __slots__ = (
        "_closed",
        "_frames",
        "_gained",
        "_loads",
        "_memory",
        "_opened",
        "_opened_on",
        "_page_copies",
        "_page_walk",
        "_published",
        "_relief",
        "_restored",
        "_restoring",
        "_saved",
        "_sharing",
        "_slot_copies",
        "_slot_walk",
        "_version",
    )

    def __init__(self, memory: MemoryState) -> None:
        self._memory = memory
        self._version = memory.version
        self._frames = FrameWalk(memory.arena)
        self._page_walk = Walk(memory.pages.packing, self._frames)
        self._slot_walk = Walk(memory.slots.packing, self._frames)
        self._opened: dict[SeqId, tuple[Lease, Match]] = {}
        self._gained: dict[SeqId, list[PageId]] = {}
        self._closed: dict[SeqId, None] = {}
        self._saved: list[Saving] = []
        self._published: dict[SeqId, list[Snapshot]] = {}
        self._restoring = Restoring(memory.cache.compressed_kv)
        self._sharing = Sharing(memory.cache.tree, self._restoring)
        self._page_copies: list[PageCopy] = []
        self._slot_copies: list[SlotCopy] = []
        self._restored: list[RestoreState] = []
        self._loads: list[LoadWork] = []
        self._opened_on: set[NodeId] = set()
        self._relief = Relief(
            memory,
            self._frames,
            self._page_walk,
            self._slot_walk,
            self._sharing,
            self._opened,
            self._gained,
            self._closed,
            self._opened_on,
        )

    # ------------------------------------------------------------------ the verbs

    def open(
        self, seq: SeqId, match: Match, tokens: int, *, headroom_pages: int = 0, load: SnapshotLoad | None = None
    ) -> bool:
        """Open a lease with a slot and pages for ``tokens`` tokens, or return False and change nothing.
        ``headroom_pages`` must stay free after it. The lease reads the pages of ``match`` in place; compressed KV is
        restored first. The state of the snapshot is copied into the slot, and a partly filled page is copied too.

        ``load``: ``tokens`` are those of a snapshot in a transfer buffer, which reaches back to ``match``.
        This step loads its state and the pages that ``match`` lacks; a later transaction closes it with
        ``keep``."""
        self._check_current()
        assert seq not in self._memory.leases, f"sequence {seq} has a lease"
        assert seq not in self._opened, f"sequence {seq} was opened in this transaction"
        plan = self._memory.plan
        shared_tokens = match.cached_tokens // PAGE_TOKENS * PAGE_TOKENS
        page_count = plan.pages_for(tokens) - plan.pages_for(shared_tokens)
        if load is not None:
            page_count += spare_pages(load, plan)
        anchor = self._anchor(match)
        restored = self._restoring.missing(anchor) if anchor is not None else 0
        if restored is None or any(self._relief.room().short(page_count + restored + headroom_pages, 1)):
            return False
        slot, epoch = NO_SLOT, 0
        if plan.slots_per_frame:
            [slot] = self._slot_walk.take(1)
            epoch = self._memory.slots.epochs[slot]
        lease = Lease(
            seq,
            [],
            slot,
            epoch,
            match.cached_tokens,
            match.salt,
            loads=load is not None,
            inexact=load is not None and not load.exact,
        )
        gained = self._page_walk.take(page_count)
        if anchor is not None:
            self._open_on(anchor, lease, shared_tokens, gained, copies=load is None)
        if load is not None:
            assert load.start <= shared_tokens, "a gap between cached and loaded pages"
            work = plan_load(load, plan, gained, slot, shared_tokens)
            self._loads.append(work)
            gained = work.pages
        self._opened[seq] = lease, match
        self._gained[seq] = gained
        return True

    def _anchor(self, match: Match) -> Node | None:
        if match.anchor == NO_NODE:
            return None
        assert match.version == self._version, f"a match of version {match.version} was used on version {self._version}"
        return self._memory.cache.tree.by_id[match.anchor]

    def _open_on(self, anchor: Node, lease: Lease, shared_tokens: int, gained: list[PageId], *, copies: bool) -> None:
        """Open ``lease`` on a match. ``copies``: the state of ``anchor`` and its partly filled page are copied for the
        lease."""
        self._restoring.restore(anchor, self._page_walk.take)
        lease.pages = self._restoring.resolve(path_pages(anchor, 0, shared_tokens))
        lease.shared_tokens = shared_tokens
        self._opened_on.add(anchor.id)
        if not copies:
            return
        if anchor.is_tail and anchor.pages:
            self._page_copies.append(PageCopy(anchor.pages[0], gained[0]))
        if anchor.slot == COMPRESSED:
            compressed = self._memory.cache.compressed_states.pages[anchor.id]
            self._restored.append(RestoreState(tuple(compressed), lease.slot))
        elif lease.slot != NO_SLOT:
            self._slot_copies.append(SlotCopy(anchor.slot, lease.slot))

    def extend(self, seq: SeqId, tokens: int, *, headroom_pages: int = 0) -> bool:
        """Extend the lease to ``tokens`` tokens in all. True at once if the lease has room; False, without a change, if
        the arena has none, or fewer than ``headroom_pages`` would be left."""
        lease = self._lease(seq)
        gained = self._gained.get(seq)
        page_count = len(lease.pages) + (len(gained) if gained is not None else 0)
        if tokens <= page_count * PAGE_TOKENS or not self._memory.plan.pages_per_frame:
            return True
        missing = pages_for(tokens) - page_count
        if self._page_walk.room < missing + headroom_pages:
            return False
        pages = self._page_walk.take(missing)
        if gained is None:
            self._gained[seq] = pages
        else:
            gained += pages
        return True

    def extend_by_page(self, seqs: list[SeqId]) -> list[PageId]:
        """Add one page for each of ``seqs``, in order, until the arena has no more: return the pages of those that got
        one. No earlier verb of this transaction named them. A step in which many decodes cross into their next page is
        one call of this."""
        self._check_current()
        for seq in seqs:
            assert seq in self._memory.leases, f"sequence {seq} has no lease"
            assert seq not in self._closed, f"sequence {seq} was closed in this transaction"
            assert seq not in self._gained, f"sequence {seq} was extended in this transaction"
        pages = self._page_walk.take(min(len(seqs), self._page_walk.room))
        self._gained.update(zip(seqs, ([page] for page in pages), strict=False))
        return pages

    def save(self, seq: SeqId, position: int, *, spare: int = 1) -> SlotId | None:
        """Take a slot for the state of ``seq`` after ``position`` tokens (a multiple of a page), and return it. A run
        of this step writes it; ``publish`` or ``close`` of a later transaction puts it into the tree.

        Best effort (law L9): None, and nothing taken, if it would cost another request anything. ``spare``
        more slots must stay free, and if it claims a frame, a page for each lease."""
        self._lease(seq)
        cache, slots = self._memory.cache, self._slot_walk
        if not cache.enabled or not cache.stateful:
            return None
        assert position > 0, "there is no state after no tokens"
        assert position % PAGE_TOKENS == 0, f"a snapshot at {position} is inside a page"
        if slots.room <= spare:
            return None
        per_frame = self._memory.plan.pages_per_frame
        if per_frame and not slots.left and self._page_walk.room - per_frame < self._relief.reserve_pages():
            return None
        [slot] = slots.take(1)
        self._saved.append(Saving(seq, Snapshot(position, slot, self._memory.slots.epochs[slot])))
        return slot

    def publish(self, seq: SeqId, tokens: Int32s) -> None:
        """Publish ``tokens``, the first ones of ``seq``, which are computed. Those that fill complete pages enter the
        tree, with the snapshots saved up to there in earlier steps. The sequence continues and reads the tree's pages
        from then on. ``table_patches`` has the entries that change."""
        lease = self._lease(seq)
        assert seq in self._memory.leases, f"sequence {seq} was opened in this transaction"
        assert seq not in self._published, f"sequence {seq} published in this transaction"
        whole = len(tokens) // PAGE_TOKENS * PAGE_TOKENS
        self._publish(lease, tokens[:whole], self._taps_up_to(lease, whole), patch=True)

    def close(self, seq: SeqId, *, keep: Int32s | None = None) -> None:
        """End the lease. Its memory, including that of this transaction, is free from the next transaction on.

        ``keep``: exactly the computed tokens; the running slot holds the state after the last of them. They
        enter the tree with that state and with those saved before."""
        lease = self._lease(seq)
        if keep is not None and len(keep) and self._memory.cache.enabled:
            assert seq in self._memory.leases, f"sequence {seq} was opened in this transaction"
            saves = self._taps_up_to(lease, len(keep))
            if lease.slot != NO_SLOT:
                saves = (*saves, Snapshot(len(keep), lease.slot, lease.epoch))
            else:
                keep = keep[: len(keep) // PAGE_TOKENS * PAGE_TOKENS]
            self._publish(lease, keep, saves, patch=False)
        self._closed[seq] = None

    def _taps_up_to(self, lease: Lease, position: int) -> tuple[Snapshot, ...]:
        done = self._published.get(lease.seq, ())
        return tuple(snapshot for snapshot in lease.snapshots if snapshot.position <= position and snapshot not in done)

    def _publish(self, lease: Lease, tokens: Int32s, saves: tuple[Snapshot, ...], *, patch: bool) -> None:
        cache = self._memory.cache
        new_kv = cache.tree.paged and len(tokens) > lease.shared_tokens
        if not cache.enabled or not (new_kv or saves):
            return
        self._published.setdefault(lease.seq, []).extend(saves)
        rest = np.ascontiguousarray(tokens[lease.shared_tokens :], dtype=np.int32)
        self._sharing.add(lease, rest.tobytes(), saves, patch=patch)

    def evict_last(self, nodes: Iterable[NodeId]) -> None:
        """Evict the snapshots of ``nodes`` (their KV, in a model without states) only when nothing else is
        left. The first of them goes at the very end. Nodes that no longer exist are skipped."""
        self._relief.evict_last(nodes)

    def reclaim(self, *, pages: int = 0, slots: int = 0, sparing: Iterable[NodeId] = ()) -> bool:
        """Reclaim ``pages`` and ``slots`` that a verb was refused: make room for it and for earlier refusals, by moves
        and evictions. True: the next transaction has more. False: nothing helps, and nothing is done for this.
        ``sparing``: nodes that go last and must not be evicted for this."""
        self._check_current()
        return self._relief.reclaim(pages, slots, sparing)

    def compact(self) -> None:
        """Empty the most frames that the holes and the bounds of a step allow, whether they are needed or not."""
        self._check_current()
        self._relief.compact()

    def flush(self) -> None:
        """Evict everything that no lease reads."""
        self._check_current()
        self._relief.flush()

    # ------------------------------------------------------------------ results

    def new_pages(self, seq: SeqId) -> list[PageId]:
        """Return the pages that this transaction gives ``seq``, in order. They follow the pages of the lease, or after
        an opening on a match the pages of the tree."""
        return self._gained.get(seq, [])

    def shared_pages(self, seq: SeqId) -> list[PageId]:
        """Return the tree's pages at the front of ``seq``, which this transaction opened."""
        return self._opened[seq][0].pages

    def slot_of(self, seq: SeqId) -> SlotId:
        """Return the slot of ``seq``, PAD in a model without recurrent layers."""
        lease = self._lease(seq)
        if seq in self._memory.leases and self._memory.plan.slots_per_frame:
            self._memory.slots.check(lease.slot, lease.epoch)
        return lease.slot

    def seal(self) -> Reservation:
        """Return the frozen sum of this transaction so far. A reading: later verbs are not in it."""
        self._check_current()
        opened = tuple(
            [
                Opening(
                    seq, (*lease.pages, *self._gained[seq]), lease.slot, lease.epoch, match, lease.loads, lease.inexact
                )
                for seq, (lease, match) in self._opened.items()
            ]
        )
        extended = tuple(
            [Extension(seq, tuple(pages)) for seq, pages in self._gained.items() if seq not in self._opened]
        )
        chosen, moves = self._relief.choose()
        if not (chosen or moves or opened or self._closed or self._saved or self._sharing.publications):
            frames = tuple(self._frames.claims)
            return Reservation(
                self._version,
                frames,
                tuple(self._page_walk.items),
                (),
                (),
                extended,
                (),
                arena_work=ArenaWork(_to_zero(frames)) if frames else NO_WORK,
            )
        state_compressions, state_pages, state_frames = self._relief.compress_states(chosen)
        tree, compressed_kv = self._memory.cache.tree, self._memory.cache.compressed_kv
        frames = (*self._frames.claims, *state_frames)
        patches = tuple(patch for patch in self._sharing.patches if patch.seq not in self._closed)
        return Reservation(
            version=self._version,
            frames=frames,
            pages=(*self._page_walk.items, *(copy.dst for copy in moves.pages), *state_pages),
            slots=(*self._slot_walk.items, *(copy.dst for copy in moves.slots)),
            opened=opened,
            extended=extended,
            closed=tuple(self._closed),
            saved=tuple(self._saved),
            published=tuple(self._sharing.publications),
            evicted=tuple(eviction for eviction in chosen if not eviction.compresses),
            table_patches=(*patches, *moves.table_patches),
            moves=moves,
            arena_work=ArenaWork(
                zero_frames=_to_zero(frames),
                page_loads=tuple(pages for load in self._loads for pages in load.page_loads if pages.pages),
                state_loads=tuple(state for load in self._loads for state in load.state_loads),
                state_restores=(*self._restored, *(state for load in self._loads for state in load.state_restores)),
                kv_restores=(*self._restoring.restored, *(kv for load in self._loads for kv in load.kv_restores)),
                state_compressions=state_compressions,
                kv_compressions=compressed_kv.compressions(
                    tree.by_id[eviction.node] for eviction in chosen if eviction.what == "pages"
                ),
                slot_copies=(*self._slot_copies, *moves.slots),
                page_copies=(*self._page_copies, *moves.pages),
            ),
        )

    # ------------------------------------------------------------------ checks

    def _lease(self, seq: SeqId) -> Lease:
        self._check_current()
        assert seq not in self._closed, f"sequence {seq} was closed in this transaction"
        lease = self._memory.leases.get(seq)
        if lease is None and seq in self._opened:
            lease = self._opened[seq][0]
        assert lease is not None, f"sequence {seq} has no lease"
        return lease

    def _check_current(self) -> None:
        assert self._version == self._memory.version, (
            f"a transaction of version {self._version} was used on version {self._memory.version}"
        )


def _to_zero(frames: Iterable[FrameClaim]) -> tuple[FrameId, ...]:
    """Return the claimed frames with bytes of another kind (law L6)."""
    return tuple(claim.frame for claim in frames if claim.needs_zero)
