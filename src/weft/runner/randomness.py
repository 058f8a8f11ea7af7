"""Randomness without a generator: one uniform number for each (seed, position), and the draw it makes.

    u(seed, position) = mix(mix(seed) + position * golden)  ->  [0, 1)  with 53 bits

    weights_NW   .1  0  .4  0  0  .5          in a fixed order: ascending token id
    running sum  .1 .1  .5 .5 .5 1.0
    u * total            ^ first index whose running sum is above it

There is no state to save, restore or share: a sequence that was preempted, batched differently or recomputed
draws the same number for the same position. So the same seed and request give the same text whatever the
batch. (The logits themselves may differ in the last bits with the batch's shape; a draw changes only when a
boundary of the distribution falls inside that noise.)

``mix`` is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014). The seed is mixed before the position is added, so that neighbouring seeds do not walk
along the same sequence.

Rejected: one torch.Generator per row (state that preemption and batching must carry); the Gumbel trick (a
random number per token of the vocabulary); sorting the vocabulary before drawing (ties would make the order,
and with it the text, depend on the sort).
"""

from __future__ import annotations

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
    """Any Python int (negative ones too) to the 64 bits that ``uniforms`` takes."""
    return seed & _SEED_MASK


def uniforms(seeds: UInt64s, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 [N] in [0, 1), a pure function of each (seed, position)."""
    key = _mix(seeds + _GOLDEN)
    bits = _mix(key + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(weights_NW: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """Index of the draw in each row: int64 [N], by inverse CDF over the columns in their order.

    ``weights_NW``: float32, finite, >= 0, not normalised, with at least one above 0 per row;
    ``uniforms_N``: float64 in [0, 1). A column of weight 0 is never drawn. Sums are float64, over blocks of
    columns first: only the block that holds the draw is summed column by column.
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
    """First column whose running sum is above the target, int64 [N, 1]. A target that rounding has put at
    or beyond the end means the last column that adds anything; one below 0, the first that does."""
    end_N1 = running_NW[:, -1:]
    below_end_N1 = torch.nextafter(end_N1, torch.zeros_like(end_N1))
    target_N1 = torch.minimum(target_N1, below_end_N1).clamp_(min=0.0)
    return torch.searchsorted(running_NW, target_N1, right=True)
