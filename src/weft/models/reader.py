"""Reads weights: threads fetch what will be asked for next, while the model is being put together.

    TensorCheck's order   a  b  c  d  e  f ...
                          |  '--fetched--'      up to 256 MiB ahead, a thread for each tensor in flight
                          v
    build(source)         asks for a: copied, widened, packed or rounded by the caller's thread

Files are memory-mapped and fetching copies out of the map. So the peak is the weights, the tensors fetched
ahead and the one matrix in work; page cache aside. Each thread checks its tensor for NaN and infinity while
the bytes are in its cache (``stored_values``).

On a GPU each tensor goes there as it was read, and is joined, ordered or rounded there.

Rejected: keeping views of the map as weights. They would be evicted under memory pressure and are unaligned
for the CPU's matrix kernels. And the process would die of SIGBUS if the file is overwritten.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from weft.errors import CheckpointError
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.runtime_form import RuntimeForm
from weft.models.safetensors_header import StoredTensor
from weft.models.stored_values import MappedFiles, is_finite
from weft.models.tensor_source import OnProgress
from weft.models.weights import TensorSource

_AHEAD_BYTES = 256 * 1024 * 1024
_THREADS = min(8, 2 * (os.cpu_count() or 1))


class TensorReader(TensorSource):
    """A context manager, because it holds threads and files. ``nonfinite``: the tensors with NaN or infinite
    values, which are refused unless ``allow_nonfinite``."""

    def __init__(self, checkpoint: CheckpointFiles, dtype: torch.dtype, *, order: Sequence[str] = (),
                 total_bytes: int = 0, on_progress: OnProgress | None = None,
                 runtime: RuntimeForm | None = None, device: torch.device | None = None,
                 allow_nonfinite: bool = False) -> None:
        super().__init__(checkpoint, dtype, runtime)
        self._device = device or torch.device("cpu")
        self._files = MappedFiles()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-read")
        self._next = deque(order)
        self._fetched: dict[str, Future[torch.Tensor]] = {}
        self._ahead_bytes = 0
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._on_progress = on_progress
        self._allow_nonfinite = allow_nonfinite
        self.nonfinite: list[str] = []

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
            tensor = self._read(stored)
        else:
            self._ahead_bytes -= stored.stored_bytes
            tensor = future.result()
        self.used.add(name)
        self._read_bytes += stored.stored_bytes
        if self._on_progress is not None:
            self._on_progress(self._read_bytes, self._total_bytes)
        return tensor.to(self._device)

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        """Called on any thread. Raises CheckpointError where a value is not finite and must be."""
        tensor = self._files.read(stored)
        if not is_finite(tensor, stored.dtype):
            if not self._allow_nonfinite:
                raise CheckpointError(f"{stored.file}: tensor {stored.name} has NaN or infinite values; "
                                      "--allow-nonfinite serves it nevertheless", param="model")
            self.nonfinite.append(stored.name)
        return tensor

    def _fetch_ahead(self) -> None:
        """At least one, and as many as fit."""
        while self._next and (not self._fetched or self._ahead_bytes < _AHEAD_BYTES):
            name = self._next.popleft()
            if name in self._fetched:
                continue
            stored = self.checkpoint.tensors[name]
            self._ahead_bytes += stored.stored_bytes
            self._fetched[name] = self._threads.submit(self._read, stored)
