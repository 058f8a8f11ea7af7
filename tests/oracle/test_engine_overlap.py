"""Steps that overlap change nothing: the tokens and logits of transformers, whatever else happens, with a
model on a thread of its own. Memory that becomes free is full of NaN (see ``serving``), so a run wasted on an
answer that has ended, or a page that is given away too early, shows in somebody's logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.oracle.serving import (
    GREEDY,
    TOLERANCE,
    Serving,
    assert_equal_to_truth,
    directory,
    distance,
    tight_memory,
    truth,
)
from weft.engine.grammars import GrammarCompiler
from weft.request import SamplingParams
from weft.runner import readback
from weft.runner.batch import BatchBuilder
from weft.runner.launched import LaunchedStep, StepWorker
from weft.runner.readback import PendingReadback, Readback
from weft.runner.sampler import Sampler
from weft.schedule.plan import StepPlan, StepResult
from weft.text.grammars import regex_grammar
from weft.units import PAD

FAMILIES = ("qwen3_5", "lfm2", "granite")
GUEST = SamplingParams(
    temperature=1.3,
    top_p=0.9,
    seed=5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logprobs=3,
    max_tokens=40,
    ignore_eos=True,
)
"""What comes next hangs on what was said, and that is not known where the step is planned."""
WAIT_S = 60
"""Only a loop that hangs waits so long."""


class Far:
    """A device whose copies arrive when they are waited for and not before: the host's memory is garbage
    until then. Whoever wants a step's tokens waits until the step that was begun behind it is launched, or
    until launching that one has come to ask for them. ``asked_early``: how often it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = self.launched = self.asked_early = 0
        self.asked: set[int] = set()
        self.changed = threading.Condition()
        send, begin, result = Readback.send, StepWorker.begin, LaunchedStep.result

        def sent(readback: Readback, pieces: Sequence[torch.Tensor]) -> PendingReadback:
            pending = send(readback, pieces)
            words = pending._words
            assert words is not None, "the host has looked at a device"
            brought = words.copy()
            words.fill(-(1 << 40))
            pending._event = OnItsWay(self, self.launched, lambda: np.copyto(words, brought))
            with self.changed:
                self.launched += 1
                self.changed.notify_all()
            return pending

        def began(worker: StepWorker, plan: StepPlan) -> None:
            self.begun += 1
            begin(worker, plan)

        def asked(step: LaunchedStep) -> StepResult:
            if threading.current_thread().name.startswith("steps"):
                with self.changed:
                    self.asked_early += 1
                    self.asked.add(step._pending._event.number)
                    self.changed.notify_all()
            return result(step)

        # The stand-in's events come when the loop has begun a step ahead, and no clock decides that.
        monkeypatch.setattr(readback, "wait_for", lambda event: event.synchronize())
        monkeypatch.setattr(Readback, "send", sent)
        monkeypatch.setattr(StepWorker, "begin", began)
        monkeypatch.setattr(LaunchedStep, "result", asked)

    def forget(self) -> None:
        self.begun = self.launched = self.asked_early = 0
        self.asked.clear()


class OnItsWay:
    def __init__(self, far: Far, number: int, arrive: Callable[[], None]) -> None:
        self.number = number
        self._far = far
        self._arrive = arrive

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        far, number = self._far, self.number
        with far.changed:
            if far.begun > number + 1:
                assert far.changed.wait_for(lambda: far.launched > number + 1 or number in far.asked, WAIT_S)
        self._arrive()


def far_company(**more: Any) -> tuple[Serving, list[list[int]], list[SamplingParams]]:
    """Greedy and drawn answers, one that ends unforeseen, and arrivals while others decode."""
    known = truth("qwen3_5")[1:4]
    few = structs.replace(GREEDY, max_tokens=12)
    samplings = [
        few,
        structs.replace(few, stop_token_ids=[known[1].tokens[4]]),
        structs.replace(few, temperature=1.2, top_k=30, top_p=0.9, seed=3, logprobs=2),
    ]
    return Serving("qwen3_5", step_tokens=100, **more), [one.prompt for one in known], samplings


