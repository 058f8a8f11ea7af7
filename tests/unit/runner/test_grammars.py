"""Masks of grammars on logits: on their own rows and no other, whatever the logits are."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.fixtures.constrained import backend, compiler, tokenizer
from weft.engine.grammars import GrammarCompiler
from weft.request import SamplingParams
from weft.runner.grammars import GrammarRows
from weft.runner.sampler import Sampler
from weft.runner.staging import Staging
from weft.text.grammar_limits import parser_limits
from weft.text.grammars import choice_grammar, regex_grammar, text_grammar

TOKENS = compiler().compile(regex_grammar("a", field="f")).token_count
VOCAB = TOKENS + 45
"""Models round their vocabulary up; what the tokenizer does not know is never allowed."""
NOTHING = np.empty(0, np.int32)
END = tokenizer().added_id("<|end|>")


def letters(text: str) -> list[int]:
    return tokenizer().encode(text)


def noisy(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(size=(rows, VOCAB)).astype(np.float32))


def rows_with(**grammars: str) -> GrammarRows:
    """Keyword "r3" = "[ab]" grammars row 3 by that regex."""
    rows = GrammarRows()
    for name, regex in grammars.items():
        rows.admit(int(name[1:]), compiler().compile(regex_grammar(regex, field="f")), NOTHING)
    return rows


def masked(rows: GrammarRows, logits: torch.Tensor, order: np.ndarray) -> None:
    """What a step does to its logits."""
    staging = Staging(torch.device("cpu"))
    staging.begin()
    masks = rows.stage(staging, order)
    staging.send()
    if masks is not None:
        masks.apply(logits)


def advanced(rows: GrammarRows, order: np.ndarray, text: str) -> dict[int, str]:
    constrained = rows.among(order)
    assert constrained is not None
    return constrained.advance(np.array(letters(text), np.int32))


def allowed(logits: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(row > -math.inf)[:, 0].tolist() for row in logits]


def test_only_constrained_rows_change_and_only_what_is_not_allowed() -> None:
    logits, before = noisy(4), noisy(4)
    order = np.array([5, 2, 7, 0])
    rows = rows_with(r2="[ab]", r0="[a-c]x")
    masked(rows, logits, order)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for at, wanted in ((1, "ab"), (3, "abc")):
        expected = sorted(letters(wanted))
        assert allowed(logits)[at] == expected
        assert torch.equal(logits[at, expected], before[at, expected])


def test_masks_that_were_begun_early_are_those_of_the_step() -> None:
    rows, order = rows_with(r0="ab", r1="cd", r2="ef"), np.array([1, 0, 2])
    for wanted in ("cae", "dbf"):
        rows.begin(order)
        logits = noisy(3)
        masked(rows, logits, order)
        tokens = letters(wanted)
        assert allowed(logits) == [[token] for token in tokens]
        assert advanced(rows, order, wanted) == {}


def test_a_row_that_was_cleared_is_free_and_a_new_sequence_begins_anew() -> None:
    rows = rows_with(r0="ab")
    advanced(rows, np.array([0]), "a")
    rows.clear(0)
    logits = noisy(1)
    masked(rows, logits, np.array([0]))
    assert torch.equal(logits, noisy(1))
    rows.admit(0, compiler().compile(regex_grammar("ab", field="f")), NOTHING)
    masked(rows, logits, np.array([0]))
    assert allowed(logits) == [letters("a")]


def test_what_was_made_before_a_preemption_is_read_again() -> None:
    rows = GrammarRows()
    rows.admit(0, compiler().compile(regex_grammar("abcd", field="f")), np.array(letters("abc"), np.int32))
    logits = noisy(1)
    masked(rows, logits, np.array([0]))
    assert allowed(logits) == [letters("d")]


def test_a_token_that_is_not_allowed_is_a_failure_of_its_row_alone() -> None:
    rows, order = rows_with(r0="ab", r1="ab"), np.array([0, 1])
    masked(rows, noisy(2), order)
    failures = advanced(rows, order, "za")
    assert list(failures) == [0]
    assert "cannot follow its grammar" in failures[0]
    logits = noisy(2)
    masked(rows, logits, order)
    assert allowed(logits)[1] == letters("b")


def test_sampling_under_a_grammar_is_sampling_among_what_it_allows() -> None:
    sampler = Sampler(3, VOCAB)
    grammar = compiler().compile(choice_grammar(["a", "b", "c"], field="f"))
    for row in (0, 2):
        sampler.admit(row, NOTHING, 0, SamplingParams(temperature=0.0 if row else 1.0), 9, (), grammar)
    sampler.admit(1, NOTHING, 0, SamplingParams(temperature=0.0), 9, ())
    logits = noisy(3)
    sampled = sampler.sample(logits.clone(), np.array([0, 1, 2]), np.array([0, 0, 0])).tokens
    assert sampled[0] in letters("abc")
    assert sampled[1] == logits[1].argmax()
    assert sampled[2] == max(letters("abc"), key=lambda token: float(logits[2, token]))
    sampler.clear(0)
    sampler.close()


def test_the_end_comes_where_nothing_else_is_left_whatever_the_minimum_and_the_logits() -> None:
    sampler = Sampler(2, VOCAB)
    grammar = compiler().compile(choice_grammar(["a"], field="f"))
    made = np.array(letters("xa"), np.int32)
    sampler.admit(0, made, 1, SamplingParams(min_tokens=10), 1, (END,), grammar)
    sampler.admit(1, made, 1, SamplingParams(temperature=0.0), 1, (END,), grammar)
    logits = noisy(2)
    logits[1] = math.nan
    sampled = sampler.sample(logits, np.array([0, 1]), np.array([2, 2]))
    assert sampled.tokens.tolist() == [END, END]
    assert sampled.failures == {}


class Paced:
    """A compiled grammar whose matchers take ``seconds`` of ``now`` for a token."""

    token_count, step_s = 64, 0.01

    def __init__(self, now: list[float], seconds: float) -> None:
        self.now, self.seconds = now, seconds
        self.consumed = 0

    def matcher(self) -> Paced:
        return self

    def consume_token(self, token: int) -> bool:
        return self.consume_tokens([token])

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.now[0] += self.seconds * len(tokens)
        self.consumed += len(tokens)
        return True


def paced_rows(*seconds: float) -> tuple[GrammarRows, list[Paced]]:
    now = [0.0]
    rows = GrammarRows(clock=lambda: now[0])
    grammars = [Paced(now, one) for one in seconds]
    for row, grammar in enumerate(grammars):
        rows.admit(row, grammar, NOTHING)
    return rows, grammars


def failures_of_steps(rows: GrammarRows, count: int, steps: int) -> tuple[dict[int, str], int]:
    """The failures of the first step that has some, and its number."""
    for step in range(1, steps + 1):
        constrained = rows.among(np.arange(count))
        assert constrained is not None
        failures = constrained.advance(np.zeros(count, np.int32))
        if failures:
            return failures, step
    return {}, steps


def test_a_slow_grammar_ends_its_own_answer_and_no_other() -> None:
    rows, _ = paced_rows(0.0001, 0.04, 0.0001)
    failures, step = failures_of_steps(rows, 3, 100)
    assert list(failures) == [1]
    assert "ms a token; the grammars of a step may take 10 ms (limits.grammar_step_ms)" in failures[1]
    assert 4 < step < 20, "more than one slow token, and less than a second in all"


def test_many_grammars_that_are_a_little_slow_end_together() -> None:
    """Sixteen rows of 4 ms make every step 64 ms longer."""
    rows, _ = paced_rows(*[0.004] * 16, *[0.0001] * 4)
    failures, step = failures_of_steps(rows, 20, 100)
    assert sorted(failures) == list(range(16))
    assert step * 0.064 < 1.0


def test_grammars_of_the_field_never_end_however_many_they_are() -> None:
    """The control: a quarter of a millisecond each, more than the budget of a step in all."""
    rows, _ = paced_rows(*[0.00025] * 64)
    assert failures_of_steps(rows, 64, 500) == ({}, 500)


def test_a_grammar_that_is_slow_for_one_token_goes_on() -> None:
    rows, [slow, _] = paced_rows(0.2, 0.0001)
    assert failures_of_steps(rows, 2, 1) == ({}, 1)
    slow.seconds = 0.0001
    assert failures_of_steps(rows, 2, 200) == ({}, 200)


def test_an_answer_that_resumes_with_a_slow_grammar_is_not_read_to_its_end() -> None:
    rows, [first] = paced_rows(0.01)
    second = Paced(first.now, 0.01)
    rows.admit(1, second, np.zeros(5000, np.int32))
    assert second.consumed < 100
    failures, _ = failures_of_steps(rows, 2, 1)
    assert list(failures) == [1]
    rows.admit(1, quick := Paced(first.now, 0.00001), np.zeros(5000, np.int32))
    assert quick.consumed == 5000
    assert failures_of_steps(rows, 2, 1) == ({}, 1)


def test_an_ambiguous_grammar_meets_the_limit_of_the_parser() -> None:
    """Its work for a token grows with the answer; a grammar with one meaning of each text goes on."""
    made = backend()
    limited = GrammarCompiler(made.to_str, (END,), made.get_vocab_size(), limits=parser_limits(0.001))
    ambiguous, plain = GrammarRows(), GrammarRows()
    for rows, text in ((ambiguous, 'start: s\ns: s s | "a" | '), (plain, 'start: s\ns: s "a" | "a"')):
        rows.admit(0, limited.compile(text_grammar(text, field="f")), NOTHING)
    made_tokens, failures = next(
        (step, found) for step in range(400) if (found := advanced(ambiguous, np.array([0]), "a"))
    )
    assert 100 < made_tokens < 200
    assert "cannot follow its grammar any further" in failures[0]
    assert all(advanced(plain, np.array([0]), "a") == {} for _ in range(400))
