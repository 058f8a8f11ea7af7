"""Reading of an adapter from its files, and its changes of a loaded model.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   Wanted("....q_proj", a=...)
    ......................................... q_proj.lora_B.weight           b=...
    ......................................... q_proj.lora_magnitude_vector   magnitude=...   (DoRA)
    ......................................... q_proj.bias, lm_head.weight    bias=, whole=   (modules_to_save)
    ......................................... experts.base_layer.lora_A      depth=1   (target_parameters)
                |
                Targets.find: rows of a product    every tensor must have a target, or the adapter is refused
                |
                ProductChange of that product

``load_adapter`` reads and checks in any thread and changes nothing of the model. ``install`` and ``remove`` are for
the thread that computes: a dictionary entry in each product. Files are read once, for the digest and the factors. So a
file that changes meanwhile cannot become a second adapter with the digest of the first.

Stacks of experts are peft's: A [r x experts, in] by expert, B [out, r x experts] with the expert last. The
outer of two nested wrappers is the parameter that the module has last.

Source: peft 0.21, ``tuners/lora/layer.py``, ``tuners/lora/dora.py``, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters import WEIGHTS_FILE, Adapter, AdapterSettings, files_digest, read_settings
from weft.errors import CheckpointError
from weft.models.adapter_targets import Target, unwrapped
from weft.models.blocks.adapted import (
    AdaptedBlock,
    AdaptedTable,
    ExpertsChange,
    Factor,
    LatentChange,
    Part,
    ProductChange,
    TableChange,
)
from weft.models.blocks.linear import Linear
from weft.models.decoder import CausalModel
from weft.models.safetensors_header import read_header
from weft.models.sharding import Shard
from weft.models.stored_values import TORCH_DTYPES, is_finite
from weft.tensor import gpu
from weft.tensor.gpu.host_memory import PinnedRing
from weft.tensor.layout import DTYPES
from weft.tensor.ops.linear import dense

_ALIGNED_BYTES = 256
"""Alignment of a factor on a GPU, bytes: that of its allocator."""
_FLOATS = ("F32", "F16", "BF16", "F64")
_TENSOR = re.compile(
    r"(?P<module>.+?)\.(?:(?P<factor>lora_(?:embedding_)?[AB])(?:\.(?!weight|bias)[^.]+)?(?:\.(?P<end>weight|bias))?"
    r"|lora_(?P<magnitude>magnitude_vector)(?:\.[^.]+)*"
    r"|(?:modules_to_save\.(?:[^.]+\.)?|original_module\.|base_layer\.)?(?P<plain>weight|bias))"
)
"""Names of tensors; peft's older files have the adapter's name inside."""


@dataclass(slots=True)
class Wanted:
    """Tensors of an adapter for one module. ``depth``: of nested wrappers, of parameters of one module."""

    module: str
    depth: int = 0
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    b_bias: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    of_table: bool = False


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter that was read. ``products``, ``blocks``: (the changed object, the change)."""

    adapter: Adapter
    products: list[tuple[Linear, ProductChange]] = field(default_factory=list)
    blocks: list[tuple[object, ExpertsChange | LatentChange]] = field(default_factory=list)
    table: TableChange | None = None

    @property
    def held_bytes(self) -> int:
        changes = [change.held_bytes for _, change in (*self.products, *self.blocks)]
        return sum(changes) + (0 if self.table is None else self.table.held_bytes)


def load_adapter(adapter: Adapter, model: CausalModel, ring: PinnedRing | None = None) -> LoadedAdapter:
    """Read ``adapter`` for ``model``. ``ring``: to the device of ``model``.

    Raises CheckpointError, one line that names the module or file: files that changed since ``adapter`` was read, a
    module that the model does not have, factors of another shape, a value that is not finite.
    """
    directory = Path(adapter.directory)
    settings = read_settings(directory)
    with torch.inference_mode():
        wanted = _wanted(_tensors(adapter, directory))
        loaded = _Placing(adapter, settings, model).placed(wanted)
        return loaded if model.embedding.device.type == "cpu" else _sent(loaded, model.embedding.device, ring)


