"""The two builds of a model: ``TensorCheck`` against the headers, ``TensorReader`` with the weights.

    TensorCheck's order   a  b  c  d  e  f ...
                          |  '--fetched--'      up to 256 MiB ahead, a thread for each tensor in flight
                          v
    build(source)         asks for a: copied, widened, packed or rounded by the caller's thread

Files are memory-mapped and fetching copies out of the map. So the peak is the weights, the tensors fetched
ahead and the one matrix in work; page cache aside. A large matrix that goes into 12 bits is packed straight
out of the map by the threads of the kernels. On a GPU each tensor goes there as it was read, through pinned
buffers (``tensor.gpu.host_memory``), and is joined, ordered or rounded there.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from weft.errors import CheckpointError
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.forms.stored_form import FLOATS
from weft.models.rank_share import RankShare
from weft.models.runtime_form import RuntimeForm
from weft.models.safetensors_header import StoredTensor
from weft.models.sharding import Shard
from weft.models.stored_values import TORCH_DTYPES, MappedFiles, is_finite
from weft.models.weights import OnProgress, Part, TensorSource
from weft.models.weights_cache import WeightsCache
from weft.tensor.gpu.host_memory import ring_for
from weft.tensor.weights import large_pages
from weft.tensor.weights.tiles import MatrixRows, TwelveBitWeight, gains_by_twelve_bits, rows_from, to_twelve_bit

_PROBLEMS_SHOWN = 8
_UNNAMED_FORM = " (quantised tensors need a quantization_config in config.json)"


class TensorCheck(TensorSource):
    """Build against headers that notes every fault; ``raise_problems`` then reports them together. ``order``: the
    names in the order of the build, which is the order that the reader fetches them in. ``read_bytes``: bytes that the
    reader will read.
    """

    def __init__(
        self,
        checkpoint: CheckpointFiles,
        dtype: torch.dtype,
        runtime: RuntimeForm | None = None,
        share: RankShare | None = None,
    ) -> None:
        super().__init__(checkpoint, dtype, runtime, share)
        self.problems: list[str] = []
        self.order: list[str] = []
        self.read_bytes = 0

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        stored = self.checkpoint.tensors.get(name)
        self.used.add(name)
        shard = self.shard_of(name)
        if stored is None:
            self.problems.append(f"{self.checkpoint.source}: tensor {name} of shape {list(shape)} is missing")
        elif stored.dtype not in dtypes:
            self.problems.append(
                f"{stored.file}: tensor {name} is stored as {stored.dtype}; weft reads "
                f"{', '.join(dtypes)} here{_UNNAMED_FORM if dtypes == FLOATS else ''}"
            )
        elif shard is not None and (not shard.fits(stored.shape) or shard.of_rank(stored.shape) != shape):
            self.problems.append(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}; config.json "
                f"makes the part of a rank {list(shape)}"
            )
        elif shard is None and stored.shape != shape:
            self.problems.append(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}; config.json makes it {list(shape)}"
            )
        else:
            self.read_bytes += stored.stored_bytes if shard is None else shard.read_bytes(stored.stored_bytes)
            self.order.append(name)
        known = stored.dtype if stored is not None and stored.dtype in dtypes else dtypes[0]
        return torch.empty(shape, dtype=TORCH_DTYPES.get(known, torch.uint8), device="meta")

    def raise_problems(self) -> None:
        """Raise CheckpointError with the faults (the first few in full)."""
        if not self.problems:
            return
        shown = "; ".join(self.problems[:_PROBLEMS_SHOWN])
        more = len(self.problems) - _PROBLEMS_SHOWN
        raise CheckpointError(shown + (f"; and {more} more like these" if more > 0 else ""), param="model")


_AHEAD_BYTES = 256 * 1024 * 1024
_THREAD_BYTES_MIN = 256 * 1024
"""Bytes of the smallest tensor that a thread fetches: a smaller one is copied before a thread has begun."""
_THREADS = min(8, 2 * (os.cpu_count() or 1))


class TensorReader(TensorSource):
    """Build with weights, which answers the same requests as ``check``. A context manager, because it holds threads
    and files. ``nonfinite``: the tensors with NaN or infinite values, which are refused unless ``allow_nonfinite``.
    ``cache``: of packed weights.
    """

    def __init__(
        self,
        check: TensorCheck,
        *,
        on_progress: OnProgress | None = None,
        device: torch.device | None = None,
        allow_nonfinite: bool = False,
        cache: WeightsCache | None = None,
    ) -> None:
        super().__init__(check.checkpoint, check.dtype, check.runtime, check.share)
        self.declared = check.declared
        self._device = device or torch.device("cpu")
        self._ring = ring_for(self._device)
        self._files = MappedFiles()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-read")
        self._next = deque(check.order)
        self._cache = cache
        self._fetched: dict[str, Future[torch.Tensor] | None] = {}
        """Tensors being fetched, by name. None: a matrix that is packed from the map, or a small tensor. The system
        reads both ahead."""
        self._ahead_bytes = 0
        self._total_bytes = check.read_bytes
        self._read_bytes = 0
        self._on_progress = on_progress
        self._allow_nonfinite = allow_nonfinite
        self.nonfinite: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._fetched.clear()
        if self._ring is not None:
            self._ring.close()
        self._files.close()
        large_pages.close()

    @property
    def device(self) -> torch.device:
        return self._device

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        stored = self.checkpoint.tensors[name]
        shard = self.shard_of(name)
        own = stored.shape if shard is None else shard.of_rank(stored.shape)
        assert own == shape, f"{name} was not checked"
        assert stored.dtype in dtypes, f"{name} was not checked"
        self._fetch_ahead()
        future = self._forget_fetched(stored)
        # None: small, asked for again, out of order, or not packed after all
        tensor = self._read(stored, shard) if future is None else future.result()
        self._note_read(stored)
        return tensor.to(self._device) if self._ring is None else self._ring.to_device(tensor)

    def _packed(self, parts: Sequence[Part], columns: int) -> TwelveBitWeight | None:
        full = [self.checkpoint.prefix + part[0] for part in parts]
        if any(self.form.holds(name) or not self._serves_by_rows(self.checkpoint.tensors[name]) for name in full):
            return None
        if not gains_by_twelve_bits(self._device, self.dtype, sum(part[1] for part in parts), columns):
            return None
        self._fetch_ahead()
        stored = [self.checkpoint.tensors[name] for name in full]
        rows = []
        for tensor, part in zip(stored, parts, strict=True):
            assert self._own_shape(tensor) == (part[1], columns), f"{tensor.name} was not checked"
            own = self._own_rows(tensor)
            rows.append(own.reordered(part[2]) if len(part) == 3 else own)
        packed = self._packed_once("+".join(full), rows)
        if packed is not None:
            for tensor in stored:
                self._forget_fetched(tensor)
                self._note_read(tensor)
        return packed

    def _packed_experts(self, name: str, count: int, rows: int, columns: int) -> list[TwelveBitWeight] | None:
        full = self.checkpoint.prefix + name
        stored = self.checkpoint.tensors[full]
        if self.form.holds(full) or not self._packs(stored):
            return None
        self._fetch_ahead()
        assert stored.shape == (count, rows, columns), f"{full} was not checked"
        view = self._files.view(stored)
        experts: list[TwelveBitWeight] = []
        for index in range(count):
            address = view.ctypes.data + 2 * index * rows * columns
            packed = self._packed_once(f"{full}[{index}]", [rows_from(view, address, rows, columns, 2 * columns)])
            if packed is None:
                return None
            # Its values do not fit 12 bits: it is then read like any other.
            experts.append(packed)
        self._forget_fetched(stored)
        self._note_read(stored)
        return experts

    def _packed_once(self, name: str, parts: Sequence[MatrixRows]) -> TwelveBitWeight | None:
        """Return the matrix from the cache under ``name``, or packed now and put there."""
        packed = self._cache.get(name) if self._cache is not None else None
        if packed is None:
            packed = to_twelve_bit(parts, finite=True)
            if packed is not None and self._cache is not None:
                self._cache.put(name, packed)
        return packed

    def _packs(self, stored: StoredTensor) -> bool:
        """Return whether a tensor is packed out of the map, if it is asked for as a matrix or as all experts."""
        own = self._own_shape(stored)
        return self._serves_by_rows(stored) and gains_by_twelve_bits(
            self._device, self.dtype, math.prod(own[:-1]), own[-1]
        )

    def _serves_by_rows(self, stored: StoredTensor) -> bool:
        """Return whether rows of bfloat16 may be read in place in the file, for 12 bits."""
        shard, own = self.shard_of(stored.name), self._own_shape(stored)
        in_one = shard is None or (not shard.absent and len(own) == 2 and (shard.dim == 0 or len(shard.spans) == 1))
        return (
            in_one
            and not stored.transposed
            and self.runtime.keeps_twelve_bits
            and self.dtype == torch.bfloat16
            and stored.dtype == "BF16"
            and len(own) in (2, 3)
            and stored.begin % 2 == 0
        )

    def _own_shape(self, stored: StoredTensor) -> tuple[int, ...]:
        shard = self.shard_of(stored.name)
        return stored.shape if shard is None else shard.of_rank(stored.shape)

    def _own_rows(self, stored: StoredTensor) -> MatrixRows:
        """Return this rank's part of a bfloat16 matrix, in place in the file."""
        view, shard = self._files.view(stored), self.shard_of(stored.name)
        (rows, columns), address = stored.shape, view.ctypes.data
        stride_bytes = 2 * columns
        if shard is None:
            return rows_from(view, address, rows, columns, stride_bytes)
        if shard.dim == 0:
            each = [
                rows_from(view, address + begin * stride_bytes, count, columns, stride_bytes)
                for begin, count in shard.spans
            ]
            return MatrixRows(view, torch.cat([part.addresses for part in each]), columns)
        [(begin, count)] = shard.spans
        return rows_from(view, address + 2 * begin, rows, count, stride_bytes)

    def _forget_fetched(self, stored: StoredTensor) -> Future[torch.Tensor] | None:
        if stored.name not in self._fetched:
            return None
        self._ahead_bytes -= _read_bytes(stored, self.shard_of(stored.name))
        return self._fetched.pop(stored.name)

    def _note_read(self, stored: StoredTensor) -> None:
        self.used.add(stored.name)
        self._read_bytes += _read_bytes(stored, self.shard_of(stored.name))
        if self._on_progress is not None:
            self._on_progress(self._read_bytes, self._total_bytes)

    def _read(self, stored: StoredTensor, shard: Shard | None) -> torch.Tensor:
        """Return the tensor's values. Called on any thread. Raises CheckpointError if a value is not finite and must
        be.
        """
        tensor = self._files.read(stored, shard)
        # On the thread that read it, while the bytes are in its cache.
        if not is_finite(tensor, stored.dtype):
            if not self._allow_nonfinite:
                raise CheckpointError(
                    f"{stored.file}: tensor {stored.name} has NaN or infinite values; "
                    "debug.allow_nonfinite serves it nevertheless",
                    param="model",
                )
            self.nonfinite.append(stored.name)
        return tensor

    def _fetch_ahead(self) -> None:
        """Fetch at least one tensor ahead, and more while fewer than ``_AHEAD_BYTES`` are fetched."""
        while self._next and (not self._fetched or self._ahead_bytes < _AHEAD_BYTES):
            name = self._next.popleft()
            if name in self._fetched:
                continue
            stored = self.checkpoint.tensors[name]
            shard = self.shard_of(name)
            self._ahead_bytes += _read_bytes(stored, shard)
            if self._packs(stored):
                if shard is None and (self._cache is None or not self._cache.is_mapped):
                    # Nothing is copied: the system reads ahead the pages that the kernels will pack out of the map.
                    self._files.will_need(stored)
                self._fetched[name] = None
            elif stored.stored_bytes < _THREAD_BYTES_MIN:
                self._files.will_need(stored)
                self._fetched[name] = None
            else:
                self._fetched[name] = self._threads.submit(self._read, stored, shard)


def _read_bytes(stored: StoredTensor, shard: Shard | None) -> int:
    return stored.stored_bytes if shard is None else shard.read_bytes(stored.stored_bytes)
