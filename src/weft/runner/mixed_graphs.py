"""Steps with prompts on a GPU as CUDA graphs: a graph for each shape of a short table.

    runs     d0 d1 PAD PAD | p0 p1 PAD PAD | PAD            decodes | prompts | one run of all PAD tokens
    tokens   1  1  1   1   | 70 13         | the rest       ``MixedShape.tokens`` in all
    chunks                 | 64 6 13       | 64 20 | 0 0 0  then chunks of PAD, without a token or a run

A step of a thousand tokens is some thousand launches from Python. They take the host longer than the device
needs for a model of a few billion weights. Recorded, they are one call, as for decodes (``graphs``).

Nothing of a prompt's shape is on the host: kernels read runs, chunks and taps from tables on the device. So a
graph fixes only counts: tokens, decode rows, runs, chunks. A step goes to the smallest shape that holds it,
and PAD fills the rest. All numbers of a step arrive in one block:

    int64   tokens | positions [T each] | starts | slots | contexts | rows [R each] | table of runs (int32s)

A step with *verify runs* is one too: instead of prompts it has runs of a few tokens each
(``MixedShape.verify_tokens``). Their states follow from the tokens that are chosen: a second graph for each shape. It
reads the log that the first one wrote (``tensor.replay_log``), and is recorded right after it. No other graph is
replayed between the two, so the log may be in the memory that all graphs share.

    replay   int64   starts | slots | contexts [verify runs + 1 each] | table of runs    lengths: right tokens

Shapes. Tokens from 64 to 2,048: longer steps hide their launches in the device's work. Decode rows are 8, 64 and all
rows. Up to 4 prompts. Verify runs: 1, 4 or 16 of up to 2, 4, 8 or 16 tokens, 64 in all, which makes 10 shapes of two
graphs. A step that fits no shape is launched from Python: more prompts, prompts together with verify runs, longer. A
PAD token costs as much as a token in matrix products, so the table is fine-grained where the device is busy: at most a
quarter is PAD from 384 tokens on, and no more than the launches cost below.

Memory. All graphs record into the pool of the decode graphs, the largest shape first, so that each further graph adds
only its nodes. ``reserve`` measures both before the arena takes the rest.

A recorded step computes the output of all tokens in the last layer, as it cannot know which ones sample. A library for
prompts that plans on the host (FlashInfer) cannot be recorded; the refusal is reported at start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.runner.graphs import Capture, Forward, Recordings, Step, UnreadableList, known_tokens, stride_of
from weft.runner.staging import Staging
from weft.tensor import gpu
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.tensor.replay_log import ReplayLog
from weft.units import CHUNK_TOKENS, PAD, VERIFY_TOKENS_MAX, ceil_div

TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
TOKENS_MAX = TOKENS[-1]
DECODES = (8, 64)
"""Numbers of rows for decodes, in addition to all rows."""
PROMPTS = 4
CUTS = 3
"""Chunks of a prompt beyond its tokens by 64: it may begin and end inside a chunk, and a tap may be off the grid."""
VERIFY_COUNTS = (1, 4, 16)
VERIFY_LENGTHS = (2, 4, 8, 16)
"""Verify runs of a step, and tokens of each run."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class MixedShape:
    """Counts of a recorded step: ``tokens`` of all runs; ``decodes``, ``prompts`` and ``chunks`` at most.
    ``verify_tokens``: of each verify run, if these replace prompts. ``forward``: False for the replay of their states.
    """

    tokens: int
    decodes: int
    prompts: int
    chunks: int
    verify_tokens: int = 0
    forward: bool = True

    @property
    def runs(self) -> int:
        return self.decodes + self.prompts + 1

    @property
    def block_numbers(self) -> int:
        """Number of int64 values of a block."""
        if not self.forward:
            runs = self.prompts + 1
            return 3 * stride_of(runs) + device_runs.table_numbers(runs, self.chunks) // 2
        table = device_runs.table_numbers(self.runs, self.chunks)
        return 2 * stride_of(self.tokens) + 4 * stride_of(self.runs) + table // 2

    def holds(self, decodes: int, prompt_lengths: Sequence[int], taps: int, *, verify_runs: bool = False) -> bool:
        if verify_runs != bool(self.verify_tokens) or (verify_runs and max(prompt_lengths) > self.verify_tokens):
            return False
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


def recorded_shapes(rows_max: int, step_tokens_max: int, *, verify_runs: bool) -> tuple[MixedShape, ...]:
    """Return the shapes, ascending: of steps with prompts and, with ``verify_runs``, of steps with drafts."""
    with_drafts = verify_shapes(rows_max) if verify_runs and step_tokens_max else ()
    return tuple(sorted([*mixed_shapes(rows_max, step_tokens_max), *with_drafts]))


