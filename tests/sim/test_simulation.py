"""The whole engine in virtual time. Laws are checked after each step inside ``Simulation``; what is here are
the runs, that they exercise what they are for, and that a broken engine does not pass."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.sim.failing import assert_fails
from tests.support.simulator import Outcome, Simulation
from tests.support.workload import Arrival, Scenario, scenario_from_seed, small_arena
from weft.engine.engine import EngineCore
from weft.memory.transaction import Transaction
from weft.request import Pooling, Request, SamplingParams
from weft.schedule import scheduler as scheduler_module
from weft.schedule.plan import StepPlan, Tap
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import Sequence
from weft.units import SeqId, SlotId

SMALL_SEEDS = range(40)


def run(scenario: Scenario) -> Outcome:
    return Simulation(scenario).run()


@pytest.fixture(scope="module")
def small_runs() -> dict[int, Outcome]:
    return {seed: run(scenario_from_seed(seed)) for seed in SMALL_SEEDS}


def test_the_laws_hold_in_many_small_runs(small_runs: dict[int, Outcome]) -> None:
    total = Counter[str]()
    for outcome in small_runs.values():
        total.update(outcome.ended)
    # Each way to end, pressure and full queues really happened, or these runs show nothing.
    assert set(total) == {"stop", "length", "cancelled", "error"}
    assert min(total.values()) > 10
    assert sum(outcome.preemptions for outcome in small_runs.values()) > 60
    assert sum(outcome.refused for outcome in small_runs.values()) > 30
    assert max(outcome.running_max for outcome in small_runs.values()) >= 8


@pytest.mark.parametrize("seed", [1_000_013, 1_000_029])
def test_hundreds_of_requests_in_tiny_memory_all_end(seed: int) -> None:
    outcome = run(scenario_from_seed(seed, requests=250, long=False))
    assert outcome.ended["length"] + outcome.ended["stop"] > 300
    assert outcome.ended["cancelled"] >= 10
    assert outcome.preemptions > 20


def test_a_sequence_preempted_inside_its_prefill_loses_nothing() -> None:
    outcomes = [run(scenario_from_seed(seed, long=True)) for seed in range(8)]
    assert sum(outcome.preemptions_in_prefill for outcome in outcomes) >= 4


@pytest.mark.parametrize("seed", [4, 17, 23])
def test_the_same_seed_gives_the_same_trace(seed: int, small_runs: dict[int, Outcome]) -> None:
    assert run(scenario_from_seed(seed)) == small_runs[seed]


def test_different_seeds_give_different_traces(small_runs: dict[int, Outcome]) -> None:
    assert len({outcome.trace_hash for outcome in small_runs.values()}) == len(small_runs)


def everyone_fills_the_pool(*, pages_per_frame: int, slots_per_frame: int, frame_count: int) -> Scenario:
    """Rows for eight, memory for one: each of twelve sequences grows until it holds every page."""
    arena = small_arena(pages_per_frame=pages_per_frame, slots_per_frame=slots_per_frame, frame_count=frame_count)
    length = (frame_count - (slots_per_frame > 0)) * pages_per_frame * 16
    sampling = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=length - 10)
    arrivals = tuple(
        Arrival(
            0.0, Request(request_id=f"r{number}", prompt_tokens=[number] * 10, priority=number % 3, sampling=sampling)
        )
        for number in range(12)
    )
    base = scenario_from_seed(0)
    sizes = type(base.sizes)(
        max_model_len=length, rows_max=8, step_tokens_max=128, queue_max=20, memory_bytes=arena.arena_bytes
    )
    return Scenario(seed=1, arena=arena, sizes=sizes, arrivals=arrivals, cancels=())


@pytest.mark.parametrize(("pages", "slots", "frames"), [(1, 0, 6), (1, 1, 7), (3, 2, 4), (5, 1, 2), (2, 3, 5)])
def test_where_only_one_sequence_fits_every_sequence_gets_to_its_end(pages: int, slots: int, frames: int) -> None:
    outcome = run(everyone_fills_the_pool(pages_per_frame=pages, slots_per_frame=slots, frame_count=frames))
    assert outcome.ended == {"length": 12}
    # Where the frames allow two sequences to start, they get in each other's way.
    assert outcome.preemptions > 0 or outcome.running_max == 1


# ---------------------------------------------------------------------- negative controls: broken engines


def run_all() -> None:
    for seed in SMALL_SEEDS:
        run(scenario_from_seed(seed))


def test_an_engine_that_preempts_nobody_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "victim_count", lambda pages, short, freed: 0)
    assert_fails("nothing can run|idles for two steps", run_all)


def test_an_engine_that_preempts_the_best_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "victim_count", lambda pages, short, freed: len(pages))
    assert_fails("the best sequence", run_all)


def test_an_engine_that_ends_a_sequence_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EngineCore.cancel

    def cancel_twice(self: EngineCore, request_id: str, index: int | None = None) -> bool:
        outbox = self.streams.outbox
        before = len(outbox)
        cancelled = plain(self, request_id, index)
        outbox += outbox[before:]
        return cancelled

    monkeypatch.setattr(EngineCore, "cancel", cancel_twice)
    assert_fails(r"after its end \(cancelled\)", run_all)


def test_an_engine_that_forgets_a_preempted_sequence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler._commit_preempted

    def forget(self: Scheduler, preempted: tuple[SeqId, ...]) -> None:
        plain(self, preempted)
        self.waiting.remove(next(seq for seq in self.waiting if seq.id == preempted[0]))

    monkeypatch.setattr(Scheduler, "_commit_preempted", forget)
    assert_fails("sequences without a place in the scheduler", run_all)


def test_an_engine_that_loses_tokens_on_preemption_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler._commit_preempted

    def lose(self: Scheduler, preempted: tuple[SeqId, ...]) -> None:
        plain(self, preempted)
        for seq in self.waiting:
            if seq.id == preempted[0] and seq.generated:
                seq.generated.pop()

    monkeypatch.setattr(Scheduler, "_commit_preempted", lose)
    assert_fails("differ from the reference", run_all)


def test_an_engine_with_work_that_never_runs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transaction, "open", lambda self, *asked, **more: False)
    assert_fails("nothing can run", run_all)


def test_a_plan_that_depends_on_how_often_it_is_asked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler.plan
    calls = [0]

    def impure(self: Scheduler, **more: Any) -> StepPlan | None:
        plan = plain(self, **more)
        calls[0] += 1
        return None if plan is None else replace(plan, taps=(Tap(0, calls[0], SlotId(0)),))

    monkeypatch.setattr(Scheduler, "plan", impure)
    assert_fails("planning twice changed the plan", run_all)


def test_an_engine_that_goes_on_with_what_was_cancelled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def say_so_only(self: EngineCore, request_id: str, index: int | None = None) -> bool:
        live = self.streams.of_request(request_id)
        self.streams.outbox += [stream.event([], finish_reason="cancelled") for stream in live]
        return bool(live)

    monkeypatch.setattr(EngineCore, "cancel", say_so_only)
    assert_fails(r"after its end \(cancelled\)", run_all)


def test_memory_that_is_not_given_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transaction, "close", lambda self, seq, keep=None: None)
    assert_fails("nothing can run", run_all)


def test_a_hit_over_rows_that_a_mean_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of pooled prompts, which are in the scenarios of all seeds."""
    mean = Pooling(kind="mean")
    arrivals = tuple(
        Arrival(
            at,
            Request(
                request_id=f"r{at}", prompt_tokens=list(range(90)), pooling=mean, sampling=SamplingParams(max_tokens=0)
            ),
        )
        for at in range(2)
    )
    scenario = replace(scenario_from_seed(1, long=False), cache=True, cancels=(), fail_in_step=None)
    room = small_arena(pages_per_frame=4, slots_per_frame=2, frame_count=20)
    scenario = replace(
        scenario,
        arena=room,
        arrivals=arrivals,
        sizes=replace(scenario.sizes, max_model_len=256, rows_max=4, queue_max=4),
    )
    Simulation(scenario).run()
    monkeypatch.setattr(Sequence, "reusable", lambda seq, known: known)
    assert_fails("pooled from other rows", Simulation(scenario).run)
