"""Shapes of the steps that are recorded as CUDA graphs, and the block of numbers that a step of a shape brings.

    runs     d0 d1 PAD PAD | PAD v0 v1 | p0 p1 PAD PAD | PAD    decodes | verify runs | prompts | all PAD tokens
    tokens   1  1  1   1   | 0   3  2  | 70 13         | rest   ``GraphShape.tokens`` in all
    chunks                 |     3  2  | 64 6 13       | 64 20 | 0 0 0    the last: without a token or a run

A step goes to the smallest shape that holds it, and PAD fills the rest. A step of only decodes is a shape in which each
token is a decode: it has no other runs, and no chunk.

Nothing of a prompt's shape is on the host: kernels read runs, chunks and taps from tables on the device. So a
graph fixes only counts: tokens, decode rows, runs, chunks. All numbers of a step arrive in one block:

    int64   tokens | positions [T each] | starts | slots | contexts | rows [R each]
            | pictured [T], turns [3, T], of a model that reads pictures | table of runs (int32s)

The table of runs of a step of only decodes is always the same. It is in the memory of its graph, and no step brings it.

``pictured``: for each token its row of the step's pictures, PAD for text. Decodes have no pictures, and a graph of only
decodes computes their turns.

Runs of a step with *drafts* are verify runs too, of a few tokens each. Their states follow from the tokens that are
chosen: a second graph for each shape (``forward`` is False).

    replay   int64   starts | slots | contexts [verify runs + 1 each] | table of runs    lengths: right tokens

Sizes. Decodes: 1, 2, 4, then every 8 rows to 256, then every 32. Tokens of steps with prompts from 64 to 2,048: longer
steps hide their launches in the device's work. Their decode rows are 8, 64 and all rows. Up to 16 prompts. Without
prompts 1, 4 or 16 verify runs, of 2 to 16 tokens on average and 64 in all; with prompts up to 16 of 64 tokens in all.
A step that fits no shape is launched from Python, and ``outside`` says why. In matrix products a PAD token costs the
time of a token, so sizes are close together where the device is busy. From 384 tokens on at most a quarter is PAD;
below, PAD costs less than the launches that a graph saves. A PAD run or chunk costs a program that ends at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.runner.staging import RECORDED_TOKENS
from weft.tensor.gpu import runs as device_runs
from weft.units import CHUNK_TOKENS, PAD, VERIFY_TOKENS_MAX, ceil_div

BLOCK_FIELDS = 6
"""Number of fields of a block of only decodes: tokens, positions, starts, slots, contexts, rows."""
WIDEST = 512
"""Rows of the largest graph of only decodes. Wider steps are long enough to hide their launches."""
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
class GraphShape:
    """Counts of a recorded step: ``tokens`` of all runs; ``decodes``, ``prompts``, ``chunks`` and ``verifies`` (verify
    runs) at most. ``verify_tokens``: of all verify runs together. ``picture_fields``: ``PictureRows.fields`` of the
    model, 0 in a shape of only decodes. ``forward``: False for the replay of the verify runs' states.
    """

    tokens: int
    decodes: int
    prompts: int
    chunks: int
    verifies: int = 0
    verify_tokens: int = 0
    picture_fields: int = 0
    forward: bool = True

    @staticmethod
    def of_decodes(rows: int) -> GraphShape:
        return GraphShape(rows, rows, 0, 0)

    @property
    def decodes_alone(self) -> bool:
        """Whether the step has only decodes. Other steps end with a run of PAD."""
        return self.tokens == self.decodes

    @property
    def runs(self) -> int:
        return (self.decodes + self.prompts) * self.forward + self.verifies + (not self.decodes_alone)

    @property
    def fields_at(self) -> int:
        """Index of the first of the ``picture_fields`` in a block."""
        return 2 * stride_of(self.tokens) + 4 * stride_of(self.runs)

    @property
    def table_at(self) -> int:
        """Index of the table of runs in the memory of a graph."""
        if not self.forward:
            return 3 * stride_of(self.runs)
        return self.fields_at + self.picture_fields * stride_of(self.tokens)

    @property
    def memory_numbers(self) -> int:
        """Number of int64 values that a graph reads."""
        return self.table_at + device_runs.table_numbers(self.runs, self.chunks) // 2

    @property
    def block_numbers(self) -> int:
        """Number of int64 values of a block: those of ``memory_numbers`` that a step brings."""
        return self.table_at if self.decodes_alone else self.memory_numbers

    @property
    def name(self) -> tuple[str, str]:
        """Kind and name of the shape, as messages have them."""
        if self.decodes_alone:
            return "batch size", str(self.decodes)
        verified = f", {self.verifies} verify runs of {self.verify_tokens}" if self.verifies else ""
        states = "" if self.forward else ", its states"
        return "step", f"of {self.tokens} tokens with {self.decodes} decodes{verified}{states}"

    def fields_of(self, block: Any) -> Any:
        """Return the picture fields of ``block`` (an array or tensor), [fields, tokens]."""
        stride = stride_of(self.tokens)
        fields = block[self.fields_at : self.fields_at + self.picture_fields * stride]
        return fields.reshape(self.picture_fields, stride)[:, : self.tokens]

    def pad_memory(self, pad_row: int) -> Int64s:
        """Return the numbers that a graph reads in a step without a sequence. ``pad_row``: the row of PAD."""
        if not self.forward:
            return self.states_block([], [], [], [])
        memory = np.full(self.memory_numbers, PAD, np.int64)
        (tokens, _), (_, _, contexts, rows) = split_fields(memory, self.tokens, self.runs)
        tokens[:] = contexts[:] = 0
        rows[:] = pad_row
        lengths = [1] * self.decodes + [0] * (self.runs - self.decodes)
        lengths[-1] += self.tokens - self.decodes
        offsets = np.cumsum([0, *lengths[:-1]]).tolist()
        self._write_table(memory, offsets, [PAD] * self.runs, lengths, self.decodes)
        return memory

    def states_block(self, offsets: list[int], starts: list[int], lengths: list[int], slots: list[int]) -> Int64s:
        """Return the block of verify runs of ``lengths`` right tokens, which begin at ``offsets`` of the log, then PAD.
        The shape is one of states.
        """
        pads = self.runs - len(starts)
        block = np.full(self.block_numbers, PAD, np.int64)
        by_run = block[: self.table_at].reshape(3, -1)
        by_run[0, : len(starts)] = starts
        by_run[1, : len(slots)] = slots
        by_run[2] = 0
        by_run[2, : len(starts)] = np.add(starts, lengths)
        self._write_table(block, offsets + [0] * pads, starts + [PAD] * pads, lengths + [0] * pads, 0)
        return block

    def _write_table(
        self, block: Int64s, offsets: list[int], starts: list[int], lengths: list[int], decode_count: int
    ) -> None:
        """Write the table of runs, without taps and without a fresh one."""
        packed, _ = device_runs.pack_lists(offsets, starts, lengths, [False] * self.runs, decode_count, (), self.chunks)
        block[self.table_at :] = packed.view(np.int64)

    def holds(self, decodes: int, prompt_lengths: Sequence[int], taps: int, verify_lengths: Sequence[int] = ()) -> bool:
        lengths = [*verify_lengths, *prompt_lengths]
        if (self.tokens == self.decodes) == bool(lengths):
            return False
        if len(verify_lengths) > self.verifies or sum(verify_lengths) > self.verify_tokens:
            return False
        # A kernel keeps the states of the verify runs of a shape, by their slots: there must be one.
        if self.verifies and not verify_lengths:
            return False
        rest = self.tokens - self.decodes - sum(lengths)
        if rest < 0 or decodes > self.decodes or len(prompt_lengths) > self.prompts:
            return False
        chunks = sum(ceil_div(length, CHUNK_TOKENS) + 1 for length in lengths) + taps
        return chunks + ceil_div(rest, CHUNK_TOKENS) <= self.chunks


OUTSIDE = ("tokens", "prompts", "decodes", "drafts", "adapters", "unrecorded")
"""Reasons for which a step is launched from Python, as /metrics names them."""


def outside(shapes: Sequence[GraphShape], tokens: int, prompts: int, verifies: int) -> str:
    """Return why none of ``shapes`` holds a step."""
    others = prompts + verifies > 0
    alike = [shape for shape in shapes if shape.decodes_alone != others]
    if not alike:
        return "unrecorded"
    if not others:
        return "decodes"
    if tokens > alike[-1].tokens:
        return "tokens"
    if prompts > max(shape.prompts for shape in alike):
        return "prompts"
    return "drafts" if verifies else "unrecorded"


def recorded_shapes(
    rows_max: int, step_tokens_max: int, *, verify_runs: bool, picture_fields: int = 0
) -> tuple[GraphShape, ...]:
    """Return the shapes, ascending: of decodes; of steps with prompts, if ``step_tokens_max`` is not 0; of these and
    with ``verify_runs`` those of steps with drafts.
    """
    shapes = list(mixed_shapes(rows_max, step_tokens_max))
    if verify_runs and step_tokens_max:
        shapes += verify_shapes(rows_max)
        shapes += draft_shapes(rows_max, step_tokens_max)
    decodes = [GraphShape.of_decodes(width) for width in decode_widths(rows_max)]
    return tuple(sorted(decodes + [replace(shape, picture_fields=picture_fields) for shape in shapes]))


def decode_widths(rows_max: int) -> tuple[int, ...]:
    """Return the widths 1, 2, 4, then every 8 rows to 256, then every 32. Padding costs little, and recording takes
    seconds.
    """
    widths = [1, 2, 4, *range(8, 256, 8), *range(256, WIDEST + 1, 32)]
    most = min(rows_max, WIDEST)
    return (*(width for width in widths if width < most), most)


def verify_shapes(rows_max: int) -> tuple[GraphShape, ...]:
    """Return the shapes, ascending, of steps with verify runs and no prompt; after each the replay of its states."""
    sizes = {
        (min(count, rows_max), min(count, rows_max), length * min(count, rows_max))
        for count in VERIFY_COUNTS
        for length in VERIFY_LENGTHS
        if length * min(count, rows_max) <= VERIFY_TOKENS_MAX
    }
    sizes.add((rows_max, min(VERIFY_COUNTS[-1], rows_max), VERIFY_TOKENS_MAX))
    return _with_replays(
        GraphShape(
            decodes + tokens, decodes, 0, VERIFY_CUTS * count + ceil_div(tokens, CHUNK_TOKENS) + 1, count, tokens
        )
        for decodes, count, tokens in sizes
    )


def draft_shapes(rows_max: int, step_tokens_max: int) -> tuple[GraphShape, ...]:
    """Return the shapes, ascending, of steps with verify runs and prompts, and the replays of their states."""
    prompts, count = min(PROMPTS, rows_max), min(VERIFY_COUNTS[-1], rows_max)
    return _with_replays(
        GraphShape(
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


def _with_replays(shapes: Iterable[GraphShape]) -> tuple[GraphShape, ...]:
    return tuple(sorted(replace(shape, forward=forward) for shape in shapes for forward in (False, True)))


def _sizes(sizes: Sequence[int], most: int, decodes: int) -> list[int]:
    """Return the ``sizes`` below ``most``. If ``most`` is below the last of ``sizes``, add a size that holds a step of
    ``most`` tokens when all ``decodes`` are PAD.
    """
    below = [tokens for tokens in sizes if tokens < most]
    return below if len(below) == len(sizes) else [*below, -(-(most + decodes) // 16) * 16]


def mixed_shapes(rows_max: int, step_tokens_max: int) -> tuple[GraphShape, ...]:
    """Return the shapes, ascending, for steps of up to ``step_tokens_max`` tokens in up to ``rows_max`` rows; () for
    0.
    """
    if not step_tokens_max:
        return ()
    widths = [*(rows for rows in DECODES if rows < rows_max), rows_max]
    prompts = min(PROMPTS, rows_max)
    shapes = (
        GraphShape(tokens, decodes, prompts, ceil_div(tokens, CHUNK_TOKENS) + CUTS * prompts + 1)
        for decodes in widths
        for tokens in _sizes(TOKENS, step_tokens_max, decodes)
        if 2 * decodes <= tokens
    )
    return tuple(sorted(shapes))


def replayable(shapes: Sequence[GraphShape]) -> tuple[GraphShape, ...]:
    """Return those of the recorded ``shapes`` that a step can have. A shape with verify runs also needs the replay of
    its states.
    """
    return tuple(
        shape for shape in shapes if shape.forward and (not shape.verifies or replace(shape, forward=False) in shapes)
    )


def stride_of(width: int) -> int:
    """Return the numbers from one field of a block to the next: every field begins on 16 bytes, as kernels expect."""
    return width + width % 2


def split_fields(block: Any, token_count: int, run_count: int) -> tuple[Any, Any]:
    """Return tokens, positions [2, T]; starts, slots, contexts, rows [4, R], of an array or a tensor."""
    tokens, runs = stride_of(token_count), stride_of(run_count)
    return (
        block[: 2 * tokens].reshape(2, tokens)[:, :token_count],
        block[2 * tokens : 2 * tokens + 4 * runs].reshape(4, runs)[:, :run_count],
    )
