"""Temperature, top-k, top-p and min-p, each a threshold on the logit; and the draw from the remaining tokens.

    scaled = (logit - max) / temperature              the best token is at 0, all others below

    top-k   keep values >= the k-th largest one
    top-p   keep values >= the smallest one whose strictly better tokens have less than p of the mass
            (of the tokens that top-k kept)
    min-p   keep values >= log(min_p): exp(scaled) is the ratio to the best token

    keep = scaled >= max(of the three);   draw among the kept in ascending token id

    u(seed, position) = mix(mix(seed) + position * golden)  ->  [0, 1)  with 53 bits
    weights_NW   .1  0  .4  0  0  .5          in ascending token id
    running sum  .1 .1  .5 .5 .5 1.0
    u * total            ^ first index whose running sum is above it

There is no state to save, restore or share: the same seed and request give the same text whatever the batch.
(The logits themselves may differ in the last bits with the batch's shape.) ``mix`` is the finaliser of
splitmix64 (Steele, Lea, Flood, 2014).

Sorting a vocabulary of 150,000 for each row is the cost here. So rows with top-k or top-p look at their few best
candidates first, and at the full row if the threshold is not strictly inside the candidates. The order of the filters
is that of transformers' generation. ``sampling_kernels`` are the twin that sorts nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

UInt64s = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SEED_MASK = (1 << 64) - 1
_BLOCK_COLUMNS = 512


def _mix(z: UInt64s) -> UInt64s:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_word(seed: int) -> int:
    """Convert any Python int (negative ones too) to the 64 bits that ``uniforms`` takes."""
    return seed & _SEED_MASK


def uniforms(seeds: UInt64s, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return float64 [N] in [0, 1), a pure function of each (seed, position)."""
    # Mixed before the position is added: neighbouring seeds must not walk along the same sequence.
    key = _mix(seeds + _GOLDEN)
    bits = _mix(key + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(weights_NW: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """Return the index of the draw in each row: int64 [N], by inverse CDF over the columns in their order.

    ``weights_NW``: float32, finite, >= 0, not normalised, with at least one above 0 per row; ``uniforms_N``: float64
    in [0, 1). A column of weight 0 is never drawn. Sums are float64, over blocks of columns first: only the block that
    holds the draw is summed column by column.
    """
    rows, width = weights_NW.shape
    blocks = -(-width // _BLOCK_COLUMNS)
    if blocks * _BLOCK_COLUMNS != width:
        weights_NW = torch.nn.functional.pad(weights_NW, (0, blocks * _BLOCK_COLUMNS - width))
    weights_NBC = weights_NW.view(rows, blocks, _BLOCK_COLUMNS)
    running_NB = weights_NBC.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target_N1 = (uniforms_N * running_NB[:, -1])[:, None]
    block_N1 = _first_above(running_NB, target_N1)
    before_N1 = torch.where(block_N1 > 0, running_NB.gather(1, (block_N1 - 1).clamp(min=0)), 0.0)
    row_N = torch.arange(rows, device=weights_NW.device)
    inside_NC = weights_NBC[row_N, block_N1[:, 0]].double().cumsum(dim=1)
    column_N1 = _first_above(inside_NC, target_N1 - before_N1)
    return (block_N1 * _BLOCK_COLUMNS + column_N1)[:, 0]


def _first_above(running_NW: torch.Tensor, target_N1: torch.Tensor) -> torch.Tensor:
    """Return the first column whose running sum is above the target, int64 [N, 1]. A target that rounding has put at
    or beyond the end means the last column that adds anything; a target below 0, the first that does.
    """
    end_N1 = running_NW[:, -1:]
    # Rounding may put the target at the end, after the last token that has any weight.
    below_end_N1 = torch.nextafter(end_N1, torch.zeros_like(end_N1))
    target_N1 = torch.minimum(target_N1, below_end_N1).clamp_(min=0.0)
    return torch.searchsorted(running_NW, target_N1, right=True)


_BLOCK_ELEMENTS = 1 << 22
"""Elements of one scratch tensor: 16 MiB in float32."""
_CANDIDATES_MIN = 256
_CANDIDATES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of N rows. On the host, for decisions made there: ``top_k`` int64 [N] (below 1: all) and ``top_p``
    float64 [N] (1: all). On the device ``numbers_5N``, as ``fill_numbers`` made them.
    """

    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    numbers_5N: torch.Tensor

    def take(self, rows: slice | npt.NDArray[np.int64]) -> Filters:
        if isinstance(rows, slice):
            return Filters(self.top_k[rows], self.top_p[rows], self.numbers_5N[:, rows])
        if len(rows) == len(self.top_k):
            return self
        rows_M = torch.from_numpy(rows).to(self.numbers_5N.device)
        return Filters(self.top_k[rows], self.top_p[rows], self.numbers_5N.index_select(1, rows_M))

    @property
    def narrow(self) -> npt.NDArray[np.bool_]:
        """Return rows that need an order among their tokens."""
        return (self.top_k > 0) | (self.top_p < 1.0)

    @property
    def temperature_N(self) -> torch.Tensor:
        """Return the temperatures, float32, above 0."""
        return self.numbers_5N[0].float()

    @property
    def top_k_N(self) -> torch.Tensor:
        return self.numbers_5N[1].long()

    @property
    def top_p_N(self) -> torch.Tensor:
        return self.numbers_5N[2]

    @property
    def floor_N(self) -> torch.Tensor:
        """Return float32 [N]: min-p filters tokens below it."""
        return self.numbers_5N[3].float()

    @property
    def uniforms_N(self) -> torch.Tensor:
        return self.numbers_5N[4]


def fill_numbers(
    out_5N: npt.NDArray[np.float64],
    temperature: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    uniforms: npt.NDArray[np.float64],
) -> None:
    """Write all numbers of some rows, so that one copy brings them to the device. ``temperature`` is above 0 (0 for
    rows that a kernel takes as greedy), ``uniforms`` are in [0, 1).
    """
    with np.errstate(divide="ignore"):
        out_5N[:] = temperature, top_k, top_p, np.log(min_p), uniforms


def choose(logits_NV: torch.Tensor, filters: Filters, *, remote: bool) -> torch.Tensor:
    """Return one token per row, int64 [N], drawn with the filters' uniform numbers from the filtered distribution.
    ``remote``: the host reads nothing from the device.

    ``logits_NV``: float32 without NaN or +inf, and with a finite maximum in each row; not changed.
    """
    rows, vocab_size = logits_NV.shape
    block_rows = max(1, _BLOCK_ELEMENTS // vocab_size)
    choose_block = _choose_unseen if remote else _choose_block
    if rows <= block_rows:
        return choose_block(logits_NV, filters)
    chosen_N = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    for first in range(0, rows, block_rows):
        part = slice(first, first + block_rows)
        chosen_N[part] = choose_block(logits_NV[part], filters.take(part))
    return chosen_N


def _choose_unseen(logits_NV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Choose for every row over the complete vocabulary: the host decides nothing by results of the device."""
    scaled_NV = _scaled(logits_NV, filters)
    threshold_N = filters.floor_N
    if filters.narrow.any():
        sorted_NV = scaled_NV.sort(dim=1, descending=True).values
        threshold_N, _ = _threshold(sorted_NV, filters, scaled_NV.exp().sum(dim=1, dtype=torch.float64))
    filtered_NV = scaled_NV < threshold_N[:, None]
    return draw(scaled_NV.exp_().masked_fill_(filtered_NV, 0.0), filters.uniforms_N)


def _choose_block(logits_NV: torch.Tensor, filters: Filters) -> torch.Tensor:
    device = logits_NV.device
    threshold_N = filters.floor_N
    wide = ~filters.narrow
    narrow = np.flatnonzero(filters.narrow)
    if narrow.size == len(wide):
        chosen_N, threshold_N, outside = _choose_among_candidates(logits_NV, filters)
        if not outside.size:
            return chosen_N
        wide[outside] = True
    else:
        chosen_N = torch.empty(len(wide), dtype=torch.int64, device=device)
        if narrow.size:
            narrow_N = torch.from_numpy(narrow).to(device)
            chosen_N[narrow_N], threshold_N[narrow_N], outside = _choose_among_candidates(
                logits_NV[narrow_N], filters.take(narrow)
            )
            wide[narrow[outside]] = True
    if wide.any():
        rows = np.flatnonzero(wide)
        wide_N = torch.from_numpy(rows).to(device)
        scaled_NV = _scaled(logits_NV if len(rows) == len(wide) else logits_NV[wide_N], filters.take(rows))
        filtered_NV = scaled_NV < threshold_N[wide_N, None]
        chosen_N[wide_N] = draw(scaled_NV.exp_().masked_fill_(filtered_NV, 0.0), filters.uniforms_N[wide_N])
    return chosen_N


def _scaled(logits_NW: torch.Tensor, filters: Filters, best_N1: torch.Tensor | None = None) -> torch.Tensor:
    """Return (logit - best) / temperature, a new tensor. ``best_N1`` None: the best of the columns of ``logits_NW``."""
    best_N1 = logits_NW.amax(dim=1, keepdim=True) if best_N1 is None else best_N1
    return (logits_NW - best_N1).div_(filters.temperature_N[:, None])


def _choose_among_candidates(
    logits_NV: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int64]]:
    """Return (token [N], threshold [N], ``outside``). ``outside`` has the rows whose candidates lack some tokens that
    the threshold keeps; there the token is void and the threshold is that of the full row. The host waits to learn
    whether there are any.
    """
    vocab_size = logits_NV.shape[1]
    wanted = int(np.where(filters.top_k > 0, filters.top_k + 1, _CANDIDATES_MIN).max())
    count = min(wanted, _CANDIDATES_MAX, vocab_size)
    best_NW, ids_NW = logits_NV.topk(count, dim=1)
    values_NW = _scaled(best_NW, filters, best_NW[:, :1])
    mass_N = _mass(logits_NV, filters, best_NW[:, :1])
    threshold_N, inside_N = _threshold(values_NW, filters, mass_N)
    if count == vocab_size:
        inside_N = torch.ones_like(inside_N)
    order_NW = ids_NW.argsort(dim=1)
    values_NW, ids_NW = values_NW.gather(1, order_NW), ids_NW.gather(1, order_NW)
    weights_NW = values_NW.exp().masked_fill_(values_NW < threshold_N[:, None], 0.0)
    tokens_N = ids_NW.gather(1, draw(weights_NW, filters.uniforms_N)[:, None])[:, 0]
    outside = np.flatnonzero(~inside_N.cpu().numpy())
    if outside.size:
        outside_N = torch.from_numpy(outside).to(logits_NV.device)
        theirs = filters.take(outside)
        sorted_NV = _scaled(logits_NV[outside_N].sort(dim=1, descending=True).values, theirs)
        threshold_N[outside_N], _ = _threshold(sorted_NV, theirs, mass_N[outside_N])
    return tokens_N, threshold_N, outside


def _mass(logits_NV: torch.Tensor, filters: Filters, best_N1: torch.Tensor) -> torch.Tensor:
    """Return the sum of exp(scaled) over the full row, float64 [N]; 0 where top-k makes it moot (``_threshold``)."""
    mass_N = torch.zeros(logits_NV.shape[0], dtype=torch.float64, device=logits_NV.device)
    rows = np.flatnonzero(filters.top_k <= 0)
    if rows.size == len(mass_N):
        return _scaled(logits_NV, filters, best_N1).exp_().sum(dim=1, dtype=torch.float64)
    if rows.size:
        rows_N = torch.from_numpy(rows).to(logits_NV.device)
        scaled_NV = _scaled(logits_NV[rows_N], filters.take(rows), best_N1[rows_N])
        mass_N[rows_N] = scaled_NV.exp_().sum(dim=1, dtype=torch.float64)
    return mass_N


def _threshold(values_NW: torch.Tensor, filters: Filters, mass_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the value below which a token is filtered, float32 [N]; whether the best W suffice, bool [N]).

    ``values_NW``: the best W of each row, descending; ``mass_N``: sum of exp over the full row, read where there is no
    top-k. If W is less than the vocabulary, a threshold at the last of the W tokens does not decide about tokens with
    the same value or a lower one. A top-k there leaves the mass that top-p divides unknown.
    """
    width, top_k_N, top_p_N = values_NW.shape[1], filters.top_k_N, filters.top_p_N
    kth_N = values_NW.gather(1, (top_k_N.clamp(1, width) - 1)[:, None])[:, 0]
    kth_N = torch.where(top_k_N > 0, kth_N, torch.full_like(kth_N, -math.inf))
    above_kth_NW = values_NW >= kth_N[:, None]
    weights_NW = values_NW.exp().double().masked_fill_(~above_kth_NW, 0.0)
    mass_N = torch.where(top_k_N > 0, weights_NW.sum(dim=1), mass_N)
    better_NW = weights_NW.cumsum(dim=1) - weights_NW
    inside_NW = above_kth_NW & (better_NW < (top_p_N * mass_N)[:, None])
    inside_NW[:, 0] = True
    nucleus_N = values_NW.masked_fill(~inside_NW, math.inf).amin(dim=1)
    nucleus_N = torch.where(top_p_N < 1.0, nucleus_N, torch.full_like(nucleus_N, -math.inf))
    threshold_N = torch.maximum(torch.maximum(kth_N, nucleus_N), filters.floor_N)
    last_N = values_NW[:, -1]
    return threshold_N, (threshold_N > last_N) & ((top_k_N <= 0) | (kth_N > last_N))
