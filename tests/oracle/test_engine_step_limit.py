"""``--max-step-ms`` changes when tokens come, and never which."""

from __future__ import annotations

import numpy as np

from tests.fixtures.checkpoints import checkpoint
from weft.api import Engine


def answers(max_step_ms: int) -> tuple[list[list[int]], int]:
    """Tokens of every answer, and the number of steps."""
    dice = np.random.default_rng(0)
    prompts = [dice.integers(3, 400, int(length)).tolist() for length in (20, 300, 61, 500, 130)]
    with Engine(
        str(checkpoint("qwen3_5")),
        memory="32MB",
        max_model_len=600,
        max_num_batched_tokens=320,
        threads=1,
        max_step_ms=max_step_ms,
        prefix_cache=False,
    ) as engine:
        done = engine.generate(prompts, progress=False, max_tokens=24, temperature=0.0, ignore_eos=True)
        return [one.tokens for one in done], engine.stats().steps


def test_a_limit_that_binds_changes_no_token() -> None:
    free, free_steps = answers(0)
    limited, limited_steps = answers(1)
    assert limited == free
    assert limited_steps > free_steps, "the limit never bound: this shows nothing"
