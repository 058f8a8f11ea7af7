"""Reported failures of memory, its tiers and its owners in other engines, as classes: each by name, each with a
mutant (see ``reported`` and ``test_reported_state_failures``). Numbers in docstrings are public threads.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.fixtures.checkpoint_families_attention import MORE_FAMILIES
from tests.fixtures.checkpoint_families_mamba import MAMBA_FAMILIES
from tests.fixtures.checkpoints import FAMILIES, checkpoint
from tests.fixtures.memory_store import Contents, MemoryStore
from tests.fixtures.mtp_heads import HEADS, with_head
from tests.oracle.reported import are_same, happened, is_noticed, is_same
from tests.oracle.serving import Serving
from tests.oracle.test_engine_prefix_cache import cold, text
from tests.oracle.test_pictures import SAMPLING as OF_PICTURES
from tests.oracle.test_pictures import cases
from tests.oracle.test_vision import loaded as seeing_model
from tests.support.refused_growth import refuse_growth
from tests.support.scripted import hashed_token, reference_tokens
from tests.unit.engine.rig import VOCAB_SIZE, Rig
from weft.engine.engine import EngineCore
from weft.errors import RequestError
from weft.memory import state as memory_state
from weft.memory.arena_work import WorkKind
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.memory.prefix.cache import Freed
from weft.memory.prefix_store import StoreEvent, TransferBuffers
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.models.loading import load_model
from weft.request import Request, SamplingParams
from weft.runner.arena import DeviceArena
from weft.runner.launched import LaunchedStep
from weft.runner.transfers import HostTransfers
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.restores import Restores
from weft.schedule.store_writes import StoreWrites
from weft.spec import CacheDTypeName, ModelSpec
from weft.tensor.inputs import LayerCache

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CPU = torch.device("cpu")
EVERY_FAMILY = (*FAMILIES, *MORE_FAMILIES, *MAMBA_FAMILIES)

# ---------------------------------------------------------------------- a snapshot that lacks a part

KvDType = CacheDTypeName | None


@functools.cache
def specs(directory: Path) -> dict[str, ModelSpec]:
    """Every family, and every kind of draft head."""
    found = {name: load_model(checkpoint(name)).model.spec for name in EVERY_FAMILY}
    heads = {
        f"{name} with a head": load_model(with_head(directory / name, name), mtp=True).model.spec for name in HEADS
    }
    return found | heads


def parts_of(cache: LayerCache) -> dict[str, torch.Tensor]:
    """Views of one layer, by name: [pages or slots, ...]."""
    pages = {"k": cache.k, "v": cache.v, "scales": cache.token_scales}
    return {name: view for name, view in pages.items() if view is not None} | cache.state


def missing_parts(spec: ModelSpec, plan: ArenaPlan) -> list[str]:
    """Parts of ``spec`` that do not come back: from a snapshot in memory, or from one in a store."""
    caches: list[list[LayerCache]] = []
    arenas = [DeviceArena(plan, CPU) for _ in range(2)]
    buffers = TransferBuffers(plan.page_bytes, plan.slot_bytes, limit_bytes=1 << 24)
    for arena in arenas:
        arena.attach(buffers)
        caches.append(arena.layer_caches(len(spec.layers)))
    arenas[0].buffer.random_(1, 255)
    buffer = buffers.add(1)
    if plan.pages_per_frame:
        ids = np.array([[0, buffer, 0]])
        arenas[0].copy_pages([0], [1])
        arenas[0].perform(WorkKind.STORE_PAGES, ids)
        arenas[1].perform(WorkKind.LOAD_PAGES, ids)
    if plan.slots_per_frame:
        ids = np.array([[plan.slot_count - 1, buffer]])
        arenas[0].copy_slots([plan.slot_count - 1], [plan.slot_count - 2])
        arenas[0].perform(WorkKind.STORE_STATES, ids)
        arenas[1].perform(WorkKind.LOAD_STATES, ids)
    missing = []
    for number, layer in enumerate(spec.layers):
        views, stored = (parts_of(one[number]) for one in caches)
        wanted = {part.name for part in layer.state}
        wanted |= {"k"} if layer.kv_heads else set()
        wanted |= {"v"} if layer.kv_heads and layer.has_values else set()
        wanted |= {"scales"} if layer.kv_heads and plan.kv_dtype == "int8" else set()
        for name in wanted | set(views):
            held = name not in {part.name for part in layer.state}
            first, copy = (0, 1) if held else (-1, -2)
            if (
                name not in views
                or not same_bytes(views[name][first], views[name][copy])
                or not same_bytes(views[name][first], stored[name][first])
            ):
                missing.append(f"layer {number} {layer.kind}: {name}")
    return missing


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def two_of_each(spec: ModelSpec, kv_dtype: KvDType) -> ArenaPlan:
    least = plan_arena(spec, 1 << 24, kv_dtype=kv_dtype)
    return plan_arena(spec, 8 * least.frame_bytes, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_every_part_of_every_familys_memory_is_in_a_snapshot_and_in_a_store(
    kv_dtype: KvDType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """mesh-llm 1901, llama.cpp 27742, omlx 3294, vmlx-swift 465, sglang 39624, Rapid-MLX 2586: a snapshot lacks
    the index, the rows of n-grams or the draft head."""
    directory = tmp_path_factory.mktemp("heads")
    for name, spec in specs(directory).items():
        assert missing_parts(spec, two_of_each(spec, kv_dtype)) == [], name


def test_a_part_that_a_snapshot_or_a_store_leaves_out_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_model(checkpoint("qwen4_exp")).model.spec
    plan = two_of_each(spec, None)
    for left_out in plan.state_fields:
        fields = tuple(field for field in plan.state_fields if field is not left_out)
        assert missing_parts(spec, replace(plan, state_fields=fields))
    for kv in plan.kv_fields:
        assert missing_parts(spec, replace(plan, kv_fields=tuple(one for one in plan.kv_fields if one is not kv)))
    last = max(plan.state_fields, key=lambda field: field.offset_bytes)
    assert missing_parts(spec, replace(plan, slot_bytes=last.offset_bytes)), "a store that keeps less of a slot"
    copy_slots = DeviceArena.copy_slots
    monkeypatch.setattr(DeviceArena, "copy_slots", lambda self, sources, targets: None)
    assert missing_parts(spec, plan), "a snapshot that is not written"
    monkeypatch.setattr(DeviceArena, "copy_slots", copy_slots)
    assert not missing_parts(spec, plan)


def restart_answers_as_memory_does(family: str) -> bool:
    """A hit from a store in another engine has the bits of a hit in memory."""
    prompt = text(3, 100)
    before, kept = stored(family)
    before.run([prompt], SHORT)
    [warm] = before.run([prompt], SHORT)
    before.core.close()
    after, _ = stored(family, kept)
    [again] = after.run([prompt], SHORT)
    after.core.close()
    happened(again.cached_tokens == warm.cached_tokens > 0, f"{family}: no hit from the store")
    return is_same(again, warm)


def stored(
    family: str, kept: list[Contents] | None = None, fault: Callable[[], str | None] = lambda: None, **more: Any
) -> tuple[Serving, list[Contents]]:
    """An engine with a store over ``kept``."""
    kept = [] if kept is None else kept

    def store(one: Serving) -> MemoryStore:
        kept[:] = kept or [Contents(one.arena.page_bytes)]
        return MemoryStore(kept[0], fault=fault, delay=lambda: 3)

    return Serving(family, cache=True, store=store, **more), kept


def test_every_familys_prefix_from_a_store_has_the_bits_of_one_in_memory() -> None:
    differing = [family for family in EVERY_FAMILY if not restart_answers_as_memory_does(family)]
    assert differing == []


def test_a_part_that_is_not_loaded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, for each kind of state of a layer."""
    perform = HostTransfers.perform
    family = "qwen4_exp"
    parts = {part.name for layer in load_model(checkpoint(family)).model.spec.layers for part in layer.state}
    for left_out in sorted(parts):

        def without(self: HostTransfers, kind: WorkKind, ids: Any, left_out: str = left_out) -> None:
            perform(self, kind, ids)
            if kind is WorkKind.LOAD_STATES:
                plan = self._places._plan
                for field in plan.state_fields:
                    if field.name == left_out:
                        at = int(ids[0, 0]) * plan.slot_stride_bytes + field.offset_bytes
                        self._places._arena_B[at : at + 64] = 0

        monkeypatch.setattr(HostTransfers, "perform", without)
        assert is_noticed(lambda: restart_answers_as_memory_does(family)), left_out


