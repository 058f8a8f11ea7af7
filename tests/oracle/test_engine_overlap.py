"""Steps that overlap change nothing: the tokens and logits of transformers, whatever else happens, with a
model on a thread of its own. Memory that becomes free is full of NaN (see ``serving``), so a run wasted on an
answer that has ended, or a page that is given away too early, shows in somebody's logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.oracle.serving import (
    GREEDY,
    TOLERANCE,
    Serving,
    assert_equal_to_truth,
    distance,
    tight_memory,
    truth,
)
from weft.request import SamplingParams
from weft.units import PAD

FAMILIES = ("qwen3_5", "lfm2", "granite")
GUEST = SamplingParams(temperature=1.3, top_p=0.9, seed=5, frequency_penalty=0.5, repetition_penalty=1.2,
                       logprobs=3, max_tokens=40, ignore_eos=True)
"""What comes next hangs on what was said, and that is not known where the step is planned."""


@pytest.mark.parametrize("family", FAMILIES)
def test_overlap_changes_nothing(family: str) -> None:
    """Small chunks, staggered arrivals, priorities that turn the queue around, penalised company, and memory
    that is short."""
    serving = Serving(family, memory_bytes=tight_memory(family, spare_pages=6), step_tokens=100, overlap=True)
    guests = [[7, 8, 9] * 30, [11] * 20]
    known = truth(family)[::-1]
    answers = serving.run([*(one.prompt for one in known), *guests], [GREEDY] * len(known) + [GUEST] * 2,
                          stagger_steps=2, priorities=[3, 9, 2, 1, 0, 0, 1])
    assert_equal_to_truth(answers[:-2], known)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"
    decodes = [plan.tokens[:plan.decode_count] for plan in serving.plans]
    assert (np.concatenate(decodes) == PAD).all(), "a step was planned after the one before it was home"
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
    cuts = [next(at for at, token in enumerate(one.tokens) if at > 5 and one.tokens.index(token) == at)
            for one in talks]
    serving = Serving(family, overlap=True, cache=True)
    stops = [structs.replace(GREEDY, stop_token_ids=[one.tokens[cut]])
             for one, cut in zip(talks, cuts, strict=True)]
    ended = serving.run([one.prompt for one in talks], stops)
    for one, cut, answer in zip(talks, cuts, ended, strict=True):
        assert (answer.finish_reason, answer.tokens) == ("stop", one.tokens[:cut + 1])
        prompt = one.prompt + one.tokens[:cut + 1]
        [again] = serving.run([[*prompt, 5, 6]], few)
        [fresh] = Serving(family).run([[*prompt, 5, 6]], few)
        assert again.cached_tokens == len(prompt), "the state after the last token was not found"
        assert again.tokens == fresh.tokens
        assert (again.logits - fresh.logits).abs().max() < TOLERANCE


def test_a_row_that_is_fed_what_it_chose_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one token late."""
    serving = Serving("qwen3_5", overlap=True)
    chosen = serving.executor.batches.chosen
    late = [torch.zeros_like(chosen)]
    copy = torch.Tensor.index_copy_

    def one_step_late(self: torch.Tensor, *args: object) -> torch.Tensor:
        if self is not chosen:
            return copy(self, *args)  # type: ignore[arg-type]
        before = late.pop()
        late.append(copy(before.clone(), *args))  # type: ignore[arg-type]
        return self.copy_(before)
    monkeypatch.setattr(torch.Tensor, "index_copy_", one_step_late)
    one = truth("qwen3_5")[2]
    [answer] = serving.run([one.prompt])
    assert distance(answer, one) > 10 * TOLERANCE
