"""The executor that runs a model in torch: a plan in, tokens out.

    plan --BatchBuilder--> StepInputs --model--> hidden_TD --rows that need them--> logits --Sampler--> tokens

Owns the arena's bytes, the views into it that each layer sees, the rows (page table, sampling state), and
the order of a step. It decides nothing: what runs, where its pages and state are, and which frames to zero
first is in the plan.

Logits are computed only where they are read: the last token of each run that samples, and every token of a
run whose sequence wants logprobs of its prompt, in slices, because [prompt, vocabulary] may be larger than
the model.

It lets go of the arena and of the weights while the engine sleeps (``runner.sleep``), and lays both out as at
the start when it wakes; rows are free then, and their tables stay.

``observer(plan, logits_XV)`` sees the raw logits of the sampling runs, in run order, before the sampler edits
them; ``before_step(plan)`` runs before anything of the plan is applied. Both are for tests and evaluations,
None in service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from weft.config import Sizes
from weft.engine.sleep import PARTS, Part
from weft.errors import CheckpointError, ConfigError, EngineUnavailableError
from weft.memory.plan import ArenaPlan
from weft.models import LoadedModel
from weft.request import TokenLogprobs
from weft.runner.arena import DeviceArena
from weft.runner.batch import BatchBuilder, StepBatch
from weft.runner.graphs import (
    REFUSALS,
    Capture,
    DecodeBlock,
    DecodeGraphs,
    decode_widths,
    pad_rows,
)
from weft.runner.kv_scales import head_scales
from weft.runner.logprobs import token_logprobs
from weft.runner.sampler import Sampler
from weft.runner.sleep import DroppedModel, HostWeights, give_back
from weft.runner.step_worker import StepWorker
from weft.schedule.plan import StepPlan, StepResult
from weft.spec import ModelSpec
from weft.tensor.device import use
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.layout import DTYPES
from weft.tensor.scratch import scratch
from weft.units import PAD

Observer = Callable[[StepPlan, torch.Tensor], None]
BeforeStep = Callable[[StepPlan], None]

PROMPT_LOGITS_TOKENS = 128
"""Prompt positions whose logits exist at the same time."""


class Model(Protocol):
    """What ``weft.models`` makes: see there."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        """hidden_TD of the step's tokens; writes KV and states through ``caches``."""
        ...

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        """float32 [X, vocab]."""
        ...


