"""Sampling by one kernel: the tokens of the dull twin, and of torch's operators, with every filter."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.fixtures.far_memory import far_memory
from tests.unit.runner import dull_sampler
from weft.request import SamplingParams
from weft.runner import sampling_kernels
from weft.runner.sampler import Sampler
from weft.runner.sampling_kernels import CHOOSE
from weft.tensor import gpu

VOCAB = 4397
"""More than one block of the kernel, and no multiple of anything."""
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=VOCAB),
    SamplingParams(top_k=-1),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=900, top_p=0.7, min_p=0.01, temperature=1.7),
    SamplingParams(logit_bias={4299: 100.0}, logprobs=3),
    SamplingParams(min_tokens=3, temperature=0.0),
    SamplingParams(frequency_penalty=2.0, top_k=20),
]


def sampled(
    logits: np.ndarray, samplings: list[SamplingParams], device: torch.device, *, first_seed: int = 0
) -> list[int]:
    with far_memory():
        sampler = Sampler(len(samplings), logits.shape[1], device)
    for row, sampling in enumerate(samplings):
        sampler.admit(row, np.array([3, 14], np.int32), 2, sampling, first_seed + row, (1, 2))
    rows = np.arange(len(samplings))
    made = sampler.sample(torch.from_numpy(logits.astype(np.float32)).to(device), rows, np.full(len(rows), 2))
    return made.tokens.tolist()


def noisy(rows: int, *, seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).astype(np.float32)


def by_torch(logits: np.ndarray, samplings: list[SamplingParams], device: torch.device) -> list[int]:
    gpu.choose("torch")
    made = sampled(logits, samplings, device)
    gpu.choose("triton")
    return made


def test_the_kernel_draws_the_token_of_the_dull_twin(device: torch.device) -> None:
    logits = noisy(len(SAMPLINGS), seed=1)
    found = sampled(logits, SAMPLINGS, device)
    assert found == by_torch(logits, SAMPLINGS, device)
    small = logits[:, :201].copy()  # the twin's time is the square of the vocabulary
    samplings = [one for one in SAMPLINGS if not one.logit_bias]
    expected = [
        dull_sampler.choose(row, one, [3, 14], [], seed, (1, 2))
        for seed, (row, one) in enumerate(zip(small, samplings, strict=False))
    ]
    assert sampled(small[: len(samplings)], samplings, device) == expected
    # The control: other numbers, other tokens.
    assert (
        sum(a != b for a, b in zip(found, sampled(noisy(len(SAMPLINGS), seed=2), SAMPLINGS, device), strict=True)) > 8
    )


@pytest.mark.parametrize("temperature", [1.0, 100.0])
def test_masses_are_added_up_inside_of_a_program(
    temperature: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,397 tokens with a mass a handful reach memory at the first level: one for each digit of a part."""
    logits = noisy(1, seed=8)
    logits -= logits.max() + 2
    logits[0, 70] = 0.0
    samplings = [SamplingParams(top_p=0.9, temperature=temperature)]

    def first_additions() -> int:
        """The finer levels add once in a part."""
        added: list[int] = []
        if gpu.INTERPRETED:
            memory = interpreter._interpreter  # type: ignore[attr-defined]
            patch.setattr(
                interpreter,
                "_interpreter",
                SimpleNamespace(
                    load=memory.load,
                    store=memory.store,
                    atomic_rmw=lambda *of: (added.append(int(of[3].sum())), memory.atomic_rmw(*of))[1],
                ),
            )
        assert sampled(logits, samplings, device) == wanted
        return sum(added[: -2 * math.ceil(VOCAB / CHOOSE.width)])

    wanted = by_torch(logits, samplings, device)
    with monkeypatch.context() as patch:
        assert first_additions() < 100
    with monkeypatch.context() as patch:  # the control
        patch.setattr(sampling_kernels, "WINDOW", tl.constexpr(0))
        assert not gpu.INTERPRETED or first_additions() > 4000


def test_a_row_draws_the_same_token_alone(device: torch.device) -> None:
    """Alone, a step launches only what that row's filters need."""
    samplings = [SAMPLINGS[at] for at in (0, 1, 4, 8, 11, 12)]
    logits = noisy(len(samplings), seed=3)
    together = sampled(logits, samplings, device)
    assert together == [
        sampled(logits[at : at + 1], samplings[at : at + 1], device, first_seed=at)[0] for at in range(len(samplings))
    ]
    # The control: another seed draws other tokens.
    assert together != [
        sampled(logits[at : at + 1], samplings[at : at + 1], device, first_seed=at + 100)[0]
        for at in range(len(samplings))
    ]


def test_tokens_that_tie_share_their_fate_and_the_best_of_equals_is_the_first(device: torch.device) -> None:
    logits = np.zeros((6, 5), np.float32)
    logits[:] = [1.0, 0.0, 1.0, -2.0, 1.0]
    for sampling in (SamplingParams(top_k=1), SamplingParams(top_p=0.01), SamplingParams(min_p=1.0)):
        assert set(sampled(logits, [sampling] * 6, device)) == {0, 2, 4}
    assert sampled(logits[:1, 1:], [SamplingParams(temperature=0.0)], device) == [1]


def test_a_row_that_is_not_finite_neither_raises_nor_spreads(device: torch.device) -> None:
    logits = noisy(4, seed=6, vocab=301)
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=9, logprobs=2),
    ]
    clean = sampled(logits, samplings, device)
    for broken_rows, bad in (([0, 1], math.nan), ([2, 3], math.nan), ([0, 2], math.inf), ([1, 3], -math.inf)):
        broken = logits.copy()
        broken[broken_rows] = bad
        found = sampled(broken, samplings, device)
        assert all(0 <= token < 301 for token in found)
        assert [found[i] for i in range(4) if i not in broken_rows] == [
            clean[i] for i in range(4) if i not in broken_rows
        ]
    broken[:] = math.nan
    broken[:, 243] = -7.0
    assert sampled(broken, samplings, device) == [243] * 4
