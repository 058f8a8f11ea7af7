"""An attention layer in Triton (norm, rotary and page write in one launch) against its ops in torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.steps import on_device, pages_on
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, tokens_in
from tests.ops.kv_pages import blank_pages
from weft.families.mixers.attention import Attention, Rope
from weft.tensor import gpu, native
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import AttentionCore, attention_layer

ROPE = Rope(theta=1e4, rotary_dim=8)
LAYERS = {
    "gated, norms by head": (Attention(4, 2, 16, 0.25, ROPE, qk_norm=True, gated=True), torch.float32),
    "norms by head, bf16": (Attention(2, 1, 16, 0.25, ROPE, qk_norm=True), torch.bfloat16),
    "head gates, norms over all heads, int8": (
        Attention(6, 2, 16, 0.25, ROPE, qk_norm=True, head_gated=True, norm_whole=True),
        torch.int8,
    ),
    "sinks": (Attention(6, 2, 16, 0.25, ROPE, sinks=True), torch.float32),
    "no rotary, no norms, fp8 with scales": (Attention(4, 2, 16, 0.25, None), torch.float8_e4m3fn),
}


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_step(
    shape: Attention, pages_dtype: torch.dtype, kernels: gpu.Choice, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    gpu.choose(kernels)
    runs = make_runs([Run(0), PAD_ROW], [Run(0, 20), Run(0, 1)], pages=10)
    tokens, model = tokens_in(runs), torch.bfloat16 if pages_dtype == torch.bfloat16 else torch.float32
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    width = q * (1 + shape.gated) + 2 * kv + shape.heads * shape.head_gated
    wide = [shape.heads, shape.kv_heads] if shape.norm_whole else [1, 1]
    norms = [noise(shape.head_dim * heads, seed=5).to(device, model) if shape.qk_norm else None for heads in wide]
    pages = pages_on(blank_pages(10, shape.kv_heads, shape.head_dim, pages_dtype), device)
    scales = None
    if pages_dtype == torch.float8_e4m3fn:
        scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]], device=device)
    angles = noise(tokens, 4, seed=6).repeat(1, 2).to(device)
    inputs = StepInputs(
        torch.zeros(tokens, dtype=torch.int64, device=device), positions_of(runs).to(device), on_device(runs, device)
    )
    core = AttentionCore(
        shape,
        norms[0],
        norms[1],
        1e-6,
        plus_one=True,
        sinks=noise(shape.heads, seed=8).to(device) if shape.sinks else None,
    )
    cache = LayerCache(k=pages.k, v=pages.v, token_scales=pages.scales, head_scales=scales)
    made = attention_layer(
        noise(tokens, width, seed=7).to(device, model), core, inputs, cache, (angles.cos(), angles.sin())
    )
    return made.cpu(), [part.float().cpu() for part in (pages.k, pages.v)]


@pytest.fixture(autouse=True)
def torch_ops() -> None:
    native.choose("torch")


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_layer_equals_its_ops_one_by_one(name: str, device: torch.device) -> None:
    shape, pages_dtype = LAYERS[name]
    want, want_pages = one_step(shape, pages_dtype, "torch", device)
    got, pages = one_step(shape, pages_dtype, "triton", device)
    # Gates are rounded once here, and three times there.
    near = close(got.dtype) | ({"atol": 2.0**-6} if got.dtype == torch.bfloat16 else {})
    torch.testing.assert_close(got, want, **near)
    assert (got[1] == 0).all()
    for mine, twin in zip(pages, want_pages, strict=True):
        same = torch.isclose(mine, twin, rtol=1e-5, atol=1e-5, equal_nan=True)
        # Sums of another order, rounded to few bits: some numbers are the neighbours of their twins.
        assert same.float().mean() >= (1.0 if pages_dtype == torch.float32 else 0.99)
    other = dataclasses.replace(shape, scale=shape.scale * 2)  # the control: a layer that differs is seen
    assert (one_step(other, pages_dtype, "triton", device)[0] - want).abs().max() > 1e-2
