"""Sampled text, logprobs and departures: what must not depend on the batch, the chunks or the memory."""

from __future__ import annotations

import pytest
import torch

from tests.oracle.serving import DECODE_STEPS, TOLERANCE, Serving, assert_equal_to_truth, tight_memory, truth
from weft.request import Request, SamplingParams
from weft.schedule.plan import StepPlan

HYBRIDS = ("qwen3_5", "granite_moe")


def seeded(seed: int, **more: object) -> SamplingParams:
    return SamplingParams(
        temperature=1.2,
        top_p=0.95,
        top_k=100,
        seed=seed,
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        max_tokens=DECODE_STEPS,
        ignore_eos=True,
        **more,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_seed_gives_the_same_text_alone_in_company_in_chunks_and_after_preemption(family):
    prompts = [one.prompt for one in truth(family)][::-1]
    samplings = [seeded(1000 + i) for i in range(len(prompts))]
    alone = Serving(family)
    expected = [alone.run([prompt], sampling)[0].tokens for prompt, sampling in zip(prompts, samplings, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    for serving in (
        Serving(family),
        Serving(family, step_tokens=90, pad_decode_to=8),
        Serving(family, memory_bytes=tight_memory(family, spare_pages=20), step_tokens=400),
    ):
        answers = serving.run(prompts, samplings)
        assert [answer.tokens for answer in answers] == expected
    assert sum(answer.preemptions for answer in answers) > 0, "the last one was to preempt"
    assert alone.run(prompts[:1], seeded(7))[0].tokens != expected[0], "the control: another seed"


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("step_tokens", [80, 1024])
def test_prompt_logprobs_are_those_of_transformers_for_every_chunk_size(family, step_tokens):
    asking = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=4)
    truths = truth(family)
    answers = Serving(family, step_tokens=step_tokens).run([one.prompt for one in truths], asking)
    for answer, one in zip(answers, truths, strict=True):
        expected = one.prompt_logits.log_softmax(dim=-1)
        assert answer.prompt_logprobs[0] is None
        assert len(answer.prompt_logprobs) == len(one.prompt)
        for position, found in enumerate(answer.prompt_logprobs[1:]):
            row, token = expected[position], one.prompt[position + 1]
            assert found is not None
            assert found.token == token
            assert found.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
            best = row.topk(2).values.tolist()
            assert [value for _, value in found.top] == pytest.approx(best, abs=TOLERANCE)
        chosen = one.logits[:3].log_softmax(dim=-1)
        for step, made in enumerate(answer.logprobs):
            assert (made.token, made.rank) == (one.tokens[step], 0)
            assert made.logprob == pytest.approx(float(chosen[step].max()), abs=TOLERANCE)
            assert [token for token, _ in made.top] == chosen[step].topk(4).indices.tolist()


def test_prompt_logprobs_survive_preemption_once_and_whole():
    family = "qwen3_5"
    truths = truth(family)[::-1]
    asking = SamplingParams(temperature=0.0, max_tokens=DECODE_STEPS, ignore_eos=True, prompt_logprobs=0)
    serving = Serving(family, memory_bytes=tight_memory(family, spare_pages=20), step_tokens=400)
    answers = serving.run([one.prompt for one in truths], asking)
    assert sum(answer.preemptions for answer in answers) > 0
    for answer, one in zip(answers, truths, strict=True):
        expected = one.prompt_logits.log_softmax(dim=-1)
        tokens = torch.tensor(one.prompt[1:])
        values = torch.tensor([found.logprob for found in answer.prompt_logprobs[1:] if found is not None])
        assert values.tolist() == pytest.approx(expected[:-1].gather(1, tokens[:, None])[:, 0].tolist(), abs=TOLERANCE)


def test_a_prompt_alone_can_be_scored_without_an_answer():
    one = truth("granite_moe")[2]
    [answer] = Serving("granite_moe").run([one.prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (answer.tokens, answer.finish_reason) == ([], "length")
    assert len(answer.prompt_logprobs) == len(one.prompt)


def test_the_first_of_several_answers_is_the_one_that_comes_alone():
    prompt = truth("qwen3_5")[2].prompt
    serving = Serving("qwen3_5")
    alone = serving.run([prompt], seeded(4))[0].tokens
    serving.core.submit(Request(request_id="many", prompt_tokens=prompt, sampling=seeded(4, n=3)))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while serving.core.has_work:
        for event in serving.core.step():
            tokens[event.index] += event.tokens
    assert tokens[0] == alone
    assert len({tuple(found) for found in tokens.values()}) == 3


@pytest.mark.parametrize("family", HYBRIDS)
def test_neighbours_that_are_cancelled_change_nothing(family):
    """They come and leave all the time, in the queue, in prefill and in decode, also while the step that
    computes them is under way; what they leave is filled with NaN and taken by others."""
    truths = truth(family)
    left: list[int] = []

    def come_and_go(serving: Serving, plan: StepPlan) -> None:
        if plan.step > 60:
            return
        prompt = [9, 10] * (1 + 17 * (plan.step % 6))
        serving.core.submit(
            Request(
                request_id=f"guest-{plan.step}",
                prompt_tokens=prompt,
                sampling=SamplingParams(max_tokens=200, seed=plan.step),
            )
        )
        for number in range(plan.step):
            if plan.step - number > number % 9 and serving.core.cancel(f"guest-{number}"):
                left.append(number)

    serving = Serving(family, step_tokens=200, before_step=come_and_go)
    assert_equal_to_truth(serving.run([one.prompt for one in truths]), truths)
    assert len(left) > 40
    computed = {seq for plan in serving.plans for seq in plan.seqs}
    assert len(computed) > len(truths) + 20, "guests left before they were computed"
