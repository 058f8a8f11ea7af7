"""The table of bytes in docs/gpu.md is what launches move, and steps of decodes are near the least."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_bytes import BATCHES, GOAL, MODELS, bytes_of, line_of, roles, rows_of
from tests.unit.models.test_releases import ALL
from tests.unit.runner.step_counts import released_model
from weft.runner import arena_kernels
from weft.tensor import gpu, native
from weft.tensor.kernels import moe, paged_attention

DOC = Path(__file__).parents[2] / "docs" / "gpu.md"


@pytest.fixture(autouse=True)
def on_triton() -> Iterator[None]:
    gpu.choose("triton")
    native.choose("torch")
    yield
    native.choose("auto")
    gpu.choose("auto")


@pytest.mark.parametrize("model", MODELS)
def test_the_table_says_what_a_step_moves_and_decodes_keep_the_goal(model: str) -> None:
    lines, quotients = [], []
    for called, counted in rows_of(model, (BATCHES[0], BATCHES[-1])):
        lines.append(line_of(model, called, counted))
        if not called.startswith("a prompt"):
            quotients.append(counted.quotient)
    doc = DOC.read_text(encoding="utf-8").splitlines()
    assert all(line in doc for line in lines), "docs/gpu.md should have\n" + "\n".join(lines)
    assert len(quotients) == 2
    assert 1.0 <= min(quotients) <= max(quotients) <= GOAL


@pytest.mark.parametrize(("kernel", "loads", "stores"), [
    (paged_attention._decode, {"q", "cache_k", "cache_v", "table", "context", "items"},
     {"out", "partial", "logs"}),
    (moe._combine, {"pair_out", "ids", "weights"}, {"out"}),
    (arena_kernels._copy_kernel, {"sources", "source_items", "target_items"}, {"targets"})])
def test_roles_of_arguments_follow_from_the_source(kernel: object, loads: set[str],
                                                   stores: set[str]) -> None:
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
