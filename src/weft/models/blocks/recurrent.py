"""Mixers with a state: delta nets, Mamba, the short convolution. Each is a projection, an op, a projection.

    gated delta net   x_TD --in--> [ q | k | v | z | b | a ]           rows of one matrix, in this order
                                     causal conv + silu over q k v (window state)
                                     beta = sigmoid(b) (times 2 in OLMo)
                                     g = -exp(A_log) * softplus(a + dt_bias)
                                     delta rule over (q, k, v, g, beta) (recurrent state, fp32)
                                     norm per head, times silu(z) --out--> y_TD

    Kimi delta        x_TD --in--> [ q | k | v | b | f | g ]           f and g: bottlenecks as wide as a head
                                     decay = -exp(A_log) * softplus(F f + dt_bias), per head and channel
                                     norm per head, times sigmoid(G g) --out--> y_TD

    Mamba-2           x_TD --in--> [ gate | x | B | C | dt ]
                                     causal conv + silu over x B C (window state)
                                     state space over (x, dt, A, B, C, D); dt = softplus(dt + bias)
                                     RMS norm of (y * silu(gate)), per group --out--> y_TD

    Mamba-1           x_TD --in--> [ x | gate ]
                                     causal conv + silu over x (window state)
                                     x --select--> [ dt (rank) | B | C ], normed in Jamba and Falcon-Mamba
                                     dt --step--> one step per channel
                                     scan over (x, dt, A, B, C, D), times silu(gate) --out--> y_TD
                                     (in Zamba each head selects of its own channels)

    RG-LRU            x_TD --in--> [ y | x ] ;  causal conv over x (window state)
                                     read, forget = sigmoid of x by head;  d = 8 forget softplus(rate)
                                     h <- e^-d h + sqrt(1 - e^-2d) read x, times gelu(y) --out--> y_TD

    lightning         x_TD --in--> [ q | k | v | g ];  silu over q k v, or norm and rotary of q k (Ling 2.5)
                                     S <- e^-slope S + v k^T,  y = S q (recurrent state)
                                     norm over (groups of) heads, times sigmoid(g) --out--> y_TD

    LFM2              x_TD --in--> [ B | C | x ] ;  y = C * conv(B * x) --out--> y_TD

Papers: Gated Delta Networks (Yang et al., 2024); Kimi Linear (Kimi Team, 2025); Mamba-2 (Dao and Gu, 2024);
Mamba (Gu and Dao, 2023); Griffin (De et al., 2024); Lightning Attention-2 (Qin et al., 2024).

In transformers: ``Qwen3NextGatedDeltaNet``, ``KimiLinearDeltaAttention``, ``GraniteMoeHybridMambaLayer``,
``FalconH1Mixer``, ``MambaMixer``, ``JambaMambaMixer``, ``ZambaMambaMixer``, ``RecurrentGemmaRglru``,
``MiniMaxLightningAttention``, ``Lfm2ShortConv``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from weft.families.architecture import GatedDelta, KimiDelta, Lightning, Mamba1, RgLru, ShortConv
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import HeadLinear, Linear, Norm, Projection, by_head, fused_block_of
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.conv import causal_conv, centred_short_conv, short_conv, staged
from weft.tensor.ops.delta_rule import delta_gates, delta_rule
from weft.tensor.ops.elementwise import activate, each, rotary
from weft.tensor.ops.mamba1 import mamba1
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.norm import rms_norm
from weft.tensor.ops.recurrent_layers import GatedDeltaWeights, Mamba2Weights, RecurrentCore


@dataclass(slots=True)
class RecurrentBlock:
    """A gated delta net or Mamba-2: ``core`` is the layer between the projections, ``weights`` what it
    computes with. ``factors``: on each output of ``project``, None where all are 1."""

    core: RecurrentCore[Any]
    weights: GatedDeltaWeights | Mamba2Weights
    project: Linear
    out: Projection
    factors: torch.Tensor | None = None
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The fused kernels know no factors on the parts of the projection (Falcon-H1).
        self.fused = None if self.factors is not None else fused_block_of(self.project, self.out)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        window_SCW, state_S = cache.state["conv"], cache.state["recurrent"]
        projected = self.project(x_TD)
        if self.factors is not None:
            projected = projected * self.factors
        o_TC = self.core.layer(projected, self.weights, window_SCW, state_S, inputs.runs, cache.layer)
        return self.out(inputs.asked_of(o_TC))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        if self.fused is None:
            return None
        return self.core.staged(
            self.fused, x_TD, self.weights, cache.state["conv"], cache.state["recurrent"], cache.layer
        )


def ungroup_qkvz(weight: torch.Tensor, shape: GatedDelta) -> torch.Tensor:
    """Qwen3-Next stores its projection by key head, each group [q | k | its v heads | their z]; this returns
    all q, all k, all v, all z. ``weight``: [2 key_width + 2 value_width, ...] -> the same shape."""
    value = shape.v_heads // shape.k_heads * shape.v_dim
    grouped = weight.reshape(shape.k_heads, 2 * shape.k_dim + 2 * value, *weight.shape[1:])
    return torch.cat(
        [part.flatten(0, 1) for part in torch.split(grouped, [shape.k_dim, shape.k_dim, value, value], dim=1)]
    )


def ungroup_qkv(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Head by head [q | k | v] -> all q, all k, all v. ``weight``: [3 heads * D, ...] -> the same shape."""
    return weight.reshape(heads, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def by_turns(rows: torch.Tensor) -> torch.Tensor:
    """Rows of two halves that take turns -> the first half, then the second."""
    return torch.cat((rows[0::2], rows[1::2]))


def ungroup_ba(weight: torch.Tensor, shape: GatedDelta) -> torch.Tensor:
    """As ``ungroup_qkvz`` for the rows of beta and decay: [2 v_heads, ...], all b and then all a."""
    grouped = weight.reshape(shape.k_heads, 2, shape.v_heads // shape.k_heads, *weight.shape[1:])
    return grouped.transpose(0, 1).reshape(weight.shape)


@dataclass(slots=True)
class KimiDeltaBlock:
    """``conv``: [3 width, kernel]; ``decay``: -exp(A_log), float32 [heads]; ``dt_bias``: float32 [width];
    ``forget`` and ``gate``: from their bottleneck to the width, None for wide gates, which are rows of
    ``project``; ``norm``: [head_dim], shared by the heads."""

    shape: KimiDelta
    project: Projection
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    forget: Linear | None
    gate: Linear | None
    norm: torch.Tensor
    norm_eps: float
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape, runs = self.shape, inputs.runs
        heads, width = shape.heads, shape.width
        between = width if shape.wide_gates else shape.head_dim
        qkv_TC, b_TH, forget, gate = torch.split(self.project(x_TD), [3 * width, heads, between, between], dim=-1)
        forget_TC = forget if self.forget is None else self.forget(forget)
        gate_TC = gate if self.gate is None else self.gate(gate)
        qkv_TC = causal_conv(qkv_TC, self.conv, None, "silu", cache.state["conv"], runs)
        q, k, v = (by_head(part, heads) for part in qkv_TC.chunk(3, dim=-1))
        g_TC, beta_TH = delta_gates(forget_TC, self.dt_bias, self.decay, b_TH, floor=shape.decay_floor)
        o_THV = delta_rule(
            q,
            k,
            v,
            by_head(g_TC, heads),
            beta_TH,
            cache.state["recurrent"],
            runs,
            scale=shape.head_dim**-0.5,
            layer=cache.layer,
        )
        # float32 until the one rounding: a norm in the model's dtype, as elsewhere, would round twice.
        gate_THV = each(torch.sigmoid, by_head(gate_TC, heads).float())
        o_THV = rms_norm(o_THV, self.norm, self.norm_eps).float() * gate_THV
        return self.out(inputs.asked_of(o_THV.flatten(1)).to(x_TD.dtype))


@dataclass(slots=True)
class SelectiveScan:
    """Of a Mamba-1 layer's channels, or of one head's. ``step``: [channels, rank], without its bias, which is
    ``dt_bias``; ``a`` (-exp(A_log)): float32 [channels, N]; ``d``, ``dt_bias``: float32 [channels];
    ``norms``: of dt, B and C, None for a layer without."""

    shape: Mamba1
    select: Projection
    step: Linear
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    norms: tuple[Norm, Norm, Norm] | None = None

    def __call__(self, x_TC: torch.Tensor, state_SCN: torch.Tensor, inputs: StepInputs, layer: int) -> torch.Tensor:
        shape = self.shape
        parts = torch.split(self.select(x_TC), [shape.dt_rank, shape.state_dim, shape.state_dim], dim=-1)
        if self.norms is not None:
            parts = tuple(norm(part) for norm, part in zip(self.norms, parts, strict=True))
        dt, b_TN, c_TN = parts
        return mamba1(
            x_TC, self.step(dt), self.a, b_TN, c_TN, self.d, self.dt_bias, state_SCN, inputs.runs, layer=layer
        )


@dataclass(slots=True)
class Mamba1Block:
    """``conv``: [channels, kernel], ``conv_bias``: [channels] or None. ``scans``: of heads, whose channels
    and states lie side by side."""

    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    scans: tuple[SelectiveScan, ...]
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        x_TC, gate_TC = self.project(x_TD).chunk(2, dim=-1)
        x_TC = causal_conv(x_TC, self.conv, self.conv_bias, "silu", cache.state["conv"], inputs.runs)
        heads = len(self.scans)
        parts = [
            scan(own_TC, state_SCN, inputs, cache.layer)
            for scan, own_TC, state_SCN in zip(
                self.scans, x_TC.chunk(heads, dim=-1), cache.state["recurrent"].chunk(heads, dim=1), strict=True
            )
        ]
        y_TC = parts[0] if heads == 1 else torch.cat(parts, dim=-1)
        return self.out(inputs.asked_of(y_TC) * F.silu(inputs.asked_of(gate_TC)))


@dataclass(slots=True)
class RgLruBlock:
    """``project``: rows y, x; ``conv``: [C, kernel]; ``gates`` [heads, B, 2 B] and ``gate_biases_HJ``:
    of the read and the forget gate; ``rates``: float32 [C].

    The recurrence is that of Mamba-1 with a state of one number, A = -1 and B = C = 1: so its kernels are
    used. They take a step before its softplus and push step times x, and both are undone here."""

    shape: RgLru
    project: Projection
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    gates: HeadLinear
    gate_biases_HJ: torch.Tensor
    rates: torch.Tensor
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        y_TC, x_TC = self.project(x_TD).chunk(2, dim=-1)
        x_TC = causal_conv(x_TC, self.conv, self.conv_bias, None, cache.state["conv"], inputs.runs)
        gates_THJ = self.gates(by_head(x_TC, self.shape.heads))
        read_THB, forget_THB = each(torch.sigmoid, (gates_THJ + self.gate_biases_HJ).float()).chunk(2, dim=-1)
        step_TC = 8.0 * forget_THB.flatten(1) * F.softplus(self.rates)
        step_TC = step_TC.clamp_min(1e-30)
        # The first token has nothing to forget, and is read whole.
        share_TC = torch.where(inputs.positions_T[:, None] == 0, 1.0, (-each(torch.expm1, -2 * step_TC)).sqrt())
        pushed_TC = x_TC.float() * read_THB.flatten(1) * share_TC / step_TC
        channels, ones_T1 = step_TC.shape[1], step_TC.new_ones((len(step_TC), 1))
        state_SC1 = cache.state["recurrent"].flatten(1)[..., None]  # a view: its rows are dense
        nothing_C = step_TC.new_zeros(channels)
        h_TC = mamba1(
            pushed_TC,
            step_TC + each(torch.log, -each(torch.expm1, -step_TC)),
            step_TC.new_full((channels, 1), -1.0),
            ones_T1,
            ones_T1,
            nothing_C,
            nothing_C,
            state_SC1,
            inputs.runs,
            layer=cache.layer,
        )
        return self.out(inputs.asked_of(h_TC).to(x_TD.dtype) * activate(inputs.asked_of(y_TC), "gelu_tanh"))


@dataclass(slots=True)
class LightningBlock:
    """``project``: rows q, k, v, gate; ``slopes``: float32 [heads]; ``norm``: over all heads, or groups of
    them; ``q_norm``, ``k_norm``: over a head, if ``shape.qk_norm``.

    The recurrence is that of Mamba-2 whose every step is 1: so its kernels are used, with values in the place
    of x, keys of B and queries of C."""

    shape: Lightning
    project: Linear
    slopes: torch.Tensor
    norm: Projection
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape, heads, width = self.shape, self.shape.heads, self.shape.heads * self.shape.head_dim
        qkv_TC, gate_TC = torch.split(self.project(x_TD), [3 * width, width], dim=-1)
        qkv_TC = F.silu(qkv_TC) if shape.silu else qkv_TC
        q, k, v = (by_head(part, heads) for part in qkv_TC.chunk(3, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = rotary(q, k, *cos_sin)
        if shape.scale != 1.0:
            q = q * shape.scale
        nothing_H = torch.zeros_like(self.slopes)
        y_THP = mamba2(
            v,
            v.new_zeros(v.shape[:2]),
            -self.slopes,
            k,
            q,
            nothing_H,
            nothing_H,
            cache.state["recurrent"],
            inputs.runs,
            dt_limit=(1.0, 1.0),
            layer=cache.layer,
        )
        y_TC = self.norm(inputs.asked_of(y_THP.flatten(1)))
        return self.out(each(torch.sigmoid, inputs.asked_of(gate_TC)) * y_TC)


@dataclass(slots=True)
class ShortConvBlock:
    """``conv``: [channels, kernel]; ``conv_bias``: [channels] or None."""

    shape: ShortConv
    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    out: Linear
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.fused = fused_block_of(self.project, self.out)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        projected_TJ = self.project(x_TD)
        if self.shape.centred:
            y_TC = centred_short_conv(projected_TJ, self.conv, self.conv_bias, inputs.runs)
        else:
            y_TC = short_conv(projected_TJ, self.conv, self.conv_bias, cache.state["conv"], inputs.runs)
        return self.out(inputs.asked_of(y_TC))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        if self.fused is None or self.shape.centred:
            return None
        return staged(self.fused, x_TD, self.conv, self.conv_bias, cache.state["conv"])