def test_a_step_is_launched_while_the_tokens_of_the_one_before_are_still_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that launches never waits; what it launches is fed from the device."""
    plain, prompts, samplings = far_company()
    expected = plain.run(prompts, samplings, stagger_steps=2)
    far = Far(monkeypatch)
    serving, *_ = far_company(overlap=True, remote=True)
    answers = serving.run(prompts, samplings, stagger_steps=2)
    assert [one.tokens for one in answers] == [one.tokens for one in expected]
    assert [one.finish_reason for one in answers] == ["length", "stop", "length"]
    assert [one.token for one in answers[2].logprobs] == answers[2].tokens
    assert far.launched == far.begun == len(serving.plans)
    assert far.asked_early == 0
    # The control: a sampler that says of every step that it hangs on the one before makes it wait.
    far.forget()
    monkeypatch.setattr(Sampler, "needs_previous_token", lambda *_: True)
    serving, *_ = far_company(overlap=True, remote=True)
    assert [one.tokens for one in serving.run(prompts, samplings)] == [one.tokens for one in expected]
    assert far.asked_early > 5


def test_a_grammar_and_penalties_wait_for_the_tokens_that_they_hang_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def serving(**more: Any) -> Serving:
        made, *_ = far_company(**more)
        tokenizer = directory("qwen3_5") / "tokenizer.json"
        made.core.grammars = GrammarCompiler(tokenizer.read_text, made.core.eos_ids, made.core.vocab_size)
        return made

    prompts = [[5, 6, 7], [8] * 70, [9, 10]]
    few = structs.replace(GREEDY, max_tokens=8)
    grammar = regex_grammar("[a-f]{3}[x-z]{9}", field="f")
    samplings = [
        structs.replace(GUEST, max_tokens=12),
        structs.replace(few, grammar=grammar, ignore_eos=False, temperature=0.9, seed=1),
        few,
    ]
    expected = serving().run(prompts, samplings, stagger_steps=2)
    far = Far(monkeypatch)
    answers = serving(overlap=True, remote=True).run(prompts, samplings, stagger_steps=2)
    assert [one.tokens for one in answers] == [one.tokens for one in expected]
    assert far.asked_early > 5
    # The control: without waiting, a penalty does not know the last token.
    turns = structs.replace(few, repetition_penalty=2.0, logit_bias={20: 50.0, 30: 40.0})
    for needs, made in ((True, [20, 30]), (False, [20, 20])):
        far.forget()
        monkeypatch.setattr(Sampler, "needs_previous_token", lambda *_, needs=needs: needs)
        [answer] = serving(overlap=True, remote=True).run(prompts[:1], turns)
        assert answer.tokens[:2] == made


@pytest.mark.parametrize("family", FAMILIES)
def test_overlap_changes_nothing(family: str) -> None:
    """Small chunks, staggered arrivals, priorities that turn the queue around, penalised company, and memory
    that is short."""
    serving = Serving(family, memory_bytes=tight_memory(family, spare_pages=6), step_tokens=100, overlap=True)
    guests = [[7, 8, 9] * 30, [11] * 20]
    known = truth(family)[::-1]
    answers = serving.run(
        [*(one.prompt for one in known), *guests],
        [GREEDY] * len(known) + [GUEST] * 2,
        stagger_steps=2,
        priorities=[3, 9, 2, 1, 0, 0, 1],
    )
    assert_equal_to_truth(answers[:-2], known)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"
    decodes = [plan.tokens[: plan.decode_count] for plan in serving.plans]
    assert (np.concatenate(decodes) == PAD).all(), "a step was planned after the one before it was read back"
    for answer, plain in zip(answers[-2:], Serving(family).run(guests, GUEST), strict=True):
        assert answer.tokens == plain.tokens
        assert [one.token for one in answer.logprobs] == answer.tokens
        found, expected = ([one.logprob for one in each.logprobs] for each in (answer, plain))
        assert np.allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_ended_unforeseen_leaves_a_prefix_that_changes_nothing(family: str) -> None:
    """Two conversations end with a token that nobody could foresee, and are taken up where they ended."""
    few = structs.replace(GREEDY, max_tokens=8)
    talks = truth(family)[2:4]
    cuts = [
        next(at for at, token in enumerate(one.tokens) if at > 5 and one.tokens.index(token) == at) for one in talks
    ]
    serving = Serving(family, overlap=True, cache=True)
    stops = [structs.replace(GREEDY, stop_token_ids=[one.tokens[cut]]) for one, cut in zip(talks, cuts, strict=True)]
    ended = serving.run([one.prompt for one in talks], stops)
    for one, cut, answer in zip(talks, cuts, ended, strict=True):
        assert (answer.finish_reason, answer.tokens) == ("stop", one.tokens[: cut + 1])
        prompt = one.prompt + one.tokens[: cut + 1]
        [again] = serving.run([[*prompt, 5, 6]], few)
        [fresh] = Serving(family).run([[*prompt, 5, 6]], few)
        assert again.cached_tokens == len(prompt), "the state after the last token was not found"
        assert again.tokens == fresh.tokens
        assert (again.logits - fresh.logits).abs().max() < TOLERANCE


def test_a_row_that_is_fed_what_it_chose_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one token late."""
    serving = Serving("qwen3_5", overlap=True)
    chosen = serving.executor.batches.rows.chosen
    late = [torch.zeros_like(chosen)]
    note = BatchBuilder.note_chosen

    def one_step_late(self: BatchBuilder, *args: object) -> None:
        before = late.pop()
        chosen.copy_(before)
        note(self, *args)  # type: ignore[arg-type]
        late.append(chosen.clone())
        chosen.copy_(before)

    monkeypatch.setattr(BatchBuilder, "note_chosen", one_step_late)
    one = truth("qwen3_5")[2]
    [answer] = serving.run([one.prompt])
    assert distance(answer, one) > 10 * TOLERANCE
