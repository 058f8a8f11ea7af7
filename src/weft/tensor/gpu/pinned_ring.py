"""Tensors go to a GPU through a ring of pinned buffers, while the host reads the next ones.

    tensor   | piece 0 | piece 1 | piece 2 | ...          pieces of a buffer's size
                 |          |         '- waits until buffer 0 is free
    ring     [buffer 0] [buffer 1]
                 '----------'--> asynchronous copies, in order, on the current stream

A copy from ordinary memory to a GPU holds its caller until the driver has staged the last byte. Here the
caller copies a piece into pinned memory, asks for its transfer and goes on.

Rejected: pinning the whole file map (a limit on locked memory is often small, and pinning takes as long as a
copy).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.tensor.gpu.host_memory import CudaPin, HostBuffer, Pin
from weft.tensor.waits import wait_for

BUFFER_BYTES = 32 << 20
BUFFERS = 2
LEAST_BYTES = 1 << 20
"""Of a tensor that goes through the ring; smaller ones are a few percent of a model's bytes."""


class Uploads(Protocol):
    """Copies from pinned memory that end later, in order."""

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        """-> what ``wait`` takes."""
        ...

    def wait(self, transfer: Any) -> None:
        """Until the transfer has ended: its source may be written."""
        ...


class CudaUploads:
    """On the current stream of the destination's device."""

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        destination.copy_(source, non_blocking=True)
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record(torch.cuda.current_stream(destination.device))
        return event

    def wait(self, transfer: Any) -> None:
        wait_for(transfer)


class PinnedRing:
    """For ``device``, until ``close``. One thread uses it."""

    def __init__(self, device: torch.device, pin: Pin | None, uploads: Uploads, *,
                 buffer_bytes: int = BUFFER_BYTES, least_bytes: int = LEAST_BYTES) -> None:
        self._device = device
        self._uploads = uploads
        self._buffer_bytes = buffer_bytes
        self._least_bytes = least_bytes
        self._buffers = [HostBuffer(buffer_bytes, pin) for _ in range(BUFFERS)]
        self._under_way: list[Any] = [None] * BUFFERS
        self._next = 0

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor``, which may be freed or written at once."""
        if tensor.nbytes < self._least_bytes:
            return tensor.to(self._device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (one.view(-1).view(torch.uint8) for one in (tensor.contiguous(), out))
        for begin in range(0, len(source), self._buffer_bytes):
            piece = source[begin : begin + self._buffer_bytes]
            self._start(target[begin : begin + len(piece)], piece)
        return out

    def _start(self, target: torch.Tensor, piece: torch.Tensor) -> None:
        place = self._next
        self._next = (place + 1) % BUFFERS
        # A buffer is written again only when its transfer has ended.
        if self._under_way[place] is not None:
            self._uploads.wait(self._under_way[place])
        buffer = self._buffers[place].tensor[: len(piece)]
        buffer.copy_(piece)
        self._under_way[place] = self._uploads.start(target, buffer)

    def close(self) -> None:
        """Wait for all transfers, and give the buffers back. Idempotent."""
        for place, transfer in enumerate(self._under_way):
            if transfer is not None:
                self._uploads.wait(transfer)
            self._under_way[place] = None
        for buffer in self._buffers:
            buffer.close()


def ring_for(device: torch.device) -> PinnedRing | None:
    """None where ``device`` reads the host's memory itself."""
    return PinnedRing(device, CudaPin(device), CudaUploads()) if device.type == "cuda" else None
