"""compressed-tensors: int8 by rows or groups, int4 and int8 in words, fp8, NVFP4, MXFP4 and MXFP8.

    x.weight             I8 or F8_E4M3 [rows, columns]   or   x.weight_packed  I32 [rows, columns x bits / 32]
    x.weight_scale       [rows, groups], [rows, 1], [1], or by blocks
    x.weight_zero_point  as the scale, I8; with packed weights I32, packed along the rows
    x.weight_g_idx       I32 [columns], the group of a column; -1 in all: neighbours are groups
    experts              all of these with a first dim, as llm-compressor stores Granite's

    value = (weight - zero point) * scale          packed codes have 2^(bits-1) added, so have packed zeros

Integer weights are kept as codes, by group if ``weight_g_idx`` says so. Floats of 8 and 4 bits are those of
``small_floats``. Scales of activations are left. Source: the compressed-tensors library's compressors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from weft.errors import CheckpointError
from weft.models.forms import small_floats
from weft.models.forms.stored_form import (
    CANNOT_CUT,
    Ask,
    Grouping,
    MatrixPiece,
    StoredForm,
    mapping,
    mappings,
    order_by_group,
    refuse,
    unpacked,
)
from weft.tensor.weights.quantized import LINE, Codes

_METHOD = "compressed-tensors"
_FORMATS: dict[str, tuple[str, ...]] = {
    "int-quantized": ("int",),
    "naive-quantized": ("int", "fp8"),
    "pack-quantized": ("words",),
    "float-quantized": ("fp8",),
    "mxfp8-quantized": ("mxfp8",),
    "mxfp4-pack-quantized": ("mxfp4",),
    "nvfp4-pack-quantized": ("nvfp4",),
    "dense": (),
    "mixed-precision": (),
}
"""Stored kinds of matrices by format; none: any of these."""
_WORDS = {"int": "int8", "words": "int4 or int8 in words"}


class Compressed(StoredForm):
    left_ends = (
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "output_scale",
        "k_scale",
        "v_scale",
        "weight_shape",
    )

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        form = str(settings.get("format", "int-quantized"))
        if form not in _FORMATS:
            refuse(_METHOD, "format", form, f"weft reads {', '.join(_FORMATS)}")
        groups = mappings(_METHOD, "config_groups", settings.get("config_groups"))
        named = {str(group.get("format") or form) for group in groups.values()} | {form}
        self.kinds = {kind for name in named for kind in _FORMATS.get(name, ())}
        if named & {"dense", "mixed-precision"}:
            self.kinds = set()
        if settings.get("sparsity_config"):
            refuse(_METHOD, "sparsity_config", settings["sparsity_config"], "sparse weights are not served")
        self.block: tuple[int, int] | None = None
        """Rows and columns that share a scale in fp8, if that is a rectangle."""
        symmetric, inputs_too = [], []
        for name, group in groups.items():
            key = f"{name}.weights"
            weights = mapping(_METHOD, key, group.get("weights"))
            if weights.get("type") == "float":
                inputs_too.append(bool(group.get("input_activations")))
            elif weights.get("num_bits", 8) not in (4, 8):
                refuse(_METHOD, f"{key}.num_bits", weights["num_bits"], "weft reads 4 and 8")
            else:
                symmetric.append(weights.get("symmetric") is not False)
            self.block = self.block or _sizes(f"{key}.block_structure", weights.get("block_structure"))
        self.needs_zeros = bool(symmetric) and not any(symmetric)
        # Names of layers are not matched: one group of floats with unrounded inputs is enough.
        self._rounds_inputs = all(inputs_too)

    @property
    def rounds_inputs(self) -> bool:
        return self._rounds_inputs

    def holds(self, name: str) -> bool:
        return self.dtype_of(name) in ("I8", "F8_E4M3") or f"{name}_packed" in self.tensors

    def grouping(self, name: str, columns: int) -> Grouping | None:
        if self._kind(name) is not None:
            return small_floats.grouping_of(self, self._names(name), columns, self.block)
        group = small_floats.columns_of_group(self, f"{name}_scale", columns)
        ordered = group > 0 and f"{name}_g_idx" in self.tensors
        return Grouping(self._bits(name, columns), group, ordered=ordered) if group % LINE == 0 else None

    def _names(self, name: str) -> small_floats.TensorNames:
        codes = f"{name}_packed" if f"{name}_packed" in self.tensors else name
        return small_floats.TensorNames(codes, f"{name}_scale", f"{name}_global_scale", divides=True)

    def _kind(self, name: str) -> small_floats.Kind | None:
        """Return the kind of floats, None for whole numbers."""
        return small_floats.kind_of(self, self._names(name))

    def _bits(self, name: str, columns: int) -> int:
        """Return the bits by the words of a row: layers may differ."""
        packed = self.tensors.get(f"{name}_packed")
        return 8 if packed is None or (packed.shape and packed.shape[-1] * 8 > columns + 7) else 4

    def piece(self, name: str) -> MatrixPiece | None:
        matrix, end = next(
            (
                (name.removesuffix(end), end)
                for end in ("_packed", "_scale", "_zero_point")
                if name.endswith(f"weight{end}")
            ),
            (name, ""),
        )
        if f"{matrix}_g_idx" in self.headers:
            refuse(_METHOD, "config_groups.weights.actorder", "group", CANNOT_CUT)
        if not end:
            return None
        if end == "_scale" and self.block is not None and self.dtype_of(matrix) == "F8_E4M3":
            return MatrixPiece(matrix, (0, self.block[0]), (1, self.block[1]))
        stored = self.headers.get(f"{matrix}_packed")
        if end and stored is not None and stored.dtype == "U8":
            return small_floats.piece_of(self, name, ("_packed", "_scale"))
        packed_rows = end == "_zero_point" and f"{matrix}_packed" in self.tensors
        header = self.headers.get(name)
        row, column = (1, 2) if header is not None and len(header.shape) == 3 else (0, 1)
        return MatrixPiece(matrix, (row, 0 if packed_rows else 1), (column, 0))

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        *stack, rows, columns = shape
        kind = self._kind(name)
        stored_as = kind or ("words" if f"{name}_packed" in self.tensors else "int")
        if self.kinds and stored_as not in self.kinds and f"{name}_scale" in self.tensors:
            label = _WORDS.get(stored_as, stored_as)
            raise CheckpointError(
                f"{name} is stored as {label}; quantization_config of config.json has the "
                f"format {self.settings.get('format')!r}",
                param="model",
            )
        if kind is not None:
            return small_floats.read_matrix(self, ask, self._names(name), shape, self.block)
        if self.needs_zeros and f"{name}_zero_point" not in self.tensors:
            raise CheckpointError(
                f"tensor {name}_zero_point is missing; config.json has symmetric false", param="model"
            )
        if stored_as == "int":
            stored = small_floats.read_int8(self, ask, name, f"{name}_scale", f"{name}_zero_point", shape)
        else:
            scales = small_floats.scales_of(self, ask, f"{name}_scale", shape[:-1])
            bits, groups, zeros = self._bits(name, columns), scales.shape[-1], None
            words = ask(f"{name}_packed", (*stack, rows, -(-columns * bits // 32)), ("I32",))
            codes = unpacked(words, bits, -1)[..., :columns]
            if f"{name}_zero_point" in self.tensors:
                packed = ask(f"{name}_zero_point", (*stack, -(-rows * bits // 32), groups), ("I32",))
                zeros = unpacked(packed, bits, -2)[..., :rows, :]
            stored = Codes(bits, codes, scales, zeros, small_floats.group_of(columns, groups))
        if f"{name}_g_idx" in self.tensors:
            stored = self._by_group(ask, f"{name}_g_idx", stored, columns)
        return stored if self.grouping(name, columns) is not None else stored.dense()

    def _by_group(self, ask: Ask, name: str, stored: Codes, columns: int) -> Codes:
        of_column = ask(name, (columns,), ("I32",))
        if stored.codes.is_meta or bool((of_column == -1).all()):
            return stored
        order = order_by_group(name, of_column, stored.group)
        if order is None:
            return stored
        return replace(stored, codes=stored.codes.index_select(1, order), order=order)


def _sizes(key: str, block: object) -> tuple[int, int] | None:
    if not block:
        return None
    match block:
        case [int(rows), int(columns)]:
            return rows, columns
    refuse(_METHOD, key, block, "weft reads two sizes, such as [128, 128]")
