"""Steps with prompts on a GPU as CUDA graphs: a graph for each shape of a short table.

    runs     d0 d1 PAD PAD | PAD v0 v1 | p0 p1 PAD PAD | PAD    decodes | verify runs | prompts | all PAD tokens
    tokens   1  1  1   1   | 0   3  2  | 70 13         | rest   ``MixedShape.tokens`` in all
    chunks                 |     3  2  | 64 6 13       | 64 20 | 0 0 0    the last: without a token or a run

A step of a thousand tokens is some thousand launches from Python. They take the host longer than the device
needs for a model of a few billion weights. Recorded, they are one call, as for decodes (``graphs``).

Nothing of a prompt's shape is on the host: kernels read runs, chunks and taps from tables on the device. So a
graph fixes only counts: tokens, decode rows, runs, chunks. A step goes to the smallest shape that holds it,
and PAD fills the rest. All numbers of a step arrive in one block:

    int64   tokens | positions [T each] | starts | slots | contexts | rows [R each]
            | pictured [T], turns [3, T], of a model that reads pictures | table of runs (int32s)

``pictured``: for each token its row of the step's pictures, PAD for text. Those rows and the blocks of adapters
(``tensor.adapter_rows``) are in memory of their own, which is written before a replay. As for decodes, steps with rows
of adapters have a second set of graphs.

Runs of a step with *drafts* are verify runs too, of a few tokens each. Their states follow from the tokens that are
chosen: a second graph for each shape. It reads the log that the first one wrote (``tensor.replay_log``), and is
recorded right after it. No other graph is replayed between the two, so the log may be in the memory that all graphs
share.

    replay   int64   starts | slots | contexts [verify runs + 1 each] | table of runs    lengths: right tokens

Shapes. Tokens from 64 to 2,048: longer steps hide their launches in the device's work. Decode rows are 8, 64 and all
rows. Up to 16 prompts. Without prompts 1, 4 or 16 verify runs, of 2 to 16 tokens on average and 64 in all; with
prompts up to 16 of 64 tokens in all. A step that fits no shape is launched from Python, and ``outside`` says why. In
matrix products a PAD token costs the time of a token, so sizes are close together where the device is busy. From 384
tokens on at most a quarter is PAD; below, PAD costs less than the launches that a graph saves. A PAD run or chunk
costs a program that ends at once.

Memory. All graphs record into the pool of the decode graphs, the largest shape first, so that each further graph adds
only its nodes. ``reserve`` measures both before the arena takes the rest.

A recorded step computes the output of all tokens in the last layer, as it cannot know which ones sample. A library for
prompts that plans on the host (FlashInfer) cannot be recorded; the refusal is reported at start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.runner.graphs import (
    Capture,
    Forward,
    RecordedAdapters,
    Recordings,
    Step,
    UnreadableList,
    known_tokens,
    stride_of,
)
from weft.runner.pictures import PictureRows
from weft.runner.staging import RECORDED_TOKENS, Staging
from weft.tensor import gpu
from weft.tensor.adapter_rows import StepAdapters
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import EmbeddedRows, LayerCache, Runs, StepInputs
from weft.tensor.replay_log import ReplayLog
from weft.units import CHUNK_TOKENS, PAD, VERIFY_TOKENS_MAX, ceil_div

TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, RECORDED_TOKENS)
TOKENS_MAX = TOKENS[-1]
DECODES = (8, 64)
"""Numbers of rows for decodes, in addition to all rows."""
PROMPTS = 16
CUTS = 3
"""Chunks of a prompt beyond its tokens by 64: it may begin and end inside a chunk, and a tap may be off the grid."""
VERIFY_COUNTS = (1, 4, 16)
VERIFY_LENGTHS = (2, 4, 8, 16)
"""Verify runs of a step without prompts, and tokens of each run on average."""
TOKENS_WITH_DRAFTS = (128, 256, 512, 1024, 2048)
"""Tokens of steps with prompts and verify runs."""
VERIFY_CUTS = 2
"""Chunks of a verify run: it may cross the grid."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class MixedShape:
    """Counts of a recorded step: ``tokens`` of all runs; ``decodes``, ``prompts``, ``chunks`` and ``verifies`` (verify
    runs) at most. ``verify_tokens``: of all verify runs together. ``picture_fields``: ``PictureRows.fields`` of the
    model. ``forward``: False for the replay of the verify runs' states.
    """

    tokens: int
    decodes: int
    prompts: int
    chunks: int
    verifies: int = 0
    verify_tokens: int = 0
    picture_fields: int = 0
    forward: bool = True

    @property
    def runs(self) -> int:
        return self.decodes + self.verifies + self.prompts + 1

    @property
    def fields_at(self) -> int:
        """Index of the first of the ``picture_fields`` in a block."""
        return 2 * stride_of(self.tokens) + 4 * stride_of(self.runs)

    @property
    def block_numbers(self) -> int:
        """Number of int64 values of a block."""
        if not self.forward:
            runs = self.verifies + 1
            return 3 * stride_of(runs) + device_runs.table_numbers(runs, self.chunks) // 2
        table = device_runs.table_numbers(self.runs, self.chunks)
        return self.fields_at + self.picture_fields * stride_of(self.tokens) + table // 2

    def fields_of(self, block: Any) -> Any:
        """Return the picture fields of ``block`` (an array or tensor), [fields, tokens]."""
        stride = stride_of(self.tokens)
        fields = block[self.fields_at : self.fields_at + self.picture_fields * stride]
        return fields.reshape(self.picture_fields, stride)[:, : self.tokens]

    def holds(self, decodes: int, prompt_lengths: Sequence[int], taps: int, verify_lengths: Sequence[int] = ()) -> bool:
        if len(verify_lengths) > self.verifies or sum(verify_lengths) > self.verify_tokens:
            return False
        # A kernel keeps the states of the verify runs of a shape, by their slots: there must be one.
        if self.verifies and not verify_lengths:
            return False
        lengths = [*verify_lengths, *prompt_lengths]
        rest = self.tokens - self.decodes - sum(lengths)
        if rest < 0 or decodes > self.decodes or len(prompt_lengths) > self.prompts:
            return False
        chunks = sum(ceil_div(length, CHUNK_TOKENS) + 1 for length in lengths) + taps
        return chunks + ceil_div(rest, CHUNK_TOKENS) <= self.chunks


