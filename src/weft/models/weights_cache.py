"""Packed weights in a file, mapped at the next start (``--weights-cache DIR``).

    DIR/KEY.weft    | field | field | ...  | JSON: key, matrices, places, checksums | length | magic |
                      each at a multiple of 4 KiB

    first start     matrices are packed from the checkpoint, and written to KEY.PID.tmp as well; the file
                    takes its name when all of it is written
    later starts    the file is mapped: nothing is packed, and replicas share the pages

Large matrices of bfloat16 in 12 bits are in it: nearly all bytes of a model. The key is a digest of the
weight files, of the form and of the kernels' interface.

A damaged or foreign file is made again. Checksums are sums of the 64-bit words of each MiB. They see cut,
zeroed and changed bytes, at the speed of memory. They do not protect against a user with write access to
the directory. A file that cannot be written costs a warning, never the start.

Mapped pages are 4 KiB, so one stream may decode somewhat slower than from memory in pages of 2 MiB.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from weft.errors import ConfigError
from weft.files import finish
from weft.tensor.weights.tiles import TwelveBitWeight

_MAGIC = b"weft-weights-1\n\0"
_LENGTH_BYTES = 8
_TAIL_BYTES = _LENGTH_BYTES + len(_MAGIC)
_ALIGNMENT = 4096
_SUM_WORDS = (1 << 20) // 8
_DTYPES = {"units": torch.uint8, "highs": torch.uint8, "odd": torch.int64}
"""Fields of a 12-bit weight, and their dtypes."""
_log = logging.getLogger("weft")


class WeightsCache:
    """Cache around the reading of one checkpoint in one form, a context manager: ``key`` names both. Raises
    ConfigError for a directory that cannot be made.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self._key = key
        self._path = directory / f"{key}.weft"
        self._temporary = directory / f"{key}.{os.getpid()}.tmp"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--weights-cache is {directory}: {error.strerror}", param="--weights-cache") from None
        self._weights: dict[str, TwelveBitWeight] = {}
        self._entries: dict[str, Any] = {}
        self._file: BinaryIO | None = None
        self.is_mapped = False
        """Whether a valid file is mapped."""

    def __enter__(self) -> Self:
        try:
            self._weights = _mapped(self._path, self._key)
            self.is_mapped = True
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("--weights-cache: %s is made again: %s", self._path, error)
        if not self.is_mapped:
            try:
                self._file = self._temporary.open("wb")
            except OSError as error:
                self._give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the file its name, if the weights were read without an error."""
        self._weights.clear()
        if self._file is None:
            return
        try:
            if kind is None and self._entries:
                text = json.dumps({"key": self._key, "matrices": self._entries}).encode()
                self._file.write(text + len(text).to_bytes(_LENGTH_BYTES, "little") + _MAGIC)
                finish(self._file)
                # Complete or absent: a reader never sees half a file.
                self._temporary.rename(self._path)
        except OSError as failed:
            self._give_up(failed)
        finally:
            if self._file is not None:
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def get(self, name: str) -> TwelveBitWeight | None:
        """Return the matrix that was put under ``name``."""
        return self._weights.get(name)

    def put(self, name: str, weight: TwelveBitWeight) -> None:
        """Write ``weight`` too, unless the file is mapped or cannot be written."""
        if self._file is None:
            return
        entry: dict[str, Any] = {"rows": weight.rows, "columns": weight.columns}
        try:
            for field in _DTYPES:
                tensor = getattr(weight, field)
                self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
                entry[field] = {"begin": self._file.tell(), "shape": list(tensor.shape), "sums": _sums(tensor)}
                self._file.write(memoryview(tensor.numpy()).cast("B"))
            self._entries[name] = entry
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _log.warning("--weights-cache: %s is not written: %s", self._path, error)
        if self._file is not None:
            self._file.close()
            self._file = None
        self._temporary.unlink(missing_ok=True)


def _mapped(path: Path, key: str) -> dict[str, TwelveBitWeight]:
    """Return the matrices of a file over its mapping. Raises FileNotFoundError, or ValueError, KeyError or TypeError
    for a file that is incomplete or not this one.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _TAIL_BYTES:
            raise ValueError(f"it has {size} bytes")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if memory[size - len(_MAGIC) :] != _MAGIC:
        raise ValueError("it is not a cache of weights, or was cut off")
    length = int.from_bytes(memory[size - _TAIL_BYTES : size - len(_MAGIC)], "little")
    header = json.loads(memory[max(0, size - _TAIL_BYTES - length) : size - _TAIL_BYTES])
    if header["key"] != key:
        raise ValueError("it belongs to other weights")
    weights = {}
    for name, entry in header["matrices"].items():
        fields = {field: _field(memory, entry[field], dtype) for field, dtype in _DTYPES.items()}
        for field, tensor in fields.items():
            # At the speed of memory; a sha256 would cost seconds at each start.
            if _sums(tensor) != entry[field]["sums"]:
                raise ValueError(f"the checksum of {field} of {name} is wrong")
        weights[name] = TwelveBitWeight(**fields, rows=entry["rows"], columns=entry["columns"])
    return weights


def _field(memory: mmap.mmap, place: Any, dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(place["shape"]))
    numbers = np.frombuffer(memory, np.uint8, count * dtype.itemsize, place["begin"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the mapping is read-only, and so are weights
        return torch.from_numpy(numbers).view(dtype).view(place["shape"])


def _sums(tensor: torch.Tensor) -> list[int]:
    """Return the sums of the 64-bit words of each MiB, and of the remaining bytes after the last complete one."""
    numbers = tensor.reshape(-1).view(torch.uint8)
    whole = numbers.numel() // (8 * _SUM_WORDS) * 8 * _SUM_WORDS
    sums: list[int] = numbers[:whole].view(torch.int64).view(-1, _SUM_WORDS).sum(1).tolist()
    return [*sums, int(numbers[whole:].sum(dtype=torch.int64))]
