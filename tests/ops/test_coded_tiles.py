"""fp8, nf4 and fp4 on CPUs: weights have the library's bits, and rows the same in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.ops.quantised import noise
from weft.tensor import native
from weft.tensor.ops.linear import weight_product
from weft.tensor.weights.quantized import Codes
from weft.tensor.weights.tiles import CodedTiles, TiledWeight, coded_tiles, tiled

BUILT = native.MISSING is None and native.extension().has_coded_tiles()
ROWS = (1, 2, 5, 12, 13, 40, 200)
SIZES = ((130, 256), (64, 1024), (16, 64), (40, 1032))
FORMS = (
    ("fp8 blocks", "fp8 rows", "fp8 groups", "mxfp8", "nf4", "fp4", "fp8 rows small", "mxfp8 small", "nf4 by 32")
    if BUILT
    else ()
)
"""Without the kernels there are no such tiles."""
PAIRS = BUILT and "x86_64_v4_bf16" in native.extension().instruction_sets()
"""Vectors multiply pairs of bfloat16, in each set of instructions."""
UNITS = [unit for unit in native.matrix_units() if unit != "none"] if BUILT else []
"""The software unit, and AMX where this process may use it."""
_NF4 = [
    -1.0,
    -0.6961928,
    -0.5250731,
    -0.3949175,
    -0.2844414,
    -0.1847734,
    -0.0910500,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.3379152,
    0.4407098,
    0.5626170,
    0.7229568,
    1.0,
]
_FP4 = [0.0, 0.0052083, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    native.choose("auto")
    yield
    native.choose("auto")


def codes_of(form: str, rows: int, columns: int) -> Codes:
    """Each code, numbers without a leading one as well."""
    generator = torch.Generator().manual_seed(rows + columns)

    def any_of(count: int) -> torch.Tensor:
        return torch.randint(0, count, (rows, columns), generator=generator, dtype=torch.uint8)

    def scales(group: int) -> torch.Tensor:
        return torch.rand(rows, -(-columns // group), generator=generator) / 50 + 1e-4

    if form in ("nf4", "fp4", "nf4 by 32"):
        table = torch.tensor([*_FP4, *(-number for number in _FP4)] if form == "fp4" else _NF4)
        group = 32 if form == "nf4 by 32" else 64
        return Codes(4, any_of(16), scales(group), None, group, table=table)
    e4m3 = any_of(127) + (any_of(2) << 7)
    if form.startswith("mxfp8"):
        powers = torch.randint(110, 121, (rows, -(-columns // 32)), generator=generator, dtype=torch.uint8)
        if form == "mxfp8 small":  # products leave the normal numbers
            powers[::3, ::2] = torch.arange(powers[::3, ::2].numel()).view(powers[::3, ::2].shape) % 20
            powers[1::3, ::2] = 133  # the largest that is not widened
        return Codes(8, e4m3, powers.view(torch.float8_e8m0fnu), None, 32, fp8=True)
    if form == "fp8 blocks":
        return Codes(8, e4m3, scales(128)[:1].repeat(rows, 1), None, 128, fp8=True)
    group = 64 if form == "fp8 groups" else 1 << 20
    each = scales(group)
    if form == "fp8 rows small":
        least = torch.tensor([0.0, 1e-38, -1e-33, 1e-39, -0.01])
        each[1::17] = least[torch.arange(len(each[1::17])) % 5, None]
    return Codes(8, e4m3, each, None, -(-columns // 32) * 32 if group > columns else 64, fp8=True)


def tiles_of(codes: Codes) -> CodedTiles:
    made = coded_tiles(codes)
    assert made is not None
    return made


@pytest.mark.parametrize("form", FORMS)
def test_tiles_are_the_codes_rounded_to_bfloat16_once(form: str) -> None:
    codes = codes_of(form, 50, 128)
    assert torch.equal(tiles_of(codes).dense(), codes.dense().to(torch.bfloat16))


@pytest.fixture(params=["x86_64_v4_bf16", "x86_64_v4", *UNITS])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Instructions or a matrix unit that multiply; this machine's best where it lacks them."""
    # On a CPU with AMX that the kernels may not use, tiles would be left to oneDNN.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    extension, before = native.extension(), native.matrix_unit()
    best = extension.instruction_set()
    name = request.param if request.param in extension.instruction_sets() else best
    assert native.use_matrix_unit(request.param if request.param in UNITS else "none")
    assert extension.use(name)
    yield request.param if request.param in UNITS else name
    assert extension.use(best)
    assert native.use_matrix_unit(before)


def coded_and_plain(form: str, rows: int, columns: int) -> tuple[CodedTiles, TiledWeight]:
    codes = codes_of(form, rows, columns)
    plain = tiled(codes.dense().to(torch.bfloat16), apart=True)
    assert plain is not None
    return tiles_of(codes), plain


