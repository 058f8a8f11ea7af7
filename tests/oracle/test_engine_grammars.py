"""Answers that follow a grammar, from random weights: always valid, and nobody else's answer changes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from tests.oracle.serving import (
    DECODE_STEPS,
    TOLERANCE,
    Answer,
    Serving,
    assert_equal_to_truth,
    directory,
    loaded,
    tight_memory,
    truth,
)
from weft.engine.grammars import GrammarCompiler
from weft.request import Grammar, Request, SamplingParams
from weft.runner.grammars import Constrained, GrammarRows
from weft.text.grammars import choice_grammar, json_grammar, regex_grammar
from weft.text.tokenizer import Tokenizer

FAMILY = "qwen3_5"
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "likes"],
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "<|im_end|>"]}, "maxItems": 2},
    },
}
PERSON = json_grammar(SCHEMA, field="f", whitespace=" ")
"""At most 110 bytes, so at most so many tokens."""
# Long enough for the sequence to be preempted in the middle of it.
LONG = regex_grammar(r"[a-z ]{40}-[0-9]{20}", field="f")


def serving(**more: Any) -> Serving:
    made = Serving(FAMILY, **more)
    tokenizer = directory(FAMILY) / "tokenizer.json"
    made.core.grammars = GrammarCompiler(
        tokenizer.read_text, loaded(FAMILY).generation_defaults.eos_ids, made.core.vocab_size
    )
    return made


def constrained(grammar: Grammar, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 120, "grammar": grammar, **more})


def text_of(answer: Answer) -> str:
    assert answer.finish_reason == "stop"
    return Tokenizer.load(directory(FAMILY)).decode(answer.tokens[:-1], skip_special_tokens=False)


def prompts() -> list[list[int]]:
    return [one.prompt for one in truth(FAMILY)]


def test_every_answer_under_a_schema_is_json_that_is_valid() -> None:
    samplings = [constrained(PERSON), *(constrained(PERSON, temperature=1.5, seed=seed) for seed in range(4))]
    answers = serving().run(prompts(), samplings)
    for answer in answers:
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)


def test_answers_match_a_regex_and_choices_are_chosen_whatever_else_is_asked() -> None:
    heavy = {
        "temperature": 1.3,
        "seed": 1,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "logit_bias": {5: 100.0},
    }
    samplings = [
        constrained(regex_grammar("[a-f]{5}x?", field="f"), **heavy),
        constrained(choice_grammar(["yes", "no"], field="f"), **heavy),
        constrained(choice_grammar(["yes"], field="f"), min_tokens=100),
    ]
    answers = serving().run(prompts()[:3], samplings)
    assert re.fullmatch("[a-f]{5}x?", text_of(answers[0]))
    assert text_of(answers[1]) in ("yes", "no")
    assert text_of(answers[2]) == "yes", "where the grammar is over, the minimum gives way"


def test_a_minimum_holds_as_long_as_the_grammar_lets_it() -> None:
    grammar = regex_grammar("[ab]+", field="f")
    [answer] = serving().run(prompts()[:1], constrained(grammar, min_tokens=30, temperature=1.0, seed=3))
    assert len(answer.tokens) > 30
    assert re.fullmatch("[ab]+", text_of(answer))


def test_constrained_neighbours_change_no_answer() -> None:
    truths = truth(FAMILY)
    free = SamplingParams(temperature=0.0, max_tokens=DECODE_STEPS, ignore_eos=True)
    mixed = [prompt for prompt in prompts() for _ in range(2)]
    samplings = [free, constrained(PERSON)] * len(truths)
    answers = serving(pad_decode_to=4).run(mixed, samplings, stagger_steps=1)
    assert_equal_to_truth(answers[::2], truths)
    for answer in answers[1::2]:
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


def test_a_mask_on_a_neighbours_row_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each mask one row further."""
    real = GrammarRows._constrained
    monkeypatch.setattr(
        GrammarRows,
        "_constrained",
        lambda self, rows: [((at + 1) % len(rows), matcher) for at, matcher in real(self, rows)],
    )
    free = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = serving().run(prompts()[:2], [free, constrained(PERSON, max_tokens=8)])
    assert answers[0].tokens != truth(FAMILY)[0].tokens[:8]


