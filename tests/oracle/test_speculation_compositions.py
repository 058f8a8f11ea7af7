"""Speculation with everything that a sequence may have beside it: the text without drafts, to the last bit.

Each case runs an engine without drafts and one with drafts that are right, wrong, and right up to some place.
Cases with a name in quotes are failures that other engines have had with speculation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fixtures.drafters import Kind
from tests.oracle.serving import Answer, Serving, directory
from tests.oracle.test_engine_grammars import LONG, PERSON
from tests.oracle.test_engine_prefix_cache import text
from tests.oracle.test_engine_speculation import Speculating, loaded
from tests.oracle.test_thinking_budget import bounded
from tests.server.scripted_engine import _FreeRows
from weft.engine.grammars import GrammarCompiler
from weft.request import SamplingParams
from weft.speculation.drafter import SOURCES, SourceName
from weft.speculation.speculator import Speculator

KINDS: tuple[Kind, ...] = ("perfect", "random", "adversarial")
NEW_TOKENS = 20


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **fields})


@dataclass(frozen=True)
class Case:
    """``rounds`` runs of the same prompts, the second behind what the first left in the cache."""

    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    grammars: bool = False


CASES = {
    "penalties": Case(sampling={
        "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}),
    "sampled with penalties": Case(sampling={"temperature": 1.0, "seed": 3, "frequency_penalty": 0.9}),
    "logit bias": Case(sampling={"logit_bias": {7: 4.0, 11: -50.0, 300: 2.5}}),
    "logprobs": Case(sampling={"logprobs": 3}),
    "prompt logprobs": Case(sampling={"prompt_logprobs": 2}, run={"stagger_steps": 2}),
    "min_tokens and end tokens": Case(sampling={
        "ignore_eos": False, "min_tokens": 6, "temperature": 1.5, "seed": 5,
        "stop_token_ids": list(range(0, 512, 9))}),
    "a grammar": Case(grammars=True, sampling={"grammar": LONG, "max_tokens": 40, "ignore_eos": False}),
    "a budget of reasoning": Case(grammars=True, sampling={
        "grammar": bounded(17).grammar, "max_tokens": 40, "ignore_eos": False}),
    "a grammar, sampled with penalties": Case(grammars=True, sampling={
        "grammar": PERSON, "max_tokens": 40, "temperature": 1.0, "seed": 2, "presence_penalty": 0.5,
        "ignore_eos": False}),
    "min_p, top_k": Case(sampling={"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": 9}),
    "priorities and arrivals between verify runs": Case(run={"stagger_steps": 3, "priorities": (2, 1, 0)}),
    "prefix hits": Case(engine={"cache": True}, rounds=2),
    "'prefix cache and drafts give 20 % accuracy'": Case(
        engine={"cache": True, "snapshots": "every:64", "grid_tokens": 16}, rounds=3,
        run={"boundaries": (16, 64)}),
    "compressed states": Case(engine={"cache": True, "compress": True, "memory_bytes": 700_000}, rounds=2),
    "'a preempted sequence resumes behind a stale state'": Case(
        engine={"memory_bytes": 360_000, "max_model_len": 192}, sampling={"max_tokens": 40}),
    "overlap": Case(engine={"overlap": True}),
    "padded decodes": Case(engine={"pad_decode_to": 5}),
    "chunks of 64 beside verify runs": Case(engine={"step_tokens": 80}, run={"stagger_steps": 2}),
    "KV in int8": Case(engine={"kv_dtype": "int8"}),
    "KV in fp8, states in bfloat16": Case(engine={"kv_dtype": "fp8", "state_dtype": "bfloat16"}),
    "states in float16": Case(engine={"state_dtype": "float16"}),
}  # fmt: skip


def run(case: Case, serving: Any, kind: Kind | None, truth: list[list[Answer]]) -> list[list[Answer]]:
    prompts, rounds = [text(length, length) for length in (5, 40, 150)], []
    for number in range(case.rounds):
        if kind is None:
            rounds.append(serving.run(prompts, sampling(**case.sampling), **case.run))
        else:
            rounds.append(serving.run(kind, prompts, truth[number], sampling(**case.sampling), **case.run))
    return rounds


def grammar_compiler(vocab_size: int) -> GrammarCompiler:
    tokenizer = directory("qwen3_5") / "tokenizer.json"
    return GrammarCompiler(tokenizer.read_text, loaded("qwen3_5").generation_defaults.eos_ids, vocab_size)


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_nothing_with(name: str) -> None:
    case = CASES[name]
    plain = Serving("qwen3_5", model=loaded("qwen3_5"), **case.engine)
    if case.grammars:
        plain.core.grammars = grammar_compiler(plain.core.vocab_size)
    truth = run(case, plain, None, [])
    accepted = 0
    for kind in KINDS:
        speculating = Speculating("qwen3_5", **case.engine)
        if case.grammars:
            speculating.serving.core.grammars = plain.core.grammars
        for answers, expected in zip(run(case, speculating, kind, truth), truth, strict=True):
            for answer, one in zip(answers, expected, strict=True):
                assert answer.tokens == one.tokens, kind
                assert answer.finish_reason == one.finish_reason
                assert answer.logprobs == one.logprobs
                assert answer.prompt_logprobs == one.prompt_logprobs
                assert float((answer.logits - one.logits).abs().max()) == 0.0, kind
        accepted += speculating.drafter.accepted
    assert accepted > 20


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "mtp"])
def test_each_source_changes_nothing(source: SourceName) -> None:
    """By itself, on a prompt that comes twice. The head has tests of its own."""
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 40}
    if source == "grammar":
        fields |= {"grammar": PERSON, "ignore_eos": False}
    drafter = Speculator((source,), costs=_FreeRows())
    plain, drafting = (Serving("qwen3_5", model=loaded("qwen3_5"), cache=True, drafter=one) for one in (None, drafter))
    plain.core.grammars = drafting.core.grammars = grammar_compiler(plain.core.vocab_size)
    drafter._tree = drafting.core.memory.prefix_tree
    prompts = [text(40, 40)]
    for _ in range(2):
        truth = plain.run(prompts, sampling(**fields))
        guesses = [[token if at % 6 else 7 for at, token in enumerate(one.tokens)] for one in truth]
        answers = drafting.run(prompts, sampling(**fields), predictions=guesses)
        for answer, one in zip(answers, truth, strict=True):
            assert answer.tokens == one.tokens
            assert answer.finish_reason == one.finish_reason
            assert float((answer.logits - one.logits).abs().max()) == 0.0
    assert drafter.stats().sources[source].accepted > 20


def test_the_cases_do_what_they_say() -> None:
    short = CASES["'a preempted sequence resumes behind a stale state'"]
    preempted = run(short, Serving("qwen3_5", model=loaded("qwen3_5"), **short.engine), None, [])
    assert sum(answer.preemptions for answer in preempted[0]) > 0
    hits = run(CASES["prefix hits"], Serving("qwen3_5", model=loaded("qwen3_5"), cache=True), None, [])
    assert [answer.cached_tokens > 0 for answer in hits[1]] == [False, False, True]
