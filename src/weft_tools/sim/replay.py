"""A trace through the real memory, tree and scheduler, on a virtual clock, for ``weft simulate``.

    arrivals due --> scheduler.submit        as an engine takes its messages, between two steps
    scheduler.plan --> commit                the same code as in the engine, to the last line
    clock += cost of the step                in place of the executor
    scheduler.advance --> ends               a sequence ends at its recorded length

Agreement with an engine on the same requests and step times is a test: the same hits, the same evictions, the
same cached tokens for each request. A store (``store_tier``) is the engine's tier over a modelled disk. If
every request waits for it, the clock moves to its next event.

**Jumps.** Most steps only decode, and many of them change nothing: no page, no arrival, no end. Such a *still* plan
would be planned again, one position on, until a sequence crosses into a page or ends, or a request is due. These steps
are done at once, with the clock advanced by the cost of each: the same result as step by step (tested with ``jump``
False), with a tenth of the work.

Not here: text; sampling; the host's own time; clients that wait for an answer before they ask again;
refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from weft.config import Sizes
from weft.costs.step import CostModel, Work
from weft.memory.frames.plan import ArenaPlan
from weft.memory.reservation import Reservation
from weft.request import SamplingParams
from weft.schedule.plan import Int32s, StepPlan, work_of
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import SeqState, Sequence
from weft.schedule.store_tier import StoreTier
from weft.units import CHUNK_TOKENS, PAD, PAGE_TOKENS, SeqId
from weft_tools.sim.arms import Arm, find_arm
from weft_tools.sim.handoffs import LinkModel, VirtualInbox
from weft_tools.sim.report import Gaps, MeanBytes, Report, Timeline, bytes_by_use
from weft_tools.sim.store_tier import LINK_BYTES_S, StoreModel, VirtualStore, report_of, tier_for
from weft_tools.sim.traffic import Traffic


class VirtualClock:
    """A clock that is moved by hand; called, it returns the seconds, as the engine's ``clock``."""

    __slots__ = ("_now_s",)

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds

    def advance_to(self, when_s: float) -> None:
        self._now_s = max(self._now_s, when_s)


ROWS_MAX = 256
STEP_TOKENS_MAX = 8192
_REPORT_EVERY = 16
"""Requests that end between two calls of ``on_progress``."""
_LOOK_EVERY = 16
"""Steps between two samples of the uses of memory."""

_SAMPLED = SamplingParams()
_PROMPT_ONLY = SamplingParams(max_tokens=0)
_WITH_PROMPT_LOGPROBS = SamplingParams(prompt_logprobs=0)

_NO_CHANGE = Reservation(version=0, frames=(), pages=(), slots=(), opened=(), extended=(), closed=())

OnProgress = Callable[[int, int], None]
"""A function that gets requests that ended, and requests in all."""


class Played(Sequence):
    """A sequence whose answer is known: ``answered`` of its ``target`` tokens so far. ``boundaries``: in addition to
    those of the trace."""

    __slots__ = ("all_tokens", "answered", "index", "target")

    def __init__(self, index: int, traffic: Traffic, boundaries: tuple[int, ...] = ()) -> None:
        request = traffic.requests[index]
        self.all_tokens = traffic.tokens(index)
        sampling = _SAMPLED
        if request.prompt_logprobs:
            sampling = _WITH_PROMPT_LOGPROBS
        elif not request.output_tokens and request.cancelled_at_s is None:
            sampling = _PROMPT_ONLY
        super().__init__(
            SeqId(index),
            prompt=self.all_tokens[: request.prompt_tokens],
            sampling=sampling,
            seed=0,
            stop_ids=(),
            rank=(request.priority, index, 0),
            salt=request.salt,
            boundaries=(*request.boundaries, *boundaries),
            marks=request.marks,
        )
        self.index = index
        self.answered = 0
        self.target = request.output_tokens

    @property
    def known_count(self) -> int:
        return int(self.prompt.size) + self.answered

    def known(self) -> Int32s:
        return self.all_tokens[: self.prompt.size + self.answered]


