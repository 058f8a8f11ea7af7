"""A checkpoint directory as a set of named tensors, asked for twice with the same words.

    Checkpoint.open(dir)   config.json, the safetensors files, their headers; nothing else is read
        |
        +-- TensorCheck    answers every request with a meta tensor and notes what is missing or mis-shaped
        +-- TensorReader   answers the same requests with weights (``reader``)

A model states what it needs exactly once, as the code that builds it from a ``TensorSource``. Running that
code against the check costs milliseconds and finds *all* faults before a byte of weights is read; running
it again against the reader builds the model. There is no second list of names to keep in step.

``tensor``, ``rows``, ``stack`` give values in the model's dtype, whatever they are stored in (``forms``).
``linear``, ``experts`` and ``head`` give what is multiplied with: in the form that ``runtime_form`` decides.

Tensor names: a checkpoint may keep the language model at ``model.``, inside a multimodal wrapper at
``model.language_model.`` or ``language_model.model.``, at ``backbone.`` (Mamba, Nemotron-H), or bare.
``prefix`` is found from the embedding.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.errors import CheckpointError
from weft.models.blocks.linear import JoinedWeight, Linear, PlainWeight
from weft.models.forms import stored_form
from weft.models.runtime_form import RuntimeForm
from weft.models.safetensors_header import StoredTensor, read_header
from weft.models.skipped import SKIPPED_PREFIXES
from weft.tensor.weights.quantized import Codes, QuantizedWeight, stacked
from weft.tensor.weights.twelve_bit import InTiles, TwelveBitWeight

OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) as weights are read."""

_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "backbone.",
             "language_model.backbone.", "")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
DRAFT_PREFIXES = ("mtp.", "model.mtp.")
"""Heads that predict further tokens (multi-token prediction)."""
_UNUSED_KNOWN = (*DRAFT_PREFIXES, *SKIPPED_PREFIXES)
_UNUSED_KNOWN_ENDS = ("rotary_emb.inv_freq", "lm_head.weight")
TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
                "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
                "F8_E8M0": torch.float8_e8m0fnu}
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
        prefix = next((p for p in _PREFIXES for name in _EMBEDDINGS if p + name in tensors), "model.")
        return cls(directory, config, tensors, prefix, source)

    @property
    def stored_dtype(self) -> str:
        """Format name of the embedding's dtype ("F32" when the embedding is missing, which fails later)."""
        found = (self.tensors.get(self.prefix + name) for name in _EMBEDDINGS)
        return next((embedding.dtype for embedding in found if embedding is not None), "F32")

    def unused(self, used: set[str]) -> list[str]:
        """Names that no part of the model asked for, without those known to be of no use here."""
        known_ends = (*_UNUSED_KNOWN_ENDS, *stored_form(self.config, self.tensors).left_ends)
        return sorted(name for name in self.tensors if name not in used
                      and not name.startswith(_UNUSED_KNOWN) and not name.endswith(known_ends))


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


Part = tuple[str, int] | tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]
"""(name, rows) of a matrix, or with the order that its rows are put into: a function of [rows, anything]."""
FLOATS = ("F32", "BF16", "F16", "F64")