# ---------------------------------------------------------------------- a load that fails

STORED = text(4, 330)


@functools.cache
def in_the_store(family: str) -> Contents:
    before, kept = stored(family)
    before.run([STORED], SHORT)
    before.core.close()
    return kept[0]


def failed_load(family: str, fault: str) -> bool:
    """The rest of a prefix, of which memory has the beginning, does not arrive, while others decode."""
    whole = in_the_store(family)
    contents = Contents(whole.page_bytes)
    engine, _ = stored(family, [contents], lambda: fault, snapshots="every:64")
    engine.run([[*STORED[:128], 9]], SHORT)
    contents.snapshots.update({key: replace(one, number=100 + one.number) for key, one in whole.snapshots.items()})
    contents.written += 100
    others = [text(5, 40), text(6, 70)]
    answers = engine.run([others[0], STORED, others[1]], SHORT, stagger_steps=2)
    engine.core.close()
    assert engine.core.store is not None
    happened(engine.core.store.store.fetch_count, "nothing was asked of the store")  # type: ignore[attr-defined]
    wanted = [cold(family, prompt, SHORT) for prompt in (others[0], STORED, others[1])]
    return answers[1].cached_tokens == 128 and are_same(answers, wanted)


@pytest.mark.parametrize("fault", ["damaged", "missing"])
@pytest.mark.parametrize("family", ["qwen3_5", "granite"])
def test_a_load_that_fails_leaves_the_prefix_before_it_and_nobody_elses_memory(family: str, fault: str) -> None:
    """vllm 56733: the request goes back in place, and its writes go to the null block."""
    assert failed_load(family, fault)


