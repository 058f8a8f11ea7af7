"""What the engine-level oracle suite stands on: the truth by transformers, and an engine that is watched.

``truth(family)``: for prompts of 1, 5, 37, 300 and 900 tokens, the 64 greedy tokens that transformers makes
and the logits it chose each of them from. Computed once per session and family, in float64.

``Serving``: the real EngineCore, Scheduler, Memory and TorchExecutor on the same checkpoint, with
  * every logits row that chose a token kept, by (sequence, position),
  * the arena full of NaN before the first step, every page and slot that becomes free (with its sequence, or
    evicted from the cache, or as what was in it moved away) filled with NaN again at that moment, and NaN
    instead of zeros in frames that change kind: what reads a byte that nobody wrote for it shows it,
  * a hook between steps, to break things on purpose.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.fixtures.checkpoints import FAMILIES, checkpoint, load_exact_reference, make_checkpoint
from tests.fixtures.far_memory import far_memory
from tests.oracle.model_driver import ModelDriver
from tests.support.arena_fills import fill_frames, fill_pages, fill_slots
from weft.assemble.room import cache_dtypes
from weft.config import EngineConfig, KvDTypeChoice, StateDTypeChoice
from weft.costs.restore import RestorePrices
from weft.engine.engine import EngineCore
from weft.memory.frames.plan import ArenaPlan, fit_sizes, plan_arena, with_compressed_kv, with_compression
from weft.memory.memory import Memory
from weft.memory.prefix.policies import make_policy
from weft.memory.prefix.policy import PrefillCost
from weft.memory.prefix_store import Store, TransferBuffers
from weft.models.loading import LoadedModel, load_model
from weft.request import PlacedPicture, Request, SamplingParams, TokenEvent, TokenLogprobs
from weft.runner.arena import NAN_BYTE, DeviceArena
from weft.runner.graphs import Capture
from weft.runner.sampler import Sampler
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.plan import StepPlan
from weft.schedule.snapshots import parse_snapshots
from weft.schedule.store_tier import StoreTier
from weft.spec import CompressedKvName
from weft.speculation.drafter import Drafter
from weft.tensor import gpu, native
from weft.units import CHUNK_TOKENS, pages_for

DEVICE = torch.device(os.environ.get("WEFT_TEST_DEVICE", "cpu"))
"""``make test-gpu`` names another one."""
RECURRENT_FAMILIES = tuple(family for family in FAMILIES if family != "qwen3")
PROMPT_LENGTHS = (1, 5, 37, 300, 900)
DECODE_STEPS = 64
TOLERANCE = 1e-4
_MARGIN_MIN = 2e-3
"""A greedy choice closer than this between its two best tokens proves nothing about either side."""


@dataclass(frozen=True)
class Truth:
    """``tokens`` [steps] and the ``logits`` [steps, vocab] they were chosen from; ``prompt_logits``
    [prompt, vocab]."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    prompt_logits: torch.Tensor


