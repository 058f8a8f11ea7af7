"""AWQ: int4 codes in words along the output, in an order of their own.

    x.qweight  I32 [columns, rows / 8]     x.scales  F16 [groups, rows]     x.qzeros  I32 [groups, rows / 8]

    value[row, column] = (code - zero) * scale        half byte i of a word: row 0 2 4 6 1 3 5 7 [i] of its 8

Kept as codes. Source: Lin et al., 2024, and the ``gemm`` packing of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.models.forms.stored_form import FLOATS, Ask, Grouping, MatrixPiece, StoredForm, refuse, unpacked
from weft.tensor.weights.quantized import LINE, Codes

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
