"""Small kernels that share a launch: the same bits as in launches of their own, and fewer launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.steps import on_device, strided_on
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, tokens_in
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.feed_forward import Experts
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.blocks.linear import Linear
from weft.tensor import gpu
from weft.tensor.gpu import launch as launches
from weft.tensor.inputs import Runs
from weft.tensor.kernels import causal_conv, conv_and_gates, delta_gates
from weft.tensor.kernels import moe as experts
from weft.tensor.ops.moe import SharedOutput, moe
from weft.tensor.ops.recurrent_layers import GatedDeltaWeights
from weft.tensor.ops.recurrent_layers import conv_and_gates as convolved_and_gated
from weft.tensor.replay_log import ReplayLog
from weft.units import PAD

HEADS, CHANNELS = 6, 300
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that are launched."""
    names: list[str] = []

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        names.append(kernel.fn.__name__)
        return launches.launch(kernel, grid)

    with monkeypatch.context() as patch:
        for module in (causal_conv, conv_and_gates, delta_gates, experts):
            patch.setattr(module, "launch", launch)
        yield names


def net(dtype: torch.dtype, device: torch.device) -> GatedDeltaWeights:
    return GatedDeltaWeights(
        conv_CK=noise(CHANNELS, 4, seed=1).to(device, dtype),
        decay_H=-noise(HEADS, seed=2).exp().to(device),
        dt_bias_H=noise(HEADS, seed=3).to(device),
        norm_V=torch.ones(1),
        norm_eps=1e-6,
        shape=GatedDelta(1, HEADS, 24, 42, 4, 2.0),
    )


def layer(runs: Runs, dtype: torch.dtype, device: torch.device, *, joined: bool) -> list[torch.Tensor]:
    """Outputs, g, beta and windows; every input is a part of wider rows."""
    wide = (noise(tokens_in(runs), CHANNELS + 2 * HEADS + 7, seed=4) * 3).to(device, dtype)
    qkv, b, a = torch.split(wide[:, 3:-4], [CHANNELS, HEADS, HEADS], dim=-1)
    held = strided_on(noise(9, 2, CHANNELS, 3, seed=5).to(dtype)[:, 1], device)
    held[[0, 2, 8]] = float("nan")
    gpu.choose("triton", joined=joined)
    made = convolved_and_gated(qkv, a, b, net(dtype, device), held, on_device(runs, device))
    return [x.cpu().clone() for x in (*made, held)]


@DTYPES
def test_a_step_of_decodes_convolves_and_gates_in_one_launch_with_the_bits_of_two(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = make_runs([Run(7, slot=3), PAD_ROW, Run(0, slot=8, fresh=True), Run(90, slot=1)], [])
    with noted(monkeypatch) as alone:
        want = layer(runs, dtype, device, joined=False)
    with noted(monkeypatch) as joined:
        got = layer(runs, dtype, device, joined=True)
    assert (alone, joined) == (["_rows", "_gates"], ["_rows_and_gates"])
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine.nan_to_num(99.0), other.nan_to_num(99.0))
    assert got[0].isfinite().all()
    untouched = noise(9, 2, CHANNELS, 3, seed=5).to(dtype)[:, 1]
    assert torch.equal(got[3][4:8], untouched[4:8])
    assert not torch.equal(got[3][3], untouched[3]), "the control: a window moves on"
    assert got[1].std(0).min() > 0, "the control: each token has gates of its own"


def test_a_step_with_a_prompt_or_with_a_log_has_separate_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a prompt need launches of their own, and the log of a step wants the convolution's input."""
    mixed = make_runs([Run(7, slot=3)], [Run(0, 5, slot=1, fresh=True)])
    logged = replace(make_runs([Run(7, slot=3), Run(9, slot=1)], []), log=ReplayLog(2, 0))
    for runs, names in ((mixed, ["_tokens", "_rows", "_gates"]), (logged, ["_rows", "_gates"])):
        with noted(monkeypatch) as launched:
            layer(runs, torch.float32, device, joined=True)
        assert launched == names


@DTYPES
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_the_shared_expert_is_added_in_the_launch_that_sums_the_choices(
    gated: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, width = 5, 600  # more than a block of columns
    x, up, down = (
        (noise(*shape, seed=seed) * scale).to(device, dtype)
        for seed, (shape, scale) in enumerate((((tokens, width), 1.0), ((3, 32, width), 0.2), ((3, width, 16), 0.2)))
    )
    ids = torch.tensor([[0, 2], [PAD, 1], [2, PAD], [PAD, PAD], [1, 2]], device=device)
    weights = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(6)).to(device, dtype)
    wide = noise(tokens, width + 5, seed=7).to(device, dtype)
    shared = SharedOutput(wide[:, 2 : 2 + width], wide[:, -1:] if gated else None)
    with noted(monkeypatch) as launched:
        got = moe(x, ids, weights, up, down, shared=shared)
    assert launched.count("_combine") == 1
    assert "_add_gated" not in launched
    routed = moe(x, ids, weights, up, down)
    want = shared.added_to(routed)
    if gated or not gpu.INTERPRETED:
        assert torch.equal(got, want)
    else:  # torch adds, and rounds to bfloat16 where the interpreter truncates
        torch.testing.assert_close(got, want, **close(dtype))
    assert torch.equal(got[3], want[3]) or not gated, "a token of PAD choices"
    assert (got - routed).abs().max() > 0.1, "the control: something is added"
    other = replace(shared, gate_T1=shared.gate_T1.flip(0) if shared.gate_T1 is not None else wide[:, :1])
    assert not torch.equal(moe(x, ids, weights, up, down, shared=other), got), "the control: through the token's gate"


class OfAdapter:
    """Experts of an adapter, which row 1 has: those of the base model, four times as large."""

    def of_step(self, rows: int) -> list[Any]:
        return [(SimpleNamespace(rows=torch.tensor([1])), self)]

    def product(self, role: str, number: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * 2


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapted"])
def test_a_block_of_experts_has_the_same_answer_joined_and_separate(adapted: bool) -> None:
    """An adapter's rows are computed after the sum, so the shared expert is added after them."""
    x, shared, gate = noise(3, 40, seed=1), noise(40, 40, seed=2), noise(1, 40, seed=3)
    block = ExpertsBlock(
        Experts(count=3, per_token=2, width=16, normalized=True),
        Linear(noise(3, 40, seed=4)),
        noise(3, 32, 40, seed=5) * 0.2,
        noise(3, 40, 16, seed=6) * 0.2,
        shared=Linear(shared),
        shared_gate=Linear(gate),
    )
    block.adapted = OfAdapter() if adapted else None  # type: ignore[assignment]
    answers = []
    for joined in (False, True):
        gpu.choose("triton", joined=joined)
        answers.append(block(x))
    torch.testing.assert_close(*answers, **close(torch.float32))
    block.adapted = None
    assert torch.equal(block(x)[1], answers[1][1]) is not adapted, "the control: the adapter changes row 1"
    block.shared = None
    assert (block(x) - answers[1]).abs().min(1).values.max() > 0, "the control: the shared expert is in every row"
