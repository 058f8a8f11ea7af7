"""What a kernel of Triton touches: its addresses lie in its arguments, and bytes are known line by line.

    ptrs [N], mask [N]  -->  inside one allocation of the arguments?  no: a report, and CUDA's error
                        -->  lines of 64 bytes that were read, and that were written

A kernel that follows an index from freed memory would otherwise end the process. Two streams may be in one
allocation at once (the arena is one), so the order between them needs the lines and not the arguments.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LINE_BITS = 6
Ints = npt.NDArray[Any]
Span = tuple[int, int]


class IllegalAccessError(RuntimeError):
    """CUDA's: an illegal memory access."""


class Trace:
    """Of one launch. ``allocations``: first byte and the one behind the last, of every argument."""

    def __init__(self, name: str, allocations: Sequence[Span]) -> None:
        self._name = name
        self._ranges = sorted(set(allocations))
        self._firsts = [first for first, _ in self._ranges]
        self._read: set[int] = set()
        self._written: set[int] = set()

    def touch(self, ptrs: Ints, mask: Ints, *, writes: bool) -> None:
        if ptrs.size == 1 == mask.size:  # most loads are of one number
            if mask.item():
                self._touch_number(ptrs.item(), writes=writes)
            return
        if not mask.all():
            ptrs = ptrs[np.broadcast_to(mask, ptrs.shape)]
        if not ptrs.size:
            return
        low, high = int(ptrs.min()), int(ptrs.max())
        if not self._is_inside(low, high) and not all(self._is_inside(one, one) for one in ptrs.ravel().tolist()):
            raise self._illegal(writes)
        lines = self._written if writes else self._read
        first, last = low >> LINE_BITS, high >> LINE_BITS
        if last - first < 2:
            lines.update((first, last))
        else:
            touched = ptrs.ravel() >> ptrs.dtype.type(LINE_BITS)
            # Neighbours are in one line mostly. To sort all takes longer than to name some lines twice.
            lines.update(touched[:-1][touched[1:] != touched[:-1]].tolist(), (int(touched[-1]),))

    def _touch_number(self, address: int, *, writes: bool) -> None:
        if not self._is_inside(address, address):
            raise self._illegal(writes)
        (self._written if writes else self._read).add(address >> LINE_BITS)

    def _illegal(self, writes: bool) -> IllegalAccessError:
        return IllegalAccessError(
            f"CUDA error: an illegal memory access was encountered: {self._name} "
            f"{'writes' if writes else 'reads'} an address outside of its arguments"
        )

    def _is_inside(self, low: int, high: int) -> bool:
        at = bisect.bisect_right(self._firsts, low) - 1
        return at >= 0 and high < self._ranges[at][1]

    def spans(self) -> tuple[list[Span], list[Span]]:
        """Read, and written."""
        return _spans(self._read), _spans(self._written)


def _spans(lines: set[int]) -> list[Span]:
    spans: list[Span] = []
    for line in sorted(lines):
        first, end = line << LINE_BITS, (line + 1) << LINE_BITS
        if spans and spans[-1][1] == first:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
    return spans


class WatchedMemory:
    """The interpreter's loads and stores, through ``current`` where a launch is traced."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self.current: Trace | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def load(self, ptrs: Ints, mask: Ints, other: Ints, dtype: Any) -> Any:
        if self.current is not None:
            self.current.touch(ptrs, mask, writes=False)
        return self._interpreter.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Ints, value: Ints, mask: Ints) -> Any:
        if self.current is not None:
            self.current.touch(ptrs, mask, writes=True)
        return self._interpreter.store(ptrs, value, mask)

    def atomic_rmw(self, operation: Any, ptrs: Ints, value: Ints, mask: Ints, order: Any) -> Any:
        if self.current is not None:
            self.current.touch(ptrs, mask, writes=True)
        return self._interpreter.atomic_rmw(operation, ptrs, value, mask, order)

    def atomic_cas(self, ptrs: Ints, compare: Ints, value: Ints, order: Any) -> Any:
        if self.current is not None:
            self.current.touch(ptrs, np.ones_like(ptrs, bool), writes=True)
        return self._interpreter.atomic_cas(ptrs, compare, value, order)
