"""Tokens from logits on a GPU: greedy rows and drawn ones, with any filters. A row is cut into parts of 4,096
logits, and each program reads one part.

    _part_best    (row, part)  best logit of the part                       all steps
    _histogram    (row, part)  three digits of top-k's threshold: 3 launches   if a row has top-k
    _histogram    (row, part)  three digits of top-p's threshold: 3 launches   if a row has top-p
    _part_mass    (row, part)  mass of the part's remaining tokens          if a row is drawn
    _pick         (row)        best token, or the token at u x mass         all steps

The promises are those of ``filters`` and ``randomness``: every filter is a threshold on the scaled logit; ties are
kept or filtered together; the draw is by inverse CDF over the remaining tokens in ascending id. Only the search for
the threshold differs. Sorting 150,000 logits for each row is the cost of the torch path. Here nothing is sorted: a
scaled logit is at most 0, so the bits of its negative are an integer that grows as the token gets worse. The threshold
is the largest integer t for which

    top-k    fewer than k tokens                          are better than t
    top-p    less than p of the mass (of top-k's tokens)  is better than t

Both sums grow with t, so t is found digit by digit (11, 11 and 9 bits). A launch adds every token that agrees with the
digits so far to the histogram of its next digit. The next launch reads the digit off the running sums. Each of its
programs does that itself, which is cheaper than a launch between them. Counts of top-k are taken inside a program, and
merged by one addition for each digit that it has. So are masses at the first level, where nearly all tokens of a part
share some twenty digits: a program adds up those of the 32 worst digits that it has, which are four octaves of
distances. Other tokens, and the tokens of finer levels, are added one by one: few of them share an address.

Masses are integers: exp(scaled) in units of 2^-44. Integer sums do not depend on the order of the atomic
additions. So a token depends neither on the batch nor on the order of programs. 2^19 tokens of the largest
mass fit in an int64. A token 30 nats below the best has no mass.

NaN is taken for the lowest finite number as it is read, +inf for the highest. -inf is the lowest too, but not in a
step with grammars (``masked``): there the rows were made finite before the masks, and -inf marks refused tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Blocks, launch

CHOOSE = Blocks(4096, warps=8)
_LOWEST = -3.4028234663852886e38
LOWEST: tl.constexpr = tl.constexpr(_LOWEST)
HIGHEST: tl.constexpr = tl.constexpr(-_LOWEST)
INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
"""Bits of infinity: no threshold."""
BUCKETS: tl.constexpr = tl.constexpr(2048)
LEVELS: tl.constexpr = tl.constexpr(3)
MASS_UNITS: tl.constexpr = tl.constexpr(float(1 << 44))
WINDOW: tl.constexpr = tl.constexpr(32)
"""Digits of the first level whose masses are added up inside a program: 8 are an octave of distances."""
VOCABULARY_MAX = 1 << 19
"""Largest vocabulary: above it the sum of masses could leave an int64."""


@triton.jit
def _logits(row, begin, V, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return float32 [BLOCK], -inf after the end of the vocabulary."""
    token = begin + tl.arange(0, BLOCK)
    x = tl.load(row + token, mask=token < V, other=0.0)
    x = tl.where(x == x, tl.where(x > HIGHEST, HIGHEST, x), LOWEST)
    if not MASKED:
        x = tl.where(x < LOWEST, LOWEST, x)
    return tl.where(token < V, x, float("-inf"))


