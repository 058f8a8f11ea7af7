"""gated_delta in torch: the recurrence for decodes, the chunked form for prefills.

Chunked form (per chunk of C places and value head; G_i = cumulative log decay, S the state before it):

    A_ij   = beta_i exp(G_i - G_j) k_i.k_j          for j < i, else 0
    T      = (1 + A)^-1                              all chunks and heads at once, by block doubling
    U      = T (beta v)        W = T (beta exp(G) k)
    v'     = U - W S                                 what each token adds, given S
    o      = exp(G) q S + [exp(G_i - G_j) q_i.k_j, j <= i] v'
    S     <- exp(G_C) S + (exp(G_C - G) k)^T v'

Only the last three lines are in the loop over chunks (see ``tensor.chunks``), and q S and W S are one product
there. Sums of log decays are float64: differences need 1e-7 where the sums are in the hundreds (see
``chunks.pairwise_decay``).

``tensor.delta_scan`` has the inverse and the pass over the states, which ``kimi_delta`` shares.

Source: Yang et al., "Parallelizing linear transformers with the delta rule" (2024) and "Gated Delta
Networks" (2024).
"""

from __future__ import annotations

import torch

from weft.tensor.chunks import Step, chunk_layout, decay_of, pairwise_decay
from weft.tensor.delta_scan import ChunkWork, scan, unit_lower_inverse
from weft.tensor.inputs import Runs
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import decode_blocks, prefill_rows

L2_EPS = 1e-6


def gated_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_TH: torch.Tensor,
                beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *,
                scale: float) -> torch.Tensor:
    out_THV = torch.empty(v_THV.shape, dtype=q_THK.dtype, device=q_THK.device)
    n = runs.decode_count
    if n:
        out_THV[:n] = _decode(_unit(q_THK[:n]).mul_(scale), _unit(k_THK[:n]), v_THV[:n].float(),
                              g_TH[:n].float(), beta_TH[:n].float(), state_SHKV, runs)
    if n < runs.run_count:
        out_THV[n:] = _prefill(_unit(q_THK[n:]).mul_(scale), _unit(k_THK[n:]), v_THV[n:], g_TH[n:],
                               beta_TH[n:], state_SHKV, runs)
    return out_THV


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    norms: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide * norms.square_().add_(L2_EPS).rsqrt_()


