"""Writes to the store: whose buffer a job's is, from its first copy to its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.memory.arena_work import ArenaWork
from weft.memory.prefix_store import StoreEvent, TransferBuffers
from weft.schedule import store_writes
from weft.schedule.store_writes import StoreWrites

PAGES = 6


class OneSnapshot:
    """A memory with one snapshot of PAGES pages, which may be gone."""

    def __init__(self) -> None:
        self.gone = False
        self.pins = SimpleNamespace(has_due=False, due=lambda *_: None)
        self.new = [7]
        self.plan = SimpleNamespace(pages_per_frame=1, compressed_kv_dtype=None, compressed_kv_bytes=0, page_bytes=4)
        self.contents = SimpleNamespace(
            node=7,
            start=0,
            position=16 * PAGES,
            form="exact",
            salt="",
            tokens=np.arange(16 * PAGES),
            exact=True,
            has_compressed=False,
            pages=tuple(range(PAGES)),
            slot=3,
            parts=(),
            hits=0,
        )

    def take_new_snapshots(self) -> list[int]:
        new, self.new = self.new, []
        return new

    def snapshot_contents(self, node: int, start: int = 0) -> Any:
        return None if self.gone else self.contents

    def snapshot_outlook(self, node: int) -> None:
        return None


@pytest.fixture
def memory() -> OneSnapshot:
    return OneSnapshot()


@pytest.fixture
def buffers() -> TransferBuffers:
    return TransferBuffers(4, 4, limit_bytes=1 << 20)


@pytest.fixture
def prices() -> SimpleNamespace:
    return SimpleNamespace(worth_of_write_s=lambda *_: 1.0, compute_s=lambda *_: 1.0)


@pytest.fixture
def orders() -> SimpleNamespace:
    """Snapshots that other engines wait for: all, while it is open."""
    made = SimpleNamespace(open=False, wants=lambda *_: made.open)
    return made


@pytest.fixture
def writes(
    memory: OneSnapshot, buffers: TransferBuffers, prices: SimpleNamespace, orders: SimpleNamespace
) -> StoreWrites:
    store: Any = SimpleNamespace(offer=lambda *_, **__: SimpleNamespace(start=0, above=0), put=lambda *_, **__: 1)
    given: tuple[Any, ...] = (store, memory, buffers, prices, lambda: 0.0)
    made = StoreWrites(*given, write_bytes_s=0, step_bytes=2 * 4, orders=orders)  # type: ignore[arg-type]
    memory.new = [7]
    made.committed(ArenaWork(), 1)
    return made


def test_a_buffer_that_a_step_in_flight_writes_is_not_given_away(
    memory: OneSnapshot, buffers: TransferBuffers, writes: StoreWrites
) -> None:
    """The step was launched or will be; its snapshot is evicted meanwhile."""
    writes.look()
    pages, states = writes.work(idle=False)
    assert 0 < sum(len(one.pages) for one in pages) < PAGES, "some of it is left"
    writes.committed(ArenaWork(page_stores=pages, state_stores=states), 5)
    memory.gone = True
    writes.look()
    assert len(buffers) == 1, "step 5 names it"
    writes.finished(4)
    writes.look()
    assert len(buffers) == 1
    writes.finished(5)
    writes.look()
    assert not len(buffers)
    assert writes.counts.lost == 1


def test_a_buffer_that_no_step_names_is_free_at_once(
    memory: OneSnapshot, buffers: TransferBuffers, writes: StoreWrites
) -> None:
    writes.look()
    assert len(buffers) == 1
    memory.gone = True
    writes.look()
    assert not len(buffers)


def test_a_snapshot_that_takes_several_steps_goes_on_where_it_was(
    memory: OneSnapshot, buffers: TransferBuffers, writes: StoreWrites
) -> None:
    copied: list[int] = []
    for step in range(2, 6):
        writes.look()
        pages, states = writes.work(idle=False)
        copied += [page for one in pages for page in one.pages]
        writes.committed(ArenaWork(page_stores=pages, state_stores=states), step)
        writes.finished(step)
    assert copied == list(range(PAGES)), "each page once"
    assert len(buffers) == 1, "the store has it"
    assert (writes.counts.lost, writes.has_step) == (0, False)


def test_candidates_that_are_gone_before_their_turn_count_as_lost(memory: OneSnapshot, writes: StoreWrites) -> None:
    memory.gone = True
    writes.look()
    assert (writes.counts.lost, writes.has_step) == (1, False)
    writes.add(7)
    writes.look()
    assert (writes.counts.lost, writes.has_step) == (2, False)


def test_more_candidates_than_are_kept_count_as_lost(writes: StoreWrites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writes, "CANDIDATES_MAX", 2)
    writes.look()
    for node in range(20, 25):
        writes.add(node)
    assert writes.counts.lost == 3


def test_a_memory_that_is_lost_leaves_no_job_no_candidate_and_no_buffer(
    memory: OneSnapshot, buffers: TransferBuffers, writes: StoreWrites
) -> None:
    """Its snapshots' numbers may mean others from now on, of other weights."""
    writes.look()
    writes.add(7)
    memory.new = [7]
    assert (len(buffers), writes.has_step) == (1, True)
    writes.forget()
    assert not len(buffers)
    assert not writes.is_waiting
    writes.committed(ArenaWork(), 2)
    writes.look()
    assert not writes.is_waiting, "nor is one that was new when memory was lost"
    memory.new = [7]
    writes.committed(ArenaWork(), 3)
    writes.look()
    assert writes.has_step, "new ones are written as before"


def test_a_candidate_that_was_skipped_is_none_in_the_next_memory(
    memory: OneSnapshot, prices: SimpleNamespace, writes: StoreWrites
) -> None:
    prices.worth_of_write_s = lambda *_: 0.0
    writes.look()
    assert writes.counts.skipped == 1
    writes.forget()
    writes.committed(ArenaWork(), 2, resumed=[7])
    assert not writes.is_waiting


def test_a_put_for_another_engine_that_outlives_its_memory_makes_no_candidate(
    buffers: TransferBuffers, writes: StoreWrites, orders: SimpleNamespace
) -> None:
    orders.open = True
    writes.look()
    pages, states = writes.work(idle=True)
    writes.committed(ArenaWork(page_stores=pages, state_stores=states), 5)
    writes.finished(5)
    writes.forget()
    assert len(buffers) == 1, "the store reads it"
    writes.take(StoreEvent(1, "written"))
    assert (len(buffers), writes.counts.written, writes.is_waiting) == (0, 1, False)
