"""kimi_delta in torch: the recurrence for decodes, the chunked form for prefills.

Chunked form (per chunk of C places and head; G_i = cumulative log decay, a vector over key channels):

    M(x)_ij = sum_c x_ic k_jc exp(G_ic - G_jc)       for j <= i, else 0: decayed products
    T       = (1 + beta M(k) below the diagonal)^-1
    U       = T (beta v)        W = T (beta exp(G) k)
    v'      = U - W S
    o       = (exp(G) q) S + M(q) v'
    S      <- exp(G_C) S + (exp(G_C - G) k)^T v'

With one decay per head M is a product times a matrix of decays. Here the decay is inside the sum, and the
factors exp(G_i) and exp(-G_j) of a plain product would overflow float32 within a few tokens. So M consists of
blocks of 16 x 16 places. With s the place before a block's rows and e the last of its columns:

    below the diagonal   (x_i exp(G_i - G_s)) . exp(G_s - G_e) (k_j exp(G_e - G_j))     all factors at most 1
    on the diagonal      a key moves down one place at a time, k <- exp(g) k, and multiplies the x there

Sums of log decays are float64, their differences float32 (see ``chunks``). ``tensor.delta_scan`` has the
steps after M, which ``gated_delta`` shares.

Source: Kimi Team, "Kimi Linear" (2025), section 3; the blocks are the secondary chunking of Yang et al.,
"Gated linear attention" (2024).
"""

from __future__ import annotations

import torch

from weft.tensor.chunks import LOG_DECAY_MIN, Step, chunk_layout
from weft.tensor.delta_scan import BASE, ChunkWork, scan, unit_lower_inverse
from weft.tensor.inputs import Runs
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import decode_blocks, prefill_rows

L2_EPS = 1e-6


def kimi_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_THK: torch.Tensor,
               beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *, scale: float) -> torch.Tensor:
    out_THV = torch.empty(v_THV.shape, dtype=q_THK.dtype, device=q_THK.device)
    n = runs.decode_count
    if n:
        out_THV[:n] = _decode(_unit(q_THK[:n]).mul_(scale), _unit(k_THK[:n]), v_THV[:n].float(),
                              _decay(g_THK[:n].float()), beta_TH[:n].float(), state_SHKV, runs)
    if n < runs.run_count:
        out_THV[n:] = _prefill(_unit(q_THK[n:]).mul_(scale), _unit(k_THK[n:]), v_THV[n:], g_THK[n:],
                               beta_TH[n:], state_SHKV, runs)
    return out_THV


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    norms: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide * norms.square_().add_(L2_EPS).rsqrt_()


def _decay(log_decay: torch.Tensor) -> torch.Tensor:
    """exp in float32, clamped above the denormals. Exponents are rounded to float32 first: there is one per
    channel here, and exp in float64 costs more than the products."""
    return log_decay.to(torch.float32, copy=True).clamp_min_(LOG_DECAY_MIN).exp_()


def _decode(q_RHK: torch.Tensor, k_RHK: torch.Tensor, v_RHV: torch.Tensor, decay_RHK: torch.Tensor,
            beta_RH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs) -> torch.Tensor:
    """One token per run. One product with the state before reads the decayed state for k and q: o = (e^g q).S
    + (q.k) d with d = beta (v - (e^g k).S)."""
    _, heads, k_dim, v_dim = state_SHKV.shape
    kq = torch.stack((k_RHK, q_RHK), dim=2) * decay_RHK[:, :, None]
    q_k_RH1 = (q_RHK * k_RHK).sum(-1, keepdim=True)
    out = torch.empty_like(v_RHV)
    for rows in decode_blocks(runs, state_SHKV):
        at = rows.span
        state = rows.read(state_SHKV, "kimi_delta.state")
        seen = torch.bmm(kq[at].view(-1, 2, k_dim), state.view(-1, k_dim, v_dim)).view(-1, heads, 2, v_dim)
        delta = (v_RHV[at] - seen[:, :, 0]).mul_(beta_RH[at, :, None])
        torch.addcmul(seen[:, :, 1], q_k_RH1[at], delta, out=out[at])
        state.mul_(decay_RHK[at, ..., None]).addcmul_(k_RHK[at, ..., None], delta[:, :, None, :])
        rows.write_back(state_SHKV, state)
    return out


def _prefill(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_THK: torch.Tensor,
             beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs) -> torch.Tensor:
    layout = chunk_layout(runs)
    size, count = layout.size, layout.chunk_count
    padded = {}
    for name, x in (("q", q_THK), ("k", k_THK), ("v", v_THV), ("g", g_THK), ("beta", beta_TH)):
        into = scratch.take(f"kimi_delta.{name}", (count, size, *x.shape[1:]), torch.float32)
        padded[name] = layout.spread(x, into)
    rows = prefill_rows(runs, layout.order, "state_rows.chunked")
    state = rows.read(state_SHKV, "kimi_delta.state")
    out = scratch.take("kimi_delta.out", (count, size, *v_THV.shape[1:]), torch.float32)
    for first, chunks, steps in layout.blocks():
        part = slice(first, first + chunks)
        _block({name: x[part] for name, x in padded.items()}, first, steps, state, state_SHKV, out)
    rows.write_back(state_SHKV, state)
    return layout.collect(out)


