"""Writes: computed snapshots go to the store, piece by piece, during the steps and never inside them.

    commit      a sequence saves a snapshot           --> candidates, the most valuable first
    (poll)      worth it, not stored, a buffer is free   --> jobs: node, tokens, transfer buffer
    each plan   some pages of the jobs, a state first    --> ``ArenaWork`` stores, after the runs
    (finished)  every page is in the buffer              --> Store.put
    (poll)      written, or dropped                      --> the buffer is free

Jobs copy in the order in which they began. A step with runs copies at most ``step_bytes`` and one state, another step
IDLE_STEPS times that KV. If the first job leaves bytes, the next jobs use them: a step of prefills computes several
states, and memory may evict them a step later. A snapshot that shares KV with a job waits for the put of that job, so
the same KV is stored once.

Between two steps the node is looked up again: its pages may have moved. A node that was evicted before its
job was done ends the job, which is counted. One that was compressed meanwhile is a candidate again.

A snapshot is written if its expected uses save more than writing costs (``costs.restore``). The uses are those that the
cache policy expects; a policy without expectations counts PRIOR_USES and the hits so far. The candidate that is
expected to save the most tokens per byte is first, or the oldest. Snapshots that another engine waits for (``Orders``),
and those of pinned prefixes (``weft.memory.prefix.pins``), go before all of them, without
a price and without a pace; then they are candidates again.

Laws: L9 (a write never delays a request, takes none of its memory and fails none), L11 (candidates and
buffers are bounded; ``write_bytes_s`` paces jobs; restores have half of the buffers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush, heappushpop
from math import inf

import numpy as np

from weft.costs.restore import PRIOR_USES, RestorePrices
from weft.memory.arena_work import ArenaWork, PageTransfer, StateTransfer
from weft.memory.memory import Memory
from weft.memory.prefix.edge import COMPRESSED
from weft.memory.prefix.pins import PinnedPrefix
from weft.memory.prefix.readings import SnapshotContents
from weft.memory.prefix_store import (
    EXACT_FORM,
    INT4_KV,
    INT8_KV,
    INT8_STATE,
    RECORD_TOKENS_MAX,
    KvPiece,
    NewSnapshot,
    Orders,
    Store,
    StoreEvent,
    Ticket,
    TransferBuffers,
)
from weft.memory.values import NodeId
from weft.schedule.tier_values import WriteCounts
from weft.units import PAGE_TOKENS, BufferId, ceil_div, pages_for

STEP_BYTES = 8 << 20
"""Most bytes of KV that a step with runs copies for a job; at least one page."""
GPU_STEP_BYTES = 32 << 20
"""The same on a GPU, whose link moves it in 1.3 ms."""
IDLE_STEPS = 8
"""A step without runs copies this many times the bytes of a step with runs."""
CANDIDATES_MAX = 4096
LOOKS_PER_POLL = 8
JOBS_MAX = 8
"""Most jobs that copy at once (law L11)."""
PACE_SLACK_S = 1.0
"""Seconds of idle time that may be made up for."""


class _Begin(Enum):
    """Outcome for a candidate: a job or nothing more to do, no buffer, or KV that another job is storing."""

    DONE = "done"
    NO_ROOM = "no room"
    SHARES = "shares"


@dataclass(slots=True)
class _Job:
    """A snapshot that is being written. ``contents``: the snapshot as it was at first. ``copied`` of its pages are in
    ``buffer``. ``last_step``: the step that copies the last of it, -1 while some is left. ``begun_step``: the last step
    that copied some."""

    contents: SnapshotContents
    buffer: BufferId
    saved_s: float
    copied: int = 0
    has_state: bool = False
    last_step: int = -1
    begun_step: int = -1
    is_ordered: bool = False
    pin: PinnedPrefix | None = None
    is_dropped: bool = False
    """Whether the store was cleared: the copied part is not put."""

    @property
    def kv_rows(self) -> int:
        return sum(part.row_count for part in self.contents.parts)


class StoreWrites:
    """The writes of one scheduler. ``write_bytes_s``: 0 for no limit. ``compressed``: snapshots with compressed parts
    are written too. ``stored_share``: bytes on the disk for a byte of a put."""

    def __init__(
        self,
        store: Store,
        memory: Memory,
        buffers: TransferBuffers,
        prices: RestorePrices,
        clock: Callable[[], float],
        *,
        write_bytes_s: float,
        step_bytes: int = STEP_BYTES,
        compressed: bool = True,
        stored_share: Callable[[], float] = lambda: 1.0,
        orders: Orders | None = None,
    ) -> None:
        self.counts = WriteCounts()
        self.draining = False
        """Whether the engine ends: every snapshot that is worth it is written now, without a pace."""
        self._store = store
        self._memory = memory
        self._buffers = buffers
        self._prices = prices
        self._clock = clock
        self._write_bytes_s = write_bytes_s
        self._candidates: list[tuple[float, int, NodeId]] = []
        """A heap of (minus the value, age, node); values as they were when the node was looked at last."""
        self._age = 0
        self._skipped: dict[NodeId, bool] = {}
        """Candidates that were not worth writing, in order of age."""
        self._jobs: list[_Job] = []
        self._finished_step = 0
        self._puts: dict[Ticket, BufferId] = {}
        self._ordered: dict[Ticket, NodeId] = {}
        """Puts for other engines."""
        self._pinned: dict[Ticket, PinnedPrefix] = {}
        self._step_bytes = step_bytes
        self._paced_until_s = 0.0
        self._is_full = False
        """Whether the next candidate waits for room in the buffers."""
        plan = memory.plan
        self._has_pages = plan.pages_per_frame > 0
        self._kv_form = INT4_KV if plan.compressed_kv_dtype == "int4" else INT8_KV
        self._compressed_kv_bytes = plan.compressed_kv_bytes * buffers.page_bytes // max(1, plan.page_bytes)
        self._compressed = compressed
        self._stored_share = stored_share
        self._orders = orders
        memory.take_new_snapshots()

    @property
    def has_step(self) -> bool:
        """Whether a step would copy something."""
        return any(job.last_step < 0 for job in self._jobs)

    @property
    def is_waiting(self) -> bool:
        """Whether something is left to write, and time or the store must pass first."""
        return bool(self._puts or self._jobs or self._candidates)

    @property
    def next_look_s(self) -> float:
        """When ``look`` may begin a job; infinity while only an event of the store can change that."""
        if not self._candidates or self._is_full or not self._has_turn:
            return inf
        return max(self._clock(), self._paced_until_s)

    # ------------------------------------------------------------------ in a plan: reads only

    def work(self, *, idle: bool) -> tuple[tuple[PageTransfer, ...], tuple[StateTransfer, ...]]:
        """Return the next stores of the jobs. ``idle``: the step has no runs."""
        pages: list[PageTransfer] = []
        states: list[StateTransfer] = []
        fast = idle or any(job.is_ordered for job in self._jobs)
        left = self._step_bytes * (IDLE_STEPS if fast else 1) + self._buffers.slot_bytes
        for job in self._jobs:
            form = None
            if job.last_step < 0:
                form = self._memory.snapshot_contents(job.contents.node, job.contents.start)
            if form is None or form.form != job.contents.form:
                continue  # all is copied, or the next poll ends the job
            state_bytes = 0 if job.has_state or form.slot < 0 else self._buffers.slot_bytes
            is_first = not pages and not states
            if left < state_bytes and not is_first:
                break
            most = max(int(is_first), (left - state_bytes) // max(1, self._buffers.page_bytes))
            copied = form.pages[job.copied : job.copied + most]
            if copied:
                pages.append(PageTransfer(job.buffer, job.copied, copied))
            if state_bytes:
                states.append(StateTransfer(job.buffer, form.slot))
            left -= state_bytes + len(copied) * self._buffers.page_bytes
            if left <= 0:
                break
        return tuple(pages), tuple(states)

    # ------------------------------------------------------------------ by a commit, and between steps

    def committed(self, work: ArenaWork, step: int, resumed: Iterable[NodeId] = ()) -> None:
        """Note that step ``step`` does ``work``, and memory is as it is after it. ``resumed``: snapshots at which
        sequences begin."""
        for node in self._memory.take_new_snapshots():
            self.add(node)
        states = (compression.node for compression in work.state_compressions)
        kv = (compression.node for compression in work.kv_compressions)
        for node in (*resumed, *states, *kv):
            if self._skipped.pop(node, False):
                self.add(node)
        if not work.stores:
            return
        stored = {store.buffer for store in work.state_stores}
        copied = {store.buffer: len(store.pages) for store in work.page_stores}
        for job in self._jobs:
            job.has_state |= job.buffer in stored
            job.copied += copied.get(job.buffer, 0)
            if job.buffer in stored or job.buffer in copied:
                job.begun_step = step
                if job.copied == len(job.contents.pages):
                    job.last_step = step

    def finished(self, step: int) -> None:
        """Note that transfers of steps up to ``step`` have ended."""
        self._finished_step = step
        self._put_copied()

    def take(self, event: StoreEvent) -> None:
        buffer = self._puts.pop(event.ticket, None)
        if buffer is not None:
            self._buffers.free(buffer)
            self._is_full = False
            node = self._ordered.pop(event.ticket, None)
            if node is not None:
                self.add(node)  # it may be worth storing for this engine too
            _settle(self._pinned.pop(event.ticket, None), written=event.kind == "written")
            self.counts.written += event.kind == "written"
            self.counts.dropped += event.kind != "written"

    def clear(self) -> None:
        """Forget snapshots computed so far, but for those that other engines wait for."""
        self._candidates.clear()
        self._skipped.clear()
        for job in self._jobs:
            job.is_dropped = not job.is_ordered

    def forget(self) -> None:
        """Forget candidates and jobs of a memory that is lost. No step is in flight; puts go on to their ends."""
        for job in self._jobs:
            self._buffers.free(job.buffer)
            _settle(job.pin, written=False)
        self._jobs.clear()
        self._candidates.clear()
        self._skipped.clear()
        self._ordered.clear()
        self._pinned.clear()
        self._is_full = False
        self._memory.take_new_snapshots()

    def look(self) -> None:
        """End jobs whose node is gone; begin the next ones."""
        for job in list(self._jobs):
            if job.last_step < 0 and job.begun_step <= self._finished_step and not self._goes_on(job):
                self._jobs.remove(job)
                self._buffers.free(job.buffer)
                _settle(job.pin, written=False)
        self._put_copied()
        later: list[tuple[float, int, NodeId]] = []
        for _ in range(LOOKS_PER_POLL):
            if not self._candidates or not self._has_turn:
                break
            if self._clock() < self._paced_until_s and not self.draining and -self._candidates[0][0] < inf:
                break
            _, age, node = heappop(self._candidates)
            first = heappushpop(self._candidates, (-self._priority(node), age, node))
            began = self._begin(first[2])
            self._is_full = began is _Begin.NO_ROOM
            if began is not _Begin.DONE:
                later.append(first)
            if self._is_full:
                break
        for candidate in later:
            heappush(self._candidates, candidate)

    def _put_copied(self) -> None:
        """Put jobs that are copied into the store, in their order."""
        while self._jobs and 0 <= self._jobs[0].last_step <= self._finished_step:
            job = self._jobs.pop(0)
            if job.is_dropped:
                self._buffers.free(job.buffer)
                self._is_full = False
                self.counts.dropped += 1
                _settle(job.pin, written=False)
            else:
                self._put(job)

    @property
    def _has_turn(self) -> bool:
        """Whether the next step with runs has bytes left for one more job."""
        left = self._step_bytes + self._buffers.slot_bytes
        for job in self._jobs:
            left -= (len(job.contents.pages) - job.copied) * self._buffers.page_bytes
            left -= 0 if job.has_state else self._buffers.slot_bytes
        return len(self._jobs) < JOBS_MAX and (not self._jobs or left >= max(1, self._buffers.slot_bytes))

    def _goes_on(self, job: _Job) -> bool:
        """Return whether the snapshot of ``job`` is unchanged."""
        form = self._memory.snapshot_contents(job.contents.node, job.contents.start)
        if form is not None and form.form == job.contents.form:
            return True
        if form is not None and form.position == job.contents.position:
            self.add(form.node)
        else:
            self.counts.lost += 1
        return False

    def _priority(self, node: NodeId) -> float:
        """Return the tokens that ``node`` is expected to save per byte; infinity if another engine waits for it, or a
        name pins it."""
        if (self._orders is not None and self._orders.open) or self._memory.pins.has_due:
            contents = self._memory.snapshot_contents(node)
            if contents is not None and (self._is_ordered(contents) or self._due(contents) is not None):
                return inf
        outlook = self._memory.snapshot_outlook(node)
        if outlook is None or outlook.uses is None:
            return 0.0
        return outlook.uses * outlook.position / max(1, outlook.alone_bytes)

    def _is_ordered(self, contents: SnapshotContents) -> bool:
        return self._orders is not None and self._orders.wants(contents.salt or None, contents.tokens)

    def _due(self, contents: SnapshotContents) -> PinnedPrefix | None:
        """Return the pinned prefix that ends at this snapshot and is still to be written."""
        return self._memory.pins.due(contents.salt, contents.tokens.tobytes())

    def add(self, node: NodeId) -> None:
        """Add ``node`` as a candidate."""
        self._age += 1
        heappush(self._candidates, (-self._priority(node), self._age, node))
        if len(self._candidates) > CANDIDATES_MAX:
            self._candidates.remove(max(self._candidates))
            heapify(self._candidates)
            self.counts.lost += 1

    def _begin(self, node: NodeId) -> _Begin:
        """Make a job of ``node`` if it is worth it."""
        form = self._memory.snapshot_contents(node)
        if form is None or (not self._compressed and form.has_compressed):
            self.counts.lost += 1
            return _Begin.DONE
        offer = self._store.offer(form.salt or None, form.tokens, form.position, exact=form.exact)
        pin = self._due(form)
        if offer is None:
            is_stored = pin is not None and self._has_stored(form)
            if pin is not None and not is_stored and self._puts:
                return _Begin.SHARES  # perhaps one of these puts has it
            _settle(pin, written=is_stored)
            return _Begin.DONE
        if not _is_apart(self._jobs, form, offer.start):
            return _Begin.SHARES
        if offer.start:
            form = self._memory.snapshot_contents(node, offer.start)
            assert form is not None
        pages = len(form.pages)
        size_bytes = self._buffers.bytes_for(pages)
        if size_bytes > self._buffers.limit_bytes:
            self.counts.dropped += 1
            _settle(pin, written=False)
            return _Begin.DONE
        ordered = pin is not None or self._is_ordered(form)
        uses = self._expected_uses(form)
        read_bytes = ceil_div(form.position - offer.above, PAGE_TOKENS) * self._buffers.page_bytes + (
            0 if offer.above else self._buffers.slot_bytes
        )
        if not ordered and self._prices.worth_of_write_s(offer.above, form.position, read_bytes, size_bytes, uses) <= 0:
            self.counts.skipped += 1
            self._skip(node)
            return _Begin.DONE
        if not self._buffers.has_room(pages) or not self._is_share(size_bytes):
            return _Begin.NO_ROOM
        buffer, saved_s = self._buffers.add(pages), self._prices.compute_s(0, form.position)
        has_work = form.pages or form.slot >= 0
        self._jobs.append(_Job(form, buffer, saved_s, last_step=-1 if has_work else 0, is_ordered=ordered, pin=pin))
        if pin is not None:
            pin.write = "begun"
        if self._write_bytes_s and not ordered:
            # Time that passed between two looks counts, so a step between them does not slow the pace.
            self._paced_until_s = (
                max(self._paced_until_s, self._clock() - PACE_SLACK_S)
                + size_bytes * self._stored_share() / self._write_bytes_s
            )
        return _Begin.DONE

    def _has_stored(self, form: SnapshotContents) -> bool:
        """Return whether the store has this snapshot, durably."""
        return self._store.match(form.salt or None, form.tokens, form.position - 1) is not None

    def _is_share(self, size_bytes: int) -> bool:
        """Return whether buffers that wait to be written leave half of the limit to restores, or this is the only
        one."""
        held_bytes = sum(
            self._buffers[buffer].nbytes for buffer in (*self._puts.values(), *(job.buffer for job in self._jobs))
        )
        return not held_bytes or held_bytes + size_bytes <= self._buffers.limit_bytes // 2

    def _expected_uses(self, form: SnapshotContents) -> float:
        """Return the expected uses of a snapshot in the store."""
        outlook = self._memory.snapshot_outlook(form.node)
        if outlook is None or outlook.uses is None:
            return PRIOR_USES + form.hits
        return outlook.uses

    def _skip(self, node: NodeId) -> None:
        self._skipped[node] = True
        if len(self._skipped) > CANDIDATES_MAX:
            del self._skipped[next(iter(self._skipped))]

    def _put(self, job: _Job) -> None:
        buffer, contents = self._buffers[job.buffer], job.contents
        state, form = buffer.state_B, EXACT_FORM
        if contents.slot == COMPRESSED:
            state, form = buffer.pages_PB[job.kv_rows :].reshape(-1), INT8_STATE
        ticket = self._store.put(
            NewSnapshot.of(
                contents.salt or None,
                contents.tokens[: contents.position],
                self._pieces(job),
                state.data,
                exact=contents.exact,
                seconds=job.saved_s,
                state_form=form,
            )
        )
        if ticket is None:
            self._buffers.free(job.buffer)
            self.counts.dropped += 1
            _settle(job.pin, written=False)
        else:
            self._puts[ticket] = job.buffer
            if job.pin is not None:
                self._pinned[ticket] = job.pin
            if job.is_ordered:
                self._ordered[ticket] = contents.node

    def _pieces(self, job: _Job) -> list[KvPiece]:
        """Return the KV of each part, cut where records end."""
        pieces, row = [], 0
        for part in job.contents.parts:
            flat_B = self._buffers[job.buffer].pages_PB[row : row + part.row_count].reshape(-1)
            record_page_bytes = self._compressed_kv_bytes if part.compressed else self._buffers.page_bytes
            form = self._kv_form if part.compressed else EXACT_FORM
            row, start = row + part.row_count, part.start
            while start < part.end:
                end = min(part.end, start - start % RECORD_TOKENS_MAX + RECORD_TOKENS_MAX)
                first, last = (start - part.start) // PAGE_TOKENS, pages_for(end) - part.start // PAGE_TOKENS
                begin = part.skip_bytes + first * record_page_bytes
                payload = flat_B[begin : part.skip_bytes + last * record_page_bytes]
                pieces.append(KvPiece(start, end, payload.data if self._has_pages else memoryview(b""), form))
                start = end
        return pieces


def _settle(pin: PinnedPrefix | None, *, written: bool) -> None:
    if pin is not None:
        pin.write = "written" if written else "failed"


def _is_apart(jobs: Iterable[_Job], contents: SnapshotContents, start: int) -> bool:
    """Return whether none of ``jobs`` has KV of ``contents`` after ``start``: it would be stored twice."""
    end = start + PAGE_TOKENS
    return not any(
        job.contents.salt == contents.salt and np.array_equal(job.contents.tokens[:end], contents.tokens[:end])
        for job in jobs
    )
