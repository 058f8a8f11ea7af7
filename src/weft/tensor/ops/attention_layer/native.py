"""attention_layer by ``csrc/layers.cpp``: up to seven kernels in one call."""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer.unfused import AttentionCore, CosSin
from weft.tensor.ops.paged_attention.native import DIM_MAX


def supported(projected_TW: torch.Tensor, core: AttentionCore, cache: LayerCache) -> bool:
    return (native.fits(projected_TW) and not core.shape.ring and cache.head_scales is None
            and projected_TW.stride(1) == 1 and core.shape.head_dim % native.LANES == 0
            and core.shape.head_dim <= DIM_MAX and cache.k is not None and cache.k.dtype in native.KV_DTYPES
            and (core.q_norm is None or core.q_norm.dtype in native.DTYPES))


def attention_layer(projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache,
                    cos_sin: CosSin | None) -> torch.Tensor:
    shape = core.shape
    out_TC = torch.empty((projected_TW.shape[0], shape.heads * shape.head_dim), dtype=projected_TW.dtype)
    _bound(core).run(native.runs_of(inputs.runs), native.asked_runs_of(inputs),
                     native.projected_of(projected_TW),
                     *_around(core, inputs, cache, cos_sin), out_TC.data_ptr())
    return out_TC


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, core: AttentionCore, inputs: StepInputs,
              cache: LayerCache, cos_sin: CosSin | None) -> torch.Tensor | None:
    bound = fused.bound(x_TD)
    if bound is None or inputs.asked is not None or not supported(x_TD, core, cache):
        return None
    out_TD = fused.out(x_TD)
    bound.attention(_bound(core), native.runs_of(inputs.runs), native.projected_of(x_TD),
                    *_around(core, inputs, cache, cos_sin), out_TD.data_ptr())
    return out_TD


def _around(core: AttentionCore, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> Any:
    """The other arguments of a layer: rotary tables, pages, the page table, scales."""
    assert cache.k is not None
    assert cache.v is not None
    assert cache.k.dtype == cache.v.dtype, f"K pages of {cache.k.dtype}, V pages of {cache.v.dtype}"
    if core.shape.rope is None:
        cos_address = sin_address = rotary_dim = 0
    else:
        assert cos_sin is not None, "a rotary layer in a model without rotary tables"
        cos_TD, sin_TD = cos_sin
        assert cos_TD.dtype == sin_TD.dtype == torch.float32
        assert cos_TD.is_contiguous()
        assert sin_TD.is_contiguous()
        cos_address, sin_address, rotary_dim = cos_TD.data_ptr(), sin_TD.data_ptr(), cos_TD.shape[1]
    return (cos_address, sin_address, rotary_dim, native.pages_of(cache.k), native.pages_of(cache.v),
            *native.page_table_of(inputs.runs), *native.token_scales(cache.token_scales))


def _bound(core: AttentionCore) -> Any:
    """The layer's C++ object, built by its first step."""
    if core.bound is None:
        core.bound = _bind(core)
    return core.bound


def _bind(core: AttentionCore) -> Any:
    shape = core.shape
    norms = []
    for weight, heads in ((core.q_norm, shape.heads), (core.k_norm, shape.kv_heads)):
        if weight is None:
            norms.append((0, 0, 0.0))
            continue
        assert weight.is_contiguous()
        assert weight.shape == (shape.head_dim * (heads if shape.norm_whole else 1),)
        norms.append((weight.data_ptr(), native.DTYPES[weight.dtype], core.norm_eps))
    assert (norms[0][0] == 0) == (norms[1][0] == 0), "norms of q and k come together"
    return native.extension().AttentionLayer(
        shape.heads, shape.kv_heads, shape.head_dim, shape.gated, shape.head_gated, shape.norm_whole, *norms,
        core.plus_one, shape.scale, shape.window or 0)


def staged(fused: FusedBlock, x_TD: torch.Tensor, core: AttentionCore,
           cache: LayerCache) -> FusedLayer | None:
    if fused.bound(x_TD) is None or not supported(x_TD, core, cache):
        return None
    assert cache.k is not None
    assert cache.v is not None
    assert cache.k.dtype == cache.v.dtype, f"K pages of {cache.k.dtype}, V pages of {cache.v.dtype}"
    return FusedLayer(fused, 4, _bound(core), first=native.pages_of(cache.k), second=native.pages_of(cache.v),
                  scales=native.token_scales(cache.token_scales))
