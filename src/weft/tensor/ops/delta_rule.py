"""The delta rule: linear attention whose state decays, then corrects its prediction.

Gated delta nets have one decay per head, Kimi delta attention one per head and key channel. Torch computes
decodes by the recurrence and prefills by the chunked form. Per chunk of C places and value head, with G_i the
sums of log decays and S the state before the chunk:

    M(x)_ij = sum_c x_ic k_jc exp(G_ic - G_jc)       for j <= i, else 0: decayed products
    T       = (1 + beta M(k) below the diagonal)^-1
    U       = T (beta v)        W = T (beta exp(G) k)
    v'      = U - W S                                the addition of each token, given S
    o       = (exp(G) q) S + M(q) v'
    S      <- exp(G_C) S + (exp(G_C - G) k)^T v'

All but the last three lines are done for many chunks at once. In the pass over the states, W S and q S are
one product:

    S ──► [ W | q̃ ] S ──► v' = U − W S      o = q̃ S + M(q) v'      S ← decay · S + k̃ᵀ v' ──► next chunk
                                  │
                                  └── a tap inside the chunk: the same update, later tokens left out

v' of a token depends only on tokens before it, so a tap repeats no computation.

With one decay per head, M is a product times a matrix of decays. With one per channel the decay is inside the
sum. The factors exp(G_i) and exp(-G_j) of a plain product would overflow float32 within a few tokens. M is
then made of blocks of 16 x 16 places. With s the place before a block's rows, e the last of its columns:

    below the diagonal   (x_i exp(G_i - G_s)) . exp(G_s - G_e) (k_j exp(G_e - G_j))     all factors at most 1
    on the diagonal      a key moves down one place at a time, k <- exp(g) k, and multiplies the x there

The C++ kernel (csrc/gated_delta.hpp) is the recurrence, token by token, with the state in the cache.

Sources: Yang et al., "Parallelizing linear transformers with the delta rule" and "Gated Delta Networks" (2024); Kimi
Team, "Kimi Linear" (2025), section 3, and for the blocks Yang et al., "Gated linear attention" (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.chunks import LOG_DECAY_MIN, Step, decay_of, in_blocks, pairwise_decay
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, op, recurrent_op
from weft.tensor.ops.elementwise import each
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import decode_blocks

_L2_EPS = 1e-6
_BASE = 16
"""Side of the blocks that substitution inverts, and of the blocks of M."""


@recurrent_op("weft.tensor.kernels.delta_rule")
def delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
    *,
    scale: float,
    layer: int = 0,
) -> torch.Tensor:
    """Compute the rule per value head, with q and k L2-normalised (eps 1e-6) and q scaled:

        S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - k_t^T S))^T;   o_t = q_t^T S

    ``q_THK``, ``k_THK`` [T, k_heads, K]; ``v_THV`` [T, v_heads, V]; ``beta_TH`` [T, v_heads]; value head h
    reads key head h // (v_heads / k_heads). ``g_TH`` (log decay, <= 0) [T, v_heads], or [T, v_heads, K] with
    a decay for each line of S; then k_heads = v_heads. ``scale``: usually K ** -0.5. Any float dtypes;
    computed in float32. Returns [T, v_heads, V] in the dtype of ``q_THK``.

    ``state_SHKV`` [S, v_heads, K, V]: S of each slot.

    Sources: Yang et al., 2024, eqs. 8-10; Kimi Team, 2025, eqs. 1 and 7-9; transformers' qwen3_5 and kimi_linear for
    the details.
    """
    assert g_TH.ndim == 2 or k_THK.shape[1] == v_THV.shape[1], "a decay per channel goes with ungrouped heads"
    out_THV = torch.empty(v_THV.shape, dtype=q_THK.dtype, device=q_THK.device)
    n = runs.decode_count
    if n:
        out_THV[:n] = _decode(
            _unit(q_THK[:n]).mul_(scale),
            _unit(k_THK[:n]),
            v_THV[:n].float(),
            g_TH[:n].float(),
            beta_TH[:n].float(),
            state_SHKV,
            runs,
        )
    if n < runs.run_count:
        out_THV[n:] = _prefill(
            _unit(q_THK[n:]).mul_(scale), _unit(k_THK[n:]), v_THV[n:], g_TH[n:], beta_TH[n:], state_SHKV, runs
        )
    return out_THV


@delta_rule.in_cpp
def _delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
    *,
    scale: float,
    layer: int = 0,
) -> torch.Tensor | Unfit:
    tokens, heads, v_dim = v_THV.shape
    k_heads, k_dim = k_THK.shape[1:]
    if not (
        native.fits(q_THK, k_THK, v_THV)
        and state_SHKV.dtype in native.STATE_DTYPES
        and v_dim % native.LANES == 0
        and k_dim <= native.KEY_DIM_MAX
        and k_dim % native.LANES == 0
    ):
        return UNFIT
    by_line = g_TH.ndim == 3
    # float32, contiguous by line: the kernel reads gates by one row stride.
    g, beta = g_TH.float(), beta_TH.float()
    out_THV = torch.empty((tokens, heads, v_dim), dtype=q_THK.dtype)
    native.extension().gated_delta(
        native.runs_of(runs),
        native.rows_of(q_THK),
        native.rows_of(k_THK),
        native.rows_of(v_THV),
        native.rows_of(g.contiguous()) if by_line else native.plain_rows_of(g),
        native.plain_rows_of(beta),
        by_line,
        out_THV.data_ptr(),
        state_SHKV.data_ptr(),
        native.slot_stride(state_SHKV),
        k_heads,
        heads,
        k_dim,
        v_dim,
        scale,
        0,
        0,
        native.STATE_DTYPES[state_SHKV.dtype],
        layer,
    )
    return out_THV


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    norms: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide * norms.square_().add_(_L2_EPS).rsqrt_()


def _decay_of_channels(log_decay: torch.Tensor) -> torch.Tensor:
    """Return ``decay_of`` with one exponent per channel."""
    # Rounded before exp: in float64 it costs more than the products. The copy keeps the caller's sums.
    return log_decay.to(torch.float32, copy=True).clamp_min_(LOG_DECAY_MIN).exp_()


def _decode(
    q_RHK: torch.Tensor,
    k_RHK: torch.Tensor,
    v_RHV: torch.Tensor,
    g_RH: torch.Tensor,
    beta_RH: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    """Compute one token per run."""
    # o = e^g q.S + (q.k) d with d = beta (v - e^g k.S): one product with the state before reads it for both.
    _, heads, k_dim, v_dim = state_SHKV.shape
    by_line = g_RH.ndim == 3
    decay_RHX = decay_of(g_RH if by_line else g_RH[..., None])
    kq = torch.stack((k_RHK, q_RHK), dim=2)
    if not by_line:
        kq = kq.repeat_interleave(heads // k_RHK.shape[1], dim=1)
    k_full, q_full = kq[:, :, 0], kq[:, :, 1]
    q_k_RH1 = (q_full * k_full).sum(-1, keepdim=True)
    if by_line:  # a decay per head is a factor of the result instead: fewer numbers
        kq = kq * decay_RHX[:, :, None]
    out = torch.empty_like(v_RHV)
    for rows in decode_blocks(runs, state_SHKV):
        span = rows.span
        state = rows.read(state_SHKV, "delta_rule.state")
        seen = torch.bmm(kq[span].view(-1, 2, k_dim), state.view(-1, k_dim, v_dim)).view(-1, heads, 2, v_dim)
        if not by_line:
            seen.mul_(decay_RHX[span, :, None])
        delta = (v_RHV[span] - seen[:, :, 0]).mul_(beta_RH[span, :, None])
        torch.addcmul(seen[:, :, 1], q_k_RH1[span], delta, out=out[span])
        state.mul_(decay_RHX[span, ..., None]).addcmul_(k_full[span, ..., None], delta[:, :, None, :])
        rows.write_back(state_SHKV, state)
    return out


@dataclass(frozen=True, slots=True)
class _ChunkWork:
    """Inputs of the pass for consecutive chunks, all float32. ``reads`` [chunks, H, 2, size, K]: W, then q̃.
    ``new_values`` [chunks, H, size, V]: U, and v' after the pass. ``attention`` [chunks, H, size, size]. ``k_left``
    [chunks, H, size, K]: k̃. ``decay`` [chunks, H, 1 or K, 1]: of the state over the full chunk.
    ``inside(state_HKV, chunk, places, added_HCV)``: the state after ``places`` places of a chunk.
    """

    reads: torch.Tensor
    new_values: torch.Tensor
    attention: torch.Tensor
    k_left: torch.Tensor
    decay: torch.Tensor
    inside: Callable[[torch.Tensor, int, int, torch.Tensor], torch.Tensor]


def _prefill(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    work_of = _work_by_line if g_TH.ndim == 3 else _work_by_head

    def block(
        x: dict[str, torch.Tensor], first: int, steps: list[Step], state: torch.Tensor, out: torch.Tensor
    ) -> None:
        _scan(steps, first, work_of(x), state, state_SHKV, out)

    inputs = {"q": q_THK, "k": k_THK, "v": v_THV, "g": g_TH, "beta": beta_TH}
    return in_blocks("delta_rule", inputs, state_SHKV, runs, v_THV.shape[1:], block)


def _head_major(x: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    source = x[name].transpose(1, 2)
    return scratch.take(f"delta_rule.{name}_heads", source.shape, torch.float32).copy_(source)


def _solved(a: torch.Tensor, beta: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return T diag(beta) and U, from ``a`` = beta M(k)."""
    size = a.shape[-1]
    inverse = unit_lower_inverse(a.view(-1, size, size)).view(a.shape)
    inverse.mul_(beta[..., None, :])
    return inverse, torch.matmul(inverse, v, out=scratch.take("delta_rule.u", v.shape, torch.float32))


