"""The three ops with a state behind one call, so that the promises they share are tested by one text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv import causal_conv
from weft.tensor.ops.causal_conv.naive import causal_conv as naive_causal_conv
from weft.tensor.ops.gated_delta import gated_delta
from weft.tensor.ops.gated_delta.naive import gated_delta as naive_gated_delta
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.mamba2.naive import mamba2 as naive_mamba2

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
    return {"q": torch.randn(tokens, 2, 8, generator=noise), "k": torch.randn(tokens, 2, 8, generator=noise),
            "v": torch.randn(tokens, 4, 12, generator=noise),
            "g": -torch.rand(tokens, 4, generator=noise).square() * 2,
            "beta": torch.rand(tokens, 4, generator=noise)}


def _delta(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = gated_delta if which == "cpu" else naive_gated_delta
    return op(x["q"], x["k"], x["v"], x["g"], x["beta"], state, runs, scale=8**-0.5)


def _mamba_inputs(tokens: int, seed: int) -> Inputs:
    noise = _generator(seed)
    return {"x": torch.randn(tokens, 4, 6, generator=noise), "dt": torch.randn(tokens, 4, generator=noise),
            "b": torch.randn(tokens, 2, 10, generator=noise) * 0.5,
            "c": torch.randn(tokens, 2, 10, generator=noise) * 0.5}


def _mamba(which: str, x: Inputs, state: torch.Tensor, runs: Runs) -> torch.Tensor:
    op: Any = mamba2 if which == "cpu" else naive_mamba2
    return op(x["x"], x["dt"], torch.tensor([-0.1, -0.7, -2.0, -9.0]), x["b"], x["c"],
              torch.tensor([1.0, 0.5, -0.3, 2.0]), torch.tensor([0.1, -1.0, 0.0, 0.5]), state, runs,
              dt_limit=(0.001, 3.0))


RECURRENT_OPS = [
    RecurrentOp("causal_conv", (6, 3), _conv_inputs, _conv),
    RecurrentOp("gated_delta", (4, 8, 12), _delta_inputs, _delta),
    RecurrentOp("mamba2", (4, 6, 10), _mamba_inputs, _mamba),
]
