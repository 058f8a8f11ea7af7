"""The overlapped loop, step by step, over the scripted executor: what is begun before what is home, what an
end that nobody could foresee costs, and the ways for a flight to end badly."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.fixtures.drafters import AnswerDrafter
from tests.support.digests import PlanViolation
from tests.support.scripted import hashed_token
from tests.unit.engine.rig import EOS, VOCAB_SIZE, Rig, counting
from weft.request import FinishReason
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.units import PAD

VOCAB = hashed_token(97)


@dataclass
class Logged(Rig):
    """Notes when each step is begun and home."""

    log: list[tuple[str, int]] = field(default_factory=list)

    def __init__(self, **more: object) -> None:
        super().__init__(overlap=True, **more)  # type: ignore[arg-type]
        self.log = []

    def begin(self, plan: StepPlan) -> None:
        self.log.append(("begin", plan.step))
        super().begin(plan)

    def finish(self) -> StepResult:
        self.log.append(("home", self._begun[0].step))
        return super().finish()


def ends_after(tokens: int):
    """Every answer is letters, and the end token as token number ``tokens``."""
    made = counting(10)

    def choose(state: int, seed: int) -> int:
        token = made(state, seed)
        return EOS if token == 10 + tokens - 1 else token

    return choose


def runs_of(rig: Rig) -> int:
    return sum(plan.run_count for plan in rig.plans)


def test_a_step_is_begun_before_the_one_ahead_of_it_is_home() -> None:
    rig = Logged()
    rig.submit("a", max_tokens=4)
    rig.run()
    assert rig.log[:5] == [("begin", 0), ("begin", 1), ("home", 0), ("begin", 2), ("home", 1)]
    assert [step for what, step in rig.log if what == "home"] == list(range(len(rig.plans)))


def test_decodes_are_planned_without_their_tokens() -> None:
    rig = Logged()
    rig.submit("a", max_tokens=5)
    rig.run()
    decodes = [plan for plan in rig.plans if plan.decode_count]
    assert len(decodes) == 4
    assert all(plan.tokens.tolist() == [PAD] for plan in decodes)
    assert [int(plan.starts[0]) for plan in decodes] == [20, 21, 22, 23]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"n": 3, "temperature": 0.7},
        {"max_tokens": 1},
        {"max_tokens": 0, "prompt_logprobs": 1},
        {"logprobs": 2, "prompt_logprobs": 0},
        {"ignore_eos": False, "stop_token_ids": [11, 40]},
    ],
)
def test_overlap_changes_no_event(sampling: dict[str, object]) -> None:
    """Beside company: tokens, reasons, logprobs of each event, whatever was asked."""

    def told(overlap: bool) -> dict[tuple[str, int], list[object]]:
        rig = Rig(overlap=overlap, step_tokens_max=64)
        rig.submit("company", 100, max_tokens=30)
        rig.submit("a", 70, **sampling)
        rig.submit("b", 5, **sampling)
        return {
            name: [
                (event.tokens, event.finish_reason, event.stop_reason, event.logprobs, event.prompt_logprobs)
                for event in answer.events
            ]
            for name, answer in rig.run().items()
        }

    assert told(overlap=True) == told(overlap=False)


@pytest.mark.parametrize(("reason", "wasted"), [("length", 0), ("stop", 1)])
def test_only_an_end_that_could_not_be_foreseen_costs_a_run(reason: FinishReason, wasted: int) -> None:
    rig = Logged(next_token=ends_after(6))
    rig.submit("a", max_tokens=6 if reason == "length" else 50, ignore_eos=reason == "length")
    rig.run()
    assert rig.answers["a", 0].reason == reason
    assert len(rig.tokens("a")) == 6
    assert runs_of(rig) == 6 + wasted


def test_what_ended_is_kept_under_exactly_the_tokens_that_its_state_has_seen() -> None:
    """The scripted executor compares the state that is copied with the prefix it is taken for."""
    plain, rig = Rig(next_token=VOCAB, cache=True), Rig(next_token=VOCAB, cache=True, overlap=True)
    for one in (plain, rig):
        one.submit("a", 40, ignore_eos=False, max_tokens=200)
        one.run()
        assert one.answers["a", 0].reason == "stop"
        prompt = [(7 * at + 1) % 97 for at in range(40)]
        one.submit("b", [*prompt, *one.tokens("a"), 5, 6], max_tokens=2)
        one.run()
    [cached], [cached_plain] = ({event.cached_tokens for event in one.answers["b", 0].events} for one in (rig, plain))
    assert cached == 40 + len(rig.tokens("a"))
    assert cached_plain == cached - 1
    assert rig.tokens("b") == plain.tokens("b")


def cancelled_in_flight() -> tuple[Rig, list[int], int]:
    """An engine on which an answer was cancelled with a step in flight and the next one begun; its prompt
    with what the answer would have been; and how many tokens of it were heard."""
    whole, rig = Rig(), Rig(cache=True, overlap=True)
    for one in (whole, rig):
        one.submit("a", 40, max_tokens=50)
    whole.run()
    for _ in range(5):
        rig.step()

    def cancel(plan: StepPlan) -> None:
        rig.core.cancel("a")

    rig.before_execute = cancel
    rig.run()
    prompt = [(7 * at + 1) % 97 for at in range(40)]
    return rig, prompt + whole.tokens("a"), len(rig.tokens("a"))


def test_what_was_cancelled_in_flight_leaves_a_state_that_fits_its_tokens() -> None:
    rig, tokens, heard = cancelled_in_flight()
    assert (rig.answers["a", 0].reason, rig.answers["a", 0].ends) == ("cancelled", 1)
    rig.submit("b", tokens[:80], max_tokens=2)
    rig.run()
    [cached] = {event.cached_tokens for event in rig.answers["b", 0].events}
    assert cached == 40 + heard + 1  # the token that nobody heard was computed all the same


def test_a_state_kept_under_fewer_tokens_than_it_has_seen_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "learn_late", lambda self, plan, run, token: None)
    rig, tokens, _ = cancelled_in_flight()
    rig.submit("b", tokens[:80], max_tokens=2)
    rig.run()
    assert isinstance(rig.core.failure, PlanViolation)
    assert "does not hold the state" in str(rig.core.failure)


def test_memory_is_back_once_everything_is_home() -> None:
    rig = Rig(overlap=True, cache=True)
    for number in range(6):
        rig.submit(f"r{number}", 30, ignore_eos=False, max_tokens=30)
    rig.run()
    usage = rig.core.memory.usage()
    assert usage.leases == 0
    assert (usage.pages_held, usage.slots_held) == (usage.pages_cached, usage.slots_cached)


def test_a_flush_waits_for_the_step_in_flight_and_nothing_cached_is_left() -> None:
    rig = Rig(overlap=True, cache=True)
    rig.submit("a", 100, max_tokens=3)
    rig.run()
    rig.submit("b", 100, max_tokens=30)
    rig.step()
    rig.step()
    before = rig.core.memory.usage()
    rig.core.flush_cache()
    assert rig.core.memory.usage() == before
    rig.step()
    after = rig.core.memory.usage()
    assert after.evictable_bytes < before.evictable_bytes
    rig.run()
    assert len(rig.tokens("b")) == 30


def test_a_step_that_fails_in_flight_ends_every_answer_once() -> None:
    rig = Logged()

    def fail(plan: StepPlan) -> None:
        if plan.step == 4:
            raise OSError("the device is gone")

    rig.before_execute = fail
    rig.submit("a", max_tokens=20)
    rig.submit("b", max_tokens=20)
    rig.run()
    assert isinstance(rig.core.failure, OSError)
    for answer in rig.answers.values():
        assert (answer.reason, answer.ends) == ("error", 1)
    assert rig.log[-2:] == [("begin", 5), ("home", 4)]
    assert not rig.core.has_work


def test_an_engine_that_is_closed_in_flight_ends_what_runs_and_waits_for_nothing_more() -> None:
    rig = Logged()
    rig.submit("a", max_tokens=20)
    for _ in range(3):
        rig.step()
    home = len([what for what, _ in rig.log if what == "home"])
    events = rig.core.close()
    assert [event.finish_reason for event in events] == ["cancelled"]
    assert rig.device.closed
    assert len([what for what, _ in rig.log if what == "home"]) == home


def test_a_row_that_is_fed_another_token_than_it_chose_is_caught() -> None:
    """The negative control of PAD: the executor takes it from its own row and nowhere else."""
    rig = Rig()
    rig.submit("a", max_tokens=5)
    rig.step()
    plan = rig.core.scheduler.plan()
    assert plan is not None
    plan.tokens[0] = (plan.tokens[0] + 1) % 97
    with pytest.raises(PlanViolation, match="the tokens are not the sequence's"):
        rig.device.execute(plan)


def drafting(most: int) -> Logged:
    """Return a rig whose drafts are right. Its answer is that of a rig without drafts."""
    plain = Rig()
    plain.submit("a", max_tokens=30)
    plain.run()
    rig = Logged(cache=True, drafter=AnswerDrafter("perfect", {0: plain.tokens("a")}, VOCAB_SIZE, most=most))
    rig.submit("a", max_tokens=30)
    return rig


def test_a_step_with_drafts_is_computed_while_the_events_of_the_one_before_are_sent() -> None:
    rig = drafting(3)
    events = 0
    while rig.core.has_work:
        rig.log.append(("call", 0))
        events += len(rig.step())
        rig.log.append(("events", events))
    verified = [plan.step for plan in rig.plans if plan.verify_count]
    first, second, third = verified[1:4]
    assert (second, third) == (first + 1, first + 2)
    begun = [rig.log.index(("begin", step)) for step in (first, second, third)]
    assert [what for what, _ in rig.log[begun[0] : begun[2]]] == ["begin", "events", "call", "home"] * 2
    assert rig.log[begun[0] + 1][1] < rig.log[begun[1] + 1][1], "each call returns the events of the step before"


@pytest.mark.parametrize("end", ["cancel", "flush", "retraction"])
def test_whatever_comes_while_a_step_with_drafts_is_in_flight(end: str) -> None:
    """``Rig.step`` audits the engine after each step."""
    rig, right = drafting(3), drafting(3)
    right.run()
    while not (rig.plans and rig.plans[-1].verify_count and rig.core._loop.in_flight is not None):
        rig.step()
    assert rig.core._loop.in_flight == (), "nothing has advanced over it"
    rig.core.audit()
    if end == "cancel":
        rig.core.cancel("a")
    elif end == "flush":
        rig.core.flush_cache()
    else:
        rig.core.retract_all()
    rig.run()
    said = list(rig.tokens("a"))
    assert said == right.tokens("a")[: len(said)]
    assert (len(said) < 30) == (end == "cancel")
    # Again with the same name, so with the same prompt: states in the cache are checked against their tokens.
    rig.submit("a", max_tokens=30)
    rig.run()
    assert rig.tokens("a")[len(said) :] == right.tokens("a")
