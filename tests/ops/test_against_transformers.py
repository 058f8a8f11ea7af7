"""One test per op against the torch path of the model code that weft must agree with."""

from __future__ import annotations

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tests.ops.batches import Run, make_runs, positions_of
from weft.tensor.inputs import Runs
from weft.tensor.layout import k_block_shape, v_block_shape
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.delta_rule import delta_rule
from weft.tensor.ops.elementwise import rotary
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.moe import moe
from weft.tensor.ops.norm import rms_norm
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.write_kv import write_kv

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
TOKENS = 150


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompt() -> Runs:
    return make_runs([], [Run(0, TOKENS, slot=0, fresh=True)], pages=20)


def one_more() -> Runs:
    return make_runs([Run(TOKENS, slot=0)], [], pages=20)


def test_gated_delta_equals_qwen3_5s_chunked_and_recurrent_rule() -> None:
    q, k, v = noise(TOKENS + 1, 2, 16), noise(TOKENS + 1, 2, 16, seed=1), noise(TOKENS + 1, 4, 8, seed=2)
    g, beta = -noise(TOKENS + 1, 4, seed=3).abs(), noise(TOKENS + 1, 4, seed=4).sigmoid()
    state = torch.full((1, 4, 16, 8), float("nan"))
    n = TOKENS
    want, want_state = qwen.torch_chunk_gated_delta_rule(
        q[None, :n],
        k[None, :n],
        v[None, :n],
        g=g[None, :n],
        beta=beta[None, :n],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = delta_rule(q[:n], k[:n], v[:n], g[:n], beta[:n], state, prompt(), scale=16**-0.5)
    torch.testing.assert_close(got, want[0], **CLOSE)
    torch.testing.assert_close(state, want_state, **CLOSE)
    want, want_state = qwen.torch_recurrent_gated_delta_rule(
        q[None, n:],
        k[None, n:],
        v[None, n:],
        g=g[None, n:],
        beta=beta[None, n:],
        initial_state=want_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = delta_rule(q[n:], k[n:], v[n:], g[n:], beta[n:], state, one_more(), scale=16**-0.5)
    torch.testing.assert_close(got, want[0], **CLOSE)
    torch.testing.assert_close(state, want_state, **CLOSE)


def test_mamba2_equals_granites_chunk_scan_and_state_update() -> None:
    x, dt = noise(TOKENS + 1, 4, 8), noise(TOKENS + 1, 4, seed=1)
    b, c = noise(TOKENS + 1, 2, 16, seed=2) * 0.3, noise(TOKENS + 1, 2, 16, seed=3) * 0.3
    a, d, bias = -torch.tensor([1.0, 2.0, 3.0, 4.0]), noise(4, seed=4), noise(4, seed=5)
    state = torch.full((1, 4, 8, 16), float("nan"))
    n = TOKENS
    want, want_state = granite.mamba2_chunk_scan(
        x[None, :n],
        dt[None, :n],
        a,
        b[None, :n],
        c[None, :n],
        chunk_size=32,
        D=d,
        dt_bias=bias,
        dt_softplus=True,
        return_final_states=True,
    )
    got = mamba2(x[:n], dt[:n], a, b[:n], c[:n], d, bias, state, prompt())
    torch.testing.assert_close(got, want[0], **CLOSE)
    torch.testing.assert_close(state, want_state, **CLOSE)
    want_one = granite.mamba2_selective_state_update(
        want_state,
        x[n:],
        dt[n:, :, None].expand(1, 4, 8),
        a[:, None, None].expand(4, 8, 16),
        b[n:],
        c[n:],
        d[:, None].expand(4, 8),
        dt_bias=bias[:, None].expand(4, 8),
        dt_softplus=True,
    )
    got = mamba2(x[n:], dt[n:], a, b[n:], c[n:], d, bias, state, one_more())
    torch.testing.assert_close(got, want_one, **CLOSE)
    torch.testing.assert_close(state, want_state, **CLOSE)


@pytest.mark.parametrize(("module", "activation", "width"), [(qwen, "silu", 4), (lfm2, None, 3)])
def test_causal_conv_equals_the_models_convolution_and_its_update(module, activation, width) -> None:
    x, weight, bias = noise(TOKENS + 1, 6), noise(6, width, seed=1), noise(6, seed=2)
    window = torch.full((1, 6, width - 1), float("nan"))
    n = TOKENS
    want = module.causal_conv1d_fn(x[None, :n].mT, weight, bias, activation=activation)
    got = causal_conv(x[:n], weight, bias, activation, window, prompt())
    torch.testing.assert_close(got, want[0].T, **CLOSE)
    last = x[None, n - width + 1 : n].mT.clone()
    assert torch.equal(window, last)
    want = module.causal_conv1d_update(x[None, n:].mT, last, weight, bias, activation=activation)
    got = causal_conv(x[n:], weight, bias, activation, window, one_more())
    torch.testing.assert_close(got, want[0].T, **CLOSE)
    assert torch.equal(window, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_the_models_norms_to_the_last_rounding(dtype: torch.dtype) -> None:
    x, gate = (noise(9, 32) * 3).to(dtype), noise(9, 32, seed=1).to(dtype)
    weight = noise(32, seed=2)
    cases = [
        (qwen.Qwen3_5RMSNorm(32, eps=1e-6), (x,), {"plus_one": True}),
        (qwen.Qwen3_5RMSNormGated(32, eps=1e-6), (x, gate), {"gate": gate}),
        (lfm2.Lfm2RMSNorm(32, eps=1e-6), (x,), {}),
        (
            granite.GraniteMoeHybridRMSNormGated(32, group_size=8, eps=1e-6),
            (x, gate),
            {"gate": gate, "gate_first": True, "group_size": 8},
        ),
    ]
    for module, arguments, options in cases:
        module.weight.data = weight.to(dtype)
        got = rms_norm(x, weight.to(dtype), 1e-6, **options)
        torch.testing.assert_close(
            got, module(*arguments).detach(), rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6
        )


def test_rotary_equals_qwen3_5s_partial_rotary() -> None:
    q, k, angles = noise(7, 4, 16), noise(7, 2, 16, seed=1), noise(7, 4, seed=2).repeat(1, 2)
    want_q, want_k = qwen.apply_rotary_pos_emb(
        q[None], k[None], angles.cos()[None], angles.sin()[None], unsqueeze_dim=2
    )
    got_q, got_k = rotary(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(got_q, want_q[0], **CLOSE)
    torch.testing.assert_close(got_k, want_k[0], **CLOSE)


def test_paged_attention_equals_eager_attention_on_contiguous_keys() -> None:
    q, k, v = noise(TOKENS, 6, 16), noise(TOKENS, 2, 16, seed=1), noise(TOKENS, 2, 16, seed=2)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    module.training = False
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    want, _ = qwen.eager_attention_forward(module, *(x.transpose(0, 1)[None] for x in (q, k, v)), mask, 0.25)
    cache_k = torch.full((20, *k_block_shape(2, 16, torch.float32)), float("nan"))
    cache_v = torch.full((20, *v_block_shape(2, 16, torch.float32)), float("nan"))
    write_kv(k, v, cache_k, cache_v, positions_of(prompt()), prompt())
    got = paged_attention(q, cache_k, cache_v, prompt(), 0.25)
    torch.testing.assert_close(got, want[0], **CLOSE)


def test_moe_equals_granites_experts() -> None:
    config = granite.GraniteMoeHybridConfig(
        num_local_experts=5, hidden_size=12, intermediate_size=7, num_experts_per_tok=2, mamba_n_heads=4
    )
    config._experts_implementation = "eager"
    experts = granite.GraniteMoeHybridExperts(config)
    experts.gate_up_proj.data, experts.down_proj.data = noise(5, 14, 12), noise(5, 12, 7, seed=1)
    x = noise(11, 12, seed=2)
    weights, ids = noise(11, 5, seed=3).softmax(-1).topk(2, dim=-1)
    with torch.no_grad():
        want = experts(x, ids, weights)
    got = moe(x, ids, weights, experts.gate_up_proj.detach(), experts.down_proj.detach())
    torch.testing.assert_close(got, want, **CLOSE)