def _decode(q_RHK: torch.Tensor, k_RHK: torch.Tensor, v_RHV: torch.Tensor, g_RH: torch.Tensor,
            beta_RH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs) -> torch.Tensor:
    """One token per run. k.S and q.S are read in one product from the state before it:
    o = e^g q.S + (q.k) d with d = beta (v - e^g k.S)."""
    _, heads, k_dim, v_dim = state_SHKV.shape
    kq = torch.stack((k_RHK, q_RHK), dim=2).repeat_interleave(heads // k_RHK.shape[1], dim=1)
    k_full, q_full = kq[:, :, 0], kq[:, :, 1]
    q_k_RH1 = (q_full * k_full).sum(-1, keepdim=True)
    decay_RH1, beta_RH1 = decay_of(g_RH)[:, :, None], beta_RH[:, :, None]
    out = torch.empty_like(v_RHV)
    for rows in decode_blocks(runs, state_SHKV):
        at = rows.span
        state = rows.read(state_SHKV, "gated_delta.state")
        seen = torch.bmm(kq[at].view(-1, 2, k_dim), state.view(-1, k_dim, v_dim)).view(-1, heads, 2, v_dim)
        seen.mul_(decay_RH1[at, :, None])
        delta = (v_RHV[at] - seen[:, :, 0]).mul_(beta_RH1[at])
        torch.addcmul(seen[:, :, 1], q_k_RH1[at], delta, out=out[at])
        state.mul_(decay_RH1[at, ..., None]).addcmul_(k_full[at, ..., None], delta[:, :, None, :])
        rows.write_back(state_SHKV, state)
    return out


def _prefill(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_TH: torch.Tensor,
             beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs) -> torch.Tensor:
    layout = chunk_layout(runs)
    size, count = layout.size, layout.chunk_count
    v_heads, v_dim = v_THV.shape[1:]
    padded = {}
    for name, x in (("q", q_THK), ("k", k_THK), ("v", v_THV), ("g", g_TH), ("beta", beta_TH)):
        into = scratch.take(f"gated_delta.{name}", (count, size, *x.shape[1:]), torch.float32)
        padded[name] = layout.spread(x, into)
    rows = prefill_rows(runs, layout.order, "state_rows.chunked")
    state = rows.read(state_SHKV, "gated_delta.state")
    out = scratch.take("gated_delta.out", (count, size, v_heads, v_dim), torch.float32)
    for first, chunks, steps in layout.blocks():
        part = slice(first, first + chunks)
        _block({name: x[part] for name, x in padded.items()}, first, steps, state, state_SHKV, out)
    rows.write_back(state_SHKV, state)
    return layout.collect(out)


def _block(x: dict[str, torch.Tensor], first: int, steps: list[Step], state: torch.Tensor,
           state_SHKV: torch.Tensor, out: torch.Tensor) -> None:
    """Some consecutive steps of the scan: the intra-chunk work of their chunks, then the scan itself."""
    count, size, v_heads, v_dim = x["v"].shape
    k_heads, k_dim = x["k"].shape[2:]
    group = v_heads // k_heads

    def head_major(name: str, width: int) -> torch.Tensor:
        source = x[name].transpose(1, 2)
        return scratch.take(f"gated_delta.{name}_heads", (count, source.shape[1], size, width),
                            torch.float32).copy_(source)

    q, k, v = head_major("q", k_dim), head_major("k", k_dim), head_major("v", v_dim)
    beta = x["beta"].transpose(1, 2)
    sums = x["g"].transpose(1, 2).double().cumsum(-1)
    decay = pairwise_decay(sums, scratch.take("gated_delta.decay", (count, v_heads, size, size),
                                              torch.float32))
    grouped = (count, k_heads, group, size, size)

    kk = torch.matmul(k, k.transpose(-1, -2))
    a = scratch.take("gated_delta.a", decay.shape, torch.float32)
    torch.mul(decay.view(grouped), kk[:, :, None], out=a.view(grouped))
    a.mul_(beta[..., :, None])
    inverse = unit_lower_inverse(a.view(-1, size, size)).view(decay.shape)
    inverse.mul_(beta[..., None, :])
    new_values = scratch.take("gated_delta.u", v.shape, torch.float32)
    torch.bmm(inverse.view(-1, size, size), v.view(-1, size, v_dim), out=new_values.view(-1, size, v_dim))

    grown = decay_of(sums)
    inverse.mul_(grown[..., None, :])
    reads = scratch.take("gated_delta.reads", (count, v_heads, 2, size, k_dim), torch.float32)
    for_state, for_output = reads.view(count, k_heads, group, 2, size, k_dim).unbind(3)
    for_state.copy_(torch.bmm(inverse.view(-1, group * size, size),
                              k.view(-1, size, k_dim)).view(for_state.shape))
    torch.mul(q[:, :, None], grown.view(count, k_heads, group, size, 1), out=for_output)

    attention = decay.view(grouped).mul_(torch.matmul(q, k.transpose(-1, -2))[:, :, None]).view(decay.shape)
    left = decay_of(sums[..., -1:] - sums)
    k_left = scratch.take("gated_delta.k_left", (count, v_heads, size, k_dim), torch.float32)
    torch.mul(k[:, :, None], left.view(count, k_heads, group, size, 1),
              out=k_left.view(count, k_heads, group, size, k_dim))

    def inside(state_HKV: torch.Tensor, chunk: int, places: int, added_HCV: torch.Tensor) -> torch.Tensor:
        return _state_inside(state_HKV, k[chunk], sums[chunk], added_HCV, places)

    over_chunk = decay_of(sums[..., -1])[..., None, None]
    scan(steps, first, ChunkWork(reads, new_values, attention, k_left, over_chunk, inside), state, state_SHKV,
         out)


def _state_inside(state_HKV: torch.Tensor, k_HCK: torch.Tensor, sums_HC: torch.Tensor,
                  added_HCV: torch.Tensor, places: int) -> torch.Tensor:
    """The state after ``places`` places of a chunk: the chunk's update without the later tokens."""
    heads = state_HKV.shape[0]
    last_H1 = sums_HC[:, places - 1 : places]
    left_HC = decay_of(last_H1 - sums_HC[:, :places])
    k_left = k_HCK[:, :places].repeat_interleave(heads // k_HCK.shape[0], dim=0) * left_HC[..., None]
    return torch.baddbmm(state_HKV * decay_of(last_H1)[..., None], k_left.transpose(1, 2),
                         added_HCV[:, :places])