@dataclass(slots=True)
class PlayedTimes:
    """Times by request; see ``Timeline``. ``last``: of its last token so far; ``gaps``: between tokens."""

    cached: list[int]
    began: list[float]
    first: list[float]
    ended: list[float]
    last: list[float]
    gaps: Gaps

    @classmethod
    def none(cls, count: int) -> PlayedTimes:
        began, first, ended, last = ([float("nan")] * count for _ in range(4))
        return cls([0] * count, began, first, ended, last, Gaps())

    def timeline(self) -> Timeline:
        return Timeline(
            np.asarray(self.cached, dtype=np.int64),
            np.asarray(self.began),
            np.asarray(self.first),
            np.asarray(self.ended),
        )


def sizes_for(
    plan: ArenaPlan,
    traffic: Traffic,
    *,
    rows_max: int = ROWS_MAX,
    step_tokens_max: int = STEP_TOKENS_MAX,
    length_max: int | None = None,
    grid_tokens: int = CHUNK_TOKENS,
) -> Sizes:
    """Return sizes that allow every request of ``traffic`` that fits into the arena by itself and is at most
    ``length_max`` long."""
    frames = plan.frame_count - (plan.slots_per_frame > 0)
    holds = frames * plan.pages_per_frame * PAGE_TOKENS if plan.pages_per_frame else traffic.length_max
    if plan.slots_per_frame:
        slot_frames = plan.frame_count - (plan.pages_per_frame > 0)
        rows_max = min(rows_max, max(1, slot_frames * plan.slots_per_frame))
    length = min(traffic.length_max, holds, traffic.length_max if length_max is None else length_max)
    return Sizes(
        max_model_len=max(1, length),
        rows_max=rows_max,
        step_tokens_max=step_tokens_max,
        queue_max=len(traffic),
        memory_bytes=plan.arena_bytes,
        grid_tokens=grid_tokens,
    )


def replay(
    traffic: Traffic,
    plan: ArenaPlan,
    cost: CostModel,
    *,
    arm: Arm | str = "lru",
    sizes: Sizes | None = None,
    jump: bool = True,
    store: StoreModel | None = None,
    on_progress: OnProgress | None = None,
) -> Report:
    """Run ``traffic`` through a memory of geometry ``plan`` under ``arm``, with ``store`` below it. Requests
    longer than ``sizes.max_model_len`` are left out, as an engine refuses them."""
    arm = find_arm(arm) if isinstance(arm, str) else arm
    player = Player(
        traffic, plan, cost, arm, sizes or sizes_for(plan, traffic), jump=jump, store=store, on_progress=on_progress
    )
    return player.run()


@dataclass(slots=True)
class PlayerCounts:
    steps: int = 0
    busy_s: float = 0.0
    computed_tokens: int = 0
    running_max: int = 0
    taps: int = 0
    saved_s: float = 0.0
    ended: int = 0
    left_out: set[int] = field(default_factory=set)


