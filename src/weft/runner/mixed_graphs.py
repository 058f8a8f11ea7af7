"""Steps with prompts in them on a GPU as CUDA graphs: a graph for each shape of a short table.

    runs     d0 d1 PAD PAD | p0 p1 PAD PAD | PAD            decodes | prompts | one run of all PAD tokens
    tokens   1  1  1   1   | 70 13         | the rest       ``MixedShape.tokens`` in all
    chunks                 | 64 6 13       | 64 20 | 0 0 0  chunks of PAD behind, without a token or a run

A step of a thousand tokens is some thousand launches from Python. They take the host longer than the device
needs for a model of a few billion weights. Recorded, they are one call, as for decodes (``graphs``).

Nothing of a prompt's shape is on the host: kernels read runs, chunks and taps from tables on the device. So a
graph fixes only counts: tokens, decode rows, runs, chunks. A step goes to the smallest shape that holds it,
and PAD fills the rest. All numbers of a step arrive in one block:

    int64   tokens | positions [T each] | starts | slots | contexts | rows [R each] | table of runs (int32s)

A step that fits no shape is launched from Python: more prompts, windows of drafts, longer. A PAD token costs
what a token costs in matrix products, so the table is fine where the device is busy: at most a quarter is PAD
from 384 tokens on.

A recorded step computes the output of all tokens in the last layer, as it cannot know which ones sample. A
library for prompts that plans on the host (FlashInfer) cannot be recorded; the refusal is reported at start.

Rejected: recording at first use (seconds in the middle of a request, and ranks that record at different
steps); graphs of the parts between mixers (the mixers have most launches of a hybrid model); a table with
each number of prompts (four times the graphs, to save a few idle programs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.runner.graphs import Capture, Forward, Recordings, Step, UnreadableList, known_tokens, stride_of
from weft.tensor import gpu
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.units import CHUNK_TOKENS, PAD, ceil_div

TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
TOKENS_MAX = TOKENS[-1]
DECODES = (8, 64)
"""Rows for decodes besides all rows."""
PROMPTS = 4
CUTS = 3
"""Chunks of a prompt beyond its tokens by 64. It begins and ends inside of one; a tap may be off the grid."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class MixedShape:
    """Counts of a recorded step: ``tokens`` of all runs; ``decodes``, ``prompts`` and ``chunks`` at most."""

    tokens: int
    decodes: int
    prompts: int
    chunks: int

    @property
    def runs(self) -> int:
        return self.decodes + self.prompts + 1

    @property
    def block_numbers(self) -> int:
        """int64 values of a block."""
        table = device_runs.table_numbers(self.runs, self.chunks)
        return 2 * stride_of(self.tokens) + 4 * stride_of(self.runs) + table // 2

    def holds(self, decodes: int, prompt_lengths: Sequence[int], taps: int) -> bool:
        rest = self.tokens - self.decodes - sum(prompt_lengths)
        if rest < 0 or decodes > self.decodes or len(prompt_lengths) > self.prompts:
            return False
        chunks = sum(ceil_div(length, CHUNK_TOKENS) + 1 for length in prompt_lengths) + taps
        return chunks + ceil_div(rest, CHUNK_TOKENS) <= self.chunks


@dataclass(frozen=True, slots=True)
class MixedBlock:
    """A step with prompts, padded to ``shape``. ``flat``: int64 [shape.block_numbers], on the device."""

    shape: MixedShape
    flat: torch.Tensor


