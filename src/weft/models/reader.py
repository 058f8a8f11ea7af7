"""Reads weights: threads fetch what will be asked for next, while the model is being put together.

    TensorCheck's order   a  b  c  d  e  f ...
                          |  '--fetched--'      up to 256 MiB ahead, a thread for each tensor in flight
                          v
    build(source)         asks for a: copied, widened, packed or rounded by the caller's thread

Files are memory-mapped and fetching copies out of the map, so the peak is the weights, what is fetched ahead
and the one matrix that is being worked on; page cache aside. Rejected: keeping views of the map as weights.
They would be evicted under memory pressure, unaligned for the CPU's matrix kernels, and the process would die
of SIGBUS when someone overwrites the file.

On a GPU each tensor goes there as it was read, and is joined, ordered or rounded there.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from weft.models.runtime_form import RuntimeForm
from weft.models.safetensors_header import StoredTensor
from weft.models.weights import TORCH_DTYPES, Checkpoint, OnProgress, TensorSource

_AHEAD_BYTES = 256 * 1024 * 1024
_THREADS = min(8, 2 * (os.cpu_count() or 1))


class TensorReader(TensorSource):
    """A context manager, because it holds threads and files."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, *, order: Sequence[str] = (),
                 total_bytes: int = 0, on_progress: OnProgress | None = None,
                 runtime: RuntimeForm | None = None, device: torch.device | None = None) -> None:
        super().__init__(checkpoint, dtype, runtime)
        self._device = device or torch.device("cpu")
        self._files = _MappedFiles()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-read")
        self._next = deque(order)
        self._fetched: dict[str, Future[torch.Tensor]] = {}
        self._ahead_bytes = 0
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._on_progress = on_progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._fetched.clear()
        self._files.close()

    @property
    def device(self) -> torch.device:
        return self._device

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        stored = self.checkpoint.tensors[name]
        assert stored.shape == shape, f"{name} was not checked"
        assert stored.dtype in dtypes, f"{name} was not checked"
        self._fetch_ahead()
        future = self._fetched.pop(name, None)
        if future is None:  # asked for again, or out of order
            tensor = self._files.read(stored)
        else:
            self._ahead_bytes -= stored.stored_bytes
            tensor = future.result()
        self.used.add(name)
        self._read_bytes += stored.stored_bytes
        if self._on_progress is not None:
            self._on_progress(self._read_bytes, self._total_bytes)
        return tensor.to(self._device)

    def _fetch_ahead(self) -> None:
        """At least one, and as many as fit."""
        while self._next and (not self._fetched or self._ahead_bytes < _AHEAD_BYTES):
            name = self._next.popleft()
            if name in self._fetched:
                continue
            stored = self.checkpoint.tensors[name]
            self._ahead_bytes += stored.stored_bytes
            self._fetched[name] = self._threads.submit(self._files.read, stored)


class _MappedFiles:
    """Files mapped at their first read; used by several threads."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """A copy of the tensor's bytes."""
        dtype = TORCH_DTYPES[stored.dtype]
        if stored.stored_bytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        raw = np.frombuffer(self._map(stored.file), np.uint8, stored.stored_bytes, stored.begin)
        return torch.from_numpy(raw.copy()).view(dtype).view(stored.shape)

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            found = self._maps.get(path)
            if found is None:
                with path.open("rb") as file:
                    found = self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return found

    def close(self) -> None:
        self._maps.clear()  # each map goes with the last tensor over it
