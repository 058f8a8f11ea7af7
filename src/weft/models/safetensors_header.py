"""Header of a ``.safetensors`` file, read and checked without touching a single weight.

    | u64 n | n bytes of JSON: {name: {dtype, shape, data_offsets: [begin, end]}, ...} | data ... |

All of it is checked before any weight is read: a checkpoint of 100 GB with one bad tensor fails at once and by name.
Format: the safetensors specification, which forbids tensors that overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import CheckpointError
from weft.files import INDEX_BYTES_MAX, inside, parse_json, read_json

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
}
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of one file. ``dtype`` is the format's own name ("BF16"); ``begin``: its first byte in the
    file. ``transposed``: a matrix whose bytes are those of [columns, rows]; ``shape`` is [rows, columns]."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int
    begin: int = 0
    transposed: bool = field(default=False, kw_only=True)

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape

    def divided(self, names: Sequence[str]) -> list[StoredTensor]:
        """Return equal parts of the rows as tensors of these names; the tensor itself if its rows have no such
        parts."""
        parts = len(names)
        if not parts or not self.shape or self.shape[0] % parts:
            return [self]
        size, shape = self.stored_bytes // parts, (self.shape[0] // parts, *self.shape[1:])
        return [
            replace(self, name=name, shape=shape, stored_bytes=size, begin=self.begin + number * size)
            for number, name in enumerate(names)
        ]

    def turned(self) -> StoredTensor:
        """Return the tensor as the transpose of a stored matrix of values; other tensors as they are. Tools that
        quantise such a matrix turn it first."""
        values = self.dtype in _FLOATS and len(self.shape) == 2
        return replace(self, shape=self.shape[::-1], transposed=True) if values else self


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, by name.

    Raises CheckpointError naming the file, and the tensor if one is to blame. The file may be missing, no safetensors,
    shorter than its tensors, or hold tensors that overlap.
    """
    inside(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        if prefix.startswith(b"version "):
            _not_safetensors(path, "it is a git-lfs pointer: the weights were not downloaded (git lfs pull)")
        if len(prefix) < _LENGTH_BYTES:
            _not_safetensors(path, f"it is truncated at {size} bytes, within the header")
        length = int.from_bytes(prefix, "little")
        if length > _HEADER_BYTES_MAX:
            _not_safetensors(path, f"its header claims {length} bytes")
        if _LENGTH_BYTES + length > size:
            _not_safetensors(path, f"it is truncated at {size} bytes, within the header")
        text = file.read(length)
    try:
        header = parse_json(text, "JSON of the header")
    except CheckpointError as error:
        _not_safetensors(path, f"its header cannot be read ({error.message})")
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {
            name: _tensor(path, name, entry, _LENGTH_BYTES + length, size - _LENGTH_BYTES - length)
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        _not_safetensors(path, f"its header cannot be read ({error})")
    _refuse_overlap(path, tensors)
    return tensors


def weight_files(directory: Path) -> tuple[list[Path], dict[str, str], Path]:
    """Return (files, name -> file as the index lists them, the file to name in errors). An index whose files are all
    there wins over ``model.safetensors``, as in other servers. Raises CheckpointError."""
    single, index = directory / _SINGLE, directory / INDEX
    if single.exists() and not _is_complete(index):
        return [single], {}, single
    if index.exists():
        file_of = _listed(index)
        files = [directory / name for name in sorted(set(file_of.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: the file is missing; {INDEX} lists it", param="model")
        return files, file_of, index
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files, {}, files[0]
    if any(directory.glob("*.bin")):
        raise CheckpointError(
            f"{directory}: has weights in .bin files only; weft reads safetensors, which "
            f"transformers' save_pretrained writes",
            param="model",
        )
    raise CheckpointError(f"{directory}: no {_SINGLE}, {INDEX} or other .safetensors file", param="model")


def _listed(index: Path) -> dict[str, str]:
    listed = read_json(index, bytes_max=INDEX_BYTES_MAX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is missing", param="model")
    return {name: Path(str(file)).name for name, file in listed.items()}


def _is_complete(index: Path) -> bool:
    """Return whether all files that the index lists are there. One that tools left when they wrote one file is not."""
    try:
        return all((index.parent / name).is_file() for name in set(_listed(index).values()))
    except CheckpointError:
        return False


def unread_line(directory: Path) -> str | None:
    """Return a line about a ``model.safetensors`` that is not read because of the index next to it; None without."""
    single = directory / _SINGLE
    if not single.exists() or single in weight_files(directory)[0]:
        return None
    return f"{_SINGLE} is not read: the files that {INDEX} lists are all there."


def stored_names(directory: Path) -> set[str]:
    """Return the names of the tensors of a checkpoint in ``directory``, of which only headers and index are read;
    empty if there are none. Raises CheckpointError.
    """
    index = directory / INDEX
    if index.exists():
        listed = read_json(index, bytes_max=INDEX_BYTES_MAX).get("weight_map")
        return set(listed) if isinstance(listed, dict) else set()
    return {name for file in directory.glob("*.safetensors") for name in read_header(file)}


def all_stored(directory: Path) -> list[StoredTensor]:
    """Return the tensors of a checkpoint in ``directory``; empty if files of it are missing. Raises CheckpointError."""
    try:
        files, _, _ = weight_files(directory)
    except CheckpointError:
        return []
    return [stored for file in files for stored in read_header(file).values()]


def _refuse_overlap(path: Path, tensors: dict[str, StoredTensor]) -> None:
    filled = sorted((tensor for tensor in tensors.values() if tensor.stored_bytes), key=lambda tensor: tensor.begin)
    for tensor, following in pairwise(filled):
        if tensor.begin + tensor.stored_bytes > following.begin:
            raise CheckpointError(f"{path}: {tensor.name} and {following.name} overlap", param="model")


def _tensor(path: Path, name: str, entry: dict[str, Any], data_begin: int, data_bytes: int) -> StoredTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    if any(size < 0 for size in shape):
        raise CheckpointError(f"{path}: {name} has shape {list(shape)}", param="model")
    if not 0 <= begin <= end:
        raise CheckpointError(f"{path}: {name} has offsets {begin} to {end}", param="model")
    if end > data_bytes:
        raise CheckpointError(
            f"{path}: the file is truncated: {name} ends at byte {end} of the data and the file holds {data_bytes}",
            param="model",
        )
    item = _DTYPE_BYTES.get(entry["dtype"])
    if item is not None and math.prod(shape) * item != end - begin:
        raise CheckpointError(
            f"{path}: {name} is {entry['dtype']} {list(shape)} but {end - begin} bytes are stored", param="model"
        )
    return StoredTensor(path, name, str(entry["dtype"]), shape, end - begin, data_begin + begin)


def _not_safetensors(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: not a usable safetensors file: {reason}", param="model")
