"""Bytes of stored tensors, from memory-mapped files, and checks of their values.

A file is mapped at its first read and read by several threads. A read is a copy out of the map.

Two checks look at values. *Finite*: NaN or infinity in a float tensor makes every answer of the model nonsense, and a
recurrent state never recovers. A sum is finite only if all terms are, so one pass over the bytes that were just copied
suffices; if the sum itself overflows, each value is looked at. *Copies*: some families store one block several times.
Only the first is served, so the others must be equal to it.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from weft.errors import CheckpointError
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.safetensors_header import StoredTensor
from weft.models.sharding import Shard

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}

_FP8_NAN = {"F8_E4M3": (0x7F, 0x7F), "F8_E8M0": (0xFF, 0xFF)}
"""Format -> (mask, value) of the codes of NaN."""
_NAMES_SHOWN = 4
_ROUNDED = 2**-7
"""Relative error of a number stored in bfloat16."""
_COMPARED_BYTES = 1 << 20
"""Bytes compared at a time: large tensors that differ do so in the first bytes."""


class MappedFiles:
    """Files mapped at their first read; used by several threads."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def read(self, stored: StoredTensor, shard: Shard | None = None) -> torch.Tensor:
        """Return a copy of the tensor's bytes, or of those that ``shard`` names."""
        dtype = TORCH_DTYPES.get(stored.dtype)
        if dtype is None:  # blocks, which their form cuts
            return torch.from_numpy(self.view(stored).copy())
        if stored.transposed:
            turned = None if shard is None or shard.absent else replace(shard, dim=1 - shard.dim)
            turned = shard if turned is None else turned
            stored = replace(stored, shape=stored.shape_in_file, transposed=False)
            return self.read(stored, turned).T.contiguous()
        if shard is not None:
            return self._read_shard(stored, shard, dtype)
        if stored.stored_bytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        return torch.from_numpy(self.view(stored).copy()).view(dtype).view(stored.shape)

    def _read_shard(self, stored: StoredTensor, shard: Shard, dtype: torch.dtype) -> torch.Tensor:
        shape = shard.of_rank(stored.shape)
        if shard.absent:
            return torch.zeros(shape, dtype=dtype)
        lines = self.view(stored).reshape(math.prod(shape[: shard.dim]), shard.total, -1)
        own = np.concatenate([lines[:, begin : begin + count] for begin, count in shard.spans], axis=1)
        return torch.from_numpy(own.reshape(-1)).view(dtype).view(shape)

    def view(self, stored: StoredTensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the tensor's bytes in the map, valid until ``close``."""
        return np.frombuffer(self._map(stored.file), np.uint8, stored.stored_bytes, stored.begin)

    def will_need(self, stored: StoredTensor) -> None:
        """Ask the system to read the tensor from disk, without waiting."""
        if not stored.stored_bytes:
            return
        begin = stored.begin - stored.begin % mmap.ALLOCATIONGRANULARITY
        self._map(stored.file).madvise(mmap.MADV_WILLNEED, begin, stored.begin + stored.stored_bytes - begin)

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            if path not in self._maps:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[path]

    def close(self) -> None:
        self._maps.clear()  # each map goes with the last tensor over it


def is_finite(tensor: torch.Tensor, stored_dtype: str) -> bool:
    """Return whether no value is NaN or infinite; True for every tensor of integers."""
    if stored_dtype in _FP8_NAN:
        mask, value = _FP8_NAN[stored_dtype]
        return not bool(((tensor.view(torch.uint8) & mask) == value).any())
    if not tensor.is_floating_point():
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def same_values(first: StoredTensor | None, second: StoredTensor) -> bool:
    """Return whether both are stored in the same dtype, shape and bytes."""
    if first is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with closing(MappedFiles()) as files:
        if not first.stored_bytes:
            return True
        first_view, second_view = files.view(first), files.view(second)
        begins = range(0, first.stored_bytes, _COMPARED_BYTES)
        return all(
            np.array_equal(first_view[b : b + _COMPARED_BYTES], second_view[b : b + _COMPARED_BYTES]) for b in begins
        )


def check_unused(checkpoint: CheckpointFiles, names: Sequence[str]) -> None:
    """Raise CheckpointError for tensors of the model that nothing reads: an adapter that was not merged, layers that
    config.json does not count. Quantisation tools write biases of zeros, which change nothing.
    """
    with closing(MappedFiles()) as files:
        left = [
            name
            for name in names
            if checkpoint.of_model(name)
            and not (name.endswith(".bias") and not files.view(checkpoint.tensors[name]).any())
        ]
    if left:
        more = f" and {len(left) - _NAMES_SHOWN} more" if len(left) > _NAMES_SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.source}: by config.json the model has no {', '.join(left[:_NAMES_SHOWN])}{more}; "
            "without them its answers are wrong",
            param="model",
        )


def check_derived(checkpoint: CheckpointFiles, derived: Mapping[str, tuple[torch.Tensor, str]]) -> None:
    """Raise CheckpointError naming a tensor whose values are not those that config.json leads to."""
    with closing(MappedFiles()) as files:
        for name, (expected, keys) in derived.items():
            values, wanted = files.read(checkpoint.tensors[name]).flatten(), expected.flatten().cpu()
            is_whole = not wanted.is_floating_point()
            same = torch.equal if is_whole else partial(torch.allclose, rtol=_ROUNDED)
            if values.shape != wanted.shape or not same(values.to(wanted.dtype), wanted):
                raise CheckpointError(
                    f"{checkpoint.source}: {name} has other values than config.json leads to ({keys}): the file and "
                    "its configuration are of different models",
                    param="model",
                )


def check_copies(checkpoint: CheckpointFiles, copies: Sequence[tuple[str, str]]) -> None:
    """Raise CheckpointError naming the pairs (original, copy) whose bytes differ."""
    differ = [
        f"{copy} and {original}"
        for original, copy in copies
        if not same_values(checkpoint.tensors.get(original), checkpoint.tensors[copy])
    ]
    if differ:
        more = f" and {len(differ) - _NAMES_SHOWN} more pairs" if len(differ) > _NAMES_SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.source}: layers share one block, but its stored copies differ: "
            f"{', '.join(differ[:_NAMES_SHOWN])}{more}",
            param="model",
        )
