"""attention_layer as its ops, one after the other: the definition of the fused kernel, and its fallback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from weft.families.architecture import Attention
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.rms_norm import rms_norm
from weft.tensor.ops.rotary import rotary
from weft.tensor.ops.window_attention import window_attention
from weft.tensor.ops.write_kv import write_kv

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class AttentionCore:
    """A layer without its projections. The weights of the norms of q and k come together or not at all: [D],
    or over all heads if ``shape.norm_whole``. Immutable once a layer has run."""

    shape: Attention
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    plus_one: bool
    bound: Any = field(default=None, repr=False, compare=False)
    """The C++ object, after the first step."""


def attention_layer(projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache,
                    cos_sin: CosSin | None) -> torch.Tensor:
    q_THD, gate, k_THD, v_THD, head_gate_TH = _split(projected_TW, core)
    if core.shape.rope is not None:
        assert cos_sin is not None, "a rotary layer in a model without rotary tables"
        q_THD, k_THD = rotary(q_THD, k_THD, *cos_sin)
    o_THD = _attend(q_THD, k_THD, v_THD, core.shape, inputs, cache)
    if head_gate_TH is not None:
        o_THD = o_THD * torch.sigmoid(head_gate_TH)[..., None]
    o_TC = o_THD.flatten(1)
    return o_TC if gate is None else o_TC * torch.sigmoid(gate)


def write_projected(projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache,
                    cos_sin: CosSin | None) -> None:
    """The part of ``attention_layer`` that writes keys and values, for a layer with pages."""
    q_THD, _, k_THD, v_THD, _ = _split(projected_TW, core)
    if core.shape.rope is not None:
        assert cos_sin is not None, "a rotary layer in a model without rotary tables"
        _, k_THD = rotary(q_THD[:, :1], k_THD, *cos_sin)
    scales = cache.head_scales
    if scales is not None:
        k_THD, v_THD = k_THD / scales[0, :, None], v_THD / scales[1, :, None]
    assert cache.k is not None, "an attention layer without pages"
    assert cache.v is not None, "an attention layer without pages"
    write_kv(k_THD, v_THD, cache.k, cache.v, inputs.positions_T, inputs.runs, cache.token_scales)


def _attend(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, shape: Attention,
            inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
    scales = cache.head_scales
    if scales is not None:
        k_THD, v_THD = k_THD / scales[0, :, None], v_THD / scales[1, :, None]
        q_THD = by_kv_head(q_THD, scales[0])
    if shape.ring:
        o_THD = window_attention(q_THD, k_THD, v_THD, cache.state["window"], inputs.runs, shape.scale)
    else:
        assert cache.k is not None, "an attention layer without pages"
        assert cache.v is not None, "an attention layer without pages"
        write_kv(k_THD, v_THD, cache.k, cache.v, inputs.positions_T, inputs.runs, cache.token_scales)
        o_THD = paged_attention(q_THD, cache.k, cache.v, inputs.runs, shape.scale, shape.window,
                                cache.token_scales)
    return o_THD if scales is None else by_kv_head(o_THD, scales[1])


def _split(projected_TW: torch.Tensor, core: AttentionCore) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """-> q by head, the gate [T, heads * D], k and v by head, the head gates [T, heads]; q, k normed."""
    shape = core.shape
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q, gate, k, v, head_gate_TH = torch.split(
        projected_TW, [q_width, q_width if shape.gated else 0, kv_width, kv_width,
                  shape.heads if shape.head_gated else 0], dim=-1)
    q_weight, k_weight = core.q_norm, core.k_norm

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, core.norm_eps, plus_one=core.plus_one)

    if q_weight is not None and k_weight is not None and shape.norm_whole:
        q, k = normed(q, q_weight), normed(k, k_weight)
    q_THD, k_THD = _by_head(q, shape.heads), _by_head(k, shape.kv_heads)
    if q_weight is not None and k_weight is not None and not shape.norm_whole:
        q_THD, k_THD = normed(q_THD, q_weight), normed(k_THD, k_weight)
    return (q_THD, gate if shape.gated else None, k_THD, _by_head(v, shape.kv_heads),
            head_gate_TH if shape.head_gated else None)


def _by_head(x_TC: torch.Tensor, heads: int) -> torch.Tensor:
    return x_TC.reshape(x_TC.shape[0], heads, x_TC.shape[1] // heads)


def by_kv_head(x_THD: torch.Tensor, scale_H: torch.Tensor) -> torch.Tensor:
    """``x_THD`` [T, heads, D] times the scale of its KV head ([kv_heads], powers of two)."""
    tokens, heads, dim = x_THD.shape
    return (x_THD.view(tokens, len(scale_H), -1, dim) * scale_H[:, None, None]).view(tokens, heads, dim)
