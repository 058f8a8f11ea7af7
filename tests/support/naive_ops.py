"""The naive twins of the ops: each by its definition, token by token in float64.

Tests compare every form of an op with them. Signatures are those of the ops (``weft.tensor.ops``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.tensor.ops.elementwise import Activation, activate
from weft.tensor.ops.moe import ExpertBiases, ExpertWeights
from weft.tensor.rounding import rounded
from weft.tensor.weights.quantized import LINE, PART, ZERO_POINT, QuantizedWeight
from weft.units import PAD, PAGE_TOKENS


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    gate: torch.Tensor | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
) -> torch.Tensor:
    wide = x.double()
    if gate is not None and gate_first:
        wide = wide * torch.nn.functional.silu(gate.double())
    groups = wide.reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
    groups = groups / torch.sqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    wide = groups.flatten(-2) * (weight.double() + (1.0 if plus_one else 0.0))
    if gate is not None and not gate_first:
        wide = wide * torch.nn.functional.silu(gate.double())
    return wide.to(x.dtype)


def rotary(
    q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotate(q_THD, cos_TD, sin_TD), _rotate(k_THD, cos_TD, sin_TD)


def _rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    out = x_THD.double().clone()
    half = cos_TD.shape[-1] // 2
    for token in range(x_THD.shape[0]):
        for head in range(x_THD.shape[1]):
            for dim in range(half):
                a, b = x_THD[token, head, dim].double(), x_THD[token, head, half + dim].double()
                cos, sin = cos_TD[token, dim].double(), sin_TD[token, dim].double()
                out[token, head, dim] = a * cos - b * sin
                out[token, head, half + dim] = b * cos + a * sin
    return out.to(x_THD.dtype)


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    width = gate_up_TJ.shape[-1] // 2
    gate, up = gate_up_TJ[..., :width].double(), gate_up_TJ[..., width:].double()
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_TJ.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return (wide / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3)))).to(x.dtype)


def softmax(x: torch.Tensor, scale: float) -> torch.Tensor:
    wide = x.double() * scale
    powers = torch.exp(wide - wide.max(-1, keepdim=True).values)
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, *, rounded: bool = False
) -> torch.Tensor:
    """Multiply by a weight in few bits. ``rounded``: x is rounded to int8 by lines of 32, as the kernels may do."""
    values = weight.dense().double()
    rows = x.reshape(-1, x.shape[-1]).double()
    out = torch.zeros(rows.shape[0], weight.rows, dtype=torch.float64)
    for index, row in enumerate(rows):
        for first in range(0, weight.columns, LINE):
            part = row[first : first + LINE]
            if rounded and bool((part != 0).any()):
                scale = part.abs().max() / 127
                part = (part / scale).round() * scale
            out[index] += values[:, first : first + LINE] @ part
    if bias is not None:
        out += bias.double()
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.rows)


def byte_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a weight with ``byte_inputs``: one part of one row at a time, rounded by Python, summed
    as 64-bit integers, then float32 step by step."""
    plain = weight.by_rows(0, weight.rows)
    codes = plain.codes[: weight.rows, : weight.columns].long() - ZERO_POINT[8]
    rows = x.reshape(-1, weight.columns).float()
    out = torch.zeros(rows.shape[0], weight.rows)
    for index, row in enumerate(rows):
        for first in range(0, weight.columns, PART):
            part = row[first : first + PART]
            reach = part.abs().max()
            if not bool(part.isfinite().all()):
                out[index] = torch.nan
            elif reach >= 1e-30:
                up = torch.tensor(127.0) / reach
                whole = torch.tensor([round(number) for number in (part * up).tolist()])
                sums = (codes[:, first : first + PART] @ whole).float()
                scales = plain.scales[: weight.rows, first // weight.group] * (reach / 127)
                out[index] = out[index] + sums * scales
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.rows)


