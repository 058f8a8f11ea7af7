"""Attention over the last tokens of a sequence and over entries, one for each group of tokens of the text before.

    groups of 4     | t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9 ..
    entry 1         a softmax of gates, number by number, over rows of t0 .. t3 and other rows of t4 .. t7
    kept of it      ``waiting``  its sums so far, in the state slot: largest gate, sum of exp, weighted sum
                    ``entry``    the last whole entry, in the state slot
                    pages        t7 t8 t9 t10 keep a quarter of its numbers each

A token's row has a part of the last entry that is whole after the token. So pages cost an entry's bytes divided by its
tokens, a row is a function of only the tokens up to its own, and a prefix may end anywhere: its pages hold the entries
but the last one, and its state the rest. A token at p sees the entries that are whole after it, w < (p + 1) / group.

Sums go token by token in each group, so the bits do not depend on cuts. All operators are torch's.

Source: transformers ``DeepseekV4Attention``, ``DeepseekV4HCACompressor``, ``DeepseekV4CSACompressor``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from weft.tensor.few_bits import as_bytes, narrowed, quantized
from weft.tensor.inputs import LayerCache, Runs
from weft.tensor.op import recurrent_op
from weft.tensor.ops.chosen_blocks import SCORES_AT_ONCE
from weft.tensor.ops.elementwise import each
from weft.tensor.ops.latent_attention import rows_of, write_rows
from weft.tensor.ops.paged_attention import attended_with
from weft.tensor.ops.window_attention import QUERY_BLOCK
from weft.tensor.state_rows import prefill_rows
from weft.units import PAD, PAGE_TOKENS


@recurrent_op()
def gated_sums(
    value_TKC: torch.Tensor,
    gate_TKC: torch.Tensor,
    waiting_SJC: torch.Tensor,
    runs: Runs,
    group: int,
    *,
    layer: int = 0,
) -> torch.Tensor:
    """Return [T, C] in the dtype of ``value_TKC``: at the last token of each group its entry, zeros at other tokens.

    ``value_TKC``, ``gate_TKC`` [T, K, C] of any float dtype, computed in float32: rows of a token for the entry of its
    own group, and with K = 2 those for the entry of the next group. ``waiting_SJC`` [S, 3 K, C]: the sums of these
    entries; zeros are sums of no tokens.
    """
    parts = value_TKC.shape[1]
    out_TC = torch.zeros_like(value_TKC[:, 0])
    rows = prefill_rows(runs, range(runs.run_count), "state_rows.all")
    waiting, decodes = rows.read(waiting_SJC, "entries.waiting").float(), runs.decode_count
    if decodes:
        ended_R = (runs.starts_R[:decodes].clamp_min(0) + 1) % group == 0
        values_RKC, gates_RKC = value_TKC[:decodes].float(), gate_TKC[:decodes].float()
        out_RC, after_RJC = _decoded(values_RKC, gates_RKC, waiting[:decodes], ended_R)
        out_TC[:decodes], waiting[:decodes] = out_RC.to(out_TC.dtype), after_RJC
    for run in range(decodes, runs.run_count):
        begin, length = runs.offsets[run], runs.lengths[run]
        start, state_K3C = max(runs.starts[run], 0), torch.unflatten(waiting[run], 0, (parts, 3))
        taps = [tap for tap in runs.taps if tap.run == run and tap.slot != PAD]
        for end, slot in [*((tap.offset, tap.slot) for tap in taps), (length, PAD)]:
            span = slice(begin, begin + end)
            value_LKC, gate_LKC = value_TKC[span].float(), gate_TKC[span].float()
            entries_EC, after_K3C = _advanced(value_LKC, gate_LKC, state_K3C, start, group)
            if slot != PAD:
                waiting_SJC[slot] = after_K3C.flatten(0, 1).to(waiting_SJC.dtype)
        out_TC[begin : begin + length][_ends(start, length, group)] = entries_EC.to(out_TC.dtype)
        waiting[run] = after_K3C.flatten(0, 1)
    rows.write_back(waiting_SJC, waiting)
    return out_TC


def _decoded(
    value_RKC: torch.Tensor, gate_RKC: torch.Tensor, before_RJC: torch.Tensor, ended_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of one token of each run its entry, zeros where none ends, [R, C], and the state after it."""
    inside_R1, sums = torch.ones_like(ended_R)[:, None], []
    for part in range(value_RKC.shape[1]):
        own = slice(part, part + 1)
        before_R3C = before_RJC[:, 3 * part : 3 * part + 3]
        sums.append(_folded(value_RKC[:, own], gate_RKC[:, own], before_R3C, inside_R1, range(1)))
    entry_RC, ended_R11 = sums[0][:, 2] / sums[0][:, 1], ended_R[:, None, None]
    next_RJC = torch.cat([*sums[1:], torch.zeros_like(sums[0])], 1)
    return torch.where(ended_R[:, None], entry_RC, 0.0), torch.where(ended_R11, next_RJC, torch.cat(sums, 1))