def verify_shapes(rows_max: int) -> tuple[MixedShape, ...]:
    """Return the shapes, ascending: steps with verify runs, and after each the replay of its states."""
    return tuple(
        sorted(
            MixedShape(
                count * (1 + length),
                count,
                count,
                2 * count + ceil_div(count * length, CHUNK_TOKENS) + 1,
                length,
                forward,
            )
            for count in {min(count, rows_max) for count in VERIFY_COUNTS}
            for length in VERIFY_LENGTHS
            if count * length <= VERIFY_TOKENS_MAX
            for forward in (False, True)
        )
    )


def mixed_shapes(rows_max: int, step_tokens_max: int) -> tuple[MixedShape, ...]:
    """Return the shapes, ascending, for steps of up to ``step_tokens_max`` tokens in up to ``rows_max`` rows; () for
    0.
    """
    if not step_tokens_max:
        return ()
    widths = [*(rows for rows in DECODES if rows < rows_max), rows_max]
    sizes = [tokens for tokens in TOKENS if tokens < step_tokens_max]
    if len(sizes) < len(TOKENS):
        sizes.append(-(-step_tokens_max // 16) * 16)
    prompts = min(PROMPTS, rows_max)
    return tuple(
        MixedShape(tokens, decodes, prompts, ceil_div(tokens, CHUNK_TOKENS) + CUTS * prompts + 1)
        for tokens in sizes
        for decodes in widths
        if 2 * decodes <= tokens
    )


def fill_tables(block: Int64s, packed: npt.NDArray[np.int32]) -> None:
    """Write the table of runs after the fields of ``block``."""
    block[len(block) - len(packed) // 2 :] = packed.view(np.int64)


class MixedGraphs:
    """Graphs of steps with prompts. ``table``, ``chosen``: as for ``DecodeGraphs``; ``shapes``: ascending."""

    def __init__(
        self, table: torch.Tensor, chosen: torch.Tensor, shapes: Sequence[MixedShape], capture: Capture
    ) -> None:
        assert not capture.reads_host, "the lists of a step with prompts change with every step"
        self.shapes = tuple(shapes)
        self._table = table
        self._chosen = chosen
        numbers = max((shape.block_numbers for shape in shapes), default=0)
        self._static = torch.zeros(numbers, dtype=torch.int64, device=table.device)
        self._log: ReplayLog | None = None
        """Log of the verify runs that were recorded last."""
        self._replays = Staging(
            table.device, 8 * max((shape.block_numbers for shape in shapes if not shape.forward), default=0)
        )
        self._recordings: Recordings[MixedShape] = Recordings(capture)

    @torch.inference_mode()
    def record(self, forward: Forward, caches: list[LayerCache]) -> None:
        """Record ``forward`` over ``caches`` at all shapes."""

        def step_of(shape: MixedShape) -> Step:
            pad_block = self._pad_block(shape) if shape.forward else _replay_block(shape, [], [], [], [])
            self._block(shape).copy_(torch.from_numpy(pad_block))
            run = self._run_of(shape, forward, caches) if shape.forward else self._replay_of(shape)
            return run, (self._static,)

        self._recordings.record(self.shapes, step_of)
        self._log = None

    def forget(self) -> None:
        self._recordings.forget()

    @property
    def recorded_shapes(self) -> tuple[MixedShape, ...]:
        """Recorded shapes, ascending; those with verify runs only if their replay is recorded too."""
        keys = self._recordings.keys
        return tuple(
            shape
            for shape in keys
            if shape.forward and (not shape.verify_tokens or replace(shape, forward=False) in keys)
        )

    @property
    def recorded_s(self) -> float:
        return self._recordings.seconds

    def refused_in_words(self) -> str | None:
        return self._recordings.refused_in_words(
            "step",
            lambda shape: (
                f"of {shape.tokens} tokens with {shape.decodes} decodes"
                + (f", verify runs of {shape.verify_tokens}" if shape.verify_tokens else "")
                + ("" if shape.forward else ", its states")
            ),
        )

    def replay(self, block: MixedBlock) -> torch.Tensor:
        """Return hidden [tokens, D] after the final norm, valid until the next replay of any graph."""
        self._block(block.shape).copy_(block.flat)
        return self._recordings.replay(block.shape)

    def replay_states(
        self,
        shape: MixedShape,
        starts: Sequence[int],
        lengths: Sequence[int],
        right: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Replay the states of the verify runs of the last replayed step, which had ``lengths`` tokens: after
        ``right`` of them each.
        """
        again = replace(shape, forward=False)
        offsets = [sum(lengths[:at]) for at in range(len(lengths))]
        self._replays.begin()
        piece = self._replays.add(_replay_block(again, offsets, list(starts), list(right), list(slots)))
        self._replays.send()
        self._block(again).copy_(piece.device)
        self._recordings.replay(again)

    def idle(self, shape: MixedShape) -> torch.Tensor:
        """Replay a step without a sequence. It reads and writes nothing of the arena, except the bytes of a slot for
        verify runs, whose contents stay the same.
        """
        block = torch.from_numpy(self._pad_block(shape)).to(self._table.device)
        hidden = self.replay(MixedBlock(shape, block))
        if shape.verify_tokens:
            self.replay_states(shape, [], [], [], [])
        return hidden

    def _block(self, shape: MixedShape) -> torch.Tensor:
        return self._static[: shape.block_numbers]

    def _pad_block(self, shape: MixedShape) -> Int64s:
        """Return the block of a step without a sequence."""
        tokens, runs = stride_of(shape.tokens), stride_of(shape.runs)
        block = np.full(shape.block_numbers, PAD, np.int64)
        block[:tokens] = 0
        by_run = block[2 * tokens : 2 * tokens + 4 * runs].reshape(4, runs)
        by_run[2] = 0  # contexts
        by_run[3] = self._table.shape[0] - 1  # rows
        lengths = [1] * shape.decodes + [0] * shape.prompts + [shape.tokens - shape.decodes]
        offsets = np.cumsum([0, *lengths[:-1]]).tolist()
        packed, _ = device_runs.pack_lists(
            offsets, [PAD] * shape.runs, lengths, [True] * shape.runs, shape.decodes, (), shape.chunks
        )
        fill_tables(block, packed)
        return block

    def _run_of(self, shape: MixedShape, forward: Forward, caches: list[LayerCache]) -> Callable[[], torch.Tensor]:
        block, decodes, count = self._block(shape), shape.decodes, shape.runs
        tokens, runs = stride_of(shape.tokens), stride_of(count)
        tokens_T, positions_T = block[: 2 * tokens].view(2, tokens)[:, : shape.tokens]
        by_run = block[2 * tokens : 2 * tokens + 4 * runs].view(4, runs)[:, :count]
        starts_R, slots_R, context_R, rows_R = by_run
        memo: dict[str, Any] = {}
        if gpu.fits(self._table):
            memo["device_runs"] = device_runs.unpack(
                block[2 * tokens + 4 * runs :].view(torch.int32), count, decodes, shape.chunks
            )

        def unreadable(name: str, known: Sequence[int] = ()) -> Any:
            return UnreadableList(name, count, known)

        def run() -> torch.Tensor:
            runs = Runs(
                offsets=unreadable("offsets", range(decodes + 1)),
                starts=unreadable("starts"),
                lengths=unreadable("lengths", [1] * decodes),
                slots=unreadable("slots"),
                fresh=unreadable("fresh"),
                decode_count=decodes,
                starts_R=starts_R,
                slots_R=slots_R,
                context_R=context_R,
                page_table_RP=self._table.index_select(0, rows_R),
                taps=unreadable("taps"),
                padded=True,
                memo=dict(memo),
                verify_count=shape.prompts if shape.verify_tokens else 0,
                log=ReplayLog(decodes, shape.tokens - decodes) if shape.verify_tokens else None,
            )
            self._log = runs.log
            fed = known_tokens(tokens_T[:decodes], rows_R[:decodes], self._chosen)
            return forward(StepInputs(torch.cat((fed, tokens_T[decodes:])), positions_T, runs), caches)

        return run

    def _replay_of(self, shape: MixedShape) -> Callable[[], torch.Tensor]:
        """Return the function that replays the states of ``shape``."""
        block, count = self._block(shape), shape.prompts + 1
        starts_R, slots_R, context_R = block[: 3 * stride_of(count)].view(3, -1)[:, :count].unbind()
        memo: dict[str, Any] = {}
        if gpu.fits(self._table):
            memo["device_runs"] = device_runs.unpack(
                block[3 * stride_of(count) :].view(torch.int32), count, 0, shape.chunks
            )

        def unreadable(name: str) -> Any:
            return UnreadableList(name, count)

        def run() -> torch.Tensor:
            if self._log is None or replace(shape, forward=True) not in self._recordings.keys:
                raise RuntimeError("the step before it is not recorded")
            again = Runs(
                offsets=unreadable("offsets"),
                starts=unreadable("starts"),
                lengths=unreadable("lengths"),
                slots=unreadable("slots"),
                fresh=unreadable("fresh"),
                decode_count=0,
                starts_R=starts_R,
                slots_R=slots_R,
                context_R=context_R,
                page_table_RP=self._table[:count],
                padded=True,
                memo=dict(memo),
            )
            self._log.replay(slice(0, self._log.rows), again)
            return starts_R

        return run


def _replay_block(
    shape: MixedShape, offsets: list[int], starts: list[int], lengths: list[int], slots: list[int]
) -> Int64s:
    """Return the block of verify runs of ``lengths`` right tokens, which begin at ``offsets`` of the log, then PAD."""
    count, pads = shape.prompts + 1, shape.prompts + 1 - len(starts)
    block = np.full(shape.block_numbers, PAD, np.int64)
    by_run = block[: 3 * stride_of(count)].reshape(3, -1)
    by_run[0, : len(starts)] = starts
    by_run[1, : len(slots)] = slots
    by_run[2] = 0
    by_run[2, : len(starts)] = np.add(starts, lengths)
    packed, _ = device_runs.pack_lists(
        offsets + [0] * pads, starts + [PAD] * pads, lengths + [0] * pads, [False] * count, 0, (), shape.chunks
    )
    fill_tables(block, packed)
    return block