class Player:
    """One engine that plays requests of ``traffic``: all of them (``run``), or only requests that are passed to it.
    ``link``: the link over which other engines send records."""

    def __init__(
        self,
        traffic: Traffic,
        plan: ArenaPlan,
        cost: CostModel,
        arm: Arm,
        sizes: Sizes,
        *,
        jump: bool,
        on_progress: OnProgress | None,
        times: PlayedTimes | None = None,
        store: StoreModel | None = None,
        link: LinkModel | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.memory = arm.make_memory(plan, cost, self.clock)
        self._store_model = store
        self.tier: StoreTier | None = None
        self._disk: VirtualStore | None = None
        self.link = link
        self.inbox: VirtualInbox | None = None
        if store is not None:
            self.tier, self._disk = tier_for(store, self.memory, cost, self.clock)
        elif link is not None:
            self.tier, self.inbox = link.tier_for(self.memory, cost, self.clock)
        self.scheduler = Scheduler(self.memory, sizes, arm.snapshots, self.tier)
        self._traffic = traffic
        self._cost = cost
        self._arm = arm
        self._sizes = sizes
        self._jump = jump
        self._on_progress = on_progress
        self._live: dict[int, Played] = {}
        self._cancels: dict[int, float] = {}
        self._next = 0
        self._times = times or PlayedTimes.none(len(traffic))
        self.counts = PlayerCounts()
        self._mean_bytes = MeanBytes()

    # ------------------------------------------------------------------ the loop

    def run(self) -> Report:
        requests = self._traffic.requests
        while self._next < len(requests) or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.clock.advance_to(min(requests[self._next].at_s, self._store_due_s()))
            self._arrive()
            if self.tier is not None:
                self.tier.poll()
            if self.scheduler.has_work:
                self._step()
        return self._report()

    def _store_due_s(self) -> float:
        """Return the time at which the store next changes anything."""
        source = self._disk or self.inbox
        if self.tier is None or source is None:
            return inf
        return min(source.next_event_s, self.tier.next_poll_s)

    def _arrive(self) -> None:
        requests, now = self._traffic.requests, self.clock()
        while self._next < len(requests) and requests[self._next].at_s <= now:
            index, request = self._next, requests[self._next]
            self._next += 1
            if request.prompt_tokens + max(1, request.output_tokens) > self._sizes.max_model_len:
                self.counts.left_out.add(index)
                continue
            if request.cancelled_at_s is not None and not request.output_tokens:
                self._cancels[index] = request.cancelled_at_s
            seq = self._live[index] = Played(index, self._traffic)
            self.scheduler.submit(seq)
        for index in [index for index, at_s in self._cancels.items() if at_s <= now]:
            self._end(self._live[index])

    def _step(self) -> None:
        plan = self.scheduler.plan()
        if plan is None:
            assert self.tier is not None, "there is work, and no plan"
            self.clock.advance_to(self._due_s())  # every request waits for the store
            return
        self.scheduler.commit(plan)
        if plan.admissions:
            self._note_began(plan)
        work = work_of(plan)
        self._count(plan, work)
        if self.tier is not None:
            self.tier.finished(plan)
        self.scheduler.advance(plan, np.where(plan.samples, 1, PAD).astype(np.int32))
        ended = self._settle(plan)
        if self._jump and not ended and _still(plan, len(self.scheduler.running)):
            self._leap(plan, work)
        if plan.step % _LOOK_EVERY == 0:
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        rows = self.scheduler.rows
        begun = -(-rows.computed // PAGE_TOKENS)
        ahead = int(np.maximum(rows.pages_held - begun, 0).sum())
        self._mean_bytes.add(
            bytes_by_use(self.memory.usage(), self.memory.plan, ahead, self.clock() - self._mean_bytes.seconds)
        )

    def _count(self, plan: StepPlan, work: Work) -> None:
        seconds = self._cost.step_s(work) + self._cost.moved_s(plan.arena_work.moved_bytes(self.memory.plan))
        if self.tier is not None:
            seconds += plan.arena_work.transferred_bytes(self.memory.plan) / LINK_BYTES_S
            self.tier.prices.stepped(work, seconds)
        self.clock.advance(seconds)
        counts = self.counts
        counts.steps += 1
        counts.busy_s += seconds
        counts.computed_tokens += plan.token_count
        counts.taps += len(plan.taps)
        counts.running_max = max(counts.running_max, len(self.scheduler.running))

    def _note_began(self, plan: StepPlan) -> None:
        times, now = self._times, self.clock()
        for run, admission in enumerate(plan.admissions, start=plan.run_count - len(plan.admissions)):
            index = admission.seq
            if np.isnan(times.began[index]):
                times.began[index] = now
                times.cached[index] = cached = int(plan.starts[run])
                self.counts.saved_s += self._cost.prefill_s(0, cached)

    def _settle(self, plan: StepPlan) -> bool:
        """Settle the tokens of a step; return whether a sequence ended."""
        live, before = self._live, self.counts.ended
        times, now_s = self._times, self.clock()
        for seq_id in plan.seqs[: plan.decode_count]:
            seq = live[seq_id]
            seq.answered += 1
            times.gaps.add(now_s - times.last[seq.index])
            times.last[seq.index] = now_s
            if seq.answered >= seq.target:
                self._end(seq)
        for run in range(plan.decode_count, plan.run_count):
            seq = live[plan.seqs[run]]
            done = int(plan.starts[run] + plan.lengths[run])
            if seq.prompt_logprobs_due and done >= seq.prompt.size:
                seq.prompt_logprobs_due = False
            if plan.samples[run]:
                seq.answered += 1
                if seq.answered == 1:
                    times.first[seq.index] = now_s
                else:
                    times.gaps.add(now_s - times.last[seq.index])
                times.last[seq.index] = now_s
                if seq.answered >= seq.target:
                    self._end(seq)
            elif not seq.samples and done == seq.known_count:
                self._end(seq)
        return self.counts.ended > before

    def _end(self, seq: Played) -> None:
        assert seq.state is not SeqState.FINISHED
        self.scheduler.finish(seq)
        self._times.ended[seq.index] = self.clock()
        self._cancels.pop(seq.index, None)
        del self._live[seq.index]
        self.counts.ended += 1
        if self._on_progress is not None and self.counts.ended % _REPORT_EVERY == 0:
            self._on_progress(self.counts.ended, len(self._traffic))

    # ------------------------------------------------------------------ jumps

    def _leap(self, plan: StepPlan, work: Work) -> None:
        """Do the following steps that differ from this one only in positions."""
        rows, table = plan.rows, self.scheduler.rows
        seqs = [self._live[seq_id] for seq_id in plan.seqs]
        computed = table.computed[rows]
        # Only at multiples of these does a page begin, or an answer pass a position where its state is kept.
        most = min(
            int((table.capacity[rows] - computed).min()),
            int((-computed % CHUNK_TOKENS).min()),
            min(seq.target - seq.answered for seq in seqs) - 1,
        )
        due_s = self._due_s()
        counts, steps = self.counts, 0
        while steps < most and self.clock() < due_s:
            steps += 1
            seconds = self._cost.step_s(work._replace(context=work.context + steps * work.decodes))
            self.clock.advance(seconds)
            counts.busy_s += seconds
            self._times.gaps.add(seconds, len(seqs))
        if steps:
            self.scheduler.leap(plan, steps)
            for seq in seqs:
                seq.answered += steps
                self._times.last[seq.index] = self.clock()
            counts.steps += steps
            counts.computed_tokens += steps * len(seqs)

    def _due_s(self) -> float:
        """Return the time of the next event outside of the engine."""
        requests = self._traffic.requests
        arrival = requests[self._next].at_s if self._next < len(requests) else inf
        return min([arrival, self._store_due_s(), *self._cancels.values()])

    # ------------------------------------------------------------------ the sum

    def _report(self) -> Report:
        counts, traffic = self.counts, self._traffic
        if self._on_progress is not None:
            self._on_progress(len(traffic), len(traffic))
        usage = self.memory.usage()
        return Report(
            **self._times.timeline().served(traffic),
            arm=self._arm.name,
            memory_bytes=self._sizes.memory_bytes,
            refused=len(counts.left_out),
            saved_s=counts.saved_s,
            computed_tokens=counts.computed_tokens,
            recomputed_tokens=self.scheduler.recomputed_tokens,
            running_max=counts.running_max,
            preemptions=self.scheduler.preemption_count,
            steps=counts.steps,
            virtual_s=self.clock(),
            busy_s=counts.busy_s,
            states_saved=counts.taps,
            pages_held_max=usage.pages_held_max,
            slots_held_max=usage.slots_held_max,
            mean_bytes=self._mean_bytes,
            cache=usage.cache,
            store=None
            if self._store_model is None or self.tier is None or self._disk is None
            else report_of(self._store_model, self.tier, self._disk),
        )


def _still(plan: StepPlan, running: int) -> bool:
    """Return whether the next plan differs from this one only by one position, unless a page, an end or an arrival
    comes between."""
    if plan.decode_count != running or plan.run_count != running or not running:
        return False
    return not (plan.reclaiming or plan.finished or plan.preempted or plan.store or plan.arena_work.stores) and (
        replace(plan.reservation, version=0) == _NO_CHANGE
    )
