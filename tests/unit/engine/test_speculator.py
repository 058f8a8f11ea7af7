"""The drafter that serves, through the engine over the scripted device: answers, counts, the profile run."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.unit.engine.rig import VOCAB_SIZE, Rig
from weft.assemble import speculation
from weft.assemble.speculation import overlapped_step_s, profile_steps
from weft.config import EngineConfig
from weft.costs.rows import RowCosts
from weft.memory.memory import Memory
from weft.request import Request, SamplingParams
from weft.schedule.plan import StepPlan, StepResult
from weft.speculation.choice import BARREN_STEPS
from weft.speculation.profile_run import DRAFT_COUNTS, LONG_DRAFT_COUNTS
from weft.speculation.speculator import Speculator

FREE = {1: 1.0, 16: 1.0001, 1024: 1.001}


def repeating(rig: Rig) -> dict[tuple[str, int], list[int]]:
    """The same questions three times, one after the other."""
    for again in range(3):
        for number, length in enumerate((40, 70, 33)):
            rig.submit(f"r{number}-{again}", length, max_tokens=60, seed=number, ignore_eos=True)
        rig.run()
    return {name: answer.tokens for name, answer in rig.answers.items()}


@pytest.mark.parametrize("overlap", [False, True])
def test_questions_asked_again_are_drafted_from_the_tree_and_from_answers(overlap: bool) -> None:
    plain = Rig(cache=True)
    drafter = Speculator(costs=RowCosts(FREE))
    rig = Rig(cache=True, drafter=drafter, overlap=overlap)
    drafter._tree = rig.core.memory.prefix_tree
    assert repeating(rig) == repeating(plain)
    stats = rig.core.stats().speculation
    assert stats.sources["tree"].accepted + stats.sources["suffix"].accepted > 100
    assert len(rig.plans) < 0.8 * len(plain.plans)
    events = [answer.events[-1] for answer in rig.answers.values()]
    assert sum(event.accepted_drafts for event in events) == stats.accepted
    assert sum(event.rejected_drafts for event in events) == stats.drafted - stats.accepted
    rig.core.audit()


@pytest.mark.parametrize(
    ("step_s", "counts", "steps_most"),
    [(1 / 1024, DRAFT_COUNTS, 60), (1.0, LONG_DRAFT_COUNTS, len(LONG_DRAFT_COUNTS) + 2)],
)
def test_a_profile_run_measures_every_count_and_leaves_nothing(
    step_s: float, counts: tuple[int, ...], steps_most: int
) -> None:
    """A model with long steps is measured once for each of a few counts."""
    rig = Rig()
    memory = Memory(rig.core.memory.plan)
    measured = profile_steps(memory, rig, rig.sizes, VOCAB_SIZE, lambda: rig.clock() * step_s)
    assert measured.plain == {1: step_s}
    assert measured.verify_runs == {1 + count: step_s for count in counts if count}
    assert memory.usage().pages_held == memory.usage().slots_held == 0
    assert len(set(counts)) < len(rig.plans) <= steps_most
    rig.submit("after", 50, max_tokens=20)
    assert len(rig.run()["after", 0].tokens) > 0


class OverlappingDevice(Rig):
    """The host takes half a second to begin a step, and the device two seconds to compute it."""

    def begin(self, plan: StepPlan) -> None:
        self.clock.advance(0.5)
        super().begin(plan)
        self.ends_s = [*self.ends_s, max([self.clock(), *self.ends_s[-1:]]) + 2.0]

    ends_s: ClassVar[list[float]] = []

    def finish(self) -> StepResult:
        end_s, *self.ends_s = self.ends_s
        self.clock.advance(max(0.0, end_s - self.clock()))
        return self.device.execute(self._begun.popleft())

    def execute(self, plan: StepPlan) -> StepResult:
        self.begin(plan)
        return self.finish()


def test_a_plain_step_of_an_engine_that_overlaps_is_measured_with_its_host_hidden() -> None:
    rig = OverlappingDevice()
    memory = Memory(rig.core.memory.plan)
    alone = profile_steps(memory, rig, rig.sizes, VOCAB_SIZE, rig.clock)
    assert set(alone.plain.values()) | set(alone.verify_runs.values()) == {2.5}
    assert overlapped_step_s(memory, rig, rig.sizes, VOCAB_SIZE, rig.clock) == 2.0
    assert memory.usage().pages_held == memory.usage().slots_held == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_drafter_prices_a_plain_step_as_the_engine_computes_it(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = OverlappingDevice()
    monkeypatch.setattr(speculation.time, "perf_counter", rig.clock)
    for function in (speculation.profile_steps, speculation.overlapped_step_s):
        monkeypatch.setattr(speculation, function.__name__, partial(function, clock=rig.clock))
    loaded: Any = SimpleNamespace(
        model=SimpleNamespace(mtp=None), spec=SimpleNamespace(vocab_size=VOCAB_SIZE, layers=[0])
    )
    config = EngineConfig(speculate="auto")
    made = speculation.make_drafter(
        config, Memory(rig.core.memory.plan), rig, rig.sizes, loaded, lambda line: None, None, overlap
    )
    assert made is not None
    assert made.costs.seconds(1) == (2.0 if overlap else 2.5)


def test_a_drafter_that_sleeps_changes_no_token_and_a_prediction_wakes_it() -> None:
    """It sleeps for some steps in each dozen, and is then fed what it missed."""
    plain = Rig(cache=True)
    drafter = Speculator(("prediction", "tree", "suffix"), costs=RowCosts(FREE))
    rig = Rig(cache=True, drafter=drafter)
    drafter._tree = rig.core.memory.prefix_tree
    awake: list[bool] = []

    def lull(plan: StepPlan, seconds: float) -> None:
        awake.append(drafter.awake)
        if len(awake) % 12 == 6:
            drafter._budget.awake, drafter._budget._sleep_s, drafter._budget._sleep_steps = False, 5.5, 512

    rig.core.on_step.insert(0, lull)
    assert repeating(rig) == repeating(plain)
    assert 10 < sum(awake) < len(awake) - 10
    assert rig.core.stats().speculation.accepted > 50
    rig.core.on_step.remove(lull)

    answer = rig.answers["r0-0", 0].tokens
    for _ in range(BARREN_STEPS if drafter.awake else 0):
        drafter._budget.spend(1.0)
        drafter.observe(1, 0, 1e-6)
    assert not drafter.awake
    before = rig.core.stats().speculation.accepted
    prompt = [(7 * at + len("r0-0")) % VOCAB_SIZE for at in range(40)]
    rig.core.submit(
        Request(
            request_id="again",
            prompt_tokens=prompt,
            prediction=answer,
            sampling=SamplingParams(temperature=0.0, max_tokens=60, seed=0, ignore_eos=True),
        )
    )
    assert rig.run()["again", 0].tokens == answer
    assert rig.core.stats().speculation.accepted > before + 30
    rig.core.audit()
