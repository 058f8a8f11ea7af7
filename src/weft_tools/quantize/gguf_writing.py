"""A checkpoint as one GGUF file with Q4_K matrices: ``architectures`` backwards, tensor by tensor.

    stored tensors  --apart-->  our names, one matrix each  --redo-->  file's names, rows, columns, values
    mlp.gate_up_proj [E,2I,H]   ...experts.{e}.gate_proj.weight        blk.0.ffn_gate_exps.weight  [E,I,H]

    matrices      Q4_K, or Q8_0 if rows are not whole blocks of 256 columns
    embedding, head       Q8_0
    convolutions, routers, norms and other vectors      F32
    rows of beta and decay, steps of Mamba-1            as stored

The reader's ``FileLayout`` maps tensors of the file to weft's tensors and describes changes of values; here each
``Undo`` is reversed. A separate list of names for writing could disagree with the reader. The written header is read
back before any weight is written: it must give the architecture of config.json.

The file grows as OUT.partial/model.gguf, and ``done.json`` in the same folder has the number of complete tensors. The
next run cuts the file there and continues. The file is renamed to OUT when every byte is written. Rows are packed a few
MB at a time, out of the mapped files.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from weft.errors import CheckpointError
from weft.families import read_architecture, text_config
from weft.families.names import Names
from weft.files import finish, sync
from weft.models.checkpoint_files import DRAFT_PREFIXES, SKIPPED_PREFIXES, CheckpointFiles
from weft.models.gguf.architectures import ARCHITECTURES, read_layout
from weft.models.gguf.header import FileTensor, Header, read_header
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import NOTHING, ROTARY, FileLayout, Undo
from weft.models.safetensors_header import StoredTensor
from weft.models.score_head import architecture_in, is_headless
from weft.models.stored_values import TORCH_DTYPES, MappedFiles, is_finite
from weft.tensor.weights.quantized import BLOCK, LINE
from weft_tools.quantize.gguf_inverse import apart, rope_divisors, scaled, without_multipliers
from weft_tools.quantize.gguf_keys import add_numbers, add_vocabulary, architecture_of
from weft_tools.quantize.gguf_pack import q4_k, q8_0
from weft_tools.quantize.quantized_copy import MatrixError, begin_partial, matrices_of, opened, write_json

if TYPE_CHECKING:
    from gguf import GGUFWriter

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PACKERS = {"Q4_K": q4_k, "Q8_0": q8_0}
_AT_ONCE = 1 << 21
"""Numbers packed at once."""
_SYNCED_BYTES = 64 << 20
_ALIGNMENT = 32
_NAMES_SHOWN = 4
_TABLES = ("embed_tokens.weight", "embeddings.weight")
_DENSE = tuple(
    f".{name}.weight"
    for name in ("mlp.up_proj", "feed_forward.up_proj", "feed_forward.w3", "shared_mlp.up_proj", "mixer.up_proj")
)
_DIVISORS = "rope_freqs.weight"
_IN_32_BITS = ("conv1d", "shortconv.conv.", "gate_inp", "exp_probs_b")
_NOT_IN_FILES = ("family", "dtype", "mtp", "vision")
"""Fields of an architecture that files lack: Qwen3-Next is read as Qwen3.5, a file has no dtype of its own, and heads
and towers are left out."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Take = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor under weft's name. ``parts``: the stored tensor and the function that extracts the piece from it, for
    each matrix (expert) of a stack or once for the tensor. Pieces have ``shape``; matrices of a stack have
    ``shape[1:]``."""

    shape: tuple[int, ...]
    parts: list[tuple[StoredTensor | None, Take]]
    is_matrix: bool = False

    @property
    def stored(self) -> str:
        first = self.parts[0][0]
        return "F32" if first is None or first.dtype not in _STORED else first.dtype


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the file, with its pieces and the rows at which a reader expects them."""

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: list[tuple[_Piece, Undo]]

    @property
    def bytes_in_file(self) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return math.prod(self.shape) // block * size


