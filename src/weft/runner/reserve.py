"""What a step takes of a GPU's memory besides weights and arena: measured, before the arena takes the rest.

    driver's free memory, weights loaded
    |--- one prompt of a whole step ---|--- one decode of all rows ---|----- arena: a fraction of this -----|
          activations and scratch            kept by the CUDA graphs

The forward pass is run twice on a small arena of its own that is then freed: once with one prompt as long as
a step's token budget, and once with as many PAD rows as ever decode together, which is what the graphs record
later. torch counts its own allocations, so each run's peak is exact; what the driver and the matrix library
take aside from torch (contexts, workspaces) is there after these runs, and so is missing from the free memory
that is read afterwards.

Measured and not computed, because a formula would have to follow every op of every family. Rejected: to take
the arena first and hope (the first long prompt then ends the process), and a fixed share for "activations"
(a 1B model needs megabytes, a wide one with long steps gigabytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from weft.memory.frames.plan import memory_for, plan_arena
from weft.runner.arena import DeviceArena
from weft.runner.graphs import pad_rows
from weft.runner.kv_scales import one_prompt
from weft.spec import CacheDTypeName, ModelSpec
from weft.tensor.device import current
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.scratch import scratch
from weft.units import format_bytes


class Model(Protocol):
    """What is measured: a model of ``weft.models``."""

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor: ...

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor: ...


class Meter(Protocol):
    """Memory of one device as torch counts it."""

    def begin(self) -> None:
        """From now on the peak is counted anew."""
        ...

    def peak_bytes(self) -> int:
        """The most that was held at once since ``begin``, beyond what was held then."""
        ...


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held_bytes = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held_bytes = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._held_bytes


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes that a step of either kind holds at most while it runs."""

    prompt_bytes: int
    decode_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.prompt_bytes + self.decode_bytes

    def in_words(self) -> str:
        return f"{format_bytes(self.prompt_bytes)} for prompts, {format_bytes(self.decode_bytes)} for decodes"


@torch.inference_mode()
def measure_reserve(model: Model, spec: ModelSpec, kv_dtype: CacheDTypeName, *, step_tokens: int, rows: int,
                    model_len: int, device: torch.device, meter: Meter) -> Reserve:
    """``spec``: with states as they will be kept; ``step_tokens`` and ``rows``: the most that a step has;
    ``model_len``: the longest sequence, whose page table is as wide as that of every row of a graph."""
    with current(device):
        return _measured(model, spec, kv_dtype, step_tokens, rows, model_len, device, meter)


def _measured(model: Model, spec: ModelSpec, kv_dtype: CacheDTypeName, step_tokens: int, rows: int,
              model_len: int, device: torch.device, meter: Meter) -> Reserve:
    scratch.home = device
    tokens = min(step_tokens, spec.max_positions)
    arena = DeviceArena(plan_arena(spec, memory_for(spec, kv_dtype, 1, tokens)[0], kv_dtype=kv_dtype), device)
    caches = arena.layer_caches(len(spec.layers))
    behind_the_slot = arena.plan.pages_per_frame if arena.plan.slots_per_frame else 0
    prompt = one_prompt(tokens, spec.vocab_size, device, first_page=behind_the_slot)
    idle = pad_rows(rows, max(1, arena.plan.pages_for(model_len)), device)
    peaks = []
    for inputs in (prompt, idle):
        model.forward(inputs, caches)   # kernels are compiled and workspaces made here
        meter.begin()
        hidden_TD = model.forward(inputs, caches)
        model.logits(hidden_TD[:rows])
        peaks.append(meter.peak_bytes())
    return Reserve(*peaks)