def moe(
    x_TD: torch.Tensor,
    expert_ids_TX: torch.Tensor,
    expert_weights_TX: torch.Tensor,
    gate_up_EJD: ExpertWeights,
    down_EDI: ExpertWeights,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    biases: ExpertBiases | None = None,
    limit: float = 0.0,
) -> torch.Tensor:
    gate_up, down = (
        weights if isinstance(weights, torch.Tensor) else weights.dense() for weights in (gate_up_EJD, down_EDI)
    )
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token in range(x_TD.shape[0]):
        for choice in range(expert_ids_TX.shape[1]):
            expert = int(expert_ids_TX[token, choice])
            if expert == PAD:
                continue
            inner = gate_up[expert].double() @ x_TD[token].double()
            if biases is not None:
                inner = inner + biases.gate_up_EJ[expert]
            if activation == "clamped_swiglu":
                gate, up = inner[: len(inner) // 2].clamp(max=7), inner[len(inner) // 2 :].clamp(-7, 7)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            elif gated:
                gate, up = inner.chunk(2)
                if limit:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = activate(gate, activation) * up
            else:
                inner = activate(inner, activation)
            expert_out = down[expert].double() @ inner
            if biases is not None:
                expert_out = expert_out + biases.down_ED[expert]
            out[token] += expert_weights_TX[token, choice].double() * expert_out
    return out.to(x_TD.dtype)


def write_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    positions_T: torch.Tensor,
    runs: Runs,
    scales: torch.Tensor | None = None,
) -> None:
    k_pack, v_pack = cache_k.shape[-1], cache_v.shape[-1]
    for run in range(runs.run_count):
        for token in range(runs.offsets[run], runs.offsets[run] + runs.lengths[run]):
            position = int(positions_T[token])
            page = PAD if position == PAD else int(runs.page_table_RP[run, position // PAGE_TOKENS])
            if page == PAD:
                continue
            place = position % PAGE_TOKENS
            for head in range(k_THD.shape[1]):
                k_D, v_D = k_THD[token, head], v_THD[token, head]
                if scales is not None:
                    k_D, scales[page, 0, head, place] = _in_bytes(k_D)
                    v_D, scales[page, 1, head, place] = _in_bytes(v_D)
                dims_D = torch.arange(k_THD.shape[2])
                cache_k[page, head, dims_D // k_pack, place, dims_D % k_pack] = _stored(k_D, cache_k.dtype)
                cache_v[page, head, place // v_pack, dims_D, place % v_pack] = _stored(v_D, cache_v.dtype)


def _in_bytes(x_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers up to 127, and their scale."""
    scale = (x_D.float().abs().max() * (1 / 127)).bfloat16()
    if scale == 0:
        return torch.zeros_like(x_D), scale
    return (x_D.float() / scale.float()).round().clamp(-127, 127), scale


def _stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in ``dtype``. A NaN does not get all bits, which mark unwritten memory: torch sets them when it
    converts complete vectors."""
    if dtype == torch.float8_e4m3fn:
        x = x.float().clamp(-448, 448)
    elif dtype == torch.float16:
        x = x.float().clamp(-65504, 65504)
    stored = x.to(dtype)
    return stored.masked_fill(stored.isnan(), torch.nan) if dtype == torch.bfloat16 != x.dtype else stored


def paged_attention(
    q_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    runs: Runs,
    scale: float,
    window: int | None = None,
    scales: torch.Tensor | None = None,
    sinks_TH: torch.Tensor | None = None,
    bank_RE: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    q_THD, states_THR = _states_apart(q_THD, bank_RE)
    tokens, heads, dim = q_THD.shape
    group = heads // cache_k.shape[1]
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    for run in range(runs.run_count):
        if runs.starts[run] == PAD:
            continue
        start, end = runs.starts[run], runs.starts[run] + runs.lengths[run]
        begin = 0 if window is None else max(0, start - window + 1)
        fetched = _fetch_kv(cache_k, cache_v, scales, runs, run, torch.arange(begin, end))
        context_SHD = [x_SHD.repeat_interleave(group, dim=1) for x_SHD in fetched]
        for position in range(start, end):
            token = runs.offsets[run] + position - start
            first = 0 if window is None else max(0, position - window + 1)
            k_SHD, v_SHD = (x_SHD[first - begin : position + 1 - begin] for x_SHD in context_SHD)
            scores_SH = _capped((k_SHD * q_THD[token].double()).sum(-1) * scale, cap)
            if bank_RE is not None:
                scores_SH += _biases(states_THR[token], bank_RE, position + 1 - first).T
            if sinks_TH is not None:
                scores_SH = torch.cat((scores_SH, sinks_TH[token].double()[None]))
            out[token] = (scores_SH.softmax(dim=0)[: len(v_SHD), :, None] * v_SHD).sum(0)
    return out.to(q_THD.dtype)


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(scores / cap) * cap if cap else scores


def _states_apart(q_THD: torch.Tensor, bank_RE: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    dim = q_THD.shape[2] - (0 if bank_RE is None else bank_RE.shape[0])
    return q_THD[..., :dim], q_THD[..., dim:]


def _biases(states_HR: torch.Tensor, bank_RE: torch.Tensor, count: int) -> torch.Tensor:
    """Return the biases of the last ``count`` keys, [H, count], that of the query's own position last."""
    near = (states_HR.double() @ bank_RE.double())[:, :count]
    return torch.nn.functional.pad(near, (0, count - near.shape[1])).flip(1)


def _fetch_kv(
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    scales: torch.Tensor | None,
    runs: Runs,
    run: int,
    positions_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    page_S, place_S = runs.page_table_RP[run, positions_S // PAGE_TOKENS], positions_S % PAGE_TOKENS
    assert (page_S != PAD).all(), "a position inside the context has no page"
    pack = cache_v.shape[-1]
    k_SHD = cache_k[page_S, :, :, place_S].flatten(2).double()
    v_SHD = cache_v[page_S, :, place_S // pack, :, place_S % pack].double()
    if scales is not None:
        k_SHD, v_SHD = (
            x_SHD * scales[page_S, part, :, place_S, None].double() for part, x_SHD in enumerate((k_SHD, v_SHD))
        )
    return k_SHD, v_SHD


def latent_attention(
    q_THW: torch.Tensor,
    x_TW: torch.Tensor,
    cache: torch.Tensor,
    positions_T: torch.Tensor,
    runs: Runs,
    scale: float,
    value_dim: int,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros(*q_THW.shape[:2], value_dim, dtype=torch.float64)
    for run in range(runs.run_count):
        if runs.starts[run] == PAD:
            continue
        rows = [_fetch_row(cache, scales, runs, run, seen) for seen in range(runs.starts[run])]
        for index in range(runs.lengths[run]):
            token, position = runs.offsets[run] + index, runs.starts[run] + index
            page = int(runs.page_table_RP[run, position // PAGE_TOKENS])
            if page != PAD:
                _store_row(x_TW[token], cache, scales, page, position % PAGE_TOKENS)
            rows.append(_fetch_row(cache, scales, runs, run, position))
            rows_SW = torch.stack(rows)
            weights_HS = (q_THW[token].double() @ rows_SW.T * scale).softmax(dim=-1)
            out[token] = weights_HS @ rows_SW[:, :value_dim]
    return out.to(q_THW.dtype)


def _store_row(x_W: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, page: int, place: int) -> None:
    if scales is not None:
        scale = scales[page, 0, 0, place] = (x_W.float().abs().max() * (1 / 127)).bfloat16()
        x_W = (x_W.float() / (scale.float() or 1)).round().clamp(-127, 127)
    elif cache.dtype == torch.float8_e4m3fn:
        x_W = x_W.float().clamp(-448, 448)
    for index, number in enumerate(x_W.to(cache.dtype)):
        cache[page, 0, index // cache.shape[-1], place, index % cache.shape[-1]] = number


def _fetch_row(cache: torch.Tensor, scales: torch.Tensor | None, runs: Runs, run: int, position: int) -> torch.Tensor:
    page, place = int(runs.page_table_RP[run, position // PAGE_TOKENS]), position % PAGE_TOKENS
    assert page != PAD, "a position inside the context has no page"
    row_W = cache[page, 0, :, place].flatten().double()
    return row_W if scales is None else row_W * scales[page, 0, 0, place].double()


def window_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    ring_S2HWD: torch.Tensor,
    runs: Runs,
    scale: float,
    sinks_TH: torch.Tensor | None = None,
    bank_RE: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    q_THD, states_THR = _states_apart(q_THD, bank_RE)
    group, window = q_THD.shape[1] // k_THD.shape[1], ring_S2HWD.shape[3]
    out = torch.zeros(q_THD.shape, dtype=torch.float64)
    for run in range(runs.run_count):
        slot, start = runs.slots[run], max(runs.starts[run], 0)
        alone = slot == PAD or runs.fresh[run]
        ring = ring_S2HWD.new_zeros(ring_S2HWD.shape[1:]) if alone else ring_S2HWD[slot].clone()
        first = start if alone else 0
        taps = {tap.offset: tap.slot for tap in runs.taps if tap.run == run}
        for index in range(runs.lengths[run]):
            token, position = runs.offsets[run] + index, start + index
            ring[0, :, position % window] = k_THD[token].to(ring.dtype)
            ring[1, :, position % window] = v_THD[token].to(ring.dtype)
            seen = [p % window for p in range(max(first, position - window + 1), position + 1)]
            k_HSD, v_HSD = (part[:, seen].double().repeat_interleave(group, dim=0) for part in ring)
            scores_HS = _capped((k_HSD * q_THD[token, :, None].double()).sum(-1) * scale, cap)
            if bank_RE is not None:
                scores_HS += _biases(states_THR[token], bank_RE, len(seen))
            if sinks_TH is not None:
                scores_HS = torch.cat((scores_HS, sinks_TH[token].double()[:, None]), dim=1)
            weights_HS = scores_HS.softmax(dim=-1)[:, : len(seen)]
            out[token] = (weights_HS[..., None] * v_HSD).sum(1)
            if index + 1 in taps and taps[index + 1] != PAD:
                ring_S2HWD[taps[index + 1]] = ring
        if slot != PAD and runs.keeps(run):
            ring_S2HWD[slot] = ring
    return out.to(q_THD.dtype)


def _walk(
    state_S: torch.Tensor, runs: Runs, step: Callable[[torch.Tensor, int], torch.Tensor], layer: int | None = None
) -> None:
    """Walk the state of each run over its tokens, in float64: ``step(state, t)`` returns the state after token t.
    With a ``layer``, a state in few bits is rounded after each token."""
    dtype = state_S.dtype
    for run in range(runs.run_count):
        slot = runs.slots[run]
        if slot == PAD or runs.fresh[run]:
            state = torch.zeros(state_S.shape[1:], dtype=torch.float64)
        else:
            state = state_S[slot].double()
        taps = {tap.offset: tap.slot for tap in runs.taps if tap.run == run}
        for index in range(runs.lengths[run]):
            state = step(state, runs.offsets[run] + index)
            if layer is not None and dtype != torch.float32:
                position = runs.starts[run] + index
                state = rounded(state.float()[None], dtype, [position], layer)[0].double()
            if index + 1 in taps and taps[index + 1] != PAD:
                state_S[taps[index + 1]] = state.to(dtype)
        if slot != PAD and runs.keeps(run):
            state_S[slot] = state.to(dtype)


def causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: Literal["silu"] | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    y_TC = torch.zeros(x_TC.shape, dtype=torch.float64)

    def shift(window_CW: torch.Tensor, t: int) -> torch.Tensor:
        seen_CK = torch.cat((window_CW, x_TC[t, :, None].double()), dim=1)
        y_TC[t] = (seen_CK * weight_CK.double()).sum(1)
        return seen_CK[:, 1:]

    _walk(window_SCW, runs, shift)
    if bias_C is not None:
        y_TC = y_TC + bias_C.double()
    return (F.silu(y_TC) if activation == "silu" else y_TC).to(x_TC.dtype)


def delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
    *,
    scale: float,
    layer: int = 0,
) -> torch.Tensor:
    """Compute the delta rule. ``g``: [T, heads], or [T, heads, K] with a decay for each key channel."""

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    group = v_THV.shape[1] // k_THK.shape[1]
    q = (unit(q_THK.double()) * scale).repeat_interleave(group, dim=1)
    k = unit(k_THK.double()).repeat_interleave(group, dim=1)
    v, beta = v_THV.double(), beta_TH.double()
    decay = (g if g.ndim == 3 else g[..., None]).double().exp()
    out = torch.zeros(v.shape, dtype=torch.float64)

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        state = state * decay[t, :, :, None]
        predicted = (state * k[t, :, :, None]).sum(1)
        correction = (v[t] - predicted) * beta[t, :, None]
        state = state + k[t, :, :, None] * correction[:, None, :]
        out[t] = (state * q[t, :, :, None]).sum(1)
        return state

    _walk(state_SHKV, runs, step, layer)
    return out.to(q_THK.dtype)


def wkv7(
    r_THK: torch.Tensor,
    g_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    kk_THK: torch.Tensor,
    b_THK: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
    *,
    layer: int = 0,
) -> torch.Tensor:
    r, g, k, v, kk, b = (x.double() for x in (r_THK, g_THK, k_THK, v_THV, kk_THK, b_THK))
    out = torch.zeros(v.shape, dtype=torch.float64)

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        found = (state * kk[t, :, :, None]).sum(1)
        state = state * g[t, :, :, None].exp() - b[t, :, :, None] * found[:, None]
        state = state + k[t, :, :, None] * v[t, :, None]
        out[t] = (state * r[t, :, :, None]).sum(1)
        return state

    _walk(state_SHKV, runs, step, layer)
    return out.to(r_THK.dtype)


def mamba1(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    A_CN: torch.Tensor,
    B_TN: torch.Tensor,
    C_TN: torch.Tensor,
    D_C: torch.Tensor,
    dt_bias_C: torch.Tensor,
    state_SCN: torch.Tensor,
    runs: Runs,
    *,
    layer: int = 0,
) -> torch.Tensor:
    x, a, b, c = x_TC.double(), A_CN.double(), B_TN.double(), C_TN.double()
    dt = F.softplus(dt_TC.double() + dt_bias_C.double())
    out = x * D_C.double()

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        state = (dt[t, :, None] * a).exp() * state + (dt[t] * x[t])[:, None] * b[t]
        out[t] += (state * c[t]).sum(-1)
        return state

    _walk(state_SCN, runs, step, layer)
    return out.to(x_TC.dtype)


def mamba2(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    D_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_SHPN: torch.Tensor,
    runs: Runs,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    layer: int = 0,
) -> torch.Tensor:
    group = x_THP.shape[1] // B_TGN.shape[1]
    x = x_THP.double()
    dt = F.softplus(dt_TH.double() + dt_bias_H.double()).clamp(*dt_limit)
    decay = (dt * A_H.double()).exp()
    b = B_TGN.double().repeat_interleave(group, dim=1)
    c = C_TGN.double().repeat_interleave(group, dim=1)
    out = x * D_H.double()[:, None]

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        state = state * decay[t, :, None, None] + (x[t] * dt[t, :, None])[:, :, None] * b[t, :, None, :]
        out[t] += (state * c[t, :, None, :]).sum(-1)
        return state

    _walk(state_SHPN, runs, step, layer)
    return out.to(x_THP.dtype)


def running_max(
    log_decay_TH: torch.Tensor, x_TH: torch.Tensor, state_S1H: torch.Tensor, runs: Runs, *, layer: int = 0
) -> torch.Tensor:
    out = torch.empty_like(x_TH, dtype=torch.float64)

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        state = torch.maximum(state + log_decay_TH[t].double(), x_TH[t].double())
        out[t] = state[0]
        return state

    _walk(state_S1H, runs, step, layer)
    return out.to(x_TH.dtype)


def gated_sums(
    value_TKC: torch.Tensor,
    gate_TKC: torch.Tensor,
    waiting_SJC: torch.Tensor,
    runs: Runs,
    group: int,
    *,
    layer: int = 0,
) -> torch.Tensor:
    out = torch.zeros(value_TKC.shape[0], value_TKC.shape[2], dtype=torch.float64)
    positions = [
        max(start, 0) + place
        for start, length in zip(runs.starts, runs.lengths, strict=True)
        for place in range(length)
    ]

    def step(state: torch.Tensor, t: int) -> torch.Tensor:
        entries = list(torch.unflatten(state, 0, (-1, 3)))
        for part, (most, total, weighted) in enumerate(entries):
            value, gate = value_TKC[t, part].double(), gate_TKC[t, part].double()
            new = torch.where(total > 0, torch.maximum(most, gate), gate)
            left, share = torch.where(total > 0, (most - new).exp(), 0.0), (gate - new).exp()
            entries[part] = torch.stack((new, total * left + share, weighted * left + value * share))
        if (positions[t] + 1) % group == 0:
            out[t] = entries[0][2] / entries[0][1]
            entries = [*entries[1:], torch.zeros_like(entries[0])]
        return torch.cat(entries)

    _walk(waiting_SJC, runs, step, layer)
    return out.to(value_TKC.dtype)


def encode_state(state_XN: torch.Tensor, codes_XN: torch.Tensor, scales_X: torch.Tensor) -> None:
    width = state_XN.shape[-1]
    rows, codes, scales = state_XN.reshape(-1, width).tolist(), [], []
    for row in rows:
        scale = torch.tensor(max(abs(number) for number in row) / 127, dtype=torch.float32).item()
        scales.append(scale)
        codes.append([max(-127, min(127, round(number / scale))) if scale else 0 for number in row])
    codes_XN.copy_(torch.tensor(codes, dtype=torch.int8).reshape(state_XN.shape))
    scales_X.copy_(torch.tensor(scales, dtype=torch.float32).reshape(state_XN.shape[:-1]))


def decode_state(codes_XN: torch.Tensor, scales_X: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    decoded = torch.empty(codes_XN.shape, dtype=torch.float64)
    for at in range(codes_XN.shape[-1]):
        decoded[..., at] = codes_XN[..., at].double() * scales_X.double()
    return decoded.to(dtype)


def _bfloat16(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.bfloat16))


def encode_nibbles(wide_XN: torch.Tensor, codes_XH: torch.Tensor, bounds_X2: torch.Tensor) -> None:
    width = wide_XN.shape[-1]
    codes, bounds = [], []
    for row in wide_XN.double().reshape(-1, width).tolist():
        low = _bfloat16(min(row))
        step = _bfloat16(max(0.0, max(row) - low) / 15)
        numbers = [max(0, min(15, round((number - low) / step))) if step else 0 for number in row]
        codes.append([first + 16 * second for first, second in zip(numbers[::2], numbers[1::2], strict=True)])
        bounds.append((low, step))
    codes_XH.copy_(torch.tensor(codes, dtype=torch.uint8).reshape(codes_XH.shape))
    bounds_X2.copy_(torch.tensor(bounds).reshape(bounds_X2.shape))


def decode_nibbles(codes_XH: torch.Tensor, bounds_X2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    decoded = torch.empty(*codes_XH.shape[:-1], 2 * codes_XH.shape[-1], dtype=torch.float64)
    low_X, step_X = bounds_X2[..., 0].double(), bounds_X2[..., 1].double()
    for at in range(codes_XH.shape[-1]):
        decoded[..., 2 * at] = low_X + (codes_XH[..., at] % 16).double() * step_X
        decoded[..., 2 * at + 1] = low_X + (codes_XH[..., at] // 16).double() * step_X
    return decoded.to(dtype)


def adapted(x_TI: torch.Tensor, y_TO: torch.Tensor, whose: Sequence[str], changes: Mapping[str, Any]) -> torch.Tensor:
    """Add to ``y`` [T, out] the product of each row's adapter (``ProductChange``s by adapter), on a CPU."""
    out = y_TO.double().cpu()
    for row, digest in enumerate(whose):
        change = changes.get(digest)
        for part in () if change is None else change.parts:
            span = slice(part.first, part.last)
            for vector, apply in ((part.gain, torch.mul), (part.shift, torch.add)):
                if vector is not None:
                    out[row, span] = apply(out[row, span], vector.double().cpu())
            if part.up is not None:
                low = change.down.plain()[part.begin : part.end].double().cpu() @ x_TI[row].double().cpu()
                low = low.to(x_TI.dtype).double()  # the first product is stored
                out[row, span] += part.up.plain().double().cpu() @ low
    return out.to(y_TO.dtype)