@triton.jit
def _worse(row, begin, best, temperature, V, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return (best - logit) / temperature >= 0, float32 [BLOCK], and its bits, int32 [BLOCK]."""
    x = _logits(row, begin, V, MASKED, BLOCK)
    worse = tl.abs(tl.div_rn(x - best, tl.zeros_like(x) + temperature))
    return worse, worse.to(tl.int32, bitcast=True)


@triton.jit
def _shift(level):
    """Return the bit at which the digit of ``level`` begins; for level -1 the end of all bits."""
    return tl.where(level < 0, 31, tl.where(level == 0, 20, tl.where(level == 1, 9, 0)))


@triton.jit
def _row_best(part_best, index, PARTS, PARTS_PADDED: tl.constexpr):
    part = tl.arange(0, PARTS_PADDED)
    return tl.max(tl.load(part_best + index * PARTS + part, mask=part < PARTS, other=float("-inf")))


@triton.jit
def _digits(histograms, limit, levels):
    """Return the threshold's bits above ``_shift(levels - 1)``, int32; 0 below. ``limit``: int64, above 0."""
    bucket = tl.arange(0, BUCKETS)
    threshold, better = tl.full((), 0, tl.int32), limit * 0
    for level in range(levels):
        sums = tl.load(histograms + level * BUCKETS + bucket)
        before = better + tl.cumsum(sums, axis=0) - sums
        shift = _shift(level)
        exists = bucket < (tl.full((), 1, tl.int32) << (_shift(level - 1) - shift))
        digit = tl.sum(((before < limit) & exists).to(tl.int32)) - 1
        better = tl.sum(tl.where(bucket == digit, before, 0))
        threshold += digit << shift
    return threshold


@triton.jit
def _top_k_limit(numbers, index, rows, V):
    """Return the limit of top-k, int64; 0 if top-k filters nothing or the row is greedy."""
    top_k = tl.load(numbers + rows + index).to(tl.int64)
    return tl.where((tl.load(numbers + index) > 0.0) & (top_k < V), top_k, 0)


@triton.jit
def _top_p_limit(numbers, histograms, index, rows):
    """Return the limit of top-p, int64, of the mass in the first level of ``histograms``; 0 if top-p filters nothing
    or the row is greedy.
    """
    top_p = tl.load(numbers + 2 * rows + index)
    mass = tl.sum(tl.load(histograms + tl.arange(0, BUCKETS)))
    limit = tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1)
    return tl.where((tl.load(numbers + index) > 0.0) & (top_p < 1.0), limit, 0)


