"""The sampler against its dull twin, and its promises one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from tests.fixtures.far_memory import far_memory
from tests.unit.runner import dull_sampler
from weft.request import SamplingParams
from weft.runner import filters
from weft.runner.sampler import Sampled, Sampler

VOCAB = 97
PROMPT = [3, 3, 14, 60]


@pytest.fixture(autouse=True, params=["seen", "remote"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every promise is kept both ways: as on a CPU, and as on a device that nobody looks at."""
    with far_memory(request.param == "remote"):
        yield


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def sample_rows(
    logits: np.ndarray,
    samplings: list[SamplingParams],
    *,
    prompt: list[int] = PROMPT,
    output: list[int] | None = None,
    seeds: list[int] | None = None,
    stop_ids: tuple[int, ...] = (),
) -> Sampled:
    output = output or []
    sampler = Sampler(len(samplings), logits.shape[1])
    for row, sampling in enumerate(samplings):
        seed = seeds[row] if seeds else row
        sampler.admit(row, ids(*prompt, *output), len(prompt), sampling, seed, stop_ids)
    rows = np.arange(len(samplings))
    positions = np.full(len(samplings), len(prompt) + len(output))
    return sampler.sample(torch.from_numpy(logits.astype(np.float32)), rows, positions)


def noisy(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * scale).astype(np.float32)


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=VOCAB),
    SamplingParams(top_k=10 * VOCAB),
    SamplingParams(top_k=-1),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=9, top_p=0.7, min_p=0.05, temperature=1.7),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(repetition_penalty=0.7, temperature=0.0),
    SamplingParams(presence_penalty=1.5, frequency_penalty=-0.4),
    SamplingParams(frequency_penalty=2.0, top_k=20),
    SamplingParams(logit_bias={5: 100.0}),
    SamplingParams(logit_bias={5: -100.0, 6: 3.0}, top_p=0.9),
    SamplingParams(min_tokens=8),
    SamplingParams(min_tokens=2, temperature=0.0),
    SamplingParams(allowed_token_ids=(5, 8, 5, 70)),
    SamplingParams(allowed_token_ids=tuple(range(40)), temperature=0.0, repetition_penalty=1.3),
    SamplingParams(banned_sequences=tuple((token,) for token in range(0, VOCAB, 2))),
    SamplingParams(banned_sequences=((70, 2, 11), (2, 12), (13,), (2, 2, 14)), top_k=9),
    SamplingParams(banned_sequences=((2, 5), (8,)), allowed_token_ids=(5, 8, 9, 10), temperature=0.0),
]


def test_every_parameter_gives_the_token_of_the_dull_twin():
    samplings = SAMPLINGS * 8
    logits = noisy(len(samplings))
    output = [14, 14, 70, 2]
    seeds = [s * 7919 - 40 for s in range(len(samplings))]
    found = sample_rows(logits, samplings, output=output, seeds=seeds, stop_ids=(1, 2, 50)).tokens
    expected = [
        dull_sampler.choose(row, sampling, PROMPT, output, seed, (1, 2, 50))
        for row, sampling, seed in zip(logits, samplings, seeds, strict=True)
    ]
    assert found.tolist() == expected
    # The control: another position draws other tokens.
    shifted = sample_rows(logits, samplings, output=[*output, 2], seeds=seeds, stop_ids=(1, 2, 50)).tokens
    assert (shifted != found).mean() > 0.3


def test_the_company_in_a_batch_changes_no_token():
    samplings = SAMPLINGS * 3
    logits = noisy(len(samplings), seed=1)
    together = sample_rows(logits, samplings, seeds=list(range(len(samplings)))).tokens
    for i, sampling in enumerate(samplings):
        alone = sample_rows(logits[i : i + 1], [sampling], seeds=[i]).tokens
        assert alone[0] == together[i]


def test_rows_are_picked_by_number_and_not_by_place():
    sampler = Sampler(8, VOCAB)
    sampler.admit(6, ids(1, 2), 2, SamplingParams(logit_bias={40: 100.0}), 1, ())
    sampler.admit(2, ids(1, 2), 2, SamplingParams(temperature=0.0, logit_bias={41: 100.0}), 1, ())
    logits = torch.zeros(2, VOCAB)
    assert sampler.sample(logits, np.array([6, 2]), np.array([2, 2])).tokens.tolist() == [40, 41]


