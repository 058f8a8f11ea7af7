"""Tokens from logits on a GPU, in one launch: greedy rows and drawn ones, whatever their filters.

    _choose    a program: a row     best token --greedy--> done
                                    threshold (top-k, top-p, min-p) --> mass kept --> token at u x mass

The promises are those of ``filters`` and ``randomness``: every filter is a threshold on the scaled logit;
ties share their fate; the draw is by inverse CDF over the remaining tokens in ascending id, with sums in
float64. What differs is how the threshold is found. Sorting 150,000 logits for each row is the cost of the
torch path, and looking at the best few first wants the host to decide. Here nothing is sorted: a scaled logit
is at most 0, so the bits of its negative are an integer that grows as the token gets worse. The threshold is
the largest integer t for which

    top-k    fewer than k tokens                are better than t
    top-p    less than p of the mass (of what top-k kept) is better than t

Both counts grow with t, so a search finds t two bits at a time. It takes 16 passes over a row that lies in
the L2 cache. Rows without top-k or top-p make none of them.

NaN is taken for the lowest finite number as it is read, +inf for the highest. -inf is the lowest too, but not
in a step with grammars (``masked``): there the rows were made finite before the masks, and -inf is what they
refuse.

Rejected: a radix sort of each row (as many passes, and all of it written back each time); several programs a
row for small batches (an argmax of 150,000 by one program takes some microseconds).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.launch import Blocks, compilation_of

CHOOSE = Blocks(4096, warps=8)
_LOWEST = -3.4028234663852886e38
LOWEST: tl.constexpr = tl.constexpr(_LOWEST)
HIGHEST: tl.constexpr = tl.constexpr(-_LOWEST)


@triton.jit
def _logits(row, begin, V, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [BLOCK], -inf behind the vocabulary."""
    at = begin + tl.arange(0, BLOCK)
    x = tl.load(row + at, mask=at < V, other=0.0)
    x = tl.where(x == x, tl.where(x > HIGHEST, HIGHEST, x), LOWEST)
    if not MASKED:
        x = tl.where(x < LOWEST, LOWEST, x)
    return tl.where(at < V, x, float("-inf"))