def _sent(loaded: LoadedAdapter, device: torch.device, ring: PinnedRing | None) -> LoadedAdapter:
    """Return the adapter on ``device``. All its tensors, often hundreds of small factors, go over in one copy."""
    tensors: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _changed(loaded, noted)
    sizes = [tensor.nbytes + -tensor.nbytes % _ALIGNED_BYTES for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    for tensor, place in zip(tensors, torch.split(flat, sizes), strict=True):
        place[: tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    on_device = flat.to(device) if ring is None else ring.to_device(flat)
    places = iter(torch.split(on_device, sizes))
    sent: LoadedAdapter = _changed(
        loaded, lambda tensor: next(places)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    )
    return sent


_WITH_TENSORS = (ProductChange, Part, Factor, ExpertsChange, LatentChange, TableChange, LoadedAdapter)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with each of its tensors changed, at any depth."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _WITH_TENSORS):
        return replace(value, **{part.name: _changed(getattr(value, part.name), change) for part in fields(value)})
    if isinstance(value, dict):
        return {key: _changed(item, change) for key, item in value.items()}
    return type(value)(_changed(item, change) for item in value) if isinstance(value, (list, tuple)) else value


Send = Callable[[npt.NDArray[np.int64]], torch.Tensor]


def open_tables(model: CausalModel) -> None:
    """Make the tables of all products, whichever an adapter changes, so that graphs are recorded once."""
    for product in model.targets.products(Linear):
        product.adapted.open(model.adapters, DTYPES[model.spec.dtype], model.embedding.device)


def install(model: CausalModel, loaded: LoadedAdapter, send: Send = torch.from_numpy) -> None:
    """Install the adapter in ``model``. ``send``: copies numbers to the device of ``model``. A second call writes the
    present addresses of the factors.
    """
    digest, active = loaded.adapter.digest, model.adapters
    active.hold(digest)
    sent: Sequence[torch.Tensor | None] = [None] * len(loaded.products)
    if gpu.reaches(model.embedding.device):
        open_tables(model)
        lines = [change.line() for _, change in loaded.products]
        width = max((len(line) for line in lines if line is not None), default=0)
        table = send(np.array([line or (0,) * width for line in lines], np.int64)) if width else None
        sent = [None if line is None or table is None else table[index] for index, line in enumerate(lines)]
    if loaded.blocks or loaded.table is not None:
        active.unrecorded.add(digest)
    for (product, change), line in zip(loaded.products, sent, strict=True):
        product.adapted.install(digest, change, active, line)
        if isinstance(product.weight, torch.Tensor) and product.weight.dtype != change.dtype:
            active.unrecorded.add(digest)  # a router, see ``AdaptedProduct``
    for block, own in loaded.blocks:
        if block.adapted is None:  # type: ignore[attr-defined]
            block.adapted = AdaptedBlock(active)  # type: ignore[attr-defined]
        block.adapted.changes[digest] = own  # type: ignore[attr-defined]
    if loaded.table is not None:
        if model.adapted_table is None:
            model.adapted_table = AdaptedTable(active)
        model.adapted_table.changes[digest] = loaded.table


def remove(model: CausalModel, loaded: LoadedAdapter) -> None:
    digest = loaded.adapter.digest
    for product, _ in loaded.products:
        product.adapted.remove(digest)
    for block, _ in loaded.blocks:
        block.adapted.changes.pop(digest, None)  # type: ignore[attr-defined]
    if loaded.table is not None and model.adapted_table is not None:
        model.adapted_table.changes.pop(digest, None)
    model.adapters.release(digest)


def _tensors(adapter: Adapter, directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor, finite, in the dtype it has: views of the file's bytes."""
    file = directory / WEIGHTS_FILE
    stored = read_header(file)  # its errors name the tensor and the byte
    content = bytearray(file.read_bytes())
    if files_digest(directory, content) != adapter.digest:
        raise CheckpointError(
            f"{directory}: the files of adapter {adapter.name} have changed since it was loaded; load it again",
            param="lora",
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in stored.items():
        if entry.dtype not in _FLOATS:
            raise CheckpointError(
                f"{file}: tensor {name} is {entry.dtype}; factors are float32, float16 or bfloat16", param="lora"
            )
        if entry.stored_bytes:
            dtype, source, offset = TORCH_DTYPES[entry.dtype], content, entry.begin
            if offset % dtype.itemsize:
                source, offset = content[offset : offset + entry.stored_bytes], 0
            count = entry.stored_bytes // dtype.itemsize
            tensors[name] = torch.frombuffer(source, dtype=dtype, count=count, offset=offset).view(entry.shape)
            if not is_finite(tensors[name], entry.dtype):
                raise CheckpointError(f"{file}: tensor {name} has NaN or infinite values", param="lora")
    return tensors


def _wanted(tensors: Mapping[str, torch.Tensor]) -> list[Wanted]:
    by_module: dict[tuple[str, int], Wanted] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"the adapter has a tensor {name}, which is not a factor, magnitude, weight or bias of a module",
                param="lora",
            )
        module, depth = match["module"], 0
        while module.endswith(".base_layer"):
            module, depth = module.removesuffix(".base_layer"), depth + 1
        factor = match["factor"]
        nested = factor is not None and not factor.startswith("lora_embedding")
        key = (module, depth if nested else 0)
        entry = by_module.setdefault(key, Wanted(module, key[1]))
        if factor is not None:
            entry.of_table |= factor.startswith("lora_embedding")
            if match["end"] == "bias":
                entry.b_bias = tensor
            elif factor.endswith("A"):
                entry.a = tensor
            else:
                entry.b = tensor
        elif match["magnitude"]:
            entry.magnitude = tensor
        elif match["plain"] == "weight":
            entry.whole = tensor
        else:
            entry.bias = tensor
    for entry in by_module.values():
        if (entry.a is None) != (entry.b is None):
            raise CheckpointError(
                f"the adapter has only lora_{'B' if entry.a is None else 'A'} of {entry.module}; a module needs both",
                param="lora",
            )
    if not by_module:
        raise CheckpointError("the adapter has no tensors", param="lora")
    return list(by_module.values())


@dataclass(slots=True)
class _Piece:
    """Change of rows of one product by one module. ``a`` [r, in] and ``b`` [rows, r], in the product's order."""

    first: int
    rows: int
    a: torch.Tensor | None
    b: torch.Tensor | None
    whole: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None


class _Placing:
    """Placement of one adapter's tensors on one model."""

    def __init__(self, adapter: Adapter, settings: AdapterSettings, model: CausalModel) -> None:
        self._adapter, self._settings, self._model = adapter, settings, model
        self._dtype = DTYPES[model.spec.dtype]
        self._tiled = model.embedding.device.type == "cpu"
        self._pieces: dict[int, tuple[Linear, list[_Piece]]] = {}
        self._latents: list[tuple[object, _Piece]] = []
        self._experts: dict[int, tuple[object, dict[tuple[str, int], list[_Piece]]]] = {}
        self._table: TableChange | None = None

    def placed(self, wanted: list[Wanted]) -> LoadedAdapter:
        for entry in wanted:
            target = self._model.targets.find(entry.module)
            if target.product is None:
                continue  # trained, but never computed with
            if target.kind == "table":
                self._place_table(entry, target)
            elif target.kind == "experts":
                self._place_experts(entry, target, wanted)
            elif entry.of_table:
                raise CheckpointError(
                    f"the adapter has embedding factors of {entry.module}, which is not an embedding", param="lora"
                )
            else:
                self._place(entry, target)
        loaded = LoadedAdapter(self._adapter, table=self._table)
        loaded.products = [(product, self._change(pieces)) for product, pieces in self._pieces.values()]
        loaded.blocks = [(block, self._latent_change(block, piece)) for block, piece in self._latents]
        for block, sides in self._experts.values():
            change = ExpertsChange({}, {})
            for (role, number), pieces in sides.items():
                (change.into if role == "into" else change.down)[number] = self._change(pieces)
            loaded.blocks.append((block, change))
        return loaded

    def _place(self, entry: Wanted, target: Target) -> None:
        a, b = self._factors(entry, target)
        if target.kind == "expansion":
            if a is None or entry.whole is not None or entry.bias is not None or entry.b_bias is not None:
                raise CheckpointError(
                    f"the adapter has more than factors of {entry.module}: weft serves A and "
                    "B there, and DoRA, no bias and no trained matrix",
                    param="lora",
                )
            piece = self._piece(entry, target, a, b, 0, target.whole_shape[0])
            self._latents.append((target.product, piece))
            return
        _, pieces = self._pieces.setdefault(id(target.product), (target.product, []))
        if entry.whole is not None:
            self._check(entry, "weight", entry.whole, target.whole_shape)
        for inner, begin, end in target.slices or ((target, 0, target.whole_shape[0]),):
            pieces.append(self._piece(entry, inner, a, b, begin, end))

    def _piece(
        self, entry: Wanted, target: Target, a: torch.Tensor | None, b: torch.Tensor | None, begin: int, end: int
    ) -> _Piece:
        """Return the change by rows [begin, end) of the adapter's tensors."""
        columns = _cut(target.shard, a, 1)
        piece = _Piece(target.first, target.rows, columns, self._rows(b, target, begin, end))
        if entry.whole is not None:
            whole = _cut(target.shard, entry.whole, 1)
            piece.whole = self._rows(whole, target, begin, end)
        if entry.magnitude is not None:
            assert piece.a is not None
            assert piece.b is not None
            magnitude = self._rows(entry.magnitude.reshape(-1), target, begin, end)
            assert magnitude is not None
            self._decompose(entry, target, piece, magnitude)
        if entry.b_bias is not None:
            scale = self._settings.scale_of(_key(entry.module))
            added = self._rows(entry.b_bias.reshape(-1).float() * scale, target, begin, end)
            assert added is not None
            piece.shift = added if piece.shift is None else piece.shift + added
        if entry.bias is not None:
            self._replace_bias(entry, target, piece, self._rows(entry.bias.reshape(-1), target, begin, end))
        return piece

    def _factors(self, entry: Wanted, target: Target) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return A, and B times the scale. Raises CheckpointError for shapes that the base does not have."""
        if entry.a is None or entry.b is None:
            return None, None
        rows, columns = target.whole_shape
        rank = self._settings.rank_of(_key(entry.module))
        self._check(entry, "lora_A", entry.a, (rank, columns))
        self._check(entry, "lora_B", entry.b, (rows, rank))
        return entry.a.float(), entry.b.float() * self._settings.scale_of(_key(entry.module))

    def _rows(self, values: torch.Tensor | None, target: Target, begin: int, end: int) -> torch.Tensor | None:
        """Return rows [begin, end) of ``values``, this rank's, in the order of the product."""
        if values is None:
            return None
        own = _cut(target.shard, values[begin:end], 0)
        assert own is not None
        if own.shape[0] != target.rows:
            raise CheckpointError(
                f"the adapter has {own.shape[0]} rows where the model has {target.rows}", param="lora"
            )
        if target.order is None:
            return own
        return target.order(own[:, None]).flatten(0, 1) if own.ndim == 1 else target.order(own)

    def _decompose(self, entry: Wanted, target: Target, piece: _Piece, magnitude: torch.Tensor) -> None:
        """Apply DoRA: the rows of W + scale B A have the length ``magnitude``."""
        if target.shard is not None and target.shard.dim == 1:
            raise CheckpointError(
                f"the adapter uses DoRA on {entry.module}, whose columns ranks divide: no "
                "rank has the length of a row; serve it without --tp",
                param="--tp",
            )
        assert piece.a is not None
        assert piece.b is not None
        base = self._base(target).cpu().to(self._dtype).float()
        gain = magnitude.float() / torch.linalg.norm(base + piece.b @ piece.a, dim=1)
        piece.gain, piece.b = gain, piece.b * gain[:, None]
        present = target.product.bias if target.kind == "product" else None
        if present is not None:
            piece.shift = present[target.first : target.first + target.rows].cpu().float() * (1 - gain)

    def _base(self, target: Target) -> torch.Tensor:
        """Return the rows of ``target`` in the model, float32 [rows, columns]."""
        block, last = target.product, target.first + target.rows
        if target.kind == "product":
            return dense(block.weight)[target.first : last].float()
        if target.kind == "expansion":
            return torch.cat((block.keys_HOC, block.values_HVC), dim=1).flatten(0, 1).float()
        assert target.experts is not None
        weights = block.gate_up if target.role == "into" else block.down
        own = weights[self._local(target, target.experts.start)]
        return dense(own)[target.first : last].float()

    def _replace_bias(self, entry: Wanted, target: Target, piece: _Piece, bias: torch.Tensor | None) -> None:
        assert bias is not None
        if target.kind != "product":
            raise CheckpointError(f"the adapter has a bias of {entry.module}, which has none", param="lora")
        present = target.product.bias
        last = target.first + target.rows
        before = 0.0 if present is None or piece.whole is not None else present[target.first : last].cpu()
        shift = bias.float() - before
        piece.shift = shift if piece.shift is None else piece.shift + shift

    def _place_experts(self, entry: Wanted, target: Target, wanted: list[Wanted]) -> None:
        own = target.experts
        assert own is not None
        single = len(own) == 1 and ".experts." in f".{unwrapped(entry.module)}"
        if (
            entry.a is None
            or entry.b is None
            or entry.whole is not None
            or entry.bias is not None
            or entry.b_bias is not None
            or (entry.magnitude is not None and not single)
        ):
            raise CheckpointError(
                f"the adapter has more than factors of {entry.module}: of experts weft "
                "serves A and B, and DoRA of single ones",
                param="lora",
            )
        if single:
            rows, columns = target.whole_shape
            self._check(entry, "lora_A", entry.a, (entry.a.shape[0], columns))
            self._check(entry, "lora_B", entry.b, (rows, entry.a.shape[0]))
            scaled = entry.b.float() * self._settings.scale_of(_key(entry.module))
            b = self._rows(scaled, target, 0, rows)
            piece = self._add_expert(target, own.start, _cut(target.shard, entry.a.float(), 1), b)
            if entry.magnitude is not None:
                magnitude = self._rows(entry.magnitude.reshape(-1), target, 0, rows)
                assert magnitude is not None
                self._decompose(entry, target, piece, magnitude)
            return
        target = self._stack(entry, target, wanted)
        count, shard = target.product.shape.count, target.shard
        rows, columns = target.rows, target.columns
        if shard is not None and shard.dim:
            rows, columns = (shard.total, columns) if shard.dim == 1 else (rows, shard.total)
            shard = Shard(shard.dim - 1, shard.spans, shard.total, shard.absent)
        else:
            shard = None  # experts are divided by their number, if at all
        rank = self._settings.rank_of(_key(entry.module))
        self._check(entry, "lora_A", entry.a, (rank * count, columns))
        self._check(entry, "lora_B", entry.b, (rows, rank * count))
        all_a = entry.a.float().reshape(count, rank, columns)
        scaled = entry.b.float() * self._settings.scale_of(_key(entry.module))
        all_b = scaled.reshape(rows, rank, count).permute(2, 0, 1)
        for number in own:
            self._add_expert(target, number, _cut(shard, all_a[number], 1), _cut(shard, all_b[number], 0))

    def _add_expert(self, target: Target, number: int, a: torch.Tensor | None, b: torch.Tensor | None) -> _Piece:
        sides = self._experts.setdefault(id(target.product), (target.product, {}))[1]
        piece = _Piece(target.first, target.rows, a, b)
        sides.setdefault((target.role, self._local(target, number)), []).append(piece)
        return piece

    def _local(self, target: Target, number: int) -> int:
        """Return the index of expert ``number`` in the block."""
        own = target.product.own
        return number if own is None else number - int(own.start)

    def _stack(self, entry: Wanted, target: Target, wanted: list[Wanted]) -> Target:
        """Return the stack that ``entry`` changes. Both stacks of a module have its name, so the nesting tells them
        apart.
        """
        if unwrapped(entry.module).endswith((".gate_up_proj", ".up_proj", ".down_proj", "_linear")):
            return target
        home = unwrapped(entry.module)
        nested = any(other.module == entry.module and other.depth != entry.depth for other in wanted)
        named = [parameter for parameter in self._settings.targets if "experts." in f"{parameter}."]
        is_down = entry.depth == 0 if nested else any(name.endswith("down_proj") for name in named)
        leaf = "down_proj" if is_down else "gate_up_proj"
        return self._model.targets.find(f"{home}.{leaf}")

    def _place_table(self, entry: Wanted, target: Target) -> None:
        rows, columns = target.rows, target.columns
        if entry.whole is not None and entry.a is None:
            self._check(entry, "weight", entry.whole, (rows, columns))
            self._table = TableChange(whole=entry.whole.to(self._dtype, copy=True))
            return
        if entry.a is None or entry.b is None or not entry.of_table:
            raise CheckpointError(f"the adapter has no embedding factors of {entry.module}", param="lora")
        rank = self._settings.rank_of(_key(entry.module))
        self._check(entry, "lora_embedding_A", entry.a, (rank, rows))
        self._check(entry, "lora_embedding_B", entry.b, (columns, rank))
        scale = self._settings.scale_of(_key(entry.module))
        low, up = _even(entry.a.T.to(self._dtype)), _even(entry.b.float() * scale)
        self._table = TableChange(low.contiguous(), self._factor(up))

    def _change(self, pieces: list[_Piece]) -> ProductChange:
        parts, downs, begin = [], [], 0
        for piece in sorted(pieces, key=lambda part: part.first):
            part = Part(
                piece.first,
                piece.first + piece.rows,
                gain=self._vector(piece.gain),
                shift=self._vector(piece.shift),
                whole=None if piece.whole is None else self._factor(piece.whole.clone()),
            )
            if piece.a is not None and piece.b is not None:
                low = _even(piece.a.T).T
                downs.append(low)
                part.begin, part.end = begin, begin + low.shape[0]
                part.up = self._factor(_even(piece.b))
                begin = part.end
            parts.append(part)
        return ProductChange(self._factor(torch.cat(downs)) if downs else None, tuple(parts), self._dtype)

    def _latent_change(self, block: Any, piece: _Piece) -> LatentChange:
        assert piece.a is not None
        assert piece.b is not None
        heads, own = block.shape.heads, block.shape.own_dim
        low = piece.a.to(self._dtype, copy=True)
        up_HWR = piece.b.to(self._dtype).reshape(heads, -1, piece.b.shape[1])
        change = LatentChange(low, up_HWR[:, :own].contiguous(), up_HWR[:, own:].transpose(1, 2).contiguous())
        if piece.gain is not None:
            gain_HW = piece.gain.to(self._dtype).view(heads, -1)
            change.gain_HO, change.gain_HV = gain_HW[:, :own], gain_HW[:, own:]
        return change

    def _factor(self, values: torch.Tensor) -> Factor:
        values = values.to(self._dtype)
        return Factor.of(values) if self._tiled else Factor(values.contiguous())

    def _vector(self, values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.to(self._dtype)

    def _check(self, entry: Wanted, what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"the adapter's {what} of {entry.module} is {list(tensor.shape)}; this model "
                f"and its adapter_config.json make it {list(shape)}",
                param="lora",
            )


def _key(module: str) -> str:
    """Return the name as patterns of peft see it."""
    return module.removeprefix("base_model.model.")


def _even(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with an even number of columns: tiles of bfloat16 have them in pairs."""
    return torch.nn.functional.pad(values, (0, values.shape[1] % 2))


def _cut(shard: Shard | None, values: torch.Tensor | None, dim: int) -> torch.Tensor | None:
    """Return this rank's part of a factor whose ``dim`` is that of the stored matrix."""
    if values is None or shard is None or shard.dim != dim or shard.absent or dim >= values.ndim:
        return values
    return torch.cat([values.narrow(dim, begin, count) for begin, count in shard.spans], dim=dim)
