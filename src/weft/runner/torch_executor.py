"""The executor that runs a model in torch: a plan in, tokens out.

    plan --BatchBuilder--> StepInputs --model--> hidden_TD --rows that need them--> logits --Sampler--> tokens

Owns the arena's bytes, the views into it that each layer sees, the rows (page table, sampling state), and
the order of a step. It decides nothing: what runs, where its pages and state are, and which frames to zero
first is in the plan.

Logits are computed only where they are read: the last token of each run that samples, and every token of a
run whose sequence wants logprobs of its prompt, in slices, because [prompt, vocabulary] may be larger than
the model.

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
from weft.memory.plan import ArenaPlan
from weft.request import TokenLogprobs
from weft.runner.arena import DeviceArena
from weft.runner.batch import BatchBuilder, StepBatch
from weft.runner.kv_scales import head_scales
from weft.runner.logprobs import token_logprobs
from weft.runner.sampler import Sampler
from weft.schedule.plan import StepPlan, StepResult
from weft.spec import ModelSpec
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.layout import DTYPES
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
    fp8, and measured for the other layers. ``pad_decode_to`` and the two hooks are described above and in
    ``weft.runner.batch``. Not thread-safe: one step at a time."""

    def __init__(self, model: Model, arena_plan: ArenaPlan, sizes: Sizes, *,
                 kv_scales: Mapping[int, torch.Tensor] | None = None, device: torch.device | None = None,
                 pad_decode_to: int = 0, observer: Observer | None = None,
                 before_step: BeforeStep | None = None) -> None:
        device = device or torch.device("cpu")
        self.model = model
        self.arena = DeviceArena(arena_plan, device)
        self._caches = self.arena.layer_caches(len(model.spec.layers))
        if arena_plan.kv_dtype == "float8_e4m3":
            for layer, scales in head_scales(model, kv_scales or {}).items():
                self._caches[layer].head_scales = scales.to(device, DTYPES[model.spec.dtype])
        self.batches = BatchBuilder(
            rows_max=sizes.rows_max, pages_max=arena_plan.pages_for(sizes.max_model_len),
            step_tokens_max=sizes.step_tokens_max, device=device, pad_decode_to=pad_decode_to)
        self.sampler = Sampler(sizes.rows_max, model.spec.vocab_size)
        self.observer = observer
        self.before_step = before_step

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        if self.before_step is not None:
            self.before_step(plan)
        self.batches.apply(plan, self.sampler, self.arena)
        tokens = np.full(plan.run_count, PAD, np.int32)
        if not plan.run_count:
            return StepResult(tokens, {}, {}, time.perf_counter() - started)
        batch = self.batches.build(plan)
        self.sampler.begin(batch.sample_rows)
        hidden_TD = self.model.forward(batch.inputs, self._caches)
        prompt_logprobs = self._prompt_logprobs(batch, hidden_TD)
        logprobs: dict[int, TokenLogprobs] = {}
        failures: dict[int, str] = {}
        if batch.sample_runs.size:
            logits_XV = self.model.logits(hidden_TD[batch.sample_index_X])
            if self.observer is not None:
                self.observer(plan, logits_XV)
            sampled = self.sampler.sample(logits_XV, batch.sample_rows, batch.sample_positions)
            tokens[batch.sample_runs] = sampled.tokens
            logprobs = {int(batch.sample_runs[i]): found for i, found in sampled.logprobs.items()}
            failures = {int(batch.sample_runs[i]): why for i, why in sampled.failures.items()}
        return StepResult(tokens, logprobs, prompt_logprobs, time.perf_counter() - started, failures)

    def close(self) -> None:
        """Free the arena. Idempotent; no step may follow."""
        self._caches = []
        self.sampler.close()
        self.arena.buffer = torch.empty(0, dtype=torch.uint8)

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
