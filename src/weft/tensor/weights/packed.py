"""A weight matrix in oneDNN's own order, laid out once instead of in every product.

torch's ``F.linear`` passes plain rows to oneDNN, which reorders them each time or works around them. With
ordered weights a product of 1 to 32 rows takes half to two thirds of the time in bfloat16. In float32 it
takes a fifth to a half (``python benchmarks/linear.py``). The ordered weight replaces the plain one, and
nothing else can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

PACKED_ELEMENTS_MIN: dict[torch.dtype, int] = {torch.bfloat16: 1 << 16, torch.float16: 1 << 16,
                                         torch.float32: 1 << 20}
"""Smallest matrix, in elements, that gains: a call into oneDNN costs 10 microseconds."""
_ROWS_EXPECTED = 16
"""Rows of x for which oneDNN chooses the order; other numbers work as well."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """``ordered`` is opaque: ``product`` multiplies by it, ``dense`` turns it into rows again."""

    ordered: torch.Tensor
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def held_bytes(self) -> int:
        """Excludes the padding of oneDNN's blocks, which it does not report."""
        return self.rows * self.columns * self.dtype.itemsize

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., columns] -> [..., rows]."""
        # Internal operators of torch, which its own compiler uses: they are looked up by name.
        out: torch.Tensor = _mkldnn()._linear_pointwise(x, self.ordered, bias, "none", [], "")
        return out

    def dense(self) -> torch.Tensor:
        """[rows, columns], a copy."""
        return self.ordered.to_dense()


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """``weight`` [rows, columns] in oneDNN's order; None where this gains nothing or is not possible."""
    if weight.device.type != "cpu" or weight.numel() < PACKED_ELEMENTS_MIN.get(weight.dtype, 1 << 62):
        return None
    if not _computes_in(weight.dtype):
        return None
    try:
        ordered = _mkldnn()._reorder_linear_weight(weight.contiguous(), _ROWS_EXPECTED)
        packed = PackedWeight(ordered, weight.shape[0], weight.shape[1], weight.dtype)
        # Tried once: another version of torch may take other arguments.
        with torch.inference_mode():
            packed.product(weight.new_zeros(1, weight.shape[1]), None)
    except (RuntimeError, AttributeError):  # another version of torch: no such operator, or other arguments
        return None
    return packed


def _mkldnn() -> Any:
    return torch.ops.mkldnn


def _computes_in(dtype: torch.dtype) -> bool:
    """Whether the CPU has oneDNN's instructions for ``dtype``; without them it is slower than torch, or
    refuses."""
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    try:
        return dtype not in checks or bool(getattr(_mkldnn(), checks[dtype])())
    except (RuntimeError, AttributeError):
        return False
