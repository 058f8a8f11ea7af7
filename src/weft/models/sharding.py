"""Tensor-parallel shards of a checkpoint: the bytes of each stored tensor that one rank reads.

    Tensor of a table (families.tensors)  --place of the rank-->  Shard: dim 0, spans [0, 1024) [2048, 3072)
    codes, scales, zeros of a matrix      --shard of the matrix-> Shard in their own entries

The model code declares each tensor under its stored name before it asks for it. A tensor that is not declared
is read whole, and must then have the shape that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from weft.errors import CheckpointError
from weft.families.sharding import RankPlace, ShardSpan
from weft.families.tensors import Tensor
from weft.models.forms.stored_form import MatrixPiece
from weft.models.safetensors_header import StoredTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """``spans`` of (begin, count) along dimension ``dim`` of a stored tensor. ``absent``: this rank reads
    nothing and holds zeros."""

    dim: int
    spans: tuple[tuple[int, int], ...]
    total: int
    absent: bool = False

    @property
    def count(self) -> int:
        return sum(count for _, count in self.spans)

    def of_rank(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that this rank holds of a tensor ``stored`` in this shape."""
        if self.absent:
            return stored
        return (*stored[:self.dim], self.count, *stored[self.dim + 1:])

    def fits(self, stored: tuple[int, ...]) -> bool:
        """Whether a tensor ``stored`` in this shape can be divided so."""
        return self.absent or (self.dim < len(stored) and stored[self.dim] == self.total)

    def read_bytes(self, stored_bytes: int) -> int:
        """Of ``stored_bytes``, what this rank reads."""
        return 0 if self.absent else stored_bytes * self.count // max(self.total, 1)


def shard_of(tensor: Tensor, place: RankPlace) -> Shard | None:
    """None where this rank reads all of it."""
    # A bias beside divided columns: the sum over ranks has it once, so other ranks hold zeros.
    if tensor.of_first:
        return None if place.rank == 0 else Shard(0, (), 0, absent=True)
    divided = tensor.spans(place)
    if divided is None:
        return None
    dim, parts = divided
    return Shard(dim, _spans(parts), sum(part.total for part in parts))


def shard_of_piece(tensor: Tensor, place: RankPlace, name: str, piece: MatrixPiece,
                   shape: tuple[int, ...]) -> Shard | None:
    """Of ``name``, stored in ``shape``, a piece of the quantised matrix ``tensor``. Raises CheckpointError
    where a span begins or ends inside of an entry."""
    whole, divided = shard_of(tensor, place), tensor.spans(place)
    if whole is None or divided is None:
        return None
    axis = len(tensor.dims) - whole.dim
    if axis == 3:   # a stack of experts, each with its own pieces
        return whole if len(shape) > 2 else None
    along = piece.rows if axis == 2 else piece.columns
    if along is None or len(shape) < 2 or shape[along[0] % len(shape)] == 1:
        return None
    dim = along[0] % len(shape)
    each = along[1] or whole.total // shape[dim]
    spans = []
    for begin, count in whole.spans:
        if begin % each or (count % each and begin + count != whole.total):
            lines = "rows" if axis == 2 else "columns"
            raise CheckpointError(
                f"--tp is {place.size}, and {name} has one entry for {each} {lines} of its matrix: "
                f"rank {place.rank} would hold {count} from {begin} on, a part of one", param="--tp")
        spans.append((begin // each, -(-count // each)))
    return Shard(dim, tuple(spans), -(-whole.total // each))


class ShardHeaders(Mapping[str, StoredTensor]):
    """``tensors`` with the shapes that one rank holds; ``shard``: of a name."""

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
