"""Tiles by a matrix unit: the order of its sums, and few rows of codes by vectors with the bits of many.

Every test runs by the software unit, which states the manual's arithmetic in plain C++, and by AMX where this
process may use it. ``weft doctor`` names the unit, or why there is none: then AMX has run nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.ops.quantised import noise
from tests.ops.quantised import weight as code_weight
from tests.ops.test_byte_inputs import weight as byte_weight
from tests.ops.test_tiled_linear import in_order
from tests.ops.test_twelve_bit import made_of, with_odd_ones
from tests.support import naive_ops
from weft.tensor import native
from weft.tensor.fused_block import FusedBlock
from weft.tensor.op import UNFIT
from weft.tensor.ops.elementwise import _gated_linear as gated_in_cpp
from weft.tensor.ops.elementwise import silu_mul
from weft.tensor.ops.linear import weight_product
from weft.tensor.ops.moe import moe
from weft.tensor.weights.quantized import QuantizedWeight
from weft.tensor.weights.tiles import InTiles, serves

HAS_TILES = native.MISSING is None and "x86_64_v4" in native.extension().instruction_set()
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
        return  # a unit of another order serves all rows itself: the next test
    weight, x = with_tiny_ones(1, rows_out, columns), with_tiny_ones(2, 33, columns)
    total, tiles = by_manual(x, weight), in_order(weight)
    seen = 0
    for row in (0, 1, 2, 3, 9, 30):
        bias = residue_bias(x, weight, row)
        expected = (total + bias).to(BF16)
        for rows in (FEW_ROWS, 33):
            got = weight_product(x[:rows], tiles, bias)
            assert torch.equal(bits(got), bits(expected[:rows])), f"row {row} of {rows}"
        before = native.matrix_unit()
        assert native.use_matrix_unit("none")
        seen += int((weight_product(x, tiles, bias)[row] != expected[row]).sum())
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
        alone = weight_product(x[row : row + 1], both["plain"], bias)[0]
        assert alone.isfinite().all()
        for form, weight in both.items():
            for rows in (count for count in ROWS if count > row):
                around = torch.full((rows + 2, rows_out), 7, dtype=BF16)
                got = weight_product(x[:rows], weight, bias, out=around[1:-1])
                assert torch.equal(bits(got[row]), bits(alone)), f"{form}, row {row} of {rows}"
                assert (around[[0, -1]] == 7).all(), f"{form}, {rows} rows: written beside"


STAGED_BYTES = 1 << 20
"""Output size from which pieces are written through a buffer (csrc/piece_output.hpp)."""


@pytest.mark.parametrize("rows_out", [1024, 1040])
def test_a_large_output_has_the_bits_of_its_parts_and_touches_nothing_else(rows_out: int) -> None:
    rows = STAGED_BYTES // 2 // rows_out + 17  # no multiple of a block of rows
    weight, bias, x = noise(21, rows_out, 32, dtype=BF16), noise(22, rows_out), noise(23, rows, 32, dtype=BF16)
    for tiles in (in_order(weight), made_of(weight)):
        around = torch.full((rows + 2, rows_out), 7.0, dtype=BF16)
        whole = weight_product(x, tiles, bias, out=around[1:-1])
        parts = [weight_product(part, tiles, bias) for part in x.split(24)]
        assert all(part.numel() * 2 < STAGED_BYTES <= whole.numel() * 2 for part in parts)
        assert torch.equal(bits(whole), bits(torch.cat(parts)))
        assert bool((around[0] == 7).all() and (around[-1] == 7).all())


@pytest.mark.parametrize("rows_out", [576, 566])
def test_a_piece_of_many_tiles_and_chunks_has_the_bits_of_few_rows(rows_out: int) -> None:
    """8 tiles of W by 3 chunks of columns, the last of them incomplete; 16 rows take one pair of tiles at a time."""
    columns, threads = 1064, native.extension().threads()
    weight, x = with_odd_ones(rows_out, columns).nan_to_num(0.0, 1.0, 1.0).clamp(-1e3, 1e3), noise(31, 40, columns)
    native.set_threads(1)
    try:
        for tiles in (in_order(weight), made_of(weight)):
            many = weight_product(x.to(BF16), tiles)
            few = [weight_product(part, tiles) for part in x.to(BF16).split(16)]
            assert torch.equal(bits(many), bits(torch.cat(few)))
    finally:
        native.set_threads(threads)


@pytest.mark.parametrize(
    ("rows", "rows_out", "columns"), [(529, 1024, 32), (529, 1040, 32), (40, 576, 1064), (41, 566, 700)]
)
def test_a_piece_of_bytes_has_the_bits_of_vectors(rows: int, rows_out: int, columns: int) -> None:
    """Pieces of staged rows, and of 8 tiles and several chunks of columns; 8 rows or fewer go to vectors."""
    weight, bias, threads = byte_weight(rows_out, columns), noise(52, rows_out), native.extension().threads()
    x = noise(51, rows, columns, dtype=BF16) * torch.rand(rows, 1).to(BF16)
    native.set_threads(1)
    try:
        many = weight_product(x, weight, bias)
        few = [weight_product(part, weight, bias) for part in x.split(FEW_ROWS)]
    finally:
        native.set_threads(threads)
    assert torch.equal(bits(many), bits(torch.cat(few)))


@pytest.mark.parametrize(("rows", "rows_out", "columns"), [(33, 64, 96), (40, 576, 1064), (530, 128, 40)])
def test_a_gated_product_has_the_bits_of_a_product_and_its_activation(rows: int, rows_out: int, columns: int) -> None:
    weight, x = noise(41, rows_out, columns, dtype=BF16), noise(42, rows, columns, dtype=BF16)
    for tiles in (in_order(weight), made_of(weight)):
        gated = gated_in_cpp(x, tiles)
        assert isinstance(gated, torch.Tensor), "the kernel serves this"
        assert torch.equal(bits(gated), bits(silu_mul(weight_product(x, tiles))))
        assert not torch.equal(bits(gated), bits(silu_mul(weight_product(x, tiles).roll(rows_out // 2, dims=1))))
        assert gated_in_cpp(x[:32], tiles) is UNFIT


@pytest.mark.parametrize("columns", [64, 1000])
def test_a_product_is_the_exact_one_to_the_rounding(columns: int) -> None:
    weight, wide = noise(1, 70, columns, dtype=BF16), noise(2, 150, columns + 6, dtype=BF16)
    x = wide[:, 6:]
    truth = x.double() @ weight.double().T
    for rows in (3, 150):
        torch.testing.assert_close(
            weight_product(x[:rows], in_order(weight)).double(),
            truth[:rows],
            rtol=8e-3,
            atol=1e-5 * float(truth.abs().max()),
        )


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight, x = noise(1, 64, 96, dtype=BF16), noise(2, 40, 96, dtype=BF16)
    clean = weight_product(x, in_order(weight))
    x[21, 5] = torch.inf
    got = weight_product(x, in_order(weight))
    assert not got[21].isfinite().any()
    others = torch.arange(40) != 21
    assert torch.equal(bits(got[others]), bits(clean[others]))


def test_no_rows_are_no_work() -> None:
    x, weight = noise(2, 0, 96, dtype=BF16), noise(1, 64, 96, dtype=BF16)
    for product in (
        weight_product(x, in_order(weight)),
        weight_product(x, made_of(weight)),
        weight_product(x, of_codes("int4", 64, 96)),
        weight_product(x, byte_weight(64, 96)),
    ):
        assert product.shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_byte_products_have_the_bits_of_the_naive_ones(dtype: torch.dtype) -> None:
    for rows_out, columns in ((64, 128), (33, 100), (130, 224), (16, 1000), (80, 260)):
        w, x = byte_weight(rows_out, columns), noise(1, 49, columns, dtype=dtype)
        x[3] = 0
        x[5] *= 1000
        x[40, columns - 1] = torch.nan
        for bias in (None, noise(2, rows_out)):
            truth = naive_ops.byte_product(x, w, bias)
            for rows in (9, 16, 33, 49):
                got = weight_product(x[:rows], w, bias)
                assert torch.equal(got.nan_to_num(0.5), truth[:rows].nan_to_num(0.5)), f"{rows} rows"


def test_a_unit_makes_tiles_the_form_of_bfloat16() -> None:
    assert serves(BF16)
    assert native.matrix_unit() != "none"


def test_few_rows_by_other_sums_would_be_seen() -> None:
    """The control of equal bits: few rows by the vectors' own order, many by the unit."""
    weight, x = noise(1, 130, 1024, dtype=BF16), noise(2, 33, 1024, dtype=BF16)
    bias = residue_bias(x, weight, 3)
    many = weight_product(x, in_order(weight), bias)
    assert native.use_matrix_unit("none")
    assert not torch.equal(bits(weight_product(x[:FEW_ROWS], in_order(weight), bias)[3]), bits(many[3]))


