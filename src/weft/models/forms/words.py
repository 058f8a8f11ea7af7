"""Codes in words of 32 bits: GPTQ (int4 or int8) and AWQ (int4); AutoRound writes either.

    GPTQ  x.qweight  I32 [columns x bits / 32, rows]   words along the input
          x.qzeros   I32 [groups, rows x bits / 32]    words along the output
          x.g_idx    I32 [columns]                     the group of a column
    AWQ   x.qweight  I32 [columns, rows / 8]           words along the output, in a special order: half
          x.qzeros   I32 [groups, rows / 8]            byte i of a word is row 0 2 4 6 1 3 5 7 [i] of its 8
    both  x.scales   F16 [groups, rows]

    value[row, column] = (code - zero) * scale         kept as codes; with ``desc_act`` columns are ordered by group

Layers may have different bits and groups. The shapes of a layer tell them, and config.json must have named them, as
its default or as an exception (AutoRound's ``extra_config``, GPTQModel's ``dynamic``). Names there are not matched:
tools that save a part of a multimodal model spell them differently.

Sources: Frantar et al., 2023, and the packing of AutoGPTQ and GPTQModel; Lin et al., 2024, and the ``gemm`` packing of
AutoAWQ; AutoRound's ``export_to_autoround``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.errors import CheckpointError
from weft.models.forms.stored_form import (
    CANNOT_CUT,
    FLOATS,
    Ask,
    Grouping,
    MatrixPiece,
    StoredForm,
    mappings,
    number,
    order_by_group,
    refuse,
    unpacked,
)
from weft.tensor.weights.quantized import LINE, Codes


class _Words(StoredForm):
    """Form of codes in words. ``pieces``: the tensors of a matrix, with the rows and columns per entry of each
    (``MatrixPiece``).
    """

    method = ""
    schemes: tuple[tuple[int, int], ...] = ()
    pieces: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {}

    def holds(self, name: str) -> bool:
        return _part(name, "qweight") in self.tensors

    def piece(self, name: str) -> MatrixPiece | None:
        end = next((end for end in self.pieces if name.endswith(f".{end}")), None)
        return None if end is None else MatrixPiece(f"{name.removesuffix(end)}weight", *self.pieces[end])


class Gptq(_Words):
    left_ends = ("g_idx",)
    method, exceptions = "gptq", "dynamic"
    # The shapes tell how many rows or columns an entry is for: layers may have other bits.
    pieces = {"qweight": ((1, 1), (0, 0)), "scales": ((1, 1), (0, 0)), "qzeros": ((1, 0), (0, 0))}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        bits = settings.get("bits", 4)
        if bits not in (4, 8):
            refuse(self.method, "bits", bits, "weft reads 4 and 8")
        self.group = number(self.method, "group_size", settings.get("group_size"), 128)
        form = settings.get("checkpoint_format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            refuse(self.method, "checkpoint_format", form, "weft reads gptq and gptq_v2")
        # The first version of the format stores zeros minus one, modulo 2^bits; gptq_v2 stores them unchanged.
        self.zeros_moved = form == "gptq"
        self.ordered = bool(settings.get("desc_act", False))
        self.schemes = _schemes(self.method, settings, self.exceptions, bits, self.group)

    def grouping(self, name: str, columns: int) -> Grouping | None:
        bits, group = self._scheme(name, columns)
        return None if group % LINE else Grouping(bits, group, ordered=self.ordered and group > 0)

    def piece(self, name: str) -> MatrixPiece | None:
        piece = super().piece(name)
        if piece is not None and self.ordered:
            refuse(self.method, "desc_act", True, CANNOT_CUT)
        return piece

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        rows, columns = shape
        bits, group = self._scheme(name, columns)
        each, groups = 32 // bits, _groups(columns, group)
        words = ask(_part(name, "qweight"), (-(-columns // each), rows), ("I32",))
        codes, order = unpacked(words, bits, 0)[:columns], None
        scales = ask(_part(name, "scales"), (groups, rows), FLOATS).float().T
        packed = ask(_part(name, "qzeros"), (groups, -(-rows // each)), ("I32",))
        zeros = unpacked(packed, bits, 1)[:, :rows].T
        if self.zeros_moved:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        if self.ordered and group:
            of_column = ask(_part(name, "g_idx"), (columns,), ("I32", "I64"))
            order = order_by_group(_part(name, "g_idx"), of_column, group)
            if order is not None and not codes.is_meta:
                codes = codes.index_select(0, order)
        stored = Codes(bits, codes.T, scales, zeros, group or _whole_lines(columns), order=order)
        return stored if self.grouping(name, columns) is not None else stored.dense()

    def _scheme(self, name: str, columns: int) -> tuple[int, int]:
        words = self.tensors.get(_part(name, "qweight"))
        entries = words.shape[0] if words is not None and words.shape else 0
        bits = 32 * entries / max(columns, 1)
        if bits not in (2, 3, 5, 6, 7):  # any other wrong shape is reported when the tensor is read
            bits = 8 if bits == 8 else 4 if bits == 4 else self.schemes[0][0]
        return _scheme_of(self, name, int(bits), columns)


_PLACE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)
_BITS = 4


class Awq(_Words):
    method = "awq"
    pieces = {"qweight": ((1, 8), (0, 1)), "scales": ((1, 1), (0, 0)), "qzeros": ((1, 8), (0, 0))}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        bits = settings.get("bits", settings.get("w_bit", _BITS))
        if bits != _BITS:
            refuse(self.method, "bits", bits, f"weft reads {_BITS}")
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            refuse(self.method, "version", version, "weft reads gemm")
        self.group = number(self.method, "group_size", settings.get("group_size", settings.get("q_group_size")), 128)
        self.zero_point = bool(settings.get("zero_point", True))
        self.schemes = _schemes(self.method, settings, "extra_config", _BITS, self.group)

    def grouping(self, name: str, columns: int) -> Grouping | None:
        _, group = _scheme_of(self, name, _BITS, columns)
        return None if group % LINE else Grouping(_BITS, group)

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        rows, columns = shape
        _, group = _scheme_of(self, name, _BITS, columns)
        groups = _groups(columns, group)
        codes = _rows_in_order(ask(_part(name, "qweight"), (columns, rows // 8), ("I32",)))
        scales = ask(_part(name, "scales"), (groups, rows), FLOATS).float().T
        zeros = None
        if self.zero_point or _part(name, "qzeros") in self.tensors:
            zeros = _rows_in_order(ask(_part(name, "qzeros"), (groups, rows // 8), ("I32",))).T
        stored = Codes(_BITS, codes.T, scales, zeros, group or _whole_lines(columns))
        return stored if self.grouping(name, columns) is not None else stored.dense()


def _rows_in_order(words: torch.Tensor) -> torch.Tensor:
    """Return uint8 [n, rows] of words [n, rows / 8]."""
    eights = unpacked(words, _BITS, 1).view(*words.shape, 8)
    return eights[..., list(_PLACE_OF_ROW)].flatten(1)


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


def auto_round(settings: Mapping[str, Any]) -> StoredForm:
    """Return the form of AutoRound's checkpoints: the same tensors as one of the methods here, under another method
    name.
    """
    packing = str(settings.get("packing_format", settings.get("backend", "auto_round:auto_gptq")))
    if settings.get("rotation_config"):
        refuse(AUTO_ROUND, "rotation_config", settings["rotation_config"], "rotated inputs are not served")
    if str(settings.get("data_type", "int")) not in ("int", "int_sym", "int_asym"):
        refuse(AUTO_ROUND, "data_type", settings["data_type"], "weft reads int")
    if "awq" in packing:
        return _AutoRoundAwq(settings)
    if packing in ("auto_round", "auto_round:gptqmodel"):
        return _AutoRoundGptq(settings, zeros_moved=False)
    if packing == "auto_round:gptq" or packing.startswith("auto_round:auto_gptq"):
        return _AutoRoundGptq(settings, zeros_moved=True)
    refuse(
        AUTO_ROUND,
        "packing_format",
        packing,
        "weft reads auto_round, auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq",
    )


AUTO_ROUND = "auto-round"


class _AutoRoundGptq(Gptq):
    method, exceptions = AUTO_ROUND, "extra_config"

    def __init__(self, settings: Mapping[str, Any], *, zeros_moved: bool) -> None:
        super().__init__({**settings, "checkpoint_format": None, "desc_act": False})
        self.zeros_moved = zeros_moved


class _AutoRoundAwq(Awq):
    method = AUTO_ROUND


def _schemes(method: str, settings: Mapping[str, Any], key: str, bits: int, group: int) -> tuple[tuple[int, int], ...]:
    """Return (bits, group) that config.json names, its default first; ``key``: of the exceptions by layer."""
    schemes = [(bits, max(group, 0))]
    for layer, own in mappings(method, key, settings.get(key)).items():
        scheme = (
            number(method, f"{layer}.bits", own.get("bits"), bits),
            max(number(method, f"{layer}.group_size", own.get("group_size"), group), 0),
        )
        if scheme[0] < 16 and scheme[0] not in (4, 8):
            refuse(method, f"{layer}.bits", scheme[0], "weft reads 4 and 8, and 16 as plain tensors")
        schemes.append(scheme)
    return tuple(schemes)


def _scheme_of(form: _Words, name: str, bits: int, columns: int) -> tuple[int, int]:
    """Return (bits, columns of a group, 0 for undivided rows) of a layer, as its scales tell. Raises CheckpointError
    if config.json names no such layers.
    """
    stored = form.tensors.get(_part(name, "scales"))
    groups = stored.shape[0] if stored is not None and len(stored.shape) == 2 else 0
    # The scheme that fits. A shape that fits no scheme is reported, with the expected one, when the tensor is read.
    of_bits = [group for own, group in form.schemes if own == bits]
    if not of_bits:
        named = ", ".join(sorted({str(own) for own, _ in form.schemes}))
        raise CheckpointError(
            f"{name.removesuffix('.weight')} is stored in {bits} bits, which "
            f"quantization_config of config.json ({form.method}) names for no layer; it "
            f"has {named}",
            param="model",
        )
    return bits, next((group for group in of_bits if _groups(columns, group) == groups), of_bits[0])


def _groups(columns: int, group: int) -> int:
    return -(-columns // group) if group else 1


def _whole_lines(columns: int) -> int:
    return -(-columns // LINE) * LINE
