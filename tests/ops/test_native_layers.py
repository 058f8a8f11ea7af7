"""Layers between their projections, in one crossing, against the same ops one by one by their naive twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, tokens_in
from tests.ops.test_native import CLOSE, MIXED, each_dtype, in_each_set, noise, pages
from tests.support import naive_ops, native_ops
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.mamba import Mamba2
from weft.tensor import native
from weft.tensor.inputs import LayerCache, OutputRows, Runs, StepInputs
from weft.tensor.ops import attention_layer as attention_parts
from weft.tensor.ops import conv as short_conv_parts
from weft.tensor.ops import norm as add_norm_parts
from weft.tensor.ops import recurrent_layers as recurrent_parts


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, **more: Any) -> torch.Tensor:
    wanted = {"plus_one": False, "gate": None, "gate_first": False, "group_size": None} | more
    return naive_ops.rms_norm(x, weight, eps, **wanted)


TWINS = [
    (recurrent_parts, "causal_conv", naive_ops.causal_conv),
    (recurrent_parts, "delta_rule", naive_ops.delta_rule),
    (recurrent_parts, "rms_norm", naive_rms_norm),
    (recurrent_parts, "mamba2", naive_ops.mamba2),
    (short_conv_parts, "causal_conv", naive_ops.causal_conv),
    (add_norm_parts, "rms_norm", naive_rms_norm),
    (attention_parts, "rms_norm", naive_rms_norm),
    (attention_parts, "rotary", naive_ops.rotary),
    (attention_parts, "paged_attention", naive_ops.paged_attention),
    (attention_parts, "write_kv", naive_ops.write_kv),
]


@pytest.fixture(autouse=True)
def twins_as_parts(torch_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    native.choose("native")
    for module, name, twin in TWINS:
        monkeypatch.setattr(module, name, twin)


def live(runs: Runs) -> list[int]:
    return [
        token
        for run in range(runs.run_count)
        if runs.starts[run] != -1
        for token in range(runs.offsets[run], runs.offsets[run] + runs.lengths[run])
    ]


def states(*part: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Slots apart from one another, as in the arena; those that MIXED does not read are NaN."""
    made = (noise(7, 14, 2, *part) * 0.5).to(dtype)[:, 1]
    made[[1, 6, 7, 9, 10, 11, 12, 13]] = float("nan")
    return made


def equal_parts(kernel: Any, parts: Any, runs: Runs, dtype: torch.dtype, *kept: torch.Tensor) -> None:
    """``kernel`` and ``parts`` take the kept states, and change them alike."""
    want_kept = [state.clone() for state in kept]
    want = parts(*want_kept)
    for got, got_kept in in_each_set(lambda: (kernel(*(here := [state.clone() for state in kept])), here)):
        torch.testing.assert_close(got[live(runs)], want[live(runs)], **CLOSE[dtype])
        assert bool(got.isfinite().all())
        for one, other in zip(got_kept, want_kept, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, **CLOSE[dtype])


@each_dtype
@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_a_gated_delta_layer_equals_its_parts(dtype: torch.dtype, beta_scale: float) -> None:
    k_heads, heads, k_dim, v_dim = 2, 4, 16, 32
    channels = 2 * k_heads * k_dim + heads * v_dim
    weights = recurrent_parts.GatedDeltaWeights(
        noise(1, channels, 4, dtype=dtype),
        -noise(2, heads).exp(),
        noise(3, heads),
        noise(4, v_dim, dtype=dtype),
        1e-5,
        GatedDelta(k_heads, heads, k_dim, v_dim, 4, beta_scale),
    )
    made = noise(5, tokens_in(MIXED), channels + heads * v_dim + 2 * heads + 8, dtype=dtype)[:, 8:]
    window, state = states(channels, 3, dtype=dtype), states(heads, k_dim, v_dim)
    equal_parts(
        lambda *kept: native_ops.gated_delta_layer(made, weights, *kept, MIXED),
        lambda *kept: recurrent_parts.gated_delta_layer.torch(made, weights, *kept, MIXED),
        MIXED,
        dtype,
        window,
        state,
    )


