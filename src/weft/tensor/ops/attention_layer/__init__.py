"""An attention layer between its two projections: norms, rotary, write, read, output gates."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import native, unfused
from weft.tensor.ops.attention_layer.unfused import AttentionCore, CosSin, write_projected

__all__ = ["AttentionCore", "CosSin", "attention_layer", "run_fused", "staged",
           "write_projected"]


def attention_layer(projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache,
                    cos_sin: CosSin | None) -> torch.Tensor:
    """``projected_TW`` [T, W]: output of the input projection, columns q, gate (if ``shape.gated``), k, v,
    head gates (if ``shape.head_gated``). Returns the input [T, heads * D] of the output projection.

        q, k <- norms, per head or over all heads        q, k <- rotary(q, k)
        write_kv(k, v);   o = paged_attention(q)         or, for a ring, window_attention(q, k, v)
        o sigmoid(head gate) sigmoid(gate)

    Writes the pages, or the ring, of ``cache``. Values between the ops are rounded to the dtype of
    ``projected_TW``.

    Sources of the gates: transformers, ``Qwen3NextAttention`` and ``Lfm3Attention``.
    """
    if gpu.fits(projected_TW):
        from weft.tensor.kernels import attention_layer as triton
        if triton.supported(projected_TW, core):
            return triton.attention_layer(projected_TW, core, inputs, cache, cos_sin)
    if native.supported(projected_TW, core, cache):
        return native.attention_layer(projected_TW, core, inputs, cache, cos_sin)
    return unfused.attention_layer(projected_TW, core, inputs, cache, cos_sin)


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, core: AttentionCore, inputs: StepInputs,
              cache: LayerCache, cos_sin: CosSin | None) -> torch.Tensor | None:
    """``fused.second(attention_layer(fused.first(x), ...))``; None if the kernels cannot fuse it."""
    return native.run_fused(fused, x_TD, core, inputs, cache, cos_sin)


def staged(fused: FusedBlock, x_TD: torch.Tensor, core: AttentionCore,
           cache: LayerCache) -> FusedLayer | None:
    """The same layer for the fused decoder (``weft.models.fused_decoder``)."""
    return native.staged(fused, x_TD, core, cache)
