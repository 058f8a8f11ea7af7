"""The scheduler's side of the prefix cache: matches, saved states, publications and waits.

    admission        match, then open on the match; note where the sequence saves its state (snapshots.py)
    each plan        publish   what the last step computed, and its states on the way, go into the tree
                     taps      slots for positions that runs of this step pass
                     copies    of running slots, where an answer has come to a position that it saves
    leaving          close with ``keep``: pages and the running slot are donated, not freed
    preempted        what the sequence leaves is evicted last, until it runs again or ends
    read             what a store has brought for a request that waits is evicted last too
    waiting          a request whose prefix is being computed waits for it (prefix_sharing.py)

    step k      run [0, 1024) of A, taps at 448 and 960        B has the same 1000 tokens and waits
    step k+1    publish: 448 and 960 are in the tree           B cannot match them before the next version
    step k+2    B matches 960 and starts there

All decisions follow from the running sequences and memory's matches, so planning twice gives the same plan.
Laws: L8 (cached tokens are those that memory matched, never more; each lost token has its reason), L9 (a tap without a
free slot is left out, and nothing else changes).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.memory.arena_work import SlotCopy
from weft.memory.memory import Memory
from weft.memory.prefix.eviction import slots_ahead
from weft.memory.values import NO_NODE, Match, NodeId
from weft.schedule.plan import Int32s, StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.prefix_sharing import PrefixProducer, PrefixProducers
from weft.schedule.rows import RowTable
from weft.schedule.sequence import Rank, SeqState, Sequence
from weft.schedule.snapshots import (
    SnapshotPolicy,
    decode_distance,
    decodes_due,
    insurance_tokens,
    spare_in_run,
    taps_in_run,
    until_due,
    wanted_positions,
)
from weft.units import PAD, RowId, SeqId

PREFIX_WAITS_MAX = 64
"""Most waiting requests that one plan skips because they wait for a prefix in flight (law L11)."""
AWAITED_MAX = 32
"""Most waiting sequences whose prefixes are evicted last, the best ranked ones (law L11)."""


class Reuse:
    """The use of the prefix cache by one scheduler. ``memory`` says whether the cache is on; ``policy`` and ``grid``
    say where states are saved."""

    def __init__(self, memory: Memory, policy: SnapshotPolicy, rows: RowTable, grid: int) -> None:
        plan = memory.plan
        self.enabled = memory.caches
        self._memory = memory
        self._policy = policy
        self._rows = rows
        self._grid = grid
        self._stateful = plan.slots_per_frame > 0
        self._insurance_first = insurance_tokens(plan.slot_bytes, plan.page_bytes)
        self._spare = 2 * slots_ahead(plan.slot_count)
        self._decode_distance = 0
        if self.enabled and self._stateful:
            self._decode_distance = decode_distance(policy, plan.slot_bytes, plan.page_bytes)
        self._unpublished: list[Sequence] = []
        self._left: dict[SeqId, tuple[Rank, NodeId]] = {}
        self._hits: dict[SeqId, tuple[int, int]] = {}
        """Version of the tree, and the cached tokens found then, by waiting sequence."""

    # ------------------------------------------------------------------ looking and leaving

    def match(self, seq: Sequence, known: Int32s) -> Match:
        """Return the cached prefix of ``known``."""
        return self._memory.match(seq.reusable(known), salt=seq.salt)

    def cached_tokens(self, seq: Sequence, known: Int32s) -> int:
        """Return ``match(seq, known).cached_tokens``, for a sequence that waits. It is looked up again only when the
        tree has changed."""
        changes = self._memory.prefix_tree.change_count
        hit = self._hits.get(seq.id)
        if hit is None or hit[0] != changes:
            hit = self._hits[seq.id] = changes, self._memory.hit_tokens(seq.reusable(known), salt=seq.salt)
        return hit[1]

    def leave(self, step: PlanBuilder, seq: Sequence, *, preempted: bool) -> None:
        """Close ``seq``, which gives up its memory. It donates its computed pages, or at least the states saved on the
        way."""
        if not self.enabled:
            step.transaction.close(seq.id)
            return
        donates = self._donates(preempted=preempted)
        keep = None
        if donates or self._memory.lease(seq.id).snapshots:
            keep = seq.keys()[: int(self._rows.computed[self._rows.row_of(seq)])]
            if not donates:
                step.transaction.publish(seq.id, keep)
        step.transaction.close(seq.id, keep=keep if donates else None)

    def awaits(self, seq: Sequence) -> None:
        """Mark ``seq`` as waiting: after a preemption, for a read of the store, or for its turn after the read. Its
        cached prefix is evicted last. The lookup leaves out the last token, because it is always computed and may be in
        flight after a preemption."""
        known = seq.keys()
        if seq.computed_before == known.size:
            known = np.append(known, np.int32(PAD))
        anchor = self.match(seq, known).anchor
        if anchor != NO_NODE:
            self._left[seq.id] = seq.rank, anchor

    def forget(self, seq: Sequence) -> None:
        """Forget the prefix of ``seq``, which runs again, or ended while it waited."""
        self._left.pop(seq.id, None)
        self._hits.pop(seq.id, None)

    def awaited(self) -> list[NodeId]:
        """Return the cached nodes of preempted sequences and of reads, best rank first."""
        return [anchor for _, anchor in sorted(self._left.values())[:AWAITED_MAX]] if self._left else []

    def _donates(self, *, preempted: bool) -> bool:
        return not self._stateful or (self._policy.preemption if preempted else self._policy.request_end)

    # ------------------------------------------------------------------ in a plan

    def publish(self, step: PlanBuilder) -> None:
        """Publish the pages that the last step computed for sequences that go on. A sequence that leaves
        publishes when it closes."""
        if not self._unpublished:
            return
        leaving = {seq.id for seq in step.preempted}
        for seq in self._unpublished:
            if seq.state is SeqState.RUNNING and seq.id not in leaving:
                computed = int(self._rows.computed[self._rows.row_of(seq)])
                step.transaction.publish(seq.id, seq.keys()[:computed])
                step.publishing += 1

    def plan_taps(self, step: PlanBuilder, matches: dict[SeqId, Match]) -> None:
        """Plan slots for positions that prefills of this step pass: first those that other requests wait for, then the
        sequence's own wishes. The first tap without a slot ends this."""
        if not self.enabled or not self._stateful:
            return
        if self._plan_wishes(step, matches):
            self._plan_copies(step)
            if self._policy.spare:
                self._plan_spare(step)

    def _plan_wishes(self, step: PlanBuilder, matches: dict[SeqId, Match]) -> bool:
        """Return whether every wish got a slot."""
        for prefill, seq in enumerate(step.prefill_seqs):
            match = matches.get(seq.id)
            row = step.prefill_rows[prefill]
            wanted = self._rows.wanted[row] if match is None else self._wishes(seq, match)
            positions = taps_in_run(
                [*step.requested_taps.get(seq.id, ()), *wanted],
                step.prefill_starts[prefill],
                step.prefill_ends[prefill],
            )
            for position in positions:
                slot = step.transaction.save(seq.id, position)
                if slot is None:
                    return False
                step.add_tap(prefill, position, slot)
        return True

    def _plan_spare(self, step: PlanBuilder) -> None:
        """Plan left-over slots for positions that no source has asked for."""
        for prefill, seq in enumerate(step.prefill_seqs):
            run = int(step.decode_rows.size) + prefill
            tapped = [tap.position for tap in step.taps if tap.run == run]
            for position in spare_in_run(
                tapped,
                step.prefill_starts[prefill],
                step.prefill_ends[prefill],
                known_tokens=seq.known_count,
                insurance_first=self._insurance_first,
                grid=self._grid,
            ):
                slot = step.transaction.save(seq.id, position, spare=self._spare)
                if slot is None:
                    return
                step.add_tap(prefill, position, slot)

    def _plan_copies(self, step: PlanBuilder) -> None:
        """Plan copies of states at which decodes have arrived. This step overwrites the running slot, so it is copied
        first."""
        decode_batch = step.decode_batch
        if not self._decode_distance or not decode_batch.states.over:
            return
        rows, distance = step.decode_rows, self._decode_distance
        computed, targets = self._rows.computed[rows], self._rows.target[rows]
        due = decodes_due(computed, targets, distance)
        if not due and rows is decode_batch.rows:
            decode_batch.states.start(until_due(computed, targets, distance))
        for index in due:
            row = rows[index]
            seq = SeqId(int(self._rows.seq_ids[row]))
            slot = step.transaction.save(seq, int(self._rows.computed[row]))
            if slot is None:
                return
            step.copies.append(SlotCopy(step.transaction.slot_of(seq), slot))

    def until_copies(self, rows: Int32s) -> Int32s | None:
        """Return tokens from each of these decodes to the next position at which its answer saves a state; None if
        answers save none on their way."""
        if not self._decode_distance:
            return None
        return until_due(self._rows.computed[rows], self._rows.target[rows], self._decode_distance)

    def _wishes(self, seq: Sequence, match: Match) -> list[int]:
        if not self._stateful:
            return []
        return wanted_positions(
            self._policy,
            known_tokens=seq.known_count,
            start=match.cached_tokens,
            boundaries=seq.boundaries,
            marks=seq.marks,
            kv_tokens=max(match.kv_tokens, match.recall.seen_tokens),
            insurance_first=self._insurance_first,
            grid=self._grid,
        )

    # ------------------------------------------------------------------ in-flight prefixes

    def producers(self, step: PlanBuilder, running: Iterable[Sequence], closing: Iterable[Sequence]) -> PrefixProducers:
        """Return sequences that compute, or have just computed, a prefix that others need: prefills among ``running``,
        sequences with something to publish, and those that end."""
        producers = PrefixProducers(enabled=self.enabled, stateful=self._stateful, grid=self._grid)
        if not self.enabled:
            return producers
        unpublished = {seq.id: seq for seq in self._unpublished if seq.state is SeqState.RUNNING}
        for seq in (*running, *unpublished.values()):
            row = self._rows.row_of(seq)
            known = self._rows.known[row]
            publishes = seq.id in unpublished
            if (known is None and not publishes) or producers.has(seq) or seq in step.preempted:
                continue
            known = seq.keys() if known is None else seq.keyed(known)
            producers.add(self._producer(seq, row, known, publishes=publishes))
        for seq in closing:
            row = self._rows.row_of(seq)
            computed = int(self._rows.computed[row])
            arriving = [snapshot.position for snapshot in self._memory.lease(seq.id).snapshots]
            arriving += [computed] if self._donates(preempted=False) else []
            if arriving:
                producers.add(PrefixProducer(seq.id, seq.salt, None, seq.keys()[:computed], computed, tuple(arriving)))
        return producers

    def _producer(self, seq: Sequence, row: RowId, known: Int32s, *, publishes: bool) -> PrefixProducer:
        computed = int(self._rows.computed[row])
        arriving: tuple[int, ...] = ()
        if publishes:
            written = tuple(snapshot.position for snapshot in self._memory.lease(seq.id).snapshots)
            arriving = written if self._stateful else (computed,)
        return PrefixProducer(seq.id, seq.salt, seq.rank, known, computed, arriving)

    # ------------------------------------------------------------------ after a commit

    def committed(self, plan: StepPlan) -> None:
        """Note the wishes of admitted sequences, and which sequences have something to publish. ``plan`` is committed
        and rows are assigned."""
        if not self.enabled:
            return
        if not plan.prefills and not plan.reservation.saved:
            self._unpublished = []
            return
        openings = {opening.seq: opening.match for opening in plan.reservation.opened}
        saving = {save.seq for save in plan.reservation.saved}
        self._unpublished = []
        for run in plan.prefills:
            seq = self._seq_of(plan, run)
            if seq.id in openings:
                self._rows.wanted[int(plan.rows[run])] = self._wishes(seq, openings[seq.id])
            if seq.id in saving or not self._stateful:
                self._unpublished.append(seq)
                saving.discard(seq.id)
        for run in range(plan.prefills.start if saving else 0):
            if plan.seqs[run] in saving:
                self._unpublished.append(self._seq_of(plan, run))

    def _seq_of(self, plan: StepPlan, run: int) -> Sequence:
        row = int(plan.rows[run])
        seq = self._rows.seqs[row]
        assert seq is not None, f"row {row} computes and is empty"
        assert seq.id == plan.seqs[run]
        return seq
