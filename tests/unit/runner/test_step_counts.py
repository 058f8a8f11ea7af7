"""The table of launches, allocations and bytes in docs/gpu.md is what a step has, counted by family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.models.test_releases import ALL
from tests.unit.runner.step_counts import PROMPT, StepCounts, counts_of, released_model

BATCHES = (1, 16, 256)
MODELS = {
    "qwen3": "Qwen3 8B",
    "qwen3_5": "Qwen3.5 27B",
    "qwen3_next": "Qwen3-Next 80B",
    "lfm2": "LFM2 1.2B",
    "bamba": "Bamba 9B",
    "jamba": "Jamba 1.5 Mini",
    "kimi_linear": "Kimi Linear 48B",
}
BANDWIDTH, MATRIX_RATE = 3.35e12, 800e12
"""Of an H100: bytes and bfloat16 operations per second."""
DOC = Path(__file__).parents[3] / "docs" / "gpu.md"

pytestmark = pytest.mark.usefixtures("triton_kernels")


def row_of(title: str, step: str, counts: list[StepCounts]) -> str:
    """Of the table. A batch of one may need a copy less."""
    launches, allocations = max(one.launches for one in counts), max(one.allocations for one in counts)
    assert launches - min(one.launches for one in counts) <= launches // 10
    [triton] = {one.triton for one in counts}
    size = " / ".join(f"{one.bytes / 1e9:.3g}" for one in counts)
    roofline = " / ".join(f"{max(one.bytes / BANDWIDTH, one.flops / MATRIX_RATE) * 1e3:.2g}" for one in counts)
    return f"| {title} | {step} | {launches} | {triton} | {allocations} | {size} | {roofline} |"


@pytest.mark.parametrize("name", MODELS)
def test_the_table_says_what_a_step_launches_allocates_and_moves(name: str) -> None:
    model = released_model(ALL[name])
    rows = [
        row_of(MODELS[name], step, [counts_of(model, batch, prompt=prompt) for batch in BATCHES])
        for step, prompt in (("decode", 0), ("mixed", PROMPT))
    ]
    check(rows)


def test_int4_reads_a_quarter_of_the_weights_and_adds_the_sums_of_split_columns() -> None:
    model = released_model(ALL["qwen3"], "int4")
    rows = [
        row_of("Qwen3 8B, int4", step, [counts_of(model, batch, prompt=prompt) for batch in (1, 16)])
        for step, prompt in (("decode", 0), ("mixed", PROMPT))
    ]
    check(rows)


def check(rows: list[str]) -> None:
    lines = DOC.read_text(encoding="utf-8").splitlines()
    assert all(row in lines for row in rows), "docs/gpu.md should have\n" + "\n".join(rows)


def test_the_control_one_more_operator_is_counted() -> None:
    model = released_model(ALL["lfm2"])
    before = counts_of(model, 4)
    logits = model.logits
    model.logits = lambda hidden_XD: logits(hidden_XD.mul(2.0))
    after = counts_of(model, 4)
    assert after.torch == before.torch + 1
    assert after.allocations == before.allocations + 1
    assert after.bytes == before.bytes + 2 * 4 * 2048 * torch.bfloat16.itemsize
