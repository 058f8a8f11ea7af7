"""A block in one crossing into the kernels: the bits of its ops one by one, and only where it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, tokens_in
from tests.ops.quantised import weight as quantised
from tests.ops.test_native import in_each_set, noise, pages
from tests.ops.test_native_layers import SHAPES, states
from tests.ops.test_tiled_linear import in_order
from tests.support import fused_stages
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.mamba import Mamba2
from weft.tensor import native
from weft.tensor.fused_block import MOST_ROWS, FusedBlock
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops import attention_layer, conv, elementwise, recurrent_layers
from weft.tensor.ops.attention_layer import AttentionCore
from weft.tensor.ops.linear import JoinedWeight, weight_product
from weft.tensor.ops.recurrent_layers import GatedDeltaWeights, Mamba2Weights
from weft.tensor.weights.quantized import QuantizedWeight

RUNS = make_runs([Run(7, slot=3), PAD_ROW, Run(200, slot=0)], [Run(0, 4, slot=1, fresh=True)], pages=40)
TOKENS, WIDTH = tokens_in(RUNS), 48
FORMS = ["float32 tiles", "bfloat16 tiles", "int8", "ordered"]
Kept = list[torch.Tensor]
Block = tuple[int, int, Kept, Callable[[FusedBlock, torch.Tensor, Kept], Any], Callable[[torch.Tensor, Kept], Any]]
"""Rows of the first weight, columns of the second, what is kept, the fused, the core by itself."""


@pytest.fixture(autouse=True)
def native_kernels(torch_kernels: None) -> None:
    native.choose("native")


def weight_of(form: str, rows: int, columns: int, seed: int) -> Any:
    if form == "int8":
        return quantised(8, rows, columns, seed=seed)
    if form == "joined":
        forms = ((8, 16), (4, rows - 16))
        return JoinedWeight(tuple(quantised(bits, count, columns, seed=seed) for bits, count in forms))
    if form == "ordered":
        return ordered(4, rows, columns, seed)
    if form == "ordered parts":  # two of one order, one of none, one of another
        parts = [ordered(bits, 8, columns, seed) for bits in (4, 8)]
        return JoinedWeight((*parts, quantised(8, 8, columns, seed=seed), ordered(4, rows - 24, columns, seed + 1)))
    dtype = torch.float32 if form == "float32 tiles" else torch.bfloat16
    return in_order((noise(seed, rows, columns) * columns**-0.5).to(dtype))


def ordered(bits: int, rows: int, columns: int, seed: int) -> QuantizedWeight:
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).int()
    return replace(quantised(bits, rows, columns, seed=seed), order=order)


def product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, JoinedWeight):
        return torch.cat([product(x, part, bias) for part in weight.parts], dim=-1)
    if isinstance(weight, QuantizedWeight) and weight.order is not None:
        return weight_product(x[:, weight.order.long()], weight.in_memory_order(), bias)
    return weight_product(x, weight, bias)


def swiglu(dtype: torch.dtype) -> Block:
    return (2 * 96, 96, [], lambda fused, x, _: fused_stages.swiglu(fused, x), lambda x, _: elementwise.silu_mul(x))


def lfm2(dtype: torch.dtype) -> Block:
    weight, bias = noise(2, 80, 3, dtype=dtype), noise(3, 80, dtype=dtype)
    return (
        3 * 80,
        80,
        [states(80, 2, dtype=dtype)],
        lambda fused, x, kept: fused_stages.short_conv(fused, x, weight, bias, *kept, RUNS),
        lambda x, kept: conv.short_conv(x, weight, bias, *kept, RUNS),
    )


def delta(dtype: torch.dtype) -> Block:
    k_heads, heads, k_dim, v_dim = 2, 4, 16, 32
    channels = 2 * k_heads * k_dim + heads * v_dim
    weights = GatedDeltaWeights(
        noise(1, channels, 4, dtype=dtype),
        -noise(2, heads).exp(),
        noise(3, heads),
        noise(4, v_dim, dtype=dtype),
        1e-5,
        GatedDelta(k_heads, heads, k_dim, v_dim, 4),
    )
    return (
        channels + heads * v_dim + 2 * heads,
        heads * v_dim,
        [states(channels, 3, dtype=dtype), states(heads, k_dim, v_dim)],
        lambda fused, x, kept: fused_stages.recurrent(recurrent_layers.GATED_DELTA, fused, x, weights, *kept, RUNS),
        lambda x, kept: recurrent_layers.gated_delta_layer(x, weights, *kept, RUNS),
    )


def mamba2(dtype: torch.dtype) -> Block:
    heads, groups, head_dim, state_dim = 4, 2, 16, 32
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state_dim
    weights = Mamba2Weights(
        noise(1, channels, 4, dtype=dtype),
        noise(9, channels, dtype=dtype),
        -noise(2, heads).exp(),
        noise(3, heads),
        noise(6, heads),
        noise(4, inner, dtype=dtype),
        1e-5,
        Mamba2(heads, head_dim, groups, state_dim, 4, True, False, (0.0, float("inf"))),
    )
    return (
        inner + channels + heads,
        inner,
        [states(channels, 3, dtype=dtype), states(heads, head_dim, state_dim)],
        lambda fused, x, kept: fused_stages.recurrent(recurrent_layers.MAMBA2, fused, x, weights, *kept, RUNS),
        lambda x, kept: recurrent_layers.mamba2_layer(x, weights, *kept, RUNS),
    )


def attention(dtype: torch.dtype) -> Block:
    shape = SHAPES["qwen"]
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    core = AttentionCore(shape, noise(2, dim, dtype=dtype), noise(3, dim, dtype=dtype), 1e-5, True)
    angles = noise(4, TOKENS, 8).repeat(1, 2)
    cos_sin = angles.cos(), angles.sin()
    inputs = StepInputs(torch.zeros(TOKENS, dtype=torch.int64), positions_of(RUNS), RUNS)
    return (
        dim * (2 * heads + 2 * kv_heads),
        heads * dim,
        list(pages(RUNS, 40, kv_heads, dim, dtype)),
        lambda fused, x, kept: fused_stages.attention(fused, x, core, inputs, LayerCache(*kept), cos_sin),
        lambda x, kept: attention_layer.attention_layer(x, core, inputs, LayerCache(*kept), cos_sin),
    )


@pytest.mark.parametrize(
    ("form", "bias"),
    [*((form, bias) for form in FORMS for bias in (False, True)), ("joined", False), ("ordered parts", False)],
)
@pytest.mark.parametrize("make", [swiglu, lfm2, delta, mamba2, attention])
def test_a_chain_gives_the_bits_of_its_ops_one_by_one(
    make: Callable[[torch.dtype], Block], form: str, bias: bool
) -> None:
    dtype = torch.float32 if form == "float32 tiles" else torch.bfloat16
    first_rows, second_columns, kept, run_fused, core = make(dtype)
    first, second = weight_of(form, first_rows, WIDTH, 20), weight_of(form, WIDTH, second_columns, 21)
    biases = (noise(22, first_rows), noise(23, WIDTH)) if bias else (None, None)
    x = noise(24, TOKENS, WIDTH, dtype=dtype)

    def both() -> Any:
        one, other = [state.clone() for state in kept], [state.clone() for state in kept]
        fused = FusedBlock(first, biases[0], second, biases[1])
        apart = product(core(product(x, first, biases[0]), one), second, biases[1])
        return apart, one, run_fused(fused, x, other), other

    for want, want_kept, got, got_kept in in_each_set(both):
        assert torch.equal(got, want)
        for state, wanted in zip(got_kept, want_kept, strict=True):
            assert torch.equal(state.nan_to_num(7.0), wanted.nan_to_num(7.0))


def fused_block_of(form: str = "float32 tiles") -> FusedBlock:
    return FusedBlock(weight_of(form, 2 * 96, WIDTH, 20), None, weight_of(form, WIDTH, 96, 21), None)


def test_many_rows_other_kernels_other_dtypes_and_other_forms_go_op_by_op() -> None:
    fused, x = fused_block_of(), noise(1, MOST_ROWS + 1, WIDTH)
    assert fused_stages.swiglu(fused, x[1:]) is not None
    assert fused_stages.swiglu(fused, x) is None
    assert fused_stages.swiglu(fused, x[:0]) is None
    assert fused_stages.swiglu(fused, x[:1].half()) is None
    plain = JoinedWeight((noise(2, 2 * 96, WIDTH),))
    assert fused_stages.swiglu(FusedBlock(plain, None, fused.second, None), x[:1]) is None
    joined = weight_of("joined", 2 * 96, WIDTH, 20)
    assert fused_stages.swiglu(FusedBlock(joined, noise(3, 2 * 96), joined, None), x[:1]) is None
    native.choose("torch")
    assert fused_stages.swiglu(fused, x[1:]) is None


def test_rows_whose_quantised_weights_are_widened_go_op_by_op() -> None:
    if not quantised(8, WIDTH, WIDTH, exact=True).widens(16, torch.float32):
        return  # AVX2 alone: no rows are
    exact = [quantised(8, rows, columns, exact=True) for rows, columns in ((2 * 96, WIDTH), (WIDTH, 96))]
    fused, x = FusedBlock(exact[0], None, exact[1], None), noise(1, 16, WIDTH)
    assert fused_stages.swiglu(fused, x[1:]) is not None
    assert fused_stages.swiglu(fused, x) is None


def test_a_chain_follows_weights_that_have_moved() -> None:
    fused, x = fused_block_of(), noise(1, 3, WIDTH)
    before = fused_stages.swiglu(fused, x)
    assert before is not None
    storage = fused.first.tiles.untyped_storage()
    held, size = fused.first.tiles.clone(), storage.nbytes()
    storage.resize_(0)
    in_its_place = torch.zeros(size // 4)
    storage.resize_(size)
    fused.first.tiles.copy_(held)
    again = fused_stages.swiglu(fused, x)
    assert again is not None
    assert torch.equal(again, before)
    fused.first.tiles.mul_(0.5)
    assert not torch.equal(fused_stages.swiglu(fused, x), before)
    del in_its_place
