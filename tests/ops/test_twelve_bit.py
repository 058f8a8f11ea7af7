"""bfloat16 in 12 bits a weight: every bit comes back, and every product is that of the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.ops.quantised import noise
from weft.tensor import native
from weft.tensor.ops.linear import weight_product
from weft.tensor.weights import tiles as packing
from weft.tensor.weights.tiles import TILE_ROWS, TiledWeight, TwelveBitWeight, in_best_tiles, rows_of, serves

SHAPES = [(64, 64), (33, 256), (130, 224), (120, 224), (7, 1024), (256, 2048), (1072, 64)]
ROWS = [*range(1, 15), 24, 25, 33, 100]


BUILT = native.MISSING is None
each_shape = pytest.mark.parametrize(("rows", "columns"), SHAPES if BUILT else [])
"""Without the kernels nothing is packing."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    native.choose("auto")
    yield
    native.choose("auto")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def in_order(weight: torch.Tensor) -> TiledWeight:
    """``weight`` in tiles, made here, so that it needs no kernels."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % TILE_ROWS))
    tiles = padded.view(-1, TILE_ROWS, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return TiledWeight(tiles, *weight.shape)


def with_odd_ones(rows: int, columns: int) -> torch.Tensor:
    """Normal, with every kind of number that has an upper byte of its own: in the first tile, where there are
    more of those than codes, and few enough to be packing."""
    weight = noise(1, rows, columns, dtype=torch.bfloat16)
    rare = torch.tensor(
        [0.0, -0.0, 1e-40, -3e38, torch.inf, -torch.inf, torch.nan, 2e-5, -1e9, 1e12, -1e-9, 1e-12],
        dtype=torch.bfloat16,
    )
    places = torch.randperm(min(rows, TILE_ROWS) * columns, generator=torch.Generator().manual_seed(2))
    weight.view(-1)[places[: len(rare)]] = rare
    return weight


def made_of(weight: torch.Tensor) -> TwelveBitWeight:
    made = packing.to_twelve_bit((rows_of(weight),))
    assert made is not None
    return made


@each_shape
def test_every_bit_comes_back(rows: int, columns: int) -> None:
    weight = with_odd_ones(rows, columns)
    made = made_of(weight)
    assert torch.equal(bits(made.dense()), bits(weight))
    assert made.odd.numel() > 2 * made.highs.shape[0], "none is odd: nothing was tried of them"
    asked = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(bits(made.rows_at(asked)), bits(weight[asked]))
    native.choose("torch")
    assert torch.equal(bits(made.rows_at(asked)), bits(weight[asked]))


@each_shape
def test_packing_by_vectors_gives_the_bytes_of_packing_one_weight_after_the_other(rows: int, columns: int) -> None:
    sets, best = native.extension().instruction_sets(), native.extension().instruction_set()
    if "x86_64_v3" not in sets:
        return
    weight = with_odd_ones(rows, columns)
    by_vectors = made_of(weight)
    try:
        assert native.extension().use("x86_64_v3")
        one_by_one = made_of(weight)
    finally:
        native.extension().use(best)
    assert torch.equal(by_vectors.units, one_by_one.units)
    assert torch.equal(by_vectors.odd, one_by_one.odd)


def test_matrices_below_each_other_are_packed_as_one_and_nan_is_seen() -> None:
    if not BUILT:
        return
    weight = with_odd_ones(130, 256)
    parts = [rows_of(weight[:7]), rows_of(weight[7:64]), rows_of(weight[64:])]
    made = packing.to_twelve_bit(parts)
    assert made is not None
    assert torch.equal(bits(made.dense()), bits(weight))
    assert packing.to_twelve_bit(parts, finite=True) is None
    finite = weight.nan_to_num(0.0, 0.0, 0.0)
    assert packing.to_twelve_bit((rows_of(finite),), finite=True) is not None


def test_a_weight_that_is_not_said_to_be_odd_comes_back_as_another() -> None:
    if not BUILT:
        return
    weight = with_odd_ones(64, 512)
    made = made_of(weight)
    tiles = made.highs.shape[0]
    end = torch.iinfo(torch.int64).max
    without = torch.cat((torch.arange(tiles) + tiles, torch.full((tiles,), end)))
    assert not torch.equal(bits(replace(made, odd=without).dense()), bits(weight))


def test_it_takes_three_quarters_of_the_bytes() -> None:
    if not BUILT:
        return
    weight = noise(1, 1024, 1024, dtype=torch.bfloat16)
    made = made_of(weight)
    assert made.nbytes < 0.76 * weight.numel() * 2
    assert made.units.numel() == weight.numel() * 3 // 2


@pytest.mark.parametrize("bias", [False, True])
@each_shape
def test_a_product_is_that_of_the_tiles_to_the_last_bit(rows: int, columns: int, bias: bool) -> None:
    weight = with_odd_ones(rows, columns)
    plain, made = in_order(weight), made_of(weight)
    x = noise(2, max(ROWS), columns, dtype=torch.bfloat16)
    added = noise(3, rows, dtype=torch.bfloat16) if bias else None
    for count in ROWS:
        got = weight_product(x[:count], made, added)
        assert torch.equal(bits(got), bits(weight_product(x[:count], plain, added))), f"{count} rows"
    other = weight.clone()
    other[rows // 2] = -other[rows // 2]
    assert not torch.equal(bits(weight_product(x[:9], made_of(other))), bits(weight_product(x[:9], made)))


@pytest.mark.parametrize("rows", [1, 15, 17, 31, 32, 33, 63, 64, 65, 96, 113, 127, 128, 129] if BUILT else [])
def test_a_product_writes_its_own_rows_alone(rows: int) -> None:
    """However many of an item there are; by few rows of x, by many, and by a width that leaves no room."""
    for columns, counts in ((64, (1, 13, 95, 96, 97, 260)), (2056, (5, 97))):
        weight = noise(rows, rows, columns, dtype=torch.bfloat16)
        plain, made = in_order(weight), made_of(weight)
        for count in counts:
            x = noise(2, count, columns, dtype=torch.bfloat16)
            around = torch.full((count + 2, rows), 7, dtype=torch.bfloat16)
            got = weight_product(x, made, out=around[1:-1])
            assert torch.equal(bits(got), bits(weight_product(x, plain))), f"{columns} columns, {count} rows"
            assert (around[[0, -1]] == 7).all(), f"{columns} columns, {count} rows: written beside"


def test_rows_of_x_may_be_apart() -> None:
    if not BUILT:
        return
    made = made_of(noise(1, 80, 64, dtype=torch.bfloat16))
    wide = noise(2, 30, 96, dtype=torch.bfloat16)
    for count in (1, 2, 30):
        apart = wide[:count, 32:]
        assert torch.equal(weight_product(apart, made), weight_product(apart.contiguous(), made))


def test_without_the_kernels_a_product_is_that_of_the_rows() -> None:
    if not BUILT:
        return
    weight = noise(1, 80, 64, dtype=torch.bfloat16)
    made, x = made_of(weight), noise(2, 3, 64, dtype=torch.bfloat16)
    native.choose("torch")
    assert torch.equal(weight_product(x, made), torch.nn.functional.linear(x, weight))


def test_only_what_gains_by_it_is_twelve_bit() -> None:
    if not BUILT or not serves(torch.bfloat16):
        return
    large, small = (noise(1, rows, 1024, dtype=torch.bfloat16) for rows in (512, 64))
    assert isinstance(in_best_tiles(large), TwelveBitWeight)
    assert isinstance(in_best_tiles(small), TiledWeight), "it is read out of a cache"
    assert isinstance(in_best_tiles(large, twelve_bit=False), TiledWeight)
    assert isinstance(in_best_tiles(large.float()), TiledWeight)
    assert isinstance(in_best_tiles(large[:, :1022].contiguous()), TiledWeight), "no whole units"
    spread = large * 2.0 ** torch.randint(-60, 60, large.shape, generator=torch.Generator().manual_seed(3))
    kept = in_best_tiles(spread)
    assert isinstance(kept, TiledWeight), "weights of all sizes"
    assert torch.equal(bits(kept.dense()), bits(spread))
    assert in_best_tiles(large.to("meta")) is None


def test_a_row_beyond_the_table_is_a_bug_that_is_seen() -> None:
    if not BUILT:
        return
    made = made_of(noise(1, 40, 64, dtype=torch.bfloat16))
    for row in (40, -1):
        with pytest.raises(IndexError):
            made.rows_at(torch.tensor([0, row]))
