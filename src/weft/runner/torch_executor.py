"""Executor that runs a model in torch: a plan in, tokens out.

    plan --BatchBuilder--> StepInputs --model--> hidden_TD --rows that need them--> logits --Sampler--> tokens
    '------------------------------ launch: nothing is waited for ------------------------------' '- to host -'

Owns the arena's bytes, the views into it that each layer sees, the rows (page table, sampling state), and
the order of a step. It decides nothing: the plan names the runs, the pages and states of each, and the frames to
zero first.

A step is launched, and later its tokens are copied to the host (``LaunchedStep``). The next one may be launched in
between: its decodes read ``BatchBuilder.chosen``, on the device. Only a step whose choice depends on the tokens before
(penalties, grammars) waits for them, once its forward pass is under way. What follows from the tokens of a step (states
of verify runs, drafts of the model's own head) is launched when they have arrived, before the next step.

``observer(plan, logits_XV)`` sees the raw logits of the sampling runs, in run order, before the sampler edits them;
``before_step(plan)`` runs before anything of the plan is applied. Both are for tests and evaluations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from weft.adapters import Adapter
from weft.config import Sizes
from weft.engine.stats import PARTS, Part
from weft.errors import CheckpointError, ConfigError, EngineUnavailableError
from weft.memory.frames.plan import ArenaPlan
from weft.models.adapters import LoadedAdapter, install, load_adapter, open_tables, remove
from weft.models.decoder import CausalModel
from weft.models.loading import LoadedModel
from weft.models.mtp import MtpHead
from weft.runner.arena import DeviceArena, warm
from weft.runner.batch import BatchBuilder, StepBatch
from weft.runner.graph_shapes import OUTSIDE, TOKENS_MAX, recorded_shapes
from weft.runner.graphs import Capture, pad_rows
from weft.runner.head_graphs import HeadGraphs
from weft.runner.kv_scales import Model, head_scales
from weft.runner.launched import LaunchedStep, ScoredPrompt, StepWorker
from weft.runner.mtp import HeadRunner
from weft.runner.pictures import picture_rows
from weft.runner.pooling import pool
from weft.runner.readback import Readback, step_words
from weft.runner.rows import rows_on
from weft.runner.sampler import Sampled, Sampler, score
from weft.runner.sleep import DroppedModel, HostWeights, give_back, storages_on_devices
from weft.runner.staging import Staging
from weft.runner.step_graphs import GraphSet, StepBlock, StepGraphs
from weft.runner.verify import SampledRows, choose, replay
from weft.schedule.plan import StepPlan, StepResult
from weft.spec import ModelSpec
from weft.tensor import gpu
from weft.tensor.device import current, is_remote, use
from weft.tensor.gpu.host_memory import PinnedRing, ring_for
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.layout import DTYPES
from weft.tensor.scratch import scratch

GRAPH = "graph"
"""Form of a step that a graph computes."""
_LINES_BYTES = 1 << 20
"""Bytes of the adapter address table, by which kernels find the factors."""
_log = logging.getLogger("weft")

Observer = Callable[[StepPlan, torch.Tensor], None]
BeforeStep = Callable[[StepPlan], None]


class MakeSampler(Protocol):
    def __call__(self, rows_max: int, vocab_size: int, device: torch.device) -> Sampler: ...


PROMPT_LOGITS_TOKENS = 128
"""Prompt positions whose logits exist at the same time, at most."""


class TorchExecutor:
    """One model on one device. ``kv_scales``: the checkpoint's, of layers that have some; used if KV is fp8, and
    measured for the other layers. ``reload`` reads the checkpoint again, after a sleep of level 2, in the directory
    that ``read_from`` named last. ``capture`` records steps as graphs, once ``record_graphs`` is called; None: no step
    is recorded. ``mixed_tokens_max``: most tokens of a recorded step with prompts; 0: none is recorded.
    ``verify_runs``, ``adapters``: steps with verify runs, or with rows of adapters, are recorded too. ``on_worker``:
    ``begin`` launches steps ahead, on a thread; False: the caller's thread launches all steps. ``pad_decode_to``: see
    ``weft.runner.batch.BatchBuilder``. ``sampler`` makes the sampler; with several ranks each rank has a special one.
    Not thread-safe: one step at a time.
    """

    def __init__(
        self,
        model: Model,
        arena_plan: ArenaPlan,
        sizes: Sizes,
        *,
        kv_scales: Mapping[int, torch.Tensor] | None = None,
        reload: Callable[[], LoadedModel] | None = None,
        read_from: Callable[[str], None] | None = None,
        device: torch.device | None = None,
        capture: Capture | None = None,
        mixed_tokens_max: int = TOKENS_MAX,
        verify_runs: bool = False,
        adapters: bool = False,
        pad_decode_to: int = 0,
        observer: Observer | None = None,
        before_step: BeforeStep | None = None,
        on_worker: bool = True,
        sampler: MakeSampler = Sampler,
    ) -> None:
        device = scratch.device = device or torch.device("cpu")
        self.model = model
        self.arena = DeviceArena(arena_plan, device)
        self._reload, self._read_from = reload, read_from
        self._kv_scales = kv_scales or {}
        self._missing: set[Part] = set()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._adapts = adapters
        self.steps_by_form = dict.fromkeys((GRAPH, *OUTSIDE), 0)
        """Steps that graphs computed, and those launched from Python by the reason, on a device with graphs."""
        self._on_host: HostWeights | None = None
        self._caches = self._lay_out(device)
        self._head: HeadRunner | None = None
        self._on_worker = on_worker
        rows = rows_on(
            device,
            rows_max=sizes.rows_max,
            pages_max=arena_plan.pages_for(sizes.max_model_len),
            step_tokens_max=sizes.step_tokens_max,
        )
        self.batches = BatchBuilder(rows, step_tokens_max=sizes.step_tokens_max, pad_decode_to=pad_decode_to)
        self.pictures = self.batches.pictures = picture_rows(model, device, sizes.rows_max)
        self.graphs = (
            None
            if capture is None
            else StepGraphs(
                rows.table,
                rows.chosen,
                recorded_shapes(
                    sizes.rows_max,
                    # The lists of a step with prompts change with every step.
                    0 if capture.reads_host else min(sizes.step_tokens_max, mixed_tokens_max),
                    verify_runs=verify_runs,
                    picture_fields=0 if self.pictures is None else self.pictures.fields,
                ),
                capture,
                self.pictures,
            )
        )
        self.sampler = sampler(sizes.rows_max, model.spec.vocab_size, device)
        with current(device):
            self.sampler.warm()
            if device.type == "cuda":
                warm(self.arena)
        self._readback = Readback(device, step_words(sizes.rows_max))
        self._verify_tables = Staging(device)
        self._adapter_lines: Staging | None = None
        self._ring: PinnedRing | None = None
        """Pinned memory through which adapters reach a GPU, from the first one on."""
        self._keeps_room = not is_remote(device)
        self._room: LogitsRoom | None = None
        self._inference = torch.inference_mode()
        self._on_device = current(device)
        self._before: LaunchedStep | None = None
        self.observer = observer
        self.before_step = before_step
        self._bind_head()
        if adapters:
            self._make_adapter_room()
        self._worker = StepWorker(self._launch, prepare=lambda: use(device))

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the step of ``plan`` on the caller's thread and return its result."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch the step of ``plan`` on the caller's thread, and do not wait for it."""
        assert not self._worker.in_flight, "a step is in flight"
        if self.pictures is not None:
            self.pictures.begun(plan.step)
        with self._on_device:
            return self._launch(plan)

    def begin(self, plan: StepPlan) -> None:
        """Begin the step of ``plan`` on the executor's own thread."""
        if self.pictures is not None:
            self.pictures.begun(plan.step)
        self._worker.begin(plan)

    def finish(self) -> StepResult:
        return self._worker.finish()

    def transfers_done(self, step: int) -> bool:
        return self.arena.transfers_done(step)

    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Read an adapter, in any thread. Raises CheckpointError, see ``weft.models.adapters``."""
        assert isinstance(self.model, CausalModel), "an engine that sleeps loads no adapter"
        self._make_adapter_room()
        with current(self.arena.device):
            return load_adapter(adapter, self.model, self._ring)

    def _make_adapter_room(self) -> None:
        """Pin the memory through which adapters reach a GPU."""
        if self._adapter_lines is None:
            self._ring = ring_for(self.arena.device, least_bytes=0)
            self._adapter_lines = Staging(self.arena.device, _LINES_BYTES)

    def install_adapter(self, loaded: LoadedAdapter) -> None:
        """Install the adapter, between two steps: rows of its digest may come from now on."""
        assert isinstance(self.model, CausalModel)
        with current(self.arena.device), torch.inference_mode():
            install(self.model, loaded, self._send_lines)
        self._adapters[loaded.adapter.digest] = loaded

    def _send_lines(self, lines: npt.NDArray[np.int64]) -> torch.Tensor:
        assert self._adapter_lines is not None
        self._adapter_lines.begin()
        piece = self._adapter_lines.add(lines)
        self._adapter_lines.send()
        return piece.device

    def remove_adapter(self, loaded: LoadedAdapter) -> None:
        """Remove the adapter, between two steps, once no row of it comes any more."""
        self._adapters.pop(loaded.adapter.digest, None)
        if isinstance(self.model, CausalModel):
            remove(self.model, loaded)

    def change_adapter(self, adapter: Adapter, forget: bool) -> None:
        """Install or forget an adapter on a rank that follows rank 0."""
        if not forget:
            self.install_adapter(self.read_adapter(adapter))
        elif adapter.digest in self._adapters:
            self.remove_adapter(self._adapters[adapter.digest])

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with self._inference:
            return self._launched(plan)

    def _launched(self, plan: StepPlan) -> LaunchedStep:
        began_s = time.perf_counter()
        before, self._before = self._before, None
        if before is not None and before.continues:
            before.result()
        if self.before_step is not None:
            self.before_step(plan)
        if self._head is not None:
            self._head.admit(plan)
        self.batches.apply(plan, self.sampler, self.arena)
        if not plan.run_count:
            self.batches.store(self.arena)
            return LaunchedStep(began_s, 0, self._readback.send([]))
        batch = self.batches.build(plan)
        if self.graphs is not None:
            self.steps_by_form[batch.launched or GRAPH] += 1
        needs_previous_token = self.sampler.needs_previous_token(batch.sample_rows)
        if needs_previous_token and not plan.verify_count and (before is None or before.arrived):
            if before is not None:
                before.result()
            self.sampler.begin(batch.sample_rows)
        if plan.verify_count and before is not None:
            before.result()
        hidden = self._forward(batch.inputs)
        self._before = self._verified(plan, batch, hidden, began_s) if plan.verify_count else None
        if self._before is not None:
            return self._before
        prompts, scores = self._score_prompts(plan, batch, hidden)
        choice = None
        if batch.sample_runs.size:
            room = self._logits_room(len(batch.sample_runs))
            logits_XV = self._sampled_logits(plan, batch, hidden, room)
            if needs_previous_token and before is not None:
                before.result()
            host_XV = room.host_XV if room is not None and logits_XV is room.logits_XV else None
            choice = self.sampler.launch(logits_XV, batch.sample_rows, batch.sample_positions, host_XV)
            self.batches.note_chosen(batch, choice)
        self.batches.store(self.arena)

        def drafted(result: StepResult, sampled: Sampled | None) -> StepResult:
            with torch.inference_mode(), current(self.arena.device):
                return self._drafted(plan, batch, hidden, result)

        self._before = LaunchedStep(
            began_s,
            plan.run_count,
            self._readback.send(scores) if choice is None else choice.sent(self._readback, scores),
            choice,
            batch.sample_runs,
            prompts,
            plan.pooled_runs,
            None if plan.mtp_drafts is None else drafted,
        )
        return self._before

    def _sampled_logits(
        self, plan: StepPlan, batch: StepBatch, hidden_TD: torch.Tensor, room: LogitsRoom | None
    ) -> torch.Tensor:
        logits_XV = self.model.logits(batch.sampled_of(hidden_TD), room.logits_XV if room else None)
        if self.observer is not None:
            self.observer(plan, logits_XV)
        return logits_XV

    def _drafted(self, plan: StepPlan, batch: StepBatch, hidden_TD: torch.Tensor, result: StepResult) -> StepResult:
        """Return ``result`` with the drafts of the model's own head, which are launched, if there is one."""
        if self._head is None or plan.mtp_drafts is None:
            return result
        if isinstance(self.model, CausalModel) and self.model.streams_TN is not None:
            hidden_TD = self.model.streams_TN
        return replace(result, head=self._head.run(plan, _step_inputs(batch), hidden_TD, result).result)

    def _verified(self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, began_s: float) -> LaunchedStep:
        """Launch the choice of a step with verify runs. The states follow from the tokens, and so do drafts: that is
        the rest of the step."""
        logits_XV = self._sampled_logits(plan, batch, hidden, self._logits_room(len(batch.sample_runs)))
        rows = SampledRows(batch.sample_runs, batch.sample_rows, batch.sample_positions)
        prompts, scores = self._score_prompts(plan, batch, hidden)
        apart = self.sampler.chooses_apart(rows.rows)
        choice = self.sampler.launch(logits_XV, rows.rows, rows.positions) if apart else None

        def accepted(result: StepResult, sampled: Sampled | None) -> StepResult:
            with torch.inference_mode(), current(self.arena.device):
                chosen = choose(self.sampler, logits_XV, rows, plan, self._verify_tables, sampled)
                self._replay(plan, batch, [len(tokens) for tokens in chosen.by_run.values()])
                self.batches.store(self.arena)
                verified = replace(
                    result,
                    tokens=chosen.tokens,
                    logprobs=chosen.logprobs,
                    device_s=time.perf_counter() - began_s,
                    failures=chosen.failures,
                    verified=chosen.by_run,
                    verified_logprobs=chosen.verified_logprobs,
                )
                return self._drafted(plan, batch, hidden, verified)

        pending = self._readback.send(scores) if choice is None else choice.sent(self._readback, scores)
        return LaunchedStep(
            began_s, plan.run_count, pending, choice, prompts=prompts, pooled_runs=plan.pooled_runs, then=accepted
        )

    def _replay(self, plan: StepPlan, batch: StepBatch, right: list[int]) -> None:
        """Replay the states of the verify runs of ``plan`` after the ``right`` tokens of each."""
        if isinstance(batch.inputs, StepBlock):
            assert self.graphs is not None
            verified = slice(plan.verify_runs.start, plan.verify_runs.stop)
            self.graphs.replay_states(
                batch.inputs,
                plan.starts[verified].tolist(),
                plan.lengths[verified].tolist(),
                right,
                plan.slots[verified].tolist(),
            )
        else:
            replay(batch.inputs.runs, right, self._verify_tables)

    def _bind_head(self) -> None:
        if isinstance(self.model, CausalModel) and gpu.reaches(self.arena.device):
            self.batches.active = self.model.adapters
            if self._adapts:
                open_tables(self.model)
        head = getattr(self.model, "mtp", None)
        if isinstance(head, MtpHead):
            rows = self.batches.rows
            assert isinstance(self.model, CausalModel)
            cache, *index = self._caches[len(self.model.architecture.spec().layers) :]
            cache = replace(cache, index=index[0] if index else None)
            graphs = (
                None
                if self.graphs is None
                else HeadGraphs(
                    head, self.graphs, [cache], len(rows.table) - 1, DTYPES[self.model.spec.dtype], self.arena.device
                )
            )
            self._head = HeadRunner(
                head,
                rows.table,
                cache,
                self.arena.plan.pages_per_frame,
                self.pictures,
                rows.staging.capacity_bytes,
                graphs,
            )

    def _forward(self, inputs: StepInputs | StepBlock) -> torch.Tensor:
        if isinstance(self.model, CausalModel):
            # A replay calls no ``forward`` that would name the adapters of the head's rows.
            self.model.adapters.step = inputs.adapters
        if isinstance(inputs, StepBlock):
            assert self.graphs is not None
            return self.graphs.replay(inputs)
        scratch.device = self.arena.device
        return self.model.forward(inputs, self._caches)

    def _logits_room(self, rows: int) -> LogitsRoom | None:
        if not self._keeps_room:
            return None
        if self._room is None or self._room.rows < rows:
            self._room = LogitsRoom.of(rows, self.model.spec.vocab_size)
        return self._room.first(rows)

    def record_graphs(self) -> str | None:
        """Record steps, if a ``Capture`` was given; then drafts of the model's own head, and the steps again for rows
        of adapters, which may come later. From then on steps are padded to the recorded sizes. Return the sizes without
        a graph and the reason; None if all are recorded or none was asked for.
        """
        graphs = self.graphs
        if graphs is None:
            return None
        self._forget_graphs()
        scratch.device = self.arena.device
        sets = [GraphSet("base", graphs.shapes, self.model.forward, self._caches)]
        if self._head is not None and self._head.graphs is not None:
            sets.append(self._head.graphs.drafting)
        if self._adapts and self.batches.active is not None:
            sets.append(replace(sets[0], name="adapted"))
        with current(self.arena.device):
            graphs.record(*sets)
        self.batches.shapes, self.batches.adapted_shapes = graphs.recorded(), graphs.recorded("adapted")
        return graphs.refused_in_words()

    def warm(self) -> None:
        """Do work on a GPU that the first steps would otherwise wait for. Libraries have a handle and a workspace for
        each thread, and the first replay of a graph brings it to the device.
        """
        if self.arena.device.type == "cuda" and self._on_worker:
            self._worker.call(self._warm)
        elif self.arena.device.type == "cuda":
            with self._on_device:
                self._warm()

    @torch.inference_mode()
    def _warm(self) -> None:
        if self.graphs is not None:
            self.graphs.warm()
        self.model.logits(self._forward(pad_rows(1, self.batches.rows.table.shape[1], self.arena.device)))
        self._readback.send([]).open()

    def _lay_out(self, device: torch.device) -> list[LayerCache]:
        """Return the views of every layer into the arena; in fp8 with the scales of the present model."""
        caches = self.arena.layer_caches(len(self.model.spec.layers))
        if self.arena.plan.kv_dtype == "float8_e4m3":
            with current(device):
                scales_by_layer = head_scales(self.model, self._kv_scales, device)
            for layer, scales in scales_by_layer.items():
                caches[layer].head_scales = scales.to(device, DTYPES[self.model.spec.dtype])
        return caches

    @property
    def fp8_scales(self) -> list[list[list[float]]]:
        """Return [layer][K and V][kv_head], of the layers with keys; empty if KV is not fp8."""
        return [cache.head_scales.tolist() for cache in self._caches if cache.head_scales is not None]

    def sleep(self, level: int) -> tuple[Part, ...]:
        """Put weights and arena to sleep. Raises ConfigError for level 2 if there is no checkpoint to read again."""
        device = self.arena.device
        if level == 2 and self._reload is None:
            raise ConfigError(
                "this engine was made from a model in memory: there is no checkpoint to read "
                "again, so level 2 is not possible; level 1 is",
                param="level",
            )
        self._worker.rest()
        self._before = None
        self._forget_graphs()
        self._caches, self._head = [], None
        self._room = None
        self.arena.release()
        if self.pictures is not None:
            self.pictures.release(weights=level == 2)
        if level == 2:
            if self._on_host is not None:
                self._on_host.drop()
            self.model, self._on_host = DroppedModel(self.model.spec), None
            self._adapters.clear()
        elif "weights" not in self._missing:
            copies = HostWeights(storages_on_devices(self.model))
            self._on_host = copies if copies.bytes else None
        weights_stay = self._on_host is None and not isinstance(self.model, DroppedModel)
        missing: tuple[Part, ...] = ("kv_cache",) if weights_stay else PARTS
        self._missing = set(missing)
        give_back(device)
        return missing

    def read_from(self, directory: str) -> None:
        assert self._read_from is not None, "this engine was made from a model in memory"
        self._read_from(directory)

    def wake(self, part: Part) -> None:
        """Wake ``part``. Raises as ``load_model``; CheckpointError if the checkpoint has other shapes now;
        EngineUnavailableError if the device has not enough memory.
        """
        try:
            if part == "kv_cache":
                self.arena.allocate()
            elif self._on_host is not None:
                self._on_host.restore()
                self._on_host = None
                for loaded in self._adapters.values():  # their factors have other addresses now
                    self.install_adapter(loaded)
            elif isinstance(self.model, DroppedModel):
                self._read_again(self.model.spec)
        except RuntimeError as error:
            raise EngineUnavailableError(f"the engine cannot wake, and is still asleep: {error}") from error
        self._missing.discard(part)
        if not self._missing:
            self._caches = self._lay_out(self.arena.device)
            self._bind_head()
            refused = self.record_graphs()
            self.warm()
            if refused is not None:
                _log.warning("after waking, some steps run without a CUDA graph and are slower: %s", refused)

    def _forget_graphs(self) -> None:
        """Drop the graphs, which keep addresses in the arena and in the weights."""
        self.batches.shapes = self.batches.adapted_shapes = ()
        if self.graphs is not None:
            self.graphs.forget()

    def _read_again(self, spec: ModelSpec) -> None:
        assert self._reload is not None
        loaded = self._reload()
        if loaded.spec != spec:
            raise CheckpointError(
                "the checkpoint has changed while the engine slept: its layers, sizes or "
                "dtype differ now. Put the old checkpoint back, or restart the engine",
                param="model",
            )
        self.model, self._kv_scales = loaded.model, loaded.kv_scales
        if self.pictures is not None:
            self.pictures.vision = loaded.model.vision

    def close(self) -> None:
        """Free the arena, once no step is computed any more. Idempotent; no step may follow."""
        self._worker.close()
        self._forget_graphs()
        self._caches, self._head = [], None
        self._room = None
        self.sampler.close()
        if self._ring is not None:
            self._ring.close()
        self.arena.release()

    def _score_prompts(
        self, plan: StepPlan, batch: StepBatch, hidden_TD: torch.Tensor
    ) -> tuple[tuple[ScoredPrompt, ...], list[torch.Tensor]]:
        """Return prompt logprobs, and the device tensors to read back: theirs, then those of pooled rows."""
        prompts, pieces = [], []
        digests = self.batches.adapters_of(plan) if batch.prompt_spans else []
        for span in batch.prompt_spans:
            cuts = range(0, len(span.next_tokens_N), PROMPT_LOGITS_TOKENS)
            for begin in cuts:
                following_N = span.next_tokens_N[begin : begin + PROMPT_LOGITS_TOKENS]
                first = span.first + begin
                rows_ND = hidden_TD[first : first + len(following_N)]
                with self._only(digests[span.run], len(rows_ND)):
                    logits_NV = self.model.logits(rows_ND)
                pieces += score(logits_NV, following_N, span.top_count)
            prompts.append(ScoredPrompt(span.run, span.top_count, len(cuts)))
        if batch.pooled_spans:
            pieces += pool(self.model, batch.pooled_spans, hidden_TD)
        return tuple(prompts), pieces

    def _only(self, digest: str, rows: int) -> AbstractContextManager[None]:
        """Return a context in which all rows of the head are of one adapter, or of none."""
        if not isinstance(self.model, CausalModel):
            return nullcontext()
        return self.model.adapters.only(digest, rows)


def _step_inputs(batch: StepBatch) -> StepInputs:
    """Return inputs for the model's own head, which is launched from Python."""
    inputs = batch.inputs if batch.head_inputs is None else batch.head_inputs
    assert isinstance(inputs, StepInputs)
    return inputs


@dataclass(slots=True)
class LogitsRoom:
    """Memory for the logits of a step, float32 [rows, vocab], which all steps on a CPU reuse: the page faults of new
    memory take longer than writing the logits. A GPU's allocator reuses blocks. ``host_XV``: the same memory.
    """

    rows: int
    logits_XV: torch.Tensor
    host_XV: npt.NDArray[np.float32]
    _first: LogitsRoom | None = None
    """The last view of fewer rows: steps ask for the same number again and again, and views cost them 40 us."""

    @staticmethod
    def of(rows: int, vocab_size: int) -> LogitsRoom:
        logits_XV = torch.empty((rows, vocab_size))
        return LogitsRoom(rows, logits_XV, logits_XV.numpy())

    def first(self, rows: int) -> LogitsRoom:
        if rows == self.rows:
            return self
        if self._first is None or self._first.rows != rows:
            self._first = LogitsRoom(rows, self.logits_XV[:rows], self.host_XV[:rows])
        return self._first
