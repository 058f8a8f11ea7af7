"""Pooled prompts on a GPU: the rows that a CPU pools, beside decodes that replay graphs, and no report."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import GREEDY, started
from tests.fixtures.checkpoints import checkpoint
from weft.api import Engine
from weft.engine.engine import EngineCore
from weft.request import Pooling, Request, SamplingParams

# The third one is longer than a step, and its mean begins in the first of two.
PROMPTS = [[7], list(range(3, 43)), list(range(5, 105)), [300, 20, 411, 5, 123]]
POOLINGS = [Pooling(), Pooling(kind="mean"), Pooling(kind="mean", skip=40), Pooling(tokens=(5, 9))]
NO_ANSWER = SamplingParams(max_tokens=0, temperature=0.0)


def pooled(core: EngineCore, name: str) -> tuple[list[np.ndarray], list[int]]:
    """What is pooled of each prompt, and the answer to another one that runs beside them."""
    core.submit(Request(request_id=name, prompt_tokens=[9, 9, 8], sampling=GREEDY))
    for at, (prompt, pooling) in enumerate(zip(PROMPTS, POOLINGS, strict=True)):
        core.submit(Request(request_id=f"{name}{at}", prompt_tokens=prompt, sampling=NO_ANSWER, pooling=pooling))
    rows: dict[str, np.ndarray] = {}
    tokens: list[int] = []
    while core.has_work:
        for event in core.step():
            if event.pooled is not None:
                rows[event.request_id] = np.frombuffer(event.pooled, np.float32)
            tokens += event.tokens
        if core.failure is not None:
            raise core.failure
    return [rows[f"{name}{at}"] for at in range(len(PROMPTS))], tokens


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_pooled_rows_are_those_of_a_cpu(family: str) -> None:
    with Engine(str(checkpoint(family)), memory="16MiB", dtype="float32", speculate="off") as engine:
        want, said = pooled(engine._core, "cpu")
    with emulated() as card, started(card, family, dtype="float32") as gpu:
        rows, tokens = pooled(gpu.core, "gpu")
        assert tokens == said
        for row, expected in zip(rows, want, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-4)
    assert np.abs(want[1] - want[2]).max() > 1e-2, "the control: they differ"
    assert not card.reports, [str(report) for report in card.reports]
