"""A checkpoint written again in int8 or int4, in the form of compressed-tensors, which other engines read.

    SOURCE/model-00001-of-2.safetensors --tensor by tensor--> OUT.partial/model-00001-of-2.safetensors
                                                              ...            written, synced, renamed
    config.json with quantization_config, tokenizer   ------> OUT.partial    --renamed last--> OUT

    form    format             a matrix becomes
    int8    pack-quantized     x.weight_packed, x.weight_scale for 128 columns, x.weight_shape
    int4    pack-quantized     the same, a scale for 32 columns
    w8a8    int-quantized      x.weight I8, x.weight_scale for a row; inputs are rounded when the model runs

Matrices are those that the model's code multiplies by. Rows of beta and decay, steps of Mamba-1, routers,
embeddings and the head stay as they are. One tensor is in memory at a time. OUT appears whole or not at all,
and a complete file of OUT.partial is not written again. Scales are rounded to the dtype of the model before
the codes are chosen, so every engine reads the same values.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from weft.models.stored_values import MappedFiles
from weft.models.weights import Order, Part
from weft.tensor.few_bits import quotient
from weft.tensor.layout import DTYPES
from weft.tensor.ops.moe import ExpertWeights
from weft.tensor.weights.quantized import GROUPS, ZERO_POINT, floats_of, rounded

CopyForm = Literal["int8", "int4", "w8a8"]
FORMATS: dict[CopyForm, str] = {"int8": "pack-quantized", "int4": "pack-quantized", "w8a8": "int-quantized"}
_LEFT = ("in_proj_a", "in_proj_b", "b_proj", "a_proj", "x_proj", "dt_proj")
"""Matrices that steer decay: docs/quantization.md has what rounding them costs."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32",
          torch.int64: "I64", torch.int8: "I8"}
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pth", ".pt", ".index.json")


@dataclass(frozen=True, slots=True)
class MatrixError:
    """``error``: the root of (sum of squared differences / sum of squares)."""

    name: str
    error: float
    stored_bytes: int
    copied_bytes: int


def write_quantized(source: Path, out: Path, form: CopyForm,
                    on_matrix: Callable[[MatrixError], None] = lambda one: None) -> list[MatrixError]:
    """Writes ``source`` in ``form`` to the new directory ``out``. Returns the matrices that were rounded.

    Raises CheckpointError where ``out`` is there, or the source is quantised already, cannot be served or has
    no matrix that ``form`` can round."""
    checkpoint = opened(source, out)
    matrices, dtype = matrices_of(checkpoint)
    if not any(_layout(one, matrices, form, dtype) for one in checkpoint.tensors.values()):
        raise CheckpointError(f"{source}: no matrix has columns in whole groups of "
                              f"{GROUPS[4 if form == 'int4' else 8]}; --form w8a8 rounds by rows",
                              param="--form")
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    begin_partial(partial, checkpoint, form)
    errors: list[MatrixError] = []
    weight_map: dict[str, str] = {}
    for file in sorted({stored.file for stored in checkpoint.tensors.values()}):
        tensors = [one for one in checkpoint.tensors.values() if one.file == file]
        target = partial / file.name
        report = target.with_suffix(".errors.json")
        if not (target.exists() and report.exists()):
            file_errors = _write_file(tensors, target, matrices, form, dtype, on_matrix)
            write_json(report, [[one.name, one.error, one.stored_bytes, one.copied_bytes]
                                 for one in file_errors])
        errors += [MatrixError(*one) for one in json.loads(report.read_text())]
        weight_map |= dict.fromkeys(read_header(target), file.name)
    for other in source.iterdir():
        if other.is_file() and not other.name.endswith(_NOT_COPIED) and other.name != "config.json":
            shutil.copyfile(other, partial / other.name)
    for folder in _folders(source):
        shutil.copytree(source / folder, partial / folder, dirs_exist_ok=True)
    ignored = sorted({name.removesuffix(".weight") for name, one in checkpoint.tensors.items()
                      if len(one.shape) == 2 and name.endswith(".weight")
                      and name not in {error.name for error in errors}})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(partial / "config.json", config | {"quantization_config": _settings(form, ignored)})
    write_json(partial / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    for report in (*partial.glob("*.errors.json"), partial / _STATE):
        report.unlink()
    sync(partial)
    partial.rename(out)
    sync(out.parent)
    return errors


_STATE = "weft-quantize.json"


def opened(source: Path, out: Path) -> CheckpointFiles:
    """The checkpoint ``source``, which is not quantised; ``out`` is not there."""
    if out.exists():
        raise CheckpointError(f"{out}: it is there already; name another one", param="OUT")
    checkpoint = CheckpointFiles.open(source)
    settings = checkpoint.config.get("quantization_config") or text_config(checkpoint.config).get(
        "quantization_config")
    if settings:
        raise CheckpointError(f"{source}: is quantised already ({settings.get('quant_method')}); name the "
                              "checkpoint that it was made of", param="SOURCE")
    return checkpoint


def begin_partial(partial: Path, checkpoint: CheckpointFiles, form: str) -> None:
    """Deletes what an earlier run wrote of another source or form."""
    sizes = {one.file.name: [one.file.stat().st_size, one.file.stat().st_mtime_ns]
             for one in checkpoint.tensors.values()}
    state, path = {"form": form, "files": sizes}, partial / _STATE
    if not path.exists() or json.loads(path.read_text()) != state:
        shutil.rmtree(partial)
        partial.mkdir()
        write_json(path, state)


def _folders(source: Path) -> list[str]:
    """Of a model of sentence-transformers: those of its modules, which are one name each."""
    path = source / "modules.json"
    modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    paths = [str(one.get("path", "")) for one in modules]
    return [path for path in paths if Path(path).name == path and (source / path).is_dir() and path]


class _Recorder(TensorCheck):
    """Notes the names of what is multiplied with, as the model's code asks for it."""

    def __init__(self, checkpoint: CheckpointFiles, dtype: torch.dtype, stacks: bool) -> None:
        super().__init__(checkpoint, dtype)
        self.stacks = stacks
        self.matrices: set[str] = set()

    def linear(self, parts: Sequence[Part], columns: int, bias: torch.Tensor | None = None, *,
               finer: bool = False) -> Linear:
        self.matrices |= {self.checkpoint.prefix + part[0] for part in parts}
        return super().linear(parts, columns, bias, finer=finer)

    def experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeights:
        self.matrices |= {self.checkpoint.prefix + name for group in names for name in group}
        return super().experts(names, rows, columns)

    def all_experts(self, names: Sequence[str], count: int, rows: int, columns: int, *,
                    transposed: bool = False, order: Order | None = None) -> ExpertWeights:
        if self.stacks:
            self.matrices |= {self.checkpoint.prefix + name for name in names}
            return super().all_experts(names, count, rows, columns, transposed=transposed, order=order)
        raise CheckpointError(f"{names[0]} holds all experts of a layer; weft quantize reads them one by "
                              "one, as transformers' save_pretrained stores them", param="SOURCE")


def matrices_of(checkpoint: CheckpointFiles, *, stacks: bool = False) -> tuple[set[str], torch.dtype]:
    """(names of the matrices to be rounded, the dtype of scales). ``stacks``: experts may be one tensor."""
    dtype = DTYPES[named_dtype(checkpoint.config) or "bfloat16"]
    recorder = _Recorder(checkpoint, dtype, stacks)
    with torch.inference_mode():
        build(architecture_in(checkpoint), recorder)
        recorder.raise_problems()
    return {name for name in recorder.matrices
            if not any(f".{part}." in name for part in _LEFT)}, dtype


def _settings(form: CopyForm, ignored: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 4 if form == "int4" else 8, "type": "int", "symmetric": True,
                               "dynamic": False, "strategy": "channel" if form == "w8a8" else "group",
                               "group_size": None if form == "w8a8" else GROUPS[4 if form == "int4" else 8]}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights,
             "input_activations": inputs if form == "w8a8" else None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": FORMATS[form],
            "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": ignored,
            "kv_cache_scheme": None}