class TorchExecutor:
    """One model on one device. ``kv_scales``: the checkpoint's, of layers that have some; used where KV is
    fp8, and measured for the other layers. ``reload`` reads the checkpoint again,
    after a sleep of level 2. ``capture``: how decode steps are recorded as graphs, once ``record_graphs`` is
    called; None: never. ``pad_decode_to`` and the two hooks are described above and in
    ``weft.runner.batch``. Not thread-safe: one step at a time."""

    def __init__(self, model: Model, arena_plan: ArenaPlan, sizes: Sizes, *,
                 kv_scales: Mapping[int, torch.Tensor] | None = None,
                 reload: Callable[[], LoadedModel] | None = None, device: torch.device | None = None,
                 capture: Capture | None = None, pad_decode_to: int = 0, observer: Observer | None = None,
                 before_step: BeforeStep | None = None) -> None:
        device = scratch.home = device or torch.device("cpu")
        self.model = model
        self.arena = DeviceArena(arena_plan, device)
        self._reload = reload
        self._kv_scales = kv_scales or {}
        self._missing: set[Part] = set()
        self._on_host: HostWeights | None = None
        self._caches = self._lay_out(device)
        self.batches = BatchBuilder(
            rows_max=sizes.rows_max, pages_max=arena_plan.pages_for(sizes.max_model_len),
            step_tokens_max=sizes.step_tokens_max, device=device, pad_decode_to=pad_decode_to)
        self.graphs = None if capture is None else DecodeGraphs(
            self.batches.table, self.batches.chosen, decode_widths(sizes.rows_max), capture)
        self.sampler = Sampler(sizes.rows_max, model.spec.vocab_size)
        self.observer = observer
        self.before_step = before_step
        self._worker = StepWorker(self._compute, prepare=lambda: use(device))

    def execute(self, plan: StepPlan) -> StepResult:
        """On the caller's thread."""
        assert not self._worker.in_flight, "a step is in flight"
        use(self.arena.device)
        return self._compute(plan)

    def begin(self, plan: StepPlan) -> None:
        """On a thread of the executor's own, from the first call on."""
        self._worker.begin(plan)

    def finish(self) -> StepResult:
        return self._worker.finish()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        if self.before_step is not None:
            self.before_step(plan)
        self.batches.apply(plan, self.sampler, self.arena)
        tokens = np.full(plan.run_count, PAD, np.int32)
        if not plan.run_count:
            return StepResult(tokens, {}, {}, time.perf_counter() - started)
        batch = self.batches.build(plan)
        self.sampler.begin(batch.sample_rows)
        hidden_TD = self._forward(batch.inputs)
        prompt_logprobs = self._prompt_logprobs(batch, hidden_TD)
        logprobs: dict[int, TokenLogprobs] = {}
        failures: dict[int, str] = {}
        if batch.sample_runs.size:
            logits_XV = self.model.logits(hidden_TD[batch.sample_index_X])
            if self.observer is not None:
                self.observer(plan, logits_XV)
            sampled = self.sampler.sample(logits_XV, batch.sample_rows, batch.sample_positions)
            self.batches.chosen.index_copy_(0, batch.sample_rows_X, sampled.chosen_X)
            tokens[batch.sample_runs] = sampled.tokens
            logprobs = {int(batch.sample_runs[i]): found for i, found in sampled.logprobs.items()}
            failures = {int(batch.sample_runs[i]): why for i, why in sampled.failures.items()}
        return StepResult(tokens, logprobs, prompt_logprobs, time.perf_counter() - started, failures)

    def _forward(self, inputs: StepInputs | DecodeBlock) -> torch.Tensor:
        if isinstance(inputs, DecodeBlock):
            assert self.graphs is not None
            return self.graphs.replay(inputs)
        scratch.home = self.arena.device
        return self.model.forward(inputs, self._caches)

    def record_graphs(self) -> str | None:
        """Record decode steps, where a ``Capture`` was given; steps are padded to what was recorded from then
        on. Returns why it cannot be done, None where it was (or was not asked for)."""
        if self.graphs is None:
            return None
        self.batches.decode_widths = ()
        scratch.home = self.arena.device
        use(self.arena.device)
        try:
            self.graphs.record(self.model.forward, self._caches)
        except REFUSALS as error:
            return str(error).strip().split("\n")[0]
        self.batches.decode_widths = self.graphs.widths
        return None

    @torch.inference_mode()
    def dummy_step(self, width: int) -> None:
        """What an idle rank of a data-parallel group computes so that the others can go on: a decode step of
        at least ``width`` PAD rows, the way real ones go. Reads and writes no page and no slot (L4, L5)."""
        use(self.arena.device)
        if self.graphs is not None and self.graphs.recorded and width <= self.graphs.widths[-1]:
            self.graphs.idle(width)
        else:
            self._forward(pad_rows(width, self.batches.table.shape[1], self.arena.device))

    def _lay_out(self, device: torch.device) -> list[LayerCache]:
        """The views of every layer into the arena. In fp8 with the scales of the model that is there now."""
        caches = self.arena.layer_caches(len(self.model.spec.layers))
        if self.arena.plan.kv_dtype == "float8_e4m3":
            for layer, scales in head_scales(self.model, self._kv_scales, device).items():
                caches[layer].head_scales = scales.to(device, DTYPES[self.model.spec.dtype])
        return caches

    def sleep(self, level: int) -> None:
        """Raises ConfigError for level 2 where there is no checkpoint to read again."""
        device = self.arena.device
        if level == 2 and self._reload is None:
            raise ConfigError("this engine was made from a model in memory: there is no checkpoint to read "
                              "it from again, so level 2 cannot be; level 1 can", param="level")
        self._worker.rest()
        self._forget_graphs()
        self._caches = []
        self.arena.release()
        if level == 2:
            self.model, self._on_host = DroppedModel(self.model.spec), None
        elif "weights" not in self._missing:
            self._on_host = HostWeights(self.model)
        self._missing = set(PARTS)
        give_back(device)

    def wake(self, part: Part) -> None:
        """Raises what ``load_model`` raises; CheckpointError where the checkpoint has other shapes now;
        EngineUnavailableError where the device has not enough memory."""
        try:
            if part == "kv_cache":
                self.arena.allocate()
            elif self._on_host is not None:
                self._on_host.restore()
                self._on_host = None
            elif isinstance(self.model, DroppedModel):
                self._read_again(self.model.spec)
        except RuntimeError as error:
            raise EngineUnavailableError(f"the engine cannot wake, and is still asleep: {error}") from error
        self._missing.discard(part)
        if not self._missing:
            self._caches = self._lay_out(self.arena.device)
            self.record_graphs()

    def _forget_graphs(self) -> None:
        """They hold addresses in the arena and in the weights."""
        self.batches.decode_widths = ()
        if self.graphs is not None:
            self.graphs.forget()

    def _read_again(self, spec: ModelSpec) -> None:
        assert self._reload is not None
        loaded = self._reload()
        if loaded.spec != spec:
            raise CheckpointError("the checkpoint has changed while the engine slept: its layers, sizes or "
                                  "dtype are others now. Put the old one back, or start the engine anew",
                                  param="model")
        self.model, self._kv_scales = loaded.model, loaded.kv_scales

    def close(self) -> None:
        """Free the arena, once no step is computed any more. Idempotent; no step may follow."""
        self._worker.close()
        self._forget_graphs()
        self._caches = []
        self.sampler.close()
        self.arena.release()

    def _prompt_logprobs(self, batch: StepBatch, hidden_TD: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        for span in batch.prompt_spans:
            entries = found[span.run] = []
            for begin in range(0, len(span.next_tokens), PROMPT_LOGITS_TOKENS):
                following = torch.from_numpy(span.next_tokens[begin : begin + PROMPT_LOGITS_TOKENS])
                first = span.first + begin
                logits_NV = self.model.logits(hidden_TD[first : first + len(following)])
                entries += token_logprobs(logits_NV, following.to(logits_NV.device),
                                          [span.top_count] * len(following))
        return found
