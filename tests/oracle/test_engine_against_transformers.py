"""The first promise of weft: the same logits and the same greedy tokens whatever else happens.

Each test compares the engine with transformers for all prompt lengths. Memory is full of NaN in all of them
(see ``serving``). What would not be noticed is not proved: ``test_engine_negative_controls`` breaks each
mechanism on purpose and sees these comparisons fail.
"""

from __future__ import annotations

import pytest

from tests.oracle.serving import FAMILIES, GREEDY, PROMPT_LENGTHS, Serving, assert_equal_to_truth, tight_memory, truth
from weft.request import SamplingParams

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def prompts(family: str) -> list[list[int]]:
    return [one.prompt for one in truth(family)]


def test_each_prompt_alone_gives_the_tokens_and_logits_of_transformers(family):
    serving = Serving(family)
    for one in truth(family):
        assert_equal_to_truth(serving.run([one.prompt]), [one])


@pytest.mark.parametrize("stagger_steps", [0, 7])
def test_company_in_the_batch_changes_nothing(family, stagger_steps):
    serving = Serving(family)
    answers = serving.run(prompts(family), stagger_steps=stagger_steps)
    assert_equal_to_truth(answers, truth(family))
    assert any(0 < plan.decode_count < plan.run_count for plan in serving.plans), "no step was mixed"
    assert max(plan.decode_count for plan in serving.plans) == len(PROMPT_LENGTHS)


@pytest.mark.parametrize("step_tokens", [80, 150, 400])
def test_the_size_of_prefill_chunks_changes_nothing(family, step_tokens):
    serving = Serving(family, step_tokens=step_tokens)
    answers = serving.run(prompts(family))
    assert_equal_to_truth(answers, truth(family))
    longest = len(PROMPT_LENGTHS) - 1
    chunks = [plan for plan in serving.plans if longest in plan.seqs[plan.decode_count :]]
    assert len(chunks) > 900 // step_tokens, "the longest prompt was not cut"


def test_preemption_changes_nothing(family):
    serving = Serving(family, memory_bytes=tight_memory(family, spare_pages=20), step_tokens=400)
    answers = serving.run(prompts(family)[::-1])
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"
    assert_equal_to_truth(answers, truth(family)[::-1])


def test_memory_that_was_used_before_changes_nothing(family):
    """Three rounds through an arena that holds little more than the longest: pages and slots of every kind
    come back, full of NaN, in other hands."""
    serving = Serving(family, memory_bytes=tight_memory(family, spare_pages=4), step_tokens=300)
    everything = truth(family)
    short = [one for one in everything if len(one.prompt) < 100]
    seen_pages: list[int] = []
    for round_prompts in (everything[3:4], short, everything[4:], short):
        first = len(serving.plans)
        assert_equal_to_truth(serving.run([one.prompt for one in round_prompts]), round_prompts)
        seen_pages += {int(page) for plan in serving.plans[first:] for page in plan.table_writes[2]}
    assert len(set(seen_pages)) < len(seen_pages), "no page was used twice"


def test_pad_rows_change_nothing(family):
    serving = Serving(family, pad_decode_to=8)
    assert_equal_to_truth(serving.run(prompts(family), stagger_steps=3), truth(family))


def test_everything_at_once_changes_nothing(family):
    """Small chunks, PAD rows, staggered arrivals, priorities that turn the queue around, sampled company
    that is penalised and asks for logprobs, and memory that is short."""
    company = SamplingParams(
        temperature=1.3, top_p=0.9, seed=5, frequency_penalty=0.5, logprobs=3, max_tokens=40, ignore_eos=True
    )
    everything = truth(family)[::-1]
    serving = Serving(family, memory_bytes=tight_memory(family, spare_pages=6), step_tokens=100, pad_decode_to=6)
    guests = [[7, 8, 9] * 30, [11] * 20, [400, 3]]
    samplings = [GREEDY] * len(everything) + [company] * len(guests)
    answers = serving.run(
        [*prompts(family)[::-1], *guests], samplings, stagger_steps=2, priorities=[3, 9, 2, 1, 0, 0, 1, 2]
    )
    assert_equal_to_truth(answers[: len(everything)], everything)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"
    for answer in answers[len(everything) :]:
        assert len(answer.tokens) == len(answer.logprobs) == 40
