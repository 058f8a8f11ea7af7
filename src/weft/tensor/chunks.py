"""Cuts of the prefill runs of a step into chunks on the absolute grid, for every recurrent op.

A chunk is CHUNK_TOKENS places. A token at position p sits at place p % 64 of its chunk, in whichever run it
arrives. A run that starts or ends inside a chunk leaves places empty. Empty places are zeros, which change no
state (k = 0, beta = 0, g = 0; x dt = 0, a = 0). So every chunk has the same shape, and all chunks go through
the intra-chunk work in one batch:

    run A  positions 40..210        run B  positions 0..70
    chunks  A0 [......40-63]        B0 [0-63]           places ...... are empty
            A1 [64-127]             B1 [64-70......]
            A2 [128-191]
            A3 [192-210....]

Only the pass over the states is sequential. It takes chunk c of every run at once, so chunks are stored by
(c, run), and runs with most chunks come first. Nothing is padded to the longest run:

    order in memory   A0 B0 | A1 B1 | A2 | A3           steps = [(0, 2), (2, 2), (4, 1), (5, 1)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.spec import ModelSpec, StatePart
from weft.tensor import native
from weft.tensor.inputs import Runs
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import prefill_rows
from weft.units import CHUNK_TOKENS, PAD, PAGE_TOKENS, ceil_div

LOG_DECAY_MIN = -80.0
"""Least log decay: smaller ones are clamped to it. exp(-80) = 2e-35 adds nothing to any sum; smaller values are
denormals, on which a CPU is some 20 times slower.
"""

BLOCK_CHUNKS = 32
"""Chunks per batch of intra-chunk work; bounds the buffers of a long step."""


@dataclass(frozen=True, slots=True)
class ChunkTap:
    """Tap inside a chunk: the state of row ``row`` of the step after ``places`` places of its chunk goes to ``slot``.
    ``whole``: no token of the run follows in this chunk, so this is the state after the chunk.
    """

    row: int
    places: int
    slot: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Chunks [first, first + rows), which are chunk c of the first ``rows`` runs in ``ChunkLayout.order``."""

    first: int
    rows: int
    taps: tuple[ChunkTap, ...]


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Layout of a step's chunks. ``size``: places of a chunk. ``order``: the prefill runs, most chunks first.
    ``place_T``: the index in [chunks * size] of each prefill token, in the order of T.
    """

    size: int
    chunk_count: int
    order: tuple[int, ...]
    steps: tuple[Step, ...]
    place_T: torch.Tensor

    def blocks(self) -> Iterator[tuple[int, int, list[Step]]]:
        """Yield consecutive steps, grouped into about BLOCK_CHUNKS chunks: (first chunk, chunks, steps)."""
        steps: list[Step] = []
        count = 0
        for step in self.steps:
            if steps and count + step.rows > BLOCK_CHUNKS:
                yield steps[0].first, count, steps
                steps, count = [], 0
            steps.append(step)
            count += step.rows
        if steps:
            yield steps[0].first, count, steps

    def spread(self, x_T: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write prefill tokens ``[T', ...]`` into ``out`` [chunks, size, ...], with zeros at the empty places, and
        return it.
        """
        out.zero_()
        out.view(self.chunk_count * self.size, *out.shape[2:]).index_copy_(0, self.place_T, x_T.to(out.dtype))
        return out

    def collect(self, x: torch.Tensor) -> torch.Tensor:
        """Return the prefill tokens [T', ...] of [chunks, size, ...], in the order of T."""
        return x.view(self.chunk_count * self.size, *x.shape[2:]).index_select(0, self.place_T)


