"""The C++ kernels against their naive twins, in dims that they take, in float32 and bfloat16, by each set of
instructions that this machine has: not only by the one that it would choose.

What the torch path promises is in the other files of this folder; where a promise is about numbers, the
kernels make it here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, tokens_in, written_places
from tests.ops.recurrent import wkv7_inputs
from tests.support import naive_ops, native_ops, page_packing
from weft.tensor import layout, native
from weft.tensor.inputs import Runs, TapPoint
from weft.tensor.op import UNFIT
from weft.tensor.ops import elementwise

CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}
DTYPES = [torch.float32, torch.bfloat16]

MIXED = make_runs(
    [Run(7, slot=3), PAD_ROW, Run(200, slot=0), Run(64, slot=8), Run(0, slot=6, fresh=True)],
    [
        Run(0, 65, slot=1, fresh=True),
        Run(40, 170, slot=5),
        Run(128, 64, slot=2),
        Run(0, 3, slot=9, fresh=True),
        Run(63, 2, slot=4),
    ],
    taps=(TapPoint(6, 24, 11), TapPoint(6, 170, 12), TapPoint(6, 2, 13), TapPoint(5, 64, 10)),
)


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_kernels_are_there_where_a_compiler_is() -> None:
    assert native.MISSING is None or shutil.which("c++") is None, native.MISSING
    if native.MISSING is None:
        assert {"portable", "neon"} & set(native.extension().instruction_sets())


@pytest.fixture(autouse=True)
def native_kernels(torch_kernels: None) -> None:
    """After the one of this folder, which gives them back."""
    native.choose("native")


def in_each_set(call: Callable[[], Any]) -> Iterator[Any]:
    """What ``call`` returns, by each set of instructions."""
    extension = native.extension()
    chosen = extension.instruction_set()
    try:
        for name in extension.instruction_sets():
            assert extension.use(name)
            assert extension.instruction_set() == name
            yield call()
    finally:
        extension.use(chosen)


@dataclass(frozen=True)
class Recurrent:
    """``call(module, runs, dtype, state)``; ``part``: the shape of a slot's state."""

    name: str
    part: tuple[int, ...]
    naive: Any
    native: Any
    call: Callable[[Any, Runs, torch.dtype, torch.Tensor], torch.Tensor]

    def states(self, dtype: torch.dtype) -> torch.Tensor:
        wide = noise(7, 14, 3, *self.part) * 0.5
        return wide.to(dtype if self.name.startswith("conv") else torch.float32)[:, 1]


