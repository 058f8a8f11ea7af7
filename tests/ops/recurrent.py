"""The ops with a state behind one call, so that the promises they share are tested by one text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.naive_ops import causal_conv as naive_causal_conv
from tests.support.naive_ops import delta_rule as naive_delta_rule
from tests.support.naive_ops import gated_sums as naive_gated_sums
from tests.support.naive_ops import mamba1 as naive_mamba1
from tests.support.naive_ops import mamba2 as naive_mamba2
from tests.support.naive_ops import running_max as naive_running_max
from tests.support.naive_ops import window_attention as naive_window_attention
from tests.support.naive_ops import wkv7 as naive_wkv7
from weft.tensor.inputs import Runs
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.delta_rule import delta_rule
from weft.tensor.ops.entries import gated_sums
from weft.tensor.ops.mamba1 import mamba1
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.running_max import running_max
from weft.tensor.ops.window_attention import window_attention
from weft.tensor.ops.wkv7 import wkv7

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RecurrentOp:
    """``inputs(T, seed)``: per-token tensors; ``call(which, inputs, state, runs)`` with which "cpu" or
    "naive"; ``part``: shape of one slot's state."""

    name: str
    part: tuple[int, ...]
    inputs: Callable[[int, int], Inputs]
    call: Callable[[str, Inputs, torch.Tensor, Runs], torch.Tensor]

    def states(self, slots: int, seed: int = 7) -> torch.Tensor:
        noise = torch.Generator().manual_seed(seed)
        # A stride larger than the part, as in the arena.
        wide = torch.randn(slots, 3, *self.part, generator=noise) * 0.5
        return wide[:, 1]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _conv_inputs(tokens: int, seed: int) -> Inputs:
    return {"x": torch.randn(tokens, 6, generator=_generator(seed))}


