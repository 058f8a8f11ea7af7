"""A store below the arena: what it brings is what a cold run computes, whatever it does."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fixtures.memory_store import Contents, MemoryStore
from tests.unit.engine.rig import Rig
from weft.engine.sleeper import Sleeper
from weft.schedule.snapshots import parse_snapshots
from weft.schedule.tier_values import RestoreCounts, WriteCounts

PROMPT = [(11 * at + 5) % 97 for at in range(300)]


def contents(rig: Rig) -> Contents:
    return Contents(rig.core.memory.plan.page_bytes)


def test_a_prompt_is_a_hit_after_a_restart() -> None:
    kept = contents(Rig())
    first = Rig(cache=True, store=MemoryStore(kept))
    first.submit("cold", PROMPT)
    first.run()
    first.core.close()
    assert kept.snapshots

    again = Rig(cache=True, store=MemoryStore(kept))
    again.submit("warm", PROMPT)
    again.run()
    assert again.core.failure is None, again.core.failure
    assert again.tokens("warm") == first.tokens("cold")
    stats = again.core.stats()
    assert stats.cached_tokens == 256
    assert stats.computed_tokens < 60


def stored(**rig: object) -> tuple[Contents, list[int]]:
    """What the store has of PROMPT after an engine that computed it, and the cold answer."""
    kept = contents(Rig())
    first = Rig(cache=True, store=MemoryStore(kept), **rig)  # type: ignore[arg-type]
    first.submit("cold", PROMPT)
    first.run()
    first.core.close()
    return kept, first.tokens("cold")


def test_what_is_wrong_in_the_store_shows() -> None:
    """The control: a wrong state that the store calls right is read by a run, and the checker sees it."""
    kept, _ = stored()
    again = Rig(cache=True, store=MemoryStore(kept, fault=lambda: "lies"))
    again.submit("warm", PROMPT)
    for _ in range(50):
        if again.core.failure is None:
            again.core.step()
    assert "holds no state" in str(again.core.failure)


@pytest.mark.parametrize(("fault", "reason"), [("damaged", "damaged"), ("missing", "store_busy")])
def test_what_a_fetch_does_not_bring_is_computed_and_counted(fault: str, reason: str) -> None:
    kept, cold = stored()
    again = Rig(cache=True, store=MemoryStore(kept, fault=lambda: fault))
    again.submit("warm", PROMPT)
    again.run()
    assert again.tokens("warm") == cold
    assert again.core.stats().cached_tokens == 0
    counts = again.core.stats().memory.cache.numbers()
    assert counts[f"lost_{reason}"] == 256
    assert sum(count for name, count in counts.items() if name.startswith("lost_")) == 256


def test_a_prefix_that_is_slower_to_read_than_to_compute_is_not_read() -> None:
    kept, cold = stored()
    store = MemoryStore(kept)
    again = Rig(cache=True, store=store, token_s=1e-9)
    again.submit("warm", PROMPT)
    again.run()
    assert again.tokens("warm") == cold
    assert store.fetch_count == 0
    assert again.core.stats().memory.cache.lost.stored == 256


def test_after_a_slow_read_the_next_ones_are_tried_again() -> None:
    """Only a read measures the rate of reads, so declined restores must end."""
    kept, cold = stored()
    store = MemoryStore(kept)
    again = Rig(cache=True, store=store, token_s=1e-5)
    assert again.tier is not None
    again.tier.prices.fetched(1_000_000, 0.0, 2.0)
    for number in range(100):
        again.submit(f"{number}", PROMPT)
        again.run()
        assert again.tokens(f"{number}") == cold
        if store.fetch_count:
            break
        again.core.flush_cache()
    assert 5 < number < 60, number


def test_a_request_behind_one_that_waits_does_not_wait() -> None:
    kept, cold = stored()
    again = Rig(cache=True, store=MemoryStore(kept, delay=lambda: 40))
    again.submit("warm", PROMPT)
    again.submit("other", 30)
    again.run()
    assert again.tokens("warm") == cold
    ended = {name: answer.events[-1] for (name, _), answer in again.answers.items()}
    order = [
        event.request_id for plan in again.plans for event in ended.values() if plan.admissions and event.request_id
    ]
    first_admitted = next(plan for plan in again.plans if plan.admissions)
    assert order
    assert first_admitted.admissions[0].prompt_tokens == 30
    assert again.core.stats().cached_tokens == 256


def test_a_fetch_past_its_deadline_is_not_waited_for() -> None:
    kept, cold = stored()
    store = MemoryStore(kept, delay=lambda: 1_000_000)
    again = Rig(cache=True, store=store, token_s=1e-3)
    again.submit("warm", PROMPT)
    again.run()
    assert again.tokens("warm") == cold
    assert again.core.stats().memory.cache.lost.store_busy == 256
    assert store.fetch_count == 1


def test_two_requests_wait_for_one_fetch() -> None:
    kept, cold = stored()
    store = MemoryStore(kept, delay=lambda: 5)
    again = Rig(cache=True, store=store)
    again.submit("one", PROMPT)
    again.submit("two", PROMPT)
    again.run()
    assert again.tokens("one") == again.tokens("two") == cold
    assert store.fetch_count == 1
    assert again.core.stats().cached_tokens == 512


def test_a_cancel_during_a_fetch_leaves_nothing_behind() -> None:
    kept, cold = stored()
    again = Rig(cache=True, store=MemoryStore(kept, delay=lambda: 5))
    again.submit("gone", PROMPT)
    again.step()
    again.core.cancel("gone")
    again.run()
    again.submit("later", PROMPT)
    again.run()
    assert again.tokens("later") == cold
    assert again.tier is not None
    assert again.tier.buffers.used_bytes == 0
    assert not again.tier.restores.fetches


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_with_a_load_in_flight_leaves_nothing_cached(overlap: bool) -> None:
    kept, cold = stored()
    again = Rig(cache=True, store=MemoryStore(kept), overlap=overlap)
    again.submit("warm", PROMPT)
    while not any(plan.store.loads for plan in again.plans):
        again.step()
    again.core.flush_cache()
    again.run()
    assert again.tokens("warm") == cold
    again.core.flush_cache()
    while again.core.has_work:
        again.step()
    assert again.core.stats().memory.pages_cached == 0


@pytest.mark.parametrize("used", [True, False])
def test_a_skipped_snapshot_is_written_once_a_request_resumes_at_it(used: bool) -> None:
    kept = contents(Rig())
    rig = Rig(cache=True, store=MemoryStore(kept))
    assert rig.tier is not None
    prices = rig.tier.prices
    size_bytes = rig.tier.buffers.bytes_for(16)
    price_s = prices.saved_s(0, 256, size_bytes) / size_bytes  # worth it with one hit, not with none
    prices.copy_byte_s = price_s
    rig.submit("first", PROMPT, max_tokens=1)
    rig.run()
    assert not kept.snapshots
    assert rig.tier.writes.counts.skipped > 0
    if used:
        rig.submit("again", PROMPT, max_tokens=1)
        rig.run()
    rig.core.write_all(100.0)
    assert bool(kept.snapshots) == used


def test_snapshots_of_several_prompts_are_copied_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of one prompt one after the other: their KV would be copied twice."""
    kept = contents(Rig())
    store = MemoryStore(kept)
    rig = Rig(cache=True, store=store, step_tokens_max=512, snapshots=parse_snapshots("every:64"))
    prompts = [[(number + 7 * token) % 89 + 5 for token in range(139)] for number in range(3)]
    for number, prompt in enumerate(prompts):
        rig.submit(f"p{number}", prompt)
    tier, in_steps = rig.core.store, list[list[bytes]]()
    assert tier is not None
    work = tier.writes.work

    def watched(*, idle: bool) -> object:
        in_steps.append([job.contents.tokens[:16].tobytes() for job in tier.writes._jobs])
        return work(idle=idle)

    monkeypatch.setattr(tier.writes, "work", watched)
    rig.run()
    rig.core.write_all(5.0)
    assert rig.core.failure is None, rig.core.failure
    assert max(map(len, in_steps)) >= 2
    assert all(len(set(first)) == len(first) for first in in_steps)
    assert max(len({one.buffer for one in plan.arena_work.page_stores}) for plan in rig.plans) >= 2
    for prompt in prompts:
        assert store.match(None, prompt, 0) is not None


