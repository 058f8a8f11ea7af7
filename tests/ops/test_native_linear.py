"""The C++ products (int8, int4, experts in any form) against their naive twins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.ops.quantised import noise, weight
from tests.support import naive_ops, native_ops
from weft.tensor import native
from weft.tensor.op import UNFIT
from weft.tensor.ops import moe as experts_op
from weft.tensor.ops.elementwise import Activation
from weft.tensor.ops.moe import moe
from weft.tensor.weights.quantized import QuantizedWeight

DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {
    torch.float32: {"rtol": 3e-5, "atol": 3e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}
ROWS = [*range(1, 10), 33]


@pytest.fixture(autouse=True, params=native.extension().instruction_sets() if native.MISSING is None else [])
def native_kernels(request: pytest.FixtureRequest, torch_kernels: None) -> Iterator[None]:
    """Every test by every instruction set of this machine."""
    native.choose("native")
    best = native.extension().instruction_set()
    assert native.extension().use(request.param)
    yield
    native.extension().use(best)


def scaled(close: dict[str, float], truth: torch.Tensor) -> dict[str, float]:
    """Sums of hundreds of terms: what is allowed grows with the largest."""
    return {"rtol": close["rtol"], "atol": close["atol"] * max(1.0, float(truth.abs().max()))}


def byte_products(w: QuantizedWeight) -> bool:
    return not w.exact and bool(native.extension().has_byte_products())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("bits", "zeros", "group"),
    [(8, False, None), (8, True, 32), (8, False, -1), (4, False, None), (4, True, 64), (4, True, -1)],
)
def test_a_product_is_the_naive_one(bits: int, zeros: bool, group: int | None, exact: bool, dtype: torch.dtype) -> None:
    for rows_out, columns in ((64, 64), (33, 100), (130, 224), (1, 32)):
        w = weight(bits, rows_out, columns, zeros=zeros, exact=exact, group=group)
        x = noise(1, 33, columns, dtype=dtype)
        for bias in (None, noise(2, rows_out)):
            truth = naive_ops.quantized_linear(x.float(), w, bias, rounded=byte_products(w))
            for rows in ROWS:
                got = native_ops.weight_product(x[:rows], w, bias)
                assert got.dtype == dtype
                torch.testing.assert_close(got.float(), truth[:rows], **scaled(CLOSE[dtype], truth))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_gives_the_same_bits_whatever_rows_are_beside_it(bits: int) -> None:
    w = weight(bits, 130, 224, zeros=True, group=32)
    if not byte_products(w):
        return  # many rows are the matrix library's there
    x = noise(3, 40, 224)
    together = native_ops.weight_product(x, w)
    for row in (0, 7, 8, 39):
        assert torch.equal(native_ops.weight_product(x[row : row + 1], w)[0], together[row])


def test_rounding_the_inputs_is_what_exact_leaves_out() -> None:
    w = weight(8, 64, 256)
    if not byte_products(w):
        return
    x = noise(4, 3, 256)
    truth = naive_ops.quantized_linear(x.double(), w)
    rough = (native_ops.weight_product(x, w) - truth).abs().max()
    exact = (native_ops.weight_product(x, replace(w, exact=True)) - truth).abs().max()
    assert exact < 1e-4 < rough < 0.03 * truth.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [20, 300])
def test_many_rows_with_widened_weights_are_the_same_product(bits: int, rows: int) -> None:
    w = weight(bits, 700, 100, zeros=True, exact=True)
    x, bias = noise(5, rows, 100), noise(6, 700)
    truth = naive_of(x, w, bias)
    torch.testing.assert_close(native_ops.weight_product(x, w, bias), truth, **scaled(CLOSE[torch.float32], truth))


def naive_of(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor) -> torch.Tensor:
    return (x.double() @ w.dense().double().T + bias).float()


def test_inputs_of_other_shapes_strides_and_dtypes() -> None:
    w = weight(8, 48, 96, exact=True)
    x = noise(7, 2, 3, 200)[..., :96]
    truth = naive_ops.quantized_linear(x, w)
    torch.testing.assert_close(native_ops.weight_product(x, w), truth, rtol=1e-4, atol=1e-4)
    turned = noise(8, 96, 5).T
    torch.testing.assert_close(
        native_ops.weight_product(turned, w), naive_ops.quantized_linear(turned, w), rtol=1e-4, atol=1e-4
    )
    half = native_ops.weight_product(x.half(), w)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), truth, **scaled(CLOSE[torch.float16], truth))
    assert native_ops.weight_product(x[:0], w).shape == (0, 3, 48)


def test_an_input_of_zeros_gives_the_bias_and_a_nan_stays_in_its_row() -> None:
    w, bias = weight(4, 64, 64, zeros=True), noise(9, 64)
    x = torch.zeros(3, 64)
    assert torch.equal(native_ops.weight_product(x, w, bias), bias.expand(3, 64))
    x[1, 5] = float("nan")
    out = native_ops.weight_product(x, w, bias)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], bias.expand(2, 64))


Experts = torch.Tensor | QuantizedWeight


def experts(form: str, count: int, rows: int, columns: int, seed: int) -> Experts:
    if form in ("int8", "int4"):
        return weight(int(form[3:]), count, rows, columns, exact=True, seed=seed)
    return noise(seed, count, rows, columns, dtype=torch.float32 if form == "float32" else torch.bfloat16)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", True), ("relu2", False)])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_experts_are_the_naive_ones(
    form: str, activation: Activation, gated: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    x = noise(10, tokens, 96, dtype=dtype) * 0.2
    gate_up = experts(form, 5, 128 if gated else 64, 96, 11)
    down = experts(form, 5, 96, 64, 12)
    ids = torch.randint(0, 5, (tokens, 3), generator=torch.Generator().manual_seed(13))
    ids[0, 1] = -1
    weights = torch.rand(tokens, 3, generator=torch.Generator().manual_seed(14))
    truth = naive_ops.moe(x.double(), ids, weights, gate_up, down, activation=activation, gated=gated)
    for few_rows in (experts_op._FEW_ROWS, 99):  # torch takes 20 tokens in float, the kernel can
        monkeypatch.setattr(experts_op, "_FEW_ROWS", few_rows)
        got = moe(x, ids, weights, gate_up, down, activation=activation, gated=gated)
        torch.testing.assert_close(got.double(), truth, **scaled(CLOSE[dtype], truth))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_gates_of_experts_have_a_limit(form: str) -> None:
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    x, ids = noise(10, 3, 96, dtype=dtype), torch.tensor([[0, 4], [-1, 2], [2, 1]])
    gate_up, down, weights = experts(form, 5, 128, 96, 11), experts(form, 5, 96, 64, 12), torch.ones(3, 2)
    truth = naive_ops.moe(x.double(), ids, weights, gate_up, down, limit=0.3)
    got = native_ops.moe(x, ids, weights, gate_up, down, limit=0.3)
    torch.testing.assert_close(got.double(), truth, **scaled(CLOSE[dtype], truth))
    without = native_ops.moe(x, ids, weights, gate_up, down)
    assert (without - got).abs().max() > 0.05 * truth.abs().max()


def test_experts_nobody_chose_are_not_read_and_rounded_ones_are_close() -> None:
    x, ids = noise(15, 4, 64), torch.tensor([[0, 2], [2, 0], [0, -1], [-1, -1]])
    gate_up, down = noise(16, 3, 64, 64), noise(17, 3, 64, 32)
    gate_up[1] = float("nan")
    weights = torch.ones(4, 2)
    out = native_ops.moe(x, ids, weights, gate_up, down)
    assert out.isfinite().all()
    assert bool((out[3] == 0).all())
    rough = [weight(8, 3, *shape, seed=18) for shape in ((64, 64), (64, 32))]
    truth = naive_ops.moe(x.double(), ids, weights, *rough)
    error = (native_ops.moe(x, ids, weights, *rough) - truth).abs().max() / truth.abs().max()
    assert error < 0.03


def test_experts_that_the_kernel_does_not_take_go_to_torch() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    one, many = torch.ones(1, 1), torch.ones(99, 1)
    assert moe.native(noise(19, 1, 48), ids, one, noise(20, 2, 24, 48), noise(21, 2, 48, 12)) is UNFIT
    assert moe.native(noise(19, 99, 64), ids.expand(99, 1), many, noise(20, 2, 64, 64), noise(21, 2, 64, 32)) is UNFIT


@pytest.mark.parametrize("bits", [8, 4])
def test_a_product_is_written_to_memory_of_the_caller(bits: int) -> None:
    """A head writes its logits in each step to the memory of the step before."""
    w, x = weight(bits, 48, 64), noise(3, 5, 64)
    out = torch.empty(5, 48)
    made = native_ops.weight_product(x, w, None, out)
    assert made.data_ptr() == out.data_ptr()
    assert torch.equal(out, native_ops.weight_product(x, w))
