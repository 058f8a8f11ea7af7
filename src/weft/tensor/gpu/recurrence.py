"""Common parts of recurrent kernels: launches of those that go token by token, a run's state in its slot.

    launch_by_token   decodes, then prefills: two launches of one kernel, with its PREFILL
    load_slot         a tile [lines, columns] of a state, float32; zeros of a fresh run, or of PAD
    store_slot        the tile back, in the state's dtype; nothing to PAD

Inside a slot a state is dense. A decode rounds a state in few bits (``tensor.rounding``). A prefill rounds it after
each token in models of float32, and then goes token by token; in models of 16 bits after each chunk (``in_chunks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import launch, padded
from weft.tensor.gpu.products import only_if
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs


def warps_of_lines(k_dim: int) -> int:
    """Return the warps of a program that has all lines of a state: each warp holds 128."""
    return max(1, padded(k_dim) // 128)


def in_chunks(dtype: torch.dtype, state: torch.dtype) -> bool:
    """Return whether prefills with inputs of ``dtype`` take the chunked form, which rounds states in few bits once a
    chunk (decision 0081).
    """
    return state == torch.float32 or dtype != torch.float32


def launch_by_token(
    kernel: Any,
    grid: tuple[int, ...],
    inputs: Sequence[torch.Tensor],
    state: torch.Tensor,
    runs: Runs,
    strides: Sequence[int],
    layer: int,
    *numbers: float,
    chunked: bool = False,
    **constants: Any,
) -> bool:
    """Launch ``kernel`` on ``grid`` by runs, for the decodes and for the prefills of a step. ``chunked``: the caller
    computes prefills that are ``in_chunks``, by the first of ``inputs``. Return whether the step is done.

    Arguments of a kernel: ``inputs``, ``state``, slots, starts, fresh, chunk_begin, chunk_first,
    chunk_tokens, chunk_tap, ``strides``, the stride of slots, the first run, ``layer``, ``numbers``.
    """
    step = device_runs(runs)
    parts = [(0, step.decode_count, False)]
    if not (chunked and in_chunks(inputs[0].dtype, state.dtype)):
        parts.append((step.decode_count, step.run_count, True))
    for first, end, prefill in parts:
        if first < end:
            launch(kernel, (*grid, end - first))(
                *inputs,
                state,
                runs.slots_R,
                runs.starts_R,
                step.fresh_R,
                step.chunk_begin_R,
                step.chunk_first_C,
                step.chunk_tokens_C,
                step.chunk_tap_C,
                *strides,
                state.stride(0),
                first,
                layer,
                *numbers,
                PREFILL=prefill,
                **constants,
            )
    return end == step.run_count


@triton.jit
def position_shift(starts, run, chunk_begin, chunk_first):
    """Return the position of a token of ``run`` less its index in the step."""
    return tl.load(starts + run) - tl.load(chunk_first + tl.load(chunk_begin + run))


@triton.jit
def load_slot(state, element, slot, slot_stride, fresh, line, LINES, columns):
    """Return the tile of a state. ``element`` [lines, columns]: places in the slot. Zeros also where ``line`` reaches
    LINES or ``columns`` is not set.
    """
    live = (slot >= 0) & (fresh == 0)
    return tl.load(
        state + slot * slot_stride + element, mask=(line < only_if(live, LINES))[:, None] & columns[None, :], other=0.0
    ).to(tl.float32)


@triton.jit
def store_slot(s, state, element, slot, slot_stride, line, LINES, columns):
    """Store ``s`` [lines, columns] at the places of ``load_slot``."""
    tl.store(
        state + slot * slot_stride + element,
        s.to(state.dtype.element_ty),
        mask=(line < only_if(slot >= 0, LINES))[:, None] & columns[None, :],
    )
