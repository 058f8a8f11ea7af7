"""Softmax attention: one projection, norms, rotary, write, read, output gate.

    x_TD --qkv--> [ q | (gate) | k | v | (head gates) ]        rows of one matrix, in this order
                    |             |   |
                 norm,rotary   norm,rotary
                    |             |   +--- write_kv into the pages of this step's tokens
                    +--- paged_attention over all pages of each run ---> o * sigmoid(gate) --out--> y_TD

A layer whose window is kept as a ring has no pages: one op writes the ring in the state slot and reads it.
Sources of the gates: transformers, ``Qwen3NextAttention`` and ``Lfm3Attention``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.architecture import Attention
from weft.models.blocks.linear import Linear, Norm, Projection, fused_block_of
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import AttentionCore, CosSin, attention_layer, run_fused, staged

__all__ = ["AttentionBlock", "CosSin", "separate_gate"]


@dataclass(slots=True)
class AttentionBlock:
    """``qkv``: rows q [heads * D], gate [heads * D] when ``shape.gated``, k, v [kv_heads * D each], head
    gates [heads] when ``shape.head_gated``. Norms are over D, or over all heads when ``shape.norm_whole``."""

    shape: Attention
    qkv: Projection
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    core: AttentionCore = field(init=False)
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        q_norm, k_norm = self.q_norm, self.k_norm
        self.core = AttentionCore(
            self.shape, None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps, q_norm is not None and q_norm.plus_one)
        self.fused = fused_block_of(self.qkv, self.out)

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        if self.fused is not None and (
                y_TD := run_fused(self.fused, x_TD, self.core, inputs, cache, cos_sin)) is not None:
            return y_TD
        return self.out(inputs.asked_of(attention_layer(self.qkv(x_TD), self.core, inputs, cache, cos_sin)))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        if self.fused is None:
            return None
        return staged(self.fused, x_TD, self.core, cache)


def separate_gate(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """A gated query projection is stored head by head as [query | gate]; this returns all query rows, then
    all gate rows. ``weight``: [heads * 2 * head_dim, ...] -> the same shape."""
    split = weight.reshape(heads, 2, head_dim, *weight.shape[1:])
    return split.transpose(0, 1).reshape(weight.shape)