def test_preemption_changes_no_constrained_answer() -> None:
    longest_first = prompts()[::-1]
    samplings = [constrained(LONG, temperature=1.2, seed=seed) for seed in range(len(longest_first))]
    alone = serving()
    expected = [
        alone.run([prompt], sampling)[0].tokens for prompt, sampling in zip(longest_first, samplings, strict=True)
    ]
    tight = serving(memory_bytes=tight_memory(FAMILY, spare_pages=20), step_tokens=400)
    answers = tight.run(longest_first, samplings)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"
    assert [answer.tokens for answer in answers] == expected
    for answer in answers:
        assert re.fullmatch(r"[a-z ]{40}-[0-9]{20}", text_of(answer))


def test_a_sequence_that_resumes_without_its_tokens_would_break_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of preemption: the matcher begins again from the start."""
    real = GrammarRows.admit
    monkeypatch.setattr(
        GrammarRows, "admit", lambda self, row, grammar, generated: real(self, row, grammar, generated[:0])
    )
    samplings = [constrained(LONG, temperature=1.2, seed=seed) for seed in range(len(prompts()))]
    tight = serving(memory_bytes=tight_memory(FAMILY, spare_pages=20), step_tokens=400)
    answers = tight.run(prompts()[::-1], samplings)
    assert not all(re.fullmatch(r"[a-z ]{40}-[0-9]{20}", text_of(answer)) for answer in answers)


def test_each_of_several_answers_has_a_grammar_of_its_own() -> None:
    made = serving()
    sampling = constrained(PERSON, n=3, temperature=1.3, seed=4)
    made.core.submit(Request(request_id="many", prompt_tokens=prompts()[1], sampling=sampling))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while made.core.has_work:
        for event in made.core.step():
            tokens[event.index] += event.tokens
    texts = {text_of(Answer(tokens=found, finish_reason="stop")) for found in tokens.values()}
    assert len(texts) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_logprobs_of_a_constrained_answer_are_those_of_the_model() -> None:
    [answer] = serving().run(prompts()[2:3], constrained(PERSON, logprobs=3))
    raw = answer.logits.log_softmax(dim=-1)
    for step, found in enumerate(answer.logprobs):
        assert found.token == answer.tokens[step]
        assert found.logprob == pytest.approx(float(raw[step, found.token]), abs=TOLERANCE)
    assert any(found.rank > 0 for found in answer.logprobs), "the grammar never said no"


def test_a_grammar_that_gives_up_ends_its_own_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Constrained.advance

    def give_up(self: Constrained, tokens: np.ndarray) -> dict[int, str]:
        failures = real(self, tokens)
        return {**failures, **{at: "too complex" for at, _ in self._rows}}

    monkeypatch.setattr(Constrained, "advance", give_up)
    made = serving()
    free = SamplingParams(temperature=0.0, max_tokens=DECODE_STEPS, ignore_eos=True)
    bad, good = made.run(prompts()[:2], [constrained(PERSON), free])
    assert (bad.tokens, bad.finish_reason) == ([], "error")
    assert good.tokens == truth(FAMILY)[1].tokens


def test_logits_that_are_nan_still_make_a_token_of_the_grammar() -> None:
    made = serving()
    logits = made.executor.model.logits
    made.executor.model.logits = lambda *args: torch.full_like(  # type: ignore[method-assign]
        logits(*args), float("nan")
    )
    try:
        [answer] = made.run(prompts()[:1], constrained(choice_grammar(["yes", "no"], field="f")))
    finally:
        made.executor.model.logits = logits  # type: ignore[method-assign]
    assert text_of(answer) in ("yes", "no")
