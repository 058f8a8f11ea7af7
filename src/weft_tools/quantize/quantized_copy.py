"""Copies of a checkpoint in int8 or int4, in the format of compressed-tensors, which other engines read.

    SOURCE/model-00001-of-2.safetensors --tensor by tensor--> OUT.partial/model-00001-of-2.safetensors
                                                              ...            written, synced, renamed
    config.json with quantization_config, tokenizer   ------> OUT.partial    --renamed last--> OUT

    form    format             a matrix becomes
    int8    pack-quantized     x.weight_packed, x.weight_scale for 128 columns, x.weight_shape
    int4    pack-quantized     the same, a scale for 32 columns
    w8a8    int-quantized      x.weight I8, x.weight_scale for a row; inputs are rounded when the model runs

The matrices with which the model's code multiplies are rounded. Rows of beta and decay, steps of Mamba-1, routers,
embeddings and the head are copied. A tensor of all experts is cut into each expert's matrices. The names are those that
quantising tools write (experts.3.gate_proj.weight_packed).

One matrix is in memory at a time. OUT appears completely or not at all, and a complete file of OUT.partial is not
written again. Scales are rounded to the dtype of the model before the codes are chosen, so every engine reads the same
values.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from weft.errors import CheckpointError
from weft.families import named_dtype, text_config
from weft.files import finish, sync, write_whole
from weft.models.blocks.linear import Linear
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.families import build
from weft.models.reader import TensorCheck
from weft.models.safetensors_header import StoredTensor, read_header
from weft.models.score_head import architecture_in
from weft.models.stored_values import MappedFiles, is_finite
from weft.models.weights import Order, Part
from weft.tensor.few_bits import quotient
from weft.tensor.layout import DTYPES
from weft.tensor.ops.moe import ExpertWeights
from weft.tensor.weights.quantized import ZERO_POINT, floats_of
from weft.tensor.weights.rounded import GROUPS, rounded

CopyForm = Literal["int8", "int4", "w8a8"]
FORMATS: dict[CopyForm, str] = {"int8": "pack-quantized", "int4": "pack-quantized", "w8a8": "int-quantized"}
_LEFT = ("in_proj_a", "in_proj_b", "in_proj_ba", "b_proj", "a_proj", "x_proj", "dt_proj")
"""Matrices of beta, decay and steps: docs/quantization.md has the loss if they are rounded."""
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
}
_FLOATS = ("F32", "BF16", "F16")
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pth", ".pt", ".index.json")


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of all experts. ``parts``: names of an expert's matrices, which are stacked by rows
    ("….experts.{}.gate_proj.weight"). ``transposed``, ``order``: of ``TensorSource.all_experts``."""

    parts: tuple[str, ...]
    transposed: bool
    order: Order | None

    def matrices_of(self, expert: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the matrices of ``expert``, which is stored as [rows, columns]."""
        rows = (expert.T if self.transposed else expert).unsqueeze(0)
        return (rows if self.order is None else self.order(rows))[0].chunk(len(self.parts))


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor of the source, or a matrix in it. ``layout``: names, dtypes and shapes of its rounded form; None for a
    tensor that is copied."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class MatrixError:
    """The rounding error of a matrix. ``error``: the root of (sum of squared differences / sum of squares)."""

    name: str
    error: float
    stored_bytes: int
    copied_bytes: int


def write_quantized(
    source: Path, out: Path, form: CopyForm, on_matrix: Callable[[MatrixError], None] = lambda error: None
) -> list[MatrixError]:
    """Write ``source`` in ``form`` to the new directory ``out``. Return the errors of the rounded matrices. Raise
    CheckpointError if ``out`` exists, and if the source is quantised already, cannot be served or has no matrix that
    ``form`` can round."""
    checkpoint = opened(source, out)
    factors = matrices_of(checkpoint)
    if not any(copy.layout for stored in checkpoint.tensors.values() for copy in _copied(stored, factors, form)):
        raise CheckpointError(
            f"{source}: no matrix has columns in whole groups of "
            f"{GROUPS[4 if form == 'int4' else 8]}; --form w8a8 rounds by rows",
            param="--form",
        )
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    begin_partial(partial, checkpoint, form)
    errors: list[MatrixError] = []
    weight_map: dict[str, str] = {}
    left: list[str] = []
    for file in sorted({stored.file for stored in checkpoint.tensors.values()}):
        tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.file == file]
        target = partial / file.name
        report = target.with_suffix(".errors.json")
        if not (target.exists() and report.exists()):
            file_errors = _write_file(tensors, target, factors, form, on_matrix)
            write_json(
                report, [[error.name, error.error, error.stored_bytes, error.copied_bytes] for error in file_errors]
            )
        errors += [MatrixError(*entry) for entry in json.loads(report.read_text())]
        written = read_header(target)
        weight_map |= dict.fromkeys(written, file.name)
        left += [
            tensor.name.removesuffix(".weight")
            for tensor in written.values()
            if len(tensor.shape) == 2 and tensor.name.endswith(".weight") and tensor.dtype != "I8"
        ]
    for other in source.iterdir():
        if other.is_file() and not other.name.endswith(_NOT_COPIED) and other.name != "config.json":
            shutil.copyfile(other, partial / other.name)
    for folder in _folders(source):
        shutil.copytree(source / folder, partial / folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(partial / "config.json", config | {"quantization_config": _settings(form, sorted(left))})
    write_json(partial / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    for report in (*partial.glob("*.errors.json"), partial / _STATE):
        report.unlink()
    sync(partial)
    partial.rename(out)
    sync(out.parent)
    return errors


_STATE = "weft-quantize.json"


def opened(source: Path, out: Path) -> CheckpointFiles:
    """Return the checkpoint ``source``. Raise CheckpointError if it is quantised, and if ``out`` exists."""
    if out.exists():
        raise CheckpointError(f"{out} exists already; name another one", param="OUT")
    checkpoint = CheckpointFiles.open(source)
    settings = checkpoint.config.get("quantization_config") or text_config(checkpoint.config).get("quantization_config")
    if settings:
        raise CheckpointError(
            f"{source}: is quantised already ({settings.get('quant_method')}); name the checkpoint that it was made of",
            param="SOURCE",
        )
    return checkpoint


def begin_partial(partial: Path, checkpoint: CheckpointFiles, form: str) -> None:
    """Delete files of an earlier run with another source or form."""
    sizes = {
        tensor.file.name: [tensor.file.stat().st_size, tensor.file.stat().st_mtime_ns]
        for tensor in checkpoint.tensors.values()
    }
    state, path = {"form": form, "files": sizes}, partial / _STATE
    if not path.exists() or json.loads(path.read_text()) != state:
        shutil.rmtree(partial)
        partial.mkdir()
        write_json(path, state)


def _folders(source: Path) -> list[str]:
    """Return the folders of the modules of a sentence-transformers model."""
    path = source / "modules.json"
    modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    paths = [str(module.get("path", "")) for module in modules]
    return [path for path in paths if Path(path).name == path and (source / path).is_dir() and path]


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of the model's products: names of ``matrices``, and ``stacks`` of experts by name. ``dtype``: of
    scales."""

    matrices: set[str]
    stacks: dict[str, Stack]
    dtype: torch.dtype


class _Recorder(TensorCheck):
    """A tensor source that records which factors the model's code asks for."""

    def __init__(self, checkpoint: CheckpointFiles, dtype: torch.dtype) -> None:
        super().__init__(checkpoint, dtype)
        self.matrices: set[str] = set()
        self.stacks: dict[str, Stack] = {}

    def linear(
        self, parts: Sequence[Part], columns: int, bias: torch.Tensor | None = None, *, finer: bool = False
    ) -> Linear:
        self.matrices |= {self.checkpoint.prefix + part[0] for part in parts}
        return super().linear(parts, columns, bias, finer=finer)

    def experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeights:
        self.matrices |= {self.checkpoint.prefix + name for group in names for name in group}
        return super().experts(names, rows, columns)

    def all_experts(
        self,
        names: Sequence[str],
        count: int,
        rows: int,
        columns: int,
        *,
        transposed: bool = False,
        order: Order | None = None,
        apart: Sequence[str] = (),
    ) -> ExpertWeights:
        if apart:
            prefix = self.checkpoint.prefix
            self.stacks[prefix + names[0]] = Stack(tuple(prefix + name for name in apart), transposed, order)
        return super().all_experts(names, count, rows, columns, transposed=transposed, order=order)


def matrices_of(checkpoint: CheckpointFiles) -> Factors:
    dtype = DTYPES[named_dtype(checkpoint.config) or "bfloat16"]
    recorder = _Recorder(checkpoint, dtype)
    with torch.inference_mode():
        build(architecture_in(checkpoint), recorder)
        recorder.raise_problems()
    return Factors(
        {name for name in recorder.matrices if not any(f".{part}." in name for part in _LEFT)}, recorder.stacks, dtype
    )


def _settings(form: CopyForm, ignored: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": 4 if form == "int4" else 8,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if form == "w8a8" else "group",
        "group_size": None if form == "w8a8" else GROUPS[4 if form == "int4" else 8],
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs if form == "w8a8" else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[form],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _copied(stored: StoredTensor, factors: Factors, form: CopyForm) -> list[_Copied]:
    """Return the parts of ``stored`` that are copied or rounded separately: the matrices of each expert, or the
    complete tensor."""
    stack = factors.stacks.get(stored.name)
    if stack is None:
        layout = _layout(stored.name, stored.shape, form, factors.dtype)
        layout = layout if stored.name in factors.matrices and stored.dtype in _FLOATS else None
        shape = stored.shape_in_file if layout is None else stored.shape
        return [_Copied(stored.name, stored.dtype, shape, stored.stored_bytes, layout)]
    count, rows, columns = stored.shape
    rows, columns = (columns, rows) if stack.transposed else (rows, columns)
    shape = rows // len(stack.parts), columns
    size = stored.stored_bytes // count // len(stack.parts)
    names = [part.format(expert) for expert in range(count) for part in stack.parts]
    return [
        _Copied(
            name,
            stored.dtype,
            shape,
            size,
            _layout(name, shape, form, factors.dtype) if stored.dtype in _FLOATS else None,
        )
        for name in names
    ]


def _layout(name: str, shape: tuple[int, ...], form: CopyForm, dtype: torch.dtype) -> Layout | None:
    """Return the layout of a matrix; None if its columns are not complete groups."""
    if len(shape) != 2:
        return None
    rows, columns = shape
    if form == "w8a8":
        return {name: (torch.int8, (rows, columns)), f"{name}_scale": (dtype, (rows, 1))}
    bits = 4 if form == "int4" else 8
    if columns % GROUPS[bits]:
        return None
    return {
        f"{name}_packed": (torch.int32, (rows, columns * bits // 32)),
        f"{name}_scale": (dtype, (rows, columns // GROUPS[bits])),
        f"{name}_shape": (torch.int64, (2,)),
    }


def _rounded(weight: torch.Tensor, form: CopyForm, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the tensors in the order of ``_layout``, and the values that they represent."""
    rows, columns = weight.shape
    wide = weight.float()
    if form == "w8a8":
        scales = quotient(wide.abs().amax(1, keepdim=True), 127.0).to(dtype)
        codes = _steps(wide, scales.float(), -127, 127)
        return [codes.to(torch.int8), scales], codes * scales.float()
    bits = 4 if form == "int4" else 8
    scales = floats_of(rounded(wide, bits).scales).to(dtype)
    groups = wide.view(rows, -1, GROUPS[bits])
    codes = _steps(groups, scales.float()[..., None], -ZERO_POINT[bits], ZERO_POINT[bits] - 1)
    values = (codes * scales.float()[..., None]).view(rows, columns)
    unsigned = (codes.view(rows, columns) + ZERO_POINT[bits]).to(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return [unsigned.contiguous().view(torch.int32), scales, torch.tensor([rows, columns])], values


def _steps(wide: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return torch.where(scales == 0, 0.0, wide / scales).round().clamp(least, most)


def _write_file(
    tensors: list[StoredTensor],
    target: Path,
    factors: Factors,
    form: CopyForm,
    on_matrix: Callable[[MatrixError], None],
) -> list[MatrixError]:
    copies = {tensor.name: _copied(tensor, factors, form) for tensor in tensors}
    files, errors = MappedFiles(), []
    unfinished = target.with_suffix(".writing")
    with unfinished.open("wb") as file:
        text = _header(copy for own in copies.values() for copy in own)
        file.write(struct.pack("<Q", len(text)) + text)
        for stored in tensors:
            if stored.name not in factors.stacks and copies[stored.name][0].layout is None:
                file.write(files.view(stored).data)
                continue
            parts = zip(copies[stored.name], _values(stored, factors.stacks.get(stored.name), files), strict=True)
            for copy, weight in parts:
                error = _write(file, copy, weight, form, factors.dtype)
                if error is not None:
                    errors.append(error)
                    on_matrix(error)
        finish(file)
    files.close()
    unfinished.rename(target)
    sync(target.parent)
    return errors


def _header(copies: Iterable[_Copied]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for copy in copies:
        parts = (
            [(copy.name, copy.dtype, copy.shape, copy.stored_bytes)]
            if copy.layout is None
            else [
                (name, _NAMES[kind], shape, kind.itemsize * math.prod(shape))
                for name, (kind, shape) in copy.layout.items()
            ]
        )
        for name, dtype, shape, size in parts:
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
            begin += size
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _values(stored: StoredTensor, stack: Stack | None, files: MappedFiles) -> Iterator[torch.Tensor]:
    """Yield all of the tensor, or the matrices of its experts, an expert at a time."""
    experts = 1 if stack is None else stored.shape[0]
    own = stored.stored_bytes // max(experts, 1)
    for expert in range(experts):
        of_expert = replace(
            stored,
            shape=stored.shape if stack is None else stored.shape[1:],
            begin=stored.begin + expert * own,
            stored_bytes=own,
        )
        weight = files.read(of_expert)
        if not is_finite(weight, stored.dtype):
            raise CheckpointError(f"{stored.file}: tensor {stored.name} has NaN or infinite values", param="SOURCE")
        yield from (weight,) if stack is None else stack.matrices_of(weight)


def _write(
    file: BinaryIO, copied: _Copied, weight: torch.Tensor, form: CopyForm, dtype: torch.dtype
) -> MatrixError | None:
    parts, values = [weight], None
    if copied.layout is not None:
        parts, values = _rounded(weight, form, dtype)
    for part in parts:
        file.write(part.contiguous().view(torch.uint8).numpy().data)
    if values is None:
        return None
    wide = weight.float()
    norm = float(wide.norm())
    return MatrixError(
        copied.name,
        float((values - wide).norm()) / norm if norm else 0.0,
        copied.stored_bytes,
        sum(part.numel() * part.itemsize for part in parts),
    )


def write_json(path: Path, data: object) -> None:
    write_whole(path, json.dumps(data, indent=2).encode())
