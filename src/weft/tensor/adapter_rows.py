"""Whose the rows of a step are: groups of rows by adapter, as the products of a model find them.

    runs           d0    d1    d2   | p0 p0 p0             d: decodes, p: a prompt
    adapter        a     -     b    | a
    by_count       6 rows: a -> 0, 3, 4, 5    b -> 2       all tokens of the step
                   4 rows: a -> 0, 3          b -> 2       those whose output was asked for

A product gets all rows of the step, or after the last mixer those that were asked for. The counts differ
wherever the rows do, so the number of rows says which. What goes through the head otherwise (the prompt
tokens of a request that asked for their logprobs) is named by ``ActiveAdapters.only``.
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
"""The name of no adapter."""
BLOCK_ROWS = 16
"""Rows of one adapter in a program of the Triton kernels."""
LINES = 64
"""Adapters that those kernels know at a time: lines of a product's table."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of one adapter, by its digest. A slice where they are neighbours."""

    digest: str
    rows: slice | torch.Tensor
    numbers: list[int]


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """The groups as the Triton kernels read them (``tensor.kernels.adapters``): ``order`` int64
    [blocks * BLOCK_ROWS], ``places`` int64 [blocks]."""

    order: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor) -> AdapterBlocks:
        """``flat`` [blocks * (BLOCK_ROWS + 1)]: one behind the other."""
        places = len(flat) // (BLOCK_ROWS + 1)
        return cls(flat[:-places], flat[-places:])


@dataclass(slots=True)
class RowGroups:
    """The rows of each adapter; for the C++ kernels one object, which all products of a step share; for those
    in Triton ``device``."""

    groups: tuple[AdapterRows, ...] = ()
    device: AdapterBlocks | None = None
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, digests: Sequence[str]) -> RowGroups:
        """By row, whose it is."""
        rows: dict[str, list[int]] = {}
        for row, digest in enumerate(digests):
            if digest != BASE:
                rows.setdefault(digest, []).append(row)
        return cls(tuple(AdapterRows(digest, _index(own), own) for digest, own in rows.items()))

    def in_blocks(self, lines: Mapping[str, int], blocks: int | None = None) -> npt.NDArray[np.int64]:
        """``AdapterBlocks`` on the host, of adapters that have one of ``lines``. ``blocks``: with empty ones
        behind."""
        own = [(group.numbers, lines.get(group.digest)) for group in self.groups]
        if blocks is None:
            blocks = sum(ceil_div(len(numbers), BLOCK_ROWS) for numbers, _ in own)
        flat, at = np.full(blocks * (BLOCK_ROWS + 1), PAD, np.int64), 0
        for numbers, line in own:
            if line is not None:  # else it has just gone, and its rows have ended
                first, count = at * BLOCK_ROWS, ceil_div(len(numbers), BLOCK_ROWS)
                flat[first : first + len(numbers)] = numbers
                flat[blocks * BLOCK_ROWS + at : blocks * BLOCK_ROWS + at + count] = line
                at += count
        return flat


def most_blocks(rows: int) -> int:
    """Of any groups of ``rows`` rows."""
    return min(rows, ceil_div(rows, BLOCK_ROWS) + LINES)


_NO_GROUPS = RowGroups()
_numbers: dict[str, int] = {}


def number_of(digest: str) -> int:
    """As the C++ kernels name an adapter: never another's in this process."""
    return _numbers.setdefault(digest, len(_numbers))


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Which rows of a step are whose. ``by_count``: rows of the input -> groups; all tokens of the step, and
    those whose output was asked for."""

    by_count: Mapping[int, RowGroups]

    @classmethod
    def of(cls, digests: Sequence[str], lengths: Sequence[int], asked: Sequence[int] = ()) -> StepAdapters | None:
        """``digests`` and ``lengths`` by run, in the order of the tokens; ``asked``: the run of each row that
        goes through the head. None for a step of the base model alone."""
        if not any(digests):
            return None
        whole = [digest for digest, length in zip(digests, lengths, strict=True) for _ in range(length)]
        narrow = [digests[run] for run in asked]
        # Equal counts mean that each token is asked for, and then both are the same rows.
        return cls({len(narrow): RowGroups.of(narrow), len(whole): RowGroups.of(whole)})


def _index(rows: list[int]) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)


class ActiveAdapters:
    """Of one model: the groups of the step that is computed, read by its products."""

    def __init__(self) -> None:
        self.step: StepAdapters | None = None
        self.unfused: set[str] = set()
        """Adapters with a change of a product that no kernel computes: their steps go layer by layer, and
        replay no graph."""

        self.unrecorded: set[str] = set()
        """Those that change what is no product (experts, the embedding): their steps replay no graph."""
        self.lines: dict[str, int] = {}
        """Of each adapter in memory, its line in the tables of the products."""

    def hold(self, digest: str) -> None:
        """A line for ``digest``. The kernels do not compute more than LINES adapters, and torch does."""
        free = set(range(LINES)) - set(self.lines.values())
        if free and digest not in self.lines:
            self.lines[digest] = min(free)

    def release(self, digest: str) -> None:
        self.lines.pop(digest, None)
        self.unfused.discard(digest)
        self.unrecorded.discard(digest)

    def recorded(self, digests: Sequence[str]) -> bool:
        """Whether graphs with adapters compute the rows of all ``digests``."""
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
        """Meanwhile every one of ``rows`` rows is of ``digest``."""
        before = self.step
        self.step = None if digest == BASE else StepAdapters({rows: RowGroups.of([digest] * rows)})
        try:
            yield
        finally:
            self.step = before
