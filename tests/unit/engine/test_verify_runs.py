"""Verify runs through the whole engine over the scripted device, which checks every state and page."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.fixtures.drafters import KINDS, AnswerDrafter, Kind
from tests.support.digests import PlanViolation
from tests.unit.engine.rig import EOS, VOCAB_SIZE, Rig
from weft.request import TokenEvent
from weft.schedule.plan import StepPlan
from weft.schedule.rows import RowTable
from weft.schedule.snapshots import parse_snapshots
from weft.schedule.verify_runs import VerifyPlanner
from weft.units import VERIFY_TOKENS_MAX, SeqId

PROMPTS = (20, 33, 5, 64, 130, 17)


def submit_all(rig: Rig, **sampling: object) -> None:
    for number, length in enumerate(PROMPTS):
        rig.submit(f"r{number}", length, **{"max_tokens": 40, "seed": number, **sampling})


def answers_of(rig: Rig) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    return {name: (answer.tokens, answer.reason) for name, answer in rig.run().items()}


def by_number(rig: Rig) -> dict[int, list[int]]:
    """The sequences are numbered in the order of their requests."""
    return {number: answer[0] for number, answer in enumerate(value for _, value in sorted(answers_of(rig).items()))}


def truth(**sampling: object) -> dict[int, list[int]]:
    return {number: [*tokens] for number, tokens in _truth(tuple(sampling.items())).items()}


@functools.cache
def _truth(sampling: tuple[tuple[str, object], ...]) -> dict[int, list[int]]:
    return by_number(_plain(sampling))


@functools.cache
def _plain(sampling: tuple[tuple[str, object], ...]) -> Rig:
    """An engine without drafts, once it has answered."""
    rig = Rig(rows_max=4)
    submit_all(rig, **dict(sampling))
    rig.run()
    return rig


def speculating(
    kind: Kind, *, most: int = 7, sampling: dict[str, object] | None = None, **options: object
) -> tuple[Rig, AnswerDrafter]:
    drafter = AnswerDrafter(kind, truth(**(sampling or {})), VOCAB_SIZE, most=most)
    rig = Rig(rows_max=4, drafter=drafter, **options)
    submit_all(rig, **(sampling or {}))
    return rig, drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"n": 2, "temperature": 1.0}], ids=str)
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_no_token(kind: Kind, sampling: dict[str, object], cache: bool, overlap: bool) -> None:
    plain = _plain(tuple(sampling.items()))
    rig, drafter = speculating(kind, sampling=sampling, cache=cache, overlap=overlap)
    assert answers_of(rig) == answers_of(plain)
    assert not drafter.said, "a sequence ended and the drafter was not told"
    if kind == "perfect":
        assert drafter.accepted == drafter.drafted > 100
        assert len(rig.plans) < len(plain.plans) / 2
    if kind == "adversarial":
        assert drafter.accepted == 0 < drafter.drafted


def test_a_full_window_brings_its_drafts_and_one_more_token() -> None:
    rig, drafter = speculating("random", most=3)
    rig.run()
    whole = [plan for plan in rig.plans if plan.verify_count]
    assert {(drafted, accepted) for _, drafted, accepted in drafter.log} >= {(3, 3)}
    assert max(plan.verify_count for plan in whole) > 1
    assert any(plan.decode_count and plan.verify_count for plan in rig.plans)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_no_draft_goes_past_the_last_token_of_the_answer(max_tokens: int) -> None:
    rig, _ = speculating("perfect", sampling={"max_tokens": max_tokens})
    assert [(len(tokens), reason) for tokens, reason in answers_of(rig).values()] == (
        [(max_tokens, "length")] * len(PROMPTS)
    )


@pytest.mark.parametrize("kind", ["perfect", "random"])
def test_an_end_token_inside_a_window_is_the_end(kind: Kind) -> None:
    """As in the report of answers that went on behind their end (a tree keyed past the stop)."""
    sampling: dict[str, object] = {"max_tokens": 200, "ignore_eos": False, "temperature": 1.0}
    plain = _plain(tuple(sampling.items()))
    expected = answers_of(plain)
    assert sum(reason == "stop" for _, reason in expected.values()) >= 3
    rig, drafter = speculating(kind, sampling=sampling)
    assert answers_of(rig) == expected
    assert not any(
        EOS in plan.tokens[int(plan.lengths[:run].sum()) + 1 :][: int(plan.lengths[run]) - 1]
        for plan in rig.plans
        for run in plan.verify_runs
    ), "an end of the answer was drafted"
    assert drafter.accepted > 20


def test_min_tokens_holds_inside_a_window() -> None:
    sampling: dict[str, object] = {"max_tokens": 200, "ignore_eos": False, "min_tokens": 30}
    plain = _plain(tuple(sampling.items()))
    rig, _ = speculating("perfect", sampling=sampling)
    assert answers_of(rig) == answers_of(plain)


def test_logprobs_of_a_window_are_those_of_its_tokens() -> None:
    def logprobs(rig: Rig) -> dict[tuple[str, int], list[object]]:
        answers = rig.run()
        return {
            name: [one for event in answer.events for one in event.logprobs or []] for name, answer in answers.items()
        }

    plain = Rig(rows_max=4)
    submit_all(plain, logprobs=2)
    rig, drafter = speculating("random", sampling={"logprobs": 2})
    assert logprobs(rig) == logprobs(plain)
    assert drafter.accepted


def test_windows_stop_where_an_answer_saves_a_state() -> None:
    """As in the report of a snapshot that was missed when accepted tokens crossed its boundary."""
    every = parse_snapshots("auto,decode:64")
    plain = Rig(rows_max=4, cache=True, snapshots=every, frame_count=200)
    submit_all(plain, max_tokens=200)
    expected = answers_of(plain)
    known = {number: tokens for number, (_, (tokens, _)) in enumerate(sorted(expected.items()))}
    drafter = AnswerDrafter("perfect", known, VOCAB_SIZE)
    rig = Rig(rows_max=4, cache=True, snapshots=every, frame_count=200, drafter=drafter)
    submit_all(rig, max_tokens=200)
    assert answers_of(rig) == expected

    def saved(one: Rig) -> set[tuple[int, int]]:
        return {
            (saving.seq, saving.snapshot.position)
            for plan in one.plans
            for saving in plan.reservation.saved
            if not plan.taps
        }

    assert saved(rig) == saved(plain) != set()


def test_a_step_has_a_bounded_number_of_window_tokens() -> None:
    rig, _ = speculating("perfect", most=VERIFY_TOKENS_MAX * 2)
    rig.run()
    verified = [sum(int(plan.lengths[run]) for run in plan.verify_runs) for plan in rig.plans]
    assert max(verified) <= VERIFY_TOKENS_MAX
    assert max(verified) > 20


@pytest.mark.parametrize("kind", ["perfect", "random", "adversarial"])
def test_short_memory_and_preemption_change_no_token(kind: Kind) -> None:
    expected = truth(max_tokens=120)
    rig, drafter = speculating(kind, sampling={"max_tokens": 120}, frame_count=9, cache=True)
    assert by_number(rig) == expected
    assert any(plan.preempted for plan in rig.plans), "nothing was preempted: memory was not short"
    assert drafter.drafted


def test_a_cancel_inside_a_window_leaves_the_state_under_its_tokens() -> None:
    """The rest of the run reads what the cancelled sequence donated; a wrong state would be a violation."""
    rig, _ = speculating("perfect", cache=True)
    cancelled = []

    def cancel(plan: StepPlan) -> None:
        runs = {plan.seqs[run]: run for run in plan.verify_runs}
        if not cancelled and 0 in runs and plan.starts[runs[SeqId(0)]] >= 24:
            cancelled.append(rig.core.cancel("r0"))

    rig.before_execute = cancel
    rig.run()
    assert cancelled == [True]
    prompt = [(7 * at + 2) % VOCAB_SIZE for at in range(20)]
    rig.submit("again", [*prompt, *rig.answers["r0", 0].tokens], max_tokens=5)
    rig.run()
    assert rig.answers["again", 0].reason == "length"


def test_a_hit_reads_the_state_that_a_window_left() -> None:
    rig, _ = speculating("perfect", cache=True)
    answers = rig.run()
    prompt = [(7 * at + 2) % VOCAB_SIZE for at in range(33)]
    rig.core.scheduler._verify_planner = None  # the next turn has no drafts of its own
    rig.submit("turn", [*prompt, *answers["r1", 0].tokens, 5, 6, 7], max_tokens=4)
    rig.run()
    [first] = [event for event in rig.answers["turn", 0].events if event.queued_s is not None]
    assert first.cached_tokens >= 33 + 40 - 1


def test_the_drafter_hears_every_token_once() -> None:
    heard: dict[int, list[int]] = {}

    class Listening(AnswerDrafter):
        def end(self, key: int) -> None:
            heard[key] = self.said[key]
            super().end(key)

    expected = truth()
    rig = Rig(rows_max=4, drafter=Listening("random", expected, VOCAB_SIZE))
    submit_all(rig)
    rig.run()
    assert heard == expected


def test_a_state_one_token_too_far_is_noticed() -> None:
    rig, _ = speculating("perfect")
    verify = rig.device._verify

    def one_more(*args: object) -> tuple[int, ...]:
        chosen = verify(*args)
        row = args[2]
        rig.device.arena.states[int(args[0].slots[args[1]])] = row.state_at(row.computed - 1)
        return chosen

    rig.device._verify = one_more
    rig.run()
    assert isinstance(rig.core.failure, PlanViolation)
    assert "does not hold the state" in str(rig.core.failure)


def test_a_draft_of_an_end_is_a_violation() -> None:
    rig, _ = speculating("perfect", sampling={"ignore_eos": False, "temperature": 1.0, "max_tokens": 200})
    rig.core.scheduler._verify_planner._without_ends = lambda row, draft: draft
    rig.run()
    assert "a draft is an end of the answer" in str(rig.core.failure)


def events_of(rig: Rig) -> list[TokenEvent]:
    return [event for answer in rig.run().values() for event in answer.events]


def test_a_window_is_one_event() -> None:
    rig, _ = speculating("perfect")
    events = events_of(rig)
    assert max(len(event.tokens) for event in events) == 8
    assert sum(len(event.tokens) for event in events) == len(PROMPTS) * 40


@pytest.mark.parametrize(("prefills", "drafts"), [((3,), 0), ((), None)])
def test_a_head_that_sleeps_is_asked_in_steps_that_prefill_and_in_no_other(
    prefills: tuple[int, ...], drafts: int | None
) -> None:
    """The keys of a prompt serve its whole answer."""
    drafter: Any = SimpleNamespace(awake=False, head_drafts=lambda sequences, *, prompts: 0)
    step: Any = SimpleNamespace(
        decode_rows=np.arange(3), prefill_rows=[*prefills], prefill_samples=[True for _ in prefills], mtp_drafts=None
    )
    planner = VerifyPlanner(drafter, RowTable(4), cast(Any, None), 64)
    planner.plan(step)
    assert step.mtp_drafts == drafts