def _work_by_head(x: dict[str, torch.Tensor]) -> _ChunkWork:
    count, size, v_heads, _ = x["v"].shape
    k_heads, k_dim = x["k"].shape[2:]
    group = v_heads // k_heads
    q, k, v = (_head_major(x, name) for name in "qkv")
    beta = x["beta"].transpose(1, 2)
    # float64: differences need 1e-7 where sums are in the hundreds.
    sums = x["g"].transpose(1, 2).double().cumsum(-1)
    decay = pairwise_decay(sums, scratch.take("delta_rule.decay", (count, v_heads, size, size), torch.float32))
    grouped = (count, k_heads, group, size, size)
    a = scratch.take("delta_rule.a", decay.shape, torch.float32)
    torch.mul(decay.view(grouped), torch.matmul(k, k.transpose(-1, -2))[:, :, None], out=a.view(grouped))
    inverse, new_values = _solved(a.mul_(beta[..., :, None]), beta, v)

    grown = decay_of(sums)
    inverse.mul_(grown[..., None, :])
    reads = scratch.take("delta_rule.reads", (count, v_heads, 2, size, k_dim), torch.float32)
    for_state, for_output = reads.view(count, k_heads, group, 2, size, k_dim).unbind(3)
    for_state.copy_(torch.bmm(inverse.view(-1, group * size, size), k.view(-1, size, k_dim)).view(for_state.shape))
    torch.mul(q[:, :, None], grown.view(count, k_heads, group, size, 1), out=for_output)
    # Over `decay`, which nothing reads after this line.
    attention = decay.view(grouped).mul_(torch.matmul(q, k.transpose(-1, -2))[:, :, None]).view(decay.shape)
    k_left = scratch.take("delta_rule.k_left", (count, v_heads, size, k_dim), torch.float32)
    torch.mul(
        k[:, :, None],
        decay_of(sums[..., -1:] - sums).view(count, k_heads, group, size, 1),
        out=k_left.view(count, k_heads, group, size, k_dim),
    )
    return _ChunkWork(
        reads,
        new_values,
        attention,
        k_left,
        decay_of(sums[..., -1])[..., None, None],
        _inside(k, sums[..., None], decay_of),
    )