def _layout(stored: StoredTensor, matrices: set[str], form: CopyForm, dtype: torch.dtype,
            ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]] | None:
    """Names, dtypes and shapes that a matrix becomes; None for a tensor that is copied."""
    if stored.name not in matrices or len(stored.shape) != 2 or stored.dtype not in ("F32", "BF16", "F16"):
        return None
    rows, columns = stored.shape
    name = stored.name
    if form == "w8a8":
        return {name: (torch.int8, (rows, columns)), f"{name}_scale": (dtype, (rows, 1))}
    bits = 4 if form == "int4" else 8
    if columns % GROUPS[bits]:
        return None
    return {f"{name}_packed": (torch.int32, (rows, columns * bits // 32)),
            f"{name}_scale": (dtype, (rows, columns // GROUPS[bits])), f"{name}_shape": (torch.int64, (2,))}


def _rounded(weight: torch.Tensor, form: CopyForm, dtype: torch.dtype,
             ) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(tensors in the order of ``_layout``, the values that they mean)."""
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


def _write_file(tensors: list[StoredTensor], target: Path, matrices: set[str], form: CopyForm,
                dtype: torch.dtype, on_matrix: Callable[[MatrixError], None]) -> list[MatrixError]:
    layouts = {one.name: _layout(one, matrices, form, dtype) for one in tensors}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for one in tensors:
        for name, (kind, shape) in _entries(one, layouts[one.name]):
            size = one.stored_bytes if layouts[one.name] is None else _bytes(kind, shape)
            header[name] = {"dtype": kind if isinstance(kind, str) else _NAMES[kind], "shape": list(shape),
                            "data_offsets": [begin, begin + size]}
            begin += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    files, errors = MappedFiles(), []
    unfinished = target.with_suffix(".writing")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors:
            if layouts[one.name] is None:
                file.write(files.view(one).data)
                continue
            weight = files.read(one)
            if not bool(weight.isfinite().all()):
                raise CheckpointError(f"{one.file}: tensor {one.name} has NaN or infinite values",
                                      param="SOURCE")
            parts, values = _rounded(weight, form, dtype)
            for part in parts:
                file.write(part.contiguous().view(torch.uint8).numpy().data)
            norm = float(weight.float().norm())
            error = MatrixError(one.name, float((values - weight.float()).norm()) / norm if norm else 0.0,
                                one.stored_bytes, sum(part.numel() * part.itemsize for part in parts))
            errors.append(error)
            on_matrix(error)
        finish(file)
    files.close()
    unfinished.rename(target)
    sync(target.parent)
    return errors


def _entries(stored: StoredTensor, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None,
             ) -> Iterator[tuple[str, tuple[torch.dtype | str, tuple[int, ...]]]]:
    if layout is None:
        yield stored.name, (stored.dtype, stored.shape)
    else:
        yield from layout.items()


def _bytes(kind: torch.dtype | str, shape: tuple[int, ...]) -> int:
    assert isinstance(kind, torch.dtype)
    size = kind.itemsize
    for dim in shape:
        size *= dim
    return size


def write_json(path: Path, data: object) -> None:
    write_whole(path, json.dumps(data, indent=2).encode())
