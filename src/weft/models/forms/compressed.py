"""compressed-tensors: int8 by rows or groups, int4 and int8 in words, fp8 by tensors, rows or blocks.

    x.weight             I8 or F8_E4M3 [rows, columns]   or   x.weight_packed  I32 [rows, columns x bits / 32]
    x.weight_scale       [rows, groups], [rows, 1], [1], or by blocks
    x.weight_zero_point  as the scale, I8; beside packed weights I32, packed along the rows

    value = (weight - zero point) * scale          packed codes have 2^(bits-1) added, so have packed zeros

Integer weights are kept as codes, fp8 on GPUs; elsewhere it is widened. Scales of activations are left.
Source: the compressed-tensors library's compressors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.models.forms.stored_form import FLOATS, Ask, Grouping, MatrixPiece, StoredForm, refuse, unpacked
from weft.tensor.weights.quantized import LINE, ZERO_POINT, Codes

_METHOD = "compressed-tensors"
_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "float-quantized", "dense",
            "mixed-precision")


class Compressed(StoredForm):
    left_ends = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "weight_shape")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        form = settings.get("format", "int-quantized")
        if form not in _FORMATS:
            refuse(_METHOD, "format", form, f"weft reads {', '.join(_FORMATS)}")
        if settings.get("sparsity_config"):
            refuse(_METHOD, "sparsity_config", settings["sparsity_config"], "sparse weights are not served")
        for name, group in (settings.get("config_groups") or {}).items():
            weights = (group or {}).get("weights") or {}
            if weights.get("type", "int") == "int" and weights.get("num_bits", 8) not in (4, 8):
                refuse(_METHOD, f"config_groups.{name}.weights.num_bits", weights["num_bits"],
                       "weft reads 4 and 8")
            if weights.get("actorder") in ("group", True):
                refuse(_METHOD, f"config_groups.{name}.weights.actorder", weights["actorder"],
                       "weft reads groups of neighbouring columns (actorder static or weight)")

    def holds(self, name: str) -> bool:
        return self.dtype_of(name) in ("I8", "F8_E4M3") or f"{name}_packed" in self.tensors

    def grouping(self, name: str, columns: int) -> Grouping | None:
        fp8, block = self.dtype_of(name) == "F8_E4M3", self._block()
        if fp8 and not self.keeps_fp8:
            return None
        scale = self.tensors.get(f"{name}_scale")
        groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
        group = 0 if groups <= 1 else columns // groups
        if fp8 and block is not None:
            group = block[1]
        return Grouping(self._bits(name, columns), group, fp8) if group % LINE == 0 else None

    def _bits(self, name: str, columns: int) -> int:
        """By the words of a row: layers may differ."""
        packed = self.tensors.get(f"{name}_packed")
        return 8 if packed is None or (packed.shape and packed.shape[-1] * 8 > columns + 7) else 4

    def piece(self, name: str) -> MatrixPiece | None:
        matrix, end = next(((name.removesuffix(end), end) for end in ("_packed", "_scale", "_zero_point")
                            if name.endswith(f"weight{end}")), (name, ""))
        if not end:
            return None
        block = self._block()
        if end == "_scale" and block is not None and self.dtype_of(matrix) == "F8_E4M3":
            return MatrixPiece(matrix, (0, block[0]), (1, block[1]))
        packed_rows = end == "_zero_point" and f"{matrix}_packed" in self.tensors
        return MatrixPiece(matrix, (0, 0 if packed_rows else 1), (1, 0))

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        rows, columns = shape
        if self.dtype_of(name) == "F8_E4M3":
            return self._fp8(ask, name, rows, columns)
        scale_shape = self._scale_shape(name, rows)
        scales = ask(f"{name}_scale", scale_shape, FLOATS).float()
        groups = scale_shape[1] if len(scale_shape) == 2 else 1
        zeros = None
        if f"{name}_packed" in self.tensors:
            bits = self._bits(name, columns)
            words = ask(f"{name}_packed", (rows, -(-columns * bits // 32)), ("I32",))
            codes = unpacked(words, bits, 1)[:, :columns]
            if f"{name}_zero_point" in self.tensors:
                packed = ask(f"{name}_zero_point", (-(-rows * bits // 32), groups), ("I32",))
                zeros = unpacked(packed, bits, 0)[:rows]
        else:
            bits = 8
            codes = _unsigned(ask(name, shape, ("I8",)))
            if f"{name}_zero_point" in self.tensors:
                zeros = _unsigned(ask(f"{name}_zero_point", scale_shape, ("I8",)))
                zeros = zeros.reshape(-1, groups).expand(rows, groups)
        scales = scales.reshape(-1, groups).expand(rows, groups)
        group = columns // groups if groups > 1 else -(-columns // LINE) * LINE
        stored = Codes(bits, codes, scales, zeros, group)
        return stored if self.grouping(name, columns) is not None else stored.dense()

    def _scale_shape(self, name: str, rows: int) -> tuple[int, ...]:
        """As it is stored, where that is one of the shapes there are; else by rows, for the error."""
        stored = self.tensors.get(f"{name}_scale")
        if stored is not None and (stored.shape in ((), (1,), (1, 1))
                                   or (len(stored.shape) == 2 and stored.shape[0] == rows)):
            return stored.shape
        return rows, 1

    def _block(self) -> tuple[int, int] | None:
        for group in (self.settings.get("config_groups") or {}).values():
            block = ((group or {}).get("weights") or {}).get("block_structure")
            if block:
                return int(block[0]), int(block[1])
        return None

    def _fp8(self, ask: Ask, name: str, rows: int, columns: int) -> Codes | torch.Tensor:
        """Scales are of the tensor, of rows, of groups or of blocks."""
        codes = ask(name, (rows, columns), ("F8_E4M3",)).view(torch.uint8)
        block = self._block()
        if block is not None:
            scales = ask(f"{name}_scale", (-(-rows // block[0]), -(-columns // block[1])), FLOATS).float()
            by_row, group = scales.repeat_interleave(block[0], dim=0)[:rows], block[1]
        else:
            shape = self._scale_shape(name, rows)
            groups = shape[1] if len(shape) == 2 else 1
            by_row = ask(f"{name}_scale", shape, FLOATS).float().reshape(-1, groups).expand(rows, groups)
            group = columns // groups if groups > 1 else -(-columns // LINE) * LINE
        stored = Codes(8, codes, by_row, None, group, fp8=True)
        return stored if self.grouping(name, columns) is not None else stored.dense()


def _unsigned(codes: torch.Tensor) -> torch.Tensor:
    # Codes here are unsigned: the kernels' zero point is 128.
    return (codes.to(torch.int16) + ZERO_POINT[8]).to(torch.uint8)