@triton.jit
def _most(numbers, histograms, index, rows, V, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """Return the bits of the worst token that top-k and top-p keep, int32."""
    most = tl.full((), INFINITY, tl.int32)
    of_row = histograms + index * (2 * LEVELS * BUCKETS)
    if TOP_K:
        limit = _top_k_limit(numbers, index, rows, V)
        if limit > 0:
            most = tl.minimum(most, _digits(of_row, limit, LEVELS))
    if TOP_P:
        limit = _top_p_limit(numbers, of_row + LEVELS * BUCKETS, index, rows)
        if limit > 0:
            most = tl.minimum(most, _digits(of_row + LEVELS * BUCKETS, limit, LEVELS))
    return most


@triton.jit
def _mass(worse, bits, begin, most, floor, V, BLOCK: tl.constexpr):
    """Return the masses, int64 [BLOCK], 0 for filtered tokens."""
    keep = (bits <= most) & (-worse >= floor) & (begin + tl.arange(0, BLOCK) < V)
    return tl.where(keep, tl.exp(-worse) * MASS_UNITS, 0.0).to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def _part_best(logits, part_best, V, rows, logits_row, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the best logit of a part to ``part_best``, float32 [rows, parts]."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _logits(logits + index * logits_row, part * BLOCK, V, MASKED, BLOCK)
    tl.store(part_best + index * tl.num_programs(1) + part, tl.max(x))


@triton.jit
def _add_masses(sums, digit, amount):
    """Add ``amount`` [BLOCK] to the ``sums`` of its WINDOW worst digits, one addition for each. Return the rest, 0
    inside of the window.
    """
    worst = tl.max(tl.where(amount > 0, digit, 0))
    for step in range(WINDOW):
        mass = tl.sum(tl.where(digit == worst - step, amount, 0))
        if mass > 0:
            tl.atomic_add(sums + worst - step, mass, sem="relaxed")
    return tl.where(digit > worst - WINDOW, 0, amount)


@triton.jit(do_not_specialize=["rows", "level"])
def _histogram(
    logits,
    numbers,
    part_best,
    histograms,
    V,
    rows,
    logits_row,
    level,
    MASS: tl.constexpr,
    TOP_K: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a part to ``histograms``, int64 [rows, 2 (top-k, top-p), LEVELS, BUCKETS], of top-p if MASS. TOP_K: the
    histograms of top-k are complete.
    """
    index, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    own = histograms + (index * 2 + (1 if MASS else 0)) * (LEVELS * BUCKETS)
    if MASS:
        # The first level has no sums yet, and needs no limit.
        limit = _top_p_limit(numbers, own, index, rows)
    else:
        limit = _top_k_limit(numbers, index, rows, V)
    if limit > 0:
        temperature = tl.load(numbers + index).to(tl.float32)
        best = _row_best(part_best, index, tl.num_programs(1), PARTS_PADDED)
        worse, bits = _worse(logits + index * logits_row, begin, best, temperature, V, MASKED, BLOCK)
        above, shift = _shift(level - 1), _shift(level)
        threshold = _digits(own, limit, level)
        matches = (begin + tl.arange(0, BLOCK) < V) & ((bits >> above) == (threshold >> above))
        if MASS:
            most = _most(numbers, histograms, index, rows, V, TOP_K, False)
            amount = tl.where(matches, _mass(worse, bits, begin, most, float("-inf"), V, BLOCK), 0)
            digit = tl.where(matches, (bits - threshold) >> shift, 0)
            if level == 0:
                amount = _add_masses(own, digit, amount)
            tl.atomic_add(own + level * BUCKETS + digit, amount, mask=amount > 0, sem="relaxed")
        else:
            # Counted inside the program: the first digits of all tokens are some twenty.
            digit = tl.where(matches, (bits - threshold) >> shift, 0)
            counts, bucket = tl.histogram(digit, BUCKETS, mask=matches), tl.arange(0, BUCKETS)
            tl.atomic_add(own + level * BUCKETS + bucket, counts.to(tl.int64), mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _part_mass(
    logits,
    numbers,
    part_best,
    histograms,
    part_mass,
    V,
    rows,
    logits_row,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the mass of a part to ``part_mass``, int64 [rows, parts]; nothing for greedy rows."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(numbers + index).to(tl.float32)
    if temperature > 0.0:
        best = _row_best(part_best, index, tl.num_programs(1), PARTS_PADDED)
        worse, bits = _worse(logits + index * logits_row, part * BLOCK, best, temperature, V, MASKED, BLOCK)
        most = _most(numbers, histograms, index, rows, V, TOP_K, TOP_P)
        floor = tl.load(numbers + 3 * rows + index).to(tl.float32)
        tl.store(
            part_mass + index * tl.num_programs(1) + part,
            tl.sum(_mass(worse, bits, part * BLOCK, most, floor, V, BLOCK)),
        )


@triton.jit
def _drawn(
    row,
    numbers,
    histograms,
    part_mass,
    index,
    best,
    V,
    rows,
    PARTS,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the token whose running mass first exceeds u x mass, int32."""
    part = tl.arange(0, PARTS_PADDED)
    masses = tl.load(part_mass + index * PARTS + part, mask=part < PARTS, other=0)
    sums = tl.cumsum(masses, axis=0)
    total = tl.sum(masses)
    target = (tl.load(numbers + 4 * rows + index) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)  # float64 may round up to the total
    drawn_part = tl.sum((sums <= target).to(tl.int32))
    before = tl.sum(tl.where(part < drawn_part, masses, 0))
    begin = drawn_part * BLOCK
    worse, bits = _worse(row, begin, best, tl.load(numbers + index).to(tl.float32), V, MASKED, BLOCK)
    most = _most(numbers, histograms, index, rows, V, TOP_K, TOP_P)
    floor = tl.load(numbers + 3 * rows + index).to(tl.float32)
    running = before + tl.cumsum(_mass(worse, bits, begin, most, floor, V, BLOCK), axis=0)
    return begin + tl.sum((running <= target).to(tl.int32))


@triton.jit(do_not_specialize=["rows", "PARTS"])
def _pick(
    logits,
    numbers,
    part_best,
    histograms,
    part_mass,
    chosen,
    V,
    rows,
    logits_row,
    PARTS,
    DRAWS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the token of a row to ``chosen``, int64 [rows]."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * logits_row
    part = tl.arange(0, PARTS_PADDED)
    bests = tl.load(part_best + index * PARTS + part, mask=part < PARTS, other=float("-inf"))
    best = tl.max(bests)
    begin = tl.min(tl.where(bests == best, part, PARTS_PADDED - 1)) * BLOCK
    x = _logits(row, begin, V, MASKED, BLOCK)
    token = tl.min(tl.where(x == best, begin + tl.arange(0, BLOCK), 0x7FFFFFFF))
    if DRAWS:  # noqa: SIM102 (a greedy step has no numbers to load)
        if tl.load(numbers + index) > 0.0:
            token = _drawn(
                row,
                numbers,
                histograms,
                part_mass,
                index,
                best,
                V,
                rows,
                PARTS,
                TOP_K,
                TOP_P,
                MASKED,
                PARTS_PADDED,
                BLOCK,
            )
    tl.store(chosen + index, token.to(tl.int64))


def choose(
    logits_XV: torch.Tensor, numbers_5X: torch.Tensor | None, *, masked: bool, top_k: bool = True, top_p: bool = True
) -> torch.Tensor:
    """Return the tokens, int64 [X]. ``numbers_5X``: float64, as ``filters.fill_numbers`` wrote them (temperature,
    top-k, top-p, log of min-p, uniform), with a temperature of 0 for greedy rows; None if all are greedy. ``top_k``,
    ``top_p``: whether a row has that filter.
    """
    assert logits_XV.stride(1) == 1
    rows, vocab_size = logits_XV.shape
    assert vocab_size <= VOCABULARY_MAX
    device = logits_XV.device
    block = min(CHOOSE.width, triton.next_power_of_2(vocab_size))
    parts = triton.cdiv(vocab_size, block)
    padded = triton.next_power_of_2(parts)
    chosen_X = torch.empty(rows, dtype=torch.int64, device=device)
    best_XP = torch.empty((rows, parts), dtype=torch.float32, device=device)
    shape = {"MASKED": masked, "BLOCK": block, "num_warps": CHOOSE.warps}
    launch(_part_best, (rows, parts))(logits_XV, best_XP, vocab_size, rows, logits_XV.stride(0), **shape)
    draws = numbers_5X is not None
    top_k, top_p = draws and top_k, draws and top_p
    numbers, histograms, mass_XP = best_XP, best_XP, best_XP  # not read
    if numbers_5X is not None:
        numbers = numbers_5X
        mass_XP = torch.empty((rows, parts), dtype=torch.int64, device=device)
        if top_k or top_p:
            histograms = torch.zeros((rows, 2, LEVELS.value, BUCKETS.value), dtype=torch.int64, device=device)
        for mass in [False] * top_k + [True] * top_p:
            for level in range(LEVELS.value):
                launch(_histogram, (rows, parts))(
                    logits_XV,
                    numbers,
                    best_XP,
                    histograms,
                    vocab_size,
                    rows,
                    logits_XV.stride(0),
                    level,
                    MASS=mass,
                    TOP_K=top_k,
                    PARTS_PADDED=padded,
                    **shape,
                )
        launch(_part_mass, (rows, parts))(
            logits_XV,
            numbers,
            best_XP,
            histograms,
            mass_XP,
            vocab_size,
            rows,
            logits_XV.stride(0),
            TOP_K=top_k,
            TOP_P=top_p,
            PARTS_PADDED=padded,
            **shape,
        )
    launch(_pick, (rows,))(
        logits_XV,
        numbers,
        best_XP,
        histograms,
        mass_XP,
        chosen_X,
        vocab_size,
        rows,
        logits_XV.stride(0),
        parts,
        DRAWS=draws,
        TOP_K=top_k,
        TOP_P=top_p,
        PARTS_PADDED=padded,
        **shape,
    )
    return chosen_X


def warm(vocab_size: int, device: torch.device) -> None:
    """Compile every form of the kernels now, not when the first request needs it."""
    logits_1V = torch.zeros((1, vocab_size), dtype=torch.float32, device=device)
    numbers_51 = torch.ones((5, 1), dtype=torch.float64, device=device)
    for masked in (False, True):
        choose(logits_1V, None, masked=masked)
        for top_k in (False, True):
            for top_p in (False, True):
                choose(logits_1V, numbers_51, masked=masked, top_k=top_k, top_p=top_p)
