"""fp8 with a scale per block, as the FP8 releases of Qwen3-Next, Qwen3.5 and DeepSeek have it.

    x.weight            F8_E4M3 [rows, columns]
    x.weight_scale_inv  [rows / 128, columns / 128] up:  value = weight * scale_inv[row / 128, column / 128]

GPUs keep the codes. No CPU computes in fp8: there they are widened to the model's dtype, which takes twice
the memory of the files. Source: transformers ``finegrained_fp8``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.models.forms.stored_form import Ask, Grouping, MatrixPiece, StoredForm, refuse
from weft.tensor.weights.quantized import LINE, Codes

SCALES = ("F32", "BF16", "F16", "F8_E8M0")


class BlockFp8(StoredForm):
    left_ends = ("activation_scale", "input_scale")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        size = settings.get("weight_block_size")
        if not (isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) for n in size)):
            refuse("fp8", "weight_block_size", size, "weft reads blocks of two sizes, such as [128, 128]")
        self.block = (int(size[0]), int(size[1]))

    def holds(self, name: str) -> bool:
        return self.dtype_of(name) == "F8_E4M3"

    def grouping(self, name: str, columns: int) -> Grouping | None:
        wide = self.block[1]
        return Grouping(8, wide, fp8=True) if self.keeps_fp8 and wide % LINE == 0 else None

    def piece(self, name: str) -> MatrixPiece | None:
        if not name.endswith("_scale_inv"):
            return None
        return MatrixPiece(name.removesuffix("_scale_inv"), (-2, self.block[0]), (-1, self.block[1]))

    def read(self, ask: Ask, name: str, shape: tuple[int, ...]) -> Codes | torch.Tensor:
        *stack, rows, columns = shape
        high, wide = self.block
        weight = ask(name, shape, ("F8_E4M3",))
        # The name says inverse, of the scale that made the codes; it is multiplied with.
        scales = ask(f"{name}_scale_inv", (*stack, -(-rows // high), -(-columns // wide)), SCALES).float()
        by_row = scales.repeat_interleave(high, dim=-2)[..., :rows, :]
        stored = Codes(8, weight.view(torch.uint8), by_row, None, wide, fp8=True)
        return stored if self.grouping(name, columns) is not None else stored.dense()
