"""Tensors of a checkpoint as a model asks for them, checked against headers first and then read.

    CheckpointFiles --+-- TensorCheck    answers with a meta tensor, and notes missing or mis-shaped tensors
                      +-- TensorReader   answers the same requests with weights

A model states its tensors exactly once, as the code that builds it from a ``TensorSource``. Running that
code against ``TensorCheck`` costs milliseconds and reports *all* faults before a byte of weights is read;
running it again against ``TensorReader`` builds the model. No second list of names has to be kept in step.

    source.linear([("q_proj.weight", 64), ("k_proj.weight", 32)], 128)
      each stored as values          -> one matrix [96, 128]  -> tiled, packed, or rounded by ``runtime_form``
      each stored as codes (forms)   -> one matrix of codes, as they are
      some of each                   -> ``JoinedWeight``: neighbours of one kind are one matrix
      codes in other orders          -> the same: neighbours of one order are one matrix, and one gather of x

``tensor`` and ``rows`` return values in the model's dtype, from any stored form (``forms``). ``linear``, ``experts``
and ``head`` return matrices of products, in the form that ``runtime_form`` decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from weft.families.rank_place import RankPlace
from weft.families.tensors import Numbered, Tensor
from weft.models.adapter_targets import Target
from weft.models.blocks.linear import Linear
from weft.models.checkpoint_files import HEADS, CheckpointFiles
from weft.models.forms import stored_form
from weft.models.forms.stored_form import FLOATS, WHOLE, Grouping
from weft.models.rank_share import RankShare
from weft.models.runtime_form import RuntimeForm
from weft.models.sharding import Shard, ShardHeaders, shard_of, shard_of_piece
from weft.tensor.ops.linear import JoinedWeight, Matrix, Weight, dense
from weft.tensor.ops.moe import ExpertWeights
from weft.tensor.weights.quantized import Codes
from weft.tensor.weights.tiles import ExpertTiles, InTiles, TwelveBitWeight

OnProgress = Callable[[int, int], None]
"""Function called with (bytes read, bytes in all) as weights are read."""

Order = Callable[[torch.Tensor], torch.Tensor]
"""Function from rows [rows, anything] as they are stored to a block's order."""
Part = tuple[str, int] | tuple[str, int, Order]
"""(name, rows) of a matrix, or with the order that its rows are put into."""

Counted = TypeVar("Counted", bound=Matrix | ExpertTiles)


