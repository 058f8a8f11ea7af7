"""PAD behind the prompts of a step, as recorded steps have it: runs without tokens, a run of PAD tokens, and
chunks that belong to no run. No kernel reads or writes anything for them, and the rest keeps its bits."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.recurrences import RECURRENCES, Recurrence
from tests.gpu.steps import on_device, pages_on, strided_on
from tests.ops.batches import PAD_ROW, Run, make_runs, tokens_in
from tests.ops.kv_pages import filled_pages
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import TapPoint
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.window_attention import window_attention
from weft.tensor.ops.write_kv import write_kv
from weft.units import PAD

DECODES = [Run(7, slot=3), PAD_ROW]
PROMPTS = [Run(62, 5, slot=1), Run(0, 3, slot=2, fresh=True)]
PADDING = [Run(PAD, 0, fresh=True), Run(PAD, 0, fresh=True), Run(PAD, 9, fresh=True)]
TAPS = (TapPoint(2, 2, 4),)
CHUNKS = 8
NAN = float("nan")
REAL = make_runs(DECODES, PROMPTS, taps=TAPS, pages=12)
PADDED = make_runs(DECODES, [*PROMPTS, *PADDING], taps=TAPS, pages=12)
TOKENS = tokens_in(REAL)


@pytest.fixture(autouse=True)
def tables_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = device_runs.pack_lists
    monkeypatch.setattr(
        device_runs, "pack_lists", lambda *lists: pack(*lists, CHUNKS if len(lists[0]) == PADDED.run_count else 0)
    )


def behind(x: torch.Tensor) -> torch.Tensor:
    """``x`` of the real tokens, then NaN for those of PAD."""
    return torch.cat((x, torch.full((tokens_in(PADDED) - TOKENS, *x.shape[1:]), NAN, dtype=x.dtype)))


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_the_table_ends_in_chunks_without_tokens_and_runs() -> None:
    flat, chunks = device_runs.pack(PADDED)
    table = device_runs.unpack(torch.from_numpy(flat), PADDED.run_count, 2, chunks)
    assert chunks == CHUNKS
    assert len(flat) == device_runs.table_numbers(PADDED.run_count, CHUNKS)
    assert table.chunk_tokens_C.tolist() == [2, 3, 3, 9, 0, 0, 0, 0]
    assert table.chunk_begin_R.tolist() == [0, 0, 0, 2, 3, 3, 3, 4]
    assert table.chunk_first_C.tolist() == [2, 4, 7, 10, 19, 19, 19, 19]
    assert table.chunk_run_C.tolist() == [2, 2, 3, 6, 6, 6, 6, 6]
    assert table.chunk_tap_C.tolist() == [4, *[PAD] * 7]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [*((op, torch.float32) for op in RECURRENCES), *((op, torch.bfloat16) for op in RECURRENCES[1:])],
    ids=lambda one: one.name if isinstance(one, Recurrence) else str(one).removeprefix("torch."),
)
def test_a_recurrence(op: Recurrence, dtype: torch.dtype, device: torch.device) -> None:
    states = op.states(6, dtype)
    states[[0, 2, 4, 5]] = NAN
    inputs = op.inputs(TOKENS, 0)
    want, want_states = op.run(inputs, states, REAL, device)
    got, got_states = op.run({name: behind(x) for name, x in inputs.items()}, states, PADDED, device)
    assert torch.equal(got[:TOKENS], want)
    assert want.isfinite().all()
    assert equal_bytes(got_states, want_states)
    assert not equal_bytes(want_states, states), "the control: runs and the tap write"


def test_a_convolution(device: torch.device) -> None:
    windows = noise(6, 24, 3, seed=1)
    windows[[0, 2, 4, 5]] = NAN
    x, weight = noise(TOKENS, 24), noise(24, 4, seed=2).to(device)
    made = []
    for runs, inputs in ((REAL, x), (PADDED, behind(x))):
        held = strided_on(windows, device)
        out = causal_conv(inputs.to(device), weight, None, "silu", held, on_device(runs, device))
        made.append((out[:TOKENS].cpu(), held.cpu()))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][0][[0, *range(2, TOKENS)]].isfinite().all()
    assert equal_bytes(made[0][1], made[1][1])


def test_attention_over_pages_and_the_writing_of_pages(device: torch.device) -> None:
    pages = filled_pages(REAL, 12, 2, 16, torch.float32)
    q, k, v = noise(TOKENS, 4, 16), noise(TOKENS, 2, 16, seed=4), noise(TOKENS, 2, 16, seed=5)
    positions = torch.tensor([7, PAD, *range(62, 67), *range(3)])
    made = []
    for runs, fill in ((REAL, lambda x: x), (PADDED, behind)):
        held, moved = pages_on(pages, device), on_device(runs, device)
        at = torch.cat((positions, torch.full((tokens_in(runs) - TOKENS,), PAD)))
        write_kv(fill(k).to(device), fill(v).to(device), held.k, held.v, at.to(device), moved, None)
        out = paged_attention(fill(q).to(device), held.k, held.v, moved, 0.3, None, None)
        made.append((out.cpu(), held.k.cpu(), held.v.cpu()))
    assert torch.equal(made[0][0], made[1][0][:TOKENS])
    assert made[1][0].isfinite().all(), "PAD tokens too"
    assert equal_bytes(made[0][1], made[1][1])
    assert equal_bytes(made[0][2], made[1][2])


def test_attention_over_rings(device: torch.device) -> None:
    rings = noise(6, 2, 2, 12, 8, seed=1)
    rings[[0, 2, 4, 5]] = NAN
    q, k, v = noise(TOKENS, 4, 8), noise(TOKENS, 2, 8, seed=4), noise(TOKENS, 2, 8, seed=5)
    made = []
    for runs, fill in ((REAL, lambda x: x), (PADDED, behind)):
        held = strided_on(rings, device)
        out = window_attention(*(fill(x).to(device) for x in (q, k, v)), held, on_device(runs, device), 0.3)
        made.append((out[:TOKENS].cpu(), held.cpu()))
    assert torch.equal(made[0][0], made[1][0])
    assert equal_bytes(made[0][1], made[1][1])
