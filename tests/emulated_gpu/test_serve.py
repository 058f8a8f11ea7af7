"""A server with ``--device cuda``: answers over HTTP are those of transformers, and nothing is reported."""

from __future__ import annotations

import pytest

from tests.emulated_gpu.engines import SMALL, assert_tokens_of_transformers
from tests.emulated_gpu.sample import ALL, sample
from tests.emulated_gpu.server_factory import FACTORY
from tests.fixtures.checkpoint_families_attention import MORE_FAMILIES, ON_CPUS
from tests.fixtures.checkpoint_families_mamba import MAMBA_FAMILIES
from tests.fixtures.checkpoints import FAMILIES, checkpoint
from tests.server.running import RunningServer

PROMPTS = [
    [7],
    [300, 20, 411],
    *(
        list(range(first, first + length))
        for first, length in (
            (9, 2),
            (50, 17),
            (70, 66),
            (80, 5),
            (90, 80),
            (100, 9),
            (110, 33),
            (120, 8),
            (130, 24),
            (140, 4),
        )
    ),
]
"""Twelve: of one token, over a chunk of 64, and over a step of 72."""


@pytest.mark.parametrize(
    "family", sample([*FAMILIES, *(name for name in MORE_FAMILIES if name not in ON_CPUS), *MAMBA_FAMILIES], 1)
)
def test_prompts_over_http_are_answered_as_by_transformers(family: str) -> None:
    prompts = PROMPTS if ALL else PROMPTS[:2]
    server = RunningServer(FACTORY, SMALL | {"model": str(checkpoint(family))}, {}, "Ctrl-C finishes")
    try:
        assert "cuda:0 (emulated)" in server.output
        made = []
        for prompt in prompts:
            answer = server.post(
                "/v1/completions",
                {
                    "model": "default",
                    "prompt": prompt,
                    "max_tokens": 4,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
            ).json()
            made.append(answer["choices"][0]["token_ids"])
    finally:
        server.stop()
    assert_tokens_of_transformers(family, prompts, made)
