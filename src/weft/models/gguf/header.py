"""Header of a GGUF file, read and checked without touching a weight.

    | GGUF | version | tensors, keys | key: type value ... | name, dims, type, offset ... | 0 ... | data ... |

The header is untrusted. Each length is first compared with the remaining bytes, so a false length costs no more memory
or time than the file's size. Shapes are in the order of torch: the file has the dims in reverse order.

A model may be cut into files NAME-00001-of-00003.gguf. The first one has the keys, each has a part of the
tensors.

Source: ggml's docs/gguf.md. Versions 2 and 3 differ in nothing that is read here.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from weft.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FILES_MAX = 10_000
_DEPTH_MAX = 4
_DIMS_MAX = 4
_ALIGNMENT = 32
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_NUMBERS: dict[int, np.dtype[Any]] = {
    number: np.dtype(form)
    for number, form in {
        0: "u1",
        1: "i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
_STRING, _ARRAY = 8, 9
_MXFP4, _MXFP4_OF_OLLAMA = 39, 4
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in ``file``. ``type``: ggml's name of the form ("Q4_K"). ``begin``: the first byte. ``in_pairs``: the
    two four-bit codes of a byte are neighbouring columns, as in Ollama's first files of GPT-OSS, not columns 16 apart.
    """

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    stored_bytes: int
    begin: int
    in_pairs: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """Header of one file, or of all files of a split model. ``keys``: text, numbers, lists, numpy arrays. ``places``:
    the first byte of the value of each key."""

    path: Path
    keys: dict[str, Any]
    tensors: dict[str, FileTensor]
    places: dict[str, int] = field(default_factory=dict)


