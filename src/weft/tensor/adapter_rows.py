"""Groups of a step's rows by adapter, as the products of a model read them.

    runs           d0    d1    d2   | p0 p0 p0             d: decodes, p: a prompt
    adapter        a     -     b    | a
    by_count       6 rows: a -> 0, 3, 4, 5    b -> 2       all tokens of the step
                   4 rows: a -> 0, 3          b -> 2       rows whose output is needed

A product gets all rows of the step, or after the last mixer only the rows whose output is needed. The two sets differ
only if their counts do, so the number of rows tells which set it is. Other rows of the head (prompt tokens, for prompt
logprobs) are named by ``ActiveAdapters.only``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.units import PAD, ceil_div

BASE = ""
"""Digest of rows without an adapter."""
BLOCK_ROWS = 16
"""Rows of one adapter in a program of the Triton kernels."""
LINES = 64
"""Most adapters that the Triton kernels compute: lines of a product's table."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of one adapter, by its digest. A slice if they are neighbours."""

    digest: str
    rows: slice | torch.Tensor
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """Groups as the Triton kernels read them (``tensor.kernels.adapters``): ``order`` int64 [blocks * BLOCK_ROWS],
    ``places`` int64 [blocks].
    """

    order: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor) -> AdapterBlocks:
        """Return the two parts of ``flat`` [blocks * (BLOCK_ROWS + 1)], which has one after the other."""
        places = len(flat) // (BLOCK_ROWS + 1)
        return cls(flat[:-places], flat[-places:])


@dataclass(slots=True)
class RowGroups:
    """Rows of each adapter. ``device``: the same for the Triton kernels. ``memo``: the object for the C++ kernels,
    which all products of a step share.
    """

    groups: tuple[AdapterRows, ...] = ()
    device: AdapterBlocks | None = None
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, digests: Sequence[str]) -> RowGroups:
        """Return the groups of rows by the digest of each row."""
        rows: dict[str, list[int]] = {}
        for row, digest in enumerate(digests):
            if digest != BASE:
                rows.setdefault(digest, []).append(row)
        return cls(tuple(AdapterRows(digest, _index(own), own) for digest, own in rows.items()))

    def in_blocks(self, lines: Mapping[str, int], blocks: int | None = None) -> npt.NDArray[np.int64]:
        """Return ``AdapterBlocks`` on the host, of adapters that have one of ``lines``. ``blocks``: their number, with
        empty ones at the end.
        """
        own = [(group.numbers, lines.get(group.digest)) for group in self.groups]
        if blocks is None:
            blocks = sum(ceil_div(len(numbers), BLOCK_ROWS) for numbers, _ in own)
        flat, block = np.full(blocks * (BLOCK_ROWS + 1), PAD, np.int64), 0
        for numbers, line in own:
            if line is not None:  # None: the adapter was just removed, and its rows have ended
                first, count = block * BLOCK_ROWS, ceil_div(len(numbers), BLOCK_ROWS)
                flat[first : first + len(numbers)] = numbers
                flat[blocks * BLOCK_ROWS + block : blocks * BLOCK_ROWS + block + count] = line
                block += count
        return flat


def most_blocks(rows: int) -> int:
    """Return the most blocks of any groups of ``rows`` rows."""
    return min(rows, ceil_div(rows, BLOCK_ROWS) + LINES)


_NO_GROUPS = RowGroups()
_numbers: dict[str, int] = {}


def number_of(digest: str) -> int:
    """Return the C++ kernels' number of an adapter, which no other adapter gets in this process."""
    return _numbers.setdefault(digest, len(_numbers))


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Adapters of the rows of a step. ``by_count``: number of rows -> groups, for all tokens of the step and for the
    rows whose output is needed.
    """

    by_count: Mapping[int, RowGroups]

    @classmethod
    def of(cls, digests: Sequence[str], lengths: Sequence[int], output_runs: Sequence[int] = ()) -> StepAdapters | None:
        """Return the adapters of a step, None if all rows are of the base model. ``digests`` and ``lengths`` by run,
        in the order of the tokens; ``output_runs``: the run of each row that goes through the head.
        """
        if not any(digests):
            return None
        whole = [digest for digest, length in zip(digests, lengths, strict=True) for _ in range(length)]
        narrow = [digests[run] for run in output_runs]
        # Equal counts mean that every token goes through the head: then both groups are the same rows.
        return cls({len(narrow): RowGroups.of(narrow), len(whole): RowGroups.of(whole)})


def _index(rows: list[int]) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)


class ActiveAdapters:
    """State of adapters of one model: the groups of the present step, read by its products."""

    def __init__(self) -> None:
        self.step: StepAdapters | None = None
        self.unfused: set[str] = set()
        """Adapters that change a product in a way that no kernel computes: their steps go layer by layer, and replay
        no graph.
        """

        self.unrecorded: set[str] = set()
        """Adapters that change something other than a product (experts, the embedding): their steps replay no graph."""
        self.lines: dict[str, int] = {}
        """Line of each adapter in memory in the tables of the products."""

    def hold(self, digest: str) -> None:
        """Take a line for ``digest``. The kernels do not compute more than LINES adapters, and torch does."""
        free = set(range(LINES)) - set(self.lines.values())
        if free and digest not in self.lines:
            self.lines[digest] = min(free)

    def release(self, digest: str) -> None:
        self.lines.pop(digest, None)
        self.unfused.discard(digest)
        self.unrecorded.discard(digest)

    def recorded(self, digests: Sequence[str]) -> bool:
        """Return whether graphs with adapters compute the rows of all ``digests``."""
        return all(
            digest == BASE or (digest in self.lines and digest not in self.unfused and digest not in self.unrecorded)
            for digest in digests
        )

    def of(self, rows: int) -> RowGroups:
        return _NO_GROUPS if self.step is None else self.step.by_count.get(rows, _NO_GROUPS)

    def groups(self, rows: int) -> tuple[AdapterRows, ...]:
        return self.of(rows).groups

    @contextmanager
    def only(self, digest: str, rows: int) -> Iterator[None]:
        """Let all of ``rows`` rows be of ``digest`` inside the context."""
        before = self.step
        self.step = None if digest == BASE else StepAdapters({rows: RowGroups.of([digest] * rows)})
        try:
            yield
        finally:
            self.step = before
