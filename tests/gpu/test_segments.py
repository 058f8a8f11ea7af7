"""Chunked recurrences in segments of bounded scratch: the same bits, whatever fills new memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from tests.gpu.recurrences import RECURRENCES, Recurrence
from tests.ops.batches import Run, make_runs, tokens_in
from weft.tensor import gpu
from weft.tensor.gpu import segments
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import TapPoint

SEGMENTED = [op for op in RECURRENCES if op.name in ("gated_delta", "kimi_delta", "mamba2")]
NAN = float("nan")


@pytest.fixture
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    empty = torch.empty

    def of_nan(*args: Any, **options: Any) -> torch.Tensor:
        new = empty(*args, **options)
        return new.fill_(NAN) if new.is_floating_point() else new

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", of_nan)
        yield


def run_programs_backwards(patch: pytest.MonkeyPatch) -> None:
    """The last program of a grid first. A GPU has an order of its own."""
    builder: Any = interpreter.interpreter_builder
    forwards = builder.set_grid_idx
    patch.setattr(
        builder,
        "set_grid_idx",
        lambda *at: forwards(*(size - 1 - index for size, index in zip(builder.grid_dim, at, strict=True))),
    )


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("op", SEGMENTED, ids=lambda op: op.name)
def test_segments_change_no_bit_in_any_order_of_programs(
    op: Recurrence, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five chunks at once and in pairs, A B | B C | C: B has no slot, C has a tap on its cut. In the second
    pair one run takes a carry and another leaves one."""
    runs = make_runs([], [Run(60, 3, slot=1), Run(63, 2), Run(0, 3, slot=2, fresh=True)], taps=(TapPoint(2, 1, 0),))
    assert device_runs(runs).chunk_count == 5
    inputs = {name: x.to(dtype) for name, x in op.inputs(tokens_in(runs), 0).items()}
    states = op.states(4, dtype)
    states[[0, 2, 3]] = NAN
    whole, whole_states = op.run(inputs, states, runs, device)
    assert whole.isfinite().all()
    assert whole_states[:3].isfinite().all()
    monkeypatch.setattr(segments, "SCRATCH_BYTES", 2 * _chunk_bytes(op))
    assert segments.chunks_at_once(device_runs(runs), _chunk_bytes(op)) == 2
    with monkeypatch.context() as patch:
        if gpu.INTERPRETED:
            run_programs_backwards(patch)
        got, got_states = op.run(inputs, states, runs, device)
    assert torch.equal(got, whole)
    assert torch.equal(got_states[:3], whole_states[:3])
    assert got_states[3].isnan().all()


def _chunk_bytes(op: Recurrence) -> int:
    """Scratch memory of a chunk, all heads."""
    if op.name == "mamba2":
        heads, head_dim, width = op.part
        return 4 * (64 * 64 + heads * (4 * 64 + 1 + head_dim * width))
    by_line, (heads, k_dim, _) = op.name == "kimi_delta", op.part
    factors = k_dim if by_line else 1
    return 4 * heads * (64 * (64 + 64 + 3 * factors) + factors)


def test_the_scratch_of_a_long_prompt_has_a_bound() -> None:
    """48 heads of 128 x 128: 1.6 MB a chunk. A chunk larger than the bound goes alone."""
    step = device_runs(make_runs([], [Run(0, 32_768, slot=0, fresh=True)]))
    chunk = 48 * 4 * (64 * (64 + 64 + 3) + 1)
    each = segments.chunks_at_once(step, chunk)
    assert each * chunk <= segments.SCRATCH_BYTES < (each + 1) * chunk
    cuts = [(one.begin, one.end) for one in segments.segments(step, torch.zeros(1, 1, 1, 1), each)]
    assert cuts == [(0, 166), (166, 332), (332, 498), (498, 512)]
    assert segments.chunks_at_once(step, 2 * segments.SCRATCH_BYTES) == 1
