"""A prefix that is not computed again changes nothing: the same tokens, and logits within 1e-5 in float32.

Each test runs requests cold, on an engine that keeps nothing, and again on one that keeps prefixes, and looks
that what it is about really happened (hits, taps, donated states, copies, evictions). Memory is full of NaN,
and whatever becomes free is filled with NaN at that moment (see ``serving``), so a state or page that is used
after it was given up shows. Negative controls at the end: what is cached is damaged, and it must be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from tests.oracle.serving import FAMILIES, RECURRENT_FAMILIES, Answer, Serving, loaded
from tests.support.arena_fills import fill_pages, fill_slots
from tests.support.refused_growth import refuse_growth
from weft.memory.frames.plan import plan_arena
from weft.request import SamplingParams
from weft.schedule.plan import Admission, StepPlan
from weft.units import PAGE_TOKENS, pages_for

TOLERANCE = 1e-5
"""Of the largest logit, for a request alone on its engine, in float32."""
TOLERANCE_IN_COMPANY = 3e-5
"""Beside others, sums are made in other orders: cold runs in company are as far from cold runs alone."""
WIDER = (*FAMILIES, "falcon_h1", "kimi_linear")
"""Two of the newer families besides: attention beside Mamba-2 in each layer; latent attention and a delta net
whose gates are by channel. The others are in ``test_engine_more_families``."""
STEPS = 12
SHORT = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


def text(name: int, length: int) -> list[int]:
    """Tokens that differ from those of every other ``name`` almost everywhere."""
    return np.random.default_rng(name).integers(3, 400, length).tolist()


SYSTEM = text(0, 300)


Key = tuple[str, tuple[int, ...], bytes]
_COLD: dict[Key, Answer] = {}
_COLD_IN_COMPANY: dict[Key, Answer] = {}


def cold(family: str, prompt: list[int], sampling: SamplingParams = SHORT) -> Answer:
    """The answer of an engine that keeps nothing to a request alone; each is computed once."""
    key = family, tuple(prompt), msgspec.msgpack.encode(sampling)
    if key not in _COLD:
        _COLD[key] = Serving(family).run([prompt], sampling)[0]
    return _COLD[key]


def cold_in_company(family: str, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]) -> list[Answer]:
    """The same to requests side by side, in a seventh of the steps. A known answer is not computed again."""
    keys = [
        (family, tuple(prompt), msgspec.msgpack.encode(sampling))
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    missing = [at for at, key in enumerate(keys) if key not in _COLD and key not in _COLD_IN_COMPANY]
    if missing:
        answers = Serving(family).run([prompts[at] for at in missing], [samplings[at] for at in missing])
        _COLD_IN_COMPANY.update(zip([keys[at] for at in missing], answers, strict=True))
    return [(_COLD if key in _COLD else _COLD_IN_COMPANY)[key] for key in keys]


def gap(answer: Answer, expected: Answer) -> float:
    """Largest difference of any logit, as a share of the largest logit; infinite where one is NaN or steps
    are missing."""
    if answer.logits.shape != expected.logits.shape:
        return float("inf")
    found = (answer.logits - expected.logits).abs().max() / expected.logits.abs().max()
    return float("inf") if found.isnan() else float(found)


def assert_like_cold(
    family: str,
    answers: Sequence[Answer],
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams] = SHORT,
    *,
    company: bool = False,
) -> None:
    """``company``: the requests ran side by side."""
    samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    wanted = (
        cold_in_company(family, prompts, samplings)
        if company
        else map(cold, [family] * len(prompts), prompts, samplings)
    )
    assert_like(answers, list(wanted), TOLERANCE_IN_COMPANY if company else TOLERANCE)


def assert_like(answers: Sequence[Answer], wanted: Sequence[Answer], tolerance: float) -> None:
    for at, (answer, expected) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.tokens == expected.tokens
        assert gap(answer, expected) < tolerance, f"answer {at}, {answer.cached_tokens} tokens cached"


def warm(family: str, **more: object) -> Serving:
    return Serving(family, cache=True, **more)  # type: ignore[arg-type]


def one_by_one(serving: Serving, prompts: Sequence[list[int]]) -> list[Answer]:
    return [serving.run([prompt], SHORT)[0] for prompt in prompts]


def tapped(serving: Serving) -> list[int]:
    return [tap.position for plan in serving.plans for tap in plan.taps]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_hit_changes_no_token(family: str) -> None:
    """Prompts around the grid and the pages, each computed once and asked for again."""
    serving = warm(family)
    prompts = [text(length, length) for length in (1, 17, 64, 65, 66, 129, 200, 449)]
    assert_like_cold(family, one_by_one(serving, prompts), prompts)
    again = one_by_one(serving, prompts)
    assert_like_cold(family, again, prompts)
    expected = [max(0, length - 1) // 64 * 64 for length in map(len, prompts)]
    if family == "qwen3":
        expected = [(length - 1) // PAGE_TOKENS * PAGE_TOKENS for length in map(len, prompts)]
    assert [answer.cached_tokens for answer in again] == expected


@pytest.mark.parametrize("step_tokens", [80, 150, 1024])
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_states_kept_on_the_way_change_nothing_whatever_the_chunks(family: str, step_tokens: int) -> None:
    """Taps at every chunk, against none: the very same logits."""
    prompt = text(1, 500)
    plain = Serving(family, step_tokens=step_tokens).run([prompt], SHORT)[0]
    serving = warm(family, step_tokens=step_tokens, snapshots="every:64")
    [answer] = serving.run([prompt], SHORT)
    assert sorted(tapped(serving)) == list(range(64, 449, 64))
    assert answer.tokens == plain.tokens
    assert torch.equal(answer.logits, plain.logits)


@pytest.mark.parametrize("family", WIDER)
def test_a_fork_from_every_kept_state_changes_nothing(family: str) -> None:
    """One prompt keeps states all along; others leave it everywhere, at and beside the grid."""
    serving = warm(family, snapshots="every:64")
    trunk = text(2, 460)
    serving.run([trunk], SHORT)
    cuts = [16, 64, 65, 100, 128, 191, 192, 300, 448, 459]
    prompts = [trunk[:cut] + text(cut, 1 + cut % 70) for cut in cuts]
    answers = one_by_one(serving, prompts)
    assert_like_cold(family, answers, prompts)
    assert sum(answer.cached_tokens for answer in answers) > 1200
    together = warm(family, snapshots="every:64")
    together.run([trunk], SHORT)
    assert_like_cold(family, together.run(prompts, SHORT), prompts, company=True)


@pytest.mark.parametrize("family", WIDER)
def test_a_conversation_goes_on_from_the_donated_state(family: str) -> None:
    """Six turns: each begins where the one before ended, in the middle of a page and of a chunk."""
    serving = warm(family)
    prompt, new_tokens = text(3, 90), 0
    for turn in range(6):
        [answer] = serving.run([prompt], SHORT)
        assert_like_cold(family, [answer], [prompt])
        if turn:
            computed = len(prompt) - answer.cached_tokens
            step = 1 if family != "qwen3" else PAGE_TOKENS
            assert computed <= 1 + new_tokens + step - 1, f"turn {turn} computed {computed} tokens"
        new_tokens = 5 + 7 * turn
        prompt = prompt + answer.tokens + text(100 + turn, new_tokens)
    if family != "qwen3":
        assert any(plan.arena_work.slot_copies for plan in serving.plans)
        assert any(plan.arena_work.page_copies for plan in serving.plans), "no shared page was copied"


LONG = SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True)


def in_the_middle_of_an_answer(family: str, serving: Serving) -> tuple[list[int], Answer]:
    """Two answers side by side, each keeping its state at 64 and 128; then one is gone on from at 64, another
    way. Returns that prompt and its answer."""
    prompts = [text(40, 30), text(41, 50)]
    first = serving.run(prompts, LONG)
    taken_up = prompts[1] + first[1].tokens[:25] + text(42, 8)
    [answer] = serving.run([taken_up], SHORT)
    assert answer.cached_tokens == 64
    return taken_up, answer


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_state_copied_between_two_decodes_changes_nothing(family: str) -> None:
    """Neither for the answer that goes on past it, nor for the one that begins there."""
    serving = warm(family, snapshots="decode:64")
    taken_up, answer = in_the_middle_of_an_answer(family, serving)
    assert tapped(serving) == []
    assert_like_cold(family, [answer], [taken_up])
    plain = Serving(family).run([text(40, 30), text(41, 50)], LONG)
    again = warm(family, snapshots="decode:64").run([text(40, 30), text(41, 50)], LONG)
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_state_copied_one_step_late_is_noticed(family: str) -> None:
    """After the step that overwrites the running slot it is the state of one token more."""
    late: list[np.ndarray] = []

    def copy_later(serving: Serving, plan: StepPlan) -> None:
        if late:
            serving.executor.arena.copy_slots(*late.pop())
        copies = plan.arena_work.slot_copies
        if copies and plan.decode_count:
            late.append(np.array([(copy.src, copy.dst) for copy in copies], np.int32).T)

    serving = warm(family, snapshots="decode:64", before_step=copy_later)
    taken_up, answer = in_the_middle_of_an_answer(family, serving)
    assert gap(answer, cold(family, taken_up)) > 10 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_declared_boundaries_are_found_by_the_second_request(family: str) -> None:
    serving = warm(family)
    prompts = [SYSTEM + text(name, 150) for name in (1, 2, 3)]
    found = []
    for prompt in prompts:
        answers = serving.run([prompt], SHORT, boundaries=[len(SYSTEM)])
        assert_like_cold(family, answers, [prompt])
        found.append(answers[0].cached_tokens)
    assert found[0] == 0
    assert all(cached >= 256 for cached in found[1:])


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_fork_that_nobody_declared_is_found_by_the_third_request(family: str) -> None:
    serving = warm(family)
    prompts = [SYSTEM + text(name, 150) for name in (1, 2, 3)]
    answers = [serving.run([prompt], SHORT)[0] for prompt in prompts]
    assert_like_cold(family, answers, prompts)
    assert [answer.cached_tokens for answer in answers] == [0, 0, 256]


@pytest.mark.parametrize("step_tokens", [96, 1024])
@pytest.mark.parametrize("family", WIDER)
def test_twins_compute_what_they_share_once(family: str, step_tokens: int) -> None:
    """Eight at once, nothing declared: one computes the common part, seven start behind it."""
    prompts = [SYSTEM + text(name, 20 + name) for name in range(1, 9)]
    plain = Serving(family, step_tokens=step_tokens)
    expected = plain.run(prompts, SHORT)
    serving = warm(family, step_tokens=step_tokens)
    answers = serving.run(prompts, SHORT)
    assert_like(answers, expected, TOLERANCE_IN_COMPANY)
    assert sum(answer.cached_tokens >= 256 for answer in answers) == 7
    assert serving.core.computed_tokens < plain.core.computed_tokens - 7 * 250


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_another_salt_finds_nothing(family: str) -> None:
    serving = warm(family)
    prompt = text(5, 200)
    for salt, expected in (("a", 0), ("b", 0), ("a", 192), ("", 0), ("b", 192)):
        answers = serving.run([prompt], SHORT, salt=salt)
        assert answers[0].cached_tokens == expected
        assert_like_cold(family, answers, [prompt])


def tight(family: str, *, tokens: int, slots: int) -> int:
    """Bytes of frames for so many tokens and so many slots."""
    arena = plan_arena(loaded(family).spec, 1 << 20)
    frames = -(-pages_for(tokens) // arena.pages_per_frame) if arena.pages_per_frame else 0
    frames += -(-slots // arena.slots_per_frame) if arena.slots_per_frame else 0
    return frames * arena.frame_bytes


@pytest.mark.parametrize("policy", ["value", "lru"])
@pytest.mark.parametrize("family", WIDER)
def test_eviction_at_any_moment_changes_nothing(family: str, policy: str) -> None:
    """Memory for a few requests, and a stream of them that share prefixes: what is cached is given up all the
    time, and filled with NaN at that moment."""
    serving = warm(
        family,
        memory_bytes=tight(family, tokens=1200, slots=6),
        step_tokens=128,
        max_num_seqs=4,
        max_model_len=512,
        policy=policy,
    )
    trunks = [text(name, 260) for name in (6, 7, 8)]
    prompts = [trunks[i % 3][: 100 + 37 * (i % 5)] + text(50 + i, 40) for i in range(14)]
    answers = serving.run(prompts, SHORT, stagger_steps=5)
    assert_like_cold(family, answers, prompts, company=True)
    counts = serving.core.memory.usage().cache
    assert counts.hit_tokens > 0
    assert counts.evicted_pages > 10
    if family != "qwen3":
        assert counts.evicted_states > 5


LONGER = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_where_memory_is_short_changes_nothing(family: str) -> None:
    serving = warm(
        family, memory_bytes=tight(family, tokens=500, slots=4), step_tokens=256, max_num_seqs=4, max_model_len=480
    )
    prompts = [text(name, 120 + 7 * (name - 60)) for name in range(60, 65)]
    answers = serving.run(prompts, LONGER)
    assert_like_cold(family, answers, prompts, LONGER, company=True)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preempted_request_resumes_where_it_was_and_nothing_changes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page that the first one grows into seems not to be there at first, so the last one gives way, in
    its prefill and then in its answer."""
    serving = warm(family, step_tokens=200)
    refused = refuse_growth(monkeypatch, lambda: serving.core.scheduler.running)
    prompts = [text(70, 14), text(71, 700), text(72, 150)]
    answers = serving.run(prompts, LONGER)
    monkeypatch.undo()
    assert_like_cold(family, answers, prompts, LONGER, company=True)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted"
    again = [(int(plan.starts[run]), admission.tokens.size) for plan, run, admission in admitted_again(serving)]
    # A model without states resumes at whole pages; one that was preempted in its prefill, at its last chunk.
    assert all(start >= size - 1 - PAGE_TOKENS or start % 64 == 0 < start for start, size in again)
    assert len(again) == len(refused)


