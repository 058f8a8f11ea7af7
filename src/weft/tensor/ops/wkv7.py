"""WKV7, the recurrence of RWKV-7: a delta rule with separate keys that read, erase and write.

    u_t = kk_t^T S;     S <- diag(exp(g_t)) S - b_t u_t^T + k_t v_t^T;     o_t = r_t^T S          S [K, V]

``kk`` reads the state before it decays. ``b`` (kk times a rate for each line) erases its result, and ``k`` writes the
full value. With b = k = beta k' and kk = exp(g) k' this is Kimi's rule. So the C++ kernel is the same
(csrc/gated_delta.hpp). Torch goes token by token: the chunked form has four decayed products instead of two, and no
CPU with the C++ kernels would use it.

Source: Peng et al., "RWKV-7 Goose with expressive dynamic state evolution" (2025), section 4.
"""

from __future__ import annotations

from functools import partial

import torch

from weft.tensor import native
from weft.tensor.chunks import decay_of
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, recurrent_op
from weft.tensor.rounding import by_token
from weft.tensor.state_rows import decode_blocks


@recurrent_op("weft.tensor.kernels.wkv7")
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
    """Compute the formula above, per head. ``g_THK``: log decays, at most 0. Any float dtypes; computed in float32.
    Returns [T, H, V] in the dtype of ``r_THK``. ``state_SHKV`` [S, H, K, V]: S of each slot.
    """
    inputs = r_THK, g_THK, k_THK, v_THV, kk_THK, b_THK
    if runs.decode_count < runs.run_count:
        return by_token(partial(wkv7.torch, layer=layer), inputs, state_SHKV, runs, layer)
    out_THV = torch.empty(v_THV.shape, dtype=r_THK.dtype, device=r_THK.device)
    r, g, k, v, kk, b = (x.float() for x in inputs)
    for rows in decode_blocks(runs, state_SHKV):
        span = rows.span
        state = rows.read(state_SHKV, "wkv7.state")
        read_RHV = torch.matmul(kk[span, :, None], state)
        state.mul_(decay_of(g[span])[..., None]).addcmul_(k[span, ..., None], v[span, :, None])
        state.addcmul_(b[span, ..., None], read_RHV, value=-1.0)
        out_THV[span] = torch.matmul(r[span, :, None], state)[:, :, 0].to(out_THV.dtype)
        rows.write_back(state_SHKV, state)
    return out_THV


@wkv7.in_cpp
def _wkv7(
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
) -> torch.Tensor | Unfit:
    tokens, heads, v_dim = v_THV.shape
    k_dim = k_THK.shape[2]
    if not (
        native.fits(r_THK, k_THK, v_THV, kk_THK, b_THK)
        and state_SHKV.dtype in native.STATE_DTYPES
        and v_dim % native.LANES == 0
        and k_dim <= native.KEY_DIM_MAX
        and k_dim % native.LANES == 0
    ):
        return UNFIT
    g = g_THK.float().contiguous()
    out_THV = torch.empty((tokens, heads, v_dim), dtype=r_THK.dtype)
    native.extension().wkv7(
        native.runs_of(runs),
        *map(native.rows_of, (r_THK, g, k_THK, v_THV, kk_THK, b_THK)),
        out_THV.data_ptr(),
        state_SHKV.data_ptr(),
        native.slot_stride(state_SHKV),
        heads,
        k_dim,
        v_dim,
        native.STATE_DTYPES[state_SHKV.dtype],
        layer,
    )
    return out_THV
