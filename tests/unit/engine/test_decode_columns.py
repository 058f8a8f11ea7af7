"""Decodes settled as columns: what clients get is what one stream after the other would give them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import numpy as np
import pytest

from tests.unit.engine.rig import EOS, Rig
from weft.engine.decode_columns import DecodeColumns
from weft.engine.settlement import Settlement
from weft.request import TokenEvent
from weft.schedule.plan import StepPlan

whole_rare = DecodeColumns.rare


def one_by_one(columns: DecodeColumns, tokens: list[int], failures: Iterable[int]) -> list[int]:
    whole_rare(columns, tokens, failures)
    return list(range(len(tokens)))


def steps_of(*, overlap: bool) -> list[list[TokenEvent]]:
    """Answers that end by length, by an end token and by a cancel; logprobs; n answers; memory that is so
    short that some are preempted."""
    rig = Rig(rows_max=9, frame_count=6, overlap=overlap, seed=5)
    for number in range(12):
        rig.submit(
            f"r{number}",
            10 + 3 * number,
            max_tokens=20 + 8 * number,
            temperature=1.0,
            ignore_eos=number % 3 == 0,
            n=1 + number % 2,
            logprobs=2 if number % 4 == 1 else None,
            stop_token_ids=(EOS + number,) if number % 5 == 0 else (),
        )
    steps = []
    while rig.core.has_work:
        if len(steps) == 15:
            rig.core.cancel("r3")
        steps.append(rig.step())
    return steps


@pytest.mark.parametrize("overlap", [False, True])
def test_columns_give_the_events_of_one_stream_after_the_other(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    in_columns = steps_of(overlap=overlap)
    reasons = {event.finish_reason for step in in_columns for event in step}
    assert any(event.preemptions for step in in_columns for event in step), "too much memory"
    assert reasons == {None, "stop", "length", "cancelled"}
    monkeypatch.setattr(DecodeColumns, "rare", one_by_one)
    assert in_columns == steps_of(overlap=overlap)


def forgets_lengths(columns: DecodeColumns, tokens: list[int], failures: Iterable[int]) -> list[int]:
    columns._left = np.full_like(columns._left, 99)
    return whole_rare(columns, tokens, failures)


def forgets_ends(columns: DecodeColumns, tokens: list[int], failures: Iterable[int]) -> list[int]:
    columns._rare_tokens = frozenset()
    return whole_rare(columns, tokens, failures)


@pytest.mark.parametrize("broken", [forgets_lengths, forgets_ends])
def test_columns_that_miss_an_end_are_caught(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the comparison above."""
    right = steps_of(overlap=False)
    monkeypatch.setattr(DecodeColumns, "rare", broken)
    assert steps_of(overlap=False) != right


def test_a_preemption_beside_a_step_in_flight_is_in_the_events_of_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps_of(overlap=True)
    whole = Settlement.note_admissions

    def keeps_columns(settlement: Settlement, plan: StepPlan, now_s: float) -> None:
        columns = settlement._columns
        whole(settlement, plan, now_s)
        settlement._columns = columns

    monkeypatch.setattr(Settlement, "note_admissions", keeps_columns)
    assert steps_of(overlap=True) != right


def test_an_event_tells_what_the_stream_tells() -> None:
    rig = Rig(rows_max=2)
    rig.submit("a", 40, max_tokens=30)
    rig.step()
    [stream] = rig.core.streams.by_seq.values()
    assert stream.plain, "it has said once what is said once"
    stream.cached_tokens, stream.seq.preemption_count, stream.seq.recomputed_tokens = 3, 2, 5
    [event] = rig.core.step()
    assert (event.cached_tokens, event.preemptions, event.recomputed_tokens) == (3, 2, 5)
    assert event == stream.event(event.tokens)
    stream.queued_s = 1.5
    [event] = rig.core.step()
    assert event != stream.event(event.tokens), "the control: a stream that has more to say"


def calls_of_a_step(running: int) -> int:
    """Calls that Python makes while a step of ``running`` decodes is settled and planned."""
    rig = Rig(rows_max=running, frame_count=running + 40, queue_max=running, step_tokens_max=64 * running)
    for number in range(running):
        rig.submit(f"r{number:04}", 20, max_tokens=30)
    for _ in range(4):
        rig.core.step()
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    settle, plan = rig.core.settlement.settle, rig.core.scheduler.plan
    for name, owner, verb in (("settle", rig.core.settlement, settle), ("plan", rig.core.scheduler, plan)):

        def counted(*args: object, verb: object = verb, **more: object) -> object:
            sys.setprofile(count)
            try:
                return verb(*args, **more)  # type: ignore[operator]
            finally:
                sys.setprofile(None)

        setattr(owner, name, counted)
    rig.core.step()
    return calls


def test_a_step_of_many_decodes_takes_the_calls_of_a_step_of_few() -> None:
    few, many = calls_of_a_step(8), calls_of_a_step(256)
    assert 20 < few <= many < few + 30