def test_a_banned_sequence_is_refused_at_its_last_token_alone():
    logits = np.zeros((1, 10), np.float32)
    logits[0, 4], logits[0, 5] = 2.0, 1.0
    banned = SamplingParams(temperature=0.0, banned_sequences=((4, 4, 4), (6, 5)))
    sampler = Sampler(1, 10)
    sampler.admit(0, ids(4, 4, 4), 3, banned, 0, ())  # the prompt ends in it, which does not count
    assert sampler.needs_previous_token(np.array([0]))
    answer = [
        int(sampler.sample(torch.from_numpy(logits.copy()), np.array([0]), np.array([3 + i])).tokens[0])
        for i in range(6)
    ]
    assert answer == [4, 4, 5, 4, 4, 5]
    # A sequence that was preempted comes back with its tokens.
    sampler.clear(0)
    sampler.admit(0, ids(4, 4, 4, 4, 4), 3, banned, 0, ())
    back = sampler.sample(torch.from_numpy(logits.copy()), np.array([0]), np.array([5]))
    assert back.tokens.tolist() == [5]
    sampler.admit(0, ids(4, 4, 4), 3, SamplingParams(banned_sequences=((4,),)), 0, ())
    assert not sampler.needs_previous_token(np.array([0]))


def test_an_allowed_token_is_chosen_even_where_every_one_is_banned_at_that_point():
    """A dead end of two limits: the answer stays within the allowed tokens."""
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(6,), banned_sequences=((6, 6),))
    logits = noisy(1, 10)
    assert sample_rows(logits, [sampling], output=[6]).tokens.tolist() == [6]
    drawn = msgspec.structs.replace(sampling, temperature=1.0)
    assert sample_rows(logits, [drawn], output=[6]).tokens.tolist() == [6]
    # The control: without the list, another token is chosen.
    free = msgspec.structs.replace(sampling, allowed_token_ids=())
    assert sample_rows(logits, [free], output=[6]).tokens.tolist() != [6]


def test_a_cleared_row_keeps_nothing_of_the_sequence_that_left():
    sampler = Sampler(1, VOCAB)
    heavy = SamplingParams(logit_bias={40: 100.0}, repetition_penalty=3.0, logprobs=3, temperature=2.0, min_tokens=9)
    sampler.admit(0, ids(7, 7), 2, heavy, 5, (8,))
    sampler.clear(0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    after_clear = sampler.sample(logits.clone(), np.array([0]), np.array([2]))
    assert after_clear.tokens.tolist() == [7]
    assert after_clear.logprobs == {}
    sampler.admit(0, ids(7, 7), 2, SamplingParams(temperature=0.0), 5, (8,))
    assert sampler.sample(logits.clone(), np.array([0]), np.array([2])).tokens.tolist() == [7]


def test_frequencies_follow_the_filtered_distribution():
    draws = 4000
    vocab = 12
    logits = noisy(1, vocab, scale=1.2, seed=3)[0]
    for sampling in (
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
    ):
        p = dull_sampler.distribution(logits.astype(np.float64), sampling)
        found = sample_rows(np.tile(logits, (draws, 1)), [sampling] * draws).tokens
        counts = np.bincount(found, minlength=vocab)
        assert counts[p == 0].sum() == 0
        expected = p[p > 0] * draws
        chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
        degrees = (p > 0).sum() - 1
        assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_positions_of_one_seed_and_neighbouring_seeds_draw_independently():
    draws = 4000
    logits = np.zeros((draws, 10), np.float32)
    sampler = Sampler(1, 10)
    sampler.admit(0, ids(1), 1, SamplingParams(), -3, ())
    along = sampler.sample(torch.from_numpy(logits), np.zeros(draws, np.int64), np.arange(draws)).tokens
    across = sample_rows(logits, [SamplingParams()] * draws).tokens
    for found in (along, across):
        pairs = np.bincount(found[:-1] * 10 + found[1:], minlength=100)
        expected = (draws - 1) / 100
        assert ((pairs - expected) ** 2 / expected).sum() < 99 + 5 * math.sqrt(2 * 99)


def test_the_same_seed_draws_the_same_token_in_another_row_at_another_time():
    logits = noisy(1, seed=4)
    first = sample_rows(logits, [SamplingParams()], seeds=[123]).tokens[0]
    other = sample_rows(np.vstack([noisy(3, seed=5), logits]), [SamplingParams()] * 4, seeds=[9, 8, 7, 123])
    assert other.tokens[3] == first
    assert len({int(sample_rows(logits, [SamplingParams()], seeds=[s]).tokens[0]) for s in range(30)}) > 3


def test_no_filter_ever_leaves_nothing():
    strict = SamplingParams(temperature=1e-4, top_k=1, top_p=1e-12, min_p=1.0)
    logits = np.array([[0.0, 5.0, 1.0], [2.0, 2.0, 2.0], [-1e30, -1e30, -1e30]], np.float32)
    found = sample_rows(logits, [strict] * 3).tokens
    assert found[0] == 1
    assert all(0 <= token < 3 for token in found)


def test_tokens_that_tie_share_their_fate():
    logits = np.array([[1.0, 0.0, 1.0, -2.0, 1.0]], np.float32)
    for sampling in (SamplingParams(top_k=1), SamplingParams(top_p=0.01), SamplingParams(min_p=1.0)):
        seen = {int(sample_rows(logits, [sampling], seeds=[s]).tokens[0]) for s in range(60)}
        assert seen == {0, 2, 4}


def test_everything_masked_still_gives_a_token():
    sampling = SamplingParams(min_tokens=1, temperature=1.0)
    found = sample_rows(np.zeros((1, 3), np.float32), [sampling], prompt=[0], stop_ids=(0, 1, 2)).tokens
    assert 0 <= found[0] < 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_neither_raises_nor_spreads(bad):
    logits = noisy(4, seed=6)
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9),
        SamplingParams(logprobs=2),
    ]
    clean = sample_rows(logits, samplings).tokens
    for row in range(4):
        broken = logits.copy()
        broken[row] = bad
        found = sample_rows(broken, samplings).tokens
        assert all(0 <= token < VOCAB for token in found)
        assert [t for i, t in enumerate(found) if i != row] == [t for i, t in enumerate(clean) if i != row]