CODES = {
    "int8": (8, False, None),
    "int8 zeros": (8, True, 32),
    "int8 rows": (8, False, -1),
    "int8 wide": (8, True, 320),
    "int4": (4, False, None),
    "int4 zeros": (4, True, 96),
    "int4 rows": (4, False, -1),
}
"""Form -> bits, zeros, columns that share a scale: less than a chunk of 256, more, and no divisor of it."""
each_code = pytest.mark.parametrize("form", CODES)


def of_codes(form: str, *shape: int, exact: bool = False, seed: int = 0) -> QuantizedWeight:
    bits, zeros, group = CODES[form]
    return code_weight(bits, *shape, zeros=zeros, group=group, exact=exact, seed=seed)


def codes_by_manual(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """A group's sum in the order of the manual; then sum x scale + total, rounded once."""
    plain = weight.by_rows(0, weight.rows)
    zeros = torch.tensor(128 if weight.bits == 8 else 8).expand(plain.scales.shape)
    zeros = zeros if plain.zeros is None else plain.zeros
    total = np.zeros((len(x), weight.rows), np.float32)
    for group, first in enumerate(range(0, weight.columns, weight.group)):
        last = min(first + weight.group, weight.columns)
        numbers = plain.codes[: weight.rows, first:last].int() - zeros[: weight.rows, group, None].int()
        sums = by_manual(x[:, first:last], numbers.to(BF16)).numpy().astype(np.longdouble)
        scales = plain.scales[: weight.rows, group].numpy().astype(np.longdouble)
        total = flushed((sums * scales + total).astype(np.float32))
    return torch.from_numpy(total)


@each_code
@pytest.mark.parametrize(("rows_out", "columns"), [(33, 100), (66, 640)])
def test_products_of_codes_have_the_order_of_the_manual(form: str, rows_out: int, columns: int) -> None:
    if not native.extension().follows_manual():
        return
    weight, x = of_codes(form, rows_out, columns, exact=True), with_tiny_ones(2, 33, columns)
    total, dense = codes_by_manual(x, weight), weight.dense()
    seen = 0
    for row in (0, 1, 2, 3):
        bias = residue_bias(x, dense, row)
        expected = (total + bias).to(BF16)
        for rows in (1, 2, 33):
            got = weight_product(x[:rows], weight, bias)
            assert torch.equal(bits(got), bits(expected[:rows])), f"row {row} of {rows}"
        before = native.matrix_unit()
        assert native.use_matrix_unit("none")
        seen += int((weight_product(x[:4], weight, bias)[row] != expected[row]).sum())
        assert native.use_matrix_unit(before)
    assert seen > 0, "another order gives the same bits: the test sees nothing"


@each_code
def test_a_row_of_a_product_of_codes_has_the_same_bits_in_any_batch(form: str) -> None:
    """Also where its inputs could be rounded: a unit never does that to bfloat16."""
    for rows_out, columns in ((50, 224), (34, 544)):
        weight, x = of_codes(form, rows_out, columns), noise(2, max(ROWS), columns + 6, dtype=BF16)[:, 6:]
        dense = weight.dense()
        for row in (0, 3, 14, 40):
            bias = residue_bias(x, dense, row)
            assert float((x[row].double() @ dense.double().T + bias).abs().max()) < 1e-5
            alone = weight_product(x[row : row + 1], weight, bias)[0]
            assert float(alone.abs().max()) < 1e-3, "x was rounded"
            for rows in (count for count in (2, 3, 4, 5, 16, 17, 33, 49) if count > row):
                got = weight_product(x[:rows], replace(weight, exact=rows % 2 == 0), bias)
                assert torch.equal(bits(got[row]), bits(alone)), f"row {row} of {rows}"


def test_products_of_codes_by_another_unit_would_be_seen() -> None:
    """The control of equal bits: few rows as a CPU without a unit multiplies them, many by the unit."""
    weight, x = of_codes("int8 rows", 130, 1024, exact=True), noise(2, 33, 1024, dtype=BF16)
    bias = residue_bias(x, weight.dense(), 3)
    many = weight_product(x, weight, bias)
    assert native.use_matrix_unit("none")
    assert not torch.equal(bits(weight_product(x[:4], weight, bias)[3]), bits(many[3]))


def test_what_is_not_finite_stays_in_its_row_of_a_product_of_codes() -> None:
    weight, x = of_codes("int4", 64, 96), noise(2, 40, 96, dtype=BF16)
    clean = weight_product(x, weight)
    x[21, 5] = torch.nan
    got = weight_product(x, weight)
    assert got[21].isnan().all()
    others = torch.arange(40) != 21
    assert torch.equal(bits(got[others]), bits(clean[others]))


def test_codes_meet_float32_rows_as_without_a_unit() -> None:
    weight, x = of_codes("int8", 64, 256), noise(2, 70, 256)
    with_unit = [weight_product(x[:rows], weight) for rows in (3, 70)]
    assert native.use_matrix_unit("none")
    for rows, got in zip((3, 70), with_unit, strict=True):
        assert torch.equal(weight_product(x[:rows], weight), got)


def test_a_fused_block_takes_codes_at_any_number_of_rows() -> None:
    first, second = of_codes("int8", 128, 96, exact=True), of_codes("int4", 96, 64, exact=True)
    x = noise(2, 40, 96, dtype=BF16)
    assert FusedBlock(first, None, second, None).bound(x) is not None
    assert native.use_matrix_unit("none")
    assert FusedBlock(first, None, second, None).bound(x) is None, "oneDNN multiplies 40 rows without a unit"


@pytest.mark.parametrize("form", ["int8", "int4 zeros"])
def test_experts_of_codes_give_a_token_the_same_bits_in_any_batch(form: str) -> None:
    experts, tokens, width, inner = 4, 40, 96, 48
    gate_up, down = of_codes(form, experts, 2 * inner, width), of_codes(form, experts, width, inner, seed=3)
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(tokens, experts, generator=generator).topk(2).indices
    ids[7, 1] = -1
    ids[:, 0] = torch.where(torch.arange(tokens) % 5 == 0, ids[:, 0], 3)
    ids[:, 1] = torch.where(ids[:, 1] == 3, 2, ids[:, 1])
    x, weights = noise(4, tokens, width, dtype=BF16), torch.rand(tokens, 2, generator=generator)
    together = moe(x, ids, weights, gate_up, down)
    truth = naive_ops.moe(x.double(), ids, weights, gate_up, down)
    scale = float(truth.abs().max())
    torch.testing.assert_close(together.double() / scale, truth / scale, rtol=2e-2, atol=3e-2)
    for first, last in ((0, 1), (7, 8), (3, 20)):
        part = moe(x[first:last], ids[first:last], weights[first:last], gate_up, down)
        assert torch.equal(bits(part), bits(together[first:last]))
    assert native.use_matrix_unit("none")
    assert not torch.equal(bits(moe(x, ids, weights, gate_up, down)), bits(together))
