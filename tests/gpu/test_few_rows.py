"""Dense products of few rows: one order of sums for any number of rows, parts that the next norm adds, the choice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu_bytes import bytes_of
from tests.gpu.tolerances import close
from tests.oracle.serving import DEVICE, Serving, directory
from tests.unit.runner.step_counts import released_model
from weft.models.blocks.linear import Linear, Norm
from weft.models.layer import ResidualBlock
from weft.models.loading import load_model
from weft.planning.geometries import find_geometry
from weft.request import SamplingParams
from weft.runner import product_choice
from weft.runner.product_choice import choose_products, faster, weights_by_shape
from weft.tensor import gpu, native
from weft.tensor.gpu import few_rows
from weft.tensor.kernels.dense_linear import parts_of, splits_of
from weft.tensor.ops.linear import dense_linear
from weft.tensor.ops.norm import add_norm, finished

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ROWS, COLUMNS = 70, 1100  # neither is a multiple of a tile; columns in two parts


@pytest.fixture(autouse=True)
def no_shapes() -> Iterator[None]:
    yield
    few_rows.use(())
    native.choose("auto")


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(rows: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """x is a part of wider rows."""
    wide, weight = noise(rows, COLUMNS + 3, seed=1, dtype=dtype), noise(ROWS, COLUMNS, seed=2, dtype=dtype) / 32
    few_rows.use({(ROWS, COLUMNS)})
    return wide.to(device)[:, 3:], weight.to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 17, 63])
def test_a_product_of_few_rows_equals_its_formula(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = operands(rows, device, dtype)
    bias = noise(ROWS, seed=3, dtype=dtype).to(device)
    assert splits_of(weight).count == 2
    for added in (None, bias):
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        torch.testing.assert_close(dense_linear(x, weight, added).double(), exact, **close(dtype))
    assert (x @ weight.T - dense_linear(x, weight, bias)).abs().max() > 0.1, "the control: a bias is added"


def test_a_row_has_the_same_bits_in_any_batch_below_64_rows(device: torch.device) -> None:
    x, weight = operands(63, device)
    together = dense_linear(x, weight)
    for rows in (1, 2, 16, 17, 33):
        assert torch.equal(dense_linear(x[:rows], weight), together[:rows])
        assert torch.equal(parts_of(x[:rows], weight), parts_of(x, weight)[:, :rows])
    assert not torch.equal(together[0], together[1]), "the control: rows differ"


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_norm_that_follows_adds_the_parts_with_the_bits_of_a_sum_before_it(
    scale: float, device: torch.device
) -> None:
    x, weight = operands(5, device)
    stream, factors = noise(5, ROWS, seed=4).to(device), noise(ROWS, seed=5).to(device)
    product, parts = dense_linear(x, weight), parts_of(x, weight)
    assert (parts.shape, parts.dtype) == ((2, 5, ROWS), torch.float32)
    if gpu.INTERPRETED:  # which truncates where torch rounds
        torch.testing.assert_close(finished(parts, torch.bfloat16), product, **close(torch.bfloat16))
    else:
        assert torch.equal(finished(parts, torch.bfloat16), product)
    want = add_norm(stream, product.clone(), factors, 1e-6, scale=scale)
    got = add_norm(stream, parts, factors, 1e-6, scale=scale)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == torch.bfloat16
    first = add_norm(stream, parts[:1], factors, 1e-6, scale=scale)
    assert not torch.equal(first[0], got[0]), "the control: each part counts"
    gpu.choose("torch")
    for mine, other in zip(add_norm(stream, parts, factors, 1e-6, scale=scale), want, strict=True):
        torch.testing.assert_close(mine, other, rtol=2.0**-6, atol=0.05)  # two roundings, truncated without a GPU


def test_other_rows_dtypes_and_shapes_go_to_the_library(device: torch.device) -> None:
    x, weight = operands(64, device)
    assert few_rows.takes(x[:63], weight)
    assert not few_rows.takes(x, weight), "64 rows"
    assert not few_rows.takes(x[:0], weight)
    assert not few_rows.takes(x[:1].float(), weight.float())
    assert not few_rows.takes(x[:1], weight[:69])
    assert not few_rows.takes(x[:1, :COLUMNS], noise(COLUMNS, ROWS, seed=2).T)
    few_rows.use(())
    assert not few_rows.takes(x[:1], weight)


class Doubled:
    """An adapter of a product, which reads its output."""

    active = True

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert y.ndim == 2
        return y * 2


def test_only_a_block_whose_output_goes_straight_to_the_stream_leaves_parts(device: torch.device) -> None:
    x, weight = operands(3, device)

    class Block:
        def __init__(self) -> None:
            self.last_product = Linear(weight)

    plain, normed = Block(), Block()
    ResidualBlock(None, plain).leave_sums()
    ResidualBlock(None, normed, Norm(weight[:, 0], 1e-6)).leave_sums()
    assert plain.last_product(x).shape == (2, 3, ROWS)
    assert normed.last_product(x).shape == (3, ROWS)
    assert plain.last_product(noise(64, COLUMNS, seed=6).to(device)).shape == (64, ROWS)
    plain.last_product.adapted = Doubled()  # type: ignore[assignment]
    torch.testing.assert_close(plain.last_product(x), 2 * dense_linear(x, weight))


def test_a_decode_of_a_released_model_has_no_launch_more_than_by_the_library() -> None:
    """Counted on the meta device: sums of split products are part of the add and norm that follow."""
    geometry = find_geometry("Qwen3.5-4B")
    assert geometry is not None
    model = released_model(dict(geometry.config))
    library = bytes_of(model, 16)
    few_rows.use(weights_by_shape(model))
    own, many = bytes_of(model, 16), bytes_of(model, 64)
    linears = library.kernels["torch.linear"].launches
    assert own.kernels["dense_linear._product"].launches == linears
    assert "torch.linear" not in own.kernels
    assert own.total.launches == library.total.launches
    assert many.kernels["torch.linear"].launches == linears, "64 rows"
    assert own.total.moved < 1.02 * library.total.moved, "partial sums are few bytes"


def test_answers_of_a_model_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choice, "COLUMNS_MIN", 16)  # of a tiny model
    native.choose("torch")  # its tiles are for CPUs
    model = load_model(directory("qwen3_5"), dtype="bfloat16", device=DEVICE)
    answers = []
    for shapes in ((), weights_by_shape(model.model)):
        few_rows.use(shapes)
        serving = Serving("qwen3_5", model=model, max_num_seqs=2, max_model_len=128)
        answers.append(serving.run([[300, 20, 411, 5, 123], [9, 8]], [SHORT, SHORT]))
    for library, own in zip(*answers, strict=True):
        assert own.tokens == library.tokens
        torch.testing.assert_close(own.logits, library.logits, rtol=0, atol=0.25)
        assert not torch.equal(own.logits, library.logits), "the control: other sums"


def test_a_shape_is_chosen_by_all_of_its_numbers_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    """The own kernel saves 5 % with the first shape, 3 % with the second, and loses with one row of the third."""
    shares = {(8, 256): 0.95, (8, 512): 0.97, (8, 768): 0.5}
    weights = {shape: [torch.zeros(shape, dtype=torch.bfloat16)] for shape in shares}

    def seconds(each: list[torch.Tensor], rows: int, multiply: Any) -> float:
        shape = tuple(each[0].shape)
        if multiply is F.linear:
            return 1.0
        assert few_rows.takes(each[0][:1], each[0]), "what is measured is the own kernel"
        return 3.0 if shape == (8, 768) and rows == 1 else shares[shape]  # type: ignore[index]

    assert faster(weights, seconds) == {(8, 256)}


def test_no_measurement_chooses_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = {"layers": [torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(8, 4, dtype=torch.bfloat16)]}
    x = model["layers"][0][:1]
    choose_products("on", model, DEVICE, print)
    assert few_rows.takes(x, model["layers"][0])
    assert not few_rows.takes(x[:, :4], model["layers"][1]), "the weights of a convolution are no product's"
    choose_products("off", model, DEVICE, print)
    assert not few_rows.takes(x, model["layers"][0])
    monkeypatch.setattr(product_choice, "WEIGHTS_BYTES_MIN", 0)
    monkeypatch.setattr(gpu, "reaches", lambda device: True)

    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(product_choice, "_compile", failing)
    with caplog.at_level(logging.WARNING, logger="weft"):
        choose_products("auto", model, torch.device("cuda"), print)
    assert "could not be measured: no room" in caplog.text
    few_rows.use(())
