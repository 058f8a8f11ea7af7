"""Planning remembers what waiting requests would find. Its plans are those of a scheduler without memory, and
what has not changed is not looked up again."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from tests.fixtures.memory_store import Contents, MemoryStore
from tests.unit.engine.rig import Rig
from weft.memory.prefix import tree
from weft.memory.prefix.cache import PrefixCache
from weft.schedule.plan import StepPlan

PROMPTS = 10


class Forgetful(Exception):
    """A plan differs from that of a scheduler without memory."""


def summary(plan: StepPlan | None) -> Any:
    if plan is None:
        return None
    opened = [(one.seq, one.match.cached_tokens, one.match.lost, one.pages) for one in plan.reservation.opened]
    return plan.store, plan.seqs, plan.starts.tolist(), plan.lengths.tolist(), opened


def compare_plans(rig: Rig) -> None:
    """From now on each plan is made twice, the second time with nothing remembered."""
    scheduler, planned = rig.core.scheduler, rig.core.scheduler.plan

    def plan(**options: Any) -> StepPlan | None:
        first = planned(**options)
        assert scheduler.store is not None
        remembered = scheduler.store.restores._answers, scheduler.reuse._hits
        scheduler.store.restores._answers, scheduler.reuse._hits = {}, {}
        second = planned(**options)
        scheduler.store.restores._answers, scheduler.reuse._hits = remembered
        if summary(first) != summary(second):
            raise Forgetful(f"{summary(first)} is planned, and {summary(second)} without memory")
        return first

    scheduler.plan = plan  # type: ignore[method-assign]


def live_through(seed: int) -> int:
    """Two lives of an engine whose store fails in every way; the number of fetches."""
    chance = Random(seed)
    trunk = [chance.randrange(97) for _ in range(400)]
    prompts = [
        trunk[: chance.randrange(1, 300)] + [chance.randrange(97) for _ in range(chance.randrange(20))]
        for _ in range(PROMPTS)
    ]
    kept, fetches = Contents(Rig().core.memory.plan.page_bytes), 0
    for _ in range(2):
        store = MemoryStore(
            kept,
            delay=lambda: chance.choice((1, 2, 9, 60)),
            reorder=seed,
            fault=lambda: chance.choice((None, None, "damaged", "missing")),
        )
        rig = Rig(
            cache=True,
            store=store,
            rows_max=2,
            frame_count=10,
            max_model_len=340,
            buffer_bytes=chance.choice((1 << 14, 1 << 22)),
            token_s=chance.choice((1e-3, 1.0)),
        )
        compare_plans(rig)
        for number, prompt in enumerate(prompts):
            rig.submit(f"p{number}", prompt, max_tokens=4)
            for _ in range(chance.randrange(3)):
                rig.step()
        rig.run()
        if rig.core.failure is not None:
            raise rig.core.failure
        rig.core.close()
        fetches += store.fetch_count
    return fetches


def test_what_is_remembered_changes_no_plan() -> None:
    assert sum(live_through(seed) for seed in range(8)) > 20


@pytest.mark.parametrize(
    ("owner", "name", "blind"), [(tree, "note_change", lambda *args: None), (MemoryStore, "changes", 0)]
)
def test_a_change_that_is_not_counted_shows(
    owner: Any, name: str, blind: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the comparison fails where the tree or the store changes unseen."""
    monkeypatch.setattr(owner, name, blind)
    with pytest.raises(Forgetful):
        sum(live_through(seed) for seed in range(8))


class Lookups:
    """Counts calls of ``name`` by the first token of the prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, tokens_at: int) -> None:
        self.by_prompt = Counter[int]()
        plain = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.by_prompt[int(args[tokens_at][0])] += 1
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, call)


def prompt(number: int) -> list[int]:
    return [number, *((11 * at + number) % 97 for at in range(299))]


def test_a_plan_looks_nothing_up_for_requests_that_wait_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Contents(Rig().core.memory.plan.page_bytes)
    first = Rig(cache=True, store=MemoryStore(kept), frame_count=120)
    for number in range(8):
        first.submit(f"p{number}", prompt(number), max_tokens=1)
    first.run()
    first.core.close()
    rig = Rig(cache=True, frame_count=120, max_model_len=340, store=MemoryStore(kept, delay=lambda: 1_000_000))
    rig.submit("decodes", [96] * 20, max_tokens=300)
    for number in range(8):
        rig.submit(f"p{number}", prompt(number), max_tokens=1)
    while rig.tier is None or len(rig.tier.restores.fetches) < 8:
        rig.step()
    for _ in range(3):  # what the first one computed enters the tree
        rig.step()
    in_tree = Lookups(monkeypatch, PrefixCache, "match", 1)
    in_store = Lookups(monkeypatch, MemoryStore, "match", 2)
    for _ in range(10):
        rig.step()
    assert (in_tree.by_prompt, in_store.by_prompt) == ({}, {})
    rig.submit("new", prompt(9), max_tokens=1)
    rig.step()
    assert in_tree.by_prompt[9] == in_store.by_prompt[9] == 1, "the control: lookups are counted"
    rig.clock.advance(1e9)
    rig.run()
    assert rig.core.failure is None
    assert all(rig.answers[f"p{number}", 0].ends == 1 for number in range(8))


def test_the_store_is_asked_once_for_a_request_that_waits_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt takes four steps. The others wait for the rest of its tokens."""
    rig = Rig(cache=True, store=MemoryStore(Contents(Rig().core.memory.plan.page_bytes)), step_tokens_max=64)
    assert rig.tier is not None
    rig.tier.prices.copy_byte_s = 1e9  # no write is worth it, so the store never changes
    lookups, seen = Lookups(monkeypatch, MemoryStore, "match", 2), list[Counter[int]]()
    rig.before_execute = lambda plan: seen.append(lookups.by_prompt.copy())
    for number in range(3):
        rig.submit(f"p{number}", prompt(number), max_tokens=1)
    rig.run()
    assert seen[:4] == [{0: 1, 1: 1, 2: 1}] * 4, seen
    assert rig.core.failure is None
