"""What users of other engines report about prefix caches and memory of hybrid models: each a test by name.

The public issues are named in the docstrings. Where a number is theirs (528, 2096, 34 %), the geometry is
that of the model they serve: the engine, its scheduler and its memory are the real ones, and only the
arithmetic of the model is left out, so that states of 192 MB cost nothing to book. What is about numbers
(NaN, a wrong slot) runs on a tiny model.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle.serving import Serving, loaded
from tests.support.scripted import ScriptedExecutor
from tests.unit.engine.rig import VOCAB_SIZE, Rig
from tests.unit.memory.geometry import GRANITE_H_SMALL, LFM2_1_2B, QWEN35_397B
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.memory.frames.plan import fit_sizes, plan_arena
from weft.memory.memory import Memory
from weft.request import Request, SamplingParams
from weft.runner.arena import NAN_BYTE
from weft.schedule.budget import step_tokens_bound
from weft.schedule.plan import StepPlan
from weft.schedule.snapshots import parse_snapshots
from weft.spec import ModelSpec
from weft.units import pages_for
from weft_tools.sim.replay import VirtualClock

GB = 10**9


class Published:
    """The engine on the memory of a published model."""

    def __init__(self, spec: ModelSpec, memory_bytes: int, *, max_num_seqs: int = 64, snapshots: str = "auto") -> None:
        self.spec = spec
        self.arena = plan_arena(spec, memory_bytes)
        self.sizes = fit_sizes(
            EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096, max_model_len=4096), spec, self.arena
        )
        device = ScriptedExecutor(
            self.arena,
            vocab_size=VOCAB_SIZE,
            rows_max=self.sizes.rows_max,
            max_model_len=self.sizes.max_model_len,
            step_tokens_bound=step_tokens_bound(self.sizes.step_tokens_max, self.sizes.rows_max),
        )
        self.core = EngineCore(
            vocab_size=VOCAB_SIZE,
            sizes=self.sizes,
            memory=Memory(self.arena, cache=True),
            executor=device,
            clock=VirtualClock(),
            seed=0,
            eos_ids=(),
            snapshots=parse_snapshots(snapshots),
        )
        self.running_max = 0
        self._count = 0

    def run(self, *prompts: list[int], out: int = 4, boundaries: tuple[int, ...] = ()) -> list[int]:
        """Cached tokens of each, all submitted at once."""
        cached = {}
        for prompt in prompts:
            name = f"r{self._count}"
            self._count += 1
            cached[name] = -1
            self.core.submit(
                Request(
                    request_id=name,
                    prompt_tokens=prompt,
                    boundaries=list(boundaries),
                    sampling=SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True),
                )
            )
        while self.core.has_work:
            for event in self.core.step():
                assert event.finish_reason in (None, "length"), event
                cached[event.request_id] = event.cached_tokens
            self.running_max = max(self.running_max, len(self.core.scheduler.running))
        assert self.core.failure is None, self.core.failure
        self.core.audit()
        return list(cached.values())


def text(name: int, length: int) -> list[int]:
    return [(name * 13 + at * (name + 3)) % VOCAB_SIZE for at in range(length)]


# ---------------------------------------------------------------------- hits


@pytest.mark.parametrize(("spec", "block"), [(GRANITE_H_SMALL, 528), (QWEN35_397B, 2096)])
def test_a_prompt_shorter_than_a_block_of_other_engines_is_found(spec: ModelSpec, block: int) -> None:
    """vllm 40696, 53749, 48401: blocks are inflated to the size of a state, and no prompt below one hits."""
    engine = Published(spec, 8 * GB)
    assert spec.state_bytes_per_sequence("bfloat16") > 500 * spec.kv_bytes_per_token("bfloat16")
    for length in (65, 100, 300, block - 1):
        prompt = text(length, length)
        assert engine.run(prompt) == [0]
        assert engine.run(prompt) == [(length - 1) // 64 * 64]


def test_a_shared_beginning_is_kept_although_every_prompt_ends_in_a_tail_of_its_own() -> None:
    """vllm 45238: the only snapshot lands in the unique tail, 0 of 64 hits, and prompts are paid twice."""
    engine = Published(LFM2_1_2B, 1 * GB)
    shared = text(1, 600)
    before = engine.core.computed_tokens
    assert engine.run(shared + text(2, 90), out=1, boundaries=(600,)) == [0]
    assert engine.core.computed_tokens - before == 690, "states are written in passing, not by a second pass"
    for name in range(3, 20):
        assert engine.run(shared + text(name, 90), out=1, boundaries=(600,)) == [576]


def test_the_tail_of_a_prompt_and_the_place_where_it_parts_are_both_kept() -> None:
    """sglang 22935: a shared prefix and a long suffix: no hit."""
    engine = Published(LFM2_1_2B, 1 * GB)
    shared = text(1, 300)
    engine.run(shared + text(2, 150))
    engine.run(shared + text(3, 900))
    assert engine.run(shared + text(4, 900)) == [256], "the second one kept the place where it parted"
    assert engine.run(shared + text(3, 900)) == [1152], "and its own end"


def test_a_lost_hit_is_told_apart_from_no_shared_prefix() -> None:
    """vllm 52527, 51198: the hit rate is 0 and nobody can say whether anything was there to be hit."""
    rig = Rig(cache=True, frame_count=30, snapshots=parse_snapshots("request-end"))

    def losses(name: str, prompt: list[int]) -> dict[str, int]:
        counts = rig.core.memory.usage().cache
        rig.submit(name, prompt, max_tokens=1)
        rig.run()
        after = rig.core.memory.usage().cache
        told = rig.answers[name, 0].events[0].lost
        found = {
            reason: getattr(after.lost, reason) - getattr(counts.lost, reason)
            for reason in ("no_checkpoint", "evicted_state", "evicted_kv", "not_ready")
        }
        shown = {reason: count for reason, count in found.items() if count}
        assert shown == ({} if told is None else {name: getattr(told, name) for name in found if getattr(told, name)})
        return shown

    assert losses("first", text(1, 200)) == {}
    assert losses("of its own", text(2, 200)) == {}
    assert losses("shorter", text(1, 150)) == {"no_checkpoint": 144}
    for name in range(3, 12):  # what was kept of the first gives way
        rig.submit(f"filler {name}", text(name, 200), max_tokens=1)
        rig.run()
    gone = losses("first again", text(1, 200))
    assert sum(gone.values()) > 0
    assert set(gone) <= {"evicted_state", "evicted_kv"}


# ---------------------------------------------------------------------- memory


def test_more_sequences_than_memory_holds_are_fitted_and_said_in_one_line() -> None:
    """vllm 49064: max_num_seqs 1024 exceeds 614 blocks, and the server does not start."""
    arena = plan_arena(QWEN35_397B, 20 * GB)
    sizes = fit_sizes(EngineConfig(max_num_seqs=1024, max_num_batched_tokens=4096), QWEN35_397B, arena)
    assert 50 < sizes.rows_max < 1024
    [note] = [note for note in sizes.notes if "--max-num-seqs" in note]
    assert f"--max-num-seqs 1024 shrunk to {sizes.rows_max}" in note


def test_the_capacity_that_is_reported_is_the_capacity_that_is_there() -> None:
    """vllm 37429: memory is over-allocated seven times and the report of what fits is wrong."""
    engine = Published(QWEN35_397B, 20 * GB, max_num_seqs=1024, snapshots="none")
    spec, usage = engine.spec, engine.core.memory.usage()
    kv = pages_for(100) * 16 * spec.kv_bytes_per_token("bfloat16")
    exact = spec.state_bytes_per_sequence("bfloat16") + kv
    assert usage.arena_bytes <= 20 * GB
    engine.run(*(text(name, 96) for name in range(150)))
    held = engine.running_max
    assert held * exact >= 0.97 * usage.arena_bytes, f"{held} of {exact} bytes in {usage.arena_bytes}"
    assert usage.slots_available * engine.arena.slot_stride_bytes == usage.arena_bytes


def test_running_out_of_states_is_a_wait_and_never_an_end() -> None:
    """sglang 36770, 34676: the process dies when states run out, at 34 % KV use."""
    rig = Rig(cache=True, slots_per_frame=1, pages_per_frame=40, frame_count=4, rows_max=16, max_model_len=300)
    for number in range(20):
        rig.submit(f"r{number}", text(number, 20 + number), max_tokens=30)
    rig.run()
    assert rig.core.failure is None
    assert {answer.reason for answer in rig.answers.values()} == {"length"}
    assert max(plan.run_count for plan in rig.plans) <= 3
    used = rig.core.memory.usage()
    assert used.pages_held_max < 0.34 * 160, "KV was never the reason"


def test_states_take_the_memory_that_kv_leaves_free() -> None:
    """sglang 34441: states starve while usage reads 0.35."""
    rig = Rig(cache=True, slots_per_frame=1, pages_per_frame=10, frame_count=12, rows_max=16, max_model_len=480)
    for number in range(6):  # the arena is full of KV
        rig.submit(f"long {number}", text(number, 470), max_tokens=2)
    rig.run()
    full = rig.core.memory.usage()
    assert full.frames_of_pages > full.frames_of_slots
    before = len(rig.plans)
    for number in range(10):
        rig.submit(f"short {number}", text(20 + number, 8), max_tokens=40)
    rig.run()
    assert {answer.reason for answer in rig.answers.values()} == {"length"}
    at_once = max(plan.run_count for plan in rig.plans[before:])
    assert at_once >= 9, f"frames change kind, and only {at_once} ran at once"
    assert any(plan.arena_work.zero_frames for plan in rig.plans[before:])


def test_every_step_brings_somebody_further_where_only_one_fits() -> None:
    """vllm 40707, 52520: 156,000 passes in which nothing was scheduled."""
    rig = Rig(cache=True, pages_per_frame=2, slots_per_frame=1, frame_count=6, rows_max=8)
    alone = rig.sizes.max_model_len
    for number in range(8):
        rig.submit(f"r{number}", text(number, alone - 70), max_tokens=70)
    rig.run()
    assert {answer.reason for answer in rig.answers.values()} == {"length"}
    empty = sum(plan.run_count == 0 for plan in rig.plans)
    assert empty <= 8 * 8, f"{empty} steps computed nothing"
    assert len(rig.plans) < 2 * 8 * (70 + alone // 64 + 4)


def test_nothing_is_left_in_any_list_when_requests_have_gone() -> None:
    """vllm 44175: a list of blocks to zero is filled in each step and drained by nobody."""
    rig = Rig(cache=True, frame_count=12, rows_max=3)

    def items_after(first: int, last: int) -> int:
        for number in range(first, last):
            rig.submit(f"r{number}", text(number % 20, 150), max_tokens=9)
            if number % 3 == 2:
                rig.run()
        rig.run()
        rig.core.flush_cache()
        return items_in(rig.core)

    small = items_after(0, 12)
    assert items_after(12, 72) == small


def items_in(core: EngineCore) -> int:
    """Items of every container that is reachable from the engine and of no bounded length."""
    total, seen, left = 0, set[int](), deque[Any]([core])
    while left:
        one = left.popleft()
        if id(one) in seen or isinstance(one, type) or (hasattr(one, "__module__") and callable(one)):
            continue
        seen.add(id(one))
        is_container = isinstance(one, list | dict | set | tuple)
        is_container = is_container or (isinstance(one, deque) and not one.maxlen)
        total += len(one) if is_container else 0
        if is_container or type(one).__module__.startswith("weft."):
            left.extend(found for found in gc.get_referents(one) if not isinstance(found, str | int | float | bytes))
    return total


# ---------------------------------------------------------------------- numbers

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def prompt_of(name: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(name).integers(3, 400, length).tolist()
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "granite", "lfm2"])
def test_nan_that_memory_held_before_reaches_nobody(family: str) -> None:
    """vllm 35219, 39283, 56524: NaN in recycled memory spreads to every request. Here whatever becomes free
    is filled with NaN at that moment, frames change kind, and zeroing fills with NaN as well."""
    arena = plan_arena(loaded(family).spec, 1 << 20)
    slot_frames = 3
    memory = (slot_frames + -(-pages_for(260) // arena.pages_per_frame)) * arena.frame_bytes
    small = Serving(family, memory_bytes=memory, max_model_len=256, max_num_seqs=3, cache=True)
    prompts = [prompt_of(name, length) for name, length in enumerate((200, 30, 120, 200, 5, 90, 170))]
    answers = [answer for first in range(0, 7, 3) for answer in small.run(prompts[first : first + 3], SHORT)]
    assert sum(len(plan.arena_work.zero_frames) for plan in small.plans) > arena.pages_per_frame // 100
    assert small.core.memory.usage().cache.evicted_pages > 0
    roomy = Serving(family)
    for prompt, answer in zip(prompts, answers, strict=True):
        [alone] = roomy.run([prompt], SHORT)
        assert not answer.logits.isnan().any()
        assert answer.tokens == alone.tokens


def test_number_0_is_memory_like_any_other_and_padded_rows_touch_nothing() -> None:
    """vllm 33937: the index of the null block is read as a state; 37728, 49757: padded rows write by it."""
    given: dict[str, set[int]] = {"frames": set(), "pages": set()}
    written: set[int] = set()

    def note(_: Serving, plan: StepPlan) -> None:
        given["frames"].update(claim.frame for claim in plan.reservation.frames)
        given["pages"].update(plan.reservation.pages)
        if plan.decode_count:
            written.update(slot for slot in plan.slots.tolist() if not untouched(slot, slot_bytes))

    def untouched(number: int, size: int) -> bool:
        buffer = serving.executor.arena.buffer
        return bool((buffer[number * size : (number + 1) * size] == NAN_BYTE).all())

    serving = Serving("qwen3_5", pad_decode_to=8, before_step=note)
    plan, slot_bytes = serving.arena, serving.arena.slot_stride_bytes
    prompts = [prompt_of(1, 70), prompt_of(2, 20)]
    answers = serving.run(prompts, SHORT)
    assert 0 in given["frames"], "frame 0 was given to nobody, which proves nothing"
    for answer, plain in zip(answers, Serving("qwen3_5").run(prompts, SHORT), strict=True):
        assert answer.tokens == plain.tokens
        assert torch.allclose(answer.logits, plain.logits, atol=1e-5), "a padded row wrote into number 0"
    frames = set(range(plan.frame_count)) - given["frames"]
    assert len(frames) > plan.frame_count // 2
    assert all(untouched(frame, plan.frame_bytes) for frame in frames)
    beside = {
        page
        for page in range(plan.page_count)
        if page // plan.pages_per_frame in {given_page // plan.pages_per_frame for given_page in given["pages"]}
    } - given["pages"]
    assert beside
    assert all(untouched(page, plan.page_bytes) for page in beside)
    assert written, "and what is used is written, or looking at bytes proves nothing"
