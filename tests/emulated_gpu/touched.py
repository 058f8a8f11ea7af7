"""Which bytes of wide memory a work touches: an arena is one tensor, and a launch reads some pages of it.

    operator by rows (``index_copy_``, ...)   the rows that its index names, when it runs
    launch of Triton                          the addresses of its loads and stores, by 64 bytes

Memory of less than WIDE_BYTES counts as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from tests.emulated_gpu.streams import Span, span_of

WIDE_BYTES = 256 << 10
_GRAIN = 6
"""Bits of an address that do not count: memory begins at multiples of 64 bytes, pages and slots of 256."""
_READERS = frozenset({"load", "atomic_cas", "atomic_rmw"})
_WRITERS = frozenset({"store", "atomic_cas", "atomic_rmw"})

A = torch.ops.aten
BY_ROWS = {A.index_select.default, A.index_select.out, A.index_copy_.default, A.index_fill_.int_Scalar}


def is_wide(memory: torch.Tensor) -> bool:
    first, end = span_of(memory)
    return end - first >= WIDE_BYTES


def rows_of(memory: torch.Tensor, index: torch.Tensor) -> list[Span]:
    """Of ``memory[index]``."""
    step = memory.stride(0) * memory.itemsize
    first, end = span_of(memory[:1])
    rows = np.unique(index.numpy())
    return [(first + row * step, end + row * step) for row in rows.tolist()]


class Touched:
    """By the launches inside of ``watched``: ``reads`` and ``writes`` of ``wide``."""

    def __init__(self, wide: Sequence[torch.Tensor]) -> None:
        self._wide = sorted({span_of(one) for one in wide})
        self._seen: dict[bool, list[Any]] = {False: [], True: []}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        if not self._wide:
            yield
            return
        with mock.patch.object(interpreter, "_interpreter", _Watched(interpreter._interpreter, self)):
            yield

    def note(self, name: str, addresses: Any, mask: Any) -> None:
        addresses = np.asarray(addresses)[np.asarray(mask)] if mask is not None else np.asarray(addresses)
        inside = np.zeros(addresses.shape, bool)
        for first, end in self._wide:
            inside |= (addresses >= first) & (addresses < end)
        if inside.any():
            grains = np.unique(addresses[inside].astype(np.int64) >> _GRAIN)
            for writes, names in ((False, _READERS), (True, _WRITERS)):
                if name in names:
                    self._seen[writes].append(grains)

    def spans(self, *, writes: bool) -> list[Span]:
        """Ascending, none beside another."""
        if not self._seen[writes]:
            return []
        grains = np.unique(np.concatenate(self._seen[writes]))
        cuts = np.flatnonzero(np.diff(grains) > 1) + 1
        return [(int(run[0]) << _GRAIN, (int(run[-1]) + 1) << _GRAIN) for run in np.split(grains, cuts)]


class _Watched:
    """The interpreter's memory, with a note of each access."""

    def __init__(self, memory: Any, touched: Touched) -> None:
        self._memory = memory
        self._touched = touched

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._memory, name)
        if name not in _READERS | _WRITERS:
            return function

        def noted(*args: Any) -> Any:
            at = {"load": 0, "store": 0, "atomic_cas": 0, "atomic_rmw": 1}[name]
            mask = {"load": 1, "store": 2, "atomic_rmw": 3}.get(name)
            self._touched.note(name, args[at], None if mask is None else args[mask])
            return function(*args)

        return noted