def test_a_nan_logit_is_never_chosen():
    logits = np.full((2, 5), math.nan, np.float32)
    logits[:, 3] = -7.0
    found = sample_rows(logits, [SamplingParams(temperature=0.0), SamplingParams(logprobs=1)])
    assert found.tokens.tolist() == [3, 3]
    assert found.logprobs[1].logprob == pytest.approx(0.0)


def test_bias_of_100_forces_and_of_minus_100_bans():
    logits = noisy(2, seed=7)
    best = int(logits[1].argmax())
    for seed in range(20):
        found = sample_rows(
            logits,
            [SamplingParams(logit_bias={11: 100.0}), SamplingParams(logit_bias={best: -100.0})],
            seeds=[seed, seed],
        ).tokens
        assert found[0] == 11
        assert found[1] != best


def test_stop_ids_are_masked_until_min_tokens_are_made_and_not_after():
    logits = np.zeros((1, 6), np.float32)
    logits[0, 4] = 9.0
    sampling = SamplingParams(temperature=0.0, min_tokens=3)
    for made in range(6):
        token = sample_rows(logits, [sampling], output=[1] * made, stop_ids=(4, 5000)).tokens[0]
        assert (token == 4) == (made >= 3)


def test_repetition_counts_the_prompt_while_presence_and_frequency_do_not():
    logits = np.array([[2.0, 1.9, 0.0]], np.float32)
    repeated = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    assert sample_rows(logits, [repeated], prompt=[0]).tokens[0] == 1
    for sampling in (
        SamplingParams(temperature=0.0, presence_penalty=2.0),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
    ):
        assert sample_rows(logits, [sampling], prompt=[0]).tokens[0] == 0
        assert sample_rows(logits, [sampling], prompt=[0], output=[0]).tokens[0] == 1


def test_penalties_count_what_the_sampler_itself_made_as_after_a_resume():
    sampling = SamplingParams(temperature=0.0, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1)
    logits = noisy(1, scale=1.0, seed=8)
    sampler = Sampler(1, VOCAB)
    sampler.admit(0, ids(*PROMPT), len(PROMPT), sampling, 0, ())
    output: list[int] = []
    for step in range(150):
        expected = dull_sampler.choose(logits[0], sampling, PROMPT, output, 0)
        resumed = sample_rows(logits, [sampling], output=output).tokens[0] if step % 20 == 0 else expected
        token = sampler.sample(torch.from_numpy(logits.copy()), np.array([0]), np.array([len(PROMPT) + step])).tokens[0]
        assert token == expected == resumed
        output.append(int(token))
    assert len(set(output)) > 40