def admitted_again(serving: Serving) -> Iterator[tuple[StepPlan, int, Admission]]:
    """Admissions of sequences that were here before, with their run."""
    before = set()
    for plan in serving.plans:
        for run, admission in enumerate(plan.admissions, start=plan.run_count - len(plan.admissions)):
            if admission.seq in before:
                yield plan, run, admission
            before.add(admission.seq)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_everything_at_once_changes_nothing(family: str) -> None:
    """Shared prefixes in bursts, small chunks, PAD rows, sampled company, memory that is short."""
    company = SamplingParams(temperature=1.2, seed=3, max_tokens=30, ignore_eos=True)
    serving = warm(
        family, memory_bytes=tight(family, tokens=900, slots=8), step_tokens=100, pad_decode_to=5, max_model_len=640
    )
    prompts = [SYSTEM[: 64 * (1 + i % 4) + 11 * (i % 3)] + text(80 + i, 30 + 10 * (i % 4)) for i in range(12)]
    samplings = [SHORT if i % 4 else company for i in range(12)]
    for _ in range(2):
        answers = serving.run(prompts, samplings, stagger_steps=1, boundaries=[64, 200])
        assert_like_cold(family, answers, prompts, samplings, company=True)
    assert sum(answer.cached_tokens for answer in answers) > 300


