"""The table of bytes in docs/gpu.md is what launches move, and steps of decodes are near the least."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_bytes import (
    BATCHES,
    GOAL,
    MODELS,
    Moved,
    StepBytes,
    bytes_of,
    kernel_lines,
    line_of,
    roles,
    rows_of,
)
from tests.unit.models.test_releases import ALL
from tests.unit.runner.step_counts import released_model
from weft.runner import arena_kernels
from weft.tensor import gpu, native
from weft.tensor.kernels import moe, paged_attention

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu-bytes.json"


@pytest.fixture(autouse=True)
def on_triton() -> Iterator[None]:
    gpu.choose("triton")
    native.choose("torch")
    yield
    native.choose("auto")
    gpu.choose("auto")


@pytest.mark.parametrize("model", MODELS)
def test_the_table_says_what_a_step_moves_and_decodes_keep_the_goal(model: str) -> None:
    lines, quotients, steps = [], [], dict(rows_of(model, (BATCHES[0], BATCHES[-1])))
    saved = {
        called: StepBytes({name: Moved(**one) for name, one in kernels.items()})
        for called, kernels in json.loads(RESULTS.read_text())[model].items()
    }
    assert len(saved) == len(BATCHES) + 1
    for called, counted in steps.items():
        assert counted == saved[called]
    for called, counted in saved.items():
        lines.append(line_of(model, called, counted))
        if not called.startswith("a prompt"):
            quotients.append(counted.quotient)
    lines += kernel_lines(model, list(steps.values())[-2:])
    doc = DOC.read_text(encoding="utf-8").splitlines()
    assert all(line in doc for line in lines), "docs/gpu.md should have\n" + "\n".join(lines)
    assert len(quotients) == len(BATCHES)
    assert 1.0 <= min(quotients) <= max(quotients) <= GOAL


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        (paged_attention._decode, {"q", "cache_k", "cache_v", "table", "context", "items"}, {"out", "partial", "logs"}),
        (moe._combine, {"pair_out", "ids", "weights"}, {"out"}),
        (arena_kernels._copy_kernel, {"sources", "source_items", "target_items"}, {"targets"}),
    ],
)
def test_roles_of_arguments_follow_from_the_source(kernel: object, loads: set[str], stores: set[str]) -> None:
    loaded, stored = roles(kernel.fn)  # type: ignore[attr-defined]
    tensors = loads | stores
    assert (loaded & tensors, stored & tensors) == (loads, stores)


def test_the_control_one_more_operator_moves_more() -> None:
    model = released_model(ALL["lfm2"])
    before = bytes_of(model, 16)
    logits = model.logits
    model.logits = lambda hidden_XD: logits(hidden_XD.mul(2.0))
    after = bytes_of(model, 16)
    assert after.total.launches == before.total.launches + 1
    assert after.total.read - before.total.read == after.total.written - before.total.written == 16 * 2048 * 2
    assert after.total.least == before.total.least
