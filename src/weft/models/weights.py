"""A checkpoint directory as a set of named tensors, asked for twice with the same words.

    Checkpoint.open(dir)   config.json, the safetensors files, their headers; nothing else is read
        |
        +-- TensorCheck    answers every request with a meta tensor and notes what is missing or mis-shaped
        +-- TensorReader   answers the same requests with weights, from memory-mapped files

A model states what it needs exactly once, as the code that builds it from a ``TensorSource``. Running that
code against the check costs milliseconds and finds *all* faults before a byte of weights is read; running
it again against the reader builds the model. There is no second list of names to keep in step.

Reading copies: from the map straight into the tensor the model keeps, converting dtype and fusing
(``rows``) on the way, so that the peak is one copy of the weights plus page cache. Keeping views of the map
was rejected: the weights would be evicted under memory pressure, unaligned for the CPU's matrix kernels,
and the process would die of SIGBUS when someone overwrites the file.

Tensor names: a checkpoint may keep the language model at ``model.``, inside a multimodal wrapper at
``model.language_model.`` or ``language_model.model.``, or bare. ``prefix`` is found from the embedding.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open

from weft.errors import CheckpointError
from weft.models.safetensors_header import StoredTensor, read_header

OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) as weights are read."""

_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")
_EMBEDDING = "embed_tokens.weight"
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_UNUSED_KNOWN = ("mtp.", "model.mtp.", "visual.", "model.visual.", "vision_tower.", "model.vision_tower.")
_UNUSED_KNOWN_ENDS = ("rotary_emb.inv_freq", "lm_head.weight")
_PROBLEMS_SHOWN = 8
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``tensors`` by name over all files; ``prefix`` goes before every name of the language model."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    prefix: str
    source: Path
    """The file that lists the tensors (the index, or the one weights file): errors point at it."""

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Raises CheckpointError naming the file that is missing, malformed or truncated."""
        config = read_json(directory / "config.json")
        files, listed, source = _weight_files(directory)
        headers = {file.name: read_header(file) for file in files}
        tensors: dict[str, StoredTensor] = {}
        for header in headers.values():
            tensors.update(header)
        for name, file_name in listed.items():
            if name not in headers[file_name]:
                raise CheckpointError(f"{source}: places {name} in {file_name}, which does not hold it",
                                      param="model")
            tensors[name] = headers[file_name][name]
        prefix = next((p for p in _PREFIXES if p + _EMBEDDING in tensors), "model.")
        return cls(directory, config, tensors, prefix, source)

    @property
    def stored_dtype(self) -> str:
        """Format name of the embedding's dtype ("F32" when the embedding is missing, which fails later)."""
        embedding = self.tensors.get(self.prefix + _EMBEDDING)
        return embedding.dtype if embedding is not None else "F32"

    def unused(self, used: set[str]) -> list[str]:
        """Names that no part of the model asked for, without those known to be of no use here."""
        return sorted(name for name in self.tensors if name not in used
                      and not name.startswith(_UNUSED_KNOWN) and not name.endswith(_UNUSED_KNOWN_ENDS))


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError naming the file when it is missing or is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing", param="model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}", param="model") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed", param="model")
    return value


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str], Path]:
    """(files, name -> file as the index lists them, the file to name in errors)."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return [single], {}, single
    if index.exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(f"{index}: weight_map is missing", param="model")
        files = [directory / Path(str(name)).name for name in sorted(set(listed.values()))]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{file}: the file is missing; {_INDEX} lists it", param="model")
        return files, {str(name): Path(str(file)).name for name, file in listed.items()}, index
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files, {}, files[0]
    if any(directory.glob("*.bin")):
        raise CheckpointError(f"{directory}: has weights in .bin files only; weft reads safetensors, which "
                              f"transformers' save_pretrained writes", param="model")
    raise CheckpointError(f"{directory}: no {_SINGLE}, {_INDEX} or other .safetensors file", param="model")


class TensorSource(ABC):
    """What model code builds itself from. Names are relative to the language model ("layers.0.…").

    ``dtype`` is the model's; a read may ask for another one (float32 for decay rates).
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.used: set[str] = set()
        self.held_bytes = 0
        """Bytes of all tensors handed out: what the model takes in memory."""

    def has(self, name: str) -> bool:
        return self.checkpoint.prefix + name in self.checkpoint.tensors

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor of exactly ``shape``."""
        out = self._empty(shape, dtype)
        self._fill(out, self.checkpoint.prefix + name)
        return out

    def rows(self, parts: Sequence[tuple[str, int]], *columns: int) -> torch.Tensor:
        """Several tensors [rows_i, *columns] one below the other, as one [sum of rows, *columns]: projections
        of the same input become one matrix product."""
        out = self._empty((sum(count for _, count in parts), *columns), None)
        first = 0
        for name, count in parts:
            self._fill(out[first:first + count], self.checkpoint.prefix + name)
            first += count
        return out

    def stack(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> torch.Tensor:
        """[len(names), len(names[0]) * rows, columns]: for each entry its tensors [rows, columns] one below
        the other. Experts stored one by one become one tensor."""
        out = self._empty((len(names), len(names[0]) * rows, columns), None)
        for index, group in enumerate(names):
            for part, name in enumerate(group):
                self._fill(out[index, part * rows:(part + 1) * rows], self.checkpoint.prefix + name)
        return out

    def head(self, *shape: int) -> torch.Tensor:
        """The output projection, which wrappers keep beside the language model, not in it."""
        name = next((name for name in _HEADS if name in self.checkpoint.tensors), _HEADS[0])
        out = self._empty(shape, None)
        self._fill(out, name)
        return out

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        self.held_bytes += out.numel() * out.itemsize
        return out

    @property
    @abstractmethod
    def _device(self) -> str: ...

    @abstractmethod
    def _fill(self, out: torch.Tensor, name: str) -> None: ...


class TensorCheck(TensorSource):
    """Notes every fault; ``raise_problems`` then reports them together."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, dtype)
        self.problems: list[str] = []
        self.read_bytes = 0

    @property
    def _device(self) -> str:
        return "meta"

    def _fill(self, out: torch.Tensor, name: str) -> None:
        stored = self.checkpoint.tensors.get(name)
        self.used.add(name)
        if stored is None:
            self.problems.append(f"{self.checkpoint.source}: tensor {name} of shape {list(out.shape)} "
                                 f"is missing")
        elif stored.shape != tuple(out.shape):
            self.problems.append(f"{stored.file}: tensor {name} has shape {list(stored.shape)}; "
                                 f"config.json makes it {list(out.shape)}")
        elif not stored.readable:
            self.problems.append(f"{stored.file}: tensor {name} is stored as {stored.dtype}; weft reads F32, "
                                 f"BF16, F16 and F64 (quantised checkpoints are not served)")
        else:
            self.read_bytes += stored.stored_bytes

    def raise_problems(self) -> None:
        """Raises CheckpointError with the faults found (the first few in full)."""
        if not self.problems:
            return
        shown = "; ".join(self.problems[:_PROBLEMS_SHOWN])
        more = len(self.problems) - _PROBLEMS_SHOWN
        raise CheckpointError(shown + (f"; and {more} more like these" if more > 0 else ""), param="model")


class TensorReader(TensorSource):
    """Reads weights; a context manager, because it holds the files mapped."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, *, total_bytes: int,
                 on_progress: OnProgress | None) -> None:
        super().__init__(checkpoint, dtype)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._on_progress = on_progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def _device(self) -> str:
        return "cpu"

    def _fill(self, out: torch.Tensor, name: str) -> None:
        stored = self.checkpoint.tensors[name]
        if stored.file not in self._files:
            opened = safe_open(stored.file, framework="pt", device="cpu")
            self._files[stored.file] = self._stack.enter_context(opened)
        out.copy_(self._files[stored.file].get_tensor(name))
        self.used.add(name)
        self._read_bytes += stored.stored_bytes
        if self._on_progress is not None:
            self._on_progress(self._read_bytes, self._total_bytes)


def unused_warning(names: Sequence[str]) -> str | None:
    """One line about tensors that nothing asked for; None when there are none."""
    if not names:
        return None
    more = len(names) - _NAMES_SHOWN
    return (f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'} not used: "
            f"{', '.join(names[:_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}")
