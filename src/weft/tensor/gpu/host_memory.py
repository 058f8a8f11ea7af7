"""Pinned host memory, which a GPU copies at full speed, and uploads through a ring of it.

    HostBuffer   mmap, anonymous --> cudaHostRegister --> uint8 tensor ... close: unregister, munmap
    HostRoom     pieces of one such buffer
    PinnedRing   tensor   | piece 0 | piece 1 | piece 2 | ...       pieces of a buffer's size
                              |          |         '- waits until buffer 0 is free
                 ring     [buffer 0] [buffer 1]
                              '----------'--> asynchronous copies, in order, on the current stream

Torch's own pinned tensors come from its host allocator. That rounds each block up to a power of two and keeps
freed blocks for the life of the process: weights of 33 GB would take 64 GB, for ever. Pinning may fail, as a
user's limit on locked memory is often small: the buffer then is ordinary memory, and copies are slower.

A copy from ordinary memory to a GPU holds its caller until the driver has staged the last byte. The ring's
caller copies a piece into pinned memory, asks for its transfer and goes on.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weft.tensor.device import DeviceEvent, recorded, wait_for

_ALIGNED_BYTES = 4096
_PORTABLE = 1
"""Flag ``cudaHostRegisterPortable``: pinned for every device of the process."""

_log = logging.getLogger("weft")


class Pin(Protocol):
    """Function that locks memory of the host for a device."""

    def register(self, address: int, size: int) -> bool:
        """Lock the memory and return whether it is locked now."""

    def unregister(self, address: int) -> None: ...


class CudaPin:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> bool:
        if int(_runtime().cudaHostRegister(address, size, _PORTABLE)) == 0:
            return True
        # The runtime keeps the error until a call reads it, and the next launch of torch would.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return False

    def unregister(self, address: int) -> None:
        _runtime().cudaHostUnregister(address)


class HostBuffer:
    """Host memory. ``tensor``: uint8 [size], contents unspecified, until ``close``. ``pin``: None for ordinary memory.
    ``mapping``: ``size`` bytes, which other processes may map too; None for new ones.
    """

    def __init__(self, size: int, pin: Pin | None, mapping: mmap.mmap | None = None) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostBuffer] | None = None
        if not size:
            return
        # The tensor holds the mapping, and its end unmaps it.
        self.tensor = torch.frombuffer(mapping or mmap.mmap(-1, size), dtype=torch.uint8)
        if pin is not None and pin.register(self.tensor.data_ptr(), size):
            # Also without ``close``: the driver treats an unmapped address as pinned, whatever is mapped there later.
            # The tensor is an argument, so that the mapping outlives the lock.
            self._unpin = weakref.finalize(self, _unlock, pin, self.tensor)
            self._unpin.atexit = False  # the system unpins memory of a process that ends
        elif pin is not None:
            _log.warning(
                "%d bytes of host memory could not be pinned: copies to the GPU are slower. ulimit -l shows the limit",
                size,
            )

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def close(self) -> None:
        """Give the memory back to the system. Idempotent; no view of ``tensor`` may be used any more."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _unlock(pin: Pin, tensor: torch.Tensor) -> None:
    pin.unregister(tensor.data_ptr())


