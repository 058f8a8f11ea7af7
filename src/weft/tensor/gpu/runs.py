"""The runs of a step as one table of integers on the device, for kernels over the whole step.

A launch cannot read Python lists: each of its programs looks up its own work. There are two kinds of rows:

    run    offsets, lengths, fresh, chunk_begin          by run r; decodes first, as everywhere
    chunk  chunk_run, chunk_first, chunk_tokens,         by chunk c; the prefill runs in their order, and
           chunk_tap                                     in each run from its first token to its last

A chunk is the tokens of one run between two cuts. Cuts are on the absolute grid of CHUNK_TOKENS positions, so that a
prefix hit computes the same chunks as a cold run. There is a cut at every tap too, which is then always the state
after a complete chunk:

    run of positions 40..210, tap at 128     [40..63] [64..127]* [128..191] [192..210]     * has chunk_tap

A recorded step has a table of one size at every replay: after the chunks of its runs come chunks of PAD.

The same chunks are the query tiles of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.tensor.inputs import Runs, TapPoint
from weft.units import CHUNK_TOKENS, PAD

Int32s = npt.NDArray[np.int32]

GRID_YZ_MAX = 65_535
"""Most programs along the second and the third axis of a CUDA grid; kernels put runs and chunks there."""
RUN_FIELDS = 3
CHUNK_FIELDS = 4


@dataclass(frozen=True, slots=True)
class DeviceRuns:
    """Table of a step's runs. All tensors are int32 on the device of the step, contiguous. Runs [0, decode_count) are
    decodes.

    ``chunk_begin_R`` [R + 1]: run r has the chunks [chunk_begin_R[r], chunk_begin_R[r + 1]); a decode has
    none. ``chunk_first_C``: index in T. ``chunk_tap_C``: the slot that also receives the state after the
    chunk, or PAD.
    """

    run_count: int
    decode_count: int
    chunk_count: int
    offsets_R: torch.Tensor
    lengths_R: torch.Tensor
    fresh_R: torch.Tensor  # 1 or 0
    chunk_begin_R: torch.Tensor
    chunk_run_C: torch.Tensor
    chunk_first_C: torch.Tensor
    chunk_tokens_C: torch.Tensor
    chunk_tap_C: torch.Tensor


def device_runs(runs: Runs) -> DeviceRuns:
    """Return the step's table, built once per step, on the device of ``runs.slots_R``."""
    return runs.once("device_runs", lambda: _sent(runs))


def _sent(runs: Runs) -> DeviceRuns:
    flat, chunk_count = pack(runs)
    table = torch.from_numpy(flat).to(runs.slots_R.device)
    return unpack(table, runs.run_count, runs.decode_count, chunk_count)


def is_known(runs: Runs) -> bool:
    """Return whether the table is on the device."""
    return "device_runs" in runs.memo


def _sizes(run_count: int, chunk_count: int) -> list[int]:
    """Return the number of int32 values of each field, in their order."""
    return [run_count] * RUN_FIELDS + [run_count + 1] + [chunk_count] * CHUNK_FIELDS


def table_numbers(run_count: int, chunk_count: int) -> int:
    """Return the number of int32 values of a table: a multiple of 4."""
    return sum(map(_aligned, _sizes(run_count, chunk_count)))


def _aligned(size: int) -> int:
    """Return ``size`` padded so that every field begins at a multiple of 16 bytes: kernels are compiled for that."""
    return size + -size % 4


def remember(runs: Runs, flat: torch.Tensor, chunk_count: int) -> None:
    """Remember ``flat``, the packed table of ``runs``, which reached the device with the step's other inputs."""
    runs.memo["device_runs"] = unpack(flat, runs.run_count, runs.decode_count, chunk_count)


def pack(runs: Runs) -> tuple[Int32s, int]:
    """Return the flat table and the number of its chunks."""
    return pack_lists(runs.offsets, runs.starts, runs.lengths, runs.fresh, runs.decode_count, runs.taps)


def pack_lists(
    offsets: list[int],
    starts: list[int],
    lengths: list[int],
    fresh: list[bool],
    decode_count: int,
    taps: Sequence[TapPoint],
    chunks_min: int = 0,
) -> tuple[Int32s, int]:
    """Return ``pack``'s table for runs without tensors. Chunks of PAD fill the table up to ``chunks_min``."""
    cuts = _cuts(offsets, starts, lengths, decode_count, taps)
    chunk_begin = np.zeros(len(offsets) + 1, np.int32)
    for run, _, _, _ in cuts:
        chunk_begin[run + 1] += 1
    if len(cuts) < chunks_min:
        # They have no token and no tap, and belong to the last run, which is PAD too: kernels do nothing
        # (L4).
        cuts += [(len(offsets) - 1, offsets[-1] + lengths[-1], 0, PAD)] * (chunks_min - len(cuts))
    by_run = np.array([offsets, lengths, fresh], np.int32)
    by_chunk = np.array(cuts, np.int32).reshape(len(cuts), CHUNK_FIELDS).T
    sizes = _sizes(len(offsets), len(cuts))
    flat, begin = np.zeros(sum(map(_aligned, sizes)), np.int32), 0
    for field, size in zip((*by_run, chunk_begin.cumsum(), *by_chunk), sizes, strict=True):
        flat[begin : begin + size] = field
        begin += _aligned(size)
    return flat, len(cuts)


def unpack(flat: torch.Tensor, run_count: int, decode_count: int, chunk_count: int) -> DeviceRuns:
    """Return views into ``flat`` (int32, from ``pack``, or longer)."""
    assert max(run_count, chunk_count) <= GRID_YZ_MAX, (
        f"a step of {run_count} runs and {chunk_count} chunks exceeds the {GRID_YZ_MAX} programs of an axis"
    )
    sizes = _sizes(run_count, chunk_count)
    room = [_aligned(size) for size in sizes]
    fields = torch.split(flat[: sum(room)], room)
    return DeviceRuns(
        run_count, decode_count, chunk_count, *(field[:size] for field, size in zip(fields, sizes, strict=True))
    )


def _cuts(
    offsets: list[int], starts: list[int], lengths: list[int], decode_count: int, taps: Sequence[TapPoint]
) -> list[tuple[int, int, int, int]]:
    """Return (run, first index in T, tokens, slot of the tap at its end or PAD) of every chunk."""
    tap_slots: dict[int, dict[int, int]] = {}
    for tap in taps:
        if tap.slot != PAD:
            of_run = tap_slots.setdefault(tap.run, {})
            assert tap.offset not in of_run, f"run {tap.run} has two taps at {tap.offset}"
            of_run[tap.offset] = tap.slot
    chunks = []
    for run in range(decode_count, len(offsets)):
        start, length = max(starts[run], 0), lengths[run]
        if not length:
            continue  # a PAD run of a recorded step
        wanted = tap_slots.get(run, {})
        grid = range(CHUNK_TOKENS - start % CHUNK_TOKENS, length, CHUNK_TOKENS)
        begin = 0
        for end in sorted({*grid, *wanted, length}):
            chunks.append((run, offsets[run] + begin, end - begin, wanted.get(end, PAD)))
            begin = end
    return chunks
