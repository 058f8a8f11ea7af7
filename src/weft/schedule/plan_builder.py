"""The decisions of one call of the scheduler so far, and how they become a plan.

The builder is filled in order of claim (``scheduler``), over one transaction of memory. ``seal`` freezes both into a
``StepPlan``. It writes nothing but itself: dropping it undoes all of it.

    runs of the plan   [ decodes: arrays of the row table ][ verify runs ][ prefills | admissions ]
                                                                           lists by run, ``prefill_*``

If the whole decode batch runs and nothing else does, the plan has the arrays of the decode batch itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from weft.memory.arena_work import ArenaWork, PageTransfer, SlotCopy, StateTransfer
from weft.memory.reservation import Moves, TablePatch
from weft.memory.transaction import Transaction
from weft.memory.values import NodeId
from weft.schedule.plan import Admission, Bools, Int32s, StepPlan, Tap, no_writes
from weft.schedule.rows import DecodeBatch, RowTable
from weft.schedule.sequence import Sequence
from weft.schedule.tier_values import FetchKey, FetchWish, StoreStep
from weft.units import PageId, RowId, SeqId, SlotId

Stores = tuple[tuple[PageTransfer, ...], tuple[StateTransfer, ...]]

_NO_ROWS: Int32s = np.empty(0, dtype=np.int32)


class _Runs(NamedTuple):
    """The run arrays of a ``StepPlan``."""

    seqs: tuple[SeqId, ...]
    rows: Int32s
    starts: Int32s
    lengths: Int32s
    slots: Int32s
    fresh: Bools
    samples: Bools
    tokens: Int32s


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making. ``decode_batch``: all decoding rows. ``short``: a decode got no page. ``reclaiming``:
    memory makes room for the next plan. ``publishing``: number of sequences that publish."""

    transaction: Transaction
    decode_batch: DecodeBatch
    rows_cleared: list[RowId] = field(default_factory=list)
    finished: list[SeqId] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    pages_freed: int = 0
    short: bool = False
    reclaiming: bool = False
    publishing: int = 0
    decode_rows: Int32s = field(default_factory=lambda: _NO_ROWS)
    """Rows of decodes, then those of verify runs."""
    verify_tokens: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens of the last of ``decode_rows``, each with drafts."""
    mtp_drafts: int | None = None
    """As in ``StepPlan``."""
    prefill_seqs: list[Sequence] = field(default_factory=list)
    prefill_rows: list[int] = field(default_factory=list)
    prefill_starts: list[int] = field(default_factory=list)
    prefill_ends: list[int] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_samples: list[bool] = field(default_factory=list)
    prefill_tokens: list[Int32s] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    taps: list[Tap] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    """Copies of running slots, taken before this step overwrites them; those of the transaction are separate."""
    requested_taps: dict[SeqId, list[int]] = field(default_factory=dict)
    """Positions whose state another request waits for, by sequence."""
    fetch_wishes: list[FetchWish] = field(default_factory=list)
    loads: list[FetchKey] = field(default_factory=list)
    closed_loads: tuple[FetchKey, ...] = ()
    stores: Stores = ((), ())
    """Copies of pages and of a state into transfer buffers, after the runs."""
    write_rows: list[int] = field(default_factory=list)
    write_indexes: list[int] = field(default_factory=list)
    write_pages: list[int] = field(default_factory=list)

    @property
    def runs_or_frees(self) -> bool:
        return bool(
            self.decode_rows.size
            or self.prefill_rows
            or self.pages_freed
            or self.rows_cleared
            or self.reclaiming
            or self.store_step
            or any(self.stores)
        )

    @property
    def store_step(self) -> StoreStep:
        return StoreStep(tuple(self.fetch_wishes), tuple(self.loads), self.closed_loads)

    @property
    def token_count(self) -> int:
        """Number of tokens of the step, before any draft."""
        return int(self.decode_rows.size) + sum(tokens.size for tokens in self.prefill_tokens)

    def set_verify_runs(self, tokens_of: dict[int, tuple[int, ...]]) -> None:
        """Make verify runs of the decodes of these rows, with these tokens, after the others."""
        rows = self.decode_rows.tolist()
        behind = [row for row in rows if row in tokens_of]
        if behind:
            self.decode_rows = np.asarray([row for row in rows if row not in tokens_of] + behind, np.int32)
            self.verify_tokens = [tokens_of[row] for row in behind]

    def write_table(self, row: RowId, first_index: int, pages: Seq[PageId]) -> None:
        self.write_entries([row] * len(pages), range(first_index, first_index + len(pages)), pages)

    def write_entries(self, rows: Iterable[int], indexes: Iterable[int], pages: Iterable[PageId]) -> None:
        """Write one entry of the page table for each."""
        self.write_rows += rows
        self.write_indexes += indexes
        self.write_pages += pages

    def add_prefill(self, seq: Sequence, row: RowId, start: int, end: int, slot: int, known: Int32s) -> None:
        self.prefill_seqs.append(seq)
        self.prefill_rows.append(row)
        self.prefill_starts.append(start)
        self.prefill_ends.append(end)
        self.prefill_slots.append(slot)
        self.prefill_samples.append(end == known.size and seq.samples)
        self.prefill_tokens.append(known[start:end])

    def request_tap(self, producer: SeqId, position: int) -> None:
        """Request the state of ``producer`` at ``position`` for another request; 0: for none."""
        if position:
            self.requested_taps.setdefault(producer, []).append(position)

    def reclaim(self, *, pages: int, slots: int = 0, sparing: Iterable[NodeId] = ()) -> bool:
        """Ask memory to make room, by moves or evictions. False: nothing helps."""
        reclaims = self.transaction.reclaim(pages=pages, slots=slots, sparing=sparing)
        self.reclaiming |= reclaims
        return reclaims

    def add_tap(self, prefill: int, position: int, slot: SlotId) -> None:
        """Add a tap to prefill number ``prefill``. The decodes must be final."""
        self.taps.append(Tap(int(self.decode_rows.size) + prefill, position, slot))

    def seal(self, step: int, rows: RowTable) -> StepPlan:
        """Return the plan, with positions and tokens of ``rows``."""
        reservation = self.transaction.seal()
        work = reservation.arena_work
        if self.copies:
            work = replace(work, slot_copies=(*work.slot_copies, *self.copies))
        if any(self.stores):
            work = _with_stores(work, self.stores, reservation.moves)
        verify_count = len(self.verify_tokens)
        first_prefill = int(self.decode_rows.size)
        starts, tokens = rows.computed[self.decode_rows], rows.last_token[self.decode_rows]
        decode_batch, moved = self.decode_batch, reservation.moves.slot_patches
        if self.decode_rows is decode_batch.rows and not self.prefill_rows and not moved:
            runs = _Runs(
                decode_batch.seqs,
                decode_batch.rows,
                starts,
                decode_batch.lengths,
                decode_batch.slots,
                decode_batch.fresh,
                decode_batch.samples,
                tokens,
            )
        else:
            runs = self._runs(starts, tokens, rows)
            for row, patch in rows.of_patches(moved):
                runs.slots[runs.rows == row] = patch.slot
        return StepPlan(
            step=step,
            seqs=runs.seqs,
            rows=runs.rows,
            starts=runs.starts,
            lengths=runs.lengths,
            slots=runs.slots,
            fresh=runs.fresh,
            samples=runs.samples,
            tokens=runs.tokens,
            decode_count=first_prefill - verify_count,
            verify_count=verify_count,
            rows_cleared=tuple(self.rows_cleared),
            admissions=tuple(self.admissions),
            table_writes=self._table_writes(),
            table_patches=_patches(reservation.table_patches, rows),
            arena_work=work,
            taps=tuple(self.taps),
            prompt_logprob_runs=tuple(
                first_prefill + index for index, seq in enumerate(self.prefill_seqs) if seq.prompt_logprobs_due
            ),
            pooled_runs=tuple(
                first_prefill + index
                for index, seq in enumerate(self.prefill_seqs)
                if seq.pools(self.prefill_starts[index], self.prefill_ends[index])
            ),
            reservation=reservation,
            preempted=tuple(seq.id for seq in self.preempted),
            finished=tuple(self.finished),
            reclaiming=self.reclaiming,
            store=self.store_step,
            mtp_drafts=self.mtp_drafts,
        )

    def _runs(self, starts: Int32s, tokens: Int32s, rows: RowTable) -> _Runs:
        """Return the runs: decodes and verify runs from ``starts`` on, fed ``tokens``, and prefills."""
        decodes = self.decode_rows
        decode_ends = starts + 1
        if self.verify_tokens:
            first = decodes.size - len(self.verify_tokens)
            decode_ends[first:] += np.asarray([len(run) - 1 for run in self.verify_tokens], np.int32)
            tokens = np.concatenate([tokens[:first], np.asarray(sum(self.verify_tokens, ()), np.int32)])
        all_starts = np.concatenate([starts, np.asarray(self.prefill_starts, dtype=np.int32)])
        ends = np.concatenate([decode_ends, np.asarray(self.prefill_ends, dtype=np.int32)])
        samples = np.ones(ends.size, dtype=np.bool_)
        samples[decodes.size :] = self.prefill_samples
        return _Runs(
            seqs=(*rows.seq_ids[decodes].tolist(), *(seq.id for seq in self.prefill_seqs)),
            rows=np.concatenate([decodes, np.asarray(self.prefill_rows, dtype=np.int32)]),
            starts=all_starts,
            lengths=ends - all_starts,
            slots=np.concatenate([rows.slots[decodes], np.asarray(self.prefill_slots, dtype=np.int32)]),
            fresh=all_starts == 0,
            samples=samples,
            tokens=np.concatenate([tokens, *self.prefill_tokens]),
        )

    def _table_writes(self) -> Int32s:
        if not self.write_rows:
            return no_writes()
        return np.asarray([self.write_rows, self.write_indexes, self.write_pages], dtype=np.int32)


def _with_stores(work: ArenaWork, stores: Stores, moves: Moves) -> ArenaWork:
    """Return ``work`` with ``stores`` of the places where their pages and slots are after the moves. If the step
    compresses or unpacks one of the pages in place, it stores nothing."""
    page_moves = {copy.src: copy.dst for copy in moves.pages}
    slot_moves = {copy.src: copy.dst for copy in moves.slots}
    pages, states = stores
    overwritten = {page for compression in work.kv_compressions for page in compression.pages}.union(
        *(restore.compressed for restore in work.kv_restores)
    )
    if any(not overwritten.isdisjoint(store.pages) for store in pages):
        return work
    return replace(
        work,
        page_stores=tuple(
            replace(store, pages=tuple(page_moves.get(page, page) for page in store.pages)) for store in pages
        ),
        state_stores=tuple(replace(store, slot=slot_moves.get(store.slot, store.slot)) for store in states),
    )


def _patches(patches: Seq[TablePatch], rows: RowTable) -> Int32s:
    written = [
        (row, patch.first_index + index, page)
        for row, patch in rows.of_patches(patches)
        for index, page in enumerate(patch.pages)
    ]
    return np.asarray(written, dtype=np.int32).T if written else no_writes()