def test_a_part_of_the_prefix_in_memory_is_not_read_again() -> None:
    kept, cold = stored()
    store = MemoryStore(kept)
    again = Rig(cache=True, store=store, snapshots=parse_snapshots("every:64"))
    again.submit("short", PROMPT[:140])
    again.run()
    store.starts.clear()
    again.submit("warm", PROMPT)
    again.run()
    assert again.tokens("warm") == cold
    assert store.starts == [128]


def test_another_salt_finds_nothing() -> None:
    kept, cold = stored()
    store = MemoryStore(kept)
    again = Rig(cache=True, store=store)
    again.submit("warm", PROMPT, salt="tenant")
    again.run()
    assert again.tokens("warm") == cold
    assert store.fetch_count == again.core.stats().cached_tokens == 0


def test_sleep_writes_what_memory_loses_and_waking_reads_it() -> None:
    kept = contents(Rig())
    rig = Rig(cache=True, store=MemoryStore(kept, delay=lambda: 3))
    rig.submit("cold", PROMPT)
    rig.run()
    sleeper = Sleeper(rig.core)
    sleeper.sleep()
    sleeper.wake_up()
    rig.submit("warm", PROMPT)
    rig.run()
    assert rig.tokens("warm") == rig.tokens("cold")
    assert rig.core.stats().cached_tokens == 256