def _conv(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    weights = _generator(1)
    weight, bias = torch.randn(6, 4, generator=weights), torch.randn(6, generator=weights)
    op: Any = causal_conv if which == "cpu" else naive_causal_conv
    return op(x["x"], weight, bias, "silu", state, runs)


def _delta_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {
        "q": torch.randn(tokens, 2, 8, generator=noise),
        "k": torch.randn(tokens, 2, 8, generator=noise),
        "v": torch.randn(tokens, 4, 12, generator=noise),
        "g": -torch.rand(tokens, 4, generator=noise).square() * 2,
        "beta": torch.rand(tokens, 4, generator=noise),
    }


def _delta(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = delta_rule if which == "cpu" else naive_delta_rule
    return op(x["q"], x["k"], x["v"], x["g"], x["beta"], state, runs, scale=8**-0.5)


def _mamba_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {
        "x": torch.randn(tokens, 4, 6, generator=noise),
        "dt": torch.randn(tokens, 4, generator=noise),
        "b": torch.randn(tokens, 2, 10, generator=noise) * 0.5,
        "c": torch.randn(tokens, 2, 10, generator=noise) * 0.5,
    }


def _mamba(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = mamba2 if which == "cpu" else naive_mamba2
    return op(
        x["x"],
        x["dt"],
        torch.tensor([-0.1, -0.7, -2.0, -9.0]),
        x["b"],
        x["c"],
        torch.tensor([1.0, 0.5, -0.3, 2.0]),
        torch.tensor([0.1, -1.0, 0.0, 0.5]),
        state,
        runs,
        dt_limit=(0.001, 3.0),
    )


def _kimi_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {
        "q": torch.randn(tokens, 3, 8, generator=noise),
        "k": torch.randn(tokens, 3, 8, generator=noise),
        "v": torch.randn(tokens, 3, 12, generator=noise),
        "g": -torch.rand(tokens, 3, 8, generator=noise).square() * 2,
        "beta": torch.rand(tokens, 3, generator=noise),
    }


def _kimi(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = delta_rule if which == "cpu" else naive_delta_rule
    return op(x["q"], x["k"], x["v"], x["g"], x["beta"], state, runs, scale=8**-0.5)


def wkv7_inputs(heads: int, k_dim: int, v_dim: int) -> Callable[[int, int], Inputs]:
    """``kk`` of length 1, and rates below 1: what RWKV-7 gives."""

    def made(tokens: int, seed: int) -> Inputs:
        noise = _generator(seed)
        r, k, kk, g, rate = (torch.randn(tokens, heads, k_dim, generator=noise) for _ in range(5))
        kk = torch.nn.functional.normalize(kk, dim=-1)
        return {
            "r": r * k_dim**-0.5,
            "g": -0.6 * g.sigmoid(),
            "k": k * 0.5,
            "v": torch.randn(tokens, heads, v_dim, generator=noise),
            "kk": kk,
            "b": kk * rate.sigmoid(),
        }

    return made


def _wkv7(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = wkv7 if which == "cpu" else naive_wkv7
    return op(x["r"], x["g"], x["k"], x["v"], x["kk"], x["b"], state, runs)


def _window_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {
        "q": torch.randn(tokens, 4, 8, generator=noise),
        "k": torch.randn(tokens, 2, 8, generator=noise),
        "v": torch.randn(tokens, 2, 8, generator=noise),
    }


def _biased_inputs(tokens: int, seed: int) -> Inputs:
    states = torch.randn(tokens, 4, 3, generator=_generator(seed + 1))
    plain = _window_inputs(tokens, seed)
    return plain | {"q": torch.cat((plain["q"], states), -1), "sinks": states[..., 0] + 1.0}


def _window(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = window_attention if which == "cpu" else naive_window_attention
    if x["q"].shape[2] > 8:  # states of a bias that ends inside the window
        bank = torch.randn(3, 17, generator=_generator(2))
        return op(x["q"], x["k"], x["v"], state, runs, 8**-0.5, x["sinks"], bank)
    return op(x["q"], x["k"], x["v"], state, runs, 8**-0.5)


def _mamba1_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {
        "x": torch.randn(tokens, 5, generator=noise),
        "dt": torch.randn(tokens, 5, generator=noise),
        "b": torch.randn(tokens, 4, generator=noise) * 0.5,
        "c": torch.randn(tokens, 4, generator=noise) * 0.5,
    }


def _mamba1(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = mamba1 if which == "cpu" else naive_mamba1
    rates = -torch.logspace(-2, 1, 20).view(5, 4)
    return op(
        x["x"],
        x["dt"],
        rates,
        x["b"],
        x["c"],
        torch.tensor([1.0, 0.5, -0.3, 2.0, 0.1]),
        torch.tensor([0.1, -1.0, 0.0, 0.5, -2.0]),
        state,
        runs,
    )


def _max_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {"log_decay": -torch.rand(tokens, 5, generator=noise).square(), "x": torch.randn(tokens, 5, generator=noise)}


def _max(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = running_max if which == "cpu" else naive_running_max
    return op(x["log_decay"], x["x"], state, runs)


def _sums_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {"value": torch.randn(tokens, 2, 5, generator=noise), "gate": 3 * torch.randn(tokens, 2, 5, generator=noise)}


def _sums(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = gated_sums if which == "cpu" else naive_gated_sums
    return op(x["value"], x["gate"], state, runs, 10)


RECURRENT_OPS = [
    RecurrentOp("causal_conv", (6, 3), _conv_inputs, _conv),
    RecurrentOp("gated_delta", (4, 8, 12), _delta_inputs, _delta),
    RecurrentOp("mamba1", (5, 4), _mamba1_inputs, _mamba1),
    RecurrentOp("kimi_delta", (3, 8, 12), _kimi_inputs, _kimi),
    RecurrentOp("mamba2", (4, 6, 10), _mamba_inputs, _mamba),
    RecurrentOp("running_max", (1, 5), _max_inputs, _max),
    RecurrentOp("gated_sums", (6, 5), _sums_inputs, _sums),
    RecurrentOp("wkv7", (3, 8, 12), wkv7_inputs(3, 8, 12), _wkv7),
    RecurrentOp("window_attention", (2, 2, 24, 8), _window_inputs, _window),
    RecurrentOp("window_attention_wide", (2, 2, 100, 8), _window_inputs, _window),
    RecurrentOp("window_attention_biased", (2, 2, 24, 8), _biased_inputs, _window),
]
