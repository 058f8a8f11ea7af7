"""Host memory that a GPU copies from and to at full speed, of exactly the size that was asked for.

    mmap, anonymous --> cudaHostRegister --> uint8 tensor ... close: cudaHostUnregister --> munmap

Torch's own pinned tensors come from its host allocator. That rounds each block up to a power of two and keeps
freed blocks for the life of the process: weights of 33 GB would take 64 GB, for ever. Pinning may fail, as a
user's limit on locked memory is often small: the buffer then is ordinary memory, and copies are slower.

Rejected: one buffer for all weights (waking could not free it piece by piece); ``cudaMallocHost`` by ctypes
(a second way to find the runtime that torch has loaded).
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

from weft.tensor.waits import DeviceEvent

_ALIGNED_BYTES = 4096
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device of the process."""

_log = logging.getLogger("weft")


class Pin(Protocol):
    """Locks memory of the host for a device."""

    def register(self, address: int, size: int) -> bool:
        """Whether it is locked now."""
        ...

    def unregister(self, address: int) -> None: ...


class CudaPin:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> bool:
        if int(_runtime().cudaHostRegister(address, size, _PORTABLE)) == 0:
            return True
        # The runtime keeps the error until it is asked for it, which the next launch of torch does.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return False

    def unregister(self, address: int) -> None:
        _runtime().cudaHostUnregister(address)


class HostBuffer:
    """``tensor``: uint8 [size], contents unspecified, until ``close``. ``pin``: None for ordinary memory."""

    def __init__(self, size: int, pin: Pin | None) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._pin: Pin | None = None
        if not size:
            return
        # The tensor holds the mapping, and its end unmaps it.
        self.tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        if pin is not None and pin.register(self.tensor.data_ptr(), size):
            self._pin = pin
        elif pin is not None:
            _log.warning("%d bytes of host memory could not be pinned: copies to the GPU are slower. "
                         "ulimit -l shows the limit", size)

    @property
    def pinned(self) -> bool:
        return self._pin is not None

    def close(self) -> None:
        """Give the memory back to the system. Idempotent; no view of ``tensor`` may be used any more."""
        if self._pin is not None:
            self._pin.unregister(self.tensor.data_ptr())
            self._pin = None
        self.tensor = torch.empty(0, dtype=torch.uint8)


class HostRoom:
    """Pieces of one buffer. A piece that fits in no gap is ordinary memory. ``fence``: an event behind all
    work of now."""
    # Pinned once, at the start: pinning takes some 0.3 s for a GB, and the device stands still.

    def __init__(self, buffer: HostBuffer, fence: Callable[[], DeviceEvent]) -> None:
        self._bytes: npt.NDArray[np.uint8] = buffer.tensor.numpy()
        self._fence = fence
        self._gaps: list[tuple[int, int]] = [(0, len(self._bytes))]
        """Of the first byte and behind the last, ascending, none beside another."""
        self._leaving: list[tuple[DeviceEvent, int, int]] = []
        weakref.finalize(self, buffer.close).atexit = False   # the system unpins what a process leaves

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """uint8 [size], contents unspecified."""
        piece_bytes = -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        # A piece that was given back is free when the work of that time is done: a copy may still read it.
        for event, begin, end in [one for one in self._leaving if one[0].query()]:
            self._leaving.remove((event, begin, end))
            self._free(begin, end)
        for at, (begin, end) in enumerate(self._gaps):
            if end - begin >= piece_bytes:
                self._gaps[at : at + 1] = [(begin + piece_bytes, end)] if end - begin > piece_bytes else []
                return self._bytes[begin : begin + size]
        return np.empty(size, np.uint8)

    def give(self, piece: npt.NDArray[np.uint8]) -> None:
        """``piece`` is what ``take`` returned, and no view of it is used any more."""
        begin = piece.ctypes.data - self._bytes.ctypes.data
        if piece.size and 0 <= begin < len(self._bytes):
            end = begin + -(-piece.size // _ALIGNED_BYTES) * _ALIGNED_BYTES
            self._leaving.append((self._fence(), begin, end))

    def _free(self, begin: int, end: int) -> None:
        gaps: list[tuple[int, int]] = []
        for one in sorted([*self._gaps, (begin, end)]):
            if gaps and gaps[-1][1] == one[0]:
                one = (gaps.pop()[0], one[1])
            gaps.append(one)
        self._gaps = gaps


def room_for(device: torch.device, size: int) -> HostRoom:
    """Pinned for a GPU."""

    def fence() -> DeviceEvent:
        cuda: Any = torch.cuda
        event: DeviceEvent = cuda.Event()
        event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined]
        return event

    size = -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return HostRoom(HostBuffer(size, CudaPin(device)), fence)


def _runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()