class TensorSource(ABC):
    """Source of a model's tensors. Names are relative to the language model ("layers.0.…").

    ``dtype`` is the model's; a read may ask for another one (float32 for decay rates). ``copies``: pairs of stored
    names that must hold the same bytes. ``derived``: by stored names, values that they must hold, and the keys of
    config.json that lead to them. ``share``: of one rank of several; requested shapes are the rank's own.
    """

    def __init__(
        self,
        checkpoint: CheckpointFiles,
        dtype: torch.dtype,
        runtime: RuntimeForm | None = None,
        share: RankShare | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.share = share
        self.form = stored_form(checkpoint.config, checkpoint.tensors)
        runtime = runtime or RuntimeForm()
        self.runtime = replace(runtime, fp8_inputs=runtime.fp8_inputs and self.form.rounds_inputs)
        self.form.keeps_fp8 = self.runtime.keeps_fp8
        self.form.keeps_float_tables = self.runtime.keeps_float_tables
        self.form.keeps_blocks = not self.runtime.on_gpu_kernels
        self.form.itemsize = dtype.itemsize
        self.place = RankPlace() if share is None else share.place
        self.declared: dict[str, Tensor] = {}
        """Tensors that ranks divide, by their stored names."""
        if share is not None:
            self.form.tensors = ShardHeaders(checkpoint.tensors, self.shard_of)
            self.form.places = self._places
        self.used: set[str] = set()
        self.left: set[str] = set()
        """Names in ``used`` that are not read, because the configuration has their content."""
        self.table_name = ""
        self.copies: list[tuple[str, str]] = []
        self.derived: dict[str, tuple[torch.Tensor, str]] = {}
        self._bytes_by_form: Counter[str] = Counter()
        self.held_bytes = 0
        """Bytes of everything that was handed out: the memory of the model."""
        self.targets: dict[str, Target] = {}
        """Targets of adapters, by the name of a stored matrix without its ending."""

    def note(
        self, name: str, product: object, rows: int, columns: int, *, tensor: Tensor | None = None, **settings: Any
    ) -> None:
        """Note that the matrix under ``name`` is [rows, columns] of ``product``. ``settings``: of the ``Target``.
        ``tensor``: its undivided form, if it was not declared under that name.
        """
        shard = None
        if self.share is not None:
            tensor = tensor or self.declared.get(self.checkpoint.prefix + name) or self.declared.get(name)
            shard = None if tensor is None else shard_of(tensor, self.place)
        self.targets[name.removesuffix(".weight")] = Target(product, rows, columns, shard=shard, **settings)

    def has(self, name: str) -> bool:
        return self._known(self.checkpoint.prefix + name)

    def stored_rows(self, name: str) -> int:
        """Return the first dim of a tensor as it is stored, 0 without the tensor."""
        stored = self.checkpoint.tensors.get(self.checkpoint.prefix + name)
        return stored.shape[0] if stored is not None and stored.shape else 0

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one tensor of exactly ``shape``."""
        out = self._empty(shape, dtype)
        self._fill(out, self.checkpoint.prefix + name)
        return self._counted(out)

    def numbers(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor of whole numbers of exactly ``shape``, int32."""
        return self._counted(self._stored(self.checkpoint.prefix + name, shape, WHOLE).to(torch.int32))

    def exact(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Matrix:
        """Return a matrix of exactly ``shape`` that is never rounded or packed."""
        out = self._empty(shape, dtype)
        self._fill(out, self.checkpoint.prefix + name)
        return self._counted(self.runtime.of_exact(out))

    def rows(self, parts: Sequence[tuple[str, int]], *columns: int) -> torch.Tensor:
        """Return several tensors [rows_i, *columns], stacked as one [sum of rows, *columns]."""
        return self._counted(self._rows(parts, columns))

    def cut(self, values: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        """Return rows [begin, begin + count) of ``values``, which were read, as a copy. The others are counted no
        longer."""
        own = values[begin : begin + count].clone()
        self._count(own)
        self._count(values, times=-1)
        return own

    def leave(self, name: str, values: torch.Tensor | None = None, keys: str = "") -> None:
        """Do not read the tensor under ``name``, which follows from ``keys`` of the configuration. ``values``: its
        required content, in this order.
        """
        stored = self.checkpoint.prefix + name
        self.used.add(stored)
        self.left.add(stored)
        if values is not None and stored in self.checkpoint.tensors:
            self.derived[stored] = values, keys

    def leave_all(self, beginning: str) -> None:
        """Do not read tensors whose names begin with ``beginning``: they change nothing of the model."""
        beginning = self.checkpoint.prefix + beginning
        self.used.update(name for name in self.checkpoint.tensors if name.startswith(beginning))

    def leave_copy(self, name: str, original: str) -> None:
        """Do not read the tensors under ``name``: each must be a copy of the tensor under ``original``."""
        prefix = self.checkpoint.prefix
        for stored in self.checkpoint.tensors:
            if stored.startswith(f"{prefix}{name}."):
                self.used.add(stored)
                self.copies.append((prefix + original + stored.removeprefix(prefix + name), stored))

    def form_in_words(self) -> str:
        """Return the forms of the matrices in words, most bytes first: ``int4, int8, bfloat16``."""
        return ", ".join(sorted(self._bytes_by_form, key=lambda form: -self._bytes_by_form[form]))

    def summed(self, block: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a part of a block, which ends in a product whose columns ranks divide, with its result summed over
        ranks.
        """
        return block if self.share is None else self.share.summed(block)

    def own_experts(self, count: int) -> range:
        """Return the experts that are asked for, of ``count``."""
        if self.share is None or not self.place.by_expert:
            return range(count)
        return self.share.experts(count)

    def declare(self, name: str, tensor: Tensor) -> None:
        """Declare the undivided form of ``name``, with its prefix, before it is asked for."""
        if self.share is not None:
            self.declared[name] = tensor

    def shard_of(self, name: str) -> Shard | None:
        """Return the part that is read of the stored tensor ``name``; None for all of it."""
        stored = self.checkpoint.tensors.get(name)
        if self.share is None or stored is None:
            return None
        piece = self.form.piece(name)
        tensor = self.declared.get(name if piece is None else piece.matrix)
        if tensor is None:
            return None
        if piece is None:
            return shard_of(tensor, self.place)
        return shard_of_piece(tensor, self.place, name, piece, stored.shape)

    def _places(self, name: str) -> torch.Tensor | None:
        shard = self.shard_of(name)
        return None if shard is None else shard.places(self.checkpoint.tensors[name].shape)

    def linear(
        self, parts: Sequence[Part], columns: int, bias: torch.Tensor | None = None, *, finer: bool = False
    ) -> Linear:
        """Return projections of the same input as one product: matrices [rows_i, columns], stacked.

        Neighbours that are stored in the same form and order of columns become one matrix; where these
        differ, each run of neighbours is one.
        """
        weights: list[Matrix] = []
        for grouping, run in _runs([(self._grouping(part[0], columns), part) for part in parts]):
            if grouping is None:
                packed = self._packed(run, columns)
                if packed is not None:
                    weights.append(packed)
                    continue
                weights.append(self.runtime.of_values(self._rows(run, (columns,)), finer=finer))
            else:
                codes = [self._codes(part, columns) for part in run]
                weights += [self.runtime.of_codes(_joined(same)) for same in _in_one_order(codes)]
        product, first = self._linear(weights, bias), 0
        for part in parts:
            self.note(part[0], product, part[1], columns, first=first, order=part[2] if len(part) == 3 else None)
            first += part[1]
        return product

    def table(self, name: str, tensor: Tensor, *, is_head: bool) -> Matrix:
        """Return the embedding. ``is_head``: logits are made with it as well."""
        self.declare(self.checkpoint.prefix + name, tensor)
        rows, columns = tensor.shape(self.place)
        self.table_name = name
        grouping = self._grouping(name, columns)
        apart = self.share is None and not self.runtime.on_gpu_kernels
        if grouping is not None and not grouping.ordered and apart:
            return self._counted(self.runtime.of_codes(self._codes((name, rows), columns), self.dtype))
        if grouping is not None or not is_head:
            return self.tensor(name, rows, columns)
        packed = self._packed([(name, rows)], columns)
        table = self.runtime.of_table(self._rows([(name, rows)], (columns,))) if packed is None else packed
        self._count(table)
        return table

    def again(self, product: Linear, name: str, other: str) -> Linear:
        """Return the same weights as a separate product: adapters of tensors under ``other`` change it, those of
        tensors under ``name`` the first one.
        """
        copy = Linear(product.weight, product.bias)
        for stored, target in list(self.targets.items()):
            if getattr(target.product, "weight", None) is product.weight and stored.startswith(f"{name}."):
                self.targets[other + stored.removeprefix(name)] = replace(target, product=copy)
        return copy

    def head(self, tensor: Tensor, tied: Matrix | None = None, bias: Tensor | None = None, known: int = 0) -> Linear:
        """Return the output projection, which wrappers keep outside of the language model. ``tied``: the embedding, if
        that is the head as well. ``bias``: that of the head, if it has one. ``known``: number of rows that files may
        have in place of all; others are zeros.
        """
        head = self._head(tensor, tied, known)
        if bias is not None:
            named = [name.replace("weight", "bias") for name in HEADS]
            name = next((name for name in named if self._known(name)), named[0])
            self.declare(name, bias)
            out = self._empty(bias.shape(self.place), None)
            self._fill(out, name)
            head.bias = self._counted(_bias_of(head.weight, out))
        self.note("lm_head", head, *tensor.shape(self.place), tensor=tensor)
        return head

    def _head(self, tensor: Tensor, tied: Matrix | None, known: int) -> Linear:
        if isinstance(tied, Weight):
            return Linear(tied)
        if tied is not None:
            rows, columns = tensor.shape(self.place)
            if self._grouping(self.table_name, columns) is not None:
                return self._linear([self.runtime.of_codes(self._codes((self.table_name, rows), columns))], None)
            if self.runtime.quantize == "none":
                return Linear(tied)
            return self._linear([self.runtime.of_values(tied, finer=True)], None)
        name = next((name for name in HEADS if self._known(name)), HEADS[0])
        rows, columns = tensor.shape(self.place)
        in_file = self.checkpoint.tensors.get(name)
        if known and in_file is not None and in_file.shape[:1] == (known,) and isinstance(tensor.dims[0], Numbered):
            out = self._empty((rows, columns), None).zero_()
            tensor = replace(tensor, dims=(replace(tensor.dims[0], stored=known), columns))
            self.declare(name, tensor)
            self._fill(out[: tensor.shape(self.place)[0]], name)
            return self._linear([self.runtime.of_values(out, finer=True)], None)
        self.declare(name, tensor)
        if self.form.holds(name) and self.form.grouping(name, columns) is not None:
            codes = self.form.read(self._stored, name, (rows, columns))
            assert isinstance(codes, Codes)
            return self._linear([self.runtime.of_codes(codes)], None)
        out = self._empty((rows, columns), None)
        self._fill(out, name)
        return self._linear([self.runtime.of_values(out, finer=True)], None)

    def experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeights:
        """Return [len(names), len(names[0]) * rows, columns]: for each entry its matrices [rows, columns], stacked. In
        tiles each expert is separate; otherwise experts stored one by one become one tensor.
        """
        kinds = {self._grouping(name, columns) for group in names for name in group}
        if self.runtime.on_gpu_kernels:  # the Triton kernels support no column order of each expert's own
            kinds = {None if kind is not None and kind.ordered else kind for kind in kinds}
        each: list[Matrix] = []
        if None not in kinds and len(kinds) == 1:
            for group in names:
                codes = [self._codes((name, rows), columns) for name in group]
                if len(_in_one_order(codes)) == 1:
                    each.append(self.runtime.of_codes(_joined(codes)))
                else:
                    each.append(torch.cat([part.dense().to(self.dtype) for part in codes]))
        elif self.runtime.quantize == "none":
            return self._float_experts(names, rows, columns)
        else:
            each += [self.runtime.rounded(self._rows([(name, rows) for name in group], (columns,))) for group in names]
        return self._together(each)

    def _together(self, experts: Sequence[Matrix]) -> ExpertWeights:
        """Return a stack of matrices in one form, or of the values of all."""
        stacks = {getattr(type(expert), "stack", None) for expert in experts}
        stack = stacks.pop() if len(stacks) == 1 else None
        weights: ExpertWeights = (
            torch.stack([dense(expert) for expert in experts]).to(self.dtype) if stack is None else stack(experts)
        )
        return self._counted(weights)

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
        """Return all experts from one stored tensor [count, rows, columns], or [count, columns, rows] if it is
        ``transposed``. ``order`` puts its rows in another order: a function of [count, rows, anything]. With several
        tensors the rows of an expert are stacked. ``apart``: names of an expert's matrices if each is a tensor, "{}"
        for its number; nothing here reads them.
        """
        name, *more = names
        if self._grouping(name, columns) is not None and not more:
            codes = self._codes((name, rows), columns, count)
            codes = codes if order is None else codes.reordered(order)
            if self.runtime.in_coded_tiles(codes):
                return self._together([self.runtime.of_codes(codes.of(index)) for index in range(count)])
            assert codes.order is None, "a stack in one tensor has no orders"
            return cast("ExpertWeights", self._counted(self.runtime.of_codes(codes)))
        tiles = self.runtime.tiles_experts(self.device, self.dtype, columns)
        as_stored = not transposed and order is None and not more
        packed = self._packed_experts(name, count, rows, columns) if tiles and as_stored else None
        if packed is not None:
            return self._counted(ExpertTiles.of(packed))
        out = self._empty((count, columns, rows) if transposed else (count, rows * len(names), columns), None)
        for part, stored in zip(out.chunk(len(names), dim=1), names, strict=True):
            self._fill(part, self.checkpoint.prefix + stored)
        out = out.transpose(1, 2).contiguous() if transposed else out
        out = out if order is None else order(out)
        if tiles:
            return self._together([self.runtime.of_expert(expert, count) for expert in out])
        if self.runtime.quantize == "none":
            return self._counted(out)
        return self._together([self.runtime.rounded(expert) for expert in out])

    def _count(self, weight: Matrix | ExpertTiles, times: int = 1) -> None:
        for part in weight.experts if isinstance(weight, ExpertTiles) else (weight,):
            self.held_bytes += times * part.nbytes
            form = str(getattr(part, "form", part.dtype)).removeprefix("torch.")
            self._bytes_by_form[form] += times * part.nbytes

    def _counted(self, weight: Counted) -> Counted:
        self._count(weight)
        return weight

    def _known(self, name: str) -> bool:
        return name in self.checkpoint.tensors or self.form.holds(name)

    def _rows(self, parts: Sequence[Part], columns: tuple[int, ...]) -> torch.Tensor:
        out = self._empty((sum(part[1] for part in parts), *columns), None)
        for part, own in zip(parts, torch.split(out, [part[1] for part in parts]), strict=True):
            self._fill(own, self.checkpoint.prefix + part[0])
            if len(part) == 3:
                own.copy_(part[2](own))
        return out

    def _packed(self, parts: Sequence[Part], columns: int) -> TwelveBitWeight | None:
        """Return several tensors, stacked, in 12 bits straight from the file; None if that is not possible or not the
        form.
        """
        return None

    def _packed_experts(self, name: str, count: int, rows: int, columns: int) -> list[TwelveBitWeight] | None:
        """Return the experts of one tensor [count, rows, columns] in 12 bits, each separately; None as ``_packed``."""
        return None

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _fill(self, out: torch.Tensor, name: str) -> None:
        """Write the values of one tensor to ``out``, in its dtype."""
        if not self.form.holds(name):
            out.copy_(self._stored(name, tuple(out.shape), FLOATS))
            return
        read = self.form.read(self._stored, name, tuple(out.shape))
        out.copy_(read.dense() if isinstance(read, Codes) else read)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of all tensors that are handed out."""

    @abstractmethod
    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        """Return one tensor as it is in its file: of ``shape``, in one of ``dtypes`` (names of the format)."""

    def _grouping(self, name: str, columns: int) -> Grouping | None:
        """Return the grouping of the codes of a matrix; None if it is stored as values."""
        full = self.checkpoint.prefix + name
        return self.form.grouping(full, columns) if self.form.holds(full) else None

    def _codes(self, part: Part, columns: int, *stack: int) -> Codes:
        codes = self.form.read(self._stored, self.checkpoint.prefix + part[0], (*stack, part[1], columns))
        assert isinstance(codes, Codes)
        return codes.reordered(part[2]) if len(part) == 3 else codes

    def _float_experts(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> ExpertWeights:
        count = len(names)
        if not self.runtime.tiles_experts(self.device, self.dtype, columns):
            every = [(name, rows) for group in names for name in group]
            return self._counted(self._rows(every, (columns,)).view(count, -1, columns))
        each: list[InTiles] = []
        for group in names:
            parts = [(name, rows) for name in group]
            packed = self._packed(parts, columns)
            each.append(self.runtime.of_expert(self._rows(parts, (columns,)), count) if packed is None else packed)
        return self._counted(ExpertTiles.of(each))

    def _linear(self, weights: Sequence[Matrix], bias: torch.Tensor | None) -> Linear:
        for part in weights:
            self._count(part)
        weight = weights[0] if len(weights) == 1 else JoinedWeight(tuple(weights))
        return Linear(weight, None if bias is None else _bias_of(weight, bias))


def _runs(parts: Sequence[tuple[Grouping | None, Part]]) -> list[tuple[Grouping | None, list[Part]]]:
    """Group neighbours of the same kind."""
    runs: list[tuple[Grouping | None, list[Part]]] = []
    for grouping, part in parts:
        if runs and runs[-1][0] == grouping:
            runs[-1][1].append(part)
        else:
            runs.append((grouping, [part]))
    return runs


def _in_one_order(parts: Sequence[Codes]) -> list[list[Codes]]:
    """Group neighbours whose columns have the same order. All are one group if only headers are known."""
    runs: list[list[Codes]] = []
    for part in parts:
        if runs and (part.codes.is_meta or _same(runs[-1][0].order, part.order)):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _same(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


def _joined(parts: Sequence[Codes]) -> Codes:
    """Return the parts stacked; a middle zero is written out if others have their own zeros."""
    return parts[0] if len(parts) == 1 else parts[0].above(*parts[1:])


def _bias_of(weight: Matrix, bias: torch.Tensor) -> torch.Tensor:
    """Return ``bias`` as products with ``weight`` take it: in float32 by kernels, which add it to their sums."""
    return bias.float() if isinstance(weight, Weight) else bias
