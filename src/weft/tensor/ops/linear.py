"""Products with matrices in any form: a ``Weight``, or a tensor, which is a matrix as it is.

    product(x, matrix) -+- tensor     torch
                        +- Weight     C++ (csrc/linear.hpp), or Triton, where they take both; else ``Weight.product``

A new form is a class with the methods of ``Weight``; no caller asks which form a weight has. Like a tensor, it has
``shape``, ``dtype``, ``device`` and ``nbytes``. A stack of matrices (experts) has one at each index.

Codes (``QuantizedWeight``) in C++, and by oneDNN where that is faster:

    few rows of x     the kernel, bound by the bytes of the weights
    many rows         with byte products: the kernel, bound by those products
                      without: blocks of weights dequantised (and transposed) to the dtype of x, then torch
    a matrix unit     the kernel (csrc/code_pieces.hpp) for any number of rows in bfloat16: x is never rounded
    byte_inputs       the kernel (csrc/w8a8.hpp) for any number of rows: the form defines the arithmetic
"""

from __future__ import annotations

import functools
import platform
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.scratch import scratch

NativeWeight = tuple[int, int, int, int, int, int, int, int, int, tuple[int, int, int, int, int, bool, int]]
"""A weight as the extension takes it (csrc/module.cpp)."""
_BLOCK_ROWS = 512
WIDENED_ROWS = 16
"""Rows of x from which on dequantising pays without byte products."""


class Weight(ABC):
    """A matrix [``rows``, ``columns``] in a form of its own. ``exact``: inputs are never rounded to int8. ``order``:
    int32 [columns], the column of x that each column is multiplied with; None if all are at their own places.
    ``gates``: on a matrix unit, the kernels write silu(gate) * up of its product.
    """

    __slots__ = ()
    rows: int
    columns: int
    exact: bool = False
    order: torch.Tensor | None = None
    gates: bool = False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of its tensors; those of tiles without the padding of the last tile."""

    @property
    @abstractmethod
    def body(self) -> torch.Tensor:
        """Return the tensor with nearly all of the bytes."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its values."""
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.columns

    @property
    def device(self) -> torch.device:
        return self.body.device

    @property
    def parts(self) -> tuple[Matrix, ...]:
        """Return the matrices that are multiplied one by one."""
        return (self,)

    @abstractmethod
    def native(self) -> NativeWeight:
        """Return the arguments of the extension. For a stack they are of its first weight; others follow it in
        memory.
        """

    def fits(self, x: torch.Tensor) -> bool:
        """Return whether the C++ form takes ``x`` and this weight."""
        return False

    def widens(self, rows: int, dtype: torch.dtype) -> bool:
        """Return whether the C++ form lets torch multiply ``rows`` rows of x in ``dtype`` by dequantised blocks."""
        return False

    def addresses(self, x: torch.Tensor) -> tuple[int, ...]:
        """Return the address of each part; 0 for one that a fused block does not take with ``x``."""
        return (self.body.data_ptr() if self.fits(x) and not self.widens(x.shape[0], x.dtype) else 0,)

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """Return the values [rows, columns], a copy."""

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``weight_product`` in torch, its definition."""
        # Slow: it lays the rows out again for each product. It serves another dtype of x, and kernels that were
        # switched off after loading.
        return F.linear(x, self.dense().to(x.dtype), bias if bias is None else bias.to(x.dtype))

    def rows_at(self, rows_T: torch.Tensor, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows ``rows_T`` (int64 [T]), [T, columns] of ``dtype``; in ``out_TD`` if the form can write there."""
        return self.dense()[rows_T]

    def first_rows(self, count: int) -> Weight:
        """Return the first ``count`` rows, full tiles, in the same memory. Forms without such a part return all."""
        return self


Matrix = torch.Tensor | Weight


