"""Readback of a step's results to the host, in one buffer, one copy and one wait.

    device          tokens [X] | logprobs, ranks, best ones of rows that asked | the same of prompts
                       '------------- one asynchronous copy, an event after it -------------'
    host (pinned)   words of 64 bits                  PendingReadback.open(): waits for the event, cuts them

The mirror of ``staging``. The copy is enqueued when the step is launched. The wait comes when the tokens are needed,
so the host may launch the next step in between. On a CPU nothing is copied: the tensors are the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.request import LOGPROBS_MAX
from weft.tensor.device import is_remote, recorded, wait_for

Words = npt.NDArray[np.int64]


class PendingReadback:
    """Results of one step. ``open`` may be called again, by one thread at a time."""

    __slots__ = ("_event", "_pieces", "_shapes", "_words")

    def __init__(
        self,
        shapes: Sequence[tuple[tuple[int, ...], bool]],
        words: Words | None,
        event: Any,
        pieces: list[npt.NDArray[Any]] | None = None,
    ) -> None:
        """Keep the parts of a readback. ``shapes``: of each piece, and whether it has floats; ``words``: the memory in
        which they arrive, once ``event`` has come (None: at once). ``pieces``: pieces that are on the host already.
        """
        self._shapes = shapes
        self._words = words
        self._event = event
        self._pieces = pieces

    @property
    def arrived(self) -> bool:
        """Whether ``open`` would not wait."""
        return self._pieces is not None or self._event is None or bool(self._event.query())

    def open(self) -> list[npt.NDArray[Any]]:
        """Return the pieces in the order in which they were sent: int64, or float64 for floats."""
        if self._pieces is None:
            if self._event is not None:
                wait_for(self._event)
            assert self._words is not None
            words, begin, pieces = self._words.copy(), 0, []
            for shape, floats in self._shapes:
                count = int(np.prod(shape))
                piece = words[begin : begin + count].reshape(shape)
                pieces.append(piece.view(np.float64) if floats else piece)
                begin += count
            self._pieces = pieces
        return self._pieces


def step_words(rows: int) -> int:
    """Return the words of a step of ``rows`` rows that all ask for logprobs."""
    return rows * (4 + 2 * LOGPROBS_MAX)


class Readback:
    """Readbacks from ``device``. ``words``: of a usual step (``step_words``). Larger buffers are made when a step
    needs them, which takes milliseconds on a GPU.
    """

    def __init__(self, device: torch.device, words: int = 0) -> None:
        self._device = device
        self._remote = is_remote(device)
        self._turn = 0
        self._buffers = [self._buffer(words if self._remote else 0) for _ in range(2)]
        self._pending: list[PendingReadback | None] = [None, None]

    def send(self, pieces: Sequence[torch.Tensor]) -> PendingReadback:
        """Send integers or floats of any shape, none of which is written later."""
        if not self._remote:
            return self.arrived_now([piece.numpy() for piece in pieces])
        self._turn = 1 - self._turn
        # The step before the last was opened long ago, as at most two steps are in flight; if not, it is opened now.
        before = self._pending[self._turn]
        if before is not None:
            before.open()
        shapes = [(tuple(piece.shape), piece.is_floating_point()) for piece in pieces]
        # Words of 64 bits: float64 holds floats exactly.
        flat = [piece.double().view(torch.int64) if piece.is_floating_point() else piece.long() for piece in pieces]
        count = sum(piece.numel() for piece in flat)
        room = self._room(count)
        if count:
            words = flat[0].view(-1) if len(flat) == 1 else torch.cat([piece.view(-1) for piece in flat])
            room.copy_(words, non_blocking=True)
        pending = self._pending[self._turn] = PendingReadback(shapes, room.numpy(), recorded(self._device))
        return pending

    @staticmethod
    def arrived_now(pieces: list[npt.NDArray[Any]]) -> PendingReadback:
        """Return a readback whose ``pieces`` are on the host already."""
        return PendingReadback((), None, None, pieces)

    def _room(self, count: int) -> torch.Tensor:
        buffer = self._buffers[self._turn]
        if buffer.numel() < count:
            buffer = self._buffers[self._turn] = self._buffer(1 << (count - 1).bit_length())
        return buffer[:count]

    def _buffer(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int64, pin_memory=self._device.type == "cuda")
