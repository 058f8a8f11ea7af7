"""Tiles by a matrix unit: the order of its sums, and few rows by vectors with the bits of many by the unit.

Every test runs by the software unit, which states the manual's arithmetic in plain C++, and by AMX where this
process may use it. ``weft doctor`` names the unit, or why there is none: then AMX has run nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.ops.quantised import noise
from tests.ops.test_byte_inputs import weight as byte_weight
from tests.ops.test_tiled_linear import in_order
from tests.ops.test_twelve_bit import made_of, with_odd_ones
from weft.tensor import native
from weft.tensor.ops.quantized_linear import naive, quantized_linear
from weft.tensor.ops.tiled_linear import tiled_linear
from weft.tensor.weights.tiled import serves
from weft.tensor.weights.twelve_bit import InTiles

HAS_TILES = native.MISSING is None and native.extension().has_twelve_bit_products()
UNITS = [unit for unit in native.matrix_units() if unit != "none"] if HAS_TILES else []
FEW_ROWS = 8
ROWS = [1, 2, 7, 8, 9, 16, 17, 33, 49]
SHAPES = [(64, 64), (33, 104), (130, 224), (7, 1000), (96, 544)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, params=UNITS)
def unit(request: pytest.FixtureRequest, torch_kernels: None) -> Iterator[str]:
    native.choose("native")
    before = native.matrix_unit()
    assert native.use_matrix_unit(request.param)
    assert request.param in native.describe()
    yield request.param
    assert native.use_matrix_unit(before)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def by_manual(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Intel's definition of tdpbf16ps, with the 64-bit mantissas of ``longdouble`` before each rounding."""
    left, right = (flushed(one.float().numpy()).astype(np.longdouble) for one in (x, weight))
    total = np.zeros((len(left), len(right)), np.float32)
    for first in range(0, left.shape[1], 32):
        halves = [np.zeros_like(total), np.zeros_like(total)]
        for column in range(first, min(first + 32, left.shape[1])):
            product = left[:, None, column] * right[None, :, column]
            halves[column % 2] = flushed((halves[column % 2] + product).astype(np.float32))
        total = flushed(total + flushed(halves[0] + halves[1]))
    return torch.from_numpy(total)


def with_tiny_ones(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Rows of ordinary numbers, of numbers with denormal products, and of denormals."""
    x = noise(seed, rows, columns, dtype=BF16)
    x[1::3] *= 2.0**-64
    x[2::3] *= 2.0**-130
    return x


def residue_bias(x: torch.Tensor, weight: torch.Tensor, row: int) -> torch.Tensor:
    """A bias that leaves of the row's sums what float32 rounded: bfloat16 shows the last bits of that."""
    return -(x[row].double() @ weight.double().T).float()


@pytest.mark.parametrize(("rows_out", "columns"), SHAPES)
def test_sums_have_the_order_and_the_zeros_of_the_manual(rows_out: int, columns: int, unit: str) -> None:
    if not native.extension().follows_manual():
        return      # a unit of another order serves all rows itself: the next test
    weight, x = with_tiny_ones(1, rows_out, columns), with_tiny_ones(2, 33, columns)
    total, tiles = by_manual(x, weight), in_order(weight)
    seen = 0
    for row in (0, 1, 2, 3, 9, 30):
        bias = residue_bias(x, weight, row)
        expected = (total + bias).to(BF16)
        for rows in (FEW_ROWS, 33):
            got = tiled_linear(x[:rows], tiles, bias)
            assert torch.equal(bits(got), bits(expected[:rows])), f"row {row} of {rows}"
        before = native.matrix_unit()
        assert native.use_matrix_unit("none")
        seen += int((tiled_linear(x, tiles, bias)[row] != expected[row]).sum())
        assert native.use_matrix_unit(before)
    assert seen > 0, "another order gives the same bits: the test sees nothing"


def forms(rows: int, columns: int) -> dict[str, InTiles]:
    weight = with_odd_ones(rows, columns).nan_to_num(0.0, 1.0, 1.0).clamp(-1e12, 1e12)
    return {"plain": in_order(weight), "12 bits": made_of(weight)}


@pytest.mark.parametrize(("rows_out", "columns"), SHAPES)
def test_a_row_has_the_same_bits_in_either_form_and_any_batch(rows_out: int, columns: int) -> None:
    x, both = noise(2, max(ROWS), columns, dtype=BF16), forms(rows_out, columns)
    dense = both["plain"].dense()
    for row in (0, 6, 14, 40):
        bias = residue_bias(x, dense, row)
        alone = tiled_linear(x[row:row + 1], both["plain"], bias)[0]
        assert alone.isfinite().all()
        for form, weight in both.items():
            for rows in (count for count in ROWS if count > row):
                around = torch.full((rows + 2, rows_out), 7, dtype=BF16)
                got = tiled_linear(x[:rows], weight, bias, out=around[1:-1])
                assert torch.equal(bits(got[row]), bits(alone)), f"{form}, row {row} of {rows}"
                assert (around[[0, -1]] == 7).all(), f"{form}, {rows} rows: written beside"


@pytest.mark.parametrize("columns", [64, 1000])
def test_a_product_is_the_exact_one_to_the_rounding(columns: int) -> None:
    weight, wide = noise(1, 70, columns, dtype=BF16), noise(2, 150, columns + 6, dtype=BF16)
    x = wide[:, 6:]
    truth = x.double() @ weight.double().T
    for rows in (3, 150):
        torch.testing.assert_close(tiled_linear(x[:rows], in_order(weight)).double(), truth[:rows], rtol=8e-3,
                                   atol=1e-5 * float(truth.abs().max()))


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight, x = noise(1, 64, 96, dtype=BF16), noise(2, 40, 96, dtype=BF16)
    clean = tiled_linear(x, in_order(weight))
    x[21, 5] = torch.inf
    got = tiled_linear(x, in_order(weight))
    assert not got[21].isfinite().any()
    others = torch.arange(40) != 21
    assert torch.equal(bits(got[others]), bits(clean[others]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_byte_products_have_the_bits_of_the_naive_ones(dtype: torch.dtype) -> None:
    for rows_out, columns in ((64, 128), (33, 100), (130, 224), (16, 1000), (80, 260)):
        w, x = byte_weight(rows_out, columns), noise(1, 49, columns, dtype=dtype)
        x[3] = 0
        x[5] *= 1000
        x[40, columns - 1] = torch.nan
        for bias in (None, noise(2, rows_out)):
            truth = naive.byte_product(x, w, bias)
            for rows in (9, 16, 33, 49):
                got = quantized_linear(x[:rows], w, bias)
                assert torch.equal(got.nan_to_num(0.5), truth[:rows].nan_to_num(0.5)), f"{rows} rows"


def test_a_unit_makes_tiles_the_form_of_bfloat16() -> None:
    assert serves(BF16)
    assert native.matrix_unit() != "none"


def test_few_rows_by_other_sums_would_be_seen() -> None:
    """The control of equal bits: few rows by the vectors' own order, many by the unit."""
    weight, x = noise(1, 130, 1024, dtype=BF16), noise(2, 33, 1024, dtype=BF16)
    bias = residue_bias(x, weight, 3)
    many = tiled_linear(x, in_order(weight), bias)
    assert native.use_matrix_unit("none")
    assert not torch.equal(bits(tiled_linear(x[:FEW_ROWS], in_order(weight), bias)[3]), bits(many[3]))
