"""Recurrent layers between their two projections: a gated delta net, and Mamba-2.

    gated delta net    convolution, gates, delta rule, gated norm
    Mamba-2            convolution, recurrence, gated norm

In C++ (csrc/layers.cpp) the three kernels of a layer are one call, with both projections or without: ``RecurrentCore``
is that call, ``GATED_DELTA`` and ``MAMBA2`` are its parameters for each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.mamba import Mamba2
from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.ops.conv import causal_conv, weights_of
from weft.tensor.ops.delta_rule import delta_gates, delta_rule
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.norm import rms_norm


class _Weights(Protocol):
    bound: Any
    """C++ object, after the first step."""


W = TypeVar("W", bound=_Weights)


@dataclass(frozen=True, slots=True)
class RecurrentCore(Generic[W]):
    """C++ form of a layer with a window and a state between its projections. ``layer``: the op of the layer.
    ``number``: of ``Core``. ``takes``: whether the kernels serve these weights. ``bind`` makes the C++ object of the
    weights. ``logged``: number of columns of the projection that the log of a step copies, and (first, count) of the
    other columns, which gate the output and reach no state. ``width``: of the output.
    """

    layer: Callable[..., torch.Tensor]
    number: int
    takes: Callable[[W], bool]
    bind: Callable[[W], Any]
    logged: Callable[[W], tuple[int, tuple[int, int]]]
    width: Callable[[W], int]

    def run(
        self,
        projected_TW: torch.Tensor,
        weights: W,
        window_SCW: torch.Tensor,
        state_S: torch.Tensor,
        runs: Runs,
        layer: int = 0,
    ) -> torch.Tensor | Unfit:
        """Run the C++ form of the layer's op."""
        if not self._fits(projected_TW, weights, window_SCW, state_S):
            return UNFIT
        out_TC = torch.empty((projected_TW.shape[0], self.width(weights)), dtype=projected_TW.dtype)
        self._log(projected_TW.dtype, weights, window_SCW, state_S, runs, layer)
        self._bound(weights).run(
            native.runs_of(runs),
            native.projected_of(projected_TW),
            native.slots_of(window_SCW),
            native.slots_of(state_S),
            layer,
            out_TC.data_ptr(),
        )
        return out_TC

    def staged(
        self,
        fused: FusedBlock,
        x_TD: torch.Tensor,
        weights: W,
        window_SCW: torch.Tensor,
        state_S: torch.Tensor,
        layer: int,
    ) -> FusedLayer | None:
        """Return the same layer for the fused decoder (``weft.models.fused_decoder``)."""
        if fused.bound(x_TD) is None or not self._fits(x_TD, weights, window_SCW, state_S):
            return None
        return FusedLayer(
            fused,
            self.number,
            self._bound(weights),
            first=native.slots_of(window_SCW),
            second=native.slots_of(state_S),
            number=layer,
        )

    def _fits(self, x_TD: torch.Tensor, weights: W, window_SCW: torch.Tensor, state_S: torch.Tensor) -> bool:
        return (
            native.fits(x_TD)
            and x_TD.stride(1) == 1
            and state_S.dtype in native.STATE_DTYPES
            and window_SCW.dtype in native.DTYPES
            and self.takes(weights)
        )

    def _log(
        self, dtype: torch.dtype, weights: W, window_SCW: torch.Tensor, state_S: torch.Tensor, runs: Runs, layer: int
    ) -> None:
        """Let the next call with these states and ``runs`` copy its projection into the log of the step."""
        if runs.log is None:
            return

        def replay(logged_TW: torch.Tensor, again: Runs) -> None:
            self._bound(weights).run(
                native.runs_of(again),
                native.projected_of(logged_TW),
                native.slots_of(window_SCW),
                native.slots_of(state_S),
                layer,
                0,
            )

        native.log_projected(runs, window_SCW, *self.logged(weights), dtype, replay)

    def _bound(self, weights: W) -> Any:
        if weights.bound is None:
            weights.bound = self.bind(weights)
        return weights.bound


@dataclass(slots=True)
class GatedDeltaWeights:
    """Weights of a gated delta net: ``conv_CK`` [channels, kernel]; ``decay_H`` (-exp(A_log)) and ``dt_bias_H``:
    float32 [heads]; ``norm_V``: [V], shared by the heads; ``shape``: of one rank. Immutable once a layer has run.
    """

    conv_CK: torch.Tensor
    decay_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_V: torch.Tensor
    norm_eps: float
    shape: GatedDelta
    bound: Any = field(default=None, repr=False, compare=False)


