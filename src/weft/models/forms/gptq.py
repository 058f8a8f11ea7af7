"""GPTQ: int4 or int8 codes in words along the input, zeros in words along the output.

    x.qweight  I32 [columns x bits / 32, rows]     x.scales  F16 [groups, rows]
    x.qzeros   I32 [groups, rows x bits / 32]      x.g_idx   I32 [columns]: the group of a column

    value[row, column] = (code - zero) * scale     at group g_idx[column]

Source: Frantar et al., 2023, and the packing of AutoGPTQ and GPTQModel.
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


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"
