"""The recurrent ops at sizes that the interpreter can bear, behind one call: one text tests them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.steps import on_device, strided_on
from tests.ops.recurrent import Inputs, wkv7_inputs
from tests.support.naive_ops import delta_rule as naive_delta_rule
from tests.support.naive_ops import mamba1 as naive_mamba1
from tests.support.naive_ops import mamba2 as naive_mamba2
from tests.support.naive_ops import running_max as naive_running_max
from tests.support.naive_ops import wkv7 as naive_wkv7
from weft.tensor.inputs import Runs
from weft.tensor.ops.delta_rule import delta_rule
from weft.tensor.ops.mamba1 import mamba1
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.running_max import running_max
from weft.tensor.ops.wkv7 import wkv7


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """``call(op, inputs, state, runs, layer)`` with ``op`` the one that picks a kernel, or its twin."""

    name: str
    part: tuple[int, ...]
    inputs: Callable[[int, int], Inputs]
    call: Callable[[Any, Inputs, torch.Tensor, Runs, int], torch.Tensor]
    op: Any
    twin: Any

    def states(self, slots: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Slots with gaps between them, as in the arena."""
        wide = torch.randn(slots, 3, *self.part, generator=torch.Generator().manual_seed(7)) * 0.5
        return wide.to(dtype)[:, 1]

    def run(
        self, inputs: Inputs, states: torch.Tensor, runs: Runs, device: torch.device, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of the kernels, on the CPU; ``states`` itself is left alone."""
        held = strided_on(states, device)
        made = self.call(
            self.op, {name: x.to(device) for name, x in inputs.items()}, held, on_device(runs, device), layer
        )
        return made.cpu(), held.cpu()

    def run_twin(
        self, inputs: Inputs, states: torch.Tensor, runs: Runs, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = states.clone()
        return self.call(self.twin, inputs, held, runs, layer), held


def _noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _delta_inputs(tokens: int, seed: int) -> Inputs:
    noise = _noise(seed)
    return {
        "q": torch.randn(tokens, 1, 24, generator=noise),
        "k": torch.randn(tokens, 1, 24, generator=noise),
        "v": torch.randn(tokens, 2, 40, generator=noise),
        "g": -torch.rand(tokens, 2, generator=noise).square() * 2,
        "beta": torch.rand(tokens, 2, generator=noise),
    }


def _kimi_inputs(tokens: int, seed: int) -> Inputs:
    noise = _noise(seed)
    return {
        "q": torch.randn(tokens, 1, 24, generator=noise),
        "k": torch.randn(tokens, 1, 24, generator=noise),
        "v": torch.randn(tokens, 1, 20, generator=noise),
        "g": -torch.rand(tokens, 1, 24, generator=noise).square() * 2,
        "beta": torch.rand(tokens, 1, generator=noise),
    }


def _delta(op: Any, x: Inputs, state: torch.Tensor, runs: Runs, layer: int) -> torch.Tensor:
    return op(x["q"], x["k"], x["v"], x["g"], x["beta"], state, runs, scale=24**-0.5, layer=layer)


def _mamba2_inputs(head_dim: int, width: int) -> Callable[[int, int], Inputs]:
    def made(tokens: int, seed: int) -> Inputs:
        noise = _noise(seed)
        return {
            "x": torch.randn(tokens, 2, head_dim, generator=noise),
            "dt": torch.randn(tokens, 2, generator=noise),
            "b": torch.randn(tokens, 1, width, generator=noise) * 0.5,
            "c": torch.randn(tokens, 1, width, generator=noise) * 0.5,
        }

    return made


def _mamba2(op: Any, x: Inputs, state: torch.Tensor, runs: Runs, layer: int) -> torch.Tensor:
    a, d, bias = (torch.tensor(row, device=state.device) for row in ([-0.1, -9.0], [1.0, -0.3], [0.1, -1.0]))
    return op(x["x"], x["dt"], a, x["b"], x["c"], d, bias, state, runs, dt_limit=(0.001, 3.0), layer=layer)


def _mamba1_inputs(channels: int) -> Callable[[int, int], Inputs]:
    def made(tokens: int, seed: int) -> Inputs:
        noise = _noise(seed)
        return {
            "x": torch.randn(tokens, channels, generator=noise),
            "dt": torch.randn(tokens, channels, generator=noise) - 4,
            "b": torch.randn(tokens, 6, generator=noise) * 0.5,
            "c": torch.randn(tokens, 6, generator=noise) * 0.5,
        }

    return made


def _mamba1(op: Any, x: Inputs, state: torch.Tensor, runs: Runs, layer: int) -> torch.Tensor:
    channels = x["x"].shape[1]
    rates = -torch.logspace(-2, 1, channels * 6, device=state.device).view(channels, 6)
    line = torch.linspace(-1, 1, channels, device=state.device)
    return op(x["x"], x["dt"], rates, x["b"], x["c"], line, line.flip(0), state, runs, layer=layer)


def _max_inputs(tokens: int, seed: int) -> Inputs:
    noise = _noise(seed)
    return {
        "log_decay": -torch.rand(tokens, 20, generator=noise).square(),
        "x": torch.randn(tokens, 20, generator=noise),
    }


def _max(op: Any, x: Inputs, state: torch.Tensor, runs: Runs, layer: int) -> torch.Tensor:
    return op(x["log_decay"], x["x"], state, runs, layer=layer)


def _wkv7(op: Any, x: Inputs, state: torch.Tensor, runs: Runs, layer: int) -> torch.Tensor:
    return op(x["r"], x["g"], x["k"], x["v"], x["kk"], x["b"], state, runs, layer=layer)


RECURRENCES = [
    Recurrence("gated_delta", (2, 24, 40), _delta_inputs, _delta, delta_rule, naive_delta_rule),
    Recurrence("kimi_delta", (1, 24, 20), _kimi_inputs, _delta, delta_rule, naive_delta_rule),
    Recurrence("mamba1", (40, 6), _mamba1_inputs(40), _mamba1, mamba1, naive_mamba1),
    Recurrence("wkv7", (1, 24, 20), wkv7_inputs(1, 24, 20), _wkv7, wkv7, naive_wkv7),
    Recurrence("mamba2", (2, 40, 20), _mamba2_inputs(40, 20), _mamba2, mamba2, naive_mamba2),
    Recurrence("running_max", (1, 20), _max_inputs, _max, running_max, naive_running_max),
]

WIDE_MAMBA1 = Recurrence("mamba1 of two blocks", (70, 6), _mamba1_inputs(70), _mamba1, mamba1, naive_mamba1)

RELEASED_MAMBA2 = [
    Recurrence(
        f"mamba2 of {head_dim} x {width}",
        (2, head_dim, width),
        _mamba2_inputs(head_dim, width),
        _mamba2,
        mamba2,
        naive_mamba2,
    )
    for head_dim, width in ((16, 128), (32, 128), (64, 128), (64, 256))
]
"""Head dims of releases: a compiler makes other products of them."""
