"""Mamba-2: a linear state per head whose decay and input depend on the token.

Torch computes decodes by the recurrence, prefills by the chunked form. Per chunk of C places and head, with
d_t the step, L_i the sums of d A and S the state before the chunk:

    y     = [exp(L_i - L_j) C_i.B_j, j <= i] (d x) + exp(L) C S^T + D x
    S    <- exp(L_C) S + (exp(L_C - L) d x)^T B

The first product of y is computed for all chunks at once; the second and the update of S are the loop over chunks (see
``tensor.chunks``). B and C belong to groups of heads, so their products take a group's heads together: few large
matmuls instead of many small ones.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6 (the block decomposition). The C++ kernel
(csrc/mamba2.hpp) is the recurrence, token by token, with the state in the cache.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.chunks import Step, decay_of, in_blocks, pairwise_decay
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, recurrent_op
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import decode_blocks


@recurrent_op("weft.tensor.kernels.mamba2")
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
    """Compute per head, with ``d_t = clamp(softplus(dt_t + dt_bias), *dt_limit)``:

        S <- exp(d_t A) S + (d_t x_t) B_t^T;   y_t = S C_t + D x_t

    ``x_THP`` [T, heads, P]; ``dt_TH`` [T, heads], as projected (bias and softplus are inside); ``A_H``
    [heads], negative (-exp(A_log)); ``B_TGN``, ``C_TGN`` [T, groups, N], head h reading group
    h // (heads / groups); ``D_H``, ``dt_bias_H`` [heads]. Any float dtypes; computed in float32. Returns
    [T, heads, P] in the dtype of ``x_THP``.

     Source: Dao and Gu, "Transformers are SSMs" (2024), section 6; transformers' granitemoehybrid.
    """
    wide = x_THP.float()
    step_TH = F.softplus(dt_TH.float() + dt_bias_H.float()).clamp_(*dt_limit)
    log_decay_TH = step_TH * A_H.float()
    pushed_THP = wide * step_TH[:, :, None]
    y_THP = wide * D_H.float()[:, None]
    n = runs.decode_count
    if n:
        y_THP[:n] += _decode(pushed_THP[:n], log_decay_TH[:n], B_TGN[:n].float(), C_TGN[:n].float(), state_SHPN, runs)
    if n < runs.run_count:
        y_THP[n:] += _prefill(pushed_THP[n:], log_decay_TH[n:], B_TGN[n:], C_TGN[n:], state_SHPN, runs)
    return y_THP.to(x_THP.dtype)


@mamba2.in_cpp
def _mamba2(
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
) -> torch.Tensor | Unfit:
    if not (
        native.fits(x_THP, B_TGN, C_TGN)
        and state_SHPN.dtype in native.STATE_DTYPES
        and B_TGN.shape[2] % native.LANES == 0
        and B_TGN.shape[2] <= native.STATE_DIM_MAX
    ):
        return UNFIT
    tokens, heads, head_dim = x_THP.shape
    dt = dt_TH if dt_TH.dtype == x_THP.dtype else dt_TH.to(x_THP.dtype)
    a, d, bias = (row.float().contiguous() for row in (A_H, D_H, dt_bias_H))
    out_THP = torch.empty((tokens, heads, head_dim), dtype=x_THP.dtype)
    native.extension().mamba2(
        native.runs_of(runs),
        native.rows_of(x_THP),
        native.rows_of(B_TGN),
        native.rows_of(C_TGN),
        native.rows_of(dt[:, None]),
        a.data_ptr(),
        d.data_ptr(),
        bias.data_ptr(),
        out_THP.data_ptr(),
        state_SHPN.data_ptr(),
        native.slot_stride(state_SHPN),
        heads,
        B_TGN.shape[1],
        head_dim,
        B_TGN.shape[2],
        *dt_limit,
        native.STATE_DTYPES[state_SHPN.dtype],
        layer,
    )
    return out_THP


def _decode(
    pushed_RHP: torch.Tensor,
    log_decay_RH: torch.Tensor,
    B_RGN: torch.Tensor,
    C_RGN: torch.Tensor,
    state_SHPN: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    count, groups, width = B_RGN.shape
    decay_RH11 = decay_of(log_decay_RH)[:, :, None, None]
    pushed_RGE1, B_RG1N = pushed_RHP.reshape(count, groups, -1, 1), B_RGN[:, :, None, :]
    y_RG1E = torch.empty(count, groups, 1, pushed_RGE1.shape[2], device=pushed_RHP.device)
    for rows in decode_blocks(runs, state_SHPN):
        span = rows.span
        state = rows.read(state_SHPN, "mamba2.state")
        grouped = state.mul_(decay_RH11[span]).view(-1, groups, pushed_RGE1.shape[2], width)
        grouped.addcmul_(pushed_RGE1[span], B_RG1N[span])
        # A row times a transposed matrix: the reverse order of the same product is 8 times slower.
        torch.bmm(
            C_RGN[span].reshape(-1, 1, width), grouped.flatten(0, 1).transpose(1, 2), out=y_RG1E[span].flatten(0, 1)
        )
        rows.write_back(state_SHPN, state)
    return y_RG1E.view(pushed_RHP.shape)


def _prefill(
    pushed_THP: torch.Tensor,
    log_decay_TH: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    state_SHPN: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    inputs = {"x": pushed_THP, "log_decay": log_decay_TH, "b": B_TGN, "c": C_TGN}
    return in_blocks("mamba2", inputs, state_SHPN, runs, pushed_THP.shape[1:], partial(_block, state_SHPN))


def _block(
    state_SHPN: torch.Tensor,
    x: dict[str, torch.Tensor],
    first: int,
    steps: list[Step],
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute some consecutive steps of the scan: the intra-chunk work of their chunks, then the scan itself."""
    count, size, heads, head_dim = x["x"].shape
    groups, width = x["b"].shape[2:]
    # float64: differences of sums in the hundreds must be right to 1e-7.
    sums = x["log_decay"].transpose(1, 2).double().cumsum(-1)
    scores = scratch.take("mamba2.scores", (count, heads, size, size), torch.float32)
    pairwise_decay(sums, scores)
    b = scratch.take("mamba2.b_groups", (count, groups, size, width), torch.float32)
    c = scratch.take("mamba2.c_groups", (count, groups, size, width), torch.float32)
    b.copy_(x["b"].transpose(1, 2))
    c.copy_(x["c"].transpose(1, 2))
    cb = torch.matmul(c, b.transpose(-1, -2))
    scores.view(count, groups, -1, size, size).mul_(cb[:, :, None])
    x_heads = scratch.take("mamba2.x_heads", (count, heads, size, head_dim), torch.float32)
    x_heads.copy_(x["x"].transpose(1, 2))
    inside = scratch.take("mamba2.inside", x_heads.shape, torch.float32)
    torch.bmm(scores.view(-1, size, size), x_heads.view(-1, size, head_dim), out=inside.view(-1, size, head_dim))
    out[first : first + count] = inside.transpose(1, 2)
    left = decay_of(sums[..., -1:] - sums)
    x_left = scratch.take("mamba2.x_left", (count, groups, size, heads // groups, head_dim), torch.float32)
    torch.mul(
        x["x"].view(count, size, groups, -1, head_dim).transpose(1, 2),
        left.view(count, groups, -1, size).transpose(2, 3)[..., None],
        out=x_left,
    )
    _scan(steps, first, state, state_SHPN, out, b=b, c=c, x_left=x_left, x_heads=x_heads, sums=sums)


def _scan(
    steps: list[Step],
    first: int,
    state: torch.Tensor,
    state_SHPN: torch.Tensor,
    out: torch.Tensor,
    *,
    b: torch.Tensor,
    c: torch.Tensor,
    x_left: torch.Tensor,
    x_heads: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Scan the states, chunk after chunk; ``out`` is [all chunks, size, heads, P] and is added to."""
    _, groups, size, width = b.shape
    head_dim = state.shape[2]
    for step in steps:
        chunks = slice(step.first - first, step.first - first + step.rows)
        batch = step.rows * groups
        alive = state[: step.rows].view(batch, -1, width)
        read = torch.bmm(c[chunks].view(batch, size, width), alive.transpose(1, 2))
        read = read.view(step.rows, groups, size, -1, head_dim).transpose(1, 2)
        grown = decay_of(sums[chunks]).transpose(1, 2).view(step.rows, size, groups, -1, 1)
        # `out` has the tokens' own part already (`_block`).
        out[step.first : step.first + step.rows].view(*grown.shape[:-1], head_dim).addcmul_(read, grown)
        for tap in step.taps:
            if not tap.whole:
                chunk = step.first - first + tap.row
                state_SHPN[tap.slot] = _state_inside(state[tap.row], x_heads[chunk], b[chunk], sums[chunk], tap.places)
        # Before the update, and after the taps: they need the state before this chunk.
        state[: step.rows].mul_(decay_of(sums[chunks, :, -1])[:, :, None, None])
        alive.baddbmm_(x_left[chunks].view(batch, size, -1).transpose(1, 2), b[chunks].view(batch, size, width))
        for tap in step.taps:
            if tap.whole:
                state_SHPN[tap.slot] = state[tap.row]


def _state_inside(
    state_HPN: torch.Tensor, x_HCP: torch.Tensor, b_GCN: torch.Tensor, sums_HC: torch.Tensor, places: int
) -> torch.Tensor:
    """Return the state after ``places`` places of a chunk: the chunk's update without the later tokens."""
    heads = state_HPN.shape[0]
    last_H1 = sums_HC[:, places - 1 : places]
    left_HC = decay_of(last_H1 - sums_HC[:, :places])
    x_left = x_HCP[:, :places] * left_HC[..., None]
    b_HCN = b_GCN[:, :places].repeat_interleave(heads // b_GCN.shape[0], dim=0)
    return torch.baddbmm(state_HPN * decay_of(last_H1)[..., None], x_left.transpose(1, 2), b_HCN)
