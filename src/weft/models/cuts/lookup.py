"""From the name of a stored tensor to the bytes of it that a rank reads.

    "layers.3.linear_attn.in_proj_qkv.weight"  --table of layer 3-->  Cut("rows", (q, k, v))
                                                                          |  stored shape [8192, 2048]
                                                                          v
                                             StoredCut: dimension 0, spans [0, 1024) [2048, 3072) [4096, 6144)

The number of a layer picks its tables; the last two names of the path, then the last one alone, pick the
entry. ``weight`` and ``bias`` are no part of the key. Experts stored one by one share one entry.

A bias beside cut columns is the first rank's: the sum over ranks has it once. Other ranks hold zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import CheckpointError
from weft.families.architecture import Architecture, MtpLayer
from weft.models.cuts.tables import (
    HEAD,
    NORMS,
    Cut,
    Part,
    RankPlace,
    Table,
    feed_table,
    mixer_table,
    vocabulary,
)
from weft.models.forms.stored_form import MatrixPiece
from weft.models.safetensors_header import StoredTensor

_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_USE = re.compile(r"_adapter_list\.\d+\.")
_DIMS = {"rows": -2, "columns": -1, "channels": 0, "experts": 0}


@dataclass(frozen=True, slots=True)
class StoredCut:
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
        """Whether a tensor ``stored`` in this shape can be cut so."""
        return self.absent or (self.dim < len(stored) and stored[self.dim] == self.total)

    def read_bytes(self, stored_bytes: int) -> int:
        """Of ``stored_bytes``, what this rank reads."""
        return 0 if self.absent else stored_bytes * self.count // max(self.total, 1)


class Cutter:
    """The cuts of one rank for a checkpoint. ``outside``: of tensors that no layer has; ``layers``: of
    tensors by the number of their layer."""

    def __init__(self, place: RankPlace, outside: Table, layers: Sequence[Table]) -> None:
        self.place = place
        self._outside = outside
        self._layers = layers

    @classmethod
    def of(cls, whole: Architecture, place: RankPlace) -> Cutter:
        return cls(place, {**NORMS, **vocabulary(whole.vocab_size, place)},
                   [{**NORMS, **feed_table(feed, place), **mixer_table(mixer, place)}
                    for mixer, feed in zip(whole.mixers, whole.feed_forwards, strict=True)])

    @classmethod
    def of_head(cls, head: MtpLayer, place: RankPlace) -> Cutter:
        """Some families store the two halves of its layer under two numbers."""
        layer = {**NORMS, **HEAD, **feed_table(head.feed_forward, place),
                 **mixer_table(head.attention, place)}
        return cls(place, {**NORMS, **HEAD}, [layer, layer])

    def cut(self, name: str) -> Cut:
        """Of the tensor ``name``, relative to the language model. Raises CheckpointError for a name that no
        table has."""
        layer = _LAYER.fullmatch(name)
        table = self._layers[int(layer[1])] if layer and int(layer[1]) < len(self._layers) else self._outside
        path = _USE.sub("_adapter_list.", _EXPERT.sub("experts.", layer[2] if layer else name)).split(".")
        if path[-1] in ("weight", "bias"):
            path.pop()
        for key in (".".join(path[-2:]), path[-1]):
            if key in table:
                return table[key]
        raise CheckpointError(f"--tp is {self.place.size}, and weft has no cut for tensor {name}",
                              param="--tp")

    def stored_cut(self, name: str, shape: tuple[int, ...],
                   piece: MatrixPiece | None = None) -> StoredCut | None:
        """Of a tensor ``name`` stored in ``shape``; None where this rank reads all of it. ``piece``: it is
        part of a quantised matrix. Raises CheckpointError where a span begins or ends inside of an entry."""
        cut = self.cut(piece.matrix if piece is not None else name)
        if cut.axis == "whole" or (cut.axis == "experts" and len(shape) < 3):
            return None   # an expert stored by itself is read by the rank that has it
        if cut.axis == "columns" and name.endswith("bias"):
            return None if self.place.rank == 0 else StoredCut(0, (), 0, absent=True)
        if piece is None or cut.axis == "experts":
            dim = 0 if len(shape) == 1 else _DIMS[cut.axis] % len(shape)
            return StoredCut(dim, _spans(cut.parts), sum(part.total for part in cut.parts))
        along = piece.rows if cut.axis == "rows" else piece.columns
        if along is None or not shape or shape[along[0] % len(shape)] == 1 or len(shape) == 1:
            return None
        return self._cut_of_piece(name, cut, along[0] % len(shape), shape, along[1])

    def _cut_of_piece(self, name: str, cut: Cut, dim: int, shape: tuple[int, ...], each: int) -> StoredCut:
        total, entries = sum(part.total for part in cut.parts), shape[dim]
        each = each or total // entries
        spans = []
        for begin, count in _spans(cut.parts):
            if begin % each or (count % each and begin + count != total):
                raise CheckpointError(
                    f"--tp is {self.place.size}, and {name} has one entry for {each} {cut.axis} of its "
                    f"matrix: rank {self.place.rank} would hold {count} from {begin} on, a part of one",
                    param="--tp")
            spans.append((begin // each, -(-count // each)))
        return StoredCut(dim, tuple(spans), -(-total // each))


class RankHeaders(Mapping[str, StoredTensor]):
    """``tensors`` with the shapes that one rank holds; ``cut``: of a name."""

    def __init__(self, tensors: Mapping[str, StoredTensor], cut: Callable[[str], StoredCut | None]) -> None:
        self._tensors = tensors
        self._cut = cut

    def __getitem__(self, name: str) -> StoredTensor:
        stored = self._tensors[name]
        cut = self._cut(name)
        return stored if cut is None else replace(stored, shape=cut.of_rank(stored.shape))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _spans(parts: tuple[Part, ...]) -> tuple[tuple[int, int], ...]:
    spans, first = [], 0
    for part in parts:
        spans.append((first + part.begin, part.count))
        first += part.total
    return tuple(spans)
