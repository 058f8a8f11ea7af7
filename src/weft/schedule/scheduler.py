"""Decides what the next step computes, and keeps the books of who runs.

    submit --> waiting --admission--> running --finish/cancel--> closing --next plan--> gone
                  ^                      |
                  '------preemption------'

    plan()   -> StepPlan | None     decides; changes nothing here or in memory
    commit(plan)                    makes it true: rows, queues, and Memory.commit, the only writer
    (execute)
    advance(plan, tokens)           what was computed is computed; the engine adds tokens and ends sequences

Where steps overlap (``weft.engine.overlap``) a step is advanced over when it begins, its tokens unknown, and
the next is planned: decodes are then fed "the token that your row chose last".

One pass, in order of claim:

    1  close what finished since the last plan           its memory is free, or cached, from the next plan on
    2  every decode, best rank first                     each gets one token of capacity
    3  those that could not: who gives way?              the cache first, then preemption.py; a step that is
                                                         short admits nobody
    4  every prefill in progress, best rank first        capacity was leased whole when it was admitted
    5  admissions in queue order, until one does not fit a lease for all known tokens, plus headroom; starts
                                                         behind what is cached, and who waits for a twin is
                                                         passed over (reuse.py)
    6  publish what the last step computed, tap this one best effort, with what is left (reuse.py)

Laws kept here: L3 (running short is a plan without that sequence; the best ranked sequence always runs or
its memory is already on the way, and it fits when alone), L5 (a row is cleared by the plan that takes its
sequence out, before anybody else gets it), L11 (the waiting queue is bounded by who submits: the engine).

``plan`` never returns None while work is possible: if nothing runs, nothing closes, the cache has nothing
to give up and nobody's last token is in flight, the head of the queue must fit, and that is asserted rather
than waited for.

Rejected: passing over a head of queue that does not fit for a smaller one behind it (a long prompt would
starve under a stream of short ones); preempting for an admission (two sequences could evict each other
for ever); freeing at finish time (a second writer of memory, and memory freed under a step in flight).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice

import numpy as np

from weft.config import Sizes
from weft.memory.memory import Memory
from weft.memory.values import Match, NodeId
from weft.schedule.budget import Budget
from weft.schedule.checkpoints import AUTO, CheckpointPolicy
from weft.schedule.decode_batch import DecodeBatch
from weft.schedule.plan import Admission, Int32s, StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.preemption import headroom_pages, victim_count
from weft.schedule.queues import RankedQueue
from weft.schedule.reuse import FOLLOWERS_MAX, Reuse
from weft.schedule.rows import RowTable
from weft.schedule.sequence import SeqState, Sequence
from weft.units import PAD, PAGE_TOKENS, RowId, SeqId, SlotId, pages_for


class Scheduler:
    def __init__(self, memory: Memory, sizes: Sizes, policy: CheckpointPolicy = AUTO) -> None:
        self.memory = memory
        self.sizes = sizes
        self.rows = RowTable(sizes.rows_max)
        self.reuse = Reuse(memory, policy, self.rows, sizes.grid_tokens)
        self.waiting = RankedQueue()
        self.running = RankedQueue()
        self.preemption_count = 0
        self.recomputed_tokens = 0
        """Tokens that were in memory when their sequence was preempted, and were not when it came back."""
        self._closing: list[Sequence] = []
        self._decode_batch: DecodeBatch | None = None
        self._step = 0

    # ------------------------------------------------------------------ who is here

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or len(self.running) or self._closing)

    @property
    def has_closing(self) -> bool:
        """Whether sequences that ended still hold their memory."""
        return bool(self._closing)

    def submit(self, seq: Sequence) -> None:
        assert seq.state is SeqState.WAITING
        self.waiting.add(seq)

    def finish(self, seq: Sequence) -> None:
        """``seq`` ends now, by itself or by the user's wish, whatever it was doing. What it holds is given
        back by the next plan; until then its row and memory stay untouched, so this may be called while a
        step that computes it is in flight."""
        if seq.state is SeqState.WAITING:
            self.waiting.remove(seq)
            self.reuse.back(seq)
        else:
            assert seq.state is SeqState.RUNNING, f"{seq} has ended before"
            self.running.remove(seq)
            self._closing.append(seq)
            self._decode_batch = None
        seq.state = SeqState.FINISHED

    # ------------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do at all, or not before a last token is home that
        is in flight. Changes nothing: asked twice, it answers the same."""
        if not self.has_work:
            return None
        step = PlanBuilder(self.memory.draft(), self._decodes())
        awaited = self.reuse.awaited()
        if awaited:
            step.draft.evict_last(awaited)
        self._plan_closing(step)
        self._plan_decodes(step)
        budget = Budget(self.sizes.step_tokens_max, int(step.decode_rows.size))
        self._plan_prefills(step, budget)
        matches = self._plan_admissions(step, budget) if not step.short else {}
        self.reuse.publish(step)
        self.reuse.plan_taps(step, matches)
        if not step.runs_or_frees and self.rows.ends_in_flight(step.decode_batch.rows).any():
            return None  # who ends publishes by leaving
        assert step.runs_or_frees or step.publishing, (
            f"nothing can run: {len(self.running)} running, {len(self.waiting)} waiting, "
            f"usage {self.memory.usage()}")
        return step.seal(self._step, self.rows)

    def _plan_closing(self, step: PlanBuilder) -> None:
        for seq in self._closing:
            self._take_out(step, seq, preempted=False)
            step.finished.append(seq.id)

    def _take_out(self, step: PlanBuilder, seq: Sequence, *, preempted: bool) -> None:
        row = self.rows.row_of(seq)
        self.reuse.leave(step, seq, preempted=preempted)
        step.rows_cleared.append(row)
        step.pages_freed += int(self.rows.pages_held[row])

    def _decodes(self) -> DecodeBatch:
        """Who decodes, best rank first; made anew only when the set of running sequences changed."""
        if self._decode_batch is None:
            row_of, decoding = self.rows.row_of, self.rows.decoding
            rows = np.asarray([row for row in map(row_of, self.running) if decoding(row)], dtype=np.int32)
            self._decode_batch = DecodeBatch(rows, self.rows.seq_ids[rows].tolist(), self.rows.slots[rows])
        return self._decode_batch

    def _plan_decodes(self, step: PlanBuilder) -> None:
        rows = step.decode_batch.rows
        positions = self.rows.computed[rows]
        if step.decode_batch.ends.over:
            ending = self.rows.ends_in_flight(rows)
            if ending.any():
                rows, positions = rows[~ending], positions[~ending]
            else:
                step.decode_batch.ends.start(self.rows.limit[rows] - positions)
        step.decode_rows = rows
        [crossing] = (positions >= self.rows.capacity[rows]).nonzero()
        short: set[int] = set()
        for at in crossing.tolist():
            row = RowId(rows.item(at))
            seq_id = SeqId(self.rows.seq_ids.item(row))
            # Once one is short the others behind it are too: what is left must not go to a lower rank.
            if short or not step.draft.extend(seq_id, positions.item(at) + 1):
                short.add(row)
            else:
                step.write_table(row, self.rows.pages_held.item(row), step.draft.new_pages(seq_id))
        if short:
            self._plan_shortage(step, short)

    def _plan_shortage(self, step: PlanBuilder, short: set[int]) -> None:
        step.short = True
        if self._reclaim(step, pages=len(short)):
            # the cache gives way before anybody does
            step.decode_rows = step.decode_rows[[row not in short for row in step.decode_rows.tolist()]]
            return
        order = list(self.running)
        order_rows = [self.rows.row_of(seq) for seq in order]
        victims = victim_count([int(self.rows.pages_held[row]) for row in order_rows],
                               [row in short for row in order_rows], step.pages_freed)
        if victims:
            step.preempted = order[-victims:]
            for seq in step.preempted:
                self._take_out(step, seq, preempted=True)
        out = short.union(order_rows[len(order) - victims:])
        step.decode_rows = step.decode_rows[[row not in out for row in step.decode_rows.tolist()]]
        assert all(row not in out for row in step.write_rows), "a victim ranks above one that got a page"

    def _plan_prefills(self, step: PlanBuilder, budget: Budget) -> None:
        if step.decode_batch.rows.size == len(self.running):
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

    def _plan_admissions(self, step: PlanBuilder, budget: Budget) -> dict[SeqId, Match]:
        """Returns what memory had of those that are admitted."""
        matches: dict[SeqId, Match] = {}
        if not len(self.waiting):
            return matches
        rows = sorted([*self.rows.free_rows(), *step.rows_cleared])
        if not rows:
            return matches
        prefills = self.running if step.decode_batch.rows.size < len(self.running) else ()
        leaders = self.reuse.leaders(step, prefills, self._closing)
        followers = 0
        for seq in self.waiting:
            if len(matches) == len(rows) or followers == FOLLOWERS_MAX:
                break
            known = seq.known()
            match = self.reuse.match(seq, known)
            wait = leaders.wait_for(seq, known, match.cached_tokens)
            if wait is not None:
                followers += 1
                step.demand(wait.leader, wait.demand)
                continue
            match = leaders.with_not_ready(seq, known, match)
            end = budget.chunk_end(match.cached_tokens, known.size)
            if end == match.cached_tokens:
                break
            if not self._admit(step, seq, rows[len(matches)], match, known, end):
                self._make_room(step, seq, match, len(rows) - len(matches))
                break
            budget.spend(end - match.cached_tokens)
            matches[seq.id] = match
            leaders.admitted(seq, known, match.cached_tokens)
        return matches

    def _admit(self, step: PlanBuilder, seq: Sequence, row: RowId, match: Match, known: Int32s, end: int) -> bool:
        """Memory for all of ``known``, or False and nothing."""
        start = match.cached_tokens
        assert start < known.size
        if not step.draft.open(seq.id, match, known.size, headroom_pages=self._headroom(step, seq)):
            return False
        step.admissions.append(Admission(
            row=row, seq=seq.id, tokens=known, prompt_tokens=int(seq.prompt.size),
            sampling=seq.sampling, seed=seq.seed, stop_ids=seq.stop_ids, grammar=seq.grammar))
        step.write_table(row, 0, [*step.draft.shared_pages(seq.id), *step.draft.new_pages(seq.id)])
        step.add_prefill(seq, row, start, end, step.draft.slot_of(seq.id), known)
        return True

    def _headroom(self, step: PlanBuilder, seq: Sequence) -> int:
        return headroom_pages(len(self.running) + len(step.admissions), seq.preemption_count)

    def _make_room(self, step: PlanBuilder, seq: Sequence, match: Match, rows_free: int) -> None:
        """``seq`` was not admitted: the cache is asked to give way, for it and for those behind it that would
        come with it into the next pass, or else for it alone. One at a time, short requests would come in
        at one a step where the cache has taken all there is. What ``seq`` would begin on does not give way
        for it while others run: it would have to compute that again, and can wait."""
        own, awaited = match.anchor, self.reuse.awaited()
        step.draft.evict_last([own, *awaited])
        cached = match.cached_tokens
        pages = (pages_for(seq.known_count) - cached // PAGE_TOKENS + match.restore_pages
                 + self._headroom(step, seq))
        tokens = seq.known_count - cached
        more_pages = more = 0
        for other in islice(self.waiting.after(seq), rows_free - 1):
            tokens += other.known_count
            if tokens > self.sizes.step_tokens_max:
                break
            more_pages += pages_for(other.known_count) + 1
            more += 1
        if more and self._reclaim(step, pages=pages + more_pages, slots=1 + more, sparing=(own, *awaited)):
            return
        alone = not len(self.running) and not step.admissions
        self._reclaim(step, pages=pages, slots=1, sparing=() if alone else (own,))

    def _reclaim(self, step: PlanBuilder, *, pages: int, slots: int = 0, sparing: Iterable[NodeId] = ()) -> bool:
        """Ask memory to make room: what lies apart is moved together, and the cache gives way."""
        done = step.draft.reclaim(pages=pages, slots=slots, sparing=sparing)
        step.reclaiming |= done
        return done

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
            self.rows.add_pages(plan.table_writes[0], plan.table_writes[1])
        for moved in plan.reservation.moves.slot_patches:
            self.rows.slots[self.rows.row_of_id(moved.seq)] = moved.slot
            self._decode_batch = None
        self.reuse.committed(plan)

    def _commit_preempted(self, preempted: tuple[SeqId, ...]) -> None:
        for seq in list(self.running)[-len(preempted):]:
            assert seq.id in preempted
            self.preemption_count += 1
            seq.preemption_count += 1
            self.running.remove(seq)
            seq.computed_before = int(self.rows.computed[self.rows.row_of(seq)])
            self.rows.release(seq)
            seq.state = SeqState.WAITING
            self.waiting.add(seq)
            self.reuse.preempted(seq)
        self._decode_batch = None

    def _commit_admissions(self, plan: StepPlan) -> None:
        # Admissions are the last runs, in the order of the queue; who waits for a twin was passed over.
        first_run = plan.run_count - len(plan.admissions)
        admitted = {admission.seq for admission in plan.admissions}
        for at, seq in enumerate([seq for seq in self.waiting if seq.id in admitted]):
            admission, run = plan.admissions[at], first_run + at
            assert admission.seq == seq.id == plan.seqs[run]
            self.waiting.remove(seq)
            self.running.add(seq)
            self.reuse.back(seq)
            seq.state = SeqState.RUNNING
            start = int(plan.starts[run])
            again = max(0, seq.computed_before - start)
            self.recomputed_tokens += again
            seq.recomputed_tokens += again
            seq.computed_before = 0
            self.rows.assign(admission.row, seq, known=admission.tokens, computed=start,
                             slot=SlotId(int(plan.slots[run])))
        self._decode_batch = None

    def advance(self, plan: StepPlan, tokens: Int32s | int) -> None:
        """The step is computed, or will be before any that follows: positions move on, and ``tokens`` (int32
        [runs], PAD where none was chosen; PAD for all: not known yet) are what decodes feed next. Sequences
        that ended meanwhile still hold their rows."""
        self.rows.advance(plan.rows, plan.starts + plan.lengths, tokens)
        if self._decode_batch is not None:
            self._decode_batch.step()
        for run in range(plan.decode_count, plan.run_count):
            row = RowId(int(plan.rows[run]))
            if self.rows.decoding(row):
                self.rows.known[row] = None
                self._decode_batch = None

    def leap(self, plan: StepPlan, steps: int) -> None:
        """``plan``, of decodes alone, was computed ``steps`` times more, a position on each time, and nothing
        else would have happened in all of them: for a replay that knows this."""
        self.rows.computed[plan.rows] += steps
        if self._decode_batch is not None:
            self._decode_batch.step(steps)

    def learn_late(self, plan: StepPlan, run: int, token: int) -> None:
        """``token`` of ``run`` comes for a sequence that has ended. Where the next step computed it, that is
        part of what it leaves behind: pages and a state are kept under exactly the tokens they have seen."""
        seq = self.rows.seqs[int(plan.rows[run])]
        if seq is not None and seq.id == plan.seqs[run]:
            seq.generated.append(token)

    def audit(self, in_flight: Container[SeqId] = ()) -> None:
        """Recounts rows and queues from the sequences (L1 for what is owned here). ``in_flight``: those with
        a run whose token is not known yet."""
        self.waiting.audit()
        self.running.audit()
        self.rows.audit((*self.running, *self._closing), in_flight)
        assert all(seq.state is SeqState.WAITING for seq in self.waiting)
        assert all(seq.state is SeqState.RUNNING for seq in self.running)
        assert all(seq.state is SeqState.FINISHED for seq in self._closing)
        for seq in self.running:
            row = self.rows.row_of(seq)
            lease = self.memory.lease(seq.id)
            assert len(lease.pages) == self.rows.pages_held[row]
            assert lease.slot == self.rows.slots[row]
        assert PAD not in self.rows.seq_ids[self._decodes().rows]