@functools.cache
def _temporary() -> str:
    path = tempfile.mkdtemp(prefix="weft-oracle-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def directory(family: str) -> Path:
    if family != "granite_moe":
        return checkpoint(family)
    # logits as wide as those of the others: 1e-4 asks the same of all
    return make_checkpoint(Path(_temporary()), family, logits_scaling=1.0)


def loaded(family: str) -> LoadedModel:
    """In the forms that the kernels of this moment read: a tile of the C++ kernels is no matrix of torch."""
    return _loaded(family, native.in_use())


@functools.cache
def _loaded(family: str, native_kernels: bool) -> LoadedModel:
    return load_model(directory(family), device=DEVICE)


@functools.cache
def truth(family: str) -> tuple[Truth, ...]:
    model = load_exact_reference(directory(family))
    generator = torch.Generator().manual_seed(len(family))
    found = []
    for length in PROMPT_LENGTHS:
        for _ in range(20):
            one = _greedy(family, model, torch.randint(3, 500, (length,), generator=generator).tolist())
            if one is not None:
                break
        else:
            raise AssertionError(f"{family}: no prompt of {length} tokens whose choices are clear")
        found.append(one)
    spread = {token for one in found for token in one.tokens}
    assert len(spread) > 50, f"{family} says only {len(spread)} different tokens: equal tokens prove little"
    return tuple(found)


@torch.inference_mode()
def _greedy(family: str, model: transformers.PreTrainedModel, prompt: list[int]) -> Truth | None:
    """None if a choice is not clear. weft proposes the tokens. One forward of transformers over prompt and
    proposal has the logits before each of them: if it chooses every one, it would have made the same text."""
    driver = ModelDriver(loaded(family).model, sequences=1, length=len(prompt) + DECODE_STEPS)
    [row] = driver.step((0, prompt))
    tokens = [int(row[-1].argmax())]
    while len(tokens) < DECODE_STEPS:
        [row] = driver.step((0, tokens[-1:]))
        tokens.append(int(row[-1].argmax()))
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0].float()
    rows = logits[len(prompt) - 1 :]
    if not all(map(_is_clear, rows)):
        return None
    assert rows.argmax(-1).tolist() == tokens, f"{family}: transformers chooses other tokens"
    return Truth(prompt, tokens, rows, logits[: len(prompt)])


def _is_clear(logits_V: torch.Tensor) -> bool:
    first, second = logits_V.topk(2).values.tolist()
    return first - second > _MARGIN_MIN


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    preemptions: int = 0
    cached_tokens: int = 0


GREEDY = SamplingParams(temperature=0.0, max_tokens=DECODE_STEPS, ignore_eos=True)
Break = Callable[["Serving", StepPlan], None]