def write_gguf(
    source: Path,
    out: Path,
    on_matrix: Callable[[MatrixError], None] = lambda error: None,
    *,
    pooling: Literal["first", "last", "mean"] | None = None,
) -> list[MatrixError]:
    """Write ``source`` to the new file ``out``. Return the rounded tensors. ``pooling``: of an embedder; default for a
    checkpoint without a head: "last".

    Raise CheckpointError if ``out`` exists or is not a .gguf, and if the source is quantised, is not served, or its
    family has no GGUF architecture."""
    from gguf import PoolingType

    if out.suffix != ".gguf":
        raise CheckpointError(f"{out}: --form q4_k writes one file, whose name ends in .gguf", param="OUT")
    checkpoint = opened(source, out)
    config = text_config(checkpoint.config)
    arch = architecture_of(config)
    if not read_architecture(checkpoint.config).causal:
        raise CheckpointError(f"{source}: only causal models can be written as GGUF files", param="SOURCE")
    partial_dir = out.with_name(f"{out.name}.partial")
    partial_dir.mkdir(parents=True, exist_ok=True)
    begin_partial(partial_dir, checkpoint, "q4_k")
    pieces = _pieces(checkpoint, config)
    keys = _keys(arch, config, pieces)
    if pooling is not None or is_headless(checkpoint):
        keys.add_pooling_type(PoolingType[{"first": "CLS", "mean": "MEAN"}.get(pooling or "last", "LAST")])
    entries = _entries(checkpoint, config, keys, pieces)
    unfinished, done = partial_dir / "model.gguf", partial_dir / "done.json"
    if not done.exists():
        _write_header(unfinished, source, checkpoint, keys, entries)
        write_json(done, {"count": 0, "bytes": unfinished.stat().st_size, "errors": []})
    errors = _write_tensors(unfinished, done, entries, on_matrix)
    unfinished.rename(out)
    sync(out.parent)
    for left in partial_dir.iterdir():
        left.unlink()
    partial_dir.rmdir()
    return errors


def _write_tensors(
    path: Path, done: Path, entries: list[_Entry], on_matrix: Callable[[MatrixError], None]
) -> list[MatrixError]:
    state = json.loads(done.read_text())
    errors, first = [MatrixError(*error) for error in state["errors"]], state["count"]
    with path.open("r+b") as file:
        file.truncate(state["bytes"])
        synced = file.seek(state["bytes"])
        for number, entry in enumerate(entries[first:], start=first + 1):
            squares = [0.0, 0.0]
            for rows in _rows(entry, squares):
                file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            if entry.kind in _PACKERS:
                itemsize = _STORED[entry.pieces[0][0].stored].itemsize
                errors.append(
                    MatrixError(
                        entry.name,
                        math.sqrt(squares[0] / (squares[1] or 1.0)),
                        math.prod(entry.shape) * itemsize,
                        entry.bytes_in_file,
                    )
                )
                on_matrix(errors[-1])
            if file.tell() - synced >= _SYNCED_BYTES or number == len(entries):
                finish(file)
                synced = file.tell()
                write_json(
                    done,
                    {
                        "count": number,
                        "bytes": synced,
                        "errors": [
                            [error.name, error.error, error.stored_bytes, error.copied_bytes] for error in errors
                        ],
                    },
                )
    return errors


