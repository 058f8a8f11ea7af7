"""What the chunked delta rules share: the inverse of a chunk's triangle, and the pass over the states.

    S before ──► [ W | q̃ ] S ──► v' = U − W S      o = q̃ S + A v'      S ← decay · S + k̃ᵀ v' ──► next chunk
                                        │
                                        └── a tap inside the chunk: the same update, later tokens left out

``gated_delta`` has one decay per head, ``kimi_delta`` one per key channel. They differ in how they compute W,
U, A, q̃ and k̃, which happens for many chunks at once before the pass. The pass is the same. v' of a token
depends only on tokens before it, so a tap repeats no computation.

The triangle (1 + A) is inverted, not solved: an inverse is 7 times faster here than triangular solves with a
large right-hand side. It is as exact, because the blocks are unit lower triangular with small entries. Blocks
of 16 are inverted by substitution; then two halves of an inverse give the corner between them, -D^-1 B A^-1.

Source: Yang et al., "Parallelizing linear transformers with the delta rule" (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.tensor.chunks import Step
from weft.tensor.scratch import scratch

BASE = 16
"""Side of the blocks that substitution inverts."""


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """The inputs of the pass for consecutive chunks, all float32. ``reads`` [chunks, H, 2, size, K]: W, then
    q̃. ``new_values`` [chunks, H, size, V]: U, and v' after the pass. ``attention`` [chunks, H, size, size].
    ``k_left`` [chunks, H, size, K]: k̃. ``decay`` [chunks, H, 1 or K, 1]: of the state over the whole chunk.
    ``inside(state_HKV, chunk, places, added_HCV)``: the state after ``places`` places of a chunk."""

    reads: torch.Tensor
    new_values: torch.Tensor
    attention: torch.Tensor
    k_left: torch.Tensor
    decay: torch.Tensor
    inside: Callable[[torch.Tensor, int, int, torch.Tensor], torch.Tensor]


def scan(steps: list[Step], first: int, work: ChunkWork, state: torch.Tensor, state_SHKV: torch.Tensor,
         out: torch.Tensor) -> None:
    """Advance ``state`` [rows, H, K, V] in place, chunk after chunk; taps go into ``state_SHKV``. ``out`` is
    [all chunks, size, H, V]; ``work`` begins at its chunk ``first``."""
    _, heads, size, v_dim = work.new_values.shape
    k_dim = work.k_left.shape[-1]
    for step in steps:
        at = slice(step.first - first, step.first - first + step.rows)
        batch = step.rows * heads
        alive = state[: step.rows].view(batch, k_dim, v_dim)
        read = torch.bmm(work.reads[at].view(batch, 2 * size, k_dim), alive)
        added = work.new_values[at].view(batch, size, v_dim).sub_(read[:, :size])
        read_out = torch.baddbmm(read[:, size:], work.attention[at].view(batch, size, size), added)
        read_out = read_out.view(step.rows, heads, size, v_dim)
        out[step.first : step.first + step.rows] = read_out.transpose(1, 2)
        for tap in step.taps:
            if not tap.whole:
                chunk = step.first - first + tap.row
                state_SHKV[tap.slot] = work.inside(state[tap.row], chunk, tap.places, work.new_values[chunk])
        alive.mul_(work.decay[at].reshape(batch, -1, 1))
        alive.baddbmm_(work.k_left[at].view(batch, size, k_dim).transpose(1, 2), added)
        for tap in step.taps:
            if tap.whole:
                state_SHKV[tap.slot] = state[tap.row]


def unit_lower_inverse(a_BCC: torch.Tensor) -> torch.Tensor:
    """(1 + strictly lower part of a)^-1 for [B, C, C], C = 16 x a power of 2. The result is scratch memory.
    The diagonal of ``a`` and what lies above it are not read."""
    batch, size, _ = a_BCC.shape
    blocks = size // BASE
    inverse = scratch.take("delta_scan.inverse", a_BCC.shape, torch.float32).zero_()
    tiles = a_BCC.view(batch, blocks, BASE, blocks, BASE).diagonal(dim1=1, dim2=3)
    base = scratch.take("delta_scan.tiles", (batch, blocks, BASE, BASE), torch.float32)
    base.copy_(tiles.permute(0, 3, 1, 2))
    base = base.view(-1, BASE, BASE)
    solved = torch.zeros_like(base)
    solved.diagonal(dim1=1, dim2=2).fill_(1.0)
    for row in range(1, BASE):
        solved[:, row : row + 1, :row] = torch.bmm(base[:, row : row + 1, :row], solved[:, :row, :row]).neg_()
    tiled = inverse.view(batch, blocks, BASE, blocks, BASE).diagonal(dim1=1, dim2=3)
    tiled.copy_(solved.view(batch, blocks, BASE, BASE).permute(0, 2, 3, 1))
    half = BASE
    while half < size:
        for begin in range(0, size, 2 * half):
            top, low = slice(begin, begin + half), slice(begin + half, begin + 2 * half)
            corner = torch.bmm(a_BCC[:, low, top], inverse[:, top, top])
            inverse[:, low, top] = torch.bmm(inverse[:, low, low], corner).neg_()
        half *= 2
    return inverse
