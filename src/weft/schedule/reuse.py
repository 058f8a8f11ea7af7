"""The scheduler's side of the prefix cache: what is looked for, kept, handed on and waited for.

    admission        match -> open on it; remember where the sequence should leave its state (``taps``)
    each pass        publish   what the last step computed with states on the way goes into the tree
                     taps      slots for the positions that this step's runs pass
                     copies    of running slots that have come as far as an answer keeps its states
    leaving          close with ``keep``: pages and the running slot are donated, not freed
    preempted        what it left goes last of all that is kept, until it runs again or ends
    the queue        a request whose prefix is being computed waits for it (``twins``)

    step k      run [0, 1024) of A, taps at 448 and 960        B, with the same 1000 tokens, waits
    step k+1    publish: 448 and 960 are in the tree           B does not see them yet: one draft, one version
    step k+2    B is matched at 960 and starts there

All of it follows from what is known without it: which sequences run, what memory found. So a plan asked for
twice is the same twice, and with a cache that is off every function here says "nothing".

Owned: which sequences have something to publish, and where preempted ones have left what they had. Laws: L8
(cached tokens are what memory matched, never more; each lost one has its reason), L9 (a tap that finds no
slot is left out; nothing else changes).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from weft.memory.frames.pressure import slots_ahead
from weft.memory.memory import Memory
from weft.memory.values import NO_NODE, Match, NodeId
from weft.schedule.checkpoints import CheckpointPolicy
from weft.schedule.plan import Int32s, StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.prefix_sharing import SAVED_TOKENS_MIN, Leader, Wait, front, in_the_making, wait_for
from weft.schedule.rows import RowTable
from weft.schedule.sequence import Rank, SeqState, Sequence
from weft.schedule.taps import (
    decode_distance,
    decodes_due,
    insurance_tokens,
    spare_in_run,
    taps_in_run,
    until_due,
    wanted_positions,
)
from weft.units import PAD, RowId, SeqId

FOLLOWERS_MAX = 64
"""Waiting requests that one pass passes over because they wait for a leader (law L11)."""
AWAITED_MAX = 8
"""Preempted sequences whose prefixes go last, the best ranked ones (law L11)."""


class Reuse:
    """``memory`` says whether anything is cached at all; ``policy`` and ``grid`` where states are kept."""

    def __init__(self, memory: Memory, policy: CheckpointPolicy, rows: RowTable, grid: int) -> None:
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

    # ------------------------------------------------------------------ looking and leaving

    def match(self, seq: Sequence, known: Int32s) -> Match:
        """What memory has of ``known``. Logprobs of the prompt need logits at each of its positions: nothing
        of it may be skipped."""
        return self._memory.match(known[:0] if seq.prompt_logprobs_due else known, salt=seq.salt)

    def leave(self, step: PlanBuilder, seq: Sequence, *, preempted: bool) -> None:
        """``seq`` gives up its memory; it donates what it computed, or at least states kept on its way."""
        if not self.enabled:
            step.draft.close(seq.id)
            return
        donates = self._donates(preempted=preempted)
        keep = None
        if donates or self._memory.lease(seq.id).taps:
            keep = seq.known()[:int(self._rows.computed[self._rows.row_of(seq)])]
            if not donates:
                step.draft.publish(seq.id, keep)
        step.draft.close(seq.id, keep=keep if donates else None)

    def preempted(self, seq: Sequence) -> None:
        """``seq`` waits again, and memory has what it donated. A look-up leaves the last token out, which has
        to be computed in any case; that one may be in flight."""
        known = seq.known()
        if seq.computed_before == known.size:
            known = np.append(known, np.int32(PAD))
        anchor = self.match(seq, known).anchor
        if anchor != NO_NODE:
            self._left[seq.id] = seq.rank, anchor

    def back(self, seq: Sequence) -> None:
        """``seq`` runs, or ended while it waited: nobody comes for what it left."""
        self._left.pop(seq.id, None)

    def awaited(self) -> list[NodeId]:
        """What preempted sequences have left, the best ranked one's first."""
        return [anchor for _, anchor in sorted(self._left.values())[:AWAITED_MAX]] if self._left else []

    def _donates(self, *, preempted: bool) -> bool:
        return not self._stateful or (self._policy.preemption if preempted else self._policy.request_end)

    # ------------------------------------------------------------------ in a pass

    def publish(self, step: PlanBuilder) -> None:
        """What the last step computed, of sequences that go on; who leaves publishes by leaving."""
        if not self._unpublished:
            return
        leaving = {seq.id for seq in step.preempted}
        for seq in self._unpublished:
            if seq.state is SeqState.RUNNING and seq.id not in leaving:
                computed = int(self._rows.computed[self._rows.row_of(seq)])
                step.draft.publish(seq.id, seq.known()[:computed])
                step.publishing += 1

    def plan_taps(self, step: PlanBuilder, matches: dict[SeqId, Match]) -> None:
        """Slots for what the prefills of this step pass: first what others wait for, then the sequence's
        own wishes. The first that finds none ends it."""
        if not self.enabled or not self._stateful:
            return
        if self._plan_wishes(step, matches):
            self._plan_copies(step)
            if self._policy.spare:
                self._plan_spare(step)

    def _plan_wishes(self, step: PlanBuilder, matches: dict[SeqId, Match]) -> bool:
        """Whether all were met."""
        for prefill, seq in enumerate(step.prefill_seqs):
            match = matches.get(seq.id)
            row = step.prefill_rows[prefill]
            wanted = self._rows.wanted[row] if match is None else self._wishes(seq, match)
            positions = taps_in_run([*step.demands.get(seq.id, ()), *wanted], step.prefill_starts[prefill],
                                    step.prefill_ends[prefill])
            for position in positions:
                slot = step.draft.save(seq.id, position)
                if slot is None:
                    return False
                step.add_tap(prefill, position, slot)
        return True

    def _plan_spare(self, step: PlanBuilder) -> None:
        """What is left over, to places that nobody has asked for."""
        for prefill, seq in enumerate(step.prefill_seqs):
            run = int(step.decode_rows.size) + prefill
            taken = [tap.position for tap in step.taps if tap.run == run]
            for position in spare_in_run(taken, step.prefill_starts[prefill], step.prefill_ends[prefill],
                                         known_tokens=seq.known_count,
                                         insurance_first=self._insurance_first, grid=self._grid):
                slot = step.draft.save(seq.id, position, spare=self._spare)
                if slot is None:
                    return
                step.add_tap(prefill, position, slot)

    def _plan_copies(self, step: PlanBuilder) -> None:
        """The states that decodes have come to: what the running slot holds now, this step overwrites."""
        decode_batch = step.decode_batch
        if not self._decode_distance or not decode_batch.states.over:
            return
        rows, distance = step.decode_rows, self._decode_distance
        computed, targets = self._rows.computed[rows], self._rows.target[rows]
        due = decodes_due(computed, targets, distance)
        if not due and rows is decode_batch.rows:
            decode_batch.states.start(until_due(computed, targets, distance))
        for at in due:
            row = rows[at]
            seq = SeqId(int(self._rows.seq_ids[row]))
            slot = step.draft.save(seq, int(self._rows.computed[row]))
            if slot is None:
                return
            step.copy_slot(step.draft.slot_of(seq), slot)

    def _wishes(self, seq: Sequence, match: Match) -> list[int]:
        if not self._stateful:
            return []
        return wanted_positions(self._policy, known_tokens=seq.known_count, start=match.cached_tokens,
                                boundaries=seq.boundaries, marks=seq.marks,
                                kv_tokens=max(match.kv_tokens, match.recall.seen_tokens),
                                insurance_first=self._insurance_first, grid=self._grid)

    # ------------------------------------------------------------------ twins

    def leaders(self, step: PlanBuilder, running: Iterable[Sequence], closing: Iterable[Sequence]) -> Leaders:
        """Who computes, or has just computed, what others are about to: those of ``running`` that are in
        their prefill, who has something to publish, and who ends."""
        found = Leaders(enabled=self.enabled, stateful=self._stateful, grid=self._grid)
        if not self.enabled:
            return found
        unpublished = {seq.id: seq for seq in self._unpublished if seq.state is SeqState.RUNNING}
        for seq in (*running, *unpublished.values()):
            row = self._rows.row_of(seq)
            known = self._rows.known[row]
            publishes = seq.id in unpublished
            if (known is None and not publishes) or found.has(seq) or seq in step.preempted:
                continue
            found.add(self._leader(seq, row, seq.known() if known is None else known, publishes=publishes))
        for seq in closing:
            row = self._rows.row_of(seq)
            at = int(self._rows.computed[row])
            arriving = [tap.position for tap in self._memory.lease(seq.id).taps]
            arriving += [at] if self._donates(preempted=False) else []
            if arriving:
                found.add(Leader(seq.id, seq.salt, None, seq.known()[:at], at, tuple(arriving)))
        return found

    def _leader(self, seq: Sequence, row: RowId, known: Int32s, *, publishes: bool) -> Leader:
        at = int(self._rows.computed[row])
        arriving: tuple[int, ...] = ()
        if publishes:
            taps = tuple(tap.position for tap in self._memory.lease(seq.id).taps)
            arriving = taps if self._stateful else (at,)
        return Leader(seq.id, seq.salt, seq.rank, known, at, arriving)

    # ------------------------------------------------------------------ after a commit

    def committed(self, plan: StepPlan) -> None:
        """``plan`` is true now, rows assigned: remember the wishes of who came, and who has something to
        publish."""
        if not self.enabled:
            return
        if plan.decode_count == plan.run_count and not plan.reservation.saved:
            self._unpublished = []
            return
        openings = {opening.seq: opening.match for opening in plan.reservation.opened}
        saving = {save.seq for save in plan.reservation.saved}
        self._unpublished = []
        for run in range(plan.decode_count, plan.run_count):
            seq = self._seq_of(plan, run)
            if seq.id in openings:
                self._rows.wanted[int(plan.rows[run])] = self._wishes(seq, openings[seq.id])
            if seq.id in saving or not self._stateful:
                self._unpublished.append(seq)
                saving.discard(seq.id)
        for run in range(plan.decode_count if saving else 0):
            if plan.seqs[run] in saving:
                self._unpublished.append(self._seq_of(plan, run))

    def _seq_of(self, plan: StepPlan, run: int) -> Sequence:
        row = int(plan.rows[run])
        seq = self._rows.seqs[row]
        assert seq is not None, f"row {row} computes and is empty"
        assert seq.id == plan.seqs[run]
        return seq


