"""Checkers of the rules that every run must keep, applied from outside while it runs.

    Ledger         every index of every accepted request: events in order, exactly one end and it is the last,
                   the tokens of the pure reference (all of them, or a prefix when cancelled), logprobs,
                   prompt logprobs and queue time once
    ProgressCheck  the best ranked sequence computes at least every second step and is never preempted; a
                   step without runs is followed by one with runs; the whole run ends in bounded steps (a step
                   in which the cache gives up or takes over something does not count, nor does one that
                   loads or stores)
    InFlight       where steps overlap: no page and no slot that a run in flight reads or writes, or that
                   something is copied to, is handed out, and no frame with one of them is zeroed

``EngineCore.audit`` recounts memory, rows and queues after each step, and ``ScriptedExecutor`` checks the reads of
kernels. A checker raises AssertionError; the simulator adds the seed and the last lines of the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.support.digests import digest, digest_of
from tests.support.scripted import NextToken, reference_tokens, scripted_logprobs
from tests.support.scripted_pooling import expected_pooled
from weft.memory.arena_work import ArenaWork
from weft.memory.memory import Memory
from weft.request import FinishReason, Request, TokenEvent, TokenLogprobs, split_seed
from weft.schedule.plan import StepPlan
from weft.schedule.scheduler import Scheduler
from weft.units import CHUNK_TOKENS, PAD, SeqId, SlotId


@dataclass(slots=True)
class _Account:
    expected: list[int]
    expected_reason: FinishReason
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: bytes | None = None
    event_count: int = 0
    reason: FinishReason | None = None


class Ledger:
    """``engine_seed``, ``eos_ids`` and ``max_model_len`` as the engine has them: answers are predicted."""

    def __init__(
        self, *, engine_seed: int, eos_ids: tuple[int, ...], max_model_len: int, next_token: NextToken
    ) -> None:
        self._engine_seed = engine_seed
        self._eos_ids = eos_ids
        self._max_model_len = max_model_len
        self._next_token = next_token
        self._accounts: dict[tuple[str, int], _Account] = {}
        self._accepted = 0
        self.steps_bound = 100
        """Return a number of steps that suffices for all accepted requests: each sequence is the best once, and then
        runs at least every second step. It may lose its memory a few times to sequences with better rank."""

    def accepted(self, request: Request) -> None:
        sampling = request.sampling
        seed = split_seed(self._engine_seed, self._accepted) if sampling.seed is None else sampling.seed
        self._accepted += 1
        for index in range(sampling.n):
            tokens, reason = reference_tokens(
                request.prompt_tokens,
                sampling,
                seed=split_seed(seed, index),
                eos_ids=self._eos_ids,
                max_model_len=self._max_model_len,
                next_token=self._next_token,
            )
            self._accounts[request.request_id, index] = _Account(tokens, reason, request)
            self.steps_bound += 8 * (len(request.prompt_tokens) // CHUNK_TOKENS + len(tokens) + 4)

    def event(self, event: TokenEvent) -> None:
        name = f"{event.request_id}[{event.index}]"
        account = self._accounts.get((event.request_id, event.index))
        assert account is not None, f"an event for {name}, which was never accepted"
        assert account.reason is None, f"an event for {name} after its end ({account.reason})"
        account.event_count += 1
        account.tokens += event.tokens
        account.logprobs += event.logprobs or []
        if event.prompt_logprobs is not None:
            assert account.prompt_logprobs is None, f"{name}: prompt logprobs came twice"
            assert account.event_count == 1, f"{name}: prompt logprobs came late"
            account.prompt_logprobs = event.prompt_logprobs
        ran = bool(event.tokens) or event.finish_reason in ("stop", "length")
        if account.event_count > 1:
            assert event.queued_s is None, f"{name}: the queue time came twice"
        elif ran:
            assert event.queued_s is not None, f"{name}: no queue time on its first event"
            assert event.queued_s >= 0
        assert event.cached_tokens < len(account.request.prompt_tokens), f"{name}: all of it was cached"
        account.reason = event.finish_reason
        account.pooled = event.pooled
        count = len(account.tokens)
        assert account.tokens == account.expected[:count], f"{name}: tokens differ from the reference"
        if event.finish_reason is not None:
            self._check_end(name, account)

    def _check_end(self, name: str, account: _Account) -> None:
        sampling = account.request.sampling
        if account.reason in ("stop", "length"):
            assert account.reason == account.expected_reason, f"{name}: ended by {account.reason}"
            assert len(account.tokens) == len(account.expected), f"{name}: ended early"
            if sampling.prompt_logprobs is not None:
                assert account.prompt_logprobs == expected_prompt_logprobs(account.request), name
            pooling = account.request.pooling
            expected = None if pooling is None else expected_pooled(account.request.prompt_tokens, pooling)
            assert account.pooled == expected, f"{name}: pooled from other rows"
        wanted = len(account.tokens) if sampling.logprobs is not None else 0
        assert [one.token for one in account.logprobs] == account.tokens[:wanted], f"{name}: logprobs"

    def check_all_ended(self) -> None:
        open_ends = [key for key, account in self._accounts.items() if account.reason is None]
        assert not open_ends, f"never ended: {open_ends[:10]}"

    def ended(self) -> dict[str, int]:
        """Return the number of sequences by finish reason."""
        reasons = [account.reason or "open" for account in self._accounts.values()]
        return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def expected_prompt_logprobs(request: Request) -> list[TokenLogprobs | None]:
    """Return the logprobs that the scripted executor invents for a prompt, computed in one piece."""
    top = request.sampling.prompt_logprobs
    assert top is not None
    expected: list[TokenLogprobs | None] = [None]
    state = digest_of(request.prompt_tokens[:1])
    for token in request.prompt_tokens[1:]:
        expected.append(scripted_logprobs(token, state, top))
        state = digest(state, token)
    return expected


class ProgressCheck:
    """A checker that looks at each committed plan when it is executed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._best_before: SeqId | None = None
        self._idle_best: SeqId | None = None
        self._was_empty = False

    def before_plan(self) -> None:
        self._best_before = next((seq.id for seq in self._scheduler.running), None)

    def executing(self, plan: StepPlan) -> None:
        assert self._best_before not in plan.preempted, f"the best sequence {self._best_before} was preempted"
        best = next((seq.id for seq in self._scheduler.running), None)
        idle = best is not None and best not in plan.seqs
        # A shortage ends in several steps: one that evicts, compresses or moves comes closer to its end.
        reservation = plan.reservation
        work = plan.arena_work
        moved = bool(
            reservation.evicted
            or reservation.published
            or reservation.moves
            or work.state_compressions
            or work.kv_compressions
            or plan.store
            or work.stores
        )
        again = idle and self._idle_best == best
        assert moved or not again, f"the best sequence {best} idles for two steps"
        self._idle_best = best if idle and not moved else None
        empty = plan.run_count == 0
        if empty:
            assert plan.rows_cleared or moved, "a step that does nothing at all"
            assert moved or not self._was_empty or not self._scheduler.running, "two steps without a run"
        self._was_empty = empty and not moved