def _ends(start: int, length: int, group: int) -> slice:
    """Return the places among ``length`` tokens from ``start`` on whose tokens are the last of a group."""
    return slice((-start - 1) % group, length, group)


def _advanced(
    value_LKC: torch.Tensor, gate_LKC: torch.Tensor, state_K3C: torch.Tensor, start: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries whose groups end in a run, [E, C], and the state after it."""
    length, parts, _ = value_LKC.shape
    lead = start % group
    count = -(-(lead + length) // group)
    around = (0, 0, 0, 0, lead, count * group - lead - length)
    value_GJKC, gate_GJKC = (torch.unflatten(F.pad(x, around), 0, (count, group)) for x in (value_LKC, gate_LKC))
    places = torch.arange(count * group, device=value_LKC.device)
    inside_GJ = ((places >= lead) & (places < lead + length)).view(count, group)
    # In one group only the run's own places; several groups have every place between them.
    steps = range(lead, lead + length) if count == 1 else range(group)
    next_G3C = state_K3C.new_zeros(count, *state_K3C.shape[1:])
    if parts == 2:
        next_G3C[0] = state_K3C[1]
        next_G3C = _folded(value_GJKC[:, :, 1], gate_GJKC[:, :, 1], next_G3C, inside_GJ, steps)
    before_G3C = torch.cat((state_K3C[:1], next_G3C[:-1]))
    own_G3C = _folded(value_GJKC[:, :, 0], gate_GJKC[:, :, 0], before_G3C, inside_GJ, steps)
    ended = (lead + length) // group
    entries_EC = own_G3C[:ended, 2] / own_G3C[:ended, 1]
    last = [own_G3C[-1], next_G3C[-1]] if ended < count else [next_G3C[-1], torch.zeros_like(next_G3C[-1])]
    return entries_EC, torch.stack(last[:parts])


def _folded(
    value_GJC: torch.Tensor, gate_GJC: torch.Tensor, before_G3C: torch.Tensor, inside_GJ: torch.Tensor, steps: range
) -> torch.Tensor:
    """Return the sums of each group after its tokens at ``steps``, one after the other, without tokens that are not
    ``inside``.
    """
    most_GC, sum_GC, weighted_GC = before_G3C.unbind(1)
    for place in steps:
        gate_GC, inside_G1 = gate_GJC[:, place], inside_GJ[:, place, None]
        some_GC = sum_GC > 0
        now_GC = torch.where(some_GC, torch.maximum(most_GC, gate_GC), gate_GC)
        left_GC = torch.where(some_GC, each(torch.exp, most_GC - now_GC), 0.0)
        share_GC = each(torch.exp, gate_GC - now_GC)
        most_GC = torch.where(inside_G1, now_GC, most_GC)
        sum_GC = torch.where(inside_G1, sum_GC * left_GC + share_GC, sum_GC)
        weighted_GC = torch.where(inside_G1, weighted_GC * left_GC + value_GJC[:, place] * share_GC, weighted_GC)
    return torch.stack((most_GC, sum_GC, weighted_GC), 1)


@recurrent_op()
def last_entries(entry_TC: torch.Tensor, last_S1C: torch.Tensor, runs: Runs, group: int) -> torch.Tensor:
    """Return [T, C] in the dtype of ``entry_TC``: after each token the last whole entry, zeros before the first.
    ``entry_TC`` [T, C]: at the last token of each group its entry; other rows are not read. ``last_S1C`` [S, 1, C]: the
    last whole entry.
    """
    out_TC = torch.empty_like(entry_TC)
    rows = prefill_rows(runs, range(runs.run_count), "state_rows.all")
    last = rows.read(last_S1C, "entries.last")
    for run, (begin, length) in enumerate(zip(runs.offsets, runs.lengths, strict=True)):
        start = max(runs.starts[run], 0)
        span = slice(begin, begin + length)
        known_EC = torch.cat((last[run].to(out_TC.dtype), entry_TC[span][_ends(start, length, group)]))
        after_L = (torch.arange(start + 1, start + length + 1, device=last.device)) // group - start // group
        out_TC[span] = known_EC[after_L]
        for tap in runs.taps:
            if tap.run == run and tap.slot != PAD:
                last_S1C[tap.slot, 0] = out_TC[begin + tap.offset - 1].to(last_S1C.dtype)
        last[run, 0] = out_TC[begin + length - 1].to(last.dtype)
    rows.write_back(last_S1C, last)
    return out_TC


@recurrent_op()
def last_rows(x_TD: torch.Tensor, ring_S11WD: torch.Tensor, runs: Runs) -> list[torch.Tensor]:
    """Return for each run [.., D] in the dtype of the ring: the rows of the last W - 1 tokens before it, as far as
    there are so many, and those of its own tokens. ``ring_S11WD``: as in ``window_attention``.
    """
    window, dtype = ring_S11WD.shape[3], ring_S11WD.dtype
    own_TD, ring_S11WD = as_bytes(narrowed(x_TD, dtype)), as_bytes(ring_S11WD)
    rows = prefill_rows(runs, range(runs.run_count), "state_rows.all")
    rings, seen = rows.read(ring_S11WD, "entries.rings"), []
    for run, (begin, length) in enumerate(zip(runs.offsets, runs.lengths, strict=True)):
        start, alone = max(runs.starts[run], 0), runs.slots[run] == PAD or runs.fresh[run]
        own_LD, ring_WD = own_TD[begin : begin + length], rings[run, 0, 0]
        before = torch.arange(start if alone else max(0, start - window + 1), start, device=own_LD.device)
        seen.append(torch.cat((ring_WD[before % window], own_LD)).view(dtype))
        for tap in runs.taps:
            if tap.run == run and tap.slot != PAD:
                ring_S11WD[tap.slot, 0, 0] = _written(ring_WD.clone(), own_LD[: tap.offset], start)
        _written(ring_WD, own_LD, start)
    rows.write_back(ring_S11WD, rings)
    return seen


def _written(ring_WD: torch.Tensor, own_LD: torch.Tensor, start: int) -> torch.Tensor:
    """Return ``ring_WD`` after the tokens ``own_LD`` from position ``start`` on; in place."""
    end, count = start + len(own_LD), min(len(own_LD), len(ring_WD))
    ring_WD[torch.arange(end - count, end, device=own_LD.device) % len(ring_WD)] = own_LD[len(own_LD) - count :]
    return ring_WD


class Entries:
    """Entries of a layer, or keys of its index: pages, and the last one after each token of the step. ``last_TC``: as
    ``last_entries`` returns it; ``group``: tokens of an entry.
    """

    def __init__(self, last_TC: torch.Tensor, cache: LayerCache, group: int) -> None:
        assert cache.k is not None, "entries without pages"
        self._last_TC, self._cache, self._pages, self.group = last_TC, cache, cache.k, group
        self._width = cache.k.shape[2] * cache.k.shape[4]
        self._scale = 1.0 if cache.head_scales is None else cache.head_scales[0, 0].float()

    def write(self, positions_T: torch.Tensor, runs: Runs) -> None:
        """Write the row of each token: its part of the last entry that is whole after it."""
        parts_TPW = self._in_parts(self._last_TC)
        part_T = (positions_T + 1) % self.group
        row_TW = parts_TPW[torch.arange(len(part_T), device=part_T.device), part_T]
        write_rows(row_TW / self._scale, self._pages, positions_T, runs, self._cache.token_scales)

    def count(self, runs: Runs, run: int) -> int:
        """Return the number of entries that are whole after the tokens of a run."""
        return (runs.starts[run] + runs.lengths[run]) // self.group

    def read(self, runs: Runs, run: int, numbers_E: torch.Tensor) -> torch.Tensor:
        """Return float32 [E, C], whole entries of a run by their ascending numbers, as their pages have them."""
        group, begin, start = self.group, runs.offsets[run], runs.starts[run]
        in_pages_E = numbers_E < (start + 1) // group - 1
        own_E, others_E = numbers_E[in_pages_E], numbers_E[~in_pages_E]
        tokens_EP = (own_E[:, None] + 1) * group - 1 + torch.arange(group, device=numbers_E.device)
        pages_EP = runs.page_table_RP[run, tokens_EP // PAGE_TOKENS].long()
        rows_EPW = rows_of(self._pages, self._cache.token_scales, pages_EP, tokens_EP % PAGE_TOKENS) * self._scale
        # Each of the others is read after the token that ends its group; the first may have ended before the run.
        ends_E = ((others_E + 1) * group - 1 - start).clamp_min(0) + begin
        entries_EW = torch.cat((rows_EPW.flatten(1), self._through_pages(self._last_TC[ends_E])))
        return entries_EW[:, : self._last_TC.shape[1]]

    def _in_parts(self, entries_EC: torch.Tensor) -> torch.Tensor:
        padding = self.group * self._width - entries_EC.shape[1]
        return torch.unflatten(F.pad(entries_EC, (0, padding)), 1, (self.group, self._width))

    def _through_pages(self, entries_EC: torch.Tensor) -> torch.Tensor:
        """Return float32 entries as they will be read from pages."""
        parts_EPW = self._in_parts(entries_EC) / self._scale
        if self._cache.token_scales is None:
            return (narrowed(parts_EPW, self._pages.dtype).float() * self._scale).flatten(1)
        codes_EPW, scale_EP = quantized(parts_EPW)
        return (codes_EPW.float() * scale_EP.float()[..., None] * self._scale).flatten(1)


def whole_entries(positions_L: torch.Tensor, count: int, group: int) -> torch.Tensor:
    """Return bool [L, count]: the entries that are whole after each token."""
    return torch.arange(count, device=positions_L.device) < ((positions_L + 1) // group)[:, None]


def choose_entries(
    q_LHD: torch.Tensor, weights_LH: torch.Tensor, keys_ED: torch.Tensor, whole_LE: torch.Tensor, chosen: int
) -> torch.Tensor:
    """Return bool [L, E]: the ``chosen`` best of the whole entries of each token. A score is the sum over heads of
    weight relu(q . key), in float64 and rounded once; among equal ones the earlier entry wins.
    """
    step, parts = max(1, SCORES_AT_ONCE // max(1, q_LHD.shape[1] * len(keys_ED))), []
    for first in range(0, len(q_LHD), step):
        rows = slice(first, first + step)
        scores_LHE = F.relu_(q_LHD[rows].double() @ keys_ED.double().T)
        scores_LE = (scores_LHE * weights_LH[rows, :, None].double()).sum(1).float()
        ranked_LE = scores_LE.masked_fill(~whole_LE[rows], -torch.inf).sort(descending=True, stable=True).indices
        parts.append(torch.zeros_like(whole_LE[rows]).scatter_(1, ranked_LE[:, :chosen], True))
    return torch.cat(parts) & whole_LE


def attend_rows_and_entries(
    q_LHD: torch.Tensor,
    known_SD: torch.Tensor,
    window: int,
    entries_ED: torch.Tensor,
    seen_LE: torch.Tensor,
    scale: float,
    sinks_H: torch.Tensor,
    start: int,
) -> torch.Tensor:
    """Return float32 [L, heads, D]: one softmax over the last ``window`` of ``known_SD``, the rows that end with those
    of the L tokens of a run from position ``start`` on, over the entries that ``seen_LE`` names, and over the sinks.
    Keys are values.
    """
    length, heads, _ = q_LHD.shape
    lead, parts = len(known_SD) - length, []
    for first, last in _cuts(start, length):
        low, high = max(0, lead + first - window + 1), lead + last
        places_S = torch.arange(low, high, device=q_LHD.device)
        query_L1 = torch.arange(lead + first, lead + last, device=q_LHD.device)[:, None]
        near_LS = (places_S <= query_L1) & (places_S > query_L1 - window)
        read_E = seen_LE[first:last].any(0)
        keys_SD = torch.cat((known_SD[low:high], entries_ED[read_E]))
        keys_11SD = keys_SD[None, None].expand(1, heads, *keys_SD.shape)
        q_1HLD = q_LHD[first:last].float().transpose(0, 1)[None]
        mask_LS = torch.cat((near_LS, seen_LE[first:last][:, read_E]), 1)
        sinks_LH = sinks_H.expand(last - first, heads)
        out_1HLD = attended_with(sinks_LH, q_1HLD, keys_11SD, keys_11SD, mask_LS, scale)
        parts.append(out_1HLD[0].transpose(0, 1))
    return torch.cat(parts)


def _cuts(start: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield spans of queries, cut at absolute positions."""
    first = 0
    while first < length:
        last = min(length, first + QUERY_BLOCK - (start + first) % QUERY_BLOCK)
        yield first, last
        first = last