# ---------------------------------------------------------------------- negative controls


def cached_slots(serving: Serving) -> list[int]:
    return [node.slot for node in serving.core.memory._state.cache.tree.nodes() if node.slot != -1]


def cached_pages(serving: Serving) -> list[int]:
    return [page for node in serving.core.memory._state.cache.tree.nodes() for page in node.pages]


def nan_states(serving: Serving) -> None:
    fill_slots(serving.executor.arena, cached_slots(serving), 0xFF)


def zero_states(serving: Serving) -> None:
    fill_slots(serving.executor.arena, cached_slots(serving), 0)


def zero_a_page(serving: Serving) -> None:
    fill_pages(serving.executor.arena, cached_pages(serving)[3:4], 0)


def swap_states(serving: Serving) -> None:
    """Every snapshot holds the state of another position."""
    slots = np.asarray(sorted(cached_slots(serving)), np.int32)
    serving.executor.arena.copy_slots(slots, np.roll(slots, 1))


Damage = Callable[[Serving], None]


def damaged_gap(family: str, damage: Damage) -> float:
    serving = warm(family, snapshots="every:64")
    prompt = text(9, 300)
    serving.run([prompt], SHORT)
    damage(serving)
    [answer] = serving.run([prompt], SHORT)
    assert answer.cached_tokens == 256
    return gap(answer, cold(family, prompt))