def test_a_failed_load_that_is_used_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Restores.take

    def as_if_whole(self: Restores, event: StoreEvent) -> bool:
        failed = event.kind in ("damaged", "missing")
        return take(self, replace(event, kind="fetched", nbytes=1, seconds=1e-3) if failed else event)

    monkeypatch.setattr(Restores, "take", as_if_whole)
    assert is_noticed(lambda: failed_load("qwen3_5", "damaged"))


# ---------------------------------------------------------------------- slots that leak


def held_after(rounds: int) -> list[int]:
    """Pages and slots that are held after each round of answers, cancels and errors, when all is flushed."""
    rig = Rig(cache=True, frame_count=14, rows_max=6, slots_per_frame=1, step_tokens_max=128)
    execute = rig.device.execute

    def with_failures(plan: StepPlan) -> StepResult:
        result = execute(plan)
        decodes = plan.decode_count and plan.step % 7 == 0
        return replace(result, failures={0: "it failed by itself"}) if decodes else result

    rig.device.execute = with_failures  # type: ignore[method-assign]
    chance = random.Random(12)
    held = []
    for number in range(rounds):
        rig.submit(f"three {number}", chance.randrange(1, 90), n=3, max_tokens=9)
        rig.submit(f"leaves {number}", chance.randrange(70, 190), max_tokens=30)
        rig.submit(f"late {number}", 20, max_tokens=5)
        with pytest.raises(RequestError):
            rig.submit(f"too long {number}", 10_000)
        for _ in range(chance.randrange(9)):
            rig.step()
        rig.core.cancel(f"leaves {number}")
        rig.core.cancel(f"three {number}", 1)
        rig.run()
        rig.core.flush_cache()
        usage = rig.core.memory.usage()
        held.append(usage.page_bytes + usage.slot_bytes)
    happened({answer.reason for answer in rig.answers.values()} >= {"length", "cancelled"}, "no cancel")
    return held


def test_answers_cancels_and_errors_of_several_sequences_leave_no_slot_behind() -> None:
    """exllamav3 320, imp 501, sglang 16067: each end that is not the usual one leaks a slot."""
    assert held_after(12) == [0] * 12


def test_a_slot_that_an_end_does_not_give_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back, calls = memory_state._give_back, [0]

    def forgetful(memory: memory_state.MemoryState, freed: Freed) -> None:
        calls[0] += bool(freed.slots)
        if calls[0] == 9:
            freed.slots = freed.slots[1:]
        give_back(memory, freed)

    monkeypatch.setattr(memory_state, "_give_back", forgetful)
    assert is_noticed(lambda: held_after(12) == [0] * 12)
    assert calls[0] > 9


# ---------------------------------------------------------------------- a flush


def forgets_all(family: str) -> bool:
    serving = Serving(family, cache=True)
    prompt = text(7, 90)
    serving.run([prompt], SHORT)
    [warm] = serving.run([prompt], SHORT)
    happened(warm.cached_tokens, "nothing was cached")
    serving.core.flush_cache()
    [again] = serving.run([prompt], SHORT)
    return again.cached_tokens == 0


def test_a_flush_reaches_every_prefix_in_memory() -> None:
    """vllm 57727, NeMo-RL 4018: a flush does not reach a tier. Stores are with the tests of refits."""
    assert forgets_all("qwen3_5")


def test_a_flush_that_does_not_reach_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "flush_cache", lambda self: None)
    assert is_noticed(lambda: forgets_all("qwen3_5"))