def mixed_shapes(rows_max: int, step_tokens_max: int) -> tuple[MixedShape, ...]:
    """Ascending, for steps of up to ``step_tokens_max`` tokens in up to ``rows_max`` rows; () for 0."""
    if not step_tokens_max:
        return ()
    widths = [*(rows for rows in DECODES if rows < rows_max), rows_max]
    sizes = [tokens for tokens in TOKENS if tokens < step_tokens_max]
    if len(sizes) < len(TOKENS):
        sizes.append(-(-step_tokens_max // 16) * 16)
    prompts = min(PROMPTS, rows_max)
    return tuple(MixedShape(tokens, decodes, prompts, ceil_div(tokens, CHUNK_TOKENS) + CUTS * prompts + 1)
                 for tokens in sizes for decodes in widths if 2 * decodes <= tokens)


def fill_tables(block: Int64s, packed: npt.NDArray[np.int32]) -> None:
    """Write the table of runs behind the fields of ``block``."""
    block[len(block) - len(packed) // 2 :] = packed.view(np.int64)


class MixedGraphs:
    """``table``, ``chosen``: as for ``DecodeGraphs``; ``shapes``: ascending."""

    def __init__(self, table: torch.Tensor, chosen: torch.Tensor, shapes: Sequence[MixedShape],
                 capture: Capture) -> None:
        assert not capture.reads_host, "the lists of a step with prompts change with every step"
        self.shapes = tuple(shapes)
        self._table = table
        self._chosen = chosen
        self._static = torch.zeros(max((shape.block_numbers for shape in shapes), default=0),
                                   dtype=torch.int64, device=table.device)
        self._recordings: Recordings[MixedShape] = Recordings(capture)

    @torch.inference_mode()
    def record(self, forward: Forward, caches: list[LayerCache]) -> None:
        """``forward`` over ``caches`` at all shapes."""

        def step_of(shape: MixedShape) -> Step:
            self._block(shape).copy_(torch.from_numpy(self._pad_block(shape)))
            return self._run_of(shape, forward, caches), (self._static,)

        self._recordings.record(self.shapes, step_of)

    def forget(self) -> None:
        self._recordings.forget()

    @property
    def recorded_shapes(self) -> tuple[MixedShape, ...]:
        """Ascending."""
        return self._recordings.keys

    @property
    def recorded_s(self) -> float:
        return self._recordings.seconds

    def refused_in_words(self) -> str | None:
        return self._recordings.refused_in_words(
            "step", lambda shape: f"of {shape.tokens} tokens with {shape.decodes} decodes")

    def replay(self, block: MixedBlock) -> torch.Tensor:
        """hidden [tokens, D] after the final norm, valid until the next replay of any graph."""
        self._block(block.shape).copy_(block.flat)
        return self._recordings.replay(block.shape)

    def idle(self, shape: MixedShape) -> torch.Tensor:
        """A step without a sequence. It reads and writes nothing of the arena."""
        return self.replay(MixedBlock(shape, torch.from_numpy(self._pad_block(shape)).to(self._table.device)))

    def _block(self, shape: MixedShape) -> torch.Tensor:
        return self._static[: shape.block_numbers]

    def _pad_block(self, shape: MixedShape) -> Int64s:
        """A step without a sequence."""
        tokens, runs = stride_of(shape.tokens), stride_of(shape.runs)
        block = np.full(shape.block_numbers, PAD, np.int64)
        block[:tokens] = 0
        by_run = block[2 * tokens : 2 * tokens + 4 * runs].reshape(4, runs)
        by_run[2] = 0                               # contexts
        by_run[3] = self._table.shape[0] - 1        # rows
        lengths = [1] * shape.decodes + [0] * shape.prompts + [shape.tokens - shape.decodes]
        offsets = np.cumsum([0, *lengths[:-1]]).tolist()
        packed, _ = device_runs.pack_lists(offsets, [PAD] * shape.runs, lengths, [True] * shape.runs,
                                           shape.decodes, (), shape.chunks)
        fill_tables(block, packed)
        return block

    def _run_of(self, shape: MixedShape, forward: Forward,
                caches: list[LayerCache]) -> Callable[[], torch.Tensor]:
        block, decodes, count = self._block(shape), shape.decodes, shape.runs
        tokens, runs = stride_of(shape.tokens), stride_of(count)
        tokens_T, positions_T = block[: 2 * tokens].view(2, tokens)[:, : shape.tokens]
        by_run = block[2 * tokens : 2 * tokens + 4 * runs].view(4, runs)[:, :count]
        starts_R, slots_R, context_R, rows_R = by_run
        memo: dict[str, Any] = {}
        if gpu.fits(self._table):
            memo["device_runs"] = device_runs.unpack(
                block[2 * tokens + 4 * runs :].view(torch.int32), count, decodes, shape.chunks)

        def unreadable(name: str, known: Sequence[int] = ()) -> Any:
            return UnreadableList(name, count, known)

        def run() -> torch.Tensor:
            runs = Runs(
                offsets=unreadable("offsets", range(decodes + 1)), starts=unreadable("starts"),
                lengths=unreadable("lengths", [1] * decodes), slots=unreadable("slots"),
                fresh=unreadable("fresh"), decode_count=decodes, starts_R=starts_R, slots_R=slots_R,
                context_R=context_R, page_table_RP=self._table.index_select(0, rows_R),
                taps=unreadable("taps"), padded=True, memo=dict(memo))
            fed = known_tokens(tokens_T[:decodes], rows_R[:decodes], self._chosen)
            return forward(StepInputs(torch.cat((fed, tokens_T[decodes:])), positions_T, runs), caches)

        return run
