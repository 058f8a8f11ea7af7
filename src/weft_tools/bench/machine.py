"""The machine's ceilings, compared with the figures of a complete model.

    memory read     a sum over a tensor far larger than any cache: bytes read per second
    arithmetic      square products by dtype: two operations per multiply-and-add, per second

    prefill         tokens x 2 x parameters / arithmetic
    decode          steps x max( bytes of the weights / memory read, rows x 2 x parameters / arithmetic )
    share           (prefill + decode at the ceilings) / measured seconds

The ceilings are measured in the same run, with the same threads. Parameters are those that a token passes.
Attention, states and sampling are left out of the least time: it is a bound. ``weft bench kernels`` compares
one kernel with ceilings of the same kind (``Ceiling``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.config import EngineConfig
from weft.families import read_architecture
from weft.info import ModelInfo
from weft.models.checkpoint_files import CheckpointFiles
from weft.planning.roofline import model_load
from weft.planning.weights import WeightForm, count_weights
from weft.tensor.ops.linear import weight_product
from weft.tensor.weights.tiles import tiled
from weft_tools.bench.diagnosis import LeastSeconds

READ_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
_TRIES = 7


@dataclass(frozen=True, slots=True)
class MachineCeilings:
    """Ceilings in bytes and operations per second; ``flops_per_s`` by dtype."""

    read_bytes_per_s: float
    flops_per_s: dict[str, float]

    def rate(self, dtype: str) -> float:
        """Return the rate of products in ``dtype``, or in bfloat16 where those were not measured."""
        return self.flops_per_s.get(dtype, self.flops_per_s["bfloat16"])

    def rows(self) -> dict[str, float]:
        """Return the rows of a table of figures."""
        return {
            "ceiling: memory read (GB/s)": self.read_bytes_per_s / 1e9,
            **{f"ceiling: {dtype} products (TFLOP/s)": rate / 1e12 for dtype, rate in self.flops_per_s.items()},
        }


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Work of a model on a machine: ``weight_bytes`` of a decode step, ``params`` of a token, and the dtype
    of its products."""

    weight_bytes: float
    params: float
    dtype: str

    def least(self, machine: MachineCeilings, *, prompt_tokens: int, steps: int, rows: float) -> LeastSeconds:
        """Return the least seconds for prompts of ``prompt_tokens`` in all, then ``steps`` decode steps of ``rows``
        sequences."""
        token_s = 2 * self.params / machine.rate(self.dtype)
        return LeastSeconds(
            prompt_tokens * token_s, steps * self.weight_bytes / machine.read_bytes_per_s, steps * rows * token_s
        )


def measure_machine(device: torch.device) -> MachineCeilings:
    """Measure the ceilings, in some seconds. Products in bytes only where torch has them."""
    numbers = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    read_s = _best_s(numbers.sum, device)
    del numbers
    rates = {"float32": _rate(torch.float32, device), "bfloat16": _rate(torch.bfloat16, device)}
    codes = [
        torch.ones(MATRIX_SIDE[device.type], MATRIX_SIDE[device.type], dtype=torch.int8, device=device)
        for _ in range(2)
    ]
    with suppress(RuntimeError):  # torch has no such product on some devices
        rates["int8"] = _flops(device) / _best_s(lambda: torch._int_mm(*codes), device)
    return MachineCeilings(READ_BYTES[device.type] / read_s, rates)


def demand_of(config: EngineConfig, info: ModelInfo) -> ModelDemand:
    """Return the work of the model that an engine of ``config`` serves."""
    checkpoint = CheckpointFiles.open(Path(info.directory))
    architecture = read_architecture(checkpoint.config)
    parameters = count_weights(architecture, architecture, 1, WeightForm(info.dtype, 16)).parameters
    load = model_load(
        architecture,
        parameters=parameters,
        weight_bytes=info.weights_bytes / parameters,
        eight_bit=False,
        kv_bytes=0.0,
        state_bytes=0.0,
    )
    in_bytes = config.quantize == "w8a8" or (config.quantize == "int8" and config.quantize_inputs)
    dtype = "int8" if in_bytes else "float32" if info.dtype == "float32" else "bfloat16"
    return ModelDemand(load.active_params * load.weight_bytes, load.active_params, dtype)


def share_rows(machine: MachineCeilings, least_s: float, seconds: float) -> dict[str, Any]:
    """Return the ceilings and the share of them that ``seconds`` reached, for a table of figures."""
    return {
        **machine.rows(),
        "least seconds at the ceilings": least_s,
        "share of the ceilings (%)": 100 * least_s / seconds,
    }


def _flops(device: torch.device) -> float:
    return float(2 * MATRIX_SIDE[device.type] ** 3)


def _rate(dtype: torch.dtype, device: torch.device) -> float:
    side = MATRIX_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best_s = _best_s(lambda: left @ right, device)
    tiles = tiled(right)
    if tiles is not None:
        best_s = min(best_s, _best_s(lambda: weight_product(left, tiles), device))
    return _flops(device) / best_s


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    call()
    return min(seconds_of(call, 1, device) for _ in range(_TRIES))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Ceiling of one kernel: bytes and floating-point operations per second."""

    copy_bytes_per_s: float
    matrix_flops_per_s: float

    def least_s(self, bytes_moved: int, flops: int) -> float:
        """Return the least time of this transfer and this arithmetic, each at its ceiling and both at once."""
        return max(bytes_moved / self.copy_bytes_per_s, flops / self.matrix_flops_per_s)


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Measure the ceiling, in a second or two."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device)
    side = MATRIX_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product_s = _best_s(lambda: left @ right, device)
    return Ceiling(2 * COPY_BYTES[device.type] / copy_s, _flops(device) / product_s)


def seconds_of(call: Callable[[], object], times: int, device: torch.device | None = None) -> float:
    """Return the mean seconds of ``times`` consecutive calls; on a GPU by the device's clock, launches included."""
    if device is not None and device.type == "cuda":
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        began.record()
        for _ in range(times):
            call()
        ended.record()
        torch.cuda.synchronize(device)
        return float(began.elapsed_time(ended)) / 1e3 / times
    began_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began_s) / times