# ---------------------------------------------------------------------- copies on write


def forks_of_a_page(family: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Several prompts go on at once from one state inside of a page: in chunks, while memory is compacted in
    every step, and while the worst of them gives way; then once more."""
    seal = Transaction.seal

    def compacting(transaction: Transaction) -> Reservation:
        transaction.compact()
        return seal(transaction)

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "seal", compacting)
        serving = Serving(family, cache=True, step_tokens=80, memory_bytes=1 << 20, max_model_len=320)
        trunk = text(8, 90)
        [first] = serving.run([trunk], SHORT)
        shared = [*trunk, *first.tokens]
        prompts = [[*shared, *text(90 + at, 5 + 66 * at)] for at in range(3)]
        with monkeypatch.context() as refusing:
            refuse_growth(refusing, lambda: serving.core.scheduler.running)
            answers = [*serving.run(prompts, SHORT), *serving.run(prompts, SHORT)]
        copies = sum(len(plan.arena_work.page_copies) for plan in serving.plans)
    cached = [answer.cached_tokens for answer in answers[:3]]
    happened(copies >= 2 and all(90 < count < 98 for count in cached), f"no page was shared: {copies}, {cached}")
    serving.core.flush_cache()
    happened(serving.core.memory.usage().page_bytes == 0, "a page was released never, or twice")
    return are_same(answers, [cold(family, prompt, SHORT) for prompt in prompts] * 2)


@pytest.mark.parametrize("family", ["qwen3_5", "granite"])
def test_a_shared_page_is_copied_once_before_it_is_written(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm 56960, sglang 24954, 27038, 29349: the copy reads a place that the page has left, is lost with a
    prompt in chunks, or its source is released twice."""
    assert forks_of_a_page(family, monkeypatch)


@pytest.mark.parametrize("copies", ["copy_pages", "copy_slots"])
def test_a_copy_that_is_lost_is_noticed(copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceArena, copies, lambda self, sources, targets: None)
    assert is_noticed(lambda: forks_of_a_page("qwen3_5", monkeypatch))


# ---------------------------------------------------------------------- answers of others

Said = dict[str, list[tuple[int, float]]]
"""By request, its tokens and their logprobs."""


def served(engines: Iterable[Serving], requests: list[list[Request]], leaving: set[str], rows: int) -> Said:
    """Answers of several engines that take turns, each with ``rows`` requests at once. Requests of ``leaving``
    are cancelled on their way."""
    said: Said = {}
    waiting = [list(reversed(asked)) for asked in requests]
    steps = 0
    while any(engine.core.has_work or left for engine, left in zip(engines, waiting, strict=True)):
        steps += 1
        for engine, left in zip(engines, waiting, strict=True):
            while left and engine.core.live_count < rows:
                engine.core.submit(left.pop())
            if not engine.core.has_work:
                continue
            for event in engine.core.step():
                assert engine.core.failure is None, engine.core.failure
                answer = said.setdefault(event.request_id, [])
                answer += [(one.token, one.logprob) for one in event.logprobs or ()]
                if event.request_id in leaving and len(answer) > len(event.request_id) % 4:
                    engine.core.cancel(event.request_id)
    return said


def marked(engine: int, count: int) -> list[Request]:
    """Prompts that begin alike or with tokens of their own, drawn and greedy."""
    return [
        Request(
            request_id=f"{engine}-{at}",
            prompt_tokens=[*text(13, 70)[: 17 * (at % 4)], *text(1000 * engine + at, 5 + at % 40)],
            sampling=SamplingParams(
                temperature=float(at % 2), seed=at, max_tokens=4 + at % 9, ignore_eos=True, logprobs=0
            ),
        )
        for at in range(count)
    ]


def seen(count: int) -> list[Request]:
    """Prompts with pictures."""
    shown = cases("qwen3_5_vl")[:2]
    return [
        Request(
            request_id=f"picture-{at}",
            prompt_tokens=shown[at % 2].tokens,
            pictures=shown[at % 2].pictures,
            sampling=structs.replace(OF_PICTURES, max_tokens=6, logprobs=0),
        )
        for at in range(count)
    ]


COUNT = 60
LEAVING = {f"{engine}-{at}" for engine in range(2) for at in range(COUNT) if at % 5 == 3} | {"picture-3"}


def three_engines() -> list[Serving]:
    pictures = Serving("", model=seeing_model("qwen3_5_vl"), cache=True, max_num_seqs=3)
    return [Serving(family, cache=True, max_num_seqs=5) for family in ("qwen3_5", "lfm2")] + [pictures]


def asked_of_three() -> list[list[Request]]:
    return [marked(0, COUNT), marked(1, COUNT), seen(6)]


@functools.cache
def said_one_by_one() -> Said:
    """What each is answered with nobody beside it."""
    said: Said = {}
    for engine, requests in zip(three_engines(), asked_of_three(), strict=True):
        said |= served([engine], [requests], set(), 1)
    return said


def nobody_says_what_is_anothers() -> bool:
    alone = said_one_by_one()
    together = served(three_engines(), asked_of_three(), LEAVING, 5)
    happened(any(0 < len(together[name]) < len(alone[name]) for name in LEAVING), "no answer was cut")
    return all(
        answer == alone[name] if name not in LEAVING else answer == alone[name][: len(answer)]
        for name, answer in together.items()
    )


def test_no_answer_has_a_token_of_another_request_picture_or_model() -> None:
    """llama.cpp 29092, ollama 17475, LiteRT-LM 3165, mlx-lm 1776: one request's text in the answer of another,
    after aborts, with pictures, with two models in a process."""
    assert nobody_says_what_is_anothers()


def test_tokens_that_change_places_in_one_step_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    said_one_by_one()
    opened, steps = LaunchedStep._open, [0]

    def swapped(self: LaunchedStep) -> StepResult:
        result = opened(self)
        steps[0] += 1
        if steps[0] > 40 and len(result.tokens) > 1 and steps[0] < 50:
            result.tokens[:2] = result.tokens[1::-1].copy()
        return result

    monkeypatch.setattr(LaunchedStep, "_open", swapped)
    assert is_noticed(nobody_says_what_is_anothers)


def prompts_are_told_apart(count: int) -> bool:
    """On the device without a model, where every token is a digest of its whole text."""
    rig = Rig(cache=True, frame_count=30, rows_max=16, queue_max=4096, overlap=True)
    chance = random.Random(15)
    left = set()
    prompts = [[*[at % VOCAB_SIZE, at // VOCAB_SIZE], *[5] * chance.randrange(40)] for at in range(count)]
    said: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts):
        rig.submit(f"r{at}", prompt, max_tokens=3)
        if chance.random() < 0.2:
            left.add(f"r{at}")
    while rig.core.has_work:
        for event in rig.core.step():
            said.setdefault(event.request_id, []).extend(event.tokens)
            if event.request_id in left and chance.random() < 0.5:
                rig.core.cancel(event.request_id)
    assert rig.core.failure is None, rig.core.failure
    return all(
        tokens == digested(prompts[int(name[1:])])[: len(tokens)] and (name in left or len(tokens) == 3)
        for name, tokens in said.items()
    )


def digested(prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    tokens, _ = reference_tokens(
        prompt, sampling, seed=0, eos_ids=(), max_model_len=512, next_token=hashed_token(VOCAB_SIZE)
    )
    return tokens


def test_of_two_thousand_prompts_a_fifth_cancelled_none_has_a_token_of_another() -> None:
    assert prompts_are_told_apart(2000)


# ---------------------------------------------------------------------- states that a tier prunes


def comes_back_whole(family: str) -> bool:
    """What memory has evicted is a hit again: as long as before, with the bits of a hit in memory."""
    plan = plan_arena(load_model(checkpoint(family)).model.spec, 1 << 20)
    engine, _ = stored(family, memory_bytes=12 * plan.frame_bytes, max_model_len=160, max_num_seqs=2)
    sentinel = text(9, 120)
    engine.run([sentinel], SHORT)
    [warm] = engine.run([sentinel], SHORT)
    for noise in range(60):
        if not engine.core.memory.hit_tokens(np.array(sentinel, np.int32), salt=""):
            break
        engine.run([text(2000 + noise, 130)], SHORT)
    happened(not engine.core.memory.hit_tokens(np.array(sentinel, np.int32), salt=""), "it was not evicted")
    [back] = engine.run([sentinel], SHORT)
    engine.core.close()
    happened(warm.cached_tokens, "no hit in memory")
    return back.cached_tokens == warm.cached_tokens and is_same(back, warm)


@pytest.mark.parametrize("family", ["qwen3_5", "granite", "lfm2", "mamba2"])
def test_what_memory_evicts_comes_back_from_the_store_with_its_state(family: str) -> None:
    """sglang 33713, LMCache 4247, GLM-5.3's recipe 57: the tier drops states where it should keep them."""
    assert comes_back_whole(family)


def test_a_state_that_is_dropped_on_its_way_to_the_store_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreWrites, "committed", lambda *_: None)
    assert is_noticed(lambda: comes_back_whole("qwen3_5"))