OUTSIDE = ("tokens", "prompts", "decodes", "drafts", "adapters", "unrecorded")
"""Reasons for which a step is launched from Python, as /metrics names them."""


def outside(shapes: Sequence[MixedShape], tokens: int, prompts: int, verifies: int) -> str:
    """Return why none of ``shapes`` holds a step with prompts or verify runs."""
    if not shapes:
        return "unrecorded"
    if tokens > shapes[-1].tokens:
        return "tokens"
    if prompts > max(shape.prompts for shape in shapes):
        return "prompts"
    return "drafts" if verifies else "unrecorded"


@dataclass(frozen=True, slots=True)
class MixedBlock:
    """A step with prompts, padded to ``shape``. ``flat``: int64 [shape.block_numbers], on the device. ``adapters``: of
    the tokens, in ``most_blocks`` blocks; None if all are of the base model. ``rows_ND``: rows of its pictures.
    """

    shape: MixedShape
    flat: torch.Tensor
    adapters: StepAdapters | None = None
    rows_ND: torch.Tensor | None = None


def recorded_shapes(
    rows_max: int, step_tokens_max: int, *, verify_runs: bool, picture_fields: int = 0
) -> tuple[MixedShape, ...]:
    """Return the shapes, ascending: of steps with prompts and, with ``verify_runs``, of steps with drafts."""
    shapes = list(mixed_shapes(rows_max, step_tokens_max))
    if verify_runs and step_tokens_max:
        shapes += verify_shapes(rows_max)
        shapes += draft_shapes(rows_max, step_tokens_max)
    return tuple(sorted(replace(shape, picture_fields=picture_fields) for shape in shapes))


