"""Products with weights in int8 and int4 in Triton, dense and by experts, against their twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.tolerances import close
from tests.ops.quantised import fp8_weight, noise, weight
from tests.support import naive_ops
from tests.support.naive_ops import moe as naive_moe
from weft.models.runtime_form import RuntimeForm
from weft.tensor.device import multiplies_fp8
from weft.tensor.gpu import products
from weft.tensor.gpu.products import ColumnSplits
from weft.tensor.kernels import quantized_linear as triton
from weft.tensor.ops.linear import weight_product
from weft.tensor.ops.moe import moe
from weft.tensor.weights.quantized import Codes, QuantizedWeight, in_tiles
from weft.units import PAD


def on(made: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    return replace(
        made,
        codes=made.codes.to(device),
        scales=made.scales.to(device),
        zeros=None if made.zeros is None else made.zeros.to(device),
    )


@pytest.mark.parametrize(("bits", "group", "zeros"), [(8, None, False), (4, None, False), (4, 64, True), (8, -1, True)])
def test_a_product_equals_that_of_the_widened_weight(
    bits: int, group: int | None, zeros: bool, device: torch.device
) -> None:
    """Rows that fill no tile, columns that fill no line, more than one block of both."""
    made = weight(bits, 70, 200, group=group, zeros=zeros)
    bias = noise(5, 70)
    for rows in (1, 19):
        x = noise(rows, rows, 200)
        want = naive_ops.quantized_linear(x, made, bias)
        got = weight_product(x.to(device), on(made, device), bias.to(device)).cpu()
        torch.testing.assert_close(got, want, **close(torch.float32))
        plain = weight_product(x.to(device).bfloat16(), on(made, device)).cpu()
        assert plain.dtype == torch.bfloat16
        torch.testing.assert_close(plain.float(), want - bias, atol=0.3, rtol=2e-2)
    assert (
        want - naive_ops.quantized_linear(x, weight(bits, 70, 200, group=group, zeros=zeros, seed=9), bias)
    ).abs().max() > 1  # the control: other codes, another product


@pytest.mark.parametrize(("bits", "zeros"), [(8, False), (4, True)])
def test_many_rows_are_multiplied_with_the_values_of_the_weight(
    bits: int, zeros: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = on(weight(bits, 70, 200, zeros=zeros), device)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(triton.dense(made, dtype).float(), made.dense().to(dtype).float())
    x, bias = noise(3, 19, 200).to(device), noise(5, 70).to(device)
    want = weight_product(x, made, bias)
    dequantised: list[int] = []
    dense = triton.dense
    monkeypatch.setattr(triton, "dense", lambda *given: (dequantised.append(1), dense(*given))[1])
    monkeypatch.setattr(triton, "DENSE_ROWS", 19)
    torch.testing.assert_close(weight_product(x, made, bias), want, **close(torch.float32))
    weight_product(x[:18], made, bias)
    assert len(dequantised) == 1, "few rows read the codes"


@pytest.mark.parametrize("group", [128, 256, -1])
def test_bytes_times_bytes_have_the_same_bits_on_every_machine(group: int, device: torch.device) -> None:
    made = replace(weight(8, 70, 300, group=group), byte_inputs=True)
    bias, x = noise(5, 70), noise(4, 3, 300) * torch.tensor([[1.0], [1e-33], [40.0]])
    x[2, 130] = float("inf")
    want = made.byte_product(x, bias)
    assert want[2].isnan().all()
    got = weight_product(x.to(device), on(made, device), bias.to(device)).cpu()
    assert torch.equal(got[:2], want[:2])
    assert got[2].isnan().all()
    assert torch.equal(weight_product(x[:0].to(device), on(made, device)).cpu(), want[:0])
    half = weight_product(x[:2].to(device).half(), on(made, device)).cpu()
    assert torch.equal(half, made.byte_product(x[:2].half()))
    exact = naive_ops.quantized_linear(x[:1], replace(made, byte_inputs=False), bias)
    assert (got[:1] - exact).abs().max() > 1e-5, "the control: inputs are rounded"


def test_no_row_is_no_product(device: torch.device) -> None:
    made = on(weight(4, 32, 64), device)
    assert weight_product(torch.empty(2, 0, 64, device=device), made).shape == (2, 0, 32)


@pytest.mark.parametrize(("bits", "zeros", "gated"), [(8, False, True), (4, True, True), (4, False, False)])
def test_quantised_experts_equal_their_formula(bits: int, zeros: bool, gated: bool, device: torch.device) -> None:
    tokens, experts, inner, width = 5, 4, 48, 72
    up = weight(bits, experts, (2 if gated else 1) * inner, width, zeros=zeros)
    down = weight(bits, experts, width, inner, zeros=zeros, seed=3)
    x, shares = noise(7, tokens, width), noise(8, tokens, 2).abs()
    ids = torch.tensor([[0, 3], [PAD, 3], [2, PAD], [PAD, PAD], [3, 2]])
    want = naive_moe(x, ids, shares, up.dense(), down.dense(), gated=gated)
    got = moe(x.to(device), ids.to(device), shares.to(device), on(up, device), on(down, device), gated=gated).cpu()
    torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)
    assert not got[3].any()
    ids[0, 0] = 1  # the control: another expert, another token
    assert (got[0] - naive_moe(x, ids, shares, up.dense(), down.dense(), gated=gated)[0]).abs().max() > 0.1


def test_one_side_may_be_quantised_alone(device: torch.device) -> None:
    up, down = weight(8, 3, 2 * 32, 40), weight(8, 3, 40, 32, seed=3)
    x, ids, shares = noise(7, 3, 40), torch.tensor([[0], [2], [1]]), torch.ones(3, 1)
    want = naive_moe(x, ids, shares, up.dense(), down.dense())
    for parts in ((up.dense().to(device), on(down, device)), (on(up, device), down.dense().to(device))):
        got = moe(x.to(device), ids.to(device), shares.to(device), *parts).cpu()
        torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)


@pytest.mark.parametrize(("high", "lanes"), [(32, 1), (24, 16)])
def test_a_product_with_fp8_is_that_of_its_widened_values(
    high: int, lanes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that tiles of 16 rows divide have one scale for a tile; others one for each row."""
    weight = fp8_weight(70, 200, high=high)
    assert (weight.scales.shape[-1], weight.form) == (lanes, "fp8")
    bias = noise(5, 70)
    for rows in (1, 19):
        x = noise(rows, rows, 200)
        want = naive_ops.quantized_linear(x, weight, bias)
        got = weight_product(x.to(device), on(weight, device), bias.to(device)).cpu()
        scale = float(want.abs().max())
        torch.testing.assert_close(got, want, atol=1e-5 * scale, rtol=1e-5)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(triton.dense(on(weight, device), dtype).cpu(), weight.dense(dtype=dtype))
    monkeypatch.setattr(triton, "DENSE_ROWS", 19)
    many = weight_product(x.to(device), on(weight, device), bias.to(device)).cpu()
    torch.testing.assert_close(many, want, atol=1e-5 * scale, rtol=1e-5)
    other = naive_ops.quantized_linear(x, fp8_weight(70, 200, high=64), bias)
    assert (want - other).abs().max() > 1e-2 * scale, "the control: other scales, another product"


