"""Decides what the next step computes, and keeps the books of who runs.

    submit --> waiting --admission--> running --finish/cancel--> closing --next plan--> gone
                  ^                      |
                  '------preemption------'

    plan()   -> StepPlan | None     decides; changes nothing here or in memory
    commit(plan)                    makes it true: rows, queues, and Memory.commit, the only writer
    (execute)
    advance(plan, tokens)           what was computed is computed; the engine adds tokens and ends sequences

One pass, in order of claim:

    1  close what finished since the last plan           its memory is free from the next plan on
    2  every decode, best rank first                     each gets one token of capacity
    3  those that could not: who gives way?              preemption.py; a step that is short admits nobody
    4  every prefill in progress, best rank first        capacity was leased whole when it was admitted
    5  admissions in queue order, until one does not fit a lease for all known tokens, plus headroom

Laws kept here: L3 (running short is a plan without that sequence; the best ranked sequence always runs or
its memory is already on the way, and it fits when alone), L5 (a row is cleared by the plan that takes its
sequence out, before anybody else gets it), L11 (the waiting queue is bounded by who submits: the engine).

``plan`` never returns None while work is possible: if nothing runs and nothing closes, the head of the
queue must fit, and that is asserted rather than waited for.

Rejected: passing over a head of queue that does not fit for a smaller one behind it (a long prompt would
starve under a stream of short ones); preempting for an admission (two sequences could evict each other
for ever); freeing at finish time (a second writer of memory, and memory freed under a step in flight).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weft.config import Sizes
from weft.memory.memory import Memory
from weft.memory.transaction import Draft
from weft.schedule.budget import Budget
from weft.schedule.plan import Admission, Int32s, StepPlan
from weft.schedule.preemption import headroom_pages, victim_count
from weft.schedule.queues import RankedQueue
from weft.schedule.rows import RowTable
from weft.schedule.sequence import SeqState, Sequence
from weft.units import PAD, PageId, RowId, SeqId, SlotId

_NO_ROWS: Int32s = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _Pass:
    """What one pass has decided so far. ``prefill_*`` are lists in run order, by run."""

    draft: Draft
    rows_cleared: list[RowId] = field(default_factory=list)
    finished: list[SeqId] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    pages_freed: int = 0
    short: bool = False
    decode_rows: Int32s = field(default_factory=lambda: _NO_ROWS)
    prefill_seqs: list[Sequence] = field(default_factory=list)
    prefill_rows: list[int] = field(default_factory=list)
    prefill_starts: list[int] = field(default_factory=list)
    prefill_ends: list[int] = field(default_factory=list)
    prefill_slots: list[int] = field(default_factory=list)
    prefill_samples: list[bool] = field(default_factory=list)
    prefill_tokens: list[Int32s] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    write_rows: list[int] = field(default_factory=list)
    write_indexes: list[int] = field(default_factory=list)
    write_pages: list[int] = field(default_factory=list)

    def write_table(self, row: RowId, first_index: int, pages: list[PageId]) -> None:
        self.write_rows += [row] * len(pages)
        self.write_indexes += range(first_index, first_index + len(pages))
        self.write_pages += pages

    def add_prefill(self, seq: Sequence, row: RowId, start: int, end: int, slot: int, known: Int32s) -> None:
        self.prefill_seqs.append(seq)
        self.prefill_rows.append(row)
        self.prefill_starts.append(start)
        self.prefill_ends.append(end)
        self.prefill_slots.append(slot)
        self.prefill_samples.append(end == known.size and seq.samples)
        self.prefill_tokens.append(known[start:end])


class Scheduler:
    def __init__(self, memory: Memory, sizes: Sizes) -> None:
        self.memory = memory
        self.sizes = sizes
        self.rows = RowTable(sizes.rows_max)
        self.waiting = RankedQueue()
        self.running = RankedQueue()
        self.preemption_count = 0
        self.recomputed_tokens = 0
        """Tokens that were in memory when their sequence was preempted."""
        self._closing: list[Sequence] = []
        self._decode_rows: Int32s | None = None
        self._step = 0

    # ------------------------------------------------------------------ who is here

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or len(self.running) or self._closing)

    def submit(self, seq: Sequence) -> None:
        assert seq.state is SeqState.WAITING
        self.waiting.add(seq)

    def finish(self, seq: Sequence) -> None:
        """``seq`` ends now, by itself or by the user's wish, whatever it was doing. What it holds is given
        back by the next plan; until then its row and memory stay untouched, so this may be called while a
        step that computes it is in flight."""
        if seq.state is SeqState.WAITING:
            self.waiting.remove(seq)
        else:
            assert seq.state is SeqState.RUNNING, f"{seq} has ended before"
            self.running.remove(seq)
            self._closing.append(seq)
            self._decode_rows = None
        seq.state = SeqState.FINISHED

    # ------------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do at all. Changes nothing: asked twice, it
        answers the same."""
        if not self.has_work:
            return None
        step = _Pass(self.memory.draft())
        self._plan_closing(step)
        self._plan_decodes(step)
        budget = Budget(self.sizes.step_tokens_max, int(step.decode_rows.size))
        self._plan_prefills(step, budget)
        if not step.short:
            self._plan_admissions(step, budget)
        assert step.decode_rows.size or step.prefill_rows or step.pages_freed or step.rows_cleared, (
            f"nothing can run: {len(self.running)} running, {len(self.waiting)} waiting, "
            f"usage {self.memory.usage()}")
        return self._seal(step)

    def _plan_closing(self, step: _Pass) -> None:
        for seq in self._closing:
            self._take_out(step, seq)
            step.finished.append(seq.id)

    def _take_out(self, step: _Pass, seq: Sequence) -> None:
        row = self.rows.row_of(seq)
        step.draft.close(seq.id)
        step.rows_cleared.append(row)
        step.pages_freed += int(self.rows.pages_held[row])

    def _decodes(self) -> Int32s:
        """Rows that decode, best rank first; rebuilt only when the set of running sequences changed."""
        if self._decode_rows is None:
            row_of, decoding = self.rows.row_of, self.rows.decoding
            rows = [row for row in map(row_of, self.running) if decoding(row)]
            self._decode_rows = np.asarray(rows, dtype=np.int32)
        return self._decode_rows

    def _plan_decodes(self, step: _Pass) -> None:
        rows = self._decodes()
        step.decode_rows = rows
        positions = self.rows.computed[rows]
        crossing = np.flatnonzero(positions >= self.rows.capacity[rows])
        short: set[int] = set()
        for at in crossing.tolist():
            row = RowId(int(rows[at]))
            seq_id = SeqId(int(self.rows.seq_ids[row]))
            # Once one is short the others behind it are too: what is left must not go to a lower rank.
            if short or not step.draft.extend(seq_id, int(positions[at]) + 1):
                short.add(row)
            else:
                step.write_table(row, int(self.rows.pages_held[row]), step.draft.new_pages(seq_id))
        if short:
            self._plan_shortage(step, short)

    def _plan_shortage(self, step: _Pass, short: set[int]) -> None:
        step.short = True
        order = list(self.running)
        order_rows = [self.rows.row_of(seq) for seq in order]
        victims = victim_count([int(self.rows.pages_held[row]) for row in order_rows],
                               [row in short for row in order_rows], step.pages_freed)
        if victims:
            step.preempted = order[-victims:]
            for seq in step.preempted:
                self._take_out(step, seq)
        out = short.union(order_rows[len(order) - victims:])
        step.decode_rows = step.decode_rows[[row not in out for row in step.decode_rows.tolist()]]
        assert all(row not in out for row in step.write_rows), "a victim ranks above one that got a page"

    def _plan_prefills(self, step: _Pass, budget: Budget) -> None:
        if self._decodes().size == len(self.running):
            return
        for seq in self.running:
            row = self.rows.row_of(seq)
            known = self.rows.known[row]
            if known is None or seq in step.preempted:
                continue
            start = int(self.rows.computed[row])
            end = budget.chunk_end(start, known.size)
            if end == start:
                break
            budget.spend(end - start)
            step.add_prefill(seq, row, start, end, int(self.rows.slots[row]), known)

    def _plan_admissions(self, step: _Pass, budget: Budget) -> None:
        if not len(self.waiting):
            return
        rows = sorted([*self.rows.free_rows(), *step.rows_cleared])
        for seq, row in zip(self.waiting, rows, strict=False):
            known = seq.known()
            # Logprobs of the prompt need logits at each of its positions: nothing of it may be skipped.
            match = self.memory.match(known[:0] if seq.prompt_logprobs_due else known, salt=seq.salt)
            start = match.cached_tokens
            assert start < known.size
            end = budget.chunk_end(start, known.size)
            if end == start:
                break
            headroom = headroom_pages(len(self.running) + len(step.admissions), seq.preemption_count)
            if not step.draft.open(seq.id, match, known.size, headroom_pages=headroom):
                break
            budget.spend(end - start)
            step.admissions.append(Admission(
                row=row, seq=seq.id, tokens=known, prompt_tokens=int(seq.prompt.size),
                sampling=seq.sampling, seed=seq.seed, stop_ids=seq.stop_ids))
            step.write_table(row, 0, step.draft.new_pages(seq.id))
            step.add_prefill(seq, row, start, end, step.draft.slot_of(seq.id), known)

    def _seal(self, step: _Pass) -> StepPlan:
        decode_count = int(step.decode_rows.size)
        reservation = step.draft.seal()
        rows = np.concatenate([step.decode_rows, np.asarray(step.prefill_rows, dtype=np.int32)])
        starts = np.concatenate([self.rows.computed[step.decode_rows],
                                 np.asarray(step.prefill_starts, dtype=np.int32)])
        ends = np.concatenate([starts[:decode_count] + 1, np.asarray(step.prefill_ends, dtype=np.int32)])
        slots = np.concatenate([self.rows.slots[step.decode_rows],
                                np.asarray(step.prefill_slots, dtype=np.int32)])
        samples = np.ones(rows.size, dtype=np.bool_)
        samples[decode_count:] = step.prefill_samples
        seqs = (*self.rows.seq_ids[step.decode_rows].tolist(), *(seq.id for seq in step.prefill_seqs))
        return StepPlan(
            step=self._step,
            seqs=seqs,
            rows=rows,
            starts=starts,
            lengths=ends - starts,
            slots=slots,
            fresh=starts == 0,
            samples=samples,
            tokens=np.concatenate([self.rows.last_token[step.decode_rows], *step.prefill_tokens]),
            decode_count=decode_count,
            rows_cleared=tuple(step.rows_cleared),
            admissions=tuple(step.admissions),
            table_writes=np.asarray([step.write_rows, step.write_indexes, step.write_pages], dtype=np.int32),
            zero_frames=reservation.zero_frames,
            taps=(),
            prompt_logprob_runs=tuple(decode_count + at for at, seq in enumerate(step.prefill_seqs)
                                      if seq.prompt_logprobs_due),
            reservation=reservation,
            preempted=tuple(seq.id for seq in step.preempted),
            finished=tuple(step.finished),
        )

    # ------------------------------------------------------------------ commit and after

    def commit(self, plan: StepPlan) -> None:
        """Make ``plan`` true. It must be the plan of the present state: memory checks its version."""
        assert plan.step == self._step
        self.memory.commit(plan.reservation)
        self._step += 1
        if plan.finished:
            assert plan.finished == tuple(seq.id for seq in self._closing)
            for seq in self._closing:
                self.rows.release(seq)
            self._closing.clear()
        if plan.preempted:
            self._commit_preempted(plan.preempted)
        if plan.admissions:
            self._commit_admissions(plan)
        if plan.table_writes.size:
            self.rows.add_pages(plan.table_writes[0])

    def _commit_preempted(self, preempted: tuple[SeqId, ...]) -> None:
        for seq in list(self.running)[-len(preempted):]:
            assert seq.id in preempted
            self.preemption_count += 1
            seq.preemption_count += 1
            self.running.remove(seq)
            self.recomputed_tokens += int(self.rows.computed[self.rows.row_of(seq)])
            self.rows.release(seq)
            seq.state = SeqState.WAITING
            self.waiting.add(seq)
        self._decode_rows = None

    def _commit_admissions(self, plan: StepPlan) -> None:
        # Admissions are the head of the queue, and the last runs, both in order.
        first_run = plan.run_count - len(plan.admissions)
        for at, seq in enumerate(list(self.waiting)[:len(plan.admissions)]):
            admission, run = plan.admissions[at], first_run + at
            assert admission.seq == seq.id == plan.seqs[run]
            self.waiting.remove(seq)
            self.running.add(seq)
            seq.state = SeqState.RUNNING
            self.rows.assign(admission.row, seq, known=admission.tokens,
                             computed=int(plan.starts[run]), slot=SlotId(int(plan.slots[run])))
        self._decode_rows = None

    def advance(self, plan: StepPlan, tokens: Int32s) -> None:
        """The step was computed: positions move on, and ``tokens`` (int32 [runs], PAD where none was
        chosen) are what decodes feed next. Sequences that ended meanwhile still hold their rows."""
        ends = plan.starts + plan.lengths
        self.rows.advance(plan.rows, ends, tokens)
        for run in range(plan.decode_count, plan.run_count):
            row = RowId(int(plan.rows[run]))
            if self.rows.decoding(row):
                self.rows.known[row] = None
                self._decode_rows = None

    def audit(self) -> None:
        """Recounts rows and queues from the sequences (L1 for what is owned here)."""
        self.waiting.audit()
        self.running.audit()
        self.rows.audit((*self.running, *self._closing))
        assert all(seq.state is SeqState.WAITING for seq in self.waiting)
        assert all(seq.state is SeqState.RUNNING for seq in self.running)
        assert all(seq.state is SeqState.FINISHED for seq in self._closing)
        for seq in self.running:
            row = self.rows.row_of(seq)
            lease = self.memory.lease(seq.id)
            assert len(lease.pages) == self.rows.pages_held[row]
            assert lease.slot == self.rows.slots[row]
        assert PAD not in self.rows.seq_ids[self._decodes()]