def _block(x: dict[str, torch.Tensor], first: int, steps: list[Step], state: torch.Tensor,
           state_SHKV: torch.Tensor, out: torch.Tensor) -> None:
    """Some consecutive steps of the scan: the intra-chunk work of their chunks, then the scan itself."""
    count, size, heads, v_dim = x["v"].shape
    k_dim = x["k"].shape[3]

    def head_major(name: str, width: int) -> torch.Tensor:
        return scratch.take(f"kimi_delta.{name}_heads", (count, heads, size, width),
                            torch.float32).copy_(x[name].transpose(1, 2))

    k, v = head_major("k", k_dim), head_major("v", v_dim)
    lefts = scratch.take("kimi_delta.lefts", (2, count, heads, size, k_dim), torch.float32)
    lefts[0], lefts[1] = k, x["q"].transpose(1, 2)
    beta = x["beta"].transpose(1, 2)
    g = head_major("g", k_dim)
    sums = g.double().cumsum(2)
    products = decayed_products(lefts, k, g, sums)

    a = products[0] * beta[..., :, None]
    inverse = unit_lower_inverse(a.view(-1, size, size)).view(a.shape)
    inverse.mul_(beta[..., None, :])
    grown = _decay(sums)
    reads = scratch.take("kimi_delta.reads", (count, heads, 2, size, k_dim), torch.float32)
    new_values = scratch.take("kimi_delta.u", v.shape, torch.float32)
    torch.matmul(inverse, v, out=new_values)
    reads[:, :, 0] = torch.matmul(inverse, k * grown)
    torch.mul(lefts[1], grown, out=reads[:, :, 1])
    k_left = k * _decay(sums[:, :, -1:] - sums)

    def inside(state_HKV: torch.Tensor, chunk: int, places: int, added_HCV: torch.Tensor) -> torch.Tensor:
        last_HK = sums[chunk, :, places - 1]
        left_HCK = k[chunk, :, :places] * _decay(last_HK[:, None] - sums[chunk, :, :places])
        return torch.baddbmm(state_HKV * _decay(last_HK)[..., None], left_HCK.transpose(1, 2),
                             added_HCV[:, :places])

    decay = _decay(sums[:, :, -1])[..., None]
    scan(steps, first, ChunkWork(reads, new_values, products[1], k_left, decay, inside), state, state_SHKV,
         out)


def decayed_products(x_XNHCK: torch.Tensor, k_NHCK: torch.Tensor, g_NHCK: torch.Tensor,
                     sums_NHCK: torch.Tensor) -> torch.Tensor:
    """M(x)_ij = sum_c x_ic k_jc exp(sums_ic - sums_jc) for j <= i, else 0: float32 [X, N, H, C, C], for each
    of the X tensors in ``x``. ``g`` float32, at most 0; ``sums`` its sums along C, float64; C is a multiple
    of 16."""
    kinds, count, heads, size, k_dim = x_XNHCK.shape
    blocks = size // BASE
    out = scratch.take("kimi_delta.products", (kinds, count, heads, size, size), torch.float32).zero_()
    x_blocks = x_XNHCK.view(kinds, count, heads, blocks, BASE, k_dim)
    k_blocks = k_NHCK.view(count, heads, blocks, BASE, k_dim)
    if blocks > 1:
        sum_blocks = sums_NHCK.view(count, heads, blocks, BASE, k_dim)
        ends = sum_blocks[..., -1, :]
        left = x_blocks[:, :, :, 1:] * _decay(sum_blocks[:, :, 1:] - ends[:, :, :-1, None])
        right = k_blocks[:, :, :-1] * _decay(ends[:, :, :-1, None] - sum_blocks[:, :, :-1])
        for block in range(1, blocks):
            rows, before = slice(block * BASE, (block + 1) * BASE), slice(0, block * BASE)
            gaps = _decay(ends[:, :, block - 1 : block] - ends[:, :, :block])
            moved = (right[:, :, :block] * gaps[..., None, :]).flatten(2, 3)
            out[..., rows, before] = torch.matmul(left[:, :, :, block - 1], moved.transpose(-1, -2))
    tiles = out.view(kinds, count, heads, blocks, BASE, blocks, BASE).diagonal(dim1=3, dim2=5)
    decay = _decay(g_NHCK).view(k_blocks.shape)
    moved = k_blocks
    for distance in range(BASE):
        if distance:
            moved = moved[..., :-1, :] * decay[..., distance:, :]
        diagonal = (x_blocks[..., distance:, :] * moved).sum(-1)
        tiles.diagonal(-distance, dim1=3, dim2=4).copy_(diagonal)
    return out
