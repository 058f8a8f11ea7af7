"""torchao, as transformers saves it in safetensors: int8, int4 in bytes, float8.

    class                       x._weight_qdata                x._weight_scale    x._weight_zero_point
    Int8Tensor                  I8 [rows, columns]             [rows, groups]     I8 as the scale
    IntxUnpackedToInt8Tensor    the same, fewer bits used
    Float8Tensor                F8_E4M3 [rows, columns]        [rows, groups]
    Int4Tensor                  I8 or U8 [rows, columns / 2]   [groups, rows]     floats as the scale

    int8, Intx    (code - zero point) x scale                              kept as codes
    float8        code x scale                                             kept on GPUs
    Int4Tensor    (low half first, signed) x scale + zero point, a float   kept as codes on CPUs

Which class a matrix has is seen from its tensors. Packings for one kind of GPU (tiles, 4d) are refused by
name.

Source: torchao ``prototype.safetensors`` and ``quantization.quantize_.workflows``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.models.forms.small_floats import TensorNames, columns_of_group, grouping_of, read_int8, read_matrix
from weft.models.forms.stored_form import FLOATS, Ask, Grouping, MatrixPiece, StoredForm, refuse
from weft.tensor.weights.quantized import LINE, Codes

_METHOD = "torchao"
_INT4_BITS = 4
_PACKINGS = ("plain", "unpacked_to_int8")


class TorchAo(StoredForm):
    left_ends = ("_weight_act_pre_scale",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        kinds = settings.get("quant_type") or {}
        for layer, kind in (kinds.items() if isinstance(kinds, Mapping) else ()):
            data = kind.get("_data") if isinstance(kind, Mapping) else None
            packing = data.get("int4_packing_format") if isinstance(data, Mapping) else None
            named = packing.get("_data", "") if isinstance(packing, Mapping) else packing
            name = str(named or "plain").lower()
            if name not in _PACKINGS:
                refuse(_METHOD, f"quant_type.{layer}.int4_packing_format", name,
                       f"weft reads {', '.join(_PACKINGS)}")

    @property
    def rounds_inputs(self) -> bool:
        return "WeightOnly" not in str(self.settings.get("quant_type"))

    def holds(self, name: str) -> bool:
        return name.endswith("weight") and f"{_stem(name)}_qdata" in self.tensors

    def grouping(self, name: str, columns: int) -> Grouping | None:
        names = _names(name)
        stored = self.dtype_of(names.codes)
        if stored == "F8_E4M3":
            return grouping_of(self, names, columns)
        if self._is_int4(name, columns):
            group = self._int4_group(names, columns)
            stays = self.keeps_blocks and group % LINE == 0
            return Grouping(_INT4_BITS, group, minimums=True) if stays else None
        if stored != "I8":
            return None
        group = columns_of_group(self, names.scales, columns)
        return Grouping(8, group) if group % LINE == 0 else None

    def piece(self, name: str) -> MatrixPiece | None:
        stem = next((name.removesuffix(end) for end in ("_qdata", "_scale", "_zero_point")
                     if name.endswith(f"._weight{end}")), None)
        if stem is None:
            return None
        matrix = f"{stem.removesuffix('_weight')}weight"
        codes, scale = self.headers.get(f"{stem}_qdata"), self.headers.get(f"{stem}_scale")
        zeros = self.headers.get(f"{stem}_zero_point")
        if codes is None or scale is None or len(codes.shape) != 2 or not scale.shape:
            return None
        if zeros is not None and zeros.dtype != "I8" and not name.endswith("_qdata"):
            return MatrixPiece(matrix, (1, 1), (0, 0))
        return MatrixPiece(matrix, (0, 1), (1, 0))

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        names, columns = _names(name), shape[1]
        if self.dtype_of(names.codes) == "F8_E4M3":
            return read_matrix(self, ask, names, shape)
        zero_name = f"{_stem(name)}_zero_point"
        if self._is_int4(name, columns):
            stored = self._int4(ask, names, zero_name, shape)
            return stored if self.grouping(name, columns) is not None else stored.dense()
        stored = read_int8(self, ask, names.codes, names.scales, zero_name, shape)
        return stored if self.grouping(name, columns) is not None else stored.dense()

    def _int4(self, ask: Ask, names: TensorNames, zero_name: str, shape: tuple[int, ...]) -> Codes:
        rows, columns = shape
        packed = ask(names.codes, (rows, -(-columns // 2)), ("I8", "U8")).view(torch.uint8)
        group = self._int4_group(names, columns)
        scales, zeros = (ask(one, (-(-columns // group), rows), FLOATS).float().T
                         for one in (names.scales, zero_name))
        if packed.is_meta:
            codes = packed.new_empty(rows, columns)
        else:   # -8 to 7 in two's complement; with the upper bit turned they are 0 to 15
            codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[:, :columns] ^ 8
        return Codes(_INT4_BITS, codes, scales, None, group, minimums=-zeros, signed=True)

    def _int4_group(self, names: TensorNames, columns: int) -> int:
        scales = self.tensors.get(names.scales)
        return max(1, columns // max(1, scales.shape[0])) if scales is not None and scales.shape else columns

    def _is_int4(self, name: str, columns: int) -> bool:
        """Two columns in a byte."""
        codes = self.tensors.get(f"{_stem(name)}_qdata")
        return codes is not None and len(codes.shape) == 2 and codes.shape[1] == -(-columns // 2) != columns


def _stem(name: str) -> str:
    return f"{name.removesuffix('weight')}_weight"


def _names(name: str) -> TensorNames:
    return TensorNames(f"{_stem(name)}_qdata", f"{_stem(name)}_scale")