@settings(max_examples=25, deadline=None)
@example(seed=4022, overlap=True, frames=9)  # a page of a load moves
@given(seed=st.integers(0, 2**32 - 1), overlap=st.booleans(), frames=st.integers(9, 20))
def test_whatever_the_store_does_the_tokens_are_right(seed: int, overlap: bool, frames: int) -> None:
    """Tiny pools with preemption, a store that is slow, loses, damages, refuses and reorders, cancels at any
    moment, a restart in the middle. Tokens are those of an engine without a store and without a cache."""
    chance = Random(seed)
    trunk = [chance.randrange(97) for _ in range(400)]
    prompts = [
        trunk[: chance.randrange(1, 300)] + [chance.randrange(97) for _ in range(chance.randrange(20))]
        for _ in range(8)
    ]
    rows = {"rows_max": 3, "frame_count": frames, "max_model_len": 340}
    plain = Rig(**rows)  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        plain.submit(f"p{number}", prompt)
    plain.run()
    kept = contents(plain)
    for _ in range(2):
        store = MemoryStore(
            kept,
            delay=lambda: chance.choice((1, 1, 2, 9, 60)),
            reorder=seed,
            fault=lambda: chance.choice((None, None, None, "damaged", "missing")),
            refuses=lambda: chance.random() < 0.2,
        )
        rig = Rig(
            cache=True,
            store=store,
            overlap=overlap,
            buffer_bytes=chance.choice((1 << 14, 1 << 22)),
            token_s=chance.choice((1e-3, 1.0)),
            **rows,
        )  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts):
            rig.submit(f"p{number}", prompt)
            for _ in range(chance.randrange(6)):
                rig.step()
        for number in chance.sample(range(len(prompts)), 2):
            rig.core.cancel(f"p{number}")
        rig.run()
        assert rig.core.failure is None
        for number in range(len(prompts)):
            answer = rig.tokens(f"p{number}")
            assert answer == plain.tokens(f"p{number}")[: len(answer)]
            assert rig.answers[f"p{number}", 0].ends == 1
        rig.core.close()
        assert rig.core.failure is None


def test_an_engine_that_has_done_nothing_has_counted_nothing() -> None:
    assert set(asdict(RestoreCounts()).values()) | set(asdict(WriteCounts()).values()) == {0}
    stats = Rig(cache=True).core.stats()
    assert set(asdict(stats.memory.moves).values()) == {0}
