"""The scheduler's side of the prefix cache: what is looked for, kept, handed on and waited for.

    admission        match -> open on it; remember where the sequence should leave its state (``taps``)
    each pass        publish   what the last step computed with states on the way goes into the tree
                     taps      slots for the positions that this step's runs pass
    leaving          close with ``keep``: pages and the running slot are donated, not freed
    the queue        a request whose prefix is being computed waits for it (``twins``)

    step k      run [0, 1024) of A, taps at 448 and 960        B, with the same 1000 tokens, waits
    step k+1    publish: 448 and 960 are in the tree           B does not see them yet: one draft, one version
    step k+2    B is matched at 960 and starts there

All of it follows from what is known without it: which sequences run, what memory found. So a plan asked for
twice is the same twice, and with a cache that is off every function here says "nothing".

Owned: which sequences have something to publish. Laws: L8 (cached tokens
are what memory matched, never more), L9 (a tap that finds no slot is left out; nothing else changes).
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.memory.memory import Memory
from weft.memory.reservation import Match
from weft.schedule.one_pass import Pass
from weft.schedule.plan import Int32s, StepPlan
from weft.schedule.rows import RowTable
from weft.schedule.sequence import SeqState, Sequence
from weft.schedule.taps import TapPolicy, insurance_tokens, taps_in_run, wanted_positions
from weft.schedule.twins import SAVED_TOKENS_MIN, Leader, Wait, front, wait_for
from weft.units import RowId, SeqId

FOLLOWERS_MAX = 64
"""Waiting requests that one pass passes over because they wait for a leader (law L11)."""


class Reuse:
    """``memory`` says whether anything is cached at all; ``policy`` where states are kept."""

    def __init__(self, memory: Memory, policy: TapPolicy, rows: RowTable) -> None:
        plan = memory.plan
        self.enabled = memory.caches
        self._memory = memory
        self._policy = policy
        self._rows = rows
        self._stateful = plan.slots_per_frame > 0
        self._donates = policy.donations or not self._stateful
        self._insurance_first = insurance_tokens(plan.slot_bytes, plan.page_bytes)
        self._unpublished: list[Sequence] = []

    # ------------------------------------------------------------------ looking and leaving

    def match(self, seq: Sequence, known: Int32s) -> Match:
        """What memory has of ``known``. Logprobs of the prompt need logits at each of its positions: nothing
        of it may be skipped."""
        return self._memory.match(known[:0] if seq.prompt_logprobs_due else known, salt=seq.salt)

    def kept(self, seq: Sequence) -> Int32s | None:
        """What ``seq``, which leaves its row, donates: the tokens that are computed."""
        if not self.enabled or not self._donates:
            return None
        return seq.known()[:int(self._rows.computed[self._rows.row_of(seq)])]

    # ------------------------------------------------------------------ in a pass

    def publish(self, step: Pass) -> None:
        """What the last step computed, of sequences that go on; who leaves publishes by leaving."""
        leaving = {seq.id for seq in step.preempted}
        for seq in self._unpublished:
            if seq.state is SeqState.RUNNING and seq.id not in leaving:
                computed = int(self._rows.computed[self._rows.row_of(seq)])
                step.draft.publish(seq.id, seq.known()[:computed])
                step.publishing += 1

    def plan_taps(self, step: Pass, matches: dict[SeqId, Match]) -> None:
        """Slots for what the prefills of this step pass: first what others wait for, then the sequence's
        own wishes. The first that finds none ends it."""
        if not self.enabled or not self._stateful:
            return
        for prefill, seq in enumerate(step.prefill_seqs):
            match = matches.get(seq.id)
            row = step.prefill_rows[prefill]
            wanted = self._rows.wanted[row] if match is None else self._wishes(seq, match)
            positions = taps_in_run([*step.demands.get(seq.id, ()), *wanted], step.prefill_starts[prefill],
                                    step.prefill_ends[prefill])
            for position in positions:
                slot = step.draft.save(seq.id, position)
                if slot is None:
                    return
                step.add_tap(prefill, position, slot)

    def _wishes(self, seq: Sequence, match: Match) -> list[int]:
        if not self._stateful:
            return []
        return wanted_positions(self._policy, known_tokens=seq.known_count, start=match.cached_tokens,
                                boundaries=seq.boundaries, kv_tokens=match.kv_tokens,
                                insurance_first=self._insurance_first)

    # ------------------------------------------------------------------ twins

    def leaders(self, step: Pass, running: Iterable[Sequence], closing: Iterable[Sequence]) -> Leaders:
        """Who computes, or has just computed, what others are about to: those of ``running`` that are in
        their prefill, who has something to publish, and who ends."""
        found = Leaders(enabled=self.enabled, stateful=self._stateful)
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
            if self._donates:
                taps = tuple(tap.position for tap in self._memory.lease(seq.id).taps)
                found.add(Leader(seq.id, seq.salt, None, seq.known()[:at], at, (*taps, at)))
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
        openings = {opening.seq: opening.match for opening in plan.reservation.opened}
        tapped = {tap.run for tap in plan.taps}
        self._unpublished = []
        for run in range(plan.decode_count, plan.run_count):
            row = int(plan.rows[run])
            seq = self._rows.seqs[row]
            assert seq is not None, f"row {row} computes and is empty"
            assert seq.id == plan.seqs[run]
            if seq.id in openings:
                self._rows.wanted[row] = self._wishes(seq, openings[seq.id])
            if run in tapped or not self._stateful:
                self._unpublished.append(seq)


class Leaders:
    """By salt and first chunk; none where nothing is kept."""

    def __init__(self, *, enabled: bool, stateful: bool) -> None:
        self._enabled = enabled
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
        if not self._by_front or seq.prompt_logprobs_due or known.size - 1 - cached < SAVED_TOKENS_MIN:
            return None
        alike = self._by_front.get((seq.salt, front(known)))
        if alike is None:
            return None
        return wait_for(known, cached, seq.rank, alike, stateful=self._stateful)
