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
from dataclasses import dataclass

import torch

BASE = ""
"""The name of no adapter."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of one adapter, by its digest. A slice where they are neighbours."""

    digest: str
    rows: slice | torch.Tensor
    count: int


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Which rows of a step are whose. ``by_count``: rows of the input -> groups; all tokens of the step, and
    those whose output was asked for."""

    by_count: Mapping[int, tuple[AdapterRows, ...]]

    @classmethod
    def of(cls, digests: Sequence[str], lengths: Sequence[int],
           asked: Sequence[int] = ()) -> StepAdapters | None:
        """``digests`` and ``lengths`` by run, in the order of the tokens; ``asked``: the run of each row that
        goes through the head. None for a step of the base model alone."""
        if not any(digests):
            return None
        whole = [digest for digest, length in zip(digests, lengths, strict=True) for _ in range(length)]
        narrow = [digests[run] for run in asked]
        # Equal counts mean that each token is asked for, and then both are the same rows.
        return cls({len(narrow): groups_of(narrow), len(whole): groups_of(whole)})


def groups_of(digests: Sequence[str]) -> tuple[AdapterRows, ...]:
    """By row, whose it is -> the rows of each adapter."""
    rows: dict[str, list[int]] = {}
    for row, digest in enumerate(digests):
        if digest != BASE:
            rows.setdefault(digest, []).append(row)
    return tuple(AdapterRows(digest, _index(own), len(own)) for digest, own in rows.items())


def _index(rows: list[int]) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)


class ActiveAdapters:
    """Of one model: the groups of the step that is computed, read by its products."""

    def __init__(self) -> None:
        self.step: StepAdapters | None = None

    def groups(self, rows: int) -> tuple[AdapterRows, ...]:
        return () if self.step is None else self.step.by_count.get(rows, ())

    @contextmanager
    def only(self, digest: str, rows: int) -> Iterator[None]:
        """Meanwhile every one of ``rows`` rows is of ``digest``."""
        before = self.step
        self.step = None if digest == BASE else StepAdapters({rows: groups_of([digest] * rows)})
        try:
            yield
        finally:
            self.step = before