class TensorSource(ABC):
    """What model code builds itself from. Names are relative to the language model ("layers.0.…").

    ``dtype`` is the model's; a read may ask for another one (float32 for decay rates).
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype,
                 runtime: RuntimeForm | None = None) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.runtime = runtime or RuntimeForm()
        self.form = stored_form(checkpoint.config, checkpoint.tensors)
        self.used: set[str] = set()
        self._bytes_by_form: Counter[str] = Counter()
        self.held_bytes = 0
        """Bytes of all that was handed out: what the model takes in memory."""

    def has(self, name: str) -> bool:
        return self._known(self.checkpoint.prefix + name)

    def stored_rows(self, name: str) -> int:
        """First dim of a tensor as it is stored, 0 where there is none."""
        stored = self.checkpoint.tensors.get(self.checkpoint.prefix + name)
        return stored.shape[0] if stored is not None and stored.shape else 0

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor of exactly ``shape``."""
        out = self._empty(shape, dtype)
        self._fill(out, self.checkpoint.prefix + name)
        return self._held(out)

    def rows(self, parts: Sequence[tuple[str, int]], *columns: int) -> torch.Tensor:
        """Several tensors [rows_i, *columns] one below the other, as one [sum of rows, *columns]."""
        return self._held(self._rows(parts, columns))

    def linear(self, parts: Sequence[Part], columns: int, bias: torch.Tensor | None = None) -> Linear:
        """Projections of the same input as one product: matrices [rows_i, columns] one below the other.

        Neighbours that are stored in the same form become one matrix; where forms differ, each run of
        neighbours is one."""
        made: list[PlainWeight] = []
        for kept, run in _runs([(self._kept(part[0], columns), part) for part in parts]):
            if kept is None:
                dense = self._rows([(part[0], part[1]) for part in run], (columns,))
                first = 0
                for part in run:
                    if len(part) == 3:
                        dense[first:first + part[1]] = part[2](dense[first:first + part[1]])
                    first += part[1]
                made.append(self.runtime.of_values(dense))
            else:
                made.append(self.runtime.of_codes(_joined([self._codes(part, columns) for part in run])))
        return self._linear(made, bias)

    def table(self, name: str, rows: int, columns: int, *, is_head: bool) -> torch.Tensor | InTiles:
        """The embedding. ``is_head``: logits are made with it as well."""
        table = self.tensor(name, rows, columns)
        return self.runtime.of_table(table) if is_head else table

    def head(self, rows: int, columns: int, tied: torch.Tensor | InTiles | None = None) -> Linear:
        """The output projection, which wrappers keep beside the language model, not in it. ``tied``: the
        embedding, where that is the head as well."""
        if tied is not None:
            if isinstance(tied, InTiles) or self.runtime.quantize == "none":
                return Linear(tied)
            return self._linear([self.runtime.of_values(tied, head=True)], None)
        name = next((name for name in _HEADS if self._known(name)), _HEADS[0])
        if self.form.holds(name) and self.form.kept(name, columns) is not None:
            codes = self.form.read(self._stored, name, (rows, columns))
            assert isinstance(codes, Codes)
            return self._linear([self.runtime.of_codes(codes)], None)
        out = self._empty((rows, columns), None)
        self._fill(out, name)
        return self._linear([self.runtime.of_values(out, head=True)], None)

    def experts(self, names: Sequence[Sequence[str]], rows: int,
                columns: int) -> torch.Tensor | QuantizedWeight:
        """[len(names), len(names[0]) * rows, columns]: for each entry its matrices [rows, columns] one below
        the other. Experts stored one by one become one tensor."""
        kinds = {self._kept(name, columns) for group in names for name in group}
        if kinds == {None} and self.runtime.quantize == "none":
            return self._held(self._stack(names, rows, columns))
        each = []
        for group in names:
            if None not in kinds and len(kinds) == 1:
                each.append(self.runtime.of_codes(_joined([self._codes((name, rows), columns)
                                                           for name in group])))
            elif self.runtime.quantize == "none":
                return self._held(self._stack(names, rows, columns))
            else:
                each.append(self.runtime.rounded(self._rows([(name, rows) for name in group], (columns,))))
        return self._held_codes(stacked(each))

    def all_experts(self, name: str, count: int, rows: int, columns: int) -> torch.Tensor | QuantizedWeight:
        """The same of one stored tensor [count, rows, columns]."""
        out = self._empty((count, rows, columns), None)
        self._fill(out, self.checkpoint.prefix + name)
        if self.runtime.quantize == "none":
            return self._held(out)
        return self._held_codes(stacked([self.runtime.rounded(one) for one in out]))

    def leave(self, name: str) -> None:
        """What lies under ``name`` is a copy of what was read elsewhere: it is left, without a warning."""
        self.used.update(stored for stored in self.checkpoint.tensors
                         if stored.startswith(f"{self.checkpoint.prefix}{name}."))

    def form_in_words(self) -> str:
        """What the matrices are now, most bytes first: ``int4, int8, bfloat16``."""
        return ", ".join(sorted(self._bytes_by_form, key=lambda form: -self._bytes_by_form[form]))

    def _count(self, weight: PlainWeight) -> None:
        size = held_bytes(weight)
        form = (weight.form if isinstance(weight, QuantizedWeight | TwelveBitWeight)
                else str(weight.dtype).removeprefix("torch."))
        self.held_bytes += size
        self._bytes_by_form[form] += size

    def _known(self, name: str) -> bool:
        return name in self.checkpoint.tensors or self.form.holds(name)

    def _kept(self, name: str, columns: int) -> tuple[int, int] | None:
        """How the codes of a matrix are grouped; None where it is to be had as values."""
        full = self.checkpoint.prefix + name
        return self.form.kept(full, columns) if self.form.holds(full) else None

    def _codes(self, part: Part, columns: int) -> Codes:
        codes = self.form.read(self._stored, self.checkpoint.prefix + part[0], (part[1], columns))
        assert isinstance(codes, Codes)
        return codes.reordered(part[2]) if len(part) == 3 else codes

    def _rows(self, parts: Sequence[tuple[str, int]], columns: tuple[int, ...]) -> torch.Tensor:
        out = self._empty((sum(count for _, count in parts), *columns), None)
        first = 0
        for name, count in parts:
            self._fill(out[first:first + count], self.checkpoint.prefix + name)
            first += count
        return out

    def _stack(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> torch.Tensor:
        out = self._empty((len(names), len(names[0]) * rows, columns), None)
        for index, group in enumerate(names):
            for part, name in enumerate(group):
                self._fill(out[index, part * rows:(part + 1) * rows], self.checkpoint.prefix + name)
        return out

    def _linear(self, weights: Sequence[PlainWeight], bias: torch.Tensor | None) -> Linear:
        for weight in weights:
            self._count(weight)
        if len(weights) == 1:
            quantized = isinstance(weights[0], QuantizedWeight)
            return Linear(weights[0], bias.float() if quantized and bias is not None else bias)
        return Linear(JoinedWeight(tuple(weights)), bias)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor)
        return tensor

    def _held_codes(self, weight: QuantizedWeight) -> QuantizedWeight:
        self._count(weight)
        return weight

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _fill(self, out: torch.Tensor, name: str) -> None:
        """The values of one tensor, in the dtype of ``out``."""
        if not self.form.holds(name):
            out.copy_(self._stored(name, tuple(out.shape), FLOATS))
            return
        read = self.form.read(self._stored, name, tuple(out.shape))
        out.copy_(read.dense() if isinstance(read, Codes) else read)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where everything that is handed out lies."""

    @abstractmethod
    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        """One tensor as it lies in its file: of ``shape``, in one of ``dtypes`` (names of the format)."""


def held_bytes(weight: PlainWeight) -> int:
    return weight.numel() * weight.itemsize if isinstance(weight, torch.Tensor) else weight.held_bytes


def _runs(parts: Sequence[tuple[tuple[int, int] | None, Part]],
          ) -> list[tuple[tuple[int, int] | None, list[Part]]]:
    """Neighbours of the same kind together."""
    runs: list[tuple[tuple[int, int] | None, list[Part]]] = []
    for kept, part in parts:
        if runs and runs[-1][0] == kept:
            runs[-1][1].append(part)
        else:
            runs.append((kept, [part]))
    return runs


def _joined(parts: Sequence[Codes]) -> Codes:
    """One below the other; a middle zero is written out where others have zeros of their own."""
    return parts[0] if len(parts) == 1 else parts[0].above(*parts[1:])


class TensorCheck(TensorSource):
    """Notes every fault; ``raise_problems`` then reports them together. ``order``: what was asked for, in
    order."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype,
                 runtime: RuntimeForm | None = None) -> None:
        super().__init__(checkpoint, dtype, runtime)
        self.problems: list[str] = []
        self.order: list[str] = []
        self.read_bytes = 0

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        stored = self.checkpoint.tensors.get(name)
        self.used.add(name)
        if stored is None:
            self.problems.append(f"{self.checkpoint.source}: tensor {name} of shape {list(shape)} is missing")
        elif stored.dtype not in dtypes:
            self.problems.append(f"{stored.file}: tensor {name} is stored as {stored.dtype}; weft reads "
                                 f"{', '.join(dtypes)} here{_UNNAMED_FORM if dtypes == FLOATS else ''}")
        elif stored.shape != shape:
            self.problems.append(f"{stored.file}: tensor {name} has shape {list(stored.shape)}; "
                                 f"config.json makes it {list(shape)}")
        else:
            self.read_bytes += stored.stored_bytes
            self.order.append(name)
        known = stored.dtype if stored is not None and stored.dtype in dtypes else dtypes[0]
        return torch.empty(shape, dtype=TORCH_DTYPES[known], device="meta")

    def raise_problems(self) -> None:
        """Raises CheckpointError with the faults found (the first few in full)."""
        if not self.problems:
            return
        shown = "; ".join(self.problems[:_PROBLEMS_SHOWN])
        more = len(self.problems) - _PROBLEMS_SHOWN
        raise CheckpointError(shown + (f"; and {more} more like these" if more > 0 else ""), param="model")


_UNNAMED_FORM = " (quantised tensors need a quantization_config in config.json)"


def unused_warning(names: Sequence[str]) -> str | None:
    """One line about tensors that nothing asked for; None when there are none."""
    if not names:
        return None
    more = len(names) - _NAMES_SHOWN
    return (f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'} not used: "
            f"{', '.join(names[:_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}")
