"""The stages of the fused decoder, each in a call of its own: ``FusedBlock`` of the C++ extension."""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.tensor.ops import attention_layer, conv
from weft.tensor.ops.recurrent_layers import RecurrentCore


def _out(fused: FusedBlock, x_TD: torch.Tensor) -> torch.Tensor:
    return torch.empty((x_TD.shape[0], fused.second.rows), dtype=x_TD.dtype)


def swiglu(fused: FusedBlock, x_TD: torch.Tensor) -> torch.Tensor | None:
    """Return ``fused.second(silu_mul(fused.first(x)))``; None if the kernels cannot fuse it."""
    bound = fused.bound(x_TD)
    if bound is None or fused.second.columns % native.LANES:
        return None
    assert fused.first.rows == 2 * fused.second.columns
    out_TD = _out(fused, x_TD)
    # A fused block is called for its output: `first` must give both halves of the columns.
    bound.swiglu(native.projected_of(x_TD), out_TD.data_ptr())
    return out_TD


def short_conv(
    fused: FusedBlock,
    x_TD: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor | None:
    """Return ``fused.second(short_conv(fused.first(x), ...))``; None if the kernels cannot fuse it."""
    bound = fused.bound(x_TD)
    # The C++ layer reads B, C and x from the buffer of its own projection: only x_TD's form matters here.
    if bound is None or not conv.in_cpp_takes(x_TD, weight_CK, window_SCW):
        return None
    out_TD, channels = _out(fused, x_TD), weight_CK.shape[0]
    # The log takes the columns B and x, and leaves out C between them.
    native.log_projected(
        runs, window_SCW, 2 * channels, (channels, channels), x_TD.dtype, conv._replay(weight_CK, bias_C, window_SCW)
    )
    bound.short_conv(
        native.runs_of(runs),
        native.projected_of(x_TD),
        conv.weights_of(weight_CK, bias_C),
        native.slots_of(window_SCW),
        out_TD.data_ptr(),
    )
    return out_TD


def attention(
    fused: FusedBlock,
    x_TD: torch.Tensor,
    core: attention_layer.AttentionCore,
    inputs: StepInputs,
    cache: LayerCache,
    cos_sin: attention_layer.CosSin | None,
) -> torch.Tensor | None:
    """Return ``fused.second(attention_layer(fused.first(x), ...))``; None if the kernels cannot fuse it."""
    bound = fused.bound(x_TD)
    if bound is None or inputs.output_rows is not None or not attention_layer._takes(x_TD, core, cache):
        return None
    out_TD = _out(fused, x_TD)
    bound.attention(
        attention_layer._bound(core),
        native.runs_of(inputs.runs),
        native.projected_of(x_TD),
        *attention_layer._around(core, inputs, cache, cos_sin),
        out_TD.data_ptr(),
    )
    return out_TD


def recurrent(
    core: RecurrentCore[Any],
    fused: FusedBlock,
    x_TD: torch.Tensor,
    weights: Any,
    window_SCW: torch.Tensor,
    state_S: torch.Tensor,
    runs: Runs,
) -> torch.Tensor | None:
    """Return ``fused.second(the layer's op(fused.first(x), ...))``; None if the kernels cannot fuse it."""
    block = fused.bound(x_TD)
    if block is None or not core._fits(x_TD, weights, window_SCW, state_S):
        return None
    out_TD = _out(fused, x_TD)
    core._log(x_TD.dtype, weights, window_SCW, state_S, runs, 0)
    stage = {2: block.gated_delta, 3: block.mamba2}[core.number]
    stage(
        core._bound(weights),
        native.runs_of(runs),
        native.projected_of(x_TD),
        native.slots_of(window_SCW),
        native.slots_of(state_S),
        0,
        out_TD.data_ptr(),
    )
    return out_TD