def verify_shapes(rows_max: int) -> tuple[MixedShape, ...]:
    """Return the shapes, ascending, of steps with verify runs and no prompt; after each the replay of its states."""
    sizes = {
        (min(count, rows_max), min(count, rows_max), length * min(count, rows_max))
        for count in VERIFY_COUNTS
        for length in VERIFY_LENGTHS
        if length * min(count, rows_max) <= VERIFY_TOKENS_MAX
    }
    sizes.add((rows_max, min(VERIFY_COUNTS[-1], rows_max), VERIFY_TOKENS_MAX))
    return _with_replays(
        MixedShape(
            decodes + tokens, decodes, 0, VERIFY_CUTS * count + ceil_div(tokens, CHUNK_TOKENS) + 1, count, tokens
        )
        for decodes, count, tokens in sizes
    )


def draft_shapes(rows_max: int, step_tokens_max: int) -> tuple[MixedShape, ...]:
    """Return the shapes, ascending, of steps with verify runs and prompts, and the replays of their states."""
    prompts, count = min(PROMPTS, rows_max), min(VERIFY_COUNTS[-1], rows_max)
    return _with_replays(
        MixedShape(
            tokens,
            decodes,
            prompts,
            ceil_div(tokens, CHUNK_TOKENS) + CUTS * prompts + VERIFY_CUTS * count + 1,
            count,
            min(VERIFY_TOKENS_MAX, tokens - decodes),
        )
        for decodes in {min(DECODES[0], rows_max), rows_max}
        for tokens in _sizes(TOKENS_WITH_DRAFTS, step_tokens_max, decodes)
        if 2 * decodes <= tokens
    )


def _with_replays(shapes: Iterable[MixedShape]) -> tuple[MixedShape, ...]:
    return tuple(sorted(replace(shape, forward=forward) for shape in shapes for forward in (False, True)))


