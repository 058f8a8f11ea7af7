"""torchao, as transformers saves it in safetensors: int8, int4 in bytes, float8.

    class                       x._weight_qdata                x._weight_scale    x._weight_zero_point
    Int8Tensor                  I8 [rows, columns]             [rows, groups]     I8 as the scale
    IntxUnpackedToInt8Tensor    the same, fewer bits used
    Float8Tensor                F8_E4M3 [rows, columns]        [rows, groups]
    Int4Tensor                  I8 or U8 [rows, columns / 2]   [groups, rows]     floats as the scale
    Int4TilePackedTo4dTensor    I32 [rows / 8, columns / 128, 32, 4]
                                x._weight_scale_and_zero [groups, rows, 2]

    int8, Intx    (code - zero point) x scale                              kept as codes
    float8        code x scale                                             kept on GPUs
    Int4Tensor    (low half first, signed) x scale + zero point, a float   kept as codes on CPUs
    4d            (code - 8) x scale + zero point, the same                kept as codes on CPUs

The class of a matrix follows from its tensors. The 4d form is the order in which NVIDIA's tensor cores read codes,
with rows padded to 8 and columns to 1024. ROCm's form has tiles of 16 rows in tensors of the same shape, and no file
tells the two apart. Other packings for one kind of device are refused by name.

Source: torchao ``prototype.safetensors`` and ``quantization.quantize_.workflows``; PyTorch
``aten/native/cuda/int4mm.cu`` for the order of codes.
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
_PACKINGS = ("plain", "unpacked_to_int8", "tile_packed_to_4d")
_TILE_ROWS, _TILE_COLUMNS = 8, 128
"""Rows and columns of a tile of the 4d form."""
_CANNOT_CUT = "its tiles are not cut by --tp: use --tp 1, or a copy in the format plain"


class TorchAo(StoredForm):
    left_ends = ("_weight_act_pre_scale",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        kinds = settings.get("quant_type") or {}
        for layer, kind in kinds.items() if isinstance(kinds, Mapping) else ():
            data = kind.get("_data") if isinstance(kind, Mapping) else None
            packing = data.get("int4_packing_format") if isinstance(data, Mapping) else None
            named = packing.get("_data", "") if isinstance(packing, Mapping) else packing
            name = str(named or "plain").lower()
            if name not in _PACKINGS:
                refuse(_METHOD, f"quant_type.{layer}.int4_packing_format", name, f"weft reads {', '.join(_PACKINGS)}")

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
            group = self._int4_group(name, columns)
            stays = self.keeps_blocks and group % LINE == 0
            return Grouping(_INT4_BITS, group, minimums=True) if stays else None
        if stored != "I8":
            return None
        group = columns_of_group(self, names.scales, columns)
        return Grouping(8, group) if group % LINE == 0 else None

    def piece(self, name: str) -> MatrixPiece | None:
        stem = next(
            (
                name.removesuffix(end)
                for end in ("_qdata", "_scale", "_zero_point", "_scale_and_zero")
                if name.endswith(f"._weight{end}")
            ),
            None,
        )
        if stem is None:
            return None
        matrix = f"{stem.removesuffix('_weight')}weight"
        if f"{stem}_scale_and_zero" in self.headers:
            refuse(_METHOD, "quant_type.int4_packing_format", "tile_packed_to_4d", _CANNOT_CUT)
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
            tiles = self._is_tiles(name)
            stored = self._tiles(ask, name, shape) if tiles else self._int4(ask, name, shape)
            return stored if self.grouping(name, columns) is not None else stored.dense()
        stored = read_int8(self, ask, names.codes, names.scales, zero_name, shape)
        return stored if self.grouping(name, columns) is not None else stored.dense()

    def _tiles(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes:
        (rows, columns), group = shape, self._int4_group(name, shape[1])
        stored = self.tensors[_names(name).codes].shape
        tiles = -(-rows // _TILE_ROWS), max(stored[1], -(-columns // _TILE_COLUMNS))
        words = ask(_names(name).codes, (*tiles, 32, 4), ("I32",))
        most = tiles[0] * _TILE_ROWS, tiles[1] * _TILE_COLUMNS
        both = ask(f"{_stem(name)}_scale_and_zero", (most[1] // group, most[0], 2), FLOATS).float()
        if words.is_meta:
            codes = words.new_empty(most, dtype=torch.uint8)
        else:
            # A word has columns 0, 8, 16, 24 of a row, and the columns after each of those. Its place in 32 is the row
            # of 8 and the pair of columns; the last dim goes on by 32 columns.
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            halves = (words[..., None] >> shifts & 15).to(torch.uint8).view(*tiles, _TILE_ROWS, 4, 4, 2, 4)
            codes = halves.permute(0, 2, 1, 4, 6, 3, 5).reshape(most)
        scales, zeros = (both[: -(-columns // group), :rows, part].T for part in (0, 1))
        return Codes(_INT4_BITS, codes[:rows, :columns], scales, None, group, minimums=-zeros, signed=True)

    def _int4(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes:
        names, zero_name = _names(name), f"{_stem(name)}_zero_point"
        rows, columns = shape
        packed = ask(names.codes, (rows, -(-columns // 2)), ("I8", "U8")).view(torch.uint8)
        group = self._int4_group(name, columns)
        scales, zeros = (
            ask(stored, (-(-columns // group), rows), FLOATS).float().T for stored in (names.scales, zero_name)
        )
        if packed.is_meta:
            codes = packed.new_empty(rows, columns)
        else:  # -8 to 7 in two's complement; with the upper bit turned they are 0 to 15
            codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[:, :columns] ^ 8
        return Codes(_INT4_BITS, codes, scales, None, group, minimums=-zeros, signed=True)

    def _int4_group(self, name: str, columns: int) -> int:
        scales = self.tensors.get(_names(name).scales)
        if self._is_tiles(name):
            scales = self.tensors.get(f"{_stem(name)}_scale_and_zero")
            columns = self.tensors[_names(name).codes].shape[1] * _TILE_COLUMNS
        return max(1, columns // max(1, scales.shape[0])) if scales is not None and scales.shape else columns

    def _is_int4(self, name: str, columns: int) -> bool:
        """Return whether codes are two columns in a byte, or tiles."""
        codes = self.tensors.get(f"{_stem(name)}_qdata")
        return self._is_tiles(name) or (
            codes is not None and len(codes.shape) == 2 and codes.shape[1] == -(-columns // 2) != columns
        )

    def _is_tiles(self, name: str) -> bool:
        codes = self.tensors.get(f"{_stem(name)}_qdata")
        return codes is not None and len(codes.shape) == 4


def _stem(name: str) -> str:
    return f"{name.removesuffix('weight')}_weight"


def _names(name: str) -> TensorNames:
    return TensorNames(f"{_stem(name)}_qdata", f"{_stem(name)}_scale")
