"""Tables of the stored tensors of a block, as data.

    role     the tensors that are read as one, one below the other

    "qkv"    Tensor("q_proj.weight", (Units(heads, head_dim), hidden))      dims: rows, columns
             Tensor("k_proj.weight", (Units(kv_heads, head_dim), hidden))
             Tensor("v_proj.weight", (Units(kv_heads, head_dim), hidden))
    "out"    Tensor("o_proj.weight", (hidden, Units(heads, head_dim)))

Three modules read the tables: ``planning.weights`` counts bytes, the readers of ``models.blocks`` read the tensors, and
``models.sharding`` finds the part of a rank. Dims that are not plain numbers are divided.

    in_proj_qkv   | q q q q | k k k k | v v v v v v v v |     all ranks
    rank 1 of 2   |     q q |     k k |         v v v v |     a span of each of its units

Numbers are those of the given architecture: the model's, or a rank's. Families that spell a name in another way
pass their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from weft.families.rank_place import RankPlace, ShardSpan

Form = Literal["matrix", "plain", "float32"]
"""Forms of stored tensors: a product of the stream, in the model's dtype or quantised; norms, convolutions, routers
and biases, which files never quantise; decay rates and steps of recurrent layers, kept exact."""


@dataclass(frozen=True, slots=True)
class Units:
    """Dim of ``own`` units a rank, of ``width`` entries each; ``copies`` ranks hold the same."""

    own: int
    width: int = 1
    copies: int = 1

    def most(self, size: int) -> int:
        """Return the number of entries on the one of ``size`` ranks that has the most."""
        return self.own * self.width

    def span(self, place: RankPlace) -> ShardSpan:
        return place.of_units(self.own, self.width, self.copies)


@dataclass(frozen=True, slots=True)
class Numbered:
    """Dim of ``count`` experts or tokens, divided by their number. ``stored``: number of the first ones, which files
    have; 0: all."""

    of: Literal["experts", "tokens"]
    count: int
    stored: int = 0

    def most(self, size: int) -> int:
        return -(-self.count // size)

    def span(self, place: RankPlace) -> ShardSpan:
        span = place.of_experts(self.count) if self.of == "experts" else place.of_tokens(self.count)
        if not self.stored:
            return span
        begin, end = (min(number, self.stored) for number in (span.begin, span.begin + span.count))
        return ShardSpan(self.stored, begin, end - begin)


Dim = int | Units | Numbered | tuple[Units, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Stored tensor. ``name``: the part after the name of the mixer. ``of_first``: other ranks than the first hold
    zeros."""

    name: str
    dims: tuple[Dim, ...]
    form: Form = "matrix"
    of_first: bool = False

    def elements(self, size: int) -> int:
        """Return the number of elements on the one of ``size`` ranks that has the most."""
        return math.prod(
            dim if isinstance(dim, int) else sum(unit.most(size) for unit in _units(dim)) for dim in self.dims
        )

    def shape(self, place: RankPlace) -> tuple[int, ...]:
        """Return the shape on one rank."""
        return tuple(
            dim if isinstance(dim, int) else sum(unit.span(place).count for unit in _units(dim)) for dim in self.dims
        )

    def spans(self, place: RankPlace) -> tuple[int, tuple[ShardSpan, ...]] | None:
        """Return the dim that is divided, and this rank's spans of it; None for a tensor that each rank holds."""
        for index, dim in enumerate(self.dims):
            if not isinstance(dim, int):
                return index, tuple(unit.span(place) for unit in _units(dim))
        return None


def _units(dim: Dim) -> tuple[Units | Numbered, ...]:
    assert not isinstance(dim, int)
    return dim if isinstance(dim, tuple) else (dim,)


Table = dict[str, tuple[Tensor, ...]]
"""Role -> its tensors. The bias of a role is under ``role.bias``."""
Names = tuple[str, ...]


def vocabulary(count: int, hidden: int) -> Tensor:
    """Return the tensor of the embedding, or of the head."""
    return Tensor("embed_tokens.weight", (Numbered("tokens", count), hidden), "plain")


def head_bias(count: int) -> Tensor:
    """Return the tensor of the head's bias."""
    return Tensor("lm_head.bias", (Numbered("tokens", count),), "plain")


def product(role: str, columns: Dim, *parts: tuple[str, Dim], bias: bool = False) -> Table:
    """Return the tensors of a product. ``parts``: (name, rows) of each; with ``bias`` each has one."""
    table: Table = {role: tuple(Tensor(f"{name}.weight", (rows, columns)) for name, rows in parts)}
    if bias:
        # Where columns are divided, a product is a part of a sum over ranks: its bias is the first rank's.
        of_first = not isinstance(columns, int)
        table[f"{role}.bias"] = tuple(Tensor(f"{name}.bias", (rows,), "plain", of_first) for name, rows in parts)
    return table


def conv(channels: Dim, kernel: int, name: str = "conv1d", *, bias: bool = False) -> Table:
    table: Table = {"conv": (Tensor(f"{name}.weight", (channels, 1, kernel), "plain"),)}
    return table | {"conv.bias": (Tensor(f"{name}.bias", (channels,), "plain"),)} if bias else table


def exact(*names: str, dims: tuple[Dim, ...]) -> Table:
    return {name: (Tensor(name, dims, "float32"),) for name in names}


def norm_weight(role: str, width: Dim, name: str | None = None) -> Table:
    return {role: (Tensor(f"{name or role}.weight", (width,), "plain"),)}


@dataclass(frozen=True, slots=True)
class NormGate:
    """Gate of a norm's output: ``factor`` times the sigmoid of numbers computed from that output, through a bottleneck
    of ``rank`` numbers (GigaChat 3.5)."""

    rank: int
    factor: float


def norm_gate(role: str, shape: NormGate | None, width: int, name: str) -> Table:
    """Return the tensors of the gate of the norm under ``name``, which files never quantise; every rank has all of
    them."""
    return (
        {}
        if shape is None
        else all_plain(
            product(f"{role}.into", width, (f"{name}.gate_up_projection", shape.rank))
            | product(f"{role}.out", shape.rank, (f"{name}.gate_down_projection", width))
        )
    )


def layer_norm(role: str, width: Dim, name: str) -> Table:
    return {
        part: (Tensor(f"{name}.{end}", (width,), "plain"),)
        for part, end in ((role, "weight"), (f"{role}.bias", "bias"))
    }


def all_plain(table: Table) -> Table:
    return {role: tuple(replace(tensor, form="plain") for tensor in stored) for role, stored in table.items()}
