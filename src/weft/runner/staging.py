"""Staging of all inputs of a step for the device, in one buffer and one copy.

    host (pinned)   | tokens, positions, starts, ... | table writes | frames to zero | copies | ... |
                    '------------------------- one asynchronous copy --------------------------------'
    device          | tokens, positions, starts, ... | table writes | frames to zero | copies | ... |

A step asks for its pieces with ``take`` (to be filled in place) or ``add`` (an existing array). Each is a
``Staged``: the host's view of it now, the device's after ``send``. A dozen small copies would cost the host
ten microseconds each, and one from memory that is not pinned makes it wait for the device.

The buffer has the size of the largest usual step (``step_bytes``). A step that needs more sends the rest in separate
copies. The next step has a larger buffer, bounded by the largest step (law L11).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.tensor.adapter_rows import BLOCK_ROWS, LINES
from weft.tensor.device import is_remote, recorded, wait_for
from weft.units import CHUNK_TOKENS, PAGE_TOKENS

RECORDED_TOKENS = 2048
"""Tokens of the longest recorded step."""
ALIGN = 16
"""Alignment, bytes: every piece starts on a multiple of it."""

_ELSEWHERE = -1
"""Offset of a piece that did not fit."""
_BEFORE_SEND = "a staged piece is read before it was sent"


def step_bytes(tokens: int, rows: int, pages: int) -> int:
    """Return the bytes of a step with ``tokens`` tokens in up to ``rows`` rows, one of them new with ``pages`` pages:
    for the batch, the table of runs and the sampler. A power of two.
    """
    # Tokens, positions, tokens that prompts score; in recorded steps the picture fields, and rows by adapter.
    by_token = 3 * tokens + 6 * min(tokens, RECORDED_TOKENS) + BLOCK_ROWS * LINES
    by_row = 24 * rows  # of runs, sampling and its numbers
    table_writes = 3 * (pages + tokens // PAGE_TOKENS + 2 * rows)
    chunks = 2 * (tokens // CHUNK_TOKENS + 5 * rows) + 2 * rows  # int32s in pairs
    return 1 << (8 * (by_token + by_row + table_writes + chunks) - 1).bit_length()


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Staged:
    """One staged array. ``host``: the numpy array; ``device``: its twin, a tensor of the same shape and dtype, from
    ``send`` until the next ``begin``.
    """

    __slots__ = ("_begin", "_device", "host")

    def __init__(self, host: npt.NDArray[Any], begin: int) -> None:
        self.host = host
        self._begin = begin
        self._device: torch.Tensor | None = None

    @property
    def device(self) -> torch.Tensor:
        assert self._device is not None, _BEFORE_SEND
        return self._device

    def copy(self) -> Staged:
        """Return a copy in memory of its own, once the piece is sent: valid beyond the next ``begin``."""
        copy = Staged(self.host.copy(), _ELSEWHERE)
        copy._device = self.device.clone()
        return copy

    def row(self, index: int) -> Staged:
        """Return one row of the piece, once it is sent."""
        row = Staged(self.host[index], self._begin)
        row._device = self.device[index]
        return row


class Staging:
    """Buffer of one step at a time: ``begin``, any number of ``take`` and ``add``, ``send``. ``capacity_bytes``: of a
    usual step; it grows. ``send`` copies if the device is remote.
    """

    def __init__(self, device: torch.device, capacity_bytes: int = 1 << 16) -> None:
        self._device = device
        self._remote = is_remote(device)
        self._turn = 0
        self._events: list[Any] = [None, None]
        self._used = 0
        self._asked = 0
        self._pieces: list[Staged] = []
        self._make(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return len(self._hosts[0])

    def begin(self) -> None:
        """Begin a new step. The pieces of the step before become invalid."""
        if self._asked > self.capacity_bytes:
            self._grow()
        self._turn = (self._turn + 1) % len(self._hosts)
        # Two buffers alternate: the last copy from this buffer belongs to the step before the last, and has almost
        # always ended. On the device one buffer is enough: copies and kernels are in the order of one stream.
        busy = self._events[self._turn]
        if busy is not None:
            wait_for(busy)
        self._used = self._asked = 0
        self._pieces.clear()

    def take(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.int64) -> Staged:
        """Return a piece to be filled through ``host``, with unspecified contents."""
        count = shape if isinstance(shape, int) else math.prod(shape)
        size_bytes = count * np.dtype(dtype).itemsize
        begin, end = self._used, self._used + size_bytes
        padded = size_bytes + -size_bytes % ALIGN
        self._asked += padded
        if end > self.capacity_bytes:
            piece = Staged(np.empty(shape, dtype), _ELSEWHERE)
        else:
            self._used += padded
            room = self._hosts[self._turn][begin:end].view(dtype)
            piece = Staged(room if isinstance(shape, int) else room.reshape(shape), begin)
        self._pieces.append(piece)
        return piece

    def add(self, values: npt.NDArray[Any], dtype: npt.DTypeLike | None = None) -> Staged:
        """Return a piece that has ``values`` now, as ``dtype`` if one is named."""
        piece = self.take(values.shape, values.dtype if dtype is None else dtype)
        piece.host[...] = values
        return piece

    def send(self) -> None:
        """Send all pieces in one copy. Every piece has its ``device`` from here on."""
        if not self._remote:
            # On a CPU nothing is copied: the device's view is the host's memory.
            for piece in self._pieces:
                piece._device = torch.from_numpy(piece.host)
            return
        used = min(self._used, self.capacity_bytes)  # the last piece may end inside its padding
        self._device_bytes[:used].copy_(self._pinned[self._turn][:used], non_blocking=True)
        # When the copy that was just enqueued is done, its buffer may be written again.
        self._events[self._turn] = recorded(self._device, self._events[self._turn])
        for piece in self._pieces:
            if piece._begin == _ELSEWHERE:
                piece._device = torch.from_numpy(piece.host).to(self._device)
                continue
            flat = self._device_bytes[piece._begin : piece._begin + piece.host.nbytes]
            numbers = flat.view(_torch_dtype(piece.host.dtype))
            piece._device = numbers if piece.host.ndim == 1 else numbers.view(piece.host.shape)

    def _grow(self) -> None:
        for event in self._events:
            if event is not None:
                wait_for(event)
        self._make(1 << (self._asked - 1).bit_length())

    def _make(self, capacity_bytes: int) -> None:
        pinned = self._device.type == "cuda"
        self._pinned = [
            torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2 if self._remote else 1)
        ]
        self._hosts = [buffer.numpy() for buffer in self._pinned]
        self._device_bytes = torch.empty(capacity_bytes if self._remote else 0, dtype=torch.uint8, device=self._device)