def test_logprobs_are_of_the_raw_logits_with_rank_and_the_best_first():
    logits = noisy(3, seed=9)
    samplings = [
        SamplingParams(logprobs=4, temperature=0.2, logit_bias={17: 100.0}, top_k=2),
        SamplingParams(),
        SamplingParams(logprobs=0, temperature=0.0),
    ]
    found = sample_rows(logits, samplings)
    assert set(found.logprobs) == {0, 2}
    reference = logits.astype(np.float64)
    reference -= np.log(np.exp(reference).sum(axis=1, keepdims=True))
    first = found.logprobs[0]
    assert first.token == found.tokens[0] == 17
    assert first.logprob == pytest.approx(reference[0, 17], abs=1e-5)
    assert first.rank == (logits[0] > logits[0, 17]).sum()
    order = np.argsort(-reference[0])[:4]
    assert [token for token, _ in first.top] == order.tolist()
    assert [value for _, value in first.top] == pytest.approx(reference[0, order].tolist(), abs=1e-5)
    assert found.logprobs[2].top == []
    assert found.logprobs[2].rank == 0


def test_asking_for_logprobs_changes_no_token():
    logits = noisy(len(SAMPLINGS), seed=10)
    plain = sample_rows(logits, SAMPLINGS).tokens
    asked = [
        SamplingParams(**{f: getattr(s, f) for f in s.__struct_fields__ if f != "logprobs"}, logprobs=2)
        for s in SAMPLINGS
    ]
    assert sample_rows(logits, asked).tokens.tolist() == plain.tolist()


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 4.0])
def test_a_large_vocabulary_takes_the_same_token_from_few_candidates_as_from_all(scale, monkeypatch):
    vocab = 9000
    samplings = [
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.3, min_p=0.02),
        SamplingParams(top_k=5000, top_p=0.5),
        SamplingParams(top_k=300, top_p=0.95),
        SamplingParams(),
        SamplingParams(top_k=8999),
        SamplingParams(top_k=4096, top_p=0.9),
    ]
    logits = noisy(len(samplings), vocab, scale, seed=11)
    logits[2] = logits[2].round()
    found = sample_rows(logits, samplings).tokens
    expected = [
        dull_twin_fast(row, sampling, seed) for seed, (row, sampling) in enumerate(zip(logits, samplings, strict=True))
    ]
    assert found.tolist() == expected
    monkeypatch.setattr(filters, "_CANDIDATES_MIN", vocab)
    monkeypatch.setattr(filters, "_CANDIDATES_MAX", vocab)
    monkeypatch.setattr(filters, "_BLOCK_ELEMENTS", vocab * 3)
    assert sample_rows(logits, samplings).tokens.tolist() == expected


def dull_twin_fast(logits: np.ndarray, sampling: SamplingParams, seed: int) -> int:
    """``dull_sampler.choose`` without its square in the vocabulary: mass above a value by a sorted sum."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    if sampling.top_k > 0:
        p = np.where(p >= np.sort(p)[::-1][sampling.top_k - 1], p, 0.0)
    p /= p.sum()
    if sampling.top_p < 1.0:
        values, counts = np.unique(p, return_counts=True)
        above = (values * counts)[::-1].cumsum()[::-1] - values * counts
        p = np.where(above[np.searchsorted(values, p)] < sampling.top_p, p, 0.0)
    p = np.where(p >= sampling.min_p * p.max(), p, 0.0)
    target = dull_sampler.uniform(seed, len(PROMPT)) * p.sum()
    return int(np.searchsorted(np.cumsum(p), target, side="right"))


def test_filters_keep_what_transformers_keeps():
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = noisy(1, seed=12)
    sampling = SamplingParams(temperature=1.5, top_k=40, top_p=0.85, min_p=0.03)
    warpers = LogitsProcessorList(
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(40), TopPLogitsWarper(0.85), MinPLogitsWarper(0.03)]
    )
    kept = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)).isfinite()[0].numpy()
    assert ((dull_sampler.distribution(logits[0].astype(np.float64), sampling) > 0) == kept).all()
    seen = set(sample_rows(np.tile(logits, (3000, 1)), [sampling] * 3000).tokens.tolist())
    assert seen == set(np.flatnonzero(kept).tolist())
