"""A budget of reasoning tokens in the engine: the same tokens alone, in company and preempted. Drafts: see
``test_speculation_compositions``. The markers are the two tokens of the fixture that end nothing.
"""

from __future__ import annotations

from typing import Any

from tests.oracle.serving import directory, tight_memory
from tests.oracle.test_engine_grammars import FAMILY, prompts, serving
from weft.request import SamplingParams
from weft.text.grammars import bounded_reasoning
from weft.text.tokenizer import Tokenizer

START, END = "<|im_start|>", "<|endoftext|>"
BUDGETS = (0, 1, 17, 40)
ANSWER_TOKENS = 24


def bounded(budget: int, **more: Any) -> SamplingParams:
    token_of = Tokenizer.load(directory(FAMILY)).added_id
    grammar = bounded_reasoning(start=START, end=END, opened=True, again=False, token_of=token_of, budget=budget)
    given = {"temperature": 0.0, "max_tokens": budget + 1 + ANSWER_TOKENS, **more}
    return SamplingParams(grammar=grammar, **given)


def alone(sampling: list[SamplingParams]) -> list[list[int]]:
    made = serving()
    return [made.run([prompt], one)[0].tokens for prompt, one in zip(prompts(), sampling, strict=False)]


def reasoned(answers: list[list[int]]) -> list[int]:
    """Return the tokens of each answer before its end marker."""
    end = Tokenizer.load(directory(FAMILY)).added_id(END)
    return [tokens.index(end) for tokens in answers]


def test_the_budget_is_exact_in_company_and_each_answer_is_that_of_the_request_alone() -> None:
    samplings = [bounded(budget) for budget in BUDGETS]
    expected = alone(samplings)
    assert reasoned(expected) == list(BUDGETS)
    answers = serving(pad_decode_to=8).run(prompts()[: len(BUDGETS)], samplings, stagger_steps=1)
    assert [answer.tokens for answer in answers] == expected


def test_preemption_changes_no_token() -> None:
    longest_first = prompts()[::-1]
    samplings = [bounded(50, temperature=1.2, seed=at) for at in range(len(longest_first))]
    made = serving()
    expected = [made.run([prompt], one)[0].tokens for prompt, one in zip(longest_first, samplings, strict=True)]
    tight = serving(memory_bytes=tight_memory(FAMILY, spare_pages=20), step_tokens=400)
    answers = tight.run(longest_first, samplings)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"
    assert [answer.tokens for answer in answers] == expected
    assert max(reasoned(expected)) == 50, "some end by themselves before"