@pytest.mark.parametrize("form", FORMS)
def test_products_have_the_bits_of_the_widened_weights(form: str, by: str) -> None:
    """But of codes in words by vectors of pairs: these have four sums for each row of W."""
    for rows_out, columns in SIZES:
        coded, plain = coded_and_plain(form, rows_out, columns)
        bias, same = noise(5, rows_out), not (coded.in_words and PAIRS and by not in UNITS)
        for rows in ROWS:
            x = noise(rows, rows, columns + 6, dtype=torch.bfloat16)[:, 6:]
            product, truth = weight_product(x, coded, bias), weight_product(x, plain, bias)
            assert torch.equal(product, truth) or not same, (form, rows)
            # A bit of the last place, and what sums in float32 may differ by.
            sizes = x.float().abs() @ plain.dense().float().abs().T
            room = 2.0**-7 * truth.float().abs() + 2.0**-20 * sizes
            assert bool(((product.float() - truth.float()).abs() <= room).all()), (form, rows)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_batch(form: str, by: str) -> None:
    for rows_out, columns in SIZES:
        coded, _ = coded_and_plain(form, rows_out, columns)
        x = noise(3, max(ROWS), columns, dtype=torch.bfloat16)
        each = torch.cat([weight_product(row, coded, None) for row in x.split(1)])
        for rows in ROWS:
            assert torch.equal(weight_product(x[:rows], coded, None), each[:rows]), (form, rows)


@pytest.mark.parametrize("rows", [1, 3, 256])
@pytest.mark.parametrize("form", FORMS)
def test_each_weight_of_a_product_has_the_bits_of_the_library(form: str, rows: int, by: str) -> None:
    """Rows of x with one column each give the columns of W."""
    coded, plain = coded_and_plain(form, 130, 256)
    ones = torch.eye(256, dtype=torch.bfloat16)
    columns = torch.cat([weight_product(part, coded, None) for part in ones.split(rows)])
    assert torch.equal(columns, weight_product(ones, plain, None))
    if "small" not in form:  # products of denormals are zeros
        assert torch.equal(columns.T, coded.dense())


def test_a_product_by_another_scale_would_be_seen() -> None:
    codes = codes_of("fp8 groups", 130, 256)
    codes.scales[129, 3] *= 1.01
    x = noise(1, 1, 256, dtype=torch.bfloat16)
    before = tiles_of(codes_of("fp8 groups", 130, 256))
    assert not torch.equal(weight_product(x, tiles_of(codes), None), weight_product(x, before, None))


@pytest.mark.parametrize("form", [form for form in FORMS if form in ("fp8 blocks", "fp8 rows", "nf4")])
def test_scales_of_rows_in_place_of_those_of_tiles_change_no_weight(form: str) -> None:
    """Experts of a layer have one form."""
    mixed = [tiles_of(codes_of(one, 64, 256)) for one in (form, "fp8 rows" if "fp8" in form else "nf4")]
    if form == "nf4":
        mixed[0] = tiles_of(replace(codes_of(form, 64, 256), scales=torch.ones(64, 4)))
        assert mixed[0].scales.shape[2] == 1
    mixed[1] = replace(mixed[1], group=mixed[0].group)
    stack = CodedTiles.stack(mixed)
    assert {one.scales.shape[2] for one in stack.experts} == {16}
    assert torch.equal(stack.experts[0].dense(), mixed[0].dense())
    x = noise(7, 2, 256, dtype=torch.bfloat16)
    once = weight_product(x, stack.experts[0], None)
    assert torch.allclose(once.float(), x.float() @ mixed[0].dense().float().T, rtol=0.02, atol=0.02)


def test_codes_take_the_bytes_of_their_files() -> None:
    numbers = 512 * 1024
    bits = {form: 8 * tiles_of(codes_of(form, 512, 1024)).nbytes / numbers for form in FORMS}
    assert bits["fp8 blocks"] == pytest.approx(8 + 32 / 128 / 16)
    assert bits["mxfp8"] == 8.25
    assert bits["nf4"] == bits["fp4"] == 4.5
    assert bits["fp8 rows"] < 8.04


def test_what_no_kernel_serves_is_left_to_be_widened() -> None:
    assert coded_tiles(codes_of("nf4", 16, 68)) is None
    codes = codes_of("fp8 rows", 16, 64)
    codes.scales[3] = 101
    assert coded_tiles(codes) is None, "the kernel multiplies scales by 2^120"
    assert native.in_use()


@pytest.mark.parametrize("form", [form for form in FORMS if form in ("fp8 rows", "mxfp8")])
def test_a_scale_or_a_code_that_is_no_number_is_left_to_be_widened(form: str) -> None:
    """A checkpoint has one with ``debug.allow_nonfinite`` alone. The kernels would make 480 of the code."""
    codes = codes_of(form, 40, 64)
    assert coded_tiles(codes) is not None
    spoilt = codes.codes.clone()
    spoilt[3, 5] = 255
    assert coded_tiles(replace(codes, codes=spoilt)) is None
    scales = codes.scales.clone()
    scales.view(torch.uint8)[7] = 255  # NaN of float32, and of e8m0
    assert coded_tiles(replace(codes, scales=scales)) is None
    assert replace(codes, scales=scales).dense()[7].isnan().any()
