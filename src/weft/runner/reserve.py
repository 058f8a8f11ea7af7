"""What a step takes of a GPU's memory besides weights and arena: measured, before the arena takes the rest.

    driver's free memory, weights loaded
    |--- the largest step: activations, scratch, sampling ---|--- CUDA graphs ---|--- arena: a fraction ---|

Every shape of ``step_shapes`` runs twice on a small arena of its own that is then freed. The first run
compiles kernels, so no request waits for a compiler. The second is measured: its forward pass; the choice of
a token for every row with all filters and logprobs; the scores of a slice of a prompt. Torch counts its own
allocations, so the peak is exact. Memory outside torch (contexts, workspaces) is allocated by these runs and
so is missing from the free memory that is read afterwards.

Graphs hold their memory while other steps run, so it is added. The two largest of each kind are recorded, of
decodes and of steps with prompts: the first shows the pool that all of them share, the second what each
further graph adds. The driver's count is used, as a graph's own nodes are outside torch's. Both kinds share
one pool later, so the sum is a little too large.

Measured and not computed, because a formula would have to follow every op of every family. Rejected: taking
the arena first (the first long prompt then ends the process); a fixed share for "activations" (a 1B model
needs megabytes, a wide one with long steps gigabytes); recording all graphs twice (seconds more at start).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch

from weft.memory.frames.plan import memory_for, plan_arena
from weft.request import LOGPROBS_MAX, SamplingParams
from weft.runner.arena import DeviceArena
from weft.runner.graphs import Capture, DecodeGraphs, decode_widths
from weft.runner.logprobs import score
from weft.runner.mixed_graphs import TOKENS_MAX, MixedGraphs, MixedShape, mixed_shapes
from weft.runner.sampler import Sampler
from weft.runner.step_shapes import StepShape, step_shapes
from weft.runner.verify import replay
from weft.spec import CacheDTypeName, ModelSpec
from weft.tensor import gpu
from weft.tensor.device import current, use
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.layout import DTYPES
from weft.tensor.replay_log import ReplayLog
from weft.tensor.scratch import scratch
from weft.units import PAD, VERIFY_TOKENS_MAX, format_bytes

Key = TypeVar("Key")
SCORED_TOKENS = 128
"""Prompt positions whose logits exist at once, as in the executor."""


class MeasuredModel(Protocol):
    """A model of ``weft.models``."""

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor: ...

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor: ...


class Meter(Protocol):
    """Memory of one device."""

    def begin(self) -> None:
        """Start a new peak."""
        ...

    def peak_bytes(self) -> int:
        """The most that torch held at once since ``begin``, beyond what it held then."""
        ...

    def used_bytes(self) -> int:
        """Held now by all, as the driver counts, without torch's cached blocks."""
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

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes: the most of a step while it runs, by the shape ``largest``; of all graphs together; of pages on
    their way to and from a store."""

    step_bytes: int
    graph_bytes: int
    largest: str
    transfer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.step_bytes + self.graph_bytes + self.transfer_bytes

    def in_words(self) -> str:
        transfers = f", {format_bytes(self.transfer_bytes)} for transfers" if self.transfer_bytes else ""
        return (f"{format_bytes(self.step_bytes)} for the largest ({self.largest}), "
                f"{format_bytes(self.graph_bytes)} for CUDA graphs{transfers}")


@torch.inference_mode()
def measure_reserve(model: MeasuredModel, spec: ModelSpec, kv_dtype: CacheDTypeName, *, step_tokens: int,
                    rows: int, model_len: int, device: torch.device, meter: Meter,
                    capture: Capture | None = None, mixed_tokens_max: int = TOKENS_MAX) -> Reserve:
    """``spec``: with the dtypes of states; ``step_tokens`` and ``rows``: the most of a step; ``model_len``:
    the longest sequence, which makes the width of the page table of every graph; ``capture``: None without
    graphs; ``mixed_tokens_max``: of a recorded step with prompts."""
    with current(device):
        scratch.home = device
        shapes = mixed_shapes(rows, min(step_tokens, mixed_tokens_max))
        return _Measurement(model, spec, kv_dtype, step_tokens, rows, model_len, device, meter).run(
            capture, shapes)


class _Measurement:
    def __init__(self, model: MeasuredModel, spec: ModelSpec, kv_dtype: CacheDTypeName, step_tokens: int,
                 rows: int, model_len: int, device: torch.device, meter: Meter) -> None:
        tokens = min(step_tokens, spec.max_positions)
        self._model, self._spec, self._meter, self._rows, self._device = model, spec, meter, rows, device
        plan = plan_arena(spec, memory_for(spec, kv_dtype, 1, tokens)[0], kv_dtype=kv_dtype,
                          kv_layout=gpu.page_layout(device))
        self._step_tokens = step_tokens
        self._caches = DeviceArena(plan, device).layer_caches(len(spec.layers))
        if kv_dtype == "float8_e4m3":   # kernels compile for caches with scales
            for cache, layer in zip(self._caches, spec.layers, strict=True):
                if layer.cached_heads:
                    cache.head_scales = torch.ones(
                        1 + layer.has_values, layer.cached_heads, dtype=DTYPES[spec.dtype], device=device)
        self._table_pages = max(1, plan.pages_for(model_len))
        self._shapes = step_shapes(
            tokens=step_tokens, rows=rows, positions=spec.max_positions, table_pages=self._table_pages,
            vocab_size=spec.vocab_size, device=device,
            first_page=plan.pages_per_frame if plan.slots_per_frame else 0)   # behind the frame of the slot
        self._sampler = Sampler(rows, spec.vocab_size, device)
        sampling = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, logprobs=LOGPROBS_MAX)
        for row in range(rows):
            self._sampler.admit(row, np.zeros(1, np.int32), 1, sampling, row, ())

    def run(self, capture: Capture | None, shapes: Sequence[MixedShape]) -> Reserve:
        peaks = {shape.name: self._peak(shape) for shape in self._shapes}
        # Libraries have a handle and a workspace for each thread, and the next thread takes over those of one
        # that ended: here the steps' thread gets its own, before the rest of the memory is counted.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._step_of_thread).result()
        self._sampler.close()
        largest = max(peaks, key=lambda name: peaks[name])
        return Reserve(peaks[largest], 0 if capture is None else self._graph_bytes(capture, shapes), largest)

    @torch.inference_mode()
    def _step_of_thread(self) -> None:
        use(self._device)
        scratch.home = self._device
        self._step(self._shapes[-1])

    def _peak(self, shape: StepShape) -> int:
        self._step(shape)
        self._meter.begin()
        self._step(shape)
        return self._meter.peak_bytes()

    def _step(self, shape: StepShape) -> None:
        inputs, windows = shape.inputs, shape.inputs.runs.verify_count
        # A memo of its own: that of the step before has tables, and addresses of its log.
        log = ReplayLog(0, len(inputs.tokens_T)) if windows else None
        inputs = replace(inputs, runs=replace(inputs.runs, log=log, memo={}))
        hidden_TD = self._model.forward(inputs, self._caches)
        if windows:
            replay(inputs.runs, range(1, 1 + windows))
        sampled = min(self._rows, shape.inputs.runs.run_count)
        if windows:   # each token of a window chooses one, beside those of the other decodes
            sampled = min(self._rows + VERIFY_TOKENS_MAX, self._step_tokens)
        sampled_XD = hidden_TD[torch.arange(sampled, device=self._device) % len(hidden_TD)]
        rows = np.arange(sampled) % self._rows
        self._sampler.sample(self._model.logits(sampled_XD), rows, np.ones_like(rows))
        if not shape.decodes:
            scored_ND = hidden_TD[:SCORED_TOKENS]
            following_N = torch.zeros(len(scored_ND), dtype=torch.int64, device=self._device)
            score(self._model.logits(scored_ND), following_N, LOGPROBS_MAX)

    def _graph_bytes(self, capture: Capture, shapes: Sequence[MixedShape]) -> int:
        """Of one graph for each width and shape."""
        table = torch.full((self._rows + 1, self._table_pages), PAD, dtype=torch.int32, device=self._device)
        last_tokens = torch.zeros(self._rows + 1, dtype=torch.int64, device=self._device)
        total = self._bytes_of(decode_widths(self._rows),
                               lambda keys: DecodeGraphs(table, last_tokens, keys, capture))
        if not capture.reads_host:
            total += self._bytes_of(shapes, lambda keys: MixedGraphs(table, last_tokens, keys, capture))
        return total

    def _bytes_of(self, keys: Sequence[Key],
                  graphs_of: Callable[[Sequence[Key]], DecodeGraphs | MixedGraphs]) -> int:
        pools = []
        for recorded in (keys[-1:], keys[-2:]):
            before = self._meter.used_bytes()
            graphs = graphs_of(recorded)
            graphs.record(self._model.forward, self._caches)
            pools.append(self._meter.used_bytes() - before)
            graphs.forget()
        first, both = pools
        return max(0, first) + max(0, len(keys) - 1) * max(0, both - first)
