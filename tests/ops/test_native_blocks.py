"""Products with ggml's blocks in C++: with minimums, bytes for scales, groups of 16 columns, tables; NVFP4,
whose scales are bytes of another kind; torchao's int4, whose groups of any size have an offset. On each
instruction set, with each matrix unit; dense and in experts.

A minimum is taken off behind a product, as the sum of x in a group times it. Near: int8 inputs lose up to
1 / 254 of the largest of 32 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.gguf_files import random_blocks
from weft.models.forms.gguf_blocks import BLOCK_FORMS
from weft.tensor import native
from weft.tensor.ops.linear import by_matrix_unit, weight_product
from weft.tensor.ops.moe import _moe, moe
from weft.tensor.weights.quantized import E2M1, BlockNumbers, Codes, QuantizedWeight, in_tiles
from weft.units import PAD

FORMS = (
    *(name for name, form in BLOCK_FORMS.items() if form.of_cpus or form.table),
    "NVFP4",
    "NVFP4 divided",
    "torchao 32",
    "torchao 128",
    "torchao 256",
    "unsigned 64",
)
SHAPES = ((70, 512), (16, 256), (5, 768))
ALONE = ((0, 1), (3, 5), (7, 12), (0, 23), (39, 40))
KERNELS = [
    (name, unit)
    for name in (native.extension().instruction_sets() if native.MISSING is None else ())
    for unit in native.matrix_units()
    if unit == "none" or name == "x86_64_v4"
]


@pytest.fixture(autouse=True, params=KERNELS, ids="-".join)
def kernels(request: pytest.FixtureRequest, torch_kernels: None) -> Iterator[None]:
    native.choose("native")
    best, unit = native.extension().instruction_set(), native.matrix_unit()
    assert native.extension().use(request.param[0])
    assert native.use_matrix_unit(request.param[1])
    yield
    assert native.use_matrix_unit(unit)
    native.extension().use(best)


def weight_of(name: str, rows: int, columns: int, seed: int = 0) -> QuantizedWeight:
    if name.startswith("NVFP4"):
        return in_tiles(nvfp4(rows, columns, seed, divides=name.endswith("divided")))
    if name.startswith(("torchao", "unsigned")):
        signed, group = name.startswith("torchao"), int(name.split()[1])
        weight = in_tiles(torchao(rows, columns, seed, group, signed=signed))
        assert weight.minimums is not None
        assert weight.scales.dtype == weight.minimums.dtype == (torch.float16 if signed else torch.float32)
        return weight
    made = random_blocks(name, rows, columns, seed=seed)
    if name == "MXFP4":  # exponents of one matrix; otherwise one group is all that counts
        made.reshape(-1, 17)[:, 0] = 118 + made.reshape(-1, 17)[:, 0] % 6
    return in_tiles(BLOCK_FORMS[name].codes(torch.from_numpy(made)))


def torchao(rows: int, columns: int, seed: int, group: int, *, signed: bool) -> Codes:
    """bfloat16 scales and offsets, which float16 holds, or not (``unsigned``)."""
    generator = torch.Generator().manual_seed(columns + seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // group, generator=generator).add_(0.1).bfloat16().float()
    minimums = torch.randn(scales.shape, generator=generator)
    minimums = minimums.bfloat16().float() if signed else minimums + 8
    return Codes(4, codes, scales, None, group, minimums=minimums, signed=signed)


def nvfp4(rows: int, columns: int, seed: int, *, divides: bool) -> Codes:
    generator = torch.Generator().manual_seed(columns + seed)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // 16, generator=generator).mul_(448).to(torch.float8_e4m3fn)
    shared = torch.rand(rows, 1, generator=generator).add_(0.5)
    table = torch.tensor([value + 128 for value in E2M1], dtype=torch.uint8)
    return Codes(
        4, codes, BlockNumbers(scales, shared * 1e4 if divides else shared / 1e4, divides), None, 16, table=table
    )


def inputs(columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(40, columns, generator=torch.Generator().manual_seed(3)) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_values(name: str, shape: tuple[int, int], exact: bool, dtype: torch.dtype) -> None:
    weight = replace(weight_of(name, *shape), exact=exact)
    x, values = inputs(shape[1], dtype), weight.dense()
    for rows in (1, 2, 5, 40):
        made = weight_product(x[:rows], weight).double()
        truth = x[:rows].double() @ values.double().T
        size = x[:rows].double().abs() @ values.double().abs().T
        near = 0.02 if not exact else 0.009 if dtype == torch.bfloat16 else 1e-5
        assert ((made - truth).abs() <= size * near).all()


@pytest.mark.parametrize("name", FORMS)
def test_with_other_minimums_or_scales_a_product_is_another(name: str) -> None:
    """The control: the bound above is no wider than what it guards."""
    weight = weight_of(name, 70, 512)
    x = inputs(512, torch.float32)
    truth, size = x @ weight.dense().T, x.abs() @ weight.dense().abs().T
    bytes_ = weight.scales if weight.scales.itemsize > 1 else weight.scales.view(torch.int8)
    wrong = [replace(weight, scales=bytes_.roll(1, dims=1).view(weight.scales.dtype))]
    if weight.table is not None:
        wrong.append(replace(weight, table=weight.table.roll(1)))
    if weight.minimums is not None:
        wrong.append(replace(weight, minimums=weight.minimums.roll(1, dims=1)))
        wrong.append(replace(weight, signed=not weight.signed))
    for other in wrong:
        assert ((weight_product(x, other) - truth).abs() > size * 0.02).any()


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_looked_up_as_they_are(name: str) -> None:
    weight = weight_of(name, 70, 512)
    rows = torch.tensor([0, 69, 15, 16, 15])
    assert torch.equal(weight.rows_at(rows, torch.float32), weight.dense()[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["Q4_K", "Q6_K", "Q2_K", "Q4_1", "IQ4_XS", "MXFP4", "NVFP4", "torchao 128", "torchao 32"]
)
def test_experts_are_those_of_the_values(name: str, dtype: torch.dtype) -> None:
    """Three experts [256, 512] and [256, 256]; each row of x alone has the bits that it has in company."""
    first = QuantizedWeight.stack([weight_of(name, 512, 256, seed) for seed in range(3)])
    second = QuantizedWeight.stack([weight_of(name, 256, 256, seed) for seed in range(3, 6)])
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(9, 256, generator=generator).to(dtype)
    ids = torch.randint(0, 3, (9, 1), generator=generator)
    weights = torch.rand(9, 1, generator=generator)
    made = moe(x, ids, weights, first, second, gated=True)
    values = first.dense()[ids[:, 0]], second.dense()[ids[:, 0]]
    gate, up = torch.einsum("td,tjd->tj", x.float(), values[0]).split(256, dim=1)
    truth = torch.einsum("ti,tdi->td", torch.nn.functional.silu(gate) * up, values[1]) * weights
    assert (made.float() - truth).norm() <= truth.norm() * 0.03
    assert torch.equal(made[4:5], moe(x[4:5], ids[4:5], weights[4:5], first, second, gated=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ordered", ["both", "first", "second"])
def test_experts_see_their_inputs_in_an_order_of_their_own(ordered: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)

    def experts(rows: int, begin: int, *, in_order: bool) -> QuantizedWeight:
        stack = QuantizedWeight.stack([weight_of("torchao 128", rows, 256, seed) for seed in range(begin, begin + 3)])
        orders = [torch.randperm(256, generator=generator).int() for _ in range(3)]
        return replace(stack, order=torch.stack(orders)) if in_order else stack

    first = experts(512, 0, in_order=ordered != "second")
    second = experts(256, 3, in_order=ordered != "first")
    x = torch.randn(23, 256, generator=generator).to(dtype)
    ids = torch.randint(0, 3, (23, 2), generator=generator)
    ids[5, 1] = PAD
    weights = torch.rand(23, 2, generator=generator)

    def truth(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(23, 256)
        for row, choice in (ids >= 0).nonzero().tolist():
            gate, up = (first[ids[row, choice]] @ x[row].float()).split(256)
            inner = torch.nn.functional.silu(gate) * up
            out[row] += second[ids[row, choice]] @ inner * weights[row, choice]
        return out

    taken = _moe(x, ids, weights, first, second)
    assert isinstance(taken, torch.Tensor), "the loop of torch"
    values = [one.dense() for one in (first, second)]
    right, near = truth(*values), 0.03
    assert (taken.float() - right).norm() <= right.norm() * near
    for number, one in enumerate((first, second)):
        if one.order is not None:  # the control: an order of another expert
            wrong = [*values]
            wrong[number] = replace(one, order=one.order.roll(1, dims=0)).dense()
            assert (taken.float() - truth(*wrong)).norm() > 10 * right.norm() * near
    assert torch.equal(taken[4:5], moe(x[4:5], ids[4:5], weights[4:5], first, second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_alone_and_in_company(name: str, dtype: torch.dtype) -> None:
    weight, x = weight_of(name, 70, 512), inputs(512, dtype)
    if weight.exact or not (native.extension().has_byte_products() or by_matrix_unit(dtype)):
        x = x[:12]  # from 16 rows on oneDNN multiplies, whose sums have another order
    together = weight_product(x, weight)
    for first, last in ALONE:
        if last <= len(x):
            assert torch.equal(weight_product(x[first:last], weight), together[first:last])
