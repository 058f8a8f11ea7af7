"""Named tensors of a checkpoint as a model asks for them: checked against headers first, then read.

    CheckpointFiles --+-- TensorCheck    answers each request with a meta tensor, notes what is missing or
    mis-shaped
                      +-- TensorReader   answers the same requests with weights

``TensorAccess`` is the part that both share: single tensors, several below each other, and what they take in
memory. ``weights.TensorSource`` adds matrices, which may be quantised.

``tensor`` and ``rows`` give values in the model's dtype, whatever they are stored in (``forms``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from weft.families.sharding import RankPlace
from weft.families.tensors import Tensor
from weft.models.blocks.linear import PlainWeight
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.forms import stored_form
from weft.models.forms.stored_form import FLOATS
from weft.models.runtime_form import RuntimeForm
from weft.models.sharded_model import RankShare
from weft.models.sharding import Shard, ShardHeaders, shard_of, shard_of_piece
from weft.tensor.weights.quantized import Codes, QuantizedWeight
from weft.tensor.weights.twelve_bit import TwelveBitWeight

OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) as weights are read."""

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
                "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
                "F8_E8M0": torch.float8_e8m0fnu}

Part = tuple[str, int] | tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]
"""(name, rows) of a matrix, or with the order that its rows are put into: a function of [rows, anything]."""


class TensorAccess(ABC):
    """Names are relative to the language model ("layers.0.…").

    ``dtype`` is the model's; a read may ask for another one (float32 for decay rates). ``copies``: pairs of
    stored names that must hold the same bytes. ``share``: of one rank of several; shapes that are asked
    for are the rank's own.
    """

    def __init__(self, checkpoint: CheckpointFiles, dtype: torch.dtype,
                 runtime: RuntimeForm | None = None, share: RankShare | None = None) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.share = share
        self.runtime = runtime or RuntimeForm()
        self.form = stored_form(checkpoint.config, checkpoint.tensors)
        self.form.keeps_fp8 = self.runtime.keeps_fp8
        self.place = RankPlace() if share is None else share.place
        self.declared: dict[str, Tensor] = {}
        """By their stored names, tensors that ranks divide."""
        if share is not None:
            self.form.tensors = ShardHeaders(checkpoint.tensors, self.shard_of)
        self.used: set[str] = set()
        self.copies: list[tuple[str, str]] = []
        self._bytes_by_form: Counter[str] = Counter()
        self.held_bytes = 0
        """Bytes of all that was handed out: what the model takes in memory."""

    def has(self, name: str) -> bool:
        return self._known(self.checkpoint.prefix + name)

    def stored_rows(self, name: str) -> int:
        """First dim of a tensor as it is stored, 0 without the tensor."""
        stored = self.checkpoint.tensors.get(self.checkpoint.prefix + name)
        return stored.shape[0] if stored is not None and stored.shape else 0

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor of exactly ``shape``."""
        out = self._empty(shape, dtype)
        self._fill(out, self.checkpoint.prefix + name)
        return self._counted(out)

    def rows(self, parts: Sequence[tuple[str, int]], *columns: int) -> torch.Tensor:
        """Several tensors [rows_i, *columns] one below the other, as one [sum of rows, *columns]."""
        return self._counted(self._rows(parts, columns))

    def leave_copy(self, name: str, original: str) -> None:
        """Tensors under ``name`` are not read: each must be a copy of the tensor under ``original``."""
        prefix = self.checkpoint.prefix
        for stored in self.checkpoint.tensors:
            if stored.startswith(f"{prefix}{name}."):
                self.used.add(stored)
                self.copies.append((prefix + original + stored.removeprefix(prefix + name), stored))

    def form_in_words(self) -> str:
        """What the matrices are now, most bytes first: ``int4, int8, bfloat16``."""
        return ", ".join(sorted(self._bytes_by_form, key=lambda form: -self._bytes_by_form[form]))

    def summed(self, block: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A part of a block that ends in a product whose columns ranks divide: its result is summed."""
        return block if self.share is None else self.share.summed(block)

    def own_experts(self, count: int) -> range:
        """Of ``count`` experts, those that are asked for."""
        if self.share is None or not self.place.by_expert:
            return range(count)
        return self.share.experts(count)

    def declare(self, name: str, tensor: Tensor) -> None:
        """What ``name``, with its prefix, is in all: before it is asked for."""
        if self.share is not None:
            self.declared[name] = tensor

    def shard_of(self, name: str) -> Shard | None:
        """What is read of the stored tensor ``name``; None for all of it."""
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

    def _count(self, weight: PlainWeight) -> None:
        size = held_bytes(weight)
        form = (weight.form if isinstance(weight, QuantizedWeight | TwelveBitWeight)
                else str(weight.dtype).removeprefix("torch."))
        self.held_bytes += size
        self._bytes_by_form[form] += size

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor)
        return tensor

    def _known(self, name: str) -> bool:
        return name in self.checkpoint.tensors or self.form.holds(name)

    def _rows(self, parts: Sequence[tuple[str, int]], columns: tuple[int, ...]) -> torch.Tensor:
        out = self._empty((sum(count for _, count in parts), *columns), None)
        first = 0
        for name, count in parts:
            self._fill(out[first:first + count], self.checkpoint.prefix + name)
            first += count
        return out

    def _packed(self, parts: Sequence[Part], columns: int) -> TwelveBitWeight | None:
        """Several tensors below each other, in 12 bits straight from the file; None where that is not
        possible or not the form."""
        return None

    def _packed_experts(self, name: str, count: int, rows: int, columns: int) -> list[TwelveBitWeight] | None:
        """The same of one tensor [count, rows, columns], each expert by itself."""
        return None

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
