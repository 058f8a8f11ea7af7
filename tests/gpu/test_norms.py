"""rms_norm, add_norm, silu_mul and rotary in Triton, each against its twin."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.tolerances import close
from tests.support.naive_ops import rms_norm as naive_rms_norm
from tests.support.naive_ops import rotary as naive_rotary
from tests.support.naive_ops import silu_mul as naive_silu_mul
from weft.tensor.kernels import norm as norm_kernel
from weft.tensor.ops.elementwise import rotary, silu_mul, sum_in_order
from weft.tensor.ops.norm import add_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
LINEAR = {"plus_one": False, "gate": None, "gate_first": False, "group_size": None}


def noise(
    *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@each_dtype
@pytest.mark.parametrize("kind", ["plain", "plus one", "gated", "gate first in groups"])
def test_a_norm_of_strided_rows_equals_its_formula(dtype: torch.dtype, kind: str, device: torch.device) -> None:
    wide = noise(5, 3, 200, dtype=dtype, device=device) * 3
    x, gate = wide[:, :, 20:116], noise(5, 3, 96, seed=5, dtype=dtype, device=device)
    weight = noise(96, seed=4, dtype=dtype, device=device)
    options = (
        LINEAR
        | {
            "plain": {},
            "plus one": {"plus_one": True},
            "gated": {"gate": gate},
            "gate first in groups": {"gate": gate, "gate_first": True, "group_size": 24},
        }[kind]
    )
    got = rms_norm(x, weight, 1e-6, **options)
    want = naive_rms_norm(x, weight, 1e-6, **options)
    torch.testing.assert_close(got, want, **close(dtype))
    if kind != "plain":  # the control: what is asked for is not ignored
        assert (got.float() - naive_rms_norm(x, weight, 1e-6, **LINEAR).float()).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(1, 5000), (37, 24), (2, 8, 3, 32)])
def test_norms_of_any_number_of_rows_of_any_width(shape: tuple[int, ...], device: torch.device) -> None:
    x, weight = noise(*shape, device=device), noise(shape[-1], seed=4, device=device)
    got = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, naive_rms_norm(x, weight, 1e-5), **close(torch.float32))
    assert rms_norm(x[:0], weight, 1e-5).shape == (0, *shape[1:])


def test_a_norm_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    x, weight = noise(40, 48, device=device), noise(48, seed=4, device=device)
    whole = rms_norm(x, weight, 1e-5)
    assert norm_kernel.sizes(48)[0] < 40, "rows of several programs"
    for first, last in ((4, 5), (3, 9), (17, 40)):  # at other places of a program too
        assert torch.equal(rms_norm(x[first:last], weight, 1e-5), whole[first:last])
    x[4] = float("nan")  # the control: NaN does show, in its row alone
    hurt = rms_norm(x, weight, 1e-5)
    assert hurt[4].isnan().all()
    others = torch.arange(40) != 4
    assert torch.equal(hurt[others], whole[others])


@each_dtype
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_sum_takes_the_place_of_what_is_added_and_comes_back_normed(
    dtype: torch.dtype, scale: float, device: torch.device
) -> None:
    x, y = (noise(3, 80, seed=seed, dtype=dtype, device=device) for seed in (3, 4))
    weight, before = noise(80, seed=5, dtype=dtype, device=device), x.clone()
    want_sum = x.double() + scale * y.double()
    got_sum, got = add_norm(x, y, weight, 1e-6, scale=scale, plus_one=True)
    assert got_sum is y
    assert torch.equal(x, before)
    rounded_twice = close(dtype) | {"atol": 2.0**-6 if dtype == torch.bfloat16 else 1e-3}
    torch.testing.assert_close(got_sum, want_sum.to(dtype), **rounded_twice)
    torch.testing.assert_close(got, naive_rms_norm(got_sum, weight, 1e-6, plus_one=True), **close(dtype))


@each_dtype
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_are_added_in_float32_in_their_order(dtype: torch.dtype, parts: int, device: torch.device) -> None:
    x = noise(parts, 3, 700, dtype=dtype, device=device)
    x[0, 0, 0], x[1:, 0, 0] = 2.0**13, 2.0**-12  # float32 drops each of them, and would not drop their sum
    expected = x[0].float()
    for part in x[1:]:
        expected = expected + part.float()
    torch.testing.assert_close(sum_in_order(x), expected.to(dtype), **close(dtype))
    assert dtype == torch.bfloat16 or torch.equal(sum_in_order(x), expected.to(dtype)), "to the bit"
    assert torch.equal(sum_in_order.torch(x), expected.to(dtype))


@each_dtype
@pytest.mark.parametrize("width", [40, 1500])
def test_the_gated_activation_equals_its_formula(dtype: torch.dtype, width: int, device: torch.device) -> None:
    x = noise(3, 2 * width + 10, dtype=dtype, device=device)[:, 10:]
    # silu is rounded before the product, as the promise has it: once more than the twin.
    twice = {"rtol": 2 * close(dtype)["rtol"], "atol": close(dtype)["atol"]}
    torch.testing.assert_close(silu_mul(x), naive_silu_mul(x), **twice)
    gate, up = x.chunk(2, dim=-1)
    limited = torch.cat([gate.clamp(max=0.5), up.clamp(-0.5, 0.5)], -1)
    torch.testing.assert_close(silu_mul(x, 0.5), naive_silu_mul(limited), **twice)


@each_dtype
@pytest.mark.parametrize("turning", [8, 24, 40])
def test_the_first_dims_are_turned_and_the_rest_pass(dtype: torch.dtype, turning: int, device: torch.device) -> None:
    made = noise(19, 6 * 40, dtype=dtype, device=device)
    q, k = made[:, :160].view(19, 4, 40), made[:, 160:].view(19, 2, 40)
    angles = noise(19, turning // 2, seed=4, device=device).repeat(1, 2) * 3
    got = rotary(q, k, angles.cos(), angles.sin())
    for mine, twin in zip(got, naive_rotary(q, k, angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(mine, twin, **close(dtype))
    assert torch.equal(got[0][:, :, turning:], q[:, :, turning:])
    assert (got[0][:, :, :turning] - q[:, :, :turning]).abs().max() > 0.1  # the control: something is turned
