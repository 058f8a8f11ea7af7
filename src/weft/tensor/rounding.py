"""Rounding of a float32 accumulator to a recurrent state of fewer bits: stochastic, by a fixed rule.

    float32 S   = a stored number, and a remainder r in [0, 1) of the step to the next one (away from zero)
    stored      = the next one with probability r, else the one below            so its mean is S

Rounding to nearest would lose every change smaller than half a step: a state that changes by little at each
token would stop changing. Stochastic rounding keeps such changes on average (Gupta et al., 2015).

The random bits are a hash of only (layer, position, element of the layer's state):

    bits = mix(element + mix(position x A + layer x B))        mix: Wellons' lowbias32

A state is rounded after *every* token, in prefills as in decodes. So it is a function of only the tokens before it,
independent of the cuts of runs, the slot and the step. Rounding at the ends of runs would be cheaper, but a prefill
after a preemption would then give another state. docs/quantization.md has the cost. Chunked kernels on a GPU
round after each chunk in models of 16 bits (decision 0081).

Numbers beyond the dtype's largest saturate; NaN stays NaN. A token's output reads the state before it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.tensor.inputs import Runs
from weft.tensor.state_rows import STATE_BLOCK_BYTES
from weft.units import PAD

_POSITION, _LAYER = 0x9E3779B1, 0x85EBCA77
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_WORD = 0xFFFFFFFF
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
_LARGEST = {torch.bfloat16: float(torch.finfo(torch.bfloat16).max), torch.float16: 65504.0}
_HALF_LEAST = 2.0**-14
"""Magnitude below which float16 has steps of 2^-24, the steps of the numbers just above it."""


def state_key(position: int, layer: int) -> int:
    """Return the 32-bit hash key of one layer's state at one position."""
    x = (position * _POSITION + layer * _LAYER) & _WORD
    x = ((x ^ x >> 16) * _MULTIPLIERS[0]) & _WORD
    x = ((x ^ x >> 15) * _MULTIPLIERS[1]) & _WORD
    return x ^ x >> 16


def rounded(x: torch.Tensor, dtype: torch.dtype, positions: Sequence[int], layer: int) -> torch.Tensor:
    """Return float32 ``[rows, ...]`` rounded to numbers of ``dtype``, row r being the state after the token at
    ``positions[r]``; ``x`` itself for float32.
    """
    if dtype == torch.float32:
        return x
    keys = [_signed(state_key(position, layer)) for position in positions]
    element = torch.arange(x[0].numel(), dtype=torch.int32, device=x.device)
    bits = _mixed(element + torch.tensor(keys, dtype=torch.int32, device=x.device)[:, None]).view(x.shape)
    mask = (1 << _DROPPED_BITS[dtype]) - 1
    size = x.abs()
    if dtype == torch.float16:
        # float16 below 2^-14 has the steps of the numbers just above it: moved there, and back below.
        small = size < _HALF_LEAST
        size = torch.where(small, size + _HALF_LEAST, size)
    stored = ((size.view(torch.int32) + (bits & mask)) & ~mask).view(torch.float32)
    # Adding bits below the step carries into it with probability r.
    if dtype == torch.float16:
        stored = torch.where(small, stored - _HALF_LEAST, stored)
    stored = torch.copysign(stored.clamp(max=_LARGEST[dtype]), x)
    # The carry may pass the largest number, and copysign restores the sign that abs removed.
    return torch.where(x.isnan(), x, stored)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return the hash lowbias32 of int32, products wrapping."""
    x = (x ^ (x >> 16 & 0xFFFF)) * _signed(_MULTIPLIERS[0])
    # int32 shifts copy the sign: the masks make them shifts of uint32.
    x = (x ^ (x >> 15 & 0x1FFFF)) * _signed(_MULTIPLIERS[1])
    return x ^ (x >> 16 & 0xFFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def by_token(
    step: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], state: torch.Tensor, runs: Runs, layer: int
) -> torch.Tensor:
    """Compute a recurrent op over states in few bits with ``step``, the same op over float32 states. It goes token by
    token, all runs in parallel, and rounds the states after each token. ``inputs``: [T, ...] each.
    ``step(*inputs of some tokens, float32 states [rows, ...], runs of one token each)`` advances the states in place.
    """
    # Zero slots: a model whose states are in no slot of this arena.
    block = max(1, STATE_BLOCK_BYTES // (4 * max(1, state[0].numel()))) if state.shape[0] else runs.run_count
    order = sorted(range(runs.run_count), key=lambda run: -runs.lengths[run])
    out: torch.Tensor | None = None
    for begin in range(0, len(order), block):
        chosen = order[begin : begin + block]
        wide = _read(state, runs, chosen)
        for place in range(runs.lengths[chosen[0]]):
            alive = [run for run in chosen if runs.lengths[run] > place]
            tokens = torch.tensor([runs.offsets[run] + place for run in alive], device=wide.device)
            positions = [runs.starts[run] + place for run in alive]
            outputs = step(*(x[tokens] for x in inputs), wide, _rows_of_one(positions, runs))
            if out is None:
                out = outputs.new_empty(inputs[0].shape[0], *outputs.shape[1:])
            out[tokens] = outputs
            wide[: len(alive)] = rounded(wide[: len(alive)], state.dtype, positions, layer)
            for tap in runs.taps:
                if tap.slot != PAD and tap.offset == place + 1 and tap.run in alive:
                    state[tap.slot] = wide[alive.index(tap.run)].to(state.dtype)
        for row, run in enumerate(chosen):
            if runs.slots[run] != PAD and runs.keeps(run):
                state[runs.slots[run]] = wide[row].to(state.dtype)
    assert out is not None, "a step without runs"
    return out


def _read(state: torch.Tensor, runs: Runs, chosen: Sequence[int]) -> torch.Tensor:
    wide = torch.zeros(len(chosen), *state.shape[1:], device=state.device)
    for row, run in enumerate(chosen):
        if runs.slots[run] != PAD and not runs.fresh[run]:
            wide[row] = state[runs.slots[run]]
    return wide


def _rows_of_one(positions: list[int], runs: Runs) -> Runs:
    """Return runs of one token each, the state of row r in slot r."""
    count = len(positions)
    starts_R = torch.tensor(positions, device=runs.slots_R.device)
    return Runs(
        offsets=list(range(count)),
        starts=positions,
        lengths=[1] * count,
        slots=list(range(count)),
        fresh=[False] * count,
        decode_count=count,
        starts_R=starts_R,
        slots_R=torch.arange(count, device=starts_R.device),
        context_R=starts_R + 1,
        page_table_RP=runs.page_table_RP[:0],
    )
