"""The simulator and the engine agree: what an engine did, recorded and replayed, is what the replay does.

The engine runs with a virtual clock that moves by the cost of each step; its requests go through the recorder
into a file, and from there into ``replay`` with the same costs. Then every request must have found the same
tokens in the cache, and every counter of the cache must be the same.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.scripted import ScriptedExecutor
from tests.support.sharing import sharing_scenario
from tests.support.workload import EOS_IDS, VOCAB_SIZE, Arrival, Scenario, ScriptedCancel
from weft.assemble import assemble
from weft.config import EngineConfig, Sizes
from weft.costs import fit
from weft.costs.step import StepCost
from weft.engine.engine import EngineCore
from weft.engine.executor import Executor
from weft.errors import QueueFullError
from weft.memory.memory import Memory
from weft.memory.prefix.policies import make_policy
from weft.memory.prefix.policy import PrefillCost
from weft.memory.usage import CacheCounts
from weft.request import Request, SamplingParams
from weft.rpc.recorder import Recorder
from weft.schedule.budget import step_tokens_bound
from weft.schedule.plan import StepPlan, StepResult, work_of
from weft.schedule.snapshots import parse_snapshots
from weft_tools.sim.arms import Arm, find_arm, prefill_cost
from weft_tools.sim.recording import Recording, read_recording
from weft_tools.sim.replay import VirtualClock, replay
from weft_tools.sim.report import Report

COST = StepCost(fixed_s=1e-3, token_s=2e-5, pair_s=1e-9, decode_s=1e-5, context_s=1e-8)


class TimedExecutor:
    """Moves the clock by what the cost model says."""

    def __init__(self, inner: Executor, clock: VirtualClock) -> None:
        self._inner = inner
        self._clock = clock

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        self._clock.advance(COST.step_s(work_of(plan)))
        return result

    def close(self) -> None:
        self._inner.close()


@dataclass
class Ran:
    recording: Recording
    sizes: Sizes
    counts: CacheCounts
    preemptions: int
    steps: int
    policy: str = "lru"


def run_engine(
    core: EngineCore,
    clock: VirtualClock,
    file: Path,
    arrivals: tuple[Arrival, ...],
    cancels: tuple[ScriptedCancel, ...] = (),
    snapshots: str = "auto",
) -> Ran:
    """Everything through the engine, recorded into ``file``; arrivals come between steps, as in a server."""
    core.parts.executor = TimedExecutor(core.executor, clock)
    recorder = Recorder(file, core, model="m", snapshots=snapshots, limit_bytes=10**8, clock=clock)
    waiting, leaving = list(arrivals), [one for one in cancels if one.in_step is None]
    while waiting or core.has_work:
        if not core.has_work:
            clock.advance_to(waiting[0].at_s)
        while waiting and waiting[0].at_s <= clock():
            request = waiting.pop(0).request
            try:
                core.submit(request)
            except QueueFullError:
                continue
            recorder.accepted(request)
        while leaving and leaving[0].at_s <= clock():
            one = leaving.pop(0)
            recorder.cancelled(one.request_id, one.index)
            core.cancel(one.request_id, one.index)
        recorder.events(core.step())
    assert core.failure is None, core.failure
    recorder.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    stats = core.stats()
    return Ran(read_recording(lines), core.sizes, stats.memory.cache, stats.preemptions, stats.steps)


def replay_of(ran: Ran, *, jump: bool = True) -> Report:
    recording = ran.recording
    arm = Arm("recorded", parse_snapshots(recording.snapshots), find_arm(ran.policy).make_memory)
    sizes = replace(ran.sizes, queue_max=10**6)
    return replay(recording.traffic, recording.arena, COST, arm=arm, sizes=sizes, jump=jump)


def assert_agrees(ran: Ran, *, jump: bool = True) -> Report:
    report = replay_of(ran, jump=jump)
    assert tuple(report.timeline.cached_tokens.tolist()) == ran.recording.cached_tokens
    assert report.cache == ran.counts
    assert report.preemptions == ran.preemptions
    return report


def scripted(scenario: Scenario, clock: VirtualClock, policy: str) -> EngineCore:
    sizes = scenario.sizes
    device = ScriptedExecutor(
        scenario.arena,
        vocab_size=VOCAB_SIZE,
        rows_max=sizes.rows_max,
        max_model_len=sizes.max_model_len,
        step_tokens_bound=step_tokens_bound(sizes.step_tokens_max, sizes.rows_max),
        grid_tokens=sizes.grid_tokens,
    )
    memory = Memory(scenario.arena, cache=True, policy=make_policy(policy, scenario.arena, prefill_cost(COST), clock))
    return EngineCore(
        vocab_size=VOCAB_SIZE,
        sizes=sizes,
        memory=memory,
        executor=device,
        clock=clock,
        seed=scenario.seed,
        eos_ids=EOS_IDS,
        snapshots=parse_snapshots(scenario.snapshots),
    )


def run_scenario(seed: int, file: Path, policy: str = "lru") -> Ran:
    scenario = sharing_scenario(seed)
    clock = VirtualClock()
    ran = run_engine(
        scripted(scenario, clock, policy), clock, file, scenario.arrivals, scenario.cancels, scenario.snapshots
    )
    return replace(ran, policy=policy)


def test_recorded_runs_replay_to_the_same_hits_and_evictions(tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in (13, 17, 23, 29, 32, 63, 107):
        ran = run_scenario(seed, tmp_path / f"{seed}.jsonl")
        assert_agrees(ran)
        requests = ran.recording.traffic.requests
        seen.update(
            hits=ran.counts.hits,
            states=ran.counts.evicted_states,
            pages=ran.counts.evicted_pages,
            preemptions=ran.preemptions,
            inside_pages=sum(count % 16 > 0 for count in ran.recording.cached_tokens),
            cancelled=sum(one.cancelled_at_s is not None for one in requests),
            salted=sum(bool(one.salt) for one in requests),
            prompt_logprobs=sum(one.prompt_logprobs for one in requests),
        )
    assert min(seen.values()) > 5, f"little happened in them: {seen}"


@pytest.mark.parametrize("policy", ["value", "marconi"])
def test_a_policy_that_learns_from_time_learns_the_same_in_a_replay(policy: str, tmp_path: Path) -> None:
    """Steps are leapt over here, in which such a policy is not asked: that must not matter either."""
    by_recency = run_scenario(32, tmp_path / "lru.jsonl")
    ran = run_scenario(32, tmp_path / "r.jsonl", policy)
    assert_agrees(ran)
    assert ran.counts != by_recency.counts, "the policy made no difference"


def conversations(vocab_size: int) -> tuple[Arrival, ...]:
    """Three conversations of three turns over one system prompt, taken up in turn. Answers are not known
    here, so a turn goes on from the prompt before it. Two turns arrive together."""
    system = [7 + at % 50 for at in range(200)]
    prompts = {one: system + [(one * 31 + at * 7) % vocab_size for at in range(150)] for one in range(3)}
    arrivals = []
    for turn in range(3):
        for one in range(3):
            at_s = 0.4 * turn + 0.05 * (one // 2)
            request = Request(
                request_id=f"c{one}t{turn}",
                prompt_tokens=list(prompts[one]),
                sampling=SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
                boundaries=[200],
            )
            arrivals.append(Arrival(at_s, request))
            prompts[one] += [(one * 17 + turn * 5 + at * 3) % vocab_size for at in range(90)]
    return tuple(arrivals)


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_the_embedded_model_and_its_replay_have_the_same_hits_and_evictions(policy: str, tmp_path: Path) -> None:
    core = assemble(EngineConfig(memory="3MB", threads=1, cache_policy=policy)).core
    clock = VirtualClock()
    core.parts.clock = clock
    assert core.memory._state.cache.policy.name == policy
    # The engine's own has the clock of the machine: ages, and so choices, would depend on its speed.
    core.memory._state.cache.policy = make_policy(policy, core.memory.plan, prefill_cost(COST), clock)
    ran = run_engine(core, clock, tmp_path / "r.jsonl", conversations(core.vocab_size))
    ran = replace(ran, policy=policy)
    assert ran.counts.hits > 0
    assert ran.counts.evicted_pages + ran.counts.evicted_states > 0
    assert_agrees(ran)


def test_an_engine_learns_what_its_prompts_cost_from_its_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has the ratio of the sizes until it is told, and then that of the steps."""
    monkeypatch.setattr(fit, "FIT_EVERY", 4)
    monkeypatch.setattr(fit, "PAIRS_SHARE_MIN", 0.0)
    core = assemble(EngineConfig(memory="3MB", threads=1, cache_policy="value")).core
    told: list[PrefillCost] = []
    monkeypatch.setattr(core.memory._state.cache.policy, "costs", told.append, raising=False)
    clock = VirtualClock()
    core.parts.clock = clock
    run_engine(core, clock, tmp_path / "r.jsonl", conversations(core.vocab_size))
    assert told
    assert all(cost.linear == 1.0 for cost in told)


