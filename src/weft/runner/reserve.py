"""Measurement of the memory that steps on a GPU need in addition to weights and arena; the arena takes the rest.

    driver's free memory, weights loaded
    |--- the largest step: activations, scratch, sampling ---|--- CUDA graphs ---|--- arena: a fraction ---|

First all kernels are compiled, in parallel (``tensor.gpu.ahead``), so no request waits for a compiler. Then every
shape of ``step_shapes`` runs twice on a small separate arena that is then freed, and the second run is measured. Torch
counts its own allocations, so the peak is exact. Memory outside torch (contexts, workspaces) is allocated by these
runs and so is missing from the free memory that is read afterwards.

    long prompt      a full token budget of one new sequence
    short runs       the same tokens in as many runs as there are rows, each after a prefix hit: every run has
                     at least one chunk of float32 states, and starts off the grid of chunks
    mixed            decodes of short contexts with a prompt: a page table of one page, where attention is
                     not split, so that its kernel has no partial results
    few tokens       prompts of 1, 2, 4, ... tokens: matrix and expert kernels choose tiles by rows
    verify runs      two verify runs after hits, whose states are computed again afterwards
    decodes          only PAD rows, with a page table as wide as that of a CUDA graph

With a vision tower, the largest picture that the checkpoint's settings allow is encoded too. Steps run between the
pieces of a picture, so its memory is added.

Graphs hold their memory while other steps run, so it is added. The two largest of each kind are recorded: the first
shows the pool that all of them share, the second the memory of each further graph. With adapters there is a second
set of graphs in that pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from weft.host import usable_cores
from weft.memory.frames.plan import memory_for, plan_arena
from weft.models.decoder import CausalModel
from weft.request import LOGPROBS_MAX, SamplingParams
from weft.runner.arena import DeviceArena, warm
from weft.runner.graph_shapes import TOKENS_MAX, GraphShape, recorded_shapes
from weft.runner.graphs import Capture, pad_rows
from weft.runner.kv_scales import Model, one_prompt
from weft.runner.pictures import PictureRows, picture_rows
from weft.runner.sampler import Sampler, score
from weft.runner.staging import Staging
from weft.runner.step_graphs import GraphSet, StepGraphs
from weft.runner.verify import replay
from weft.spec import CacheDTypeName, ModelSpec
from weft.tensor import gpu
from weft.tensor.device import current, recorded, use, wait_for
from weft.tensor.inputs import Runs, StepInputs
from weft.tensor.layout import DTYPES
from weft.tensor.op import checked
from weft.tensor.replay_log import ReplayLog
from weft.tensor.scratch import scratch
from weft.units import PAD, VERIFY_TOKENS_MAX, format_bytes, pages_for

HIT_TOKENS = 40
"""Cached tokens of the runs, off the grid of chunks: the first chunk of a run ends inside it."""
MIXED_DECODES = 4
MIXED_PROMPT_TOKENS = 16
VERIFY_TOKENS = 4
CHECKED_TOKENS = 80
"""Tokens of the prompt of the kernels' check: more than a chunk of the recurrent ones."""
CHECK_S = 2.0
"""Seconds of the kernels' check, at most."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Inputs of one measured step. ``decodes``: a CUDA graph may hold this step's memory."""

    name: str
    inputs: StepInputs
    decodes: bool = False