def _work_by_line(x: dict[str, torch.Tensor]) -> _ChunkWork:
    count, size, heads, _ = x["v"].shape
    k_dim = x["k"].shape[3]
    k, v, g = (_head_major(x, name) for name in "kvg")
    lefts = scratch.take("delta_rule.lefts", (2, count, heads, size, k_dim), torch.float32)
    lefts[0], lefts[1] = k, x["q"].transpose(1, 2)
    beta = x["beta"].transpose(1, 2)
    sums = g.double().cumsum(2)
    products = decayed_products(lefts, k, g, sums)
    inverse, new_values = _solved(products[0] * beta[..., :, None], beta, v)
    grown = _decay_of_channels(sums)
    reads = scratch.take("delta_rule.reads", (count, heads, 2, size, k_dim), torch.float32)
    reads[:, :, 0] = torch.matmul(inverse, k * grown)
    torch.mul(lefts[1], grown, out=reads[:, :, 1])
    k_left = k * _decay_of_channels(sums[:, :, -1:] - sums)
    return _ChunkWork(
        reads,
        new_values,
        products[1],
        k_left,
        _decay_of_channels(sums[:, :, -1])[..., None],
        _inside(k, sums, _decay_of_channels),
    )


def _inside(
    k: torch.Tensor, sums: torch.Tensor, decay: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, int, int, torch.Tensor], torch.Tensor]:
    """Return ``_ChunkWork.inside``: the chunk's update without the later tokens. ``sums`` [chunks, H, size, 1 or K]."""

    def inside(state_HKV: torch.Tensor, chunk: int, places: int, added_HCV: torch.Tensor) -> torch.Tensor:
        last_HX = sums[chunk, :, places - 1]
        left_HCX = decay(last_HX[:, None] - sums[chunk, :, :places])
        keys_HCK = k[chunk, :, :places].repeat_interleave(sums.shape[1] // k.shape[1], dim=0)
        return torch.baddbmm(
            state_HKV * decay(last_HX)[..., None], (keys_HCK * left_HCX).transpose(1, 2), added_HCV[:, :places]
        )

    return inside


def _scan(
    steps: list[Step], first: int, work: _ChunkWork, state: torch.Tensor, state_SHKV: torch.Tensor, out: torch.Tensor
) -> None:
    """Advance ``state`` [rows, H, K, V] in place, chunk after chunk; taps go into ``state_SHKV``. ``out`` is
    [all chunks, size, H, V]; ``work`` begins at its chunk ``first``."""
    # v' of a token depends only on tokens before it, so a tap inside a chunk repeats no computation.
    _, heads, size, v_dim = work.new_values.shape
    k_dim = work.k_left.shape[-1]
    for step in steps:
        chunks = slice(step.first - first, step.first - first + step.rows)
        batch = step.rows * heads
        alive = state[: step.rows].view(batch, k_dim, v_dim)
        read = torch.bmm(work.reads[chunks].view(batch, 2 * size, k_dim), alive)
        # In place: U becomes v', which the taps read below.
        added = work.new_values[chunks].view(batch, size, v_dim).sub_(read[:, :size])
        read_out = torch.baddbmm(read[:, size:], work.attention[chunks].view(batch, size, size), added)
        read_out = read_out.view(step.rows, heads, size, v_dim)
        out[step.first : step.first + step.rows] = read_out.transpose(1, 2)
        for tap in step.taps:
            if not tap.whole:
                chunk = step.first - first + tap.row
                state_SHKV[tap.slot] = work.inside(state[tap.row], chunk, tap.places, work.new_values[chunk])
        alive.mul_(work.decay[chunks].reshape(batch, -1, 1))
        alive.baddbmm_(work.k_left[chunks].view(batch, size, k_dim).transpose(1, 2), added)
        for tap in step.taps:
            if tap.whole:
                state_SHKV[tap.slot] = state[tap.row]


def unit_lower_inverse(a_BCC: torch.Tensor) -> torch.Tensor:
    """Return (1 + strictly lower part of a)^-1 for [B, C, C], C = 16 x a power of 2, in scratch memory. The diagonal
    of ``a`` and the entries above it are not read.
    """
    # Inverted, not solved: 7 times faster than triangular solves with a large right-hand side. It is as
    # exact, because the blocks are unit lower triangular with small entries.
    batch, size, _ = a_BCC.shape
    blocks = size // _BASE
    inverse = scratch.take("delta_rule.inverse", a_BCC.shape, torch.float32).zero_()
    tiles = a_BCC.view(batch, blocks, _BASE, blocks, _BASE).diagonal(dim1=1, dim2=3)
    base = scratch.take("delta_rule.tiles", (batch, blocks, _BASE, _BASE), torch.float32)
    base.copy_(tiles.permute(0, 3, 1, 2))
    base = base.view(-1, _BASE, _BASE)
    solved = torch.zeros_like(base)
    solved.diagonal(dim1=1, dim2=2).fill_(1.0)
    for row in range(1, _BASE):
        solved[:, row : row + 1, :row] = torch.bmm(base[:, row : row + 1, :row], solved[:, :row, :row]).neg_()
    tiled = inverse.view(batch, blocks, _BASE, blocks, _BASE).diagonal(dim1=1, dim2=3)
    tiled.copy_(solved.view(batch, blocks, _BASE, _BASE).permute(0, 2, 3, 1))
    half = _BASE
    # [A 0; C B]^-1 = [A^-1 0; -B^-1 C A^-1 B^-1], for halves of 16, 32, ... rows.
    while half < size:
        for begin in range(0, size, 2 * half):
            top, low = slice(begin, begin + half), slice(begin + half, begin + 2 * half)
            corner = torch.bmm(a_BCC[:, low, top], inverse[:, top, top])
            inverse[:, low, top] = torch.bmm(inverse[:, low, low], corner).neg_()
        half *= 2
    return inverse


def decayed_products(
    x_XNHCK: torch.Tensor, k_NHCK: torch.Tensor, g_NHCK: torch.Tensor, sums_NHCK: torch.Tensor
) -> torch.Tensor:
    """Return M(x)_ij = sum_c x_ic k_jc exp(sums_ic - sums_jc) for j <= i, else 0: float32 [X, N, H, C, C], for each of
    the X tensors in ``x``. ``g`` float32, at most 0; ``sums`` its sums along C, float64; C is a multiple of 16.
    """
    kinds, count, heads, size, k_dim = x_XNHCK.shape
    blocks = size // _BASE
    out = scratch.take("delta_rule.products", (kinds, count, heads, size, size), torch.float32).zero_()
    x_blocks = x_XNHCK.view(kinds, count, heads, blocks, _BASE, k_dim)
    k_blocks = k_NHCK.view(count, heads, blocks, _BASE, k_dim)
    if blocks > 1:
        sum_blocks = sums_NHCK.view(count, heads, blocks, _BASE, k_dim)
        ends = sum_blocks[..., -1, :]
        left = x_blocks[:, :, :, 1:] * _decay_of_channels(sum_blocks[:, :, 1:] - ends[:, :, :-1, None])
        # Measured from the last place of the block before, so that no factor is above 1.
        right = k_blocks[:, :, :-1] * _decay_of_channels(ends[:, :, :-1, None] - sum_blocks[:, :, :-1])
        for block in range(1, blocks):
            rows, before = slice(block * _BASE, (block + 1) * _BASE), slice(0, block * _BASE)
            gaps = _decay_of_channels(ends[:, :, block - 1 : block] - ends[:, :, :block])
            moved = (right[:, :, :block] * gaps[..., None, :]).flatten(2, 3)
            out[..., rows, before] = torch.matmul(left[:, :, :, block - 1], moved.transpose(-1, -2))
    tiles = out.view(kinds, count, heads, blocks, _BASE, blocks, _BASE).diagonal(dim1=3, dim2=5)
    decay = _decay_of_channels(g_NHCK).view(k_blocks.shape)
    moved = k_blocks
    for distance in range(_BASE):
        if distance:
            # The key moves down one place and decays by that place's own gate.
            moved = moved[..., :-1, :] * decay[..., distance:, :]
        diagonal = (x_blocks[..., distance:, :] * moved).sum(-1)
        tiles.diagonal(-distance, dim1=3, dim2=4).copy_(diagonal)
    return out


@op("weft.tensor.kernels.delta_gates")
def delta_gates(
    a_TC: torch.Tensor,
    bias_C: torch.Tensor,
    decay_H: torch.Tensor,
    b_TH: torch.Tensor,
    *,
    beta_scale: float = 1.0,
    floor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gates of the rule, from a layer's projections: ``g_TC`` = decay * softplus(a + bias), ``beta_TH`` =
    beta_scale * sigmoid(b), both float32. With ``floor`` (< 0) no log decay is below it: ``g_TC`` = floor *
    sigmoid(-decay * (a + bias)).

    C is H, or H x K for a decay of each line of the state: column c has the decay of head c // K. ``bias_C``
    and ``decay_H`` (-exp(A_log)) are float32.

    Sources: Yang et al., "Gated Delta Networks" (2025); Kimi Team, "Kimi Linear" (2025); for ``floor`` transformers'
    bailing_hybrid (Ling 3).
    """
    steps_TC = a_TC.float() + bias_C
    if floor is None:
        steps_TC = each(F.softplus, steps_TC)
    lines = a_TC.shape[1] // decay_H.shape[0]
    if lines == 1:
        g_TC = decay_H * steps_TC
    else:
        g_TC = (steps_TC.view(-1, decay_H.shape[0], lines) * decay_H[:, None]).flatten(1)
    if floor is not None:
        g_TC = each(torch.sigmoid, -g_TC) * floor
    return g_TC, each(torch.sigmoid, b_TH.float()) * beta_scale
