"""Interface of a form of storage: whether a matrix is stored in it, and the values or codes of the matrix.

    TensorSource --wants "x.weight" [rows, columns]--> StoredForm.read(ask, ...) --ask("x.qweight", ...)--+
                                                                                                          |
      Codes (kept in 8 or 4 bits)  or  a float32 tensor (widened)  <--------------------------------------+
      fp8 is kept if ``keeps_fp8`` is set, nf4 and fp4 if ``keeps_float_tables`` is

``ask(name, shape, dtypes)`` returns one stored tensor as it is in the file. Against headers it returns a meta tensor
and notes faults. So a form states its needs once, and decides nothing by value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from weft.errors import CheckpointError
from weft.models.safetensors_header import StoredTensor
from weft.tensor.weights.quantized import Codes

FLOATS = ("F32", "BF16", "F16", "F64")
WHOLE = ("I64", "I32")
CANNOT_CUT = "its groups are not neighbouring columns, so --tp cannot cut them"


class Ask(Protocol):
    def __call__(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """A stored tensor that is part of the matrix ``matrix`` ("….weight"). ``rows``: (dimension of the tensor along the
    matrix's rows, rows of the matrix per entry), None without such a dimension; 0 rows per entry means the matrix's
    rows divided by the entries. ``columns``: the same for columns. ``run``: numbers of the matrix per entry, if they
    are counted across rows. ``block``: numbers of a block, which cannot be cut.
    """

    matrix: str
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    run: int = 0
    block: int = 0


class Grouping(NamedTuple):
    """Grouping of a matrix's codes. ``columns``: columns that share a scale, 0 for undivided rows. ``minimums``: a
    group has a minimum. ``by_blocks``: scales are ``BlockNumbers``. ``table``: values of the codes. ``floats``: the
    table is of floats. ``ordered``: columns may have their own order, which the values tell (``Codes.order``).
    """

    bits: int
    columns: int
    fp8: bool = False
    minimums: bool = False
    by_blocks: bool = False
    table: tuple[int, ...] = ()
    floats: bool = False
    ordered: bool = False


class StoredForm(ABC):
    """One form of storage. ``settings``: quantization_config. ``headers``: the checkpoint's tensors as the files have
    them; ``tensors``: as a rank holds them, set once the form is chosen. ``keeps_fp8``: matrices in fp8 stay codes.
    ``keeps_float_tables``: so do those in nf4 and fp4. ``keeps_blocks``: so do those whose groups have minimums, 16
    columns or bytes for scales. ``itemsize``: the bytes of a widened value.
    """

    tensors: Mapping[str, StoredTensor]
    headers: Mapping[str, StoredTensor]
    keeps_fp8: bool = False
    keeps_blocks: bool = True
    keeps_float_tables: bool = False
    itemsize: int = 4
    places: Callable[[str], torch.Tensor | None] = staticmethod(lambda name: None)
    """Name of a stored tensor -> the indices of the entries that this rank holds, None for all."""
    left_ends: tuple[str, ...] = ()
    """Ends of names that no model reads and that a checkpoint may have."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.tensors = self.headers = {}

    @property
    def rounds_inputs(self) -> bool:
        """Return whether inputs may be rounded like the matrices; False if only weights are rounded."""
        return True

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Return whether the matrix ``name`` ("….weight") is stored in this form, as the headers tell."""

    @abstractmethod
    def grouping(self, name: str, columns: int) -> Grouping | None:
        """Return the grouping of ``read``'s Codes for a matrix with ``columns``; None if it widens. Only for matrices
        that the form holds.
        """

    @abstractmethod
    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        """Return the matrix ``name`` of ``shape`` [rows, columns]; float32 if it is widened."""

    def piece(self, name: str) -> MatrixPiece | None:
        """Return the part of a matrix that the stored tensor ``name`` is; None for an ordinary tensor. Raises
        CheckpointError if such a tensor cannot be divided.
        """
        return None

    def note(self) -> str | None:
        """Return a sentence for the user about the matrices that were read."""
        return None

    def dtype_of(self, name: str) -> str | None:
        stored = self.headers.get(name)
        return None if stored is None else stored.dtype


class Plain(StoredForm):
    """Form without quantisation: every tensor is an ordinary one."""

    def holds(self, name: str) -> bool:
        return False

    def grouping(self, name: str, columns: int) -> None:
        return None

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return ask(name, shape, FLOATS)


def refuse(method: str, key: str, value: object, reason: str) -> NoReturn:
    raise CheckpointError(
        f"config.json has quantization_config.{key} {value!r} with quant_method {method}; {reason}", param="model"
    )


def mapping(method: str, key: str, value: object) -> Mapping[str, Any]:
    """Return ``value`` of ``key``, settings by their names; empty for none."""
    if value and not isinstance(value, Mapping):
        refuse(method, key, value, "it must be an object of settings by name")
    return value if isinstance(value, Mapping) else {}


def mappings(method: str, key: str, value: object) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each group or layer that ``value`` of ``key`` names, by the full key."""
    return {f"{key}.{name}": mapping(method, f"{key}.{name}", own) for name, own in mapping(method, key, value).items()}


def number(method: str, key: str, value: object, usual: int) -> int:
    """Return ``value`` of ``key``; ``usual`` for none."""
    if value is None:
        return usual
    if not isinstance(value, int):
        refuse(method, key, value, "it must be a whole number")
    return value


def order_by_group(name: str, of_column: torch.Tensor, group: int) -> torch.Tensor | None:
    """Return int32 [columns]: the columns by group, in the order of ``of_column`` if groups are equal; None if they
    are in that order already. ``of_column`` [columns], the tensor ``name``: the group of each column. Raises
    CheckpointError if a group but the last does not have ``group`` columns.
    """
    columns = of_column.shape[0]
    if of_column.is_meta:
        return of_column.to(torch.int32)
    groups, low, high = -(-columns // group), int(of_column.min()), int(of_column.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"tensor {name} names the group {low if low < 0 else high}; {columns} columns "
            f"in groups of {group} have groups 0 to {groups - 1}",
            param="model",
        )
    counts = torch.bincount(of_column, minlength=groups).tolist()
    for number, count in enumerate(counts[:-1]):
        if count != group:
            raise CheckpointError(
                f"tensor {name} gives group {number} {count} columns; groups have {group}", param="model"
            )
    order = torch.argsort(of_column, stable=True)
    lies_so = torch.equal(order, torch.arange(columns, device=order.device))
    return None if lies_so else order.to(torch.int32)


def unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the codes of int32 words along ``dim``, lowest bits first: uint8, ``dim`` 32 / bits times as long."""
    dim %= words.ndim
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    shifts = shifts.view(*([1] * (dim + 1)), -1, *([1] * (words.ndim - dim - 1)))
    codes = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)
