"""Tensors of GGUF files: ggml's blocks, and the converter's changes undone (``weft.models.gguf``).

    stored bytes --blocks--> values or codes --rows and columns in our order, log, minus one--> as a model
    asks

A row of a matrix is a number of complete blocks, so rows are moved before anything is decoded. All other changes are
undone on values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.errors import CheckpointError
from weft.models.forms.gguf_blocks import BLOCK_FORMS, apart
from weft.models.forms.stored_form import FLOATS, Ask, Grouping, StoredForm
from weft.models.gguf.view import GgufTensor
from weft.tensor.weights.quantized import LINE, BlockNumbers, Codes, floats_of
from weft.units import format_bytes

_NOT_OF_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64")
"""Types of ggml for inputs and indices, which the package gguf does not decode."""
_DECODED_BYTES = 8 << 20
"""Bytes of blocks decoded at once, so that the temporaries of numpy stay small."""


class Gguf(StoredForm):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._widened: dict[str, tuple[int, int]] = {}

    def note(self) -> str | None:
        """Return a line about blocks that became plain values, and their memory."""
        if not self._widened:
            return None
        stored, in_memory = (sum(sizes) for sizes in zip(*self._widened.values(), strict=True))
        return (
            f"{', '.join(sorted(self._widened))} are widened to plain values: {format_bytes(stored)} "
            f"in the file, up to {format_bytes(in_memory)} in memory; --quantize int8 or int4 keeps them small"
        )

    def holds(self, name: str) -> bool:
        """Return True for all but matrices of bfloat16 in the model's layout: those go into 12 bits straight from the
        file.
        """
        stored = self.tensors.get(name)
        return isinstance(stored, GgufTensor) and not (
            stored.dtype == "BF16" and stored.undo.is_nothing and len(stored.shape) == 2 and stored.shape[-1] >= LINE
        )

    def grouping(self, name: str, columns: int) -> Grouping | None:
        stored = self.tensors[name]
        form = BLOCK_FORMS.get(stored.dtype)
        assert isinstance(stored, GgufTensor)
        if form is None or (form.of_cpus and not self.keeps_blocks) or len(stored.shape) != 2:
            return None
        undo = stored.undo
        if undo.changes_values or (undo.columns is not None and _lines(undo.columns) is None):
            return None
        if not self.keeps_blocks and (form.bits == 6 or form.table):
            return Grouping(8, form.group)
        return Grouping(
            form.bits,
            form.group,
            minimums=form.has_minimums,
            by_blocks=form.by_blocks and undo.columns is None,
            table=form.table,
        )

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        stored = self.tensors[name]
        assert isinstance(stored, GgufTensor)
        raw = ask(name, stored.shape if _fits(stored, shape) else shape, (stored.dtype,))
        as_codes = self.grouping(name, shape[-1]) is not None
        if raw.is_meta and as_codes:
            return self._for_kernels(BLOCK_FORMS[stored.dtype].empty(*shape), name)
        if raw.is_meta:
            return torch.empty(shape, dtype=torch.float32, device=raw.device)
        undo = stored.undo
        by_row = raw.reshape(_rows(stored.shape), -1)
        if undo.rows is not None:
            by_row = by_row[torch.from_numpy(undo.rows).to(raw.device)]
        if stored.in_pairs:
            by_row = apart(by_row)
        if as_codes:
            return self._for_kernels(_finite(_codes(by_row, stored), stored), name)
        values = by_row.float() if stored.dtype in FLOATS else self._decoded(by_row, stored)
        if undo.columns is not None:
            values = values[:, torch.from_numpy(undo.columns).to(raw.device)]
        if undo.log:
            values = torch.log(values.abs())
        if undo.minus:
            values = values - undo.minus
        return values.reshape(shape)

    def _for_kernels(self, codes: Codes, name: str) -> Codes:
        """Return codes in bytes for kernels of GPUs, which read no six bits and no tables."""
        grouping = self.grouping(name, codes.codes.shape[-1])
        assert grouping is not None
        return codes.in_bytes() if grouping.bits > codes.bits else codes

    def _decoded(self, by_row: torch.Tensor, stored: GgufTensor) -> torch.Tensor:
        values = _decoded(by_row, stored)
        if len(stored.shape) > 2:  # of latent attention, values in every checkpoint
            return values
        sizes = self._widened.get(stored.dtype, (0, 0))
        self._widened[stored.dtype] = (sizes[0] + stored.stored_bytes, sizes[1] + values.numel() * self.itemsize)
        return values


def _codes(by_row: torch.Tensor, stored: GgufTensor) -> Codes:
    codes = BLOCK_FORMS[stored.dtype].codes(by_row)
    lines = None if stored.undo.columns is None else _lines(stored.undo.columns)
    if lines is None:
        return codes
    of_line = LINE // codes.group
    groups = torch.from_numpy((lines[:, None] * of_line + np.arange(of_line)).reshape(-1)).to(by_row.device)
    # Lines leave their blocks, so each has its own floats.
    return replace(
        codes,
        codes=codes.codes.view(codes.codes.shape[0], -1, codes.group)[:, groups].flatten(1),
        scales=floats_of(codes.scales)[:, groups],
        minimums=None if codes.minimums is None else floats_of(codes.minimums)[:, groups],
    )


def _lines(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return the order of complete lines for an order of columns; None if it cuts a line."""
    if columns.size % LINE:
        return None
    cut = columns.reshape(-1, LINE)
    whole = bool((cut[:, 0] % LINE == 0).all()) and bool((cut == cut[:, :1] + np.arange(LINE)).all())
    return cut[:, 0] // LINE if whole else None