@each_dtype
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_mamba2_layer_equals_its_parts(dtype: torch.dtype, gate_first: bool) -> None:
    heads, groups, head_dim, state_dim = 4, 2, 16, 32
    inner = heads * head_dim
    channels = inner + 2 * groups * state_dim
    weights = recurrent_parts.Mamba2Weights(
        noise(1, channels, 4, dtype=dtype),
        noise(9, channels, dtype=dtype),
        -noise(2, heads).exp(),
        noise(3, heads),
        noise(6, heads),
        noise(4, inner, dtype=dtype),
        1e-5,
        Mamba2(
            heads,
            head_dim,
            groups,
            state_dim,
            4,
            True,
            False,
            (0.0, float("inf")),
            "gate_first" if gate_first else "gate_last",
        ),
    )
    made = noise(5, tokens_in(MIXED), inner + channels + heads, dtype=dtype)
    window, state = states(channels, 3, dtype=dtype), states(heads, head_dim, state_dim)
    equal_parts(
        lambda *kept: native_ops.mamba2_layer(made, weights, *kept, MIXED),
        lambda *kept: recurrent_parts.mamba2_layer.torch(made, weights, *kept, MIXED),
        MIXED,
        dtype,
        window,
        state,
    )


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_a_short_convolution_equals_its_parts(dtype: torch.dtype, bias: bool) -> None:
    made, weight = noise(1, tokens_in(MIXED), 3 * 80, dtype=dtype), noise(2, 80, 3, dtype=dtype)
    with_bias, window = noise(3, 80, dtype=dtype) if bias else None, states(80, 2, dtype=dtype)
    equal_parts(
        lambda kept: native_ops.short_conv(made, weight, with_bias, kept, MIXED),
        lambda kept: short_conv_parts.short_conv.torch(made, weight, with_bias, kept, MIXED),
        MIXED,
        dtype,
        window,
    )


@each_dtype
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_the_sum_and_its_norm_equal_their_parts_to_the_rounding(dtype: torch.dtype, scale: float) -> None:
    x, y = noise(1, 9, 112, dtype=dtype)[:, 16:], noise(2, 9, 96, dtype=dtype)
    weight, before = noise(3, 96, dtype=dtype), x.clone()
    want_sum, want = add_norm_parts.add_norm.torch(x, y.clone(), weight, 1e-5, scale=scale, plus_one=True)
    for got_sum, got in in_each_set(
        lambda: native_ops.add_norm(x, y.clone(), weight, 1e-5, scale=scale, plus_one=True)
    ):
        assert torch.equal(x, before)
        if dtype == torch.float32 and scale != 1.0:  # one rounding less where the machine multiplies and adds
            torch.testing.assert_close(got_sum, want_sum, **CLOSE[dtype])
        else:
            assert torch.equal(got_sum, want_sum)
        torch.testing.assert_close(got, want, **CLOSE[dtype])


ROPE = Rope(theta=1e4, rotary_dim=16)
SHAPES = {
    "plain": Attention(4, 2, 32, 0.2, None),
    "rotary": Attention(4, 2, 32, 0.2, ROPE),
    "qwen": Attention(4, 1, 32, 0.2, ROPE, qk_norm=True, gated=True),
    "olmo": Attention(4, 4, 32, 0.2, ROPE, qk_norm=True, norm_whole=True),
    "lfm3": Attention(4, 2, 32, 0.2, ROPE, qk_norm=True, head_gated=True, window=5000),
}


@each_dtype
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_attention_layer_equals_its_parts_and_writes_the_same_pages(dtype: torch.dtype, shape: Attention) -> None:
    runs = make_runs([Run(7), PAD_ROW, Run(200)], [Run(0, 65), Run(40, 90)], pages=40)
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    width = dim * (heads * (1 + shape.gated) + 2 * kv_heads) + heads * shape.head_gated
    made, tokens = noise(1, tokens_in(runs), width, dtype=dtype), tokens_in(runs)
    q_norm = k_norm = None
    if shape.qk_norm:
        q_norm, k_norm = (
            noise(seed, dim * (count if shape.norm_whole else 1), dtype=dtype)
            for seed, count in ((2, heads), (3, kv_heads))
        )
    core = attention_parts.AttentionCore(shape, q_norm, k_norm, 1e-5, plus_one=True)
    angles = noise(4, tokens, 8).repeat(1, 2)
    cos_sin = None if shape.rope is None else (angles.cos(), angles.sin())
    inputs = StepInputs(torch.zeros(tokens, dtype=torch.int64), positions_of(runs), runs)
    k, v = pages(runs, 40, kv_heads, dim, dtype)
    equal_parts(
        lambda *kept: native_ops.attention_layer(made, core, inputs, LayerCache(*kept), cos_sin),
        lambda *kept: attention_parts.attention_layer.torch(made, core, inputs, LayerCache(*kept), cos_sin),
        runs,
        dtype,
        k,
        v,
    )
    asked = replace(inputs, runs=replace(runs, memo={}), output_rows=OutputRows([0, 4], torch.tensor([0, tokens - 1])))
    whole = native_ops.attention_layer(made, core, inputs, LayerCache(k, v), cos_sin)
    some = native_ops.attention_layer(made, core, asked, LayerCache(k, v), cos_sin)
    assert torch.equal(asked.asked_of(some), asked.asked_of(whole))
