"""Full attention over KV pages: one projection, per-head norms, rotary, write, read, output gate.

    x_TD --qkv--> [ q | (gate) | k | v ]        rows of one matrix, in this order
                    |             |   |
                 norm,rotary   norm,rotary
                    |             |   +--- write_kv into the pages of this step's tokens
                    +--- paged_attention over all pages of each run ---> o * sigmoid(gate) --out--> y_TD

Covers Qwen3 (norms), Qwen3.5 / Qwen3-Next (norms, gate, partial rotary), LFM2 (norms), and Granite (its own
scale, rotary or none). Source of the gate: transformers, ``Qwen3NextAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.architecture import Attention
from weft.models.blocks.linear import Linear, Norm, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.rotary import rotary
from weft.tensor.ops.write_kv import write_kv

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class AttentionBlock:
    """``qkv``: rows q [heads * D], gate [heads * D] when ``shape.gated``, k, v [kv_heads * D each]."""

    shape: Attention
    qkv: Linear
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        assert cache.k is not None, "an attention layer without pages"
        assert cache.v is not None, "an attention layer without pages"
        q_THD, gate, k_THD, v_THD = self._split(self.qkv(x_TD))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_THD = self.q_norm(q_THD), self.k_norm(k_THD)
        if self.shape.rope is not None:
            assert cos_sin is not None, "a rotary layer in a model without rotary tables"
            q_THD, k_THD = rotary(q_THD, k_THD, *cos_sin)
        write_kv(k_THD, v_THD, cache.k, cache.v, inputs.positions_T, inputs.runs)
        o_TC = paged_attention(q_THD, cache.k, cache.v, inputs.runs, self.shape.scale).flatten(1)
        if gate is not None:
            o_TC = o_TC * torch.sigmoid(gate)
        return self.out(o_TC)

    def _split(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None,
                                                   torch.Tensor, torch.Tensor]:
        shape = self.shape
        q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        gate_width = q_width if shape.gated else 0
        q, gate, k, v = torch.split(fused, [q_width, gate_width, kv_width, kv_width], dim=-1)
        return (by_head(q, shape.heads), gate if shape.gated else None,
                by_head(k, shape.kv_heads), by_head(v, shape.kv_heads))


def separate_gate(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """A gated query projection is stored head by head as [query | gate]; this returns all query rows, then
    all gate rows. ``weight``: [heads * 2 * head_dim, ...] -> the same shape."""
    split = weight.reshape(heads, 2, head_dim, *weight.shape[1:])
    return split.transpose(0, 1).reshape(weight.shape)