class Serving:
    """An engine on ``family``. ``memory_bytes``: the arena; ``step_tokens``: the token budget of a step;
    ``pad_decode_to``: PAD rows; ``before_step(serving, plan)``: called before a plan is applied; ``cache``:
    whether prefixes are kept, with states where ``snapshots`` says, and which go first, by ``policy``; with
    ``compress`` they may be compressed, though these models are too small to gain by it; KV with
    ``compress_kv``.
    With ``overlap`` the next step is planned while one is computed on another thread: ``before_step`` is
    called there. ``capture``: steps of decodes alone go the way of graphs. ``remote``: the host looks
    at nothing of a step but what comes home, also on a CPU. ``grid_tokens``: where states are kept.
    ``model``: another one than the family's own. ``store``: prefixes beyond memory. ``drafter``: where
    verify runs get their drafts."""

    def __init__(
        self,
        family: str,
        *,
        memory_bytes: int = 4 << 20,
        step_tokens: int = 1024,
        pad_decode_to: int = 0,
        before_step: Break | None = None,
        max_model_len: int = 1024,
        max_num_seqs: int = 16,
        cache: bool = False,
        snapshots: str = "auto",
        kv_dtype: KvDTypeChoice = "auto",
        state_dtype: StateDTypeChoice = "float32",
        policy: str = "value",
        compress: bool = False,
        compress_kv: CompressedKvName | None = None,
        overlap: bool = False,
        capture: Capture | None = None,
        remote: bool = False,
        grid_tokens: int = CHUNK_TOKENS,
        model: LoadedModel | None = None,
        store: Callable[[Serving], Store] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        model = model or loaded(family)
        config = EngineConfig(
            max_num_batched_tokens=step_tokens,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
        )
        spec, kept_kv = cache_dtypes(config, model.spec)
        self.arena: ArenaPlan = plan_arena(spec, memory_bytes, kv_dtype=kept_kv, kv_layout=gpu.page_layout(DEVICE))
        if compress:
            self.arena = with_compression(self.arena, spec)
        if compress_kv is not None:
            self.arena = with_compressed_kv(self.arena, compress_kv)
        sizes = replace(fit_sizes(config, spec, self.arena), grid_tokens=grid_tokens)
        clock = count(0.0).__next__  # a second for each look at it: ages differ, and are the same every time
        with far_memory(remote):
            self.executor = TorchExecutor(
                model.model,
                self.arena,
                sizes,
                pad_decode_to=pad_decode_to,
                device=DEVICE,
                capture=capture,
                observer=self._observe,
                before_step=self._before_step,
            )
        if capture is not None:
            assert self.executor.record_graphs() is None
        memory = Memory(self.arena, cache=cache, policy=make_policy(policy, self.arena, PrefillCost(), clock))
        tier = None
        if store is not None:
            buffers = TransferBuffers(self.arena.page_bytes, self.arena.slot_bytes, limit_bytes=32 << 20)
            with far_memory(remote):
                self.executor.arena.attach(buffers)
            tier = StoreTier(store(self), memory, buffers, RestorePrices(1.0), lambda: 0.0, exact=not compress)
        self.core = EngineCore(
            vocab_size=model.spec.vocab_size,
            sizes=sizes,
            memory=memory,
            store=tier,
            pause=time.sleep,
            snapshots=parse_snapshots(snapshots),
            executor=self.executor,
            clock=lambda: 0.0,
            seed=0,
            overlap=overlap,
            drafter=drafter,
            encoder=self.executor.pictures,
            pictures_bytes=1 << 20,
            eos_ids=model.generation_defaults.eos_ids,
        )
        self.plans: list[StepPlan] = []
        self._break = before_step
        self._rows_of_logits: dict[tuple[int, int], torch.Tensor] = {}
        self.slot_of_row: dict[int, int] = {}
        self.pages_of_row: dict[int, list[int]] = {}
        self._rounds = 0
        self._held: tuple[set[int], set[int]] = (set(), set())
        self._held_after: dict[int, tuple[set[int], set[int]]] = {}
        self._left: tuple[list[int], list[int]] = ([], [])
        begin = self.executor.begin

        def beginning(plan: StepPlan) -> None:
            self._held_after[plan.step] = self._held_now()  # by the time it is computed it may be otherwise
            begin(plan)

        self.executor.begin = beginning  # type: ignore[method-assign]
        frames = self.executor.arena
        fill_frames(frames, range(self.arena.frame_count), NAN_BYTE)
        frames.zero_frames = lambda which: fill_frames(frames, which, NAN_BYTE)  # type: ignore[method-assign]
        apply = self.executor.batches.apply

        def applying(plan: StepPlan, sampler: Sampler, arena: DeviceArena) -> None:
            apply(plan, sampler, arena)
            fill_slots(frames, self._left[1], NAN_BYTE)
            fill_pages(frames, self._left[0], NAN_BYTE)

        self.executor.batches.apply = applying  # type: ignore[method-assign]

    def run(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        stagger_steps: int = 0,
        priorities: Sequence[int] | None = None,
        boundaries: Sequence[int] = (),
        salt: str = "",
        predictions: Sequence[list[int]] = (),
        pictures: Sequence[list[PlacedPicture]] = (),
    ) -> list[Answer]:
        """Answers to ``prompts`` (n = 1 each), one submitted every ``stagger_steps`` steps."""
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        self._rounds += 1
        answers = {f"{self._rounds}-{i}": Answer() for i in range(len(prompts))}
        left = list(enumerate(prompts))
        seqs: list[int] = []
        steps = 0
        while left or self.core.has_work:
            while left and steps >= stagger_steps * left[0][0]:
                number, prompt = left.pop(0)
                priority = priorities[number] if priorities else 0
                request = Request(
                    request_id=f"{self._rounds}-{number}",
                    prompt_tokens=prompt,
                    sampling=samplings[number],
                    priority=priority,
                    cache_salt=salt,
                    boundaries=list(boundaries),
                    prediction=predictions[number] if predictions else [],
                    pictures=pictures[number] if pictures else [],
                )
                self.core.submit(request)
                seqs.append(self.core.streams.by_request[request.request_id][0])
            for event in self.core.step():
                if event.request_id in answers:
                    _note(answers[event.request_id], event)
            if self.core.failure is not None:
                raise self.core.failure
            steps += 1
        self.core.audit()
        for seq, prompt, answer in zip(seqs, prompts, answers.values(), strict=True):
            rows = [self._rows_of_logits[seq, len(prompt) + i] for i in range(len(answer.tokens))]
            answer.logits = torch.stack(rows) if rows else answer.logits
        return list(answers.values())

    def _observe(self, plan: StepPlan, logits_XV: torch.Tensor) -> None:
        rows = iter(logits_XV)
        for run in np.flatnonzero(plan.samples):
            end = int(plan.starts[run] + plan.lengths[run])
            # A row behind a wrong draft is seen too; a later step sees its position again.
            for position in range(int(plan.starts[run]) + 1 if run in plan.verify_runs else end, end + 1):
                self._rows_of_logits[int(plan.seqs[run]), position] = next(rows).clone().cpu()

    def _before_step(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        for row in plan.rows_cleared:
            self.pages_of_row.pop(row, None)
            self.slot_of_row.pop(row, None)
        moves = plan.reservation.moves
        work = plan.arena_work
        left_slots = [copy.src for copy in moves.slots] + [one.slot for one in work.state_compressions]
        left_pages = [page for one in work.kv_compressions for page in one.pages[one.compressed_count :]]
        self._left = [*left_pages, *(copy.src for copy in moves.pages)], left_slots
        self._spoil_what_is_free(self._held_after.pop(plan.step, None) or self._held_now())
        self.slot_of_row.update(zip(plan.rows.tolist(), plan.slots.tolist(), strict=True))
        for row, _, page in plan.table_writes.T.tolist():
            self.pages_of_row.setdefault(row, []).append(page)
        if self._break is not None:
            self._break(self, plan)

    def _held_now(self) -> tuple[set[int], set[int]]:
        memory = self.core.memory._state
        pages, slots = (
            {item for item, count in enumerate(kind.owners) if count} for kind in (memory.pages, memory.slots)
        )
        return pages, slots

    def _spoil_what_is_free(self, held: tuple[set[int], set[int]]) -> None:
        pages, slots = held
        fill_pages(self.executor.arena, sorted(self._held[0] - pages - {*self._left[0]}), NAN_BYTE)
        fill_slots(self.executor.arena, sorted(self._held[1] - slots - {*self._left[1]}), NAN_BYTE)
        self._held = pages, slots


def _note(answer: Answer, event: TokenEvent) -> None:
    answer.tokens += event.tokens
    answer.logprobs += event.logprobs or []
    answer.prompt_logprobs += event.prompt_logprobs or []
    answer.finish_reason = event.finish_reason
    answer.preemptions = event.preemptions
    answer.cached_tokens = event.cached_tokens


def tight_memory(family: str, *, spare_pages: int) -> int:
    """Bytes in which the longest prompt fits with its answer, beside slots for all, and little more."""
    spec = loaded(family).spec
    arena = plan_arena(spec, 1 << 20)
    pages = pages_for(max(PROMPT_LENGTHS) + DECODE_STEPS) + spare_pages
    frames = -(-pages // arena.pages_per_frame)
    if arena.slots_per_frame:
        frames += -(-len(PROMPT_LENGTHS) // arena.slots_per_frame)
    return frames * arena.frame_bytes


def distance(answer: Answer, one: Truth) -> float:
    """Largest difference of any logit at any of the steps; infinite where it is NaN or steps are missing."""
    steps = len(one.tokens)
    if answer.logits.shape[0] < steps:
        return float("inf")
    gap = (answer.logits[:steps] - one.logits).abs().max()
    return float("inf") if gap.isnan() else float(gap)


def assert_equal_to_truth(answers: Sequence[Answer], truths: Sequence[Truth]) -> None:
    for answer, one in zip(answers, truths, strict=True):
        assert answer.tokens == one.tokens, f"prompt of {len(one.prompt)} tokens"
        gap = distance(answer, one)
        assert gap < TOLERANCE, f"prompt of {len(one.prompt)} tokens: logits differ by {gap}"