@dataclass(slots=True)
class JoinedWeight(Weight):
    """Projections of the same input whose forms or orders of columns differ: each is multiplied by itself, the results
    are concatenated. A quantised checkpoint leaves some as they are, and GGUF files have finer forms for some.
    """

    matrices: tuple[Matrix, ...]
    rows: int = field(init=False)
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.columns = sum(matrix.shape[0] for matrix in self.matrices), self.matrices[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def parts(self) -> tuple[Matrix, ...]:
        return self.matrices

    @property
    def body(self) -> torch.Tensor:
        first = self.matrices[0]
        return first if isinstance(first, torch.Tensor) else first.body

    def native(self) -> NativeWeight:
        raise AssertionError("the extension takes part by part")

    def addresses(self, x: torch.Tensor) -> tuple[int, ...]:
        each = [(0,) if isinstance(part, torch.Tensor) else part.addresses(x) for part in self.matrices]
        return tuple(address for addresses in each for address in addresses)

    def dense(self) -> torch.Tensor:
        return torch.cat([dense(matrix).float() for matrix in self.matrices])

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = torch.cat([product(x, matrix) for matrix in self.matrices], dim=-1)
        return y if bias is None else y.add_(bias)


def dense(matrix: Matrix) -> torch.Tensor:
    """Return the values [rows, columns] of a matrix, or those of a stack."""
    return matrix if isinstance(matrix, torch.Tensor) else matrix.dense()


def product(
    x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x`` [..., columns] times the matrix, [..., rows] in the dtype of ``x``; see ``weight_product``."""
    return F.linear(x, matrix, bias) if isinstance(matrix, torch.Tensor) else weight_product(x, matrix, bias, out)


@op("weft.tensor.kernels.quantized_linear")
def weight_product(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x`` [..., columns] times the weight, [..., rows] in the dtype of ``x``; ``bias`` [rows]. Sums are
    float32. ``out``: a dense tensor that the kernel may write.

    The C++ kernels round x to int8 for codes, with a scale per 32 columns, unless ``weight.exact`` is set or the CPU
    has no byte products. torch and Triton never round x. With ``byte_inputs`` every form rounds x, by parts of 128
    columns, to int8 or to fp8 as the weight.

    Source: Dettmers et al., 2022 (products of rounded rows); the groups of 32 are those of ggml's q8_0.
    """
    return weight.product(x, bias)


@weight_product.in_cpp
def _weight_product(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor | Unfit:
    if not weight.fits(x):
        return UNFIT
    if x.dtype == torch.float16:  # no kernel computes in float16
        return weight_product(x.float(), weight, bias).half()
    if weight.order is not None:
        x = take_columns(x, weight.order)
    x_RI = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if x_RI.stride(1) != 1:
        x_RI = x_RI.contiguous()
    rows, columns = x_RI.shape
    assert weight.columns == columns
    # The kernel adds the bias to float32 sums, before the one rounding.
    bias = None if bias is None else bias.float().contiguous()
    if rows >= WIDENED_ROWS and weight.widens(rows, x.dtype):
        out = _widened(x_RI, weight)
        out = out if bias is None else out.add_(bias)
        return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.rows)
    if out is None:
        out = torch.empty((rows, weight.rows), dtype=x.dtype)
    else:
        assert (out.dtype, out.is_contiguous(), out.numel()) == (x.dtype, True, rows * weight.rows)
    native.extension().linear(
        x_RI.data_ptr(),
        x_RI.stride(0),
        native.DTYPES[x.dtype],
        rows,
        weight.native(),
        0 if bias is None else bias.data_ptr(),
        weight.exact,
        out.data_ptr(),
        False,
    )
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.rows)


@op()
def take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [..., columns] with column ``order[i]``, int32 [columns], at place i: a copy."""
    return x.index_select(-1, order)


@take_columns.in_cpp
def _take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor | Unfit:
    if not native.fits(x):
        return UNFIT
    x_RI = x.reshape(-1, x.shape[-1])
    x_RI = x_RI if x_RI.stride(1) == 1 else x_RI.contiguous()
    assert order.dtype == torch.int32
    assert order.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    native.extension().take_columns(native.projected_of(x_RI), order.data_ptr(), order.shape[0], out.data_ptr())
    return out


def by_matrix_unit(dtype: torch.dtype) -> bool:
    """Return whether codes are multiplied with x as bfloat16, in the order of a matrix unit, for any number of rows."""
    return (
        dtype == torch.bfloat16
        and native.matrix_unit() != "none"
        and "x86_64_v4" in native.extension().instruction_set()
    )


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Return whether the CPU has products of bfloat16. Otherwise oneDNN emulates them: on a Zen 3 at a 70th of the
    speed of float32 products."""
    if not is_x86():
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _widened(x_RI: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return ``x_RI`` times blocks of dequantised rows: in float32 on a CPU that only emulates products of bfloat16."""
    out = x_RI.new_empty(x_RI.shape[0], weight.rows)
    if x_RI.dtype == torch.bfloat16 and not _multiplies_bfloat16():
        x_RI = x_RI.float()
    block_IR = scratch.take("quantized_linear.block", (weight.columns, _BLOCK_ROWS), x_RI.dtype)
    for first in range(0, weight.rows, _BLOCK_ROWS):
        last = min(first + _BLOCK_ROWS, weight.rows)
        native.extension().widen_weight(
            weight.native(), first, last, _BLOCK_ROWS, native.DTYPES[x_RI.dtype], block_IR.data_ptr()
        )
        out[:, first:last] = x_RI @ block_IR[:, : last - first]
    return out