def step_shapes(
    *, tokens: int, rows: int, positions: int, table_pages: int, vocab_size: int, device: torch.device, first_page: int
) -> list[StepShape]:
    """Return the shapes to measure. ``tokens``, ``rows``: the most of a step; ``positions``: the most of a sequence;
    ``table_pages``: width of the rows' table; ``first_page``: pages from there on are free, for
    ``min(tokens, positions)`` tokens.
    """
    longest = min(tokens, positions)
    # First: its KV fills the pages that the other shapes read.
    shapes = [StepShape("long prompt", one_prompt(longest, vocab_size, device, first_page=first_page))]
    start = min(HIT_TOKENS, longest // 2)
    runs = max(1, min(rows, tokens))
    length = max(1, min(tokens // runs, longest - start))
    shapes.append(
        StepShape("short runs after hits", _runs([start] * runs, [length] * runs, 0, vocab_size, device, first_page))
    )
    decodes, prompt = min(MIXED_DECODES, rows), min(MIXED_PROMPT_TOKENS, longest)
    shapes.append(
        StepShape(
            "mixed, short contexts",
            _runs([1] * decodes + [0], [1] * decodes + [prompt], decodes, vocab_size, device, first_page),
        )
    )
    count = 1
    while count < longest:
        shapes.append(StepShape(f"{count} tokens", one_prompt(count, vocab_size, device, first_page=first_page)))
        count *= 2
    if rows > 1 and start + VERIFY_TOKENS <= longest and tokens >= 2 * VERIFY_TOKENS:
        verify = _runs([start] * 2, [VERIFY_TOKENS] * 2, 0, vocab_size, device, first_page)
        shapes.append(StepShape("verify runs", replace(verify, runs=replace(verify.runs, verify_count=2))))
    shapes.append(StepShape("decodes", pad_rows(rows, table_pages, device), decodes=True))
    return shapes


def _runs(
    starts: list[int], lengths: list[int], decode_count: int, vocab_size: int, device: torch.device, first_page: int
) -> StepInputs:
    # Rows that write the same page race; nothing reads the result.
    """Return runs without slots that are all in the same pages."""
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    offsets = [sum(lengths[:run]) for run in range(len(lengths))]
    width = pages_for(max(contexts))
    pages_P = torch.arange(first_page, first_page + width, dtype=torch.int32, device=device)
    positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    pads_R = torch.full((len(starts),), PAD, dtype=torch.int64, device=device)
    runs = Runs(
        offsets=offsets,
        starts=starts,
        lengths=lengths,
        slots=[PAD] * len(starts),
        fresh=[start == 0 for start in starts],
        decode_count=decode_count,
        starts_R=torch.tensor(starts, device=device),
        slots_R=pads_R,
        context_R=torch.tensor(contexts, device=device),
        page_table_RP=pages_P.expand(len(starts), width).contiguous(),
        padded=True,
    )
    tokens_T = torch.arange(len(positions), device=device) % vocab_size
    return StepInputs(tokens_T, torch.tensor(positions, device=device), runs)


SCORED_TOKENS = 128
"""Prompt positions whose logits exist at once, as in the executor."""


class Meter(Protocol):
    """Meter of one device's memory."""

    def begin(self) -> None:
        """Start a new peak."""

    def peak_bytes(self) -> int:
        """Return the most bytes that torch held at once since ``begin``, beyond those that it held then."""

    def used_bytes(self) -> int:
        """Return the bytes in use by all processes, as the driver counts, without torch's cached blocks."""


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held_bytes = 0

    def begin(self) -> None:
        self._wait()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held_bytes = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        self._wait()
        return torch.cuda.max_memory_allocated(self._device) - self._held_bytes

    def used_bytes(self) -> int:
        self._wait()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def _wait(self) -> None:
        # Not at once for the device: another rank may be gone, and its collectives never end.
        wait_for(recorded(self._device))
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserved bytes: the most of a step while it runs, by the shape ``largest``; of all graphs together; of pages in
    transit inside of the arena, and to and from a store; of adapters; of the largest picture while it is encoded.
    """

    step_bytes: int
    graph_bytes: int
    largest: str
    transfer_bytes: int = 0
    adapter_bytes: int = 0
    picture_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.step_bytes + self.graph_bytes + self.transfer_bytes + self.adapter_bytes + self.picture_bytes

    def in_words(self) -> str:
        others = {"transfers": self.transfer_bytes, "adapters": self.adapter_bytes, "a picture": self.picture_bytes}
        said = "".join(f", {format_bytes(size)} for {name}" for name, size in others.items() if size)
        return (
            f"{format_bytes(self.step_bytes)} for the largest ({self.largest}), "
            f"{format_bytes(self.graph_bytes)} for CUDA graphs{said}"
        )


@torch.inference_mode()
def measure_reserve(
    model: Model,
    spec: ModelSpec,
    kv_dtype: CacheDTypeName,
    *,
    step_tokens: int,
    rows: int,
    model_len: int,
    device: torch.device,
    meter: Meter,
    capture: Capture | None = None,
    mixed_tokens_max: int = TOKENS_MAX,
    verify_runs: bool = False,
    adapters: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Reserve:
    """Return the measured reserve. ``spec``: with the dtypes of states; ``step_tokens`` and ``rows``: the most of a
    step; ``model_len``: the longest sequence, which decides the width of the page table of every graph; ``capture``:
    None without graphs; ``mixed_tokens_max``: most tokens of a recorded step with prompts; ``verify_runs``: as for the
    executor; ``adapters``: decodes with them are recorded too; ``tell``: receives the progress of compilations.
    """
    with current(device):
        scratch.device = device
        pictures = picture_rows(model, device, rows)
        shapes = recorded_shapes(
            rows,
            0 if capture is None or capture.reads_host else min(step_tokens, mixed_tokens_max),
            verify_runs=verify_runs,
            picture_fields=0 if pictures is None else pictures.fields,
        )
        measurement = Measurement(model, spec, kv_dtype, step_tokens, rows, model_len, device, meter)
        if gpu.reaches(device):
            measurement.compile(tell)
            if device.type == "cuda":
                check_kernels(measurement)
        return measurement.run(capture, shapes, pictures, 1 + adapters)


def check_kernels(measurement: Measurement) -> None:
    """Compute each kernel of the model once next to torch's operators. Raises ``gpu.KernelsDifferError`` that names the
    kernels that differ.
    """
    from weft.tensor.gpu.self_check import KernelCheck

    check = KernelCheck(CHECK_S)
    with checked(check):
        measurement.forward_checked()
    if check.differences:
        raise gpu.KernelsDifferError(", ".join(check.differences))


class Measurement:
    """A model with a small arena, and the steps that are measured on it."""

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        kv_dtype: CacheDTypeName,
        step_tokens: int,
        rows: int,
        model_len: int,
        device: torch.device,
        meter: Meter,
    ) -> None:
        tokens = min(step_tokens, spec.max_positions)
        self._model, self._meter, self._rows, self._device, self._spec = model, meter, rows, device, spec
        plan = plan_arena(
            spec, memory_for(spec, kv_dtype, 1, tokens)[0], kv_dtype=kv_dtype, kv_layout=gpu.page_layout(device)
        )
        self._step_tokens = step_tokens
        self._arena = DeviceArena(plan, device)
        self._caches = self._arena.layer_caches(len(spec.layers))
        if kv_dtype == "float8_e4m3":  # kernels compile for caches with scales
            for cache, layer in zip(self._caches, spec.layers, strict=True):
                if layer.cached_heads:
                    cache.head_scales = torch.ones(
                        1 + layer.has_values, layer.cached_heads, dtype=DTYPES[spec.dtype], device=device
                    )
        self._table_pages = max(1, plan.pages_for(model_len))
        self._first_page = plan.pages_per_frame if plan.slots_per_frame else 0  # after the frame of the slot
        self._shapes = step_shapes(
            tokens=step_tokens,
            rows=rows,
            positions=spec.max_positions,
            table_pages=self._table_pages,
            vocab_size=spec.vocab_size,
            device=device,
            first_page=self._first_page,
        )
        self._sampler = Sampler(rows, spec.vocab_size, device)
        self._verify_tables = Staging(device)
        sampling = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, logprobs=LOGPROBS_MAX)
        for row in range(rows):
            self._sampler.admit(row, np.zeros(1, np.int32), 1, sampling, row, ())

    def compile(self, tell: Callable[[str], None]) -> None:
        """Compile everything that the start launches, except a few small kernels that depend on the real arena."""
        from weft.tensor.gpu.ahead import compiled_ahead  # triton, which may be missing

        with compiled_ahead(usable_cores(), tell):
            for shape in self._shapes:
                self._step(shape)
            self.forward_checked()
            self._sampler.warm()
            if self._device.type == "cuda":
                warm(self._arena)

    def forward_checked(self) -> None:
        """Compute a prompt and a decode after it, with a state in slot 0."""
        longest = min(CHECKED_TOKENS, self._step_tokens - 1)
        prompt = one_prompt(longest, self._spec.vocab_size, self._device, first_page=self._first_page)
        decode = _runs([longest], [1], 1, self._spec.vocab_size, self._device, self._first_page)
        runs = replace(decode.runs, slots=prompt.runs.slots, slots_R=prompt.runs.slots_R)
        for inputs in (prompt, replace(decode, runs=runs)):
            self._model.forward(inputs, self._caches)

    def run(
        self, capture: Capture | None, shapes: Sequence[GraphShape], pictures: PictureRows | None, sets: int
    ) -> Reserve:
        """Return the reserve. ``sets``: of graphs, by rows with and without adapters."""
        peaks = {shape.name: self._peak(shape) for shape in self._shapes}
        picture_bytes = self._picture_peak()
        # Libraries have a handle and a workspace for each thread, and the next thread takes over those of one
        # that ended: here the steps' thread gets its own, before the rest of the memory is counted.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._step_of_thread).result()
        self._sampler.close()
        largest = max(peaks, key=lambda name: peaks[name])
        graph_bytes = 0 if capture is None else self._graph_bytes(capture, shapes, pictures, sets)
        return Reserve(peaks[largest], graph_bytes, largest, picture_bytes=picture_bytes)

    @torch.inference_mode()
    def _step_of_thread(self) -> None:
        use(self._device)
        scratch.device = self._device
        self._step(self._shapes[-1])

    def _peak(self, shape: StepShape) -> int:
        self._step(shape)
        self._meter.begin()
        self._step(shape)
        return self._meter.peak_bytes()

    def _picture_peak(self) -> int:
        """Return the bytes that the largest picture takes while it is encoded: a step may run between its pieces."""
        vision = self._model.vision if isinstance(self._model, CausalModel) else None
        if vision is None:
            return 0
        self._meter.begin()
        for _ in vision.encode(vision.largest()):
            pass
        return self._meter.peak_bytes()

    def _step(self, shape: StepShape) -> None:
        inputs, verified = shape.inputs, shape.inputs.runs.verify_count
        # A separate memo: that of the step before has tables, and addresses of its log.
        log = ReplayLog(0, len(inputs.tokens_T)) if verified else None
        inputs = replace(inputs, runs=replace(inputs.runs, log=log, memo={}))
        hidden_TD = self._model.forward(inputs, self._caches)
        if verified:
            replay(inputs.runs, range(1, 1 + verified), self._verify_tables)
        sampled = min(self._rows, shape.inputs.runs.run_count)
        if verified:  # each token of a verify run chooses one, in addition to those of the other decodes
            sampled = min(self._rows + VERIFY_TOKENS_MAX, self._step_tokens)
        sampled_XD = hidden_TD[torch.arange(sampled, device=self._device) % len(hidden_TD)]
        rows = np.arange(sampled) % self._rows
        self._sampler.sample(self._model.logits(sampled_XD), rows, np.ones_like(rows))
        if not shape.decodes:
            scored_ND = hidden_TD[:SCORED_TOKENS]
            following_N = torch.zeros(len(scored_ND), dtype=torch.int64, device=self._device)
            score(self._model.logits(scored_ND), following_N, LOGPROBS_MAX)

    def _graph_bytes(
        self, capture: Capture, shapes: Sequence[GraphShape], pictures: PictureRows | None, sets: int
    ) -> int:
        """Return the bytes of one graph for each shape, in each of ``sets``."""
        # Drafts of the model's own head take less than a step.
        decode_sets = sets + (getattr(self._model, "mtp", None) is not None)
        decodes = [shape for shape in shapes if shape.decodes_alone]
        others = [shape for shape in shapes if not shape.decodes_alone]
        steps = [shape for shape in others if shape.forward]  # the states of verify runs take less than these
        return self._bytes_of(capture, decodes, pictures, decode_sets * len(decodes)) + self._bytes_of(
            capture, steps, pictures, sets * len(others)
        )

    def _bytes_of(
        self, capture: Capture, shapes: Sequence[GraphShape], pictures: PictureRows | None, count: int
    ) -> int:
        """Return the bytes of ``count`` graphs, none larger than the last of ``shapes``."""
        if not shapes:
            return 0
        table = torch.full((self._rows + 1, self._table_pages), PAD, dtype=torch.int32, device=self._device)
        last_tokens = torch.zeros(self._rows + 1, dtype=torch.int64, device=self._device)
        pools = []
        for largest in (shapes[-1:], shapes[-2:]):
            before = self._meter.used_bytes()
            graphs = StepGraphs(table, last_tokens, largest, capture, pictures)
            graphs.record(GraphSet("base", largest, self._model.forward, self._caches))
            pools.append(self._meter.used_bytes() - before)
            graphs.forget()
        first, both = pools
        return max(0, first) + max(0, count - 1) * max(0, both - first)