class Leaders:
    """By salt and first chunk; none where nothing is kept."""

    def __init__(self, *, enabled: bool, stateful: bool, grid: int) -> None:
        self._enabled = enabled
        self._grid = grid
        self._stateful = stateful
        self._by_front: dict[tuple[str, bytes], list[Leader]] = {}
        self._seqs: set[SeqId] = set()

    def has(self, seq: Sequence) -> bool:
        return seq.id in self._seqs

    def add(self, leader: Leader) -> None:
        self._seqs.add(leader.seq)
        if self._enabled and leader.known.size >= SAVED_TOKENS_MIN:
            self._by_front.setdefault((leader.salt, front(leader.known)), []).append(leader)

    def admitted(self, seq: Sequence, known: Int32s, start: int) -> None:
        """``seq`` was admitted in this pass and begins at ``start``."""
        self.add(Leader(seq.id, seq.salt, seq.rank, known, start))

    def wait_for(self, seq: Sequence, known: Int32s, cached: int) -> Wait | None:
        """What ``seq`` should wait for before it is admitted."""
        alike = self._alike(seq, known, cached)
        if not alike:
            return None
        return wait_for(known, cached, seq.rank, alike, stateful=self._stateful, grid=self._grid)

    def with_not_ready(self, seq: Sequence, known: Int32s, match: Match) -> Match:
        """``match`` of ``seq``, which is admitted and waits for nobody: of what it has to compute, that which
        others compute at this moment is lost because it is not ready."""
        alike = self._alike(seq, known, match.cached_tokens)
        ready = 0
        if alike:
            ready = in_the_making(known, match.cached_tokens, alike, stateful=self._stateful, grid=self._grid)
        if ready <= match.cached_tokens:
            return match
        return replace(match, lost=match.lost.but_not_ready(ready - match.cached_tokens))

    def _alike(self, seq: Sequence, known: Int32s, cached: int) -> list[Leader]:
        """Who computes what begins as ``known`` does, when enough is to be had from anybody."""
        if not self._by_front or seq.prompt_logprobs_due or known.size - 1 - cached < SAVED_TOKENS_MIN:
            return []
        return self._by_front.get((seq.salt, front(known)), [])
