"""Ops without a state: norms, rotary, mixture of experts."""

from __future__ import annotations

import pytest
import torch

from tests.support.naive_ops import moe as naive_moe
from tests.support.naive_ops import rms_norm as naive_rms_norm
from tests.support.naive_ops import rotary as naive_rotary
from weft.tensor.ops.elementwise import rotary
from weft.tensor.ops.moe import moe
from weft.tensor.ops.norm import rms_norm
from weft.units import PAD

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gate_first", [None, False, True])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("group_size", [None, 8, 32])
def test_every_kind_of_norm_equals_its_formula(gate_first: bool | None, plus_one: bool, group_size: int | None) -> None:
    x, weight = noise(5, 3, 32), noise(32, seed=1)
    options = {
        "plus_one": plus_one,
        "group_size": group_size,
        "gate_first": bool(gate_first),
        "gate": None if gate_first is None else noise(5, 3, 32, seed=2),
    }
    want = naive_rms_norm(x, weight, 1e-6, **options)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, **options), want, **CLOSE)


def test_a_norm_takes_strided_and_half_precision_input_and_leaves_it_alone() -> None:
    wide = noise(6, 100)
    x = wide[:, 10:42]
    before = wide.clone()
    weight, gate = noise(32, seed=1), wide[:, :32]
    want = naive_rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), want, **CLOSE)
    for options in ({"plus_one": True}, {"gate": gate}, {"gate": gate, "gate_first": True}):
        rms_norm(x, weight, 1e-6, **options)
    assert torch.equal(wide, before)
    half = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rotary_dim", [4, 16])
def test_rotary_turns_the_first_dims_and_passes_the_rest(rotary_dim: int) -> None:
    q, k = noise(7, 4, 16), noise(7, 2, 16, seed=1)
    angles = noise(7, rotary_dim // 2, seed=2).repeat(1, 2)
    got_q, got_k = rotary(q, k, angles.cos(), angles.sin())
    want_q, want_k = naive_rotary(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(got_q, want_q, **CLOSE)
    torch.testing.assert_close(got_k, want_k, **CLOSE)
    assert torch.equal(got_q[..., rotary_dim:], q[..., rotary_dim:])
    assert not torch.equal(got_q[..., :rotary_dim], q[..., :rotary_dim])


def test_each_token_goes_through_the_experts_it_chose() -> None:
    x, gate_up, down = noise(9, 6), noise(5, 8, 6, seed=1), noise(5, 6, 4, seed=2)
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(t))[:3] for t in range(9)])
    weights = noise(9, 3, seed=3).softmax(-1)
    ids[4, 1] = PAD
    ids[5] = PAD
    got = moe(x, ids, weights, gate_up, down)
    torch.testing.assert_close(got, naive_moe(x, ids, weights, gate_up, down), **CLOSE)
    assert (got[5] == 0).all()
    torch.testing.assert_close(moe(x[2:3], ids[2:3], weights[2:3], gate_up, down), got[2:3], **CLOSE)


@pytest.mark.parametrize(("activation", "gated"), [("relu2", False), ("gelu", True), ("silu", False)])
def test_experts_of_every_form_equal_their_formula(activation: str, gated: bool) -> None:
    x, up, down = noise(9, 6), noise(5, 8 if gated else 4, 6, seed=1), noise(5, 6, 4, seed=2)
    ids = torch.randint(0, 5, (9, 2), generator=torch.Generator().manual_seed(3))
    weights = noise(9, 2, seed=3)
    options = {"activation": activation, "gated": gated}
    got = moe(x, ids, weights, up, down, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(got, naive_moe(x, ids, weights, up, down, **options), **CLOSE)  # type: ignore


def test_an_expert_that_nobody_chose_is_not_computed() -> None:
    x, gate_up, down = noise(4, 6), noise(3, 8, 6, seed=1), noise(3, 6, 4, seed=2)
    gate_up[1] = float("nan")
    ids, weights = torch.tensor([[0, 2]] * 4), torch.full((4, 2), 0.5)
    assert moe(x, ids, weights, gate_up, down).isfinite().all()
    ids[3, 1] = 1  # the control
    assert moe(x, ids, weights, gate_up, down).isnan().any(dim=1).tolist() == [False, False, False, True]