class HostRoom:
    """Pieces of one buffer. ``fence``: returns an event after all present work that may use a piece."""

    # Pinned once, at the start: pinning takes some 0.3 s for a GB, during which the device waits.

    def __init__(self, buffer: HostBuffer, fence: Callable[[], DeviceEvent]) -> None:
        self._bytes: npt.NDArray[np.uint8] = buffer.tensor.numpy()
        self._fence = fence
        self._gaps: list[tuple[int, int]] = [(0, len(self._bytes))]
        """Gaps as (first byte, end), ascending, never adjacent."""
        self._leaving: list[tuple[DeviceEvent, int, int]] = []
        weakref.finalize(self, buffer.close).atexit = False  # the system unpins memory of a process that ends

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return uint8 [size], contents unspecified: a piece, or ordinary memory if no gap has room."""
        piece = self.find(size)
        return np.empty(size, np.uint8) if piece is None else piece

    def find(self, size: int) -> npt.NDArray[np.uint8] | None:
        """Return a piece of ``size`` bytes, None if no gap has room."""
        piece_bytes = -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        # A piece that was given back is free once the work enqueued before is done: a copy may still read the piece.
        for event, begin, end in [piece for piece in self._leaving if piece[0].query()]:
            self._leaving.remove((event, begin, end))
            self._free(begin, end)
        for index, (begin, end) in enumerate(self._gaps):
            if end - begin >= piece_bytes:
                self._gaps[index : index + 1] = [(begin + piece_bytes, end)] if end - begin > piece_bytes else []
                return self._bytes[begin : begin + size]
        return None

    def begin_of(self, piece: npt.NDArray[np.uint8]) -> int | None:
        """Return the first byte of ``piece`` in the buffer; None for other memory."""
        begin = piece.ctypes.data - self._bytes.ctypes.data
        return begin if piece.size and 0 <= begin < len(self._bytes) else None

    def give(self, piece: npt.NDArray[np.uint8]) -> None:
        """Give back ``piece``, a result of ``take`` or ``find``. No view of it may be used any more."""
        begin = self.begin_of(piece)
        if begin is not None:
            end = begin + -(-piece.size // _ALIGNED_BYTES) * _ALIGNED_BYTES
            self._leaving.append((self._fence(), begin, end))

    def _free(self, begin: int, end: int) -> None:
        gaps: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (begin, end)]):
            if gaps and gaps[-1][1] == gap[0]:
                gap = (gaps.pop()[0], gap[1])
            gaps.append(gap)
        self._gaps = gaps


def room_for(device: torch.device, size: int) -> HostRoom:
    """Return a room of ``size`` bytes, pinned for a GPU."""
    size = -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return HostRoom(HostBuffer(size, CudaPin(device)), lambda: recorded(device))


def _runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


BUFFER_BYTES = 32 << 20
BUFFERS = 2
LEAST_BYTES = 1 << 20
"""Bytes of the smallest tensor that goes through the ring. Smaller tensors are a few percent of a model's bytes."""


class Uploads(Protocol):
    """Uploads from pinned memory that end later, in order."""

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy and return its handle for ``wait``."""

    def wait(self, transfer: Any) -> None:
        """Wait until the transfer has ended: its source may be written."""


class CudaUploads:
    """Uploads on the current stream of the destination's device."""

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> Any:
        destination.copy_(source, non_blocking=True)
        return recorded(destination.device)

    def wait(self, transfer: Any) -> None:
        wait_for(transfer)


class PinnedRing:
    """Ring of pinned buffers for ``device``, until ``close``. One thread uses it."""

    def __init__(
        self,
        device: torch.device,
        pin: Pin | None,
        uploads: Uploads,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self._device = device
        self._uploads = uploads
        self._buffer_bytes = buffer_bytes
        self._least_bytes = least_bytes
        self._buffers = [HostBuffer(buffer_bytes, pin) for _ in range(BUFFERS)]
        self._under_way: list[Any] = [None] * BUFFERS
        self._next = 0

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` on the device; ``tensor`` may be freed or written at once."""
        if tensor.nbytes < self._least_bytes:
            return tensor.to(self._device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (part.view(-1).view(torch.uint8) for part in (tensor.contiguous(), out))
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


def ring_for(
    device: torch.device, *, buffer_bytes: int = BUFFER_BYTES, least_bytes: int = LEAST_BYTES
) -> PinnedRing | None:
    """Return a ring, None if ``device`` reads the host's memory itself."""
    if device.type != "cuda":
        return None
    return PinnedRing(device, CudaPin(device), CudaUploads(), buffer_bytes=buffer_bytes, least_bytes=least_bytes)
