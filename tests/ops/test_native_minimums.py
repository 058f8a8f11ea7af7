"""Products with codes whose groups have minimums, in C++: on each instruction set, with each matrix unit.

A minimum is taken off behind a product, as the sum of x in 32 columns times it. Near: int8 inputs lose up to
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
from weft.tensor.ops.linear import by_matrix_unit, quantized_linear
from weft.tensor.weights.quantized import QuantizedWeight, in_tiles

FORMS = ("Q4_K", "Q5_K", "Q4_1", "Q5_1")
SHAPES = ((70, 512), (16, 256), (5, 768))
ALONE = ((0, 1), (3, 5), (7, 12), (0, 23), (39, 40))
KERNELS = [(name, unit) for name in (native.extension().instruction_sets() if native.MISSING is None else ())
           for unit in native.matrix_units() if unit == "none" or name == "x86_64_v4"]


@pytest.fixture(autouse=True, params=KERNELS, ids="-".join)
def kernels(request: pytest.FixtureRequest, torch_kernels: None) -> Iterator[None]:
    native.choose("native")
    best, unit = native.extension().instruction_set(), native.matrix_unit()
    assert native.extension().use(request.param[0])
    assert native.use_matrix_unit(request.param[1])
    yield
    assert native.use_matrix_unit(unit)
    native.extension().use(best)


def weight_of(name: str, rows: int, columns: int) -> QuantizedWeight:
    return in_tiles(BLOCK_FORMS[name].codes(torch.from_numpy(random_blocks(name, rows, columns))))


def inputs(columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(40, columns, generator=torch.Generator().manual_seed(3)) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_the_values(name: str, shape: tuple[int, int], exact: bool,
                                          dtype: torch.dtype) -> None:
    weight = replace(weight_of(name, *shape), exact=exact)
    x, values = inputs(shape[1], dtype), weight.dense()
    for rows in (1, 2, 5, 40):
        made = quantized_linear(x[:rows], weight).double()
        truth = x[:rows].double() @ values.double().T
        size = x[:rows].double().abs() @ values.double().abs().T
        near = 0.02 if not exact else 0.009 if dtype == torch.bfloat16 else 1e-5
        assert ((made - truth).abs() <= size * near).all()


@pytest.mark.parametrize("name", FORMS)
def test_without_its_minimums_a_product_is_another(name: str) -> None:
    """The control: the bound above is no wider than the minimums."""
    weight = weight_of(name, 70, 512)
    x = inputs(512, torch.float32)
    truth, size = x @ weight.dense().T, x.abs() @ weight.dense().abs().T
    assert ((quantized_linear(x, replace(weight, minimums=None)) - truth).abs() > size * 0.02).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_alone_and_in_company(name: str, dtype: torch.dtype) -> None:
    weight, x = weight_of(name, 70, 512), inputs(512, dtype)
    if weight.exact or not (native.extension().has_byte_products() or by_matrix_unit(dtype)):
        x = x[:12]  # from 16 rows on oneDNN multiplies, whose sums have another order
    together = quantized_linear(x, weight)
    for first, last in ALONE:
        if last <= len(x):
            assert torch.equal(quantized_linear(x[first:last], weight), together[first:last])
