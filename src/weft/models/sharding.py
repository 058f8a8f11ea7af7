"""Tensor-parallel shards of a checkpoint: the bytes of each stored tensor that one rank reads.

    Tensor of a table (families.tensors)  --place of the rank-->  Shard: dim 0, spans [0, 1024) [2048, 3072)
    codes, scales, zeros of a matrix      --shard of the matrix-> Shard in their own entries

The model code declares each tensor under its stored name before reading it. A tensor that is not declared is read
completely, and must have the requested shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from weft.errors import CheckpointError
from weft.families.rank_place import RankPlace, ShardSpan
from weft.families.tensors import Tensor
from weft.models.forms.stored_form import MatrixPiece
from weft.models.safetensors_header import StoredTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a stored tensor: ``spans`` of (begin, count) along dimension ``dim``. ``absent``: this rank reads
    nothing and holds zeros. ``shape``: the shape in which the stored tensor is cut, if that is not its own.
    """

    dim: int
    spans: tuple[tuple[int, int], ...]
    total: int
    absent: bool = False
    shape: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return sum(count for _, count in self.spans)

    def of_rank(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that this rank holds of a tensor ``stored`` in this shape."""
        if self.absent:
            return stored
        whole = self.shape or stored
        return (*whole[: self.dim], self.count, *whole[self.dim + 1 :])

    def fits(self, stored: tuple[int, ...]) -> bool:
        """Return whether a tensor ``stored`` in this shape can be divided so."""
        if self.shape:
            return math.prod(self.shape) == math.prod(stored)
        return self.absent or (self.dim < len(stored) and stored[self.dim] == self.total)

    def places(self, stored: tuple[int, ...]) -> torch.Tensor:
        """Return the entries that this rank holds of a tensor ``stored`` in this shape: int64, their indices in one
        row.
        """
        each = torch.arange(math.prod(stored)).view(self.shape or stored)
        return torch.cat([each.narrow(self.dim, *span) for span in self.spans], self.dim).flatten()

    def read_bytes(self, stored_bytes: int) -> int:
        """Return how many of ``stored_bytes`` this rank reads."""
        return 0 if self.absent else stored_bytes * self.count // max(self.total, 1)


def shard_of(tensor: Tensor, place: RankPlace) -> Shard | None:
    """Return the shard of ``tensor``, None if this rank reads all of it."""
    # A bias of divided columns: the sum over ranks has it once, so other ranks hold zeros.
    if tensor.of_first:
        return None if place.rank == 0 else Shard(0, (), 0, absent=True)
    divided = tensor.spans(place)
    if divided is None:
        return None
    dim, parts = divided
    return Shard(dim, _spans(parts), sum(part.total for part in parts))


def shard_of_piece(
    tensor: Tensor, place: RankPlace, name: str, piece: MatrixPiece, shape: tuple[int, ...]
) -> Shard | None:
    """Return the shard of ``name``, stored in ``shape``, a piece of the quantised matrix ``tensor``. Raises
    CheckpointError if a span begins or ends inside of an entry.
    """
    whole, divided = shard_of(tensor, place), tensor.spans(place)
    if whole is None or divided is None:
        return None
    axis = len(tensor.dims) - whole.dim
    if piece.run:
        return _shard_of_runs(tensor, place, piece, whole)
    if axis == 3:  # a stack of experts, each with its own pieces
        return whole if len(shape) > 2 else None
    along = piece.rows if axis == 2 else piece.columns
    if len(shape) == 1:  # an entry for each row, or one for all
        return whole if axis == 2 and whole.fits(shape) and shape != (1,) else None
    if along is None or not shape or shape[along[0] % len(shape)] == 1:
        return None
    dim = along[0] % len(shape)
    each = along[1] or whole.total // shape[dim]
    spans = []
    for begin, count in whole.spans:
        if begin % each or (count % each and begin + count != whole.total):
            lines = "rows" if axis == 2 else "columns"
            raise CheckpointError(
                f"--tp is {place.size}, and {name} has one entry for {each} {lines} of its matrix: "
                f"rank {place.rank} would hold {count} from {begin} on, a part of one",
                param="--tp",
            )
        spans.append((begin // each, -(-count // each)))
    return Shard(dim, tuple(spans), -(-whole.total // each))


def _shard_of_runs(tensor: Tensor, place: RankPlace, piece: MatrixPiece, whole: Shard) -> Shard:
    """Return the shard of a tensor whose entries are for numbers of the matrix in one row, independent of its rows:
    complete rows, or the same columns of each row.
    """
    by_rows = whole.dim == 0
    other = math.prod(dim for dim in tensor.dims if isinstance(dim, int))
    line = other if by_rows else 1
    if any(number * line % piece.block for span in whole.spans for number in (*span, whole.total)):
        raise CheckpointError(
            f"--tp is {place.size}, and {piece.matrix} is in blocks of {piece.block} numbers that run over "
            f"its {'rows' if by_rows else 'columns'}: rank {place.rank} would hold a part of one",
            param="--tp",
        )
    spans = tuple((begin * line // piece.run, count * line // piece.run) for begin, count in whole.spans)
    total = whole.total * line // piece.run
    return Shard(0, spans, total, shape=(total,)) if by_rows else Shard(1, spans, total, shape=(other, total))


class ShardHeaders(Mapping[str, StoredTensor]):
    """Headers of ``tensors`` with the shapes that one rank holds; ``shard``: of a name."""

    def __init__(self, tensors: Mapping[str, StoredTensor], shard: Callable[[str], Shard | None]) -> None:
        self._tensors = tensors
        self._shard = shard

    def __getitem__(self, name: str) -> StoredTensor:
        stored, shard = self._tensors[name], self._shard(name)
        return stored if shard is None else replace(stored, shape=shard.of_rank(stored.shape))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _spans(parts: tuple[ShardSpan, ...]) -> tuple[tuple[int, int], ...]:
    spans, first = [], 0
    for part in parts:
        spans.append((first + part.begin, part.count))
        first += part.total
    return tuple(spans)