def _delta(k_heads: int, heads: int, k_dim: int, v_dim: int) -> Recurrent:
    def call(module: Any, runs: Runs, dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
        tokens = tokens_in(runs)
        q, k = noise(1, tokens, k_heads, k_dim, dtype=dtype), noise(2, tokens, k_heads, k_dim, dtype=dtype)
        v, g = noise(3, tokens, heads, v_dim, dtype=dtype), -noise(4, tokens, heads).square()
        beta = noise(5, tokens, heads).sigmoid()
        return module.delta_rule(q, k, v, g, beta, state, runs, scale=k_dim**-0.5)

    return Recurrent(f"delta-{k_heads}-{heads}-{k_dim}-{v_dim}", (heads, k_dim, v_dim), naive_ops, native_ops, call)


def _kimi(heads: int, k_dim: int, v_dim: int) -> Recurrent:
    def call(module: Any, runs: Runs, dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
        tokens = tokens_in(runs)
        q, k = (noise(seed, tokens, heads, k_dim, dtype=dtype) for seed in (1, 2))
        v, g = noise(3, tokens, heads, v_dim, dtype=dtype), -noise(4, tokens, heads, k_dim).square()
        beta = noise(5, tokens, heads).sigmoid()
        return module.delta_rule(q, k, v, g, beta, state, runs, scale=k_dim**-0.5)

    return Recurrent(f"kimi-{heads}-{k_dim}-{v_dim}", (heads, k_dim, v_dim), naive_ops, native_ops, call)


def _wkv7(heads: int, k_dim: int, v_dim: int) -> Recurrent:
    def call(module: Any, runs: Runs, dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
        x = wkv7_inputs(heads, k_dim, v_dim)(tokens_in(runs), 1)
        x = {name: part if name == "g" else part.to(dtype) for name, part in x.items()}
        return module.wkv7(x["r"], x["g"], x["k"], x["v"], x["kk"], x["b"], state, runs)

    return Recurrent(f"wkv7-{heads}-{k_dim}-{v_dim}", (heads, k_dim, v_dim), naive_ops, native_ops, call)


def _mamba2(heads: int, groups: int, head_dim: int, state_dim: int) -> Recurrent:
    def call(module: Any, runs: Runs, dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
        tokens = tokens_in(runs)
        b, c = (noise(seed, tokens, groups, state_dim, dtype=dtype) * 0.5 for seed in (3, 4))
        x, dt = noise(1, tokens, heads, head_dim, dtype=dtype), noise(2, tokens, heads, dtype=dtype)
        return module.mamba2(
            x, dt, -noise(5, heads).abs(), b, c, noise(6, heads), noise(8, heads), state, runs, dt_limit=(0.001, 5.0)
        )

    return Recurrent(
        f"mamba2-{heads}-{groups}-{head_dim}-{state_dim}", (heads, head_dim, state_dim), naive_ops, native_ops, call
    )


def _mamba1(channels: int, state_dim: int) -> Recurrent:
    def call(module: Any, runs: Runs, dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
        tokens = tokens_in(runs)
        x, dt = noise(1, tokens, channels, dtype=dtype), noise(2, tokens, channels, dtype=dtype) * 3
        b, c = noise(3, tokens, state_dim, dtype=dtype), noise(4, tokens, state_dim, dtype=dtype)
        return module.mamba1(
            x, dt, -noise(5, channels, state_dim).exp(), b, c, noise(6, channels), noise(8, channels), state, runs
        )

    return Recurrent(f"mamba1-{channels}-{state_dim}", (channels, state_dim), naive_ops, native_ops, call)


def _conv(channels: int, kernel: int, activation: str | None, bias: bool) -> Recurrent:
    def call(module: Any, runs: Runs, dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
        x = noise(1, tokens_in(runs), channels + 8, dtype=dtype)[:, 8:]
        return module.causal_conv(
            x,
            noise(2, channels, kernel, dtype=dtype),
            noise(3, channels, dtype=dtype) if bias else None,
            activation,
            state,
            runs,
        )

    return Recurrent(f"conv-{channels}-{kernel}", (channels, kernel - 1), naive_ops, native_ops, call)


RECURRENT = [
    _delta(2, 4, 32, 32),
    _delta(1, 3, 16, 48),
    _delta(1, 2, 16, 208),
    _delta(1, 2, 48, 64),
    _kimi(3, 32, 32),
    _wkv7(3, 32, 32),
    _wkv7(2, 64, 64),
    _wkv7(2, 16, 80),
    _mamba2(4, 2, 24, 32),
    _mamba2(3, 1, 16, 128),
    _mamba2(6, 2, 40, 208),
    _mamba1(32, 16),
    _mamba1(16, 5),
    _conv(80, 4, "silu", True),
    _conv(16, 2, None, False),
    _conv(144, 3, "silu", False),
    _conv(32, 8, None, True),
]
each_op = pytest.mark.parametrize("op", RECURRENT, ids=lambda op: op.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def twins(op: Recurrent, runs: Runs, dtype: torch.dtype, states: torch.Tensor | None = None) -> None:
    states = op.states(dtype) if states is None else states
    want_states = states.clone()
    want = op.call(op.naive, runs, dtype, want_states)
    live = [
        token
        for run in range(runs.run_count)
        if runs.starts[run] != -1
        for token in range(runs.offsets[run], runs.offsets[run] + runs.lengths[run])
    ]
    for got, got_states in in_each_set(lambda: (op.call(op.native, runs, dtype, here := states.clone()), here)):
        torch.testing.assert_close(got[live], want[live], **CLOSE[dtype])
        assert bool(got.isfinite().all())
        torch.testing.assert_close(got_states, want_states, equal_nan=True, **CLOSE[dtype])


@each_op
@each_dtype
def test_a_mixed_step_with_taps_and_padding_equals_the_twin(op: Recurrent, dtype: torch.dtype) -> None:
    twins(op, MIXED, dtype)


@each_op
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129])
def test_a_run_of_any_length_equals_the_twin(op: Recurrent, length: int) -> None:
    twins(op, make_runs([], [Run(5, length, slot=2)]), torch.float32)


@each_op
def test_nan_in_slots_that_are_not_read_stays_there(op: Recurrent) -> None:
    states = op.states(torch.float32)
    states[[1, 6, 7, 9, 10, 11, 12, 13]] = float("nan")  # fresh, free and tapped
    twins(op, MIXED, torch.float32, states)


@each_op
@pytest.mark.parametrize("cut", [1, 37, 64])
def test_a_run_in_two_pieces_is_the_run_in_one_to_the_last_bit(op: Recurrent, cut: int) -> None:
    """The torch path is close; the recurrence is exact, so a prefix hit changes nothing at all."""
    states = op.states(torch.float32)
    whole_states, cut_states = states.clone(), states.clone()
    whole = op.call(op.native, make_runs([], [Run(0, 100, slot=2)]), torch.float32, whole_states)
    # Two steps, each with the other part's run without a slot: the inputs of a token are the same in both.
    first = make_runs([], [Run(0, cut, slot=2), Run(cut, 100 - cut)])
    second = make_runs([], [Run(0, cut), Run(cut, 100 - cut, slot=2)])
    head = op.call(op.native, first, torch.float32, cut_states)[:cut]
    tail = op.call(op.native, second, torch.float32, cut_states)[cut:]
    assert torch.equal(torch.cat((head, tail)), whole)
    assert torch.equal(cut_states[2], whole_states[2])


@each_op
def test_a_prompt_a_token_a_step_is_the_prompt_at_once_to_the_last_bit(op: Recurrent) -> None:
    """Decodes have kernels of their own, with the same sums in the same order."""
    tokens, tapped = 19, 5
    states = op.states(torch.float32)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        """State 2 goes through all tokens at once, state 3 from the same start through one in each step."""
        here = states.clone()
        here[3] = here[2]
        whole = op.call(
            op.native, make_runs([], [Run(9, tokens, slot=2)], taps=(TapPoint(0, tapped, 4),)), torch.float32, here
        )
        for at in range(tokens):  # the others beside it, without a slot: a token has the inputs of its place
            beside = [Run(9, at)] if at else []
            after = [Run(0, tokens - at - 1)] if at + 1 < tokens else []
            steps = op.call(op.native, make_runs([], [*beside, Run(9 + at, 1, slot=3), *after]), torch.float32, here)
            assert torch.equal(steps[at], whole[at])
            if at + 1 == tapped:
                assert torch.equal(here[3], here[4])
        return here[2], here[3]

    for whole_state, steps_state in in_each_set(both):
        assert torch.equal(steps_state, whole_state)
        assert not torch.equal(whole_state, states[2])


def pages(runs: Runs, count: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """K and V pages with NaN wherever no run has written."""
    made = []
    unwritten = ~written_places(runs, count).flatten()
    for seed, pack in ((1, page_packing.pack_k), (2, page_packing.pack_v)):
        tokens = noise(seed, count * 16, kv_heads, dim, dtype=dtype)
        tokens[unwritten] = float("nan")
        made.append(pack(tokens).contiguous())
    return tuple(made)


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 1, 128), (16, 8, 32), (12, 1, 256)])
def test_attention_over_pages_full_of_nan_equals_the_twin(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    runs = make_runs(
        [Run(7), PAD_ROW, Run(200), Run(64), Run(1500)],
        [Run(0, 65), Run(40, 90), Run(128, 64), Run(0, 3), Run(63, 2)],
        pages=160,
    )
    k, v = pages(runs, 160, kv_heads, dim, dtype)
    q = noise(3, tokens_in(runs), heads, dim, dtype=dtype)
    want = naive_ops.paged_attention(q, k, v, runs, 0.1)
    for got in in_each_set(lambda: native_ops.paged_attention(q, k, v, runs, 0.1)):
        torch.testing.assert_close(got, want, **CLOSE[dtype])


@each_dtype
@pytest.mark.parametrize("window", [1, 15, 16, 70, 5000])
def test_a_window_of_any_width_over_pages_of_nan_equals_the_twin(dtype: torch.dtype, window: int) -> None:
    runs = make_runs([Run(7), PAD_ROW, Run(200), Run(1500)], [Run(0, 65), Run(40, 90), Run(63, 2)], pages=130)
    k, v = pages(runs, 130, 2, 32, dtype)
    q = noise(3, tokens_in(runs), 4, 32, dtype=dtype)
    want = naive_ops.paged_attention(q, k, v, runs, 0.1, window)
    for got in in_each_set(lambda: native_ops.paged_attention(q, k, v, runs, 0.1, window)):
        torch.testing.assert_close(got, want, **CLOSE[dtype])
    whole = naive_ops.paged_attention(q, k, v, runs, 0.1)
    assert torch.equal(whole, want) == (window == 5000)


@each_dtype
@pytest.mark.parametrize("window", [None, 70])
def test_sinks_are_those_of_the_twin_and_none_has_plain_bits(dtype: torch.dtype, window: int | None) -> None:
    """Contexts of several parts, of decodes that share pages, of rows that see nothing."""
    runs = make_runs([Run(7), PAD_ROW, Run(200), Run(1500)], [Run(0, 65), Run(40, 90), Run(63, 2)], pages=130)
    k, v = pages(runs, 130, 2, 32, dtype)
    q, sinks = noise(3, tokens_in(runs), 4, 32, dtype=dtype), torch.tensor([-1.0, 0.5, 3.0, 90.0])
    sinks = sinks.expand(len(q), -1)
    want = naive_ops.paged_attention(q, k, v, runs, 0.1, window, sinks_TH=sinks)
    plain = native_ops.paged_attention(q, k, v, runs, 0.1, window)
    for got in in_each_set(lambda: native_ops.paged_attention(q, k, v, runs, 0.1, window, sinks_TH=sinks)):
        torch.testing.assert_close(got, want, **CLOSE[dtype])
        assert (got - plain).abs().max() > 0.05
    far = native_ops.paged_attention(q, k, v, runs, 0.1, window, sinks_TH=torch.full((4,), -300.0).expand(len(q), -1))
    assert torch.equal(far, plain)


@each_dtype
def test_a_row_whose_first_scores_are_far_below_zero_is_divided_by_what_it_saw(dtype: torch.dtype) -> None:
    """Its first tile of pages lies before its window: what a softmax has seen of nothing is not zero."""
    runs = make_runs([], [Run(0, 200)], pages=14)
    q = torch.ones(200, 2, 32, dtype=dtype)
    k = page_packing.pack_k((noise(1, 14 * 16, 1, 32) * 0.05 - 10).to(dtype)).contiguous()
    _, v = pages(runs, 14, 1, 32, dtype)
    want = naive_ops.paged_attention(q, k, v, runs, 1.0, 20)
    for got in in_each_set(lambda: native_ops.paged_attention(q, k, v, runs, 1.0, 20)):
        torch.testing.assert_close(got, want, rtol=CLOSE[dtype]["rtol"], atol=5 * CLOSE[dtype]["atol"])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_long_context_of_one_row_is_split_over_any_number_of_threads(threads: int) -> None:
    runs = make_runs([Run(4000)], [], pages=260)
    k, v = pages(runs, 260, 1, 64, torch.float32)
    q = noise(3, 1, 2, 64)
    want = naive_ops.paged_attention(q, k, v, runs, 0.3)
    before = native.extension().threads()
    native.set_threads(threads)
    got = native_ops.paged_attention(q, k, v, runs, 0.3)
    native.set_threads(before)
    torch.testing.assert_close(got, want, **CLOSE[torch.float32])


@each_dtype
def test_keys_and_values_go_where_the_twin_puts_them_and_nowhere_else(dtype: torch.dtype) -> None:
    runs = make_runs([Run(7), PAD_ROW, Run(200)], [Run(0, 65), Run(40, 90)], pages=40)
    k, v = noise(1, tokens_in(runs), 2, 32, dtype=dtype), noise(2, tokens_in(runs), 2, 32, dtype=dtype)
    want = [
        torch.full(shape(2, 32, dtype), 7.0, dtype=dtype).expand(40, -1, -1, -1, -1).clone()
        for shape in (layout.k_block_shape, layout.v_block_shape)
    ]
    got = [cache.clone() for cache in want]
    naive_ops.write_kv(k, v, want[0], want[1], positions_of(runs), runs)
    for _ in in_each_set(lambda: native_ops.write_kv(k, v, got[0].fill_(7), got[1].fill_(7), positions_of(runs), runs)):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@each_dtype
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("gated", "gate_first", "group"), [(False, False, None), (True, False, None), (True, True, 32), (True, True, None)]
)
def test_norms_of_strided_rows_equal_the_twin(
    dtype: torch.dtype, plus_one: bool, gated: bool, gate_first: bool, group: int | None
) -> None:
    x = noise(1, 5, 3, 80, dtype=dtype)[..., 16:]
    gate = noise(2, 5, 3, 96, dtype=dtype)[..., :64] if gated else None
    weight = noise(3, 64, dtype=dtype)
    more: dict[str, Any] = {"plus_one": plus_one, "gate": gate, "gate_first": gate_first, "group_size": group}
    want = naive_ops.rms_norm(x, weight, 1e-5, **more)
    for got in in_each_set(lambda: native_ops.rms_norm(x, weight, 1e-5, **more)):
        torch.testing.assert_close(got, want, **CLOSE[dtype])


@each_dtype
@pytest.mark.parametrize("rotary_dim", [8, 32, 64])
def test_rotary_of_a_part_of_the_head_equals_the_twin(dtype: torch.dtype, rotary_dim: int) -> None:
    q, k = noise(1, 20, 4, 64, dtype=dtype), noise(2, 20, 2, 64, dtype=dtype)
    angles = noise(3, 20, rotary_dim // 2).repeat(1, 2)
    want = naive_ops.rotary(q, k, angles.cos(), angles.sin())
    for got in in_each_set(lambda: native_ops.rotary(q, k, angles.cos(), angles.sin())):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, **CLOSE[dtype])


@each_dtype
def test_silu_mul_equals_the_twin_over_the_whole_range(dtype: torch.dtype) -> None:
    x = (noise(1, 7, 4160) * 40).to(dtype)
    for got in in_each_set(lambda: native_ops.silu_mul(x)):
        torch.testing.assert_close(got, naive_ops.silu_mul(x), **CLOSE[dtype])


@each_dtype
@pytest.mark.parametrize("shape", [(7,), (3, 2, 16), (2, 4099)])
def test_gelu_by_tanh_equals_the_twin_over_the_whole_range(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (noise(1, *shape) * 10).to(dtype)
    before, want = x.clone(), naive_ops.gelu_tanh(x)
    for got in in_each_set(lambda: native_ops.activate(x, "gelu_tanh")):
        torch.testing.assert_close(got, want, **CLOSE[dtype])
    assert torch.equal(x, before)
    for spent, got in in_each_set(lambda: ((mine := x.clone()), native_ops.activate(mine, "gelu_tanh", spent=True))):
        assert got is spent
        torch.testing.assert_close(got, want, **CLOSE[dtype])


@each_dtype
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 1000, native.SOFTMAX_COLUMNS_MAX])
def test_softmax_in_place_equals_the_twin(dtype: torch.dtype, columns: int) -> None:
    x = (noise(1, 3, 2, columns) * 30).to(dtype)
    want = naive_ops.softmax(x, 0.3)
    torch.testing.assert_close(elementwise.softmax_.torch(x.clone(), 0.3), want, **CLOSE[dtype])
    for got in in_each_set(lambda: native_ops.softmax_(x.clone(), 0.3)):
        torch.testing.assert_close(got, want, **CLOSE[dtype])
        torch.testing.assert_close(got.float().sum(-1), torch.ones(3, 2), rtol=0, atol=0.02)


def test_softmax_leaves_a_nan_in_its_row_and_its_neighbours_alone() -> None:
    x = torch.tensor([[1e4, -1e4] * 20, [0.5] * 39 + [float("nan")], [-1e4] * 39 + [3e4]])
    for got in in_each_set(lambda: native_ops.softmax_(x.clone(), 1.0)):
        assert got[0].tolist() == [pytest.approx(0.05), 0.0] * 20
        assert got[1].isnan().all()
        assert got[2].tolist() == [0.0] * 39 + [1.0]


def test_what_the_kernels_of_rows_do_not_take_goes_through_torch() -> None:
    x = noise(1, 4, native.SOFTMAX_COLUMNS_MAX + 1)
    assert elementwise.softmax_.native is not None
    assert elementwise.softmax_.native(x, 1.0) is UNFIT
    torch.testing.assert_close(elementwise.softmax_(x.clone(), 0.5), naive_ops.softmax(x, 0.5))
    turned = noise(2, 6, 4).t()
    torch.testing.assert_close(elementwise.activate(turned, "gelu_tanh"), naive_ops.gelu_tanh(turned))
    torch.testing.assert_close(elementwise.softmax_(turned.clone(), 2.0), naive_ops.softmax(turned, 2.0))


def test_native_is_refused_by_name_where_it_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_extension", None)
    with pytest.raises(Exception, match=r"debug\.cpu_kernels is native"):
        native.choose("native")


def test_a_column_of_a_delta_state_has_the_same_bits_whatever_columns_go_with_it() -> None:
    """Prefills take 64, 32 or 16 columns at a time, by the width of the values."""
    runs = make_runs([], [Run(0, 70, slot=1), Run(0, 33, slot=3)])
    tokens, heads, k_dim = 103, 2, 128
    q, k = (noise(seed, tokens, heads, k_dim, dtype=torch.bfloat16) for seed in (1, 2))
    v, g = noise(3, tokens, heads, 64, dtype=torch.bfloat16), -noise(4, tokens, heads).abs()
    beta = noise(5, tokens, heads).sigmoid()
    parts = []
    for width in (64, 32, 48):
        state = torch.zeros(4, heads, k_dim, width)
        out = native_ops.delta_rule(q, k, v[..., :width].contiguous(), g, beta, state, runs, scale=0.1)
        parts.append((out[..., :32], state[..., :32]))
    for out, state in parts[1:]:
        assert torch.equal(out, parts[0][0])
        assert torch.equal(state, parts[0][1])
    assert parts[0][1].abs().sum() > 0