def pairwise_decay(sums: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``exp(sums_i - sums_j)`` for j <= i, else 0, to ``out[..., i, j]`` and return it. ``sums`` float64 [...,
    C], not growing.
    """
    # Clamped from above too: for j > i the difference is positive and must not be exponentiated. Those
    # entries are then replaced by zeros, not multiplied.
    torch.sub(sums[..., :, None], sums[..., None, :], out=out)
    return out.clamp_(LOG_DECAY_MIN, 0.0).exp_().tril_()


def decay_of(log_decay: torch.Tensor) -> torch.Tensor:
    """Return exp in float32, clamped above the denormals."""
    return log_decay.clamp_min(LOG_DECAY_MIN).exp().float()


def chunk_layout(runs: Runs) -> ChunkLayout:
    """Return the layout of this step's prefill runs (one at least), computed once per step."""
    return runs.once("chunks", lambda: _lay_out(runs))


def in_blocks(
    op: str,
    inputs: Mapping[str, torch.Tensor],
    state_S: torch.Tensor,
    runs: Runs,
    out_shape: Sequence[int],
    block: Callable[[dict[str, torch.Tensor], int, list[Step], torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """Return the outputs of the prefill runs, float32 [T', *out_shape], in the order of T, and advance their states in
    ``state_S`` [slots, ...]. ``inputs``: [T', ...] of the prefill tokens by name; ``op`` names the scratch buffers.

    ``block(x, first, steps, state, out)`` computes consecutive ``steps``. ``x``: float32 [chunks, size, ...] of each
    input from chunk ``first`` on. ``state`` [rows, ...], in ``ChunkLayout.order``, is advanced in place; ``out`` [all
    chunks, size, *out_shape] is written.
    """
    layout = chunk_layout(runs)
    chunks = layout.chunk_count, layout.size
    padded = {
        name: layout.spread(x, scratch.take(f"{op}.{name}", (*chunks, *x.shape[1:]), torch.float32))
        for name, x in inputs.items()
    }
    rows = prefill_rows(runs, layout.order, "state_rows.chunked")
    state = rows.read(state_S, f"{op}.state")
    out = scratch.take(f"{op}.out", (*chunks, *out_shape), torch.float32)
    for first, count, steps in layout.blocks():
        block({name: x[first : first + count] for name, x in padded.items()}, first, steps, state, out)
    rows.write_back(state_S, state)
    return layout.collect(out)


def _lay_out(runs: Runs) -> ChunkLayout:
    chosen = range(runs.decode_count, runs.run_count)
    assert chosen
    # Empty places at the front of a run's first chunk; a PAD start counts as 0.
    lead = {run: max(runs.starts[run], 0) % CHUNK_TOKENS for run in chosen}
    size = CHUNK_TOKENS
    # No run reaches past one chunk: chunks start at the run's own start, and are as large as the longest run
    # needs. Short prompts are then not padded to 64 places.
    if all(lead[run] + runs.lengths[run] <= CHUNK_TOKENS for run in chosen):
        lead = dict.fromkeys(chosen, 0)
        longest = max(runs.lengths[run] for run in chosen)
        size = next(places for places in (16, 32, 64) if places >= longest)
    chunks = {run: ceil_div(lead[run] + runs.lengths[run], size) for run in chosen}
    # Runs with most chunks first: those alive at step c are then a prefix of the state buffer.
    order = sorted(chosen, key=lambda run: -chunks[run])
    row_of = {run: row for row, run in enumerate(order)}
    alive = [sum(chunks[run] > c for run in order) for c in range(chunks[order[0]])]
    first = [sum(alive[:c]) for c in range(len(alive))]
    taps: list[list[ChunkTap]] = [[] for _ in alive]
    for tap in runs.taps:
        if tap.run in row_of and tap.slot != PAD:
            c, place = divmod(lead[tap.run] + tap.offset - 1, size)
            whole = place == size - 1 or tap.offset == runs.lengths[tap.run]
            taps[c].append(ChunkTap(row_of[tap.run], place + 1, tap.slot, whole))
    device = runs.slots_R.device
    first_C = torch.tensor(first, device=device)
    places = []
    for run in chosen:
        local = torch.arange(lead[run], lead[run] + runs.lengths[run], device=device)
        places.append((first_C[local // size] + row_of[run]) * size + local % size)
    return ChunkLayout(
        size=size,
        chunk_count=sum(alive),
        order=tuple(order),
        steps=tuple(Step(first[c], alive[c], tuple(taps[c])) for c in range(len(alive))),
        place_T=torch.cat(places),
    )


def grid_tokens(spec: ModelSpec, device: torch.device) -> int:
    """Return the grid on which a prompt may resume: PAGE_TOKENS if the C++ kernels take every state of ``spec``, else
    CHUNK_TOKENS. Call it after the kernels are chosen.
    """
    # The C++ kernels go token by token: the same sums from anywhere, so a page will do. Resuming inside a
    # chunk would cut other chunks. The finer grid saves up to 48 tokens of a shared prefix: decision 0017.
    parts = [part for layer in spec.layers for part in layer.state]
    sequential = (
        device.type == "cpu"
        and native.in_use()
        and spec.dtype in ("float32", "bfloat16")
        and all(map(_sequential, parts))
    )
    return PAGE_TOKENS if sequential else CHUNK_TOKENS


def _sequential(part: StatePart) -> bool:
    """Return the kernels' own ``supported``, from shapes only; a ring does not depend on the start of a run."""
    if part.name.startswith(("window", "waiting", "entry")):  # of entries: token by token
        return True
    if part.name.startswith("conv"):
        channels, window = part.shape
        return channels % native.LANES == 0 and 1 <= window < native.KERNEL_MAX
    *heads, lines, width = part.shape
    if not heads:  # Mamba-1: lines are channels
        return lines % native.LANES == 0 and width <= native.STATE_DIM_MAX
    return (
        lines % native.LANES == 0
        and lines <= native.KEY_DIM_MAX
        and width % native.LANES == 0
        and width <= native.STATE_DIM_MAX
    )