@op("weft.tensor.kernels.conv_and_gates")
def conv_and_gates(
    qkv_TC: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: GatedDeltaWeights,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``causal_conv`` of ``qkv_TC`` and ``delta_gates`` of ``a_TH`` and ``b_TH``, as both ops do."""
    w = weights
    qkv_TC = causal_conv(qkv_TC, w.conv_CK, None, "silu", window_SCW, runs)
    return qkv_TC, *delta_gates(a_TH, w.dt_bias_H, w.decay_H, b_TH, beta_scale=w.shape.beta_scale)


@op()
def gated_delta_layer(
    projected_TW: torch.Tensor,
    weights: GatedDeltaWeights,
    window_SCW: torch.Tensor,
    state_S: torch.Tensor,
    runs: Runs,
    layer: int = 0,
) -> torch.Tensor:
    """Return the input [T, heads * V] of the output projection. ``projected_TW`` [T, W]: output of the input
    projection, columns q, k, v, z, b, a.

        q k v <- silu(conv(q k v))      beta = scale sigmoid(b)      g = decay softplus(a + dt_bias)
        o = gated_delta(q, k, v, g, beta)        norm(o, per head) silu(z), or gate_scale sigmoid(z)

    State arguments as in ``causal_conv`` and ``delta_rule``. Gates are float32; values between the ops are
    rounded to the dtype of ``projected_TW``.

    Source: Gated Delta Networks (Yang et al., 2024), transformers ``Qwen3NextGatedDeltaNet``.
    """
    w, shape = weights, weights.shape
    tokens, keys, values = projected_TW.shape[0], shape.key_width, shape.value_width
    qkv_TC, z, b_TH, a_TH = torch.split(projected_TW, [2 * keys + values, values, shape.v_heads, shape.v_heads], dim=-1)
    qkv_TC, g_TH, beta_TH = conv_and_gates(qkv_TC, a_TH, b_TH, w, window_SCW, runs)
    q, k, v = torch.split(qkv_TC, [keys, keys, values], dim=-1)
    o_THV = delta_rule(
        q.reshape(tokens, shape.k_heads, shape.k_dim),
        k.reshape(tokens, shape.k_heads, shape.k_dim),
        v.reshape(tokens, shape.v_heads, shape.v_dim),
        g_TH,
        beta_TH,
        state_S,
        runs,
        scale=shape.k_dim**-0.5,
        layer=layer,
    )
    z_THV = z.reshape(tokens, shape.v_heads, shape.v_dim)
    if shape.sigmoid_gate:
        o_THV = rms_norm(o_THV, w.norm_V, w.norm_eps, plus_one=shape.norm_plus_one)
        gate_THV = torch.sigmoid(z_THV.float()) * shape.gate_scale
        return (o_THV.float() * gate_THV).to(o_THV.dtype).flatten(1)
    return rms_norm(o_THV, w.norm_V, w.norm_eps, gate=z_THV).flatten(1)


def _delta_fits(w: GatedDeltaWeights) -> bool:
    return (
        not w.shape.sigmoid_gate
        and w.conv_CK.dtype in native.DTYPES
        and w.norm_V.dtype in native.DTYPES
        and w.conv_CK.shape[1] <= native.KERNEL_MAX
        and w.shape.v_dim % native.LANES == 0
        and w.shape.k_dim % native.LANES == 0
        and w.shape.k_dim <= native.KEY_DIM_MAX
    )


def _delta_bound(w: GatedDeltaWeights) -> Any:
    for gate in (w.decay_H, w.dt_bias_H):
        assert gate.dtype == torch.float32
        assert gate.shape == (w.shape.v_heads,)
        assert gate.is_contiguous()
    assert w.norm_V.is_contiguous()
    assert w.conv_CK.shape[0] == 2 * w.shape.key_width + w.shape.value_width
    return native.extension().GatedDeltaLayer(
        weights_of(w.conv_CK, None),
        (w.norm_V.data_ptr(), native.DTYPES[w.norm_V.dtype], w.norm_eps),
        w.decay_H.data_ptr(),
        w.dt_bias_H.data_ptr(),
        w.shape.beta_scale,
        w.shape.k_heads,
        w.shape.v_heads,
        w.shape.k_dim,
        w.shape.v_dim,
    )


def _delta_logged(w: GatedDeltaWeights) -> tuple[int, tuple[int, int]]:
    channels, values = w.conv_CK.shape[0], w.shape.value_width
    return channels + 2 * w.shape.v_heads, (channels, values)


GATED_DELTA = RecurrentCore(
    gated_delta_layer, 2, _delta_fits, _delta_bound, _delta_logged, lambda w: w.shape.value_width
)
gated_delta_layer.in_cpp(GATED_DELTA.run)


@dataclass(slots=True)
class Mamba2Weights:
    """Weights of Mamba-2: ``conv_CK`` [channels, kernel]; ``conv_bias_C`` [channels] or None; ``a_H`` (-exp(A_log)),
    ``d_H``, ``dt_bias_H``: float32 [heads]; ``norm_C``: [heads * head_dim], None for a layer without a norm; ``shape``:
    of one rank. Immutable once a layer has run.
    """

    conv_CK: torch.Tensor
    conv_bias_C: torch.Tensor | None
    a_H: torch.Tensor
    d_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_C: torch.Tensor | None
    norm_eps: float
    shape: Mamba2
    bound: Any = field(default=None, repr=False, compare=False)


@op()
def mamba2_layer(
    projected_TW: torch.Tensor,
    weights: Mamba2Weights,
    window_SCW: torch.Tensor,
    state_S: torch.Tensor,
    runs: Runs,
    layer: int = 0,
) -> torch.Tensor:
    """Return the input [T, heads * P] of the output projection. ``projected_TW`` [T, W]: output of the input
    projection, columns gate, x, B, C, dt.

        x B C <- silu(conv(x B C))      y = mamba2(x, dt, A, B, C, D)
        norm(y silu(gate)) or norm(y) silu(gate), over groups; without a norm y silu(gate)

    State arguments as in ``causal_conv`` and ``mamba2``. Values between the ops are rounded to the dtype of
    ``projected_TW``.

    Source: Mamba-2 (Dao and Gu, 2024), transformers ``GraniteMoeHybridMambaLayer``.
    """
    w, shape = weights, weights.shape
    tokens, inner, group = projected_TW.shape[0], shape.inner_width, shape.group_width
    gate_TC, xbc_TC, dt_TH = torch.split(projected_TW, [inner, inner + 2 * group, shape.heads], dim=-1)
    xbc_TC = causal_conv(xbc_TC, w.conv_CK, w.conv_bias_C, "silu", window_SCW, runs)
    x, b, c = torch.split(xbc_TC, [inner, group, group], dim=-1)
    y_THP = mamba2(
        x.reshape(tokens, shape.heads, shape.head_dim),
        dt_TH,
        w.a_H,
        b.reshape(tokens, shape.groups, shape.state_dim),
        c.reshape(tokens, shape.groups, shape.state_dim),
        w.d_H,
        w.dt_bias_H,
        state_S,
        runs,
        dt_limit=shape.dt_limit,
        layer=layer,
    )
    y_TC = y_THP.flatten(1)
    if w.norm_C is None:
        return y_TC * F.silu(gate_TC)
    return rms_norm(
        y_TC,
        w.norm_C,
        w.norm_eps,
        gate=gate_TC,
        gate_first=shape.norm == "gate_first",
        group_size=inner // shape.groups,
    )


def _mamba2_fits(w: Mamba2Weights) -> bool:
    return (
        w.norm_C is not None
        and w.conv_CK.dtype in native.DTYPES
        and w.norm_C.dtype in native.DTYPES
        and w.conv_CK.shape[1] <= native.KERNEL_MAX
        and w.conv_CK.shape[0] % native.LANES == 0
        and w.shape.state_dim % native.LANES == 0
        and w.shape.state_dim <= native.STATE_DIM_MAX
        and (w.shape.inner_width // w.shape.groups) % native.LANES == 0
    )


def _mamba2_bound(w: Mamba2Weights) -> Any:
    inner = w.shape.inner_width
    for row in (w.a_H, w.d_H, w.dt_bias_H):
        assert row.dtype == torch.float32
        assert row.shape == (w.shape.heads,)
        assert row.is_contiguous()
    assert w.norm_C is not None
    assert w.norm_C.is_contiguous()
    assert w.conv_CK.shape[0] == inner + 2 * w.shape.group_width
    return native.extension().Mamba2Layer(
        weights_of(w.conv_CK, w.conv_bias_C),
        (w.norm_C.data_ptr(), native.DTYPES[w.norm_C.dtype], w.norm_eps),
        w.a_H.data_ptr(),
        w.d_H.data_ptr(),
        w.dt_bias_H.data_ptr(),
        w.shape.heads,
        w.shape.groups,
        w.shape.head_dim,
        w.shape.state_dim,
        inner // w.shape.groups,
        w.shape.norm == "gate_first",
        *w.shape.dt_limit,
    )


def _mamba2_logged(w: Mamba2Weights) -> tuple[int, tuple[int, int]]:
    inner = w.shape.inner_width
    return inner + 2 * w.shape.group_width + w.shape.heads, (0, inner)


MAMBA2 = RecurrentCore(mamba2_layer, 3, _mamba2_fits, _mamba2_bound, _mamba2_logged, lambda w: w.shape.inner_width)
mamba2_layer.in_cpp(MAMBA2.run)