@pytest.mark.parametrize(
    "damage", [nan_states, zero_states, swap_states, zero_a_page], ids=lambda damage: damage.__name__
)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_damaged_prefix_is_noticed(family: str, damage: Damage) -> None:
    assert damaged_gap(family, lambda serving: None) < TOLERANCE
    assert damaged_gap(family, damage) > 10 * TOLERANCE


@pytest.mark.parametrize("lost", ["copy_slots", "copy_pages"])
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_copy_that_is_not_made_is_noticed(family: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that goes on from a donated state needs both: the state, and the page it ends in."""
    serving = warm(family)
    prompt = text(10, 90)
    [first] = serving.run([prompt], SHORT)
    following = prompt + first.tokens + text(11, 9)
    monkeypatch.setattr(serving.executor.arena, lost, lambda sources, destinations: None)
    [answer] = serving.run([following], SHORT)
    assert answer.cached_tokens == len(prompt) + STEPS - 1
    assert gap(answer, cold(family, following)) > 10 * TOLERANCE


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_tap_that_is_written_elsewhere_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state at the tap's position, and no other, is what has to be in its slot."""
    serving = warm(family)
    prompt = text(12, 300)
    apply = serving.executor.batches.apply

    def one_chunk_early(plan: StepPlan, *others: object) -> None:
        taps = tuple(replace(tap, position=tap.position - 64) for tap in plan.taps)
        apply(replace(plan, taps=taps), *others)

    monkeypatch.setattr(serving.executor.batches, "apply", one_chunk_early)
    serving.run([prompt], SHORT)
    assert 256 in tapped(serving)
    [answer] = serving.run([prompt], SHORT)
    assert answer.cached_tokens == 256
    assert gap(answer, cold(family, prompt)) > 10 * TOLERANCE
