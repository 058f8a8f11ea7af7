"""The whole engine in virtual time: the real EngineCore, scheduler and memory over the scripted executor.

    scenario --> [ submit / cancel when due ]  -->  core.step()  -->  ledger, progress, audit, trace
                          ^                             |
                          '------ clock moves by the cost of the step

Inside a step, the executor first checks the plan (``ScriptedExecutor``), then time passes. Then requests
arrive and are cancelled while the step is "in flight", as they do when the server's messages are read there.
Where steps overlap all of this happens when the result is asked for, with the next step begun. Before some
steps the plan is made once more and dropped: planning must change nothing.

``Simulation(scenario).run()`` raises ``SimulationFailed`` with the seed and the last plans, or returns what
happened as an ``Outcome``; the same scenario always gives the same ``trace_hash``.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from tests.support.checkers import InFlight, Ledger, ProgressCheck
from tests.support.scripted import ScriptedExecutor
from tests.support.trace import Trace, plan_bytes
from tests.support.workload import EOS_IDS, VOCAB_SIZE, Scenario, ScriptedCancel
from weft.costs.restore import RestorePrices
from weft.engine.engine import EngineCore
from weft.engine.stats import Part
from weft.errors import EngineUnavailableError, QueueFullError
from weft.memory.memory import Memory
from weft.memory.prefix_store import Store, TransferBuffers
from weft.schedule.budget import step_tokens_bound
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.snapshots import parse_snapshots
from weft.schedule.store_tier import StoreTier
from weft.speculation.drafter import Drafter
from weft_tools.sim.replay import VirtualClock

STEP_BASE_S = 1e-3
STEP_TOKEN_S = 2e-5
_REPLAN_EVERY_STEPS = 5
_WAITS_MAX = 500
"""Looks at a store that every request waits for, for each request."""
_WRITE_S = 60.0


class DeviceLost(Exception):
    """The fault that scenarios inject."""


class SimulationFailed(AssertionError):
    """A law was broken; the message has the seed and the last steps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    trace_hash: str
    steps: int
    ended: dict[str, int]
    refused: int
    preemptions: int
    preemptions_in_prefill: int
    """Preemptions of sequences without a generated token."""
    recomputed_tokens: int
    computed_tokens: int
    running_max: int
    virtual_s: float
    cached_tokens: int = 0
    hits: int = 0
    evicted_states: int = 0
    evicted_pages: int = 0
    taps: int = 0
    resumed: int = 0
    """Preempted sequences that found cached tokens when they came back."""
    page_copies: int = 0
    table_patches: int = 0
    restores: int = 0
    written: int = 0
    """Snapshots that the store got."""
    prefix_waits: int = 0
    """Steps in which a request waited for a prefix in flight."""


