"""The C++ kernels over caches of every dtype: pages with the bytes that torch writes and the twin's attention
over them, states rounded as the twin's are."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, tokens_in
from tests.ops.kv_pages import KV_DTYPES, blank_pages, filled_pages
from tests.ops.test_native import MIXED, RECURRENT, Recurrent
from tests.support import naive_ops, native_ops
from weft.tensor import native
from weft.tensor.ops.write_kv import write_kv

PAGES, DIM = 160, 32
RUNS = make_runs(
    [Run(7), PAD_ROW, Run(200), Run(64), Run(1200)],
    [Run(0, 65), Run(40, 90), Run(128, 64), Run(0, 3), Run(63, 2)],
    pages=PAGES,
)
each_dtype = pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_input = pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def native_kernels(torch_kernels: None) -> None:
    """After the one of this folder, which gives them back."""
    native.choose("native")


def noise(seed: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens_in(RUNS), heads, DIM, generator=torch.Generator().manual_seed(seed))


@each_dtype
@each_input
def test_pages_have_the_bytes_that_torch_writes(dtype: torch.dtype, inputs: torch.dtype) -> None:
    """Numbers from 1e-9 to 1e6: below the least normal number, above the largest, and what lies between."""
    sizes = torch.logspace(-9, 6, DIM)
    k, v = ((noise(seed, 2) * sizes).to(inputs) for seed in (1, 2))
    k[4], v[5] = 0.0, 3e38
    made, want = (blank_pages(PAGES, 2, DIM, dtype) for _ in range(2))
    native_ops.write_kv(k, v, made.k, made.v, positions_of(RUNS), RUNS, made.scales)
    write_kv.torch(k, v, want.k, want.v, positions_of(RUNS), RUNS, want.scales)
    for got, expected in zip(made.raw(), want.raw(), strict=True):
        assert torch.equal(got, expected)


@each_dtype
@each_input
def test_attention_over_bytes_of_0xff_equals_the_twin(dtype: torch.dtype, inputs: torch.dtype) -> None:
    pages = filled_pages(RUNS, PAGES, 2, DIM, dtype)
    pages.v.view(torch.uint8)[:, :, :2] //= 8  # as small as the dtype has them, in some of the tokens
    q = noise(3, 6).to(inputs)
    want = naive_ops.paged_attention(q, pages.k, pages.v, RUNS, 0.2, scales=pages.scales)
    got = native_ops.paged_attention(q, pages.k, pages.v, RUNS, 0.2, scales=pages.scales)
    close = {"rtol": 2e-5, "atol": 2e-5} if inputs == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-2}
    torch.testing.assert_close(got, want, **close)


NARROW_OPS = [op for op in RECURRENT if not op.name.startswith("conv")]
each_op = pytest.mark.parametrize("op", NARROW_OPS, ids=lambda op: op.name)
each_narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@each_op
@each_narrow
def test_states_in_few_bits_are_the_twins(op: Recurrent, dtype: torch.dtype) -> None:
    """Rounded alike but where the two differ in the seventh digit and a border lies between."""
    states = [op.states(torch.float32).to(dtype) for _ in range(2)]
    for state in states:
        state[[1, 6, 7, 9, 10, 11, 12, 13]] = float("nan")  # fresh, free and tapped
    got, want = (
        op.call(module, MIXED, torch.float32, state)
        for module, state in zip((op.native, op.naive), states, strict=True)
    )
    live = [
        token
        for run in range(MIXED.run_count)
        if MIXED.starts[run] != -1
        for token in range(MIXED.offsets[run], MIXED.offsets[run] + MIXED.lengths[run])
    ]
    torch.testing.assert_close(got[live], want[live], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(*(state.float() for state in states), rtol=2e-2, atol=2e-2, equal_nan=True)
    same = (states[0] == states[1]) | (states[0].isnan() & states[1].isnan())
    assert same.float().mean() > 0.95


@each_op
@each_narrow
@pytest.mark.parametrize("cut", [1, 37, 64])
def test_a_run_in_two_pieces_keeps_the_same_narrow_state_to_the_last_bit(
    op: Recurrent, dtype: torch.dtype, cut: int
) -> None:
    whole, pieces = (op.states(torch.float32).to(dtype) for _ in range(2))
    made = op.call(op.native, make_runs([], [Run(0, 100, slot=2)]), torch.float32, whole)
    first = make_runs([], [Run(0, cut, slot=2), Run(cut, 100 - cut)])
    second = make_runs([], [Run(0, cut), Run(cut, 100 - cut, slot=2)])
    head = op.call(op.native, first, torch.float32, pieces)[:cut]
    tail = op.call(op.native, second, torch.float32, pieces)[cut:]
    assert torch.equal(torch.cat((head, tail)), made)
    assert torch.equal(pieces[2], whole[2])
    wide = op.states(torch.float32)
    op.call(op.native, make_runs([], [Run(0, 100, slot=2)]), torch.float32, wide)
    assert (wide[2].to(dtype) == whole[2]).float().mean() < 0.95, "nothing was rounded on the way"
