"""Float weights in tiles: the order itself, and the product with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.quantised import noise
from weft.tensor import native
from weft.tensor.ops.linear import weight_product
from weft.tensor.weights.tiles import TILE_ROWS, TiledWeight, serves, tiled

SHAPES = [(64, 64), (33, 98), (130, 224), (1, 2), (256, 1024)]
ROWS = [*range(1, 14), 33]
SETS = native.extension().instruction_sets() if native.MISSING is None else ["none"]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each instruction set of this machine; where the kernels were not built, the rows laid out anew."""
    native.choose("auto")
    if not native.in_use():
        yield
        return
    best = native.extension().instruction_set()
    assert native.extension().use(request.param)
    yield
    native.extension().use(best)


def in_order(weight: torch.Tensor) -> TiledWeight:
    """What ``tiled`` makes, on any machine and one row after the other."""
    (rows, columns), pack = weight.shape, 4 // weight.itemsize
    tiles = torch.zeros(-(-rows // TILE_ROWS), columns // pack, TILE_ROWS, pack, dtype=weight.dtype)
    for row in range(rows):
        tiles[row // TILE_ROWS, :, row % TILE_ROWS] = weight[row].view(-1, pack)
    return TiledWeight(tiles, rows, columns)


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_tiles_give_their_rows_back(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = noise(1, rows, columns, dtype=dtype)
    made = in_order(weight)
    assert torch.equal(made.dense(), weight)
    asked = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(made.rows_at(asked), weight[asked])


@each_dtype
def test_a_weight_of_any_size_is_tiled_where_the_kernel_is_the_faster_one(dtype: torch.dtype) -> None:
    weight = noise(1, 130, 256, dtype=dtype)
    native.choose("auto")
    made = tiled(weight)
    assert (made is not None) == serves(dtype)
    if made is not None:
        assert torch.equal(made.tiles, in_order(weight).tiles)
    assert tiled(weight.half()) is None
    assert (tiled(weight[:2]) is not None) == serves(dtype)
    native.choose("torch")
    assert tiled(weight) is None


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows_out", "columns"), SHAPES)
def test_a_product_is_the_exact_one_to_the_rounding(
    rows_out: int, columns: int, bias: bool, dtype: torch.dtype, kernels: None
) -> None:
    weight, x = noise(1, rows_out, columns, dtype=dtype), noise(2, 33, columns, dtype=dtype)
    added = noise(3, rows_out, dtype=dtype) if bias else None
    made = in_order(weight)
    truth = x.double() @ weight.double().T + (0 if added is None else added.double())
    largest = max(1.0, float(truth.abs().max()))
    for rows in ROWS:
        got = weight_product(x[:rows], made, added)
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double(), truth[:rows], rtol=CLOSE[dtype]["rtol"], atol=CLOSE[dtype]["atol"] * largest
        )


@each_dtype
@pytest.mark.parametrize(("rows", "columns"), [(40, 224), (110, 1024), (333, 96)])
def test_a_row_gives_the_same_bits_whatever_rows_are_beside_it(
    rows: int, columns: int, dtype: torch.dtype, kernels: None
) -> None:
    made = in_order(noise(1, 330, columns, dtype=dtype))
    x = noise(2, rows, columns, dtype=dtype)
    if not made.fits(x):
        assert not native.in_use()  # many rows are the matrix library's there
        return
    together = weight_product(x, made)
    for row in (0, 5, 6, 39, rows // 2, rows - 1):
        assert torch.equal(weight_product(x[row : row + 1], made)[0], together[row])
    assert not torch.equal(weight_product(x[:1] * 1.01, made)[0], together[0])


@each_dtype
def test_rows_of_x_may_be_apart_and_of_another_dtype(dtype: torch.dtype, kernels: None) -> None:
    weight = noise(1, 48, 64, dtype=dtype)
    made, wide = in_order(weight), noise(2, 5, 80, dtype=dtype)
    x = wide[:, 16:]
    assert torch.equal(weight_product(x, made), weight_product(x.contiguous(), made))
    truth = x.double() @ weight.double().T
    torch.testing.assert_close(weight_product(x.double(), made), truth, rtol=1e-12, atol=1e-12)