def _rows(entry: _Entry, squares: list[float]) -> Iterator[torch.Tensor]:
    """Yield the bytes of ``entry``, some rows at a time. Add the squares of errors and values to ``squares``."""
    pack = _PACKERS.get(entry.kind)
    for matrix in _matrices(entry):
        by_row = matrix.reshape(-1, matrix.shape[-1]) if matrix.ndim else matrix.view(1, 1)
        step = max(1, _AT_ONCE // max(1, by_row.shape[1]))
        for first in range(0, by_row.shape[0], step):
            rows = by_row[first : first + step]
            if pack is None:
                yield rows.to(_STORED[entry.kind])
                continue
            values = rows.float().contiguous()
            blocks, rounded = pack(values)
            squares[0] += float((rounded - values).square().sum())
            squares[1] += float(values.square().sum())
            yield blocks


def _matrices(entry: _Entry) -> Iterator[torch.Tensor]:
    """Yield the matrices of a stack one after the other; else all of the entry. A file is mapped while its tensor is
    read."""
    if len(entry.pieces) == 1:
        piece, undo = entry.pieces[0]
        for stored, take in piece.parts:
            with _mapped(stored) as values:
                yield _redone(take(values), undo)
        return
    whole = torch.empty(entry.shape)  # rows of several pieces, each where the reader expects it
    begin = 0
    for piece, undo in entry.pieces:
        [(stored, take)] = piece.parts
        order = np.arange(begin, begin + piece.shape[0]) if undo.rows is None else undo.rows
        with _mapped(stored) as values:
            whole[torch.from_numpy(order)] = _redone(take(values), replace(undo, rows=None)).float()
        begin += piece.shape[0]
    yield whole


@contextmanager
def _mapped(stored: StoredTensor | None) -> Iterator[torch.Tensor]:
    """Return the values of a stored tensor in the mapped file."""
    if stored is None:
        yield torch.empty(0)
        return
    files = MappedFiles()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, as are weights
        bits = torch.from_numpy(files.view(stored))
    values = bits.view(TORCH_DTYPES[stored.dtype]).view(stored.shape_in_file)
    values = values.T if stored.transposed else values
    if not is_finite(values, stored.dtype):
        raise CheckpointError(f"{stored.file}: tensor {stored.name} has NaN or infinite values", param="SOURCE")
    yield values
    files.close()


def _redone(x: torch.Tensor, undo: Undo) -> torch.Tensor:
    """Return the tensor that the reader's ``undo`` turns into ``x``."""
    if undo.log:
        x = -torch.exp(x.float())
    if undo.minus:
        x = x.float() + undo.minus
    if undo.rows is not None:
        x = x[torch.from_numpy(np.argsort(undo.rows))]
    return x if undo.columns is None else x[:, torch.from_numpy(np.argsort(undo.columns))]


class _Anything(dict[str, FileTensor]):
    """A table that has every tensor a reader may ask for, to find the names that it uses."""

    def __init__(self, table: _Piece) -> None:
        super().__init__()
        self._any = FileTensor(Path(), "", "F32", table.shape, 0, 0)

    def get(self, name: str, default: Any = None) -> Any:
        return default if name in ROTARY else self._any

    def __contains__(self, name: object) -> bool:
        return True


def _entries(
    checkpoint: CheckpointFiles, config: Mapping[str, Any], keys: GGUFWriter, pieces: Mapping[str, _Piece]
) -> list[_Entry]:
    """Return the tensors of the file, in its order."""
    arch, numbers = keys.arch, {name: _as_read(value.value) for name, value in keys.kv_data[0].items()}
    table = next(piece for name, piece in pieces.items() if name.endswith(_TABLES))
    read = ARCHITECTURES[arch]
    names = _names(read(GgufKeys(Header(checkpoint.source, numbers, _Anything(table)), arch)), arch, pieces)
    shapes = {theirs: _shape(theirs, [pieces[own_name] for own_name in ours], config) for theirs, ours in names.items()}
    left = set(pieces) - {own_name for ours in names.values() for own_name in ours}
    if left:
        raise CheckpointError(
            f"{checkpoint.source}: GGUF files of {arch} have no name for {', '.join(sorted(left)[:_NAMES_SHOWN])}",
            param="SOURCE",
        )
    layout = read(
        GgufKeys(
            Header(
                checkpoint.source,
                numbers,
                {theirs: FileTensor(Path(), theirs, "F32", shape, 0, 0) for theirs, shape in shapes.items()},
            ),
            arch,
        )
    )
    entries = []
    for theirs, ours in names.items():
        key = theirs.split(".", 2)[2] if theirs.startswith("blk.") else theirs
        own = [(pieces[own_name], _undo(layout, key.removesuffix(".weight"), own_name)) for own_name in ours]
        entries.append(_Entry(theirs, _kind(theirs, shapes[theirs], own), shapes[theirs], own))
    divisors = rope_divisors(config)
    if divisors is not None:
        numbers_of_rope = _Piece((len(divisors),), [(None, lambda _: torch.tensor(divisors))])
        entries.insert(0, _Entry(_DIVISORS, "F32", numbers_of_rope.shape, [(numbers_of_rope, NOTHING)]))
    return entries


def _as_read(value: Any) -> Any:
    numbers = isinstance(value, list) and value and not isinstance(value[0], str)
    return np.array(value) if numbers else value


def _undo(layout: FileLayout, key: str, ours: str) -> Undo:
    place = _LAYER.search(ours)
    rest = ours if place is None else ours[place.end() :]
    return layout.undo.get(f"{key}:{rest}", layout.undo.get(rest, NOTHING))


def _names(layout: FileLayout, arch: str, pieces: Mapping[str, _Piece]) -> dict[str, list[str]]:
    """Return weft's names by name in the file; the first if there are several."""
    # A file has the rows of beta and decay in one tensor or in two, by its architecture.
    other = ("ssm_alpha", "ssm_beta") if arch == "qwen3next" else ("ssm_ba",)
    layers = sorted({int(layer[1]) for name in pieces for layer in _LAYER.finditer(name)})
    places = [("", "", layout.whole)] + [(f"blk.{layer}.", f"model.layers.{layer}.", layout.names) for layer in layers]
    out: dict[str, list[str]] = {}
    named: set[str] = set()
    for begin, prefix, names in places:
        for theirs, ours in names.items():
            if theirs in other or (theirs == "ssm_in" and isinstance(ours, tuple)):
                continue
            targets = (ours,) if isinstance(ours, str) else ours
            for end in ("", ".weight", ".bias"):
                own = [f"{prefix}{target}{end}" for target in targets]
                if (end and f"{theirs}{end}" in names) or not {*own} <= pieces.keys() or {*own} & named:
                    continue
                out[f"{begin}{theirs}{end}"] = own
                named |= {*own}
    return out


def _shape(theirs: str, pieces: list[_Piece], config: Mapping[str, Any]) -> tuple[int, ...]:
    shape = pieces[0].shape
    if len(pieces) > 1:
        return (sum(piece.shape[0] for piece in pieces), *shape[1:])
    if "conv" in theirs and len(shape) == 3:
        return shape[0], shape[2]
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    if groups and theirs.endswith(("ssm_a", "ssm_d")):
        return (*shape, 1)
    return (groups, shape[0] // groups) if groups and theirs.endswith("ssm_norm.weight") else shape


def _kind(theirs: str, shape: tuple[int, ...], pieces: list[tuple[_Piece, Undo]]) -> str:
    small = len(shape) < 2 or not theirs.endswith("weight") or theirs.endswith("norm.weight")
    if small or any(part in theirs for part in _IN_32_BITS) or any(undo.changes_values for _, undo in pieces):
        return "F32"
    is_table = theirs in ("token_embd.weight", "output.weight")
    if (is_table or pieces[0][0].is_matrix) and shape[-1] % LINE == 0:
        return "Q4_K" if shape[-1] % BLOCK == 0 and not is_table else "Q8_0"
    return pieces[0][0].stored


def _pieces(checkpoint: CheckpointFiles, config: Mapping[str, Any]) -> dict[str, _Piece]:
    """Return pieces by weft's names. Heads for multi-token prediction and towers are left out."""
    factors, tied = matrices_of(checkpoint), architecture_in(checkpoint).tied_embeddings
    matrices = factors.matrices | factors.stacks.keys()
    out: dict[str, _Piece] = {}
    stacks: dict[str, dict[int, tuple[StoredTensor, Take]]] = {}
    for name, stored in checkpoint.tensors.items():
        if name.endswith("lm_head.weight"):
            if not tied:
                out["lm_head.weight"] = _Piece(stored.shape, [(stored, scaled(config, "lm_head"))])
            continue
        if name.startswith((*DRAFT_PREFIXES, *SKIPPED_PREFIXES)) or name.endswith("inv_freq"):
            continue
        ours = f"model.{name.removeprefix(checkpoint.prefix)}"
        for part, shape, take in apart(ours, stored.shape, config):
            expert = _EXPERT.search(part)
            if expert:
                stack = f"{part[: expert.start()]}.experts.{{e}}.{part[expert.end() :]}"
                stacks.setdefault(stack, {})[int(expert[1])] = stored, take
            elif "{e}" in part and part.endswith("weight"):
                each = [(stored, lambda x, take=take, i=i: take(x[i : i + 1])[0]) for i in range(shape[0])]
                out[part] = _Piece(shape, list(each), name in matrices)
            else:
                out[part] = _Piece(shape, [(stored, take)], name in matrices)
    for stack, experts in stacks.items():
        first = experts[0][0]
        out[stack] = _Piece(
            (len(experts), *first.shape), [experts[e] for e in range(len(experts))], first.name in matrices
        )
    return out


def _keys(arch: str, config: Mapping[str, Any], pieces: Mapping[str, _Piece]) -> GGUFWriter:
    """Return a writer that has the hyper-parameters, and no file yet."""
    from gguf import GGUFWriter

    writer = GGUFWriter(None, arch)
    dense = () if arch == "granitehybrid" and config.get("num_local_experts") else _DENSE
    wide = next((piece.shape[0] for name, piece in pieces.items() if name.endswith(dense)), None)
    add_numbers(writer, config, wide or config.get("intermediate_size") or 0)
    return writer


def _write_header(
    path: Path, source: Path, checkpoint: CheckpointFiles, writer: GGUFWriter, entries: list[_Entry]
) -> None:
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFType, LlamaFileType

    writer.add_type(GGUFType.MODEL)
    writer.add_name(source.resolve().name)
    writer.add_file_type(int(LlamaFileType.MOSTLY_Q4_K_M))
    writer.add_quantization_version(GGML_QUANT_VERSION)
    add_vocabulary(writer, source, text_config(checkpoint.config)["vocab_size"])
    for entry in entries:
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype(np.float32), entry.bytes_in_file, GGMLQuantizationType[entry.kind]
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        # The reader checks that the file has the bytes that the header claims; they are a hole until they are written.
        begin = file.tell()
        file.truncate(begin + sum(-(-entry.bytes_in_file // _ALIGNMENT) * _ALIGNMENT for entry in entries))
    with path.open("r+b") as file:
        if entries[0].name == _DIVISORS:  # readers look at their numbers
            file.seek(begin)
            file.writelines(rows.numpy().tobytes() for rows in _rows(entries[0], [0.0, 0.0]))
            file.flush()
        _check(path, checkpoint)
        file.truncate(begin)
        finish(file)


def _apart_from_joins(names: Names) -> dict[str, Any]:
    """Return the fields of ``names`` without the joins of projections, which differ between a checkpoint and a GGUF
    file. Two ``Names`` are equal only if they are the same object."""
    spelled = {
        mixer: rest
        for mixer, settings in names.spelled.items()
        if (rest := {name: value for name, value in settings.items() if name != "names"})
    }
    return {field.name: getattr(names, field.name) for field in fields(names)} | {"spelled": spelled}


def _check(path: Path, checkpoint: CheckpointFiles) -> None:
    """Check that a reader of the header finds the architecture of config.json."""
    wanted = architecture_in(replace(checkpoint, config=without_multipliers(checkpoint.config)))
    as_read = read_architecture(read_layout(read_header(path)).config)
    for field in fields(wanted):
        if field.name in _NOT_IN_FILES:
            continue
        ours, theirs = getattr(wanted, field.name), getattr(as_read, field.name)
        if isinstance(ours, Names):
            ours, theirs = _apart_from_joins(ours), _apart_from_joins(theirs)
        if ours != theirs:
            raise CheckpointError(
                f"config.json has {field.name} {ours}; a reader of the GGUF file would find {theirs}", param="SOURCE"
            )