def rounding(high: int = 32) -> QuantizedWeight:
    """In fp8, with inputs in fp8: three parts of columns, rows that fill no block."""
    return replace(fp8_weight(80, 384, high=high), byte_inputs=True)


@pytest.mark.parametrize(("high", "rows"), [(32, 1), (24, 19), (32, 70)])
def test_fp8_by_fp8_is_the_sum_of_codes_by_parts(high: int, rows: int, device: torch.device) -> None:
    made, bias = rounding(high), noise(5, 80)
    assert made.form == "fp8 x fp8"
    x = noise(rows, rows, 384) * torch.logspace(-3, 3, rows)[:, None]
    want = made.byte_product(x, bias)
    got = weight_product(x.to(device), on(made, device), bias.to(device)).cpu()
    scale = want.abs().amax(1, keepdim=True)
    assert ((got - want).abs() <= 2e-5 * scale).all()
    exact = naive_ops.quantized_linear(x, replace(made, byte_inputs=False), bias)
    assert 1e-3 < ((got - exact).abs() / scale).mean() < 0.02, "the control: inputs keep four bits"
    alone = weight_product(x[-1:].to(device), on(made, device), bias.to(device)).cpu()
    assert ((alone - got[-1:]).abs() <= 1e-6 * scale[-1:]).all(), "whatever the number of rows"


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    recipe_a: object,
    scale_b: torch.Tensor,
    recipe_b: object,
    *,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """torch's, with what it asks of its arguments on a GPU (2.13, ``ScaledBlas.cpp``); the CPU has none."""
    (rows, columns), width = a.shape, b.shape[1]
    blocks = torch.nn.functional.ScalingType.BlockWise1x128  # type: ignore[attr-defined]
    assert recipe_a == recipe_b == blocks
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert (a.stride(1), b.stride(0), columns % 16, width % 16) == (1, 1, 0, 0)
    for scale, own in ((scale_a, rows), (scale_b, width)):
        assert (scale.dtype, scale.shape) == (torch.float32, (own, -(-columns // 128)))
        assert scale.stride() == (1, own)
    assert rows % 4 == 0
    wide = [
        one.float() * scale.repeat_interleave(128, 1)[:, :columns] for one, scale in ((a, scale_a), (b.t(), scale_b))
    ]
    return (wide[0] @ wide[1].T).to(output_dtype)


@pytest.mark.parametrize("high", [32, 24])
def test_many_rows_of_fp8_are_multiplied_by_torch_with_the_same_numbers(
    high: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, bias = on(rounding(high), device), noise(5, 80).to(device)
    codes, scales = triton.plain(made)
    assert torch.equal(codes.float() * scales.t().repeat_interleave(128, 1), made.dense())
    x = noise(3, 19, 384).to(device).bfloat16()
    few = weight_product(x, made, bias)
    asked: list[int] = []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_mm", lambda *given, **more: (asked.append(1), scaled_mm(*given, **more))[1]
    )
    monkeypatch.setattr(triton, "DENSE_ROWS", 19)
    many = weight_product(x, made, bias)
    assert (asked, many.dtype, many.shape) == ([1], torch.bfloat16, (19, 80))
    assert ((many - few).abs() <= 2.0**-6 * few.abs().amax(1, keepdim=True)).all()
    weight_product(x[:18], made, bias)
    weight_product(x, replace(made, byte_inputs=False), bias)  # the other path: widened weights
    assert len(asked) == 1


def test_matrices_that_torch_does_not_take_see_their_inputs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them where torch has no such product."""
    form = RuntimeForm(on_gpu_kernels=True, fp8_inputs=True)
    for shape, called in (((80, 384), "fp8 x fp8"), ((70, 384), "fp8"), ((80, 200), "fp8"), ((2, 80, 384), "fp8")):
        codes = Codes(
            8, torch.zeros(shape, dtype=torch.uint8), torch.ones(*shape[:-1], -(-shape[-1] // 128)), None, 128, fp8=True
        )
        assert form.of_codes(codes).form == called
        assert RuntimeForm(on_gpu_kernels=True).of_codes(codes).form == "fp8"
    gpu_ = torch.device("cuda", 0)
    for capability, cuda, multiplies in (
        ((9, 0), "12.9", True),
        ((9, 0), "13.0", True),
        ((9, 0), "12.8", False),
        ((10, 0), "13.0", False),
        ((8, 9), "13.0", False),
        ((9, 0), None, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, is_=capability: is_)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert multiplies_fp8(gpu_) is multiplies
    assert not multiplies_fp8(torch.device("cpu"))


def test_every_byte_of_fp8_is_its_number(device: torch.device) -> None:
    """Zeros of both signs, numbers below 2^-6, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    weight = in_tiles(Codes(8, codes, torch.ones(8, 1), None, 32, fp8=True))
    got = triton.dense(on(weight, device), torch.float32).cpu()
    want = codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert int(got.isnan().sum()) == 2
    assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


def test_experts_in_fp8_equal_their_formula(device: torch.device) -> None:
    tokens, experts, inner, width = 5, 4, 48, 72
    up, down = fp8_weight(experts, 2 * inner, width, high=48), fp8_weight(experts, width, inner, high=24)
    assert (up.scales.shape[-1], down.scales.shape[-1]) == (1, 16)
    x, shares = noise(7, tokens, width), noise(8, tokens, 2).abs()
    ids = torch.tensor([[0, 3], [PAD, 3], [2, PAD], [PAD, PAD], [3, 2]])
    up.codes[1], down.codes[1] = 0x7F, 0x7F  # NaN in an expert that no token chose
    want = naive_moe(x, ids, shares, up.dense(), down.dense())
    got = moe(x.to(device), ids.to(device), shares.to(device), on(up, device), on(down, device)).cpu()
    torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)
    assert not got[3].any()
    ids[3, 0] = 1  # the control: it is read when it is chosen
    assert moe(x.to(device), ids.to(device), shares.to(device), on(up, device), on(down, device))[3].isnan().all()


def test_columns_are_split_by_the_shape_of_the_weight_and_added_in_order(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory is NaN: every partial sum that is read was written. A row has the same bits alone."""
    monkeypatch.setattr(products, "COLUMNS_MIN", 128)
    weight_, bias = on(weight(8, 40, 384), device), noise(5, 40).to(device)
    x = noise(3, 33, 384)
    want = naive_ops.quantized_linear(x, weight(8, 40, 384), bias.cpu())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: empty(*shape, **more).fill_(float("nan")))
    assert triton.splits_of(1, 40, 384) == triton.splits_of(16, 40, 384) == ColumnSplits(3, 128)
    alone, few, some = (
        weight_product(x[rows].to(device), weight_, bias).cpu() for rows in (slice(5, 6), slice(0, 7), slice(0, 33))
    )
    for got, rows in ((few, 7), (some, 33)):
        torch.testing.assert_close(got, want[:rows], atol=2e-5 * float(want.abs().max()), rtol=1e-5)
    assert torch.equal(alone[0], few[5])
    plain = weight_product(x[:3].to(device), weight_).cpu()
    torch.testing.assert_close(plain, want[:3] - bias.cpu(), atol=2e-5 * float(want.abs().max()), rtol=1e-5)


def test_a_weight_with_programs_enough_is_not_split() -> None:
    assert triton.splits_of(1, 16384, 4096).count == 1
    assert triton.splits_of(65, 1024, 4096) == ColumnSplits(1, 4096)
    assert triton.splits_of(16, 1024, 4096) == ColumnSplits(8, 512)
    assert triton.splits_of(64, 4096, 12288) == ColumnSplits(4, 3072)
    for columns in (200, 511, 1100, 5120, 7168):
        for rows in (1, 64):
            splits = triton.splits_of(rows, 1024, columns)
            assert (splits.count - 1) * splits.depth < columns <= splits.count * splits.depth
            assert splits.count == 1 or splits.depth >= 512
            assert splits.depth % triton.blocks_of(rows)[2] == 0
