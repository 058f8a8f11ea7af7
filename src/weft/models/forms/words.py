"""Codes in words of 32 bits: GPTQ (int4 or int8) and AWQ (int4).

    GPTQ  x.qweight  I32 [columns x bits / 32, rows]   words along the input
          x.qzeros   I32 [groups, rows x bits / 32]    words along the output
          x.g_idx    I32 [columns]                     the group of a column
    AWQ   x.qweight  I32 [columns, rows / 8]           words along the output, in an order of their own: half
          x.qzeros   I32 [groups, rows / 8]            byte i of a word is row 0 2 4 6 1 3 5 7 [i] of its 8
    both  x.scales   F16 [groups, rows]

    value[row, column] = (code - zero) * scale         kept as codes

Sources: Frantar et al., 2023, and the packing of AutoGPTQ and GPTQModel; Lin et al., 2024, and the ``gemm``
packing of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.models.forms.stored_form import FLOATS, Ask, Grouping, MatrixPiece, StoredForm, refuse, unpacked
from weft.tensor.weights.quantized import LINE, Codes


class Gptq(StoredForm):
    left_ends = ("g_idx",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.bits = settings.get("bits", 4)
        if self.bits not in (4, 8):
            refuse("gptq", "bits", self.bits, "weft reads 4 and 8")
        self.group = int(settings.get("group_size", 128))
        form = settings.get("checkpoint_format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            refuse("gptq", "checkpoint_format", form, "weft reads gptq and gptq_v2")
        # The first version of the format stores zeros minus one, modulo 2^bits; gptq_v2 stores them as they
        # are.
        self.zeros_moved = form == "gptq"
        self.ordered = bool(settings.get("desc_act", False))

    def holds(self, name: str) -> bool:
        return _part(name, "qweight") in self.tensors

    def grouping(self, name: str, columns: int) -> Grouping | None:
        group = max(self.group, 0)
        # With desc_act groups are not neighbouring columns. Projections that are multiplied together would
        # each want their own order of the input, so such a checkpoint is widened.
        return None if self.ordered or group % LINE else Grouping(int(self.bits), group)

    def piece(self, name: str) -> MatrixPiece | None:
        each, group = 32 // self.bits, max(self.group, 0)
        for end, rows, columns in (("qweight", (1, 1), (0, each)), ("scales", (1, 1), (0, group)),
                                   ("qzeros", (1, each), (0, group))):
            if name.endswith(f".{end}"):
                if self.ordered:
                    refuse("gptq", "desc_act", True, "its groups are no neighbouring columns, so --tp cannot "
                                                     "cut them")
                return MatrixPiece(f"{name.removesuffix(end)}weight", rows, columns)
        return None

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        rows, columns = shape
        each = 32 // self.bits
        group = self.group if self.group > 0 else columns
        groups = -(-columns // group)
        words = ask(_part(name, "qweight"), (-(-columns // each), rows), ("I32",))
        codes = unpacked(words, self.bits, 0)[:columns].T
        scales = ask(_part(name, "scales"), (groups, rows), FLOATS).float().T
        packed = ask(_part(name, "qzeros"), (groups, -(-rows // each)), ("I32",))
        zeros = unpacked(packed, self.bits, 1)[:, :rows].T
        if self.zeros_moved:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        if not self.ordered:
            whole = -(-columns // LINE) * LINE
            stored = Codes(int(self.bits), codes, scales, zeros, group if self.group > 0 else whole)
            return stored if self.grouping(name, columns) is not None else stored.dense()
        of_column = ask(_part(name, "g_idx"), (columns,), ("I32", "I64")).long()
        return (codes.float() - zeros.float()[:, of_column]) * scales[:, of_column]


_PLACE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)
_BITS = 4


class Awq(StoredForm):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        bits = settings.get("bits", settings.get("w_bit", _BITS))
        if bits != _BITS:
            refuse("awq", "bits", bits, f"weft reads {_BITS}")
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            refuse("awq", "version", version, "weft reads gemm")
        self.group = int(settings.get("group_size", settings.get("q_group_size", 128)))
        self.zero_point = bool(settings.get("zero_point", True))

    def holds(self, name: str) -> bool:
        return _part(name, "qweight") in self.tensors

    def grouping(self, name: str, columns: int) -> Grouping | None:
        group = max(self.group, 0)
        return None if group % LINE else Grouping(_BITS, group)

    def piece(self, name: str) -> MatrixPiece | None:
        group = max(self.group, 0)
        for end, rows, columns in (("qweight", (1, 8), (0, 1)), ("scales", (1, 1), (0, group)),
                                   ("qzeros", (1, 8), (0, group))):
            if name.endswith(f".{end}"):
                return MatrixPiece(f"{name.removesuffix(end)}weight", rows, columns)
        return None

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        rows, columns = shape
        group = self.group if self.group > 0 else columns
        groups = -(-columns // group)
        codes = _rows_in_order(ask(_part(name, "qweight"), (columns, rows // 8), ("I32",)))
        scales = ask(_part(name, "scales"), (groups, rows), FLOATS).float().T
        zeros = None
        if self.zero_point:
            zeros = _rows_in_order(ask(_part(name, "qzeros"), (groups, rows // 8), ("I32",))).T
        whole = -(-columns // LINE) * LINE
        stored = Codes(_BITS, codes.T, scales, zeros, group if self.group > 0 else whole)
        return stored if self.grouping(name, columns) is not None else stored.dense()


def _rows_in_order(words: torch.Tensor) -> torch.Tensor:
    """[n, rows / 8] -> uint8 [n, rows]."""
    eights = unpacked(words, _BITS, 1).view(*words.shape, 8)
    return eights[..., list(_PLACE_OF_ROW)].flatten(1)


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"