@dataclass(frozen=True, slots=True)
class _Touched:
    step: int
    pages: frozenset[int]
    slots: frozenset[int]


class InFlight:
    """A checker of the steps in flight. Its methods are called after the commit of a plan, when the step begins, and
    when the result arrives.

    The source of a copy (a state that moves or is compressed, a snapshot) may have another owner in the next plan
    already: steps are computed in order, so the copy reads it before that plan writes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._flights: deque[_Touched] = deque()

    @property
    def any(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._flights)

    def begun(self, plan: StepPlan) -> None:
        arena, reservation = self._memory.plan, plan.reservation
        zeroed = plan.arena_work.zero_frames
        pages = {*reservation.pages, *_within(zeroed, arena.pages_per_frame)}
        slots = {*reservation.slots, *_within(zeroed, arena.slots_per_frame)}
        for flight in self._flights:
            for kind, granted, touched in (("page", pages, flight.pages), ("slot", slots, flight.slots)):
                both = granted & touched
                assert not both, (
                    f"{kind} {min(both)} is handed out by step {plan.step} while step "
                    f"{flight.step} is in flight and uses it"
                )
        self._flights.append(self._touched(plan))

    def finished(self, plan: StepPlan) -> None:
        home = self._flights.popleft()
        assert home.step == plan.step, f"step {plan.step} is home before step {home.step}"

    def _touched(self, plan: StepPlan) -> _Touched:
        pages: set[int] = {page for seq in plan.seqs for page in self._memory.lease(seq).pages}
        pages |= plan.arena_work.pages_written()
        slots: set[int] = {*plan.slots.tolist(), *slots_written(plan.arena_work)}
        slots.update(tap.slot for tap in plan.taps)
        return _Touched(plan.step, frozenset(pages), frozenset(slots - {PAD}))


def slots_written(work: ArenaWork) -> set[SlotId]:
    """Return the slots that get contents before the runs; zeroed frames are not counted."""
    return {one.slot for one in work.state_restores}.union(
        (one.slot for one in work.state_loads), (one.dst for one in work.slot_copies)
    )


def _within(frames: Iterable[int], per_frame: int) -> Iterable[int]:
    for frame in frames:
        yield from range(frame * per_frame, (frame + 1) * per_frame)
