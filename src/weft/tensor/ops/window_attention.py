"""Causal attention over the last tokens of each sequence, stored as a ring in its state slot. In torch:

    ring of W = 8, next position 11      place   0  1  2  3  4  5  6  7
                                         holds   8  9 10  3  4  5  6  7      3 is overwritten next

    decode   the rings of a block of rows -> a buffer, the new token in its place -> two batched products over
             all W places (order does not matter to a softmax) -> only the new token is written back
    prefill  per run:  [ the ring's tokens, oldest first | the run's own tokens ], queries in blocks of
             QUERY_BLOCK against the W - 1 + QUERY_BLOCK keys that any of them sees

Prefill work is linear in the run's length, and nothing is padded to W: a prompt shorter than the window gives the
result of full attention. Unwritten places are masked in scores and values (L6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.tensor.few_bits import as_bytes, narrowed
from weft.tensor.inputs import Runs
from weft.tensor.op import recurrent_op
from weft.tensor.ops.paged_attention import attended_with, capped_, softmax_with
from weft.tensor.ops.relative_bias import apart, bias_mask, relative_bias
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import StateRows, decode_blocks, prefill_rows
from weft.units import PAD

QUERY_BLOCK = 256
"""Queries of a prefill that share one product; more queries read more keys that none of them sees."""


@dataclass(frozen=True, slots=True)
class DecodePlaces:
    """Places of one block of decode rows. ``place_R``: the place of each row's new token. ``distance_RW``: from it
    back to the token in each place. ``unread_RW``: the unwritten places of each row; None if there are none.
    ``slot_rows_R``, ``slots``: the rows with a slot, and their slots. ``fresh_slots``: the slots among them that start
    from zeros.
    """

    place_R: torch.Tensor
    distance_RW: torch.Tensor
    unread_RW: torch.Tensor | None
    slot_rows_R: torch.Tensor
    slots: torch.Tensor
    fresh_slots: torch.Tensor


@recurrent_op("weft.tensor.kernels.window_attention")
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
    """Return softmax(scale * Q K^T) V; the token at position p sees positions (p - W, p] of its own sequence.

    ``q_THD`` [T, heads, D] with heads = G x kv_heads, query head h reading KV head h // G; ``k_THD`` and
    ``v_THD`` [T, kv_heads, D], after rotary. Any float dtypes; keys and values are rounded to the ring's,
    then softmax and sums are float32. Returns [T, heads, D] in the dtype of ``q_THD``.

    ``ring_S2HWD`` [S, 2, kv_heads, W, D]: keys in [:, 0], values in [:, 1]; position p is at place p mod W.
    A fresh run sees nothing before its start and leaves zeros at unwritten places; any other run finds all
    positions from 0 on. Runs with slot PAD see only themselves. ``sinks_TH``, ``bank_RE``: as of
    ``paged_attention``.

    Source: Beltagy et al., "Longformer" (2020), the causal window of Mistral 7B (2023).
    """
    out_THD = torch.empty((*q_THD.shape[:2], v_THD.shape[2]), dtype=q_THD.dtype, device=q_THD.device)
    dtype = ring_S2HWD.dtype
    # Torch cannot index or fill fp8: the ring moves as bytes, and is converted where it is multiplied.
    kv_2THD, ring_S2HWD = as_bytes(narrowed(torch.stack((k_THD, v_THD)), dtype)), as_bytes(ring_S2HWD)
    n = runs.decode_count
    if n:
        _decode(
            q_THD[:n],
            kv_2THD[:, :n].transpose(0, 1),
            ring_S2HWD,
            dtype,
            runs,
            scale,
            out_THD[:n],
            None if sinks_TH is None else sinks_TH[:n],
            bank_RE,
            cap,
        )
    if n < runs.run_count:
        _prefill(q_THD, kv_2THD, ring_S2HWD, dtype, runs, scale, out_THD, sinks_TH, bank_RE, cap)
    return out_THD


def _decode(
    q_RHD: torch.Tensor,
    kv_R2HD: torch.Tensor,
    ring_S2HWD: torch.Tensor,
    dtype: torch.dtype,
    runs: Runs,
    scale: float,
    out_RHD: torch.Tensor,
    sinks_RH: torch.Tensor | None,
    bank_RE: torch.Tensor | None,
    cap: float,
) -> None:
    q_RHD, states_RHR = apart(q_RHD, bank_RE)
    _, _, kv_heads, window, dim = ring_S2HWD.shape
    blocks = decode_blocks(runs, ring_S2HWD)
    places = runs.once(
        f"window_attention.{window}.{len(blocks)}", lambda: [_places(runs, rows, window) for rows in blocks]
    )
    for rows, where in zip(blocks, places, strict=True):
        new = kv_R2HD[rows.span]
        ring = rows.read(ring_S2HWD, "window_attention.ring")
        count = ring.shape[0]
        ring[torch.arange(count, device=ring.device), :, :, where.place_R] = new
        k_BWD, v_BWD = (ring[:, part].view(dtype).float().reshape(count * kv_heads, window, dim) for part in (0, 1))
        q_BGD = (q_RHD[rows.span].float() * scale).reshape(count * kv_heads, -1, dim)
        # The places of a ring are in no order, and need none: a softmax over keys has none.
        scores_BGW = torch.bmm(q_BGD, k_BWD.transpose(1, 2))
        capped_(scores_BGW, cap)
        if bank_RE is not None:
            scores_BGW.view(count, -1, window).add_(relative_bias(states_RHR[rows.span], bank_RE, where.distance_RW))
        if where.unread_RW is not None:
            scores_BGW.view(count, -1, window).masked_fill_(where.unread_RW[:, None], float("-inf"))
            # 0 x NaN is NaN: a weight of 0 does not hide an unwritten place.
            v_BWD.view(count, kv_heads, window, dim).masked_fill_(where.unread_RW[:, None, :, None], 0.0)
        attended = torch.bmm(softmax_with(None if sinks_RH is None else sinks_RH[rows.span], scores_BGW), v_BWD)
        out_RHD[rows.span] = attended.view(count, -1, dim).to(out_RHD.dtype)
        # After the read: a fresh slot becomes zeros with the new token in it.
        if where.fresh_slots.numel():
            ring_S2HWD.index_fill_(0, where.fresh_slots, 0)
        if where.slots.numel():
            ring_S2HWD[where.slots, :, :, where.place_R[where.slot_rows_R]] = new[where.slot_rows_R]


def _places(runs: Runs, rows: StateRows, window: int) -> DecodePlaces:
    device = runs.slots_R.device
    chosen = range(rows.span.start, rows.span.stop)
    positions = [max(runs.starts[run], 0) for run in chosen]
    first_R = torch.tensor([_first_known(runs, run) for run in chosen], device=device)
    position_R1 = torch.tensor(positions, device=device)[:, None]
    # Distance from this token to the position in each place; a negative position was never written.
    distance_RW = (position_R1 - torch.arange(window, device=device)) % window
    unread_RW = position_R1 - distance_RW < first_R[:, None]
    slot_rows = [row for row, run in enumerate(chosen) if runs.slots[run] != PAD]
    slots = [runs.slots[run] for run in chosen if runs.slots[run] != PAD]
    fresh = [runs.slots[run] for run in chosen if runs.slots[run] != PAD and runs.fresh[run]]
    slot_rows_R, slots_X, fresh_X = (
        torch.tensor(x, dtype=torch.int64, device=device) for x in (slot_rows, slots, fresh)
    )
    return DecodePlaces(
        position_R1[:, 0] % window,
        distance_RW,
        unread_RW if bool(unread_RW.any()) else None,
        slot_rows_R,
        slots_X,
        fresh_X,
    )


def _first_known(runs: Runs, run: int) -> int:
    """Return the first position whose key the run may see."""
    alone = runs.slots[run] == PAD or runs.fresh[run]
    return max(runs.starts[run], 0) if alone else 0


def _prefill(
    q_THD: torch.Tensor,
    kv_2THD: torch.Tensor,
    ring_S2HWD: torch.Tensor,
    dtype: torch.dtype,
    runs: Runs,
    scale: float,
    out_THD: torch.Tensor,
    sinks_TH: torch.Tensor | None,
    bank_RE: torch.Tensor | None,
    cap: float,
) -> None:
    window = ring_S2HWD.shape[3]
    chosen = range(runs.decode_count, runs.run_count)
    rows = prefill_rows(runs, chosen, "state_rows.prefill")
    rings = rows.read(ring_S2HWD, "window_attention.rings")
    for row, run in enumerate(chosen):
        begin, length = runs.offsets[run], runs.lengths[run]
        start = max(runs.starts[run], 0)
        own = kv_2THD[:, begin : begin + length].transpose(1, 2)
        before = torch.arange(max(_first_known(runs, run), start - window + 1), start, device=own.device)
        known = torch.cat((rings[row][:, :, before % window], own), dim=2)
        _attend(
            q_THD[begin : begin + length],
            known.view(dtype),
            start,
            window,
            scale,
            out_THD[begin : begin + length],
            None if sinks_TH is None else sinks_TH[begin : begin + length],
            bank_RE,
            cap,
        )
        for tap in runs.taps:
            if tap.run == run and tap.slot != PAD:
                # On a copy: the ring itself goes on with the run.
                ring_S2HWD[tap.slot] = _written(rings[row].clone(), own[:, :, : tap.offset], start)
        _written(rings[row], own, start)
    rows.write_back(ring_S2HWD, rings)


def _written(ring_2HWD: torch.Tensor, own_2HLD: torch.Tensor, start: int) -> torch.Tensor:
    """Return ``ring`` after the tokens ``own`` from position ``start`` on; in place."""
    length, window = own_2HLD.shape[2], ring_2HWD.shape[2]
    count = min(length, window)
    places = torch.arange(start + length - count, start + length, device=own_2HLD.device) % window
    ring_2HWD.index_copy_(2, places, own_2HLD[:, :, length - count :])
    return ring_2HWD


def _attend(
    q_LHD: torch.Tensor,
    known_2HSD: torch.Tensor,
    start: int,
    window: int,
    scale: float,
    out_LHD: torch.Tensor,
    sinks_LH: torch.Tensor | None,
    bank_RE: torch.Tensor | None,
    cap: float,
) -> None:
    """Compute queries of one run; ``known`` ends with the run's own tokens."""
    q_LHD, states_LHR = apart(q_LHD, bank_RE)
    length, heads, dim = q_LHD.shape
    _, kv_heads, count, _ = known_2HSD.shape
    wide = scratch.take("window_attention.known", known_2HSD.shape, torch.float32).copy_(known_2HSD)
    q_HGLD = q_LHD.float().view(length, kv_heads, -1, dim).permute(1, 2, 0, 3)
    lead = count - length
    first = 0
    while first < length:
        # Cut at absolute positions, so that a resumed prompt has the blocks of an uncut one.
        last = min(length, first + QUERY_BLOCK - (start + first) % QUERY_BLOCK)
        low, high = max(0, lead + first - window + 1), lead + last
        k_HGSD, v_HGSD = (part[:, None, low:high].expand(-1, heads // kv_heads, -1, -1) for part in wide)
        key_S = torch.arange(low, high, device=wide.device)
        query_L1 = torch.arange(lead + first, lead + last, device=wide.device)[:, None]
        if bank_RE is None:
            seen = (key_S <= query_L1) & (key_S > query_L1 - window)
        else:
            seen = bias_mask(states_LHR[first:last], bank_RE, query_L1 - key_S, kv_heads, window)
        own_sinks = None if sinks_LH is None else sinks_LH[first:last]
        attended = attended_with(own_sinks, q_HGLD[:, :, first:last], k_HGSD, v_HGSD, seen, scale, cap)
        out_LHD[first:last] = attended.permute(2, 0, 1, 3).reshape(last - first, heads, dim).to(out_LHD.dtype)
        first = last
