"""The scheduler decides the contents of the next step, and tracks which sequences run.

    submit --> waiting --admission--> running --finish/cancel--> closing --next plan--> gone
                  ^                      |
                  '------preemption------'

    plan()   -> StepPlan | None     decides; changes nothing here or in memory
    commit(plan)                    makes it true: rows, queues, and Memory.commit, the only writer
    (execute)
    advance(plan, tokens)           positions move on; the engine appends tokens and ends sequences

If steps overlap (``weft.engine.overlap``), a step is advanced over when it begins, before its tokens are
known, and the next step is planned. Its decodes are then fed "the token that the row chose last".

One plan, in order of claim:

    1  close sequences that finished                 their memory is free, or cached, from the next plan on
    2  every decode, best rank first                 each needs room for one more token
    3  decodes without room: preempt                 the cache gives way first, then admission.py decides; a
                                                     step that is short of memory admits no sequence
    4  prefills in progress, best rank first         their memory was leased whole at admission
    5  admissions in queue order (admission.py)      until one does not fit; each starts after its cached
                                                     prefix, and may wait for one that is being computed or
                                                     fetched from the store
    6  publish, then taps (reuse.py)                 what the last step computed goes into the cache, and this
                                                     step saves states if slots are left
    7  stores (store_writes.py)                      some pages of a snapshot that the store should have
    8  verify runs (verify_runs.py)                   decodes compute drafts too, where pages are left

Laws: L3 (a shortage is a plan without that sequence; the best-ranked sequence runs, or its memory is on the way, and it
fits by itself); L5 (the plan that takes a sequence out clears its row, before another sequence gets it); L11 (the
engine bounds the waiting queue when it accepts requests).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping

import numpy as np

from weft.config import Sizes
from weft.memory.memory import Memory
from weft.schedule.admission import AdmissionPlanner, victim_count
from weft.schedule.budget import NO_LIMIT, Budget, StepLimit, step_tokens_bound
from weft.schedule.fair_queue import FairQueue
from weft.schedule.plan import Int32s, StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.reuse import Reuse
from weft.schedule.rows import DecodeBatch, RowTable
from weft.schedule.sequence import SeqState, Sequence
from weft.schedule.snapshots import AUTO, SnapshotPolicy
from weft.schedule.store_tier import StoreTier
from weft.schedule.verify_runs import VerifyPlanner
from weft.shares import KeyShares
from weft.speculation.drafter import Drafter
from weft.units import PAD, RowId, SeqId, SlotId

_STARVED_STEPS = 2


class Scheduler:
    """The scheduler of an engine. ``store``: prefixes beyond memory; ``drafter``: where verify runs get their drafts.
    None: without."""

    def __init__(
        self,
        memory: Memory,
        sizes: Sizes,
        policy: SnapshotPolicy = AUTO,
        store: StoreTier | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.memory = memory
        self.sizes = sizes
        self.rows = RowTable(sizes.rows_max)
        self.reuse = Reuse(memory, policy, self.rows, sizes.grid_tokens)
        self.shares = KeyShares()
        self.waiting = FairQueue(self.shares, across=sizes.priority_across_keys)
        self.running = FairQueue(across=sizes.priority_across_keys)
        self.preemption_count = 0
        self.recomputed_tokens = 0
        """Tokens that were computed before a preemption and again after it."""
        self.step_limit: StepLimit = NO_LIMIT
        """Time of a step with decodes; the engine replaces it between steps (``--max-step-ms``)."""
        self.store = store
        self._admission = AdmissionPlanner(sizes, self.rows, self.reuse, self.waiting, self.running, store)
        self._verify_planner = (
            None
            if drafter is None
            else VerifyPlanner(drafter, self.rows, self.reuse, step_tokens_bound(sizes.step_tokens_max, sizes.rows_max))
        )
        self.drafter = drafter
        self.retracts = False
        """While it is set, plans preempt all that runs and admit nothing: memory is about to be lost."""
        self._closing: list[Sequence] = []
        self._decode_batch: DecodeBatch | None = None
        self._step = 0
        self._starved_steps = 0
        """Steps in a row in which some key had sequences and ran none."""

    # ------------------------------------------------------------------ queues

    @property
    def has_work(self) -> bool:
        return bool(
            len(self.waiting) or len(self.running) or self._closing or (self.store is not None and self.store.has_step)
        )

    @property
    def may_stop_plans(self) -> bool:
        """Whether waiting sequences may wait for the store, for their pictures or for the end of a retraction, and for
        nothing else."""
        return (
            self.retracts
            or (self.store is not None and self.store.may_stop_plans)
            or (not len(self.running) and all(seq.pictures_due for seq in self.waiting))
        )

    @property
    def holds_memory(self) -> bool:
        """Whether a sequence or a load has a lease."""
        return bool(len(self.running)) or self.has_closing

    @property
    def has_closing(self) -> bool:
        """Whether a sequence that ended, or a load, still holds its memory."""
        return bool(self._closing) or (self.store is not None and self.store.restores.has_leases)

    def submit(self, seq: Sequence) -> None:
        assert seq.state is SeqState.WAITING
        if not self.waiting.count(seq.key) and not self.running.count(seq.key):
            self.shares.arrive(seq.key, self.waiting.keys | self.running.keys)
        self.waiting.add(seq)

    def charge(self, plan: StepPlan, seconds: float) -> None:
        """Charge ``seconds`` of ``plan``: with several keys, each pays for its tokens."""
        if not self._keys:
            return
        tokens: dict[str, int] = {}
        for row, seq_id, length in zip(plan.rows.tolist(), plan.seqs, plan.lengths.tolist(), strict=True):
            seq = self.rows.seqs[row]
            if seq is not None and seq.id == seq_id:
                tokens[seq.key] = tokens.get(seq.key, 0) + length
        total = sum(tokens.values())
        self.shares.charge({key: seconds * count / total for key, count in tokens.items()})
        self.waiting.reorder()

    @property
    def _keys(self) -> frozenset[str]:
        """API keys with sequences; empty if only one has any."""
        waiting, running = self.waiting.keys, self.running.keys
        keys = waiting if waiting == running else waiting | running
        return keys if len(keys) > 1 else frozenset()

    def finish(self, seq: Sequence) -> None:
        """Finish ``seq`` now, by itself or because it was cancelled. The next plan frees its memory. Until then its row
        and memory stay untouched, so a step that computes it may be in flight."""
        if seq.state is SeqState.WAITING:
            self.waiting.remove(seq)
            self._forget(seq)
        else:
            assert seq.state is SeqState.RUNNING, f"{seq} has ended before"
            self.running.remove(seq)
            self.shares.ended(parted=bool(self._keys))
            self._closing.append(seq)
            self._decode_batch = None
        seq.state = SeqState.FINISHED

    def _forget(self, seq: Sequence) -> None:
        """Forget ``seq``, which does not wait any more."""
        self.reuse.forget(seq)
        if self.store is not None:
            self.store.restores.forget(seq.id)

    # ------------------------------------------------------------------ plan

    def plan(self, *, verifies: bool = True) -> StepPlan | None:
        """Return the next step. None if there is no work, or none until a last token in flight or a fetch has
        arrived. Changes nothing: called twice, it returns the same plan. Without ``verifies`` no draft is
        verified: the tokens before them are in flight."""
        if not self.has_work:
            return None
        step = PlanBuilder(self.memory.transaction(), self._decodes())
        awaited = self.reuse.awaited()
        if awaited:
            step.transaction.evict_last(awaited)
        self._plan_closing(step)
        if self.store is not None:
            self.store.close_loads(step)
        if self.retracts:
            self._plan_retraction(step)
        else:
            needy = self._plan_row_shares(step)
            self._plan_decodes(step)
            budget = _budget_beside(step, self.rows, self.sizes, self.step_limit, self._prefilling_keys(step))
            self._plan_prefills(step, budget)
            matches = self._admission.plan(step, budget, self._closing, needy) if not step.short else {}
            self.reuse.publish(step)
            self.reuse.plan_taps(step, matches)
        if self.store is not None and not self.retracts:
            step.stores = self.store.writes.work(idle=not (step.decode_rows.size or step.prefill_rows))
        if verifies and self._verify_planner is not None:
            self._verify_planner.plan(step)
        if not step.runs_or_frees and self.rows.ends_in_flight(step.decode_batch.rows).any():
            return None  # a sequence that ends publishes when it leaves
        if not step.runs_or_frees and not step.publishing and self.may_stop_plans:
            return None
        assert step.runs_or_frees or step.publishing, (
            f"nothing can run: {len(self.running)} running, {len(self.waiting)} waiting, usage {self.memory.usage()}"
        )
        return step.seal(self._step, self.rows)

    def _plan_retraction(self, step: PlanBuilder) -> None:
        step.short = True
        step.decode_rows = step.decode_batch.rows[:0]
        step.preempted = list(self.running)
        for seq in step.preempted:
            self._take_out(step, seq, preempted=True)

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
        """Return the decoding rows, best rank first; rebuilt only after the set of running sequences changed."""
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
        if step.preempted:  # before any of them gets a page
            out = {self.rows.row_of(seq) for seq in step.preempted}
            stays = [row not in out for row in rows.tolist()]
            rows, positions = rows[stays], positions[stays]
        step.decode_rows = rows
        [crossing] = (positions >= self.rows.capacity[rows]).nonzero()
        if not crossing.size:
            return
        crossing_rows = rows[crossing]
        # Once one row is short, all later rows are: the rest must not go to a lower rank.
        pages = step.transaction.extend_by_page(self.rows.seq_ids[crossing_rows].tolist())
        served = crossing_rows[: len(pages)]
        step.write_entries(served.tolist(), self.rows.pages_held[served].tolist(), pages)
        short = set(crossing_rows[len(pages) :].tolist())
        if short:
            self._plan_shortage(step, short)

    def _plan_shortage(self, step: PlanBuilder, short: set[int]) -> None:
        step.short = True
        if step.reclaim(pages=len(short)):
            # the cache gives way before a sequence does
            step.decode_rows = step.decode_rows[[row not in short for row in step.decode_rows.tolist()]]
            return
        order = [seq for seq in self.running if seq not in step.preempted]
        order_rows = [self.rows.row_of(seq) for seq in order]
        victims = victim_count(
            [int(self.rows.pages_held[row]) for row in order_rows],
            [row in short for row in order_rows],
            step.pages_freed,
        )
        if victims:
            step.preempted = [*step.preempted, *order[-victims:]]
            for seq in order[-victims:]:
                self._take_out(step, seq, preempted=True)
        out = short.union(order_rows[len(order) - victims :])
        step.decode_rows = step.decode_rows[[row not in out for row in step.decode_rows.tolist()]]
        assert all(row not in out for row in step.write_rows), "a victim ranks above one that got a page"

    def _plan_row_shares(self, step: PlanBuilder) -> frozenset[str]:
        """Return keys whose sequences wait and that have fewer rows than an even share, if no rows are free. Keys with
        more rows than their share give some up: their last sequences are preempted. A key that runs nothing for some
        steps lacks memory: then keys with several rows give one up in each step, and nothing else is admitted."""
        keys = self._keys
        if not keys or not len(self.waiting):
            return frozenset()
        share = max(1, self.sizes.rows_max // len(keys))
        first = min(map(self.waiting.yields, self.waiting))
        waiting = Counter(seq.key for seq in self.waiting if not seq.pictures_due and self.waiting.yields(seq) == first)
        wanted = {key: min(share - self.running.count(key), waiting[key]) for key in self.waiting.keys}
        needy = frozenset(key for key, count in wanted.items() if count > 0)
        missing = sum(wanted[key] for key in needy) - len(self.rows.free_rows()) - len(step.rows_cleared)
        if self._starved_steps >= _STARVED_STEPS and (starved := self._starved_keys()):
            needy, missing, share = starved, max(missing, 1), 1
        counts = {key: self.running.count(key) for key in self.running.keys}
        victims: list[Sequence] = []
        for seq in reversed(list(self.running)):
            if len(victims) >= missing:
                break
            if counts[seq.key] > share and self.running.yields(seq) >= first:
                counts[seq.key] -= 1
                victims.append(seq)
        for seq in victims:
            self._take_out(step, seq, preempted=True)
        step.preempted = victims
        return needy if missing >= 0 else frozenset()

    def _starved_keys(self) -> frozenset[str]:
        """Return keys that run nothing, and whose sequences wait for neither pictures nor the store."""
        fetch_of = None if self.store is None else self.store.restores.fetch_of
        return frozenset(
            key
            for key in self.waiting.keys
            if not self.running.count(key)
            and any(
                not seq.pictures_due and (fetch_of is None or fetch_of(seq.id) is None) for seq in self.waiting.of(key)
            )
        )

    def _prefilling_keys(self, step: PlanBuilder) -> frozenset[str]:
        """Return keys that have prompts to compute in this step; empty with one key."""
        if not self._keys:
            return frozenset()
        known = self.rows.known
        keys = {seq.key for seq in self.running if known[self.rows.row_of(seq)] is not None}
        if not step.short and (step.rows_cleared or self.rows.free_rows()):
            keys.update(seq.key for seq in self.waiting if not seq.pictures_due)
        return frozenset(keys) if len(keys) > 1 else frozenset()

    def _plan_prefills(self, step: PlanBuilder, budget: Budget) -> None:
        if step.decode_batch.rows.size == len(self.running):
            return
        order: Iterable[Sequence] = self.running
        if self._keys:  # a budget of one chunk is for the key that has used least
            order = sorted(self.running, key=self._turn)
        for seq in order:
            row = self.rows.row_of(seq)
            known = self.rows.known[row]
            if known is None or seq in step.preempted:
                continue
            start = int(self.rows.computed[row])
            end = budget.chunk_end(start, known.size, seq.key)
            if end == start:
                break
            budget.spend(start, end, seq.key)
            step.add_prefill(seq, row, start, end, int(self.rows.slots[row]), known)

    def _turn(self, seq: Sequence) -> tuple[int, float]:
        return self.running.yields(seq), self.shares.used_s.get(seq.key, 0.0)

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
        for row, moved in self.rows.of_patches(plan.reservation.moves.slot_patches):
            self.rows.slots[row] = moved.slot
            self._decode_batch = None
        self.reuse.committed(plan)
        if self.store is not None:
            served = self.store.committed(plan)
            for seq in self.waiting if served else ():
                if seq.id in served:
                    self.reuse.awaits(seq)
        starved = bool(self._keys) and any(not self.running.count(key) for key in self.waiting.keys)
        self._starved_steps = self._starved_steps + 1 if starved else 0

    def _commit_preempted(self, preempted: tuple[SeqId, ...]) -> None:
        victims = [seq for seq in self.running if seq.id in preempted]
        assert len(victims) == len(preempted)
        for seq in victims:
            self.preemption_count += 1
            seq.preemption_count += 1
            self.running.remove(seq)
            seq.computed_before = int(self.rows.computed[self.rows.row_of(seq)])
            self.rows.release(seq)
            seq.state = SeqState.WAITING
            self.waiting.add(seq)
            self.reuse.awaits(seq)
        self._decode_batch = None

    def _commit_admissions(self, plan: StepPlan) -> None:
        # Admissions are the last runs, in queue order; a sequence that waits for a prefix is not among them.
        first_run = plan.run_count - len(plan.admissions)
        admitted = {admission.seq for admission in plan.admissions}
        by_id = {seq.id: seq for seq in self.waiting if seq.id in admitted}
        for run, admission in enumerate(plan.admissions, first_run):
            seq = by_id[admission.seq]
            assert seq.id == plan.seqs[run]
            self.waiting.remove(seq)
            if self.store is not None:
                self.store.prices.admitted(len(self.running) + len(self.waiting))
            self.running.add(seq)
            self._forget(seq)
            seq.state = SeqState.RUNNING
            start = int(plan.starts[run])
            recomputed = max(0, seq.computed_before - start)
            self.recomputed_tokens += recomputed
            seq.recomputed_tokens += recomputed
            seq.computed_before = 0
            self.rows.assign(
                admission.row, seq, known=admission.tokens, computed=start, slot=SlotId(int(plan.slots[run]))
            )
        self._decode_batch = None

    def advance(
        self, plan: StepPlan, tokens: Int32s | int, verified: Mapping[int, tuple[int, ...]] | None = None
    ) -> None:
        """Advance over a step that is computed, or will be before any later one. Positions move on, and the next
        decodes feed ``tokens``: int32 [runs], PAD where none was chosen, or PAD for all while they are not known.
        ``verified``: the chosen tokens of each verify run; it moves by their number. Sequences that ended in the
        meantime still hold their rows."""
        ends, steps = plan.starts + plan.lengths, 1
        for run in plan.verify_runs:
            assert verified is not None, "a verify run advances by its chosen tokens"
            ends[run] = plan.starts[run] + len(verified[run])
            steps = max(steps, len(verified[run]))
        self.rows.advance(plan.rows, ends, tokens)
        if self._decode_batch is not None:
            self._decode_batch.step(steps)
        for run in plan.prefills:
            row = RowId(int(plan.rows[run]))
            if self.rows.decoding(row):
                self.rows.known[row] = None
                self._decode_batch = None

    def leap(self, plan: StepPlan, steps: int) -> None:
        """Advance over ``steps`` more steps of ``plan``, which has only decodes, one position further each time. For a
        replay, which knows that nothing else happens in these steps."""
        self.rows.computed[plan.rows] += steps
        if self._decode_batch is not None:
            self._decode_batch.step(steps)

    def learn_late(self, plan: StepPlan, run: int, token: int) -> None:
        """Learn ``token`` of ``run``, which arrives for a sequence that has ended. If the next step computed it, it
        belongs to the sequence's prefix in the cache: pages and states are indexed there by exactly their tokens."""
        seq = self.rows.seqs[int(plan.rows[run])]
        if seq is not None and seq.id == plan.seqs[run]:
            seq.generated.append(token)

    def audit(self, in_flight: Container[SeqId] = ()) -> None:
        """Recount rows and queues from the sequences (L1). ``in_flight``: sequences with a run whose token is not known
        yet."""
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


def _budget_beside(step: PlanBuilder, rows: RowTable, sizes: Sizes, limit: StepLimit, keys: frozenset[str]) -> Budget:
    """Return the budget that the decodes of ``step`` leave to prefills."""
    decodes = int(step.decode_rows.size)
    context = 0 if limit.cost is None else int(rows.computed[step.decode_rows].sum()) + decodes
    return Budget(sizes.step_tokens_max, decodes, limit, context, keys, whole=sizes.whole_prompts)