def _sizes(sizes: Sequence[int], most: int, decodes: int) -> list[int]:
    """Return the ``sizes`` below ``most``. If ``most`` is below the last of ``sizes``, add a size that holds a step of
    ``most`` tokens when all ``decodes`` are PAD.
    """
    below = [tokens for tokens in sizes if tokens < most]
    return below if len(below) == len(sizes) else [*below, -(-(most + decodes) // 16) * 16]


def mixed_shapes(rows_max: int, step_tokens_max: int) -> tuple[MixedShape, ...]:
    """Return the shapes, ascending, for steps of up to ``step_tokens_max`` tokens in up to ``rows_max`` rows; () for
    0.
    """
    if not step_tokens_max:
        return ()
    widths = [*(rows for rows in DECODES if rows < rows_max), rows_max]
    prompts = min(PROMPTS, rows_max)
    shapes = (
        MixedShape(tokens, decodes, prompts, ceil_div(tokens, CHUNK_TOKENS) + CUTS * prompts + 1)
        for decodes in widths
        for tokens in _sizes(TOKENS, step_tokens_max, decodes)
        if 2 * decodes <= tokens
    )
    return tuple(sorted(shapes))


def fill_tables(block: Int64s, packed: npt.NDArray[np.int32]) -> None:
    """Write the table of runs after the fields of ``block``."""
    block[len(block) - len(packed) // 2 :] = packed.view(np.int64)


class MixedGraphs:
    """Graphs of steps with prompts. ``table``, ``chosen``: as for ``DecodeGraphs``; ``shapes``: ascending.
    ``pictures``: of a model that reads some.
    """

    def __init__(
        self,
        table: torch.Tensor,
        chosen: torch.Tensor,
        shapes: Sequence[MixedShape],
        capture: Capture,
        pictures: PictureRows | None = None,
    ) -> None:
        assert not capture.reads_host, "the lists of a step with prompts change with every step"
        self.shapes = tuple(shapes)
        self._table = table
        self._chosen = chosen
        numbers = max((shape.block_numbers for shape in shapes), default=0)
        tokens = max((shape.tokens for shape in shapes), default=0)
        self._static = torch.zeros(numbers, dtype=torch.int64, device=table.device)
        self._rows_ND = None if pictures is None else pictures.room(tokens)
        self._adapter_rows = RecordedAdapters(tokens, table.device)
        self._log: ReplayLog | None = None
        """Log of the verify runs that were recorded last."""
        self._replays = Staging(
            table.device, 8 * max((shape.block_numbers for shape in shapes if not shape.forward), default=0)
        )
        self._recordings: Recordings[MixedShape] = Recordings(capture)
        self._adapted: Recordings[MixedShape] = Recordings(capture)

    @torch.inference_mode()
    def record(self, forward: Forward, caches: list[LayerCache]) -> None:
        """Record ``forward`` over ``caches`` at all shapes."""
        self._record(self._recordings, forward, caches)

    @torch.inference_mode()
    def record_adapted(self, forward: Forward, caches: list[LayerCache]) -> None:
        """Record ``forward`` again, with the factors of the tokens' adapters."""
        self._adapter_rows.clear()
        self._record(self._adapted, forward, caches)

    def _record(self, recordings: Recordings[MixedShape], forward: Forward, caches: list[LayerCache]) -> None:
        def step_of(shape: MixedShape) -> Step:
            pad_block = self._pad_block(shape) if shape.forward else _replay_block(shape, [], [], [], [])
            self._block(shape).copy_(torch.from_numpy(pad_block))
            run = (
                self._run_of(shape, forward, caches, recordings is self._adapted)
                if shape.forward
                else self._replay_of(shape, recordings)
            )
            return run, (self._static,)

        recordings.record(self.shapes, step_of)
        self._log = None

    def forget(self) -> None:
        self._recordings.forget()
        self._adapted.forget()

    @property
    def recorded_shapes(self) -> tuple[MixedShape, ...]:
        """Recorded shapes, ascending; those with verify runs only if their replay is recorded too."""
        return _whole(self._recordings.keys)

    @property
    def adapted_shapes(self) -> tuple[MixedShape, ...]:
        """Shapes recorded by ``record_adapted``, as ``recorded_shapes``."""
        return _whole(self._adapted.keys)

    @property
    def recorded_s(self) -> float:
        return self._recordings.seconds

    def refused_in_words(self) -> str | None:
        return self._recordings.refused_in_words(
            "step",
            lambda shape: (
                f"of {shape.tokens} tokens with {shape.decodes} decodes"
                + (f", {shape.verifies} verify runs of {shape.verify_tokens}" if shape.verifies else "")
                + ("" if shape.forward else ", its states")
            ),
        )

    def replay(self, block: MixedBlock) -> torch.Tensor:
        """Return hidden [tokens, D] after the final norm, valid until the next replay of any graph."""
        self._block(block.shape).copy_(block.flat)
        if block.rows_ND is not None:
            assert self._rows_ND is not None, "a picture for a model that reads none"
            self._rows_ND[: len(block.rows_ND)].copy_(block.rows_ND)
        if block.adapters is not None:
            self._adapter_rows.take(block.adapters, block.shape.tokens)
        return self._of(block).replay(block.shape)

    def _of(self, block: MixedBlock) -> Recordings[MixedShape]:
        return self._recordings if block.adapters is None else self._adapted

    def replay_states(
        self,
        block: MixedBlock,
        starts: Sequence[int],
        lengths: Sequence[int],
        right: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Compute the states of the verify runs of ``block``, the last replayed step, after the ``right`` tokens of
        each. ``lengths``: all tokens of each run.
        """
        again = replace(block.shape, forward=False)
        offsets = [sum(lengths[:run]) for run in range(len(lengths))]
        self._replays.begin()
        piece = self._replays.add(_replay_block(again, offsets, list(starts), list(right), list(slots)))
        self._replays.send()
        self._block(again).copy_(piece.device)
        self._of(block).replay(again)

    def idle(self, shape: MixedShape, *, adapted: bool = False) -> torch.Tensor:
        """Replay a step without a sequence. It reads and writes nothing of the arena, except the bytes of a slot for
        verify runs, whose contents stay the same.
        """
        adapters = self._adapter_rows.step(shape.tokens) if adapted else None
        block = MixedBlock(shape, torch.from_numpy(self._pad_block(shape)).to(self._table.device), adapters)
        hidden = self.replay(block)
        if shape.verifies:
            self.replay_states(block, [], [], [], [])
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
        lengths = [1] * shape.decodes + [0] * (shape.verifies + shape.prompts) + [shape.tokens - shape.decodes]
        offsets = np.cumsum([0, *lengths[:-1]]).tolist()
        packed, _ = device_runs.pack_lists(
            offsets, [PAD] * shape.runs, lengths, [True] * shape.runs, shape.decodes, (), shape.chunks
        )
        fill_tables(block, packed)
        return block

    def _run_of(
        self, shape: MixedShape, forward: Forward, caches: list[LayerCache], adapted: bool
    ) -> Callable[[], torch.Tensor]:
        adapters = self._adapter_rows.step(shape.tokens) if adapted else None
        block, decodes, count = self._block(shape), shape.decodes, shape.runs
        tokens, runs = stride_of(shape.tokens), stride_of(count)
        tokens_T, positions_T = block[: 2 * tokens].view(2, tokens)[:, : shape.tokens]
        by_run = block[2 * tokens : 2 * tokens + 4 * runs].view(4, runs)[:, :count]
        starts_R, slots_R, context_R, rows_R = by_run
        memo: dict[str, Any] = {}
        if gpu.fits(self._table):
            table_at = shape.fields_at + shape.picture_fields * tokens
            memo["device_runs"] = device_runs.unpack(block[table_at:].view(torch.int32), count, decodes, shape.chunks)
        embedded = turns = None
        if shape.picture_fields:
            assert self._rows_ND is not None
            pictured_T, *turns_3 = (fields := shape.fields_of(block))
            embedded, turns = EmbeddedRows(pictured_T, self._rows_ND), fields[1:] if turns_3 else None

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
                verify_count=shape.verifies,
                log=ReplayLog(decodes, shape.verify_tokens) if shape.verifies else None,
            )
            self._log = runs.log
            fed = known_tokens(tokens_T[:decodes], rows_R[:decodes], self._chosen)
            tokens = torch.cat((fed, tokens_T[decodes:]))
            inputs = StepInputs(tokens, positions_T, runs, adapters=adapters, embedded=embedded, turns=turns)
            return forward(inputs, caches)

        return run

    def _replay_of(self, shape: MixedShape, recordings: Recordings[MixedShape]) -> Callable[[], torch.Tensor]:
        """Return the function that replays the states of ``shape``."""
        block, count = self._block(shape), shape.verifies + 1
        starts_R, slots_R, context_R = block[: 3 * stride_of(count)].view(3, -1)[:, :count].unbind()
        memo: dict[str, Any] = {}
        if gpu.fits(self._table):
            memo["device_runs"] = device_runs.unpack(
                block[3 * stride_of(count) :].view(torch.int32), count, 0, shape.chunks
            )

        def unreadable(name: str) -> Any:
            return UnreadableList(name, count)

        def run() -> torch.Tensor:
            if self._log is None or replace(shape, forward=True) not in recordings.keys:
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
    count, pads = shape.verifies + 1, shape.verifies + 1 - len(starts)
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


def _whole(keys: Sequence[MixedShape]) -> tuple[MixedShape, ...]:
    """Return the shapes of ``keys`` that can be replayed. A shape with verify runs also needs the replay of its
    states.
    """
    return tuple(
        shape for shape in keys if shape.forward and (not shape.verifies or replace(shape, forward=False) in keys)
    )