@triton.jit
def _worse(row, begin, best, temperature, V, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """How far below the best, (best - logit) / temperature >= 0, float32 [BLOCK]."""
    x = _logits(row, begin, V, MASKED, BLOCK)
    return tl.abs(tl.div_rn(x - best, tl.zeros_like(x) + temperature))


@triton.jit
def _threshold(row, limit, most, best, temperature, V, MASS: tl.constexpr, MASKED: tl.constexpr,
               BLOCK: tl.constexpr):
    """The largest t for which what is better than t adds up to less than ``limit`` (float64): exp(-worse) of
    what is no worse than ``most`` (bits, uint32) if MASS, else one for each token. Returns its bits."""
    low, quarter = tl.full((), 0, tl.uint32), tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        one, two, three = low + quarter, low + 2 * quarter, low + 3 * quarter
        sum_1, sum_2, sum_3 = limit * 0.0, limit * 0.0, limit * 0.0
        for begin in range(0, V, BLOCK):
            worse = _worse(row, begin, best, temperature, V, MASKED, BLOCK)
            bits = worse.to(tl.uint32, bitcast=True)
            if MASS:
                weight = tl.where(bits <= most, tl.exp(-worse), 0.0).to(tl.float64)
            else:
                weight = tl.where(begin + tl.arange(0, BLOCK) < V, 1.0, 0.0).to(tl.float64)
            sum_1 += tl.sum(tl.where(bits < one, weight, 0.0))
            sum_2 += tl.sum(tl.where(bits < two, weight, 0.0))
            sum_3 += tl.sum(tl.where(bits < three, weight, 0.0))
        steps = (sum_1 < limit).to(tl.uint32) + (sum_2 < limit).to(tl.uint32) + (sum_3 < limit).to(tl.uint32)
        low += steps * quarter
        quarter = quarter // 4
    return low


@triton.jit
def _weights_above(row, begin, most, floor, best, temperature, V, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of a block, float64 [BLOCK], 0 for what is filtered."""
    worse = _worse(row, begin, best, temperature, V, MASKED, BLOCK)
    keep = (worse.to(tl.uint32, bitcast=True) <= most) & (-worse >= floor)
    keep = keep & (begin + tl.arange(0, BLOCK) < V)
    return tl.where(keep, tl.exp(-worse), 0.0).to(tl.float64)


@triton.jit
def _drawn(row, best, temperature, top_k, top_p, floor, uniform, V, MASKED: tl.constexpr,
           BLOCK: tl.constexpr):
    """The token of one row."""
    most = tl.full((), 0x7F800000, tl.uint32)   # worse by infinity
    if (top_k > 0) & (top_k < V):
        most = tl.minimum(most, _threshold(row, top_k, most, best, temperature, V, False, MASKED, BLOCK))
    if top_p < 1.0:
        mass = top_p * 0.0
        for begin in range(0, V, BLOCK):
            mass += tl.sum(_weights_above(row, begin, most, float("-inf"), best, temperature, V, MASKED,
                                          BLOCK))
        most = tl.minimum(most, _threshold(row, top_p * mass, most, best, temperature, V, True, MASKED,
                                           BLOCK))
    total = top_p * 0.0
    for begin in range(0, V, BLOCK):
        total += tl.sum(_weights_above(row, begin, most, floor, best, temperature, V, MASKED, BLOCK))
    target = uniform * total
    token, running, chosen_yet = tl.full((), 0, tl.int32), top_p * 0.0, tl.full((), 0, tl.int32)
    for begin in range(0, V, BLOCK):
        weight = _weights_above(row, begin, most, floor, best, temperature, V, MASKED, BLOCK)
        here = tl.sum(weight)
        if (chosen_yet == 0) & (here > 0.0):
            # Where rounding puts the target at the end: the last token that adds anything.
            at = begin + tl.arange(0, BLOCK)
            sums = running + tl.cumsum(weight, axis=0)
            above = tl.min(tl.where((sums > target) & (weight > 0.0), at, 0x7FFFFFFF))
            last = tl.max(tl.where(weight > 0.0, at, -1))
            over = running + here > target
            token = tl.where(over, tl.minimum(above, last), last)
            chosen_yet = over.to(tl.int32)
        running += here
    return token


@triton.jit(do_not_specialize=["rows"])
def _choose(logits, numbers, chosen, V, rows, logits_row, DRAWS: tl.constexpr, MASKED: tl.constexpr,
            BLOCK: tl.constexpr):
    """``logits`` float32 [rows, V]; ``numbers`` float64 [5, rows]: temperature (0: greedy), top-k, top-p, log
    of min-p, uniform; ``chosen`` int64 [rows]."""
    at = tl.program_id(0)
    row = logits + at.to(tl.int64) * logits_row
    lane = tl.arange(0, BLOCK)
    best_of, place_of = tl.full((BLOCK,), float("-inf"), tl.float32), lane
    for begin in range(0, V, BLOCK):
        x = _logits(row, begin, V, MASKED, BLOCK)
        better = x > best_of
        best_of, place_of = tl.where(better, x, best_of), tl.where(better, begin + lane, place_of)
    best = tl.max(best_of)
    token = tl.min(tl.where(best_of == best, place_of, 0x7FFFFFFF))
    if DRAWS:
        temperature = tl.load(numbers + at)
        if temperature > 0.0:
            token = _drawn(row, best, temperature.to(tl.float32), tl.load(numbers + rows + at),
                           tl.load(numbers + 2 * rows + at), tl.load(numbers + 3 * rows + at).to(tl.float32),
                           tl.load(numbers + 4 * rows + at), V, MASKED, BLOCK)
    tl.store(chosen + at, token.to(tl.int64))


def choose(logits_XV: torch.Tensor, numbers_5X: torch.Tensor | None, *, masked: bool) -> torch.Tensor:
    """int64 [X]. ``numbers_5X``: float64, as ``filters.fill_numbers`` made them, with a temperature of 0 for
    greedy rows; None where all are."""
    assert logits_XV.stride(1) == 1
    rows, vocab_size = logits_XV.shape
    chosen_X = torch.empty(rows, dtype=torch.int64, device=logits_XV.device)
    _choose[(rows,)](logits_XV, logits_XV if numbers_5X is None else numbers_5X, chosen_X, vocab_size, rows,
                     logits_XV.stride(0), DRAWS=numbers_5X is not None, MASKED=masked,
                     BLOCK=min(CHOOSE.width, triton.next_power_of_2(vocab_size)), num_warps=CHOOSE.warps)
    return chosen_X


def warm(vocab_size: int, device: torch.device) -> None:
    """Have every form of the kernel compiled now, not when the first request asks for it."""
    logits_1V = torch.zeros((1, vocab_size), dtype=torch.float32, device=device)
    for numbers_51 in (None, torch.ones((5, 1), dtype=torch.float64, device=device)):
        for masked in (False, True):
            choose(logits_1V, numbers_51, masked=masked)


def compilations() -> list[Compilation]:
    return [compilation_of(
        f"choose {'drawn' if draws else 'greedy'}{' masked' if masked else ''}", _choose,
        {"logits": "*fp32", "numbers": "*fp64" if draws else "*fp32", "chosen": "*i64"},
        {"DRAWS": draws, "MASKED": masked, "BLOCK": CHOOSE.width}, CHOOSE)
        for draws in (True, False) for masked in (False, True)]