def _finite(codes: Codes, stored: GgufTensor) -> Codes:
    for numbers in (codes.scales, codes.minimums):
        shared = numbers.shared if isinstance(numbers, BlockNumbers) else numbers
        if shared is not None and not bool(shared.isfinite().all()):
            raise _not_finite(stored)
    return codes


def _not_finite(stored: GgufTensor) -> CheckpointError:
    return CheckpointError(f"{stored.file}: tensor {stored.name} has scales that are not finite numbers", param="model")


def _fits(stored: GgufTensor, shape: tuple[int, ...]) -> bool:
    """Return whether the number of stored values, with their changes undone, is that of ``shape``, in rows of the same
    width.
    """
    rows, undo = _rows(stored.shape), stored.undo
    width = math.prod(stored.shape) // rows if rows else 0
    if undo.rows is not None:
        if undo.rows.size and int(undo.rows.max()) >= rows:
            return False
        rows = undo.rows.size
    last = stored.shape[-1]
    if undo.columns is not None:
        if undo.columns.size and int(undo.columns.max()) >= width:
            return False
        width = last = undo.columns.size
    wide = len(stored.shape) > 1 and len(shape) > 1 and 1 not in (last, shape[-1])
    return rows * width == math.prod(shape) and (not wide or last == shape[-1])


def _rows(shape: tuple[int, ...]) -> int:
    """Return the rows of a tensor as a matrix; each number of a vector is a row."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)


def _decoded(by_row: torch.Tensor, stored: GgufTensor) -> torch.Tensor:
    """Return float32 [rows, columns] of blocks uint8 [rows, bytes]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if stored.dtype in _NOT_OF_WEIGHTS:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name} is stored as {stored.dtype}, which is not a form of weights",
            param="model",
        )
    kind = GGMLQuantizationType[stored.dtype]
    values = torch.empty((by_row.shape[0], stored.shape[-1]), dtype=torch.float32)
    step = max(1, _DECODED_BYTES // max(1, by_row.shape[1]))
    blocks = by_row.cpu().numpy()
    for first in range(0, by_row.shape[0], step):
        with np.errstate(all="ignore"):
            values[first : first + step] = torch.from_numpy(dequantize(blocks[first : first + step], kind))
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise _not_finite(stored)
    return values.to(by_row.device)