def test_a_turn_is_taken_up_inside_a_page_in_the_engine_and_in_the_replay(tmp_path: Path) -> None:
    """The state of a request's end is found by whoever goes on from that very token: fronts are what it
    takes."""
    ran = run_scenario(32, tmp_path / "r.jsonl")
    found = ran.recording.cached_tokens
    assert any(count % 16 for count in found), "nothing was taken up inside a page"
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("front", None)
    blunt = replace(ran, recording=read_recording(lines))
    assert tuple(replay_of(blunt).timeline.cached_tokens.tolist()) != found


def test_jumps_change_nothing(tmp_path: Path) -> None:
    ran = run_scenario(105, tmp_path / "r.jsonl")  # states are kept inside answers there
    by_steps = assert_agrees(ran, jump=False)
    assert assert_agrees(ran, jump=True).digest == by_steps.digest
    assert by_steps.steps == ran.steps


def test_another_memory_changes_the_replay(tmp_path: Path) -> None:
    """The control of all the others: what is compared does depend on what the engine did."""
    ran = run_scenario(32, tmp_path / "r.jsonl")
    more = replace(ran.recording.arena, frame_count=ran.recording.arena.frame_count * 3)
    assert replay_of(replace(ran, recording=replace(ran.recording, arena=more))).cache != ran.counts
