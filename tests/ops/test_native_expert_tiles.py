"""Experts in tiles: every form and unit against the naive twin, and tokens alone or with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from tests.ops.quantised import noise
from tests.ops.test_tiled_linear import in_order
from tests.ops.test_twelve_bit import made_of
from tests.support import naive_ops
from weft.tensor import native
from weft.tensor.op import UNFIT
from weft.tensor.ops import moe as ops_moe
from weft.tensor.ops.elementwise import Activation
from weft.tensor.ops.moe import ExpertBiases, expert_products, moe
from weft.tensor.weights.tiles import ExpertTiles, InTiles, TiledWeight
from weft.units import PAD

BF16 = torch.bfloat16
EXPERTS, CHOICES, WIDTH = 5, 2, 96
TILED = native.MISSING is None and native.extension().has_twelve_bit_products()
WAYS = (
    [
        f"{kernels} {unit}"
        for kernels in native.extension().instruction_sets()
        for unit in (native.matrix_units() if "v4" in kernels else ["none"])
    ]
    if TILED
    else []
)
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, BF16: {"rtol": 2e-2, "atol": 3e-2}}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, torch_kernels: None) -> Iterator[str]:
    """An instruction set and a matrix unit."""
    native.choose("native")
    kernels, unit = request.param.split()
    best, before = native.extension().instruction_set(), native.matrix_unit()
    assert native.extension().use(kernels)
    assert native.use_matrix_unit(unit)
    yield request.param
    native.extension().use(best)
    assert native.use_matrix_unit(before)


def plain(weight: torch.Tensor) -> InTiles:
    return in_order(weight)


def mixed(weight: torch.Tensor) -> InTiles:
    """In 12 bits or plain, by its first number."""
    return made_of(weight) if float(weight[0, 0]) > 0 else in_order(weight)


FORMS: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], InTiles]]] = {
    "float32": (torch.float32, plain),
    "bfloat16": (BF16, plain),
    "12 bits": (BF16, made_of),
    "mixed": (BF16, mixed),
}
each_form = pytest.mark.parametrize("form", FORMS)


def experts(form: str, *shape: int, seed: int) -> ExpertTiles:
    dtype, pack = FORMS[form]
    return ExpertTiles.of([pack(one) for one in noise(seed, *shape, dtype=dtype)])


def supported(form: str, way: str) -> bool:
    return form in ("float32", "bfloat16") or "v4" in way


def routed(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(CHOICES).indices
    ids[tokens // 2, 1] = PAD
    return noise(4, tokens, WIDTH, dtype=dtype), ids, torch.rand(tokens, CHOICES, generator=generator)


@each_form
@pytest.mark.parametrize(
    ("gated", "activation", "inner"),
    [
        (True, "silu", 64),
        (True, "gelu", 40),
        (False, "relu2", 72),
        (True, "gelu_tanh", 48),
        (True, "clamped_swiglu", 40),
    ],
)
def test_a_step_is_that_of_the_naive_twin(form: str, gated: bool, activation: Activation, inner: int, way: str) -> None:
    if not supported(form, way):
        return
    gate_up = experts(form, EXPERTS, (2 if gated else 1) * inner, WIDTH, seed=1)
    down = experts(form, EXPERTS, WIDTH, inner, seed=2)
    for tokens in (1, 3, 40):
        x, ids, weights = routed(tokens, FORMS[form][0])
        truth = naive_ops.moe(x.double(), ids, weights, gate_up, down, activation=activation, gated=gated)
        got = moe.native(x, ids, weights, gate_up, down, activation=activation, gated=gated)
        assert got is not UNFIT
        assert got.dtype == x.dtype
        scale = float(truth.abs().max())
        torch.testing.assert_close(got.double() / scale, truth / scale, **CLOSE[x.dtype])


@each_form
@pytest.mark.parametrize(("gated", "activation"), [(True, "clamped_swiglu"), (True, "silu"), (False, "gelu")])
def test_biases_are_those_of_each_expert(form: str, gated: bool, activation: Activation, way: str) -> None:
    if not supported(form, way):
        return
    inner = 48
    gate_up = experts(form, EXPERTS, (2 if gated else 1) * inner, WIDTH, seed=1)
    down = experts(form, EXPERTS, WIDTH, inner, seed=2)
    biases = ExpertBiases(noise(3, EXPERTS, (2 if gated else 1) * inner) * 8, noise(6, EXPERTS, WIDTH) * 4)
    x, ids, weights = routed(40, FORMS[form][0])
    truth = naive_ops.moe(x.double(), ids, weights, gate_up, down, activation=activation, gated=gated, biases=biases)
    got = moe.native(x, ids, weights, gate_up, down, activation=activation, gated=gated, biases=biases)
    assert isinstance(got, torch.Tensor)
    scale = float(truth.abs().max())
    torch.testing.assert_close(got.double() / scale, truth / scale, **CLOSE[x.dtype])
    plain = moe(x, ids, weights, gate_up, down, activation=activation, gated=gated)
    assert (got - plain).abs().max() > 0.05 * scale


@each_form
def test_gates_and_what_they_multiply_have_a_limit(form: str, way: str) -> None:
    if not supported(form, way):
        return
    gate_up, down = experts(form, EXPERTS, 96, WIDTH, seed=1), experts(form, EXPERTS, WIDTH, 48, seed=2)
    x, ids, weights = routed(40, FORMS[form][0])
    x = x * 4
    truth = naive_ops.moe(x.double(), ids, weights, gate_up, down, limit=0.3)
    got = moe.native(x, ids, weights, gate_up, down, limit=0.3)
    assert isinstance(got, torch.Tensor)
    scale = float(truth.abs().max())
    torch.testing.assert_close(got.double() / scale, truth / scale, **CLOSE[x.dtype])
    assert (got - moe(x, ids, weights, gate_up, down)).abs().max() > 0.05 * scale


@each_form
def test_a_token_has_the_same_bits_whatever_tokens_are_beside_it(form: str, way: str) -> None:
    """Experts get 1 to 300 rows, on both sides of every count at which another kernel serves."""
    if not supported(form, way):
        return
    tokens = 60 if "software" in way else 300
    gate_up, down = (experts(form, EXPERTS, *shape, seed=1) for shape in ((128, WIDTH), (WIDTH, 64)))
    x, ids, weights = routed(tokens, FORMS[form][0])
    ids[:, 0] = torch.where(torch.arange(tokens) % 7 == 0, ids[:, 0], 3)
    ids[:, 1] = torch.where(ids[:, 1] == 3, 4, ids[:, 1])
    together = moe(x, ids, weights, gate_up, down)
    for first, last in ((0, 1), (5, 6), (7, 20), (tokens - 40, tokens)):
        part = moe(x[first:last], ids[first:last], weights[first:last], gate_up, down)
        assert torch.equal(part, together[first:last])
    assert not torch.equal(moe(x[:1] * 1.01, ids[:1], weights[:1], gate_up, down), together[:1])


@each_form
def test_experts_that_no_token_chose_are_not_read(form: str, way: str) -> None:
    if not supported(form, way):
        return
    gate_up, down = (experts(form, EXPERTS, *shape, seed=1) for shape in ((128, WIDTH), (WIDTH, 64)))
    x, _, weights = routed(9, FORMS[form][0])
    gate_up.experts[2].body.view(torch.uint8).fill_(255)  # NaN
    ids = torch.tensor([[0, 1]]).expand(9, 2).contiguous()
    assert moe(x, ids, weights, gate_up, down).isfinite().all()
    ids[4, 1] = 2
    finite = moe(x, ids, weights, gate_up, down).isfinite().all(1)
    assert finite.sum() == 8 or form in ("12 bits", "mixed")
    assert moe(x, torch.full_like(ids, PAD), weights, gate_up, down).abs().sum() == 0


def test_tiles_of_experts_are_those_of_each_and_torch_can_use_them(torch_kernels: None) -> None:
    if not TILED:
        return
    values = noise(7, EXPERTS, 48, 64, dtype=BF16)
    made = ExpertTiles.of([in_order(one) for one in values])
    assert made.shape == values.shape
    assert torch.equal(made.dense(), values)
    assert isinstance(made.experts[0], TiledWeight)
    native.choose("torch")
    down = ExpertTiles.of([in_order(one) for one in noise(8, EXPERTS, 64, 24, dtype=BF16)])
    x = noise(9, 6, 64, dtype=BF16)
    ids = torch.arange(12).view(6, 2) % EXPERTS
    weights = torch.ones(6, 2)
    truth = naive_ops.moe(x.double(), ids, weights, values, down)
    torch.testing.assert_close(
        moe(x, ids, weights, made, down).double(), truth, rtol=3e-2, atol=2e-2 * float(truth.abs().max())
    )


@each_form
def test_products_of_each_choice_are_those_of_its_expert(form: str, way: str) -> None:
    """Without counting tokens too, as on a GPU; choices of PAD are zeros and not read."""
    if not supported(form, way):
        return
    weights = experts(form, EXPERTS, 40, WIDTH, seed=1)
    dense = weights.dense().double()
    for tokens in (1, 3, 40):
        _, ids, _ = routed(tokens, FORMS[form][0])
        x = noise(4, tokens, CHOICES, WIDTH, dtype=FORMS[form][0])
        x[ids == PAD] = float("nan")
        truth = torch.einsum("txd,txjd->txj", x.double(), dense[ids.clamp_min(0)])
        truth[ids == PAD] = 0
        scale = float(truth.abs().max())
        for products in (ops_moe._by_count, ops_moe._of_all):
            with mock.patch.object(ops_moe, "_by_count", products):
                got = expert_products(x, ids, weights)
            torch.testing.assert_close(got.double() / scale, truth / scale, **CLOSE[x.dtype])
        assert torch.equal(expert_products(x[:1], ids[:1], weights), expert_products(x, ids, weights)[:1])