def read_header(path: Path, *, keeps_texts: bool = True) -> Header:
    """Return the header of ``path``, and of the files that belong to it. Without ``keeps_texts``, lists of texts (the
    vocabulary) are skipped and come out empty.

    Raises CheckpointError naming the file, and the key or the tensor that is to blame.
    """
    first = _read_file(path, keeps_texts)
    files = split_files(path)
    count = first.keys.get("split.count", 1)
    if isinstance(count, int) and count > 1 and len(files) != count:
        refuse(
            path,
            f"it is one of {count} files, whose names end in -00001-of-{count:05}.gguf; "
            f"{'its name does not' if len(files) == 1 else f'its name says {len(files)}'}",
        )
    headers = [first if file == path else _read_file(file, keeps_texts) for file in files]
    tensors: dict[str, FileTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                refuse(header.path, f"{name} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    return Header(files[0], headers[0].keys, tensors, headers[0].places)


def is_projector(path: Path) -> bool:
    """Return whether the GGUF file ``path`` has only the tower of pictures, which is not read from there. Raises
    CheckpointError.
    """
    return _read_file(path, False).keys.get("general.architecture") == "clip"


def split_files(path: Path) -> list[Path]:
    """Return all files of the model that ``path`` is a file of. Raises CheckpointError if one is missing."""
    match = _SPLIT.search(path.stem)
    if match is None:
        return [path]
    count = int(match.group(2))
    if not 1 <= count <= FILES_MAX:
        refuse(path, f"its name says {count} files")
    stem = path.stem[: match.start()]
    files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: the file is missing; {path.name} is one of {count}", param="model")
    return files


def refuse(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path}: not a usable GGUF file: {reason}", param="model")


def _read_file(path: Path, keeps_texts: bool) -> Header:
    with path.open("rb") as file:
        begin = file.read(24)
        if begin.startswith(b"version "):
            refuse(path, "it is a git-lfs pointer: the weights were not downloaded (git lfs pull)")
        if begin[:4] != MAGIC:
            refuse(path, f"it begins with {begin[:4]!r}, not with {MAGIC!r}")
        if len(begin) < 24:
            refuse(path, f"it is truncated at {len(begin)} bytes, within the header")
        version = int.from_bytes(begin[4:8], "little")
        if version not in VERSIONS:
            reason = "in the other byte order" if version & 0xFFFF == 0 else "written by an old converter"
            refuse(path, f"it has version {version}, {reason}; versions 2 and 3 are read")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _Reader(path, memory, keeps_texts).header()


class _Reader:
    """Reader of ``memory`` from the counts on; each step first checks that the bytes are there."""

    def __init__(self, path: Path, memory: mmap.mmap, keeps_texts: bool) -> None:
        self.path, self.memory, self.keeps_texts = path, memory, keeps_texts
        self.size, self.offset = len(memory), 8
        self.place = "the header"

    def header(self) -> Header:
        tensor_count, key_count = self._number(), self._number()
        keys: dict[str, Any] = {}
        places: dict[str, int] = {}
        for _ in range(self._bounded(key_count, _LEAST_KEY_BYTES, "keys")):
            self.place = "the name of a key"
            name = self._text()
            if name in keys:
                refuse(self.path, f"it has the key {name} twice")
            self.place = f"the key {name}"
            kind = self._number("<I")
            places[name] = self.offset
            keys[name] = self._value(kind)
        alignment = keys.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment % 8:
            refuse(self.path, f"general.alignment is {alignment!r}; it must be a power of 2, at least 8")
        self.place = "the list of tensors"
        entries = [self._tensor() for _ in range(self._bounded(tensor_count, _LEAST_TENSOR_BYTES, "tensors"))]
        data = -(-self.offset // alignment) * alignment
        return Header(self.path, keys, self._checked(entries, data, alignment), places)

    def _checked(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data: int, alignment: int
    ) -> dict[str, FileTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # here: every start imports this module

        tensors: dict[str, FileTensor] = {}
        for name, shape, number, offset in entries:
            if name in tensors:
                refuse(self.path, f"it has the tensor {name} twice")
            try:
                in_pairs = number == _MXFP4_OF_OLLAMA
                kind = GGMLQuantizationType(_MXFP4 if in_pairs else number)
            except ValueError:
                refuse(
                    self.path,
                    f"{name} is of type {number}, which ggml does not have; weft reads "
                    f"{', '.join(form.name for form in GGMLQuantizationType)}",
                )
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                refuse(self.path, f"{name} has shape {list(shape)}; {kind.name} has blocks of {block} columns")
            size = math.prod(shape) // block * block_bytes
            if offset % alignment:
                refuse(self.path, f"{name} begins at byte {offset} of the data, which is not a multiple of {alignment}")
            if data + offset + size > self.size:
                refuse(
                    self.path,
                    f"it is truncated: {name} ends at byte {data + offset + size} and the file has {self.size}",
                )
            tensors[name] = FileTensor(self.path, name, kind.name, shape, size, data + offset, in_pairs)
        filled = sorted((tensor for tensor in tensors.values() if tensor.stored_bytes), key=lambda tensor: tensor.begin)
        for tensor, following in pairwise(filled):
            if tensor.begin + tensor.stored_bytes > following.begin:
                refuse(self.path, f"{tensor.name} and {following.name} overlap")
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return (name, shape, number of its type, offset in the data)."""
        name = self._text()
        dims = self._number("<I")
        if not 1 <= dims <= _DIMS_MAX:
            refuse(self.path, f"{name} has {dims} dims; weft reads 1 to {_DIMS_MAX}")
        shape = tuple(self._number() for _ in range(dims))[::-1]
        if math.prod(shape) > self.size * 16:  # no type has less than half a bit
            refuse(self.path, f"{name} has shape {list(shape)}, which the file cannot hold")
        return name, shape, self._number("<I"), self._number()

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _NUMBERS:
            refuse(self.path, f"{self.place} has a value of type {kind}, which GGUF does not have")
        return self._numbers(_NUMBERS[kind], 1)[0].item()

    def _array(self, depth: int) -> Any:
        kind, count = self._number("<I"), self._number()
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], self._bounded(count, _NUMBERS[kind].itemsize, "values"))
        if depth >= _DEPTH_MAX:
            refuse(self.path, f"{self.place} has arrays in more than {_DEPTH_MAX} levels")
        least = 8 if kind == _STRING else 12
        count = self._bounded(count, least, "values")
        return self._texts(count) if kind == _STRING else [self._value(kind, depth + 1) for _ in range(count)]

    def _numbers(self, form: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
        begin = self._step(form.itemsize * count)
        return np.frombuffer(self.memory[begin : self.offset], form, count)

    def _texts(self, count: int) -> list[str]:
        """Return a list of texts. A vocabulary has hundreds of thousands: this loop takes most of the time of a
        header.
        """
        texts, memory, offset, keeps = [], self.memory, self.offset, self.keeps_texts
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if offset + 8 > self.size:
                self._truncated()
            [length] = unpack(memory, offset)
            offset += 8
            if length > self.size - offset:
                self._truncated()
            if keeps:
                texts.append(memory[offset : offset + length])
            offset += length
        self.offset = offset
        return [text.decode("utf-8", "replace") for text in texts]

    def _text(self) -> str:
        length = self._number()
        begin = self._step(length)
        try:
            return self.memory[begin : self.offset].decode("utf-8")
        except UnicodeDecodeError:
            refuse(self.path, f"{self.place} is not UTF-8 text")

    def _number(self, form: str = "<Q") -> int:
        number: int
        [number] = struct.unpack_from(form, self.memory, self._step(struct.calcsize(form)))
        return number

    def _bounded(self, count: int, least_bytes: int, what: str) -> int:
        if count > (self.size - self.offset) // least_bytes:
            refuse(self.path, f"{self.place} claims {count} {what}, and {self.size - self.offset} bytes are left")
        return count

    def _step(self, count: int) -> int:
        begin = self.offset
        if count > self.size - begin:
            self._truncated()
        self.offset = begin + count
        return begin

    def _truncated(self) -> NoReturn:
        refuse(self.path, f"it is truncated at {self.size} bytes, within {self.place}")
