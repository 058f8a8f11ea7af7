"""A store below a replayed memory: the tier of the engine, over a disk that is only times and sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.support.synthetic import Library, document_traffic
from weft.costs.step import StepCost
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.memory.prefix_store import KvPiece, NewSnapshot, StagingBuffers
from weft.planning.geometries import find_geometry
from weft.planning.model_plan import PlanOptions, make_plan
from weft.schedule.reuse import Reuse
from weft_tools.sim.replay import replay
from weft_tools.sim.report import Report
from weft_tools.sim.store_tier import DiskModel, PackingModel, StoreModel, VirtualStore, parse_disk
from weft_tools.sim.traffic import Traffic, TrafficRequest

COST = StepCost(fixed_s=5e-3, token_s=1e-4, pair_s=0.0, decode_s=1e-4, context_s=1e-9)
GB = 1e9


@cache
def arena() -> ArenaPlan:
    geometry = find_geometry("Qwen3.5-0.8B")
    assert geometry is not None
    plan = make_plan(geometry.name, geometry.config, PlanOptions(arena_bytes=1_200_000_000))
    return plan_arena(plan.spec, 1_200_000_000)


@cache
def traffic() -> Traffic:
    return document_traffic(
        3, 150, Library(documents=20, front_tokens=1024, part_tokens=512, depth=3, answer_tokens=60)
    )


def store(text: str = "100GB@10GB/s", write: float = GB) -> StoreModel:
    disk = parse_disk(text, int(write))
    assert disk is not None
    return StoreModel(text, disk, arena().page_bytes, arena().slot_bytes)


@cache
def ran(text: str | None, write: float = GB, *, jump: bool = True) -> Report:
    return replay(traffic(), arena(), COST, store=None if text is None else store(text, write), jump=jump)


def test_a_store_brings_back_what_memory_evicted() -> None:
    without, with_store = ran(None), ran("100GB@10GB/s")
    assert with_store.store is not None
    assert with_store.store.restores > 5
    assert with_store.cached_tokens >= without.cached_tokens + with_store.store.restored_tokens // 2
    assert with_store.net_saved_s > without.saved_s
    assert with_store.computed_tokens < without.computed_tokens


def test_a_store_that_reads_slower_than_the_device_computes_changes_no_hit() -> None:
    """The control: nothing is written, because nothing would be read."""
    slow = ran("100GB@10MB/s")
    assert slow.store is not None
    assert slow.store.restores == slow.store.written == 0
    assert slow.cached_tokens == ran(None).cached_tokens


def test_a_lower_write_limit_stores_less() -> None:
    slow, fast = ran("100GB@10GB/s", 2e7).store, ran("100GB@10GB/s").store
    assert slow is not None
    assert fast is not None
    assert 0 < slow.written_bytes < fast.written_bytes / 2
    assert slow.written_bytes < 2e7 * ran("100GB@10GB/s", 2e7).virtual_s + 1e9


def test_a_small_store_evicts_and_stays_within_its_size() -> None:
    small = ran("1GB@10GB/s").store
    assert small is not None
    assert small.evicted > 0
    assert 0 < small.stored_bytes <= 1e9


def test_jumps_change_no_number() -> None:
    assert ran("100GB@10GB/s").digest == ran("100GB@10GB/s", jump=False).digest


def test_latency_costs_time() -> None:
    near, far = ran("100GB@10GB/s"), ran("100GB@10GB/s@50ms")
    assert near.store is not None
    assert far.store is not None
    assert far.store.fetch_s / far.store.restores > near.store.fetch_s / near.store.restores + 0.04


@cache
def burst() -> Traffic:
    """24 documents, and later questions about all of them at once: more than memory holds."""
    first = [TrafficRequest(2.0 * one, 3072, 1, tuple(range(6 * one, 6 * one + 6))) for one in range(24)]
    again = [TrafficRequest(60.0 + 1e-3 * one, 3072 + 512, 40, (*first[one].blocks, 200 + one)) for one in range(24)]
    return Traffic([*first, *again], block_tokens=512)


def resumed() -> list[int]:
    """Where the later questions resumed."""
    report = replay(burst(), arena(), COST, store=store("100GB@50GB/s"))
    assert report.store is not None
    assert report.store.restores > 12
    cached: list[int] = report.timeline.cached_tokens[24:].tolist()
    return cached


def test_what_was_read_stays_until_its_request_is_admitted() -> None:
    assert resumed() == [3072] * 24


def test_without_that_others_evict_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Reuse, "awaits", lambda *_: None)
    assert resumed() != [3072] * 24


# ---------------------------------------------------------------------- the disk


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def put(disk: VirtualStore, tokens: list[int], nbytes: int) -> None:
    whole = len(tokens)
    pieces = [KvPiece(start, min(whole, start + 256), memoryview(bytes(nbytes))) for start in range(0, whole, 256)]
    assert disk.put(NewSnapshot.of(None, tokens, pieces, memoryview(bytes(nbytes)), exact=True, seconds=1.0))


def test_reads_queue_and_a_write_waits_for_them() -> None:
    clock = Clock()
    disk = VirtualStore(DiskModel(1 << 30, 1e6, 0.5, 0.25e6), clock, queue_bytes=1 << 30)
    tokens = np.arange(32).tolist()
    put(disk, tokens, 500_000)
    assert disk.match(None, [*tokens, 7], 0) is None, "a write is under way, and matches"
    clock.now_s = disk.next_event_s
    assert clock.now_s == pytest.approx(4.0)
    [event] = disk.poll()
    assert event.kind == "written"
    prefix = disk.match(None, [*tokens, 7], 0)
    assert prefix is not None
    into = StagingBuffers(memoryview(bytearray(500_000)), memoryview(bytearray(500_000)))
    disk.fetch(prefix, 0, into)
    disk.fetch(prefix, 0, into)
    arrivals = []
    while disk.next_event_s < float("inf"):
        clock.now_s = disk.next_event_s
        arrivals += [clock.now_s - 4.0 for _ in disk.poll()]
    assert arrivals == pytest.approx([1.5, 2.5])
    put(disk, np.arange(100, 132).tolist(), 500_000)
    began_s = clock.now_s
    clock.now_s += 1.0
    disk.fetch(prefix, 0, into)
    ends = []
    while disk.next_event_s < float("inf"):
        clock.now_s = disk.next_event_s
        ends += [(event.kind, clock.now_s - began_s) for event in disk.poll()]
    assert [kind for kind, _ in ends] == ["fetched", "written"]
    # A second of the write, a second of the read, and its latency; the rest of the write goes on beside that.
    assert [end_s for _, end_s in ends] == pytest.approx([2.5, 5.0])


def test_a_fetch_of_an_evicted_prefix_is_missing() -> None:
    clock = Clock()
    disk = VirtualStore(DiskModel(1 << 20, 1e9, 0.0, 0.5e9), clock, queue_bytes=1 << 30)
    tokens = np.arange(32).tolist()
    put(disk, tokens, 400_000)
    clock.now_s = 1.0
    disk.poll()
    prefix = disk.match(None, tokens, 0)
    assert prefix is not None
    put(disk, np.arange(100, 132).tolist(), 400_000)
    disk.fetch(prefix, 0, StagingBuffers(memoryview(bytearray()), memoryview(bytearray())))
    clock.now_s = 2.0
    assert sorted(event.kind for event in disk.poll()) == ["missing", "written"]


def test_a_packed_store_holds_more_and_reads_less() -> None:
    packed = StoreModel(
        "1GB",
        store("1GB@10GB/s").disk,
        arena().page_bytes,
        arena().slot_bytes,
        packing=PackingModel(0.7, 0.85, 4e9, 8e9),
    )
    plain, smaller = ran("1GB@10GB/s"), replay(traffic(), arena(), COST, store=packed)
    assert plain.store is not None
    assert smaller.store is not None
    assert smaller.store.evicted < plain.store.evicted
    assert smaller.store.written_bytes < 0.9 * plain.store.written_bytes
    assert smaller.cached_tokens > plain.cached_tokens


def test_packing_takes_its_time() -> None:
    slow = StoreModel(
        "slow", store().disk, arena().page_bytes, arena().slot_bytes, packing=PackingModel(1.0, 1.0, 5e6, 5e6)
    )
    report = replay(traffic(), arena(), COST, store=slow)
    assert report.store is not None
    plain = ran("100GB@10GB/s").store
    assert plain is not None
    assert report.store.written_bytes < 5e6 * report.virtual_s + 1e9 < plain.written_bytes


def test_the_store_is_part_of_the_hash() -> None:
    report = ran("100GB@10GB/s")
    assert report.store is not None
    assert report.digest != replace(report, store=replace(report.store, restores=0)).digest
