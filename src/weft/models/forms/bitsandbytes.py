"""bitsandbytes: nf4 and fp4 with a table of 16 values, and int8 by rows.

    nf4, fp4   x.weight                             U8 [rows x columns / 2, 1], the first in the high half
               x.weight.absmax                      F32 [blocks], or U8 in double quantisation
               x.weight.quant_map                   F32 [16]: the values of the codes, in -1 .. 1
               x.weight.nested_absmax, _quant_map   F32: absmax = map[absmax] x nested_absmax + offset
               x.weight.quant_state.bitsandbytes__  U8: JSON with the sizes of blocks and the offset
    int8       x.weight                             I8 [rows, columns]
               x.SCB                                F32 [rows]: value = code x SCB / 127        kept as codes

Blocks run over the numbers of a matrix, independent of its rows. CPUs keep codes, table and largest values
(``keeps_float_tables``): of each block, or of each 32 columns if a block may end there. If rows are not multiples of
32 columns, nf4 and fp4 are widened. Columns that int8 computes in 16 bits (outliers) are a matter of its inputs; the
weights have all columns.

Source: bitsandbytes ``functional.QuantState`` and ``backends.default``; Dettmers et al., 2022 and 2023.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from weft.errors import CheckpointError
from weft.models.forms.stored_form import Ask, Grouping, MatrixPiece, StoredForm, refuse
from weft.tensor.weights.quantized import LINE, ZERO_POINT, Codes

_METHOD = "bitsandbytes"
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_STEP = 7.874015718698502e-3
"""1 / 127, as in the library."""


class BitsAndBytes(StoredForm):
    left_ends = ("weight_format",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        storage = settings.get("bnb_4bit_quant_storage", "uint8")
        if settings.get("load_in_4bit") and storage not in ("uint8", None):
            refuse(_METHOD, "bnb_4bit_quant_storage", storage, "weft reads uint8")

    def holds(self, name: str) -> bool:
        return self._four(name) or self._eight(name)

    def _four(self, name: str) -> bool:
        return self.dtype_of(name) == "U8" and any(f"{name}.{state}" in self.tensors for state in _STATES)

    def _eight(self, name: str) -> bool:
        return self.dtype_of(name) == "I8"

    def grouping(self, name: str, columns: int) -> Grouping | None:
        if self._eight(name):
            return Grouping(8, 0)
        group = math.gcd(columns, self._blocksize(name))  # numbers of a row that share a block
        return Grouping(4, group, floats=True) if self.keeps_float_tables and group >= LINE else None

    def piece(self, name: str) -> MatrixPiece | None:
        if name.endswith(".SCB"):
            return MatrixPiece(f"{name.removesuffix('SCB')}weight", (0, 1))
        matrix = name.removesuffix(".absmax")
        if not matrix.endswith("weight") or not self._four(matrix):
            return None  # tables and the scales of scales: each rank has all of them
        block = self._blocksize(matrix)
        return MatrixPiece(matrix, run=2 if name == matrix else block, block=block)

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        if self._eight(name):
            codes = (ask(name, shape, ("I8",)).to(torch.int16) + ZERO_POINT[8]).to(torch.uint8)
            scales = ask(f"{name.removesuffix('weight')}SCB", shape[:1], ("F32",)) * _STEP
            return Codes(8, codes, scales.unsqueeze(1), None, -(-shape[1] // LINE) * LINE)
        count = math.prod(shape)
        own = self.tensors[name].shape  # a rank's, in rows or in one row
        packed = ask(name, own if 2 * math.prod(own) == count else (-(-count // 2), 1), ("U8",)).flatten()
        state = self._state(ask, name)
        block = _block(name, state, "blocksize", self._blocksize(name))
        blocks = -(-count // block)
        table = ask(f"{name}.quant_map", (16,), ("F32",))
        most = self._most(ask, name, blocks, state)
        grouping = self.grouping(name, shape[-1])
        if packed.is_meta and grouping is None:
            return torch.empty(shape, device=packed.device)
        if grouping is not None:
            codes = (
                packed.new_empty(shape)
                if packed.is_meta
                else torch.stack((packed >> 4, packed & 15), dim=1).view(shape)
            )
            each = most.repeat_interleave(block // grouping.columns)[: count // grouping.columns]
            return Codes(4, codes, each.view(*shape[:-1], -1), None, grouping.columns, table=table)
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:count]
        values = torch.nn.functional.pad(table[codes.int()], (0, blocks * block - count))
        return (values.view(blocks, block) * most[:, None]).flatten()[:count].view(shape)

    def _most(self, ask: Ask, name: str, blocks: int, state: Mapping[str, Any]) -> torch.Tensor:
        """Return the largest value of each block."""
        most, places = self.tensors.get(f"{name}.absmax"), self.places(f"{name}.absmax")
        own = most.shape if most is not None and math.prod(most.shape) == blocks else (blocks,)
        if most is None or most.dtype != "U8":
            return ask(f"{name}.absmax", own, ("F32",)).flatten()
        block = _block(name, state, "nested_blocksize", 256)
        codes = ask(f"{name}.absmax", own, ("U8",)).flatten()
        whole = blocks if places is None else math.prod(self.headers[f"{name}.absmax"].shape)
        scales = ask(f"{name}.nested_absmax", (-(-whole // block),), ("F32",))
        table = ask(f"{name}.nested_quant_map", (256,), ("F32",))
        if codes.is_meta:
            return torch.empty(blocks, device=codes.device)
        each = scales[(torch.arange(blocks) if places is None else places).to(scales.device) // block]
        return table[codes.int()] * each + torch.tensor(float(state["nested_offset"]), device=each.device)

    def _blocksize(self, name: str) -> int:
        """Return the numbers per block, by the sizes of the tensors; 64 if they fit no size."""
        codes, most = self.headers.get(name), self.headers.get(f"{name}.absmax")
        if codes is None or most is None:
            return 64
        count, blocks = 2 * math.prod(codes.shape), math.prod(most.shape)
        return next((block for block in _BLOCKS if -(-count // block) == blocks), 64)

    def _state(self, ask: Ask, name: str) -> Mapping[str, Any]:
        """Return the JSON of the quantisation state, empty for headers."""
        full = next(f"{name}.{state}" for state in _STATES if f"{name}.{state}" in self.tensors)
        raw = ask(full, self.tensors[full].shape, ("U8",))
        if raw.is_meta:
            return {}
        try:
            state = json.loads(bytes(raw.cpu().tolist()))
            if self.dtype_of(f"{name}.absmax") == "U8":
                float(state["nested_offset"])
            return dict(state)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"tensor {full} is not JSON with the sizes of blocks ({error})", param="model"
            ) from error


def _block(name: str, state: Mapping[str, Any], key: str, usual: int) -> int:
    size = state.get(key, usual)
    if size not in _BLOCKS:
        raise CheckpointError(f"{name} has {key} {size!r}; {_METHOD} has {', '.join(map(str, _BLOCKS))}", param="model")
    return int(size)