class _InFlightExecutor:
    """The scripted executor, with time that passes and messages that arrive while it works."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._inner = simulation.device
        self._begun: deque[StepPlan] = deque()

    def execute(self, plan: StepPlan) -> StepResult:
        self._simulation.executing(plan)
        self._simulation.fail_when_due(plan)
        result = self._inner.execute(plan)
        self._simulation.in_flight(plan)
        return result

    def begin(self, plan: StepPlan) -> None:
        self._simulation.executing(plan)
        self._simulation.flights.begun(plan)
        self._inner.begin(plan)
        self._begun.append(plan)

    def finish(self) -> StepResult:
        plan = self._begun.popleft()
        self._simulation.fail_when_due(plan)
        result = self._inner.finish()
        self._simulation.in_flight(plan)
        self._simulation.flights.finished(plan)
        return result

    def transfers_done(self, step: int) -> bool:
        return self._inner.transfers_done(step)

    def sleep(self, level: int) -> tuple[Part, ...]:
        return self._inner.sleep(level)

    def wake(self, part: Part) -> None:
        self._inner.wake(part)

    def close(self) -> None:
        self._inner.close()


class Simulation:
    """The simulation of one scenario. ``drafter``: the source of drafts for verify runs; None: no speculation.
    ``store``: prefixes beyond memory, through buffers of ``buffer_bytes``. ``pins_share``: share of the arena for
    prefixes with names.
    """

    def __init__(
        self,
        scenario: Scenario,
        drafter: Drafter | None = None,
        store: Store | None = None,
        *,
        buffer_bytes: int = 1 << 22,
        pins_share: float = 0.0,
    ) -> None:
        self.scenario = scenario
        sizes = scenario.sizes
        self.clock = VirtualClock()
        self.trace = Trace()
        self.device = ScriptedExecutor(
            scenario.arena,
            vocab_size=VOCAB_SIZE,
            rows_max=sizes.rows_max,
            max_model_len=sizes.max_model_len,
            step_tokens_bound=step_tokens_bound(sizes.step_tokens_max, sizes.rows_max),
            grid_tokens=sizes.grid_tokens,
        )
        memory = Memory(scenario.arena, cache=scenario.cache, pins_share=pins_share)
        self.tier = None if store is None else self._tier(store, memory, buffer_bytes)
        self.core = EngineCore(
            vocab_size=VOCAB_SIZE,
            sizes=sizes,
            memory=memory,
            executor=_InFlightExecutor(self),
            clock=self.clock,
            seed=scenario.seed,
            eos_ids=EOS_IDS,
            snapshots=parse_snapshots(scenario.snapshots),
            overlap=scenario.overlap,
            drafter=drafter,
            max_step_s=scenario.max_step_s,
            store=self.tier,
            pause=self.clock.advance,
        )
        self.ledger = Ledger(
            engine_seed=scenario.seed,
            eos_ids=EOS_IDS,
            max_model_len=sizes.max_model_len,
            next_token=self.device.next_token,
        )
        self.progress = ProgressCheck(self.core.scheduler)
        self.flights = InFlight(self.core.memory)
        self._arrivals = list(reversed(scenario.arrivals))
        self._cancels = list(reversed([one for one in scenario.cancels if one.in_step is None]))
        self._cancels_in_step: dict[int, list[ScriptedCancel]] = {}
        for cancel in scenario.cancels:
            if cancel.in_step is not None:
                self._cancels_in_step.setdefault(cancel.in_step, []).append(cancel)
        self._replans = False
        self._planned: bytes | None = None
        self._plan = self.core.scheduler.plan
        self.core.scheduler.plan = self._plan_twice  # type: ignore[method-assign]
        self._refused = 0
        self._running_max = 0
        self._preemptions_in_prefill = 0
        self._seen = Counter[str]()

    def _tier(self, store: Store, memory: Memory, buffer_bytes: int) -> StoreTier:
        arena = self.scenario.arena
        buffers = TransferBuffers(arena.page_bytes, arena.slot_bytes, limit_bytes=buffer_bytes)
        self.device.arena.transfers.buffers = buffers
        return StoreTier(store, memory, buffers, RestorePrices(1.0), self.clock, exact=True)

    def run(self) -> Outcome:
        """Run the scenario. Raise SimulationFailed."""
        try:
            self._run()
        except AssertionError as error:
            raise SimulationFailed(f"seed {self.scenario.seed}: {error}\n{self.trace.tail()}") from error
        stats = self.core.stats()
        return Outcome(
            trace_hash=self.trace.digest,
            steps=stats.steps,
            ended=self.ledger.ended(),
            refused=self._refused,
            preemptions=stats.preemptions,
            preemptions_in_prefill=self._preemptions_in_prefill,
            recomputed_tokens=stats.recomputed_tokens,
            computed_tokens=stats.computed_tokens,
            running_max=self._running_max,
            virtual_s=self.clock(),
            cached_tokens=stats.cached_tokens,
            hits=stats.memory.cache.hits,
            evicted_states=stats.memory.cache.evicted_states,
            evicted_pages=stats.memory.cache.evicted_pages,
            taps=self._seen["taps"],
            resumed=self._seen["resumed"],
            page_copies=self._seen["page copies"],
            table_patches=self._seen["patches"],
            prefix_waits=self._seen["prefix waits"],
            restores=stats.store.restores.restores if stats.store is not None else 0,
            written=stats.store.writes.written if stats.store is not None else 0,
        )

    def _run(self) -> None:
        steps = waits = 0
        while self._arrivals or self.core.has_work:
            if not self.core.has_work:
                self.clock.advance_to(self._arrivals[-1].at_s)
            self._deliver_due()
            plans = self._seen["plans"]
            self._step(steps)
            waits += self.tier is not None and plans == self._seen["plans"]
            steps += 1
            assert waits <= _WAITS_MAX * len(self.scenario.arrivals), f"no end after {waits} waits"
            bound = self.ledger.steps_bound + len(self.scenario.arrivals)
            assert steps - waits <= bound, f"no end after {steps - waits} steps"
        self.ledger.check_all_ended()
        if self.core.failure is None:
            self._check_everything_was_given_back()

    def _step(self, number: int) -> None:
        self.progress.before_plan()
        self._replans = number % _REPLAN_EVERY_STEPS == 0
        events = self.core.step()
        self._planned = None
        failure = self.core.failure
        if failure is not None and not isinstance(failure, DeviceLost):
            raise AssertionError(f"the engine failed: {failure!r}") from failure
        for event in events:
            self.ledger.event(event)
        self.trace.events(events, self.clock())
        if failure is None:
            self.core.audit()
        else:
            assert not self.core.has_work, "a failed engine has work"

    def _plan_twice(self, *, verifies: bool = True) -> StepPlan | None:
        """Return the plan of the loop, where the loop asks for it. In some steps another one was made just before."""
        if self._replans:
            dropped = self._plan(verifies=verifies)
            self._planned = None if dropped is None else plan_bytes(dropped)
        plan = self._plan(verifies=verifies)
        assert not self._replans or (plan is None) == (self._planned is None), "planning twice changed the plan"
        return plan

    def executing(self, plan: StepPlan) -> None:
        """Check the committed ``plan``, which the engine passes to the executor; with overlap, when the step begins."""
        encoded = self.trace.plan(plan)
        assert self._planned is None or self._planned == encoded, "planning twice changed the plan"
        self.progress.executing(plan)
        self._running_max = max(self._running_max, len(self.core.scheduler.running))
        if plan.preempted:
            self._preemptions_in_prefill += sum(
                seq.id in plan.preempted and not seq.generated for seq in self.core.scheduler.waiting
            )
        self._count(plan)

    def fail_when_due(self, plan: StepPlan) -> None:
        """Raise the fault if it is due in this step."""
        if plan.step == self.scenario.fail_in_step:
            raise DeviceLost("the device fell off the bus")

    def _count(self, plan: StepPlan) -> None:
        seen = self._seen
        seen["plans"] += 1
        seen["taps"] += len(plan.taps)
        seen["page copies"] += len(plan.arena_work.page_copies)
        seen["patches"] += plan.table_patches.shape[1]
        first_run = plan.run_count - len(plan.admissions)
        for run, admission in enumerate(plan.admissions, start=first_run):
            again = admission.tokens.size > admission.prompt_tokens
            seen["resumed"] += again and int(plan.starts[run]) > 0
        if plan.admissions:
            first = plan.admissions[0].seq
            seen["prefix waits"] += any(seq.id < first for seq in self.core.scheduler.waiting)

    def in_flight(self, plan: StepPlan) -> None:
        """Let time pass and messages arrive after the step is computed, before its result is returned."""
        self.clock.advance(STEP_BASE_S + STEP_TOKEN_S * plan.token_count)
        self._deliver_due()
        for cancel in self._cancels_in_step.pop(plan.step, []):
            self._cancel(cancel)
        flush_every = self.scenario.flush_every_steps
        if flush_every and plan.step % flush_every == 0:
            self.core.flush_cache()

    def _deliver_due(self) -> None:
        now = self.clock()
        while self._arrivals and self._arrivals[-1].at_s <= now:
            self._submit()
        while self._cancels and self._cancels[-1].at_s <= now:
            self._cancel(self._cancels.pop())

    def _submit(self) -> None:
        request = self._arrivals.pop().request
        waiting = len(self.core.scheduler.waiting)
        queue_max, own = self.scenario.sizes.queue_max, self.core.scheduler.waiting.count(request.key)
        full = waiting + request.sampling.n > queue_max
        full = full or (request.key != "" and own > 0 and own + request.sampling.n > queue_max // 2)
        try:
            self.core.submit(request)
        except QueueFullError:
            assert full, "a request was turned away and the queue had room"
            self._refused += 1
        except EngineUnavailableError:
            assert self.core.failure is not None, "a live engine was unavailable"
            self._refused += 1
        else:
            assert not full, "the queue is not bounded"
            self.ledger.accepted(request)

    def _cancel(self, cancel: ScriptedCancel) -> None:
        cancelled = self.core.cancel(cancel.request_id, cancel.index)
        self.trace.note(f"cancel {cancel.request_id}[{cancel.index}] {cancelled}")

    def _check_everything_was_given_back(self) -> None:
        if self.tier is not None:
            self.core.write_all(_WRITE_S)
            assert not self.tier.restores.fetches, "a fetch has no request"
            assert self.tier.buffers.used_bytes == 0, "transfer buffers were left over"
        usage = self.core.memory.usage()
        assert usage.leases == 0
        assert (usage.pages_held, usage.slots_held) == (usage.pages_cached, usage.slots_cached), (
            f"memory is held and neither leased nor cached: {usage}"
        )
        self.core.memory.flush()
        self.core.audit()
        usage = self.core.memory.usage()
        assert usage.leases == usage.pages_held == usage.slots_held == 0, f"memory was left over: {usage}"
        assert usage.frames_free == usage.frame_count, "frames were left over"
        assert self.core.scheduler.rows._row_of == {}
