"""int8 weights with int8 inputs (``--quantize w8a8``): every implementation gives the naive twin's bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.quantised import noise
from tests.support import naive_ops
from weft.tensor import native
from weft.tensor.ops.linear import weight_product
from weft.tensor.weights import quantized
from weft.tensor.weights.quantized import Codes, QuantizedWeight, in_tiles
from weft.tensor.weights.rounded import rounded

SETS = ["torch", *(native.extension().instruction_sets() if native.MISSING is None else [])]
ROWS = [1, 2, 7, 32, 33]
SHAPES = [(64, 128), (33, 100), (130, 224), (16, 1000), (1, 32), (80, 260)]


@pytest.fixture(autouse=True, params=SETS)
def kernels(request: pytest.FixtureRequest, torch_kernels: None) -> Iterator[None]:
    """Every test in torch, and by every instruction set of this machine."""
    if request.param == "torch":
        yield
        return
    native.choose("native")
    best = native.extension().instruction_set()
    assert native.extension().use(request.param)
    yield
    native.extension().use(best)


def weight(rows: int, columns: int, *, group: int | None = None, seed: int = 0) -> QuantizedWeight:
    """``group``: columns that share a scale of the weight, as a checkpoint may have them."""
    codes = rounded(noise(seed, rows, columns), 8)
    if group is not None:
        generator = torch.Generator().manual_seed(seed + 1)
        scales = torch.rand(rows, -(-columns // group), generator=generator) / 100
        codes = Codes(8, codes.codes, scales, None, group)
    made = in_tiles(codes, byte_inputs=True)
    assert made.byte_inputs
    return made


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    assert got.dtype == expected.dtype
    return torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_has_the_bits_of_the_naive_one(dtype: torch.dtype) -> None:
    for rows_out, columns in SHAPES:
        w, x = weight(rows_out, columns), noise(1, 33, columns, dtype=dtype)
        x[3] = 0
        x[5] *= 1000
        for bias in (None, noise(2, rows_out)):
            truth = naive_ops.byte_product(x, w, bias)
            for rows in ROWS:
                assert same_bits(weight_product(x[:rows], w, bias), truth[:rows])


@pytest.mark.parametrize("group", [128, 256, 1024])
def test_weights_may_share_scales_over_several_parts(group: int) -> None:
    w, x = weight(48, 1000, group=group), noise(3, 7, 1000)
    assert same_bits(weight_product(x, w), naive_ops.byte_product(x, w))


def test_the_product_is_close_to_that_of_the_values() -> None:
    w, x = weight(64, 1024), noise(4, 8, 1024)
    truth = x.double() @ w.dense().double().T
    error = (weight_product(x, w).double() - truth).std() / truth.std()
    assert 1e-4 < error < 0.01


def test_halves_are_rounded_to_the_even_neighbour() -> None:
    """The largest is 127, so a step is one; each row of the weight picks a column."""
    columns = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5])
    x = torch.zeros(1, 128)
    x[0, :8] = columns
    codes = torch.full((8, 128), 128, dtype=torch.uint8)
    codes[torch.arange(8), torch.arange(8)] = 129
    w = in_tiles(Codes(8, codes, torch.ones(8, 1), None, 128), byte_inputs=True)
    assert weight_product(x, w)[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 4]


def test_the_largest_codes_of_both_sides_are_summed_exactly() -> None:
    """Pairs of such products do not fit the 16 bits that some byte instructions saturate at."""
    codes = torch.full((16, 256), 255, dtype=torch.uint8)
    codes[1::2] = 0
    w = in_tiles(Codes(8, codes, torch.ones(16, 2), None, 128), byte_inputs=True)
    x = torch.full((7, 256), 127.0)
    x[1::2] = -127
    expected = torch.tensor([127.0, -128.0]).repeat(8) * 127 * 256
    signs = torch.tensor([1.0, -1.0]).repeat(4)[:7, None]
    assert torch.equal(weight_product(x, w), signs * expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    w, bias, x = weight(70, 300), noise(5, 70), noise(6, 13, 300)
    clean = weight_product(x, w, bias)
    x[4, 299] = bad
    got = weight_product(x, w, bias)
    assert got[4].isnan().all()
    others = torch.arange(13) != 4
    assert torch.equal(got[others], clean[others])


def test_rows_and_parts_of_nothing_give_the_bias() -> None:
    w, bias = weight(64, 256), noise(7, 64)
    x = torch.zeros(9, 256)
    x[1] = 1e-31
    x[2] = 1e-42
    x[3, 200] = 5.0
    got = weight_product(x, w, bias)
    for row in (0, 1, 2, 4, 8):
        assert torch.equal(got[row], bias)
    assert not torch.equal(got[3], bias)
    assert weight_product(x[:0], w, bias).shape == (0, 64)


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    w, x = weight(130, 224), noise(8, 40, 224)
    together = weight_product(x, w)
    for row in (0, 5, 6, 39):
        assert torch.equal(weight_product(x[row : row + 1], w)[0], together[row])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(9))
    assert torch.equal(weight_product(x[order], w), together[order])
    for cut in (1, 3, 16, 33):
        parts = [weight_product(x[first : first + cut], w) for first in range(0, 40, cut)]
        assert torch.equal(torch.cat(parts), together)


def test_scales_that_rows_share_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: rows that are rounded together move one another."""
    alone = quantized.rounded_inputs

    def shared(x_RI: torch.Tensor, **form: bool) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = alone(x_RI, **form)
        widest = scales.amax(1, keepdim=True).expand_as(scales)
        return (codes * (scales / widest)[..., None]).round(), widest

    native.choose("torch")
    w, x = weight(130, 224), noise(8, 40, 224)
    monkeypatch.setattr(quantized, "rounded_inputs", shared)
    assert not torch.equal(weight_product(x[5:6], w)[0], weight_product(x, w)[5])


def test_inputs_may_have_other_shapes_and_strides() -> None:
    w, x = weight(48, 96), noise(10, 2, 3, 200)[..., :96]
    assert torch.equal(weight_product(x, w), naive_ops.byte_product(x, w))
    turned = noise(11, 96, 5).T
    assert torch.equal(weight_product(turned, w), naive_ops.byte_product(turned, w))


def test_other_codes_stay_what_they_are_and_so_do_experts() -> None:
    codes = rounded(noise(12, 32, 256), 8)
    zeros = torch.full(codes.scales.shape, 7, dtype=torch.uint8)
    fine = Codes(8, codes.codes, torch.ones(32, 4), None, 64)
    for other in (rounded(noise(12, 32, 256), 4), Codes(8, codes.codes, codes.scales, zeros, 128), fine):
        assert not in_tiles(other, byte_inputs=True).byte_inputs
    assert weight(32, 256).form == "w8a8"
    assert not QuantizedWeight.stack([weight(32, 256), weight(32, 256)]).byte_inputs
