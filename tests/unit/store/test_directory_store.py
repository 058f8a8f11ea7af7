"""One directory: hits, restarts, salts, eviction, limits."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.store.contents import (
    PATIENCE_S,
    STATE_BYTES,
    STORED_PAGE_BYTES,
    assert_hit,
    assert_right_or_none,
    event_of,
    fetched,
    identity,
    opened,
    prompt,
    put,
    written,
)
from weft.memory.prefix_store import StagingBuffers, StoredPrefix
from weft.store import writing
from weft.store.directory_store import DirectoryStore
from weft.store.eviction import ranked_victims
from weft.store.reading import FetchThreads
from weft.store.space import Volumes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = opened(tmp_path / "store")
    yield store
    store.close()


def test_a_stored_prefix_is_a_hit_with_the_same_bytes(store: DirectoryStore) -> None:
    tokens = prompt(700)
    written(store, tokens[:640])
    assert_hit(store, tokens, 640)
    assert_hit(store, tokens, 640, start=256)
    assert_hit(store, tokens, 640, start=304)
    assert store.stats().snapshots == 1


def test_a_stored_prefix_is_a_hit_after_a_restart(tmp_path: Path) -> None:
    tokens = prompt(1000)
    first = opened(tmp_path)
    written(first, tokens[:960])
    written(first, tokens)
    first.close()
    second = opened(tmp_path)
    assert second.stats().notes == ()
    assert_hit(second, [*tokens, 5], 1000)
    assert_hit(second, tokens[:999], 960)
    written(second, [*tokens, *prompt(100, 1)])
    second.close()


def test_only_a_deeper_snapshot_than_the_arena_s_matches(store: DirectoryStore) -> None:
    tokens = prompt(512)
    written(store, tokens)
    assert store.match(None, tokens, 511) is not None
    assert store.match(None, tokens, 512) is None
    assert store.match(None, tokens[:511], 0) is None


def test_a_longer_prefix_writes_only_what_is_new(store: DirectoryStore) -> None:
    tokens = prompt(1024)
    written(store, tokens[:512])
    offer = store.offer(None, tokens, 1024, exact=True)
    assert offer is not None
    assert offer.start == 512
    assert store.offer(None, tokens, 512, exact=True) is None
    before = store.stats().written_bytes
    written(store, tokens)
    assert store.stats().written_bytes - before == 512 // 16 * 640 + 5000
    assert_hit(store, tokens, 1024)
    assert_hit(store, tokens[:600], 512)


def test_prompts_that_part_inside_a_record_both_hit(store: DirectoryStore) -> None:
    one = prompt(600)
    other = [*one[:360], *prompt(240, 1)]
    fork = one[:352]
    for tokens in (one, other, fork):
        written(store, tokens)
    assert_hit(store, one, 600)
    assert_hit(store, other, 600)
    assert_hit(store, one[:599], 352)


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 255, 256, 257, 271])
def test_a_snapshot_may_stand_at_any_token(store: DirectoryStore, length: int) -> None:
    tokens = prompt(400)
    written(store, tokens[:length])
    assert_hit(store, tokens, length)
    written(store, tokens)
    assert_hit(store, tokens, 400)
    assert_hit(store, tokens[:-1], length)


def test_salts_never_share_and_are_never_written(tmp_path: Path) -> None:
    store, tokens = opened(tmp_path), prompt(300)
    written(store, tokens, salt="tenant-of-secret-name")
    assert store.match(None, tokens, 0) is None
    assert store.match("other", tokens, 0) is None
    assert_hit(store, tokens, 300, salt="tenant-of-secret-name")
    written(store, tokens)
    assert_hit(store, tokens, 300)
    store.close()
    assert all(b"tenant-of" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    again = opened(tmp_path)
    assert_hit(again, tokens, 300, salt="tenant-of-secret-name")
    again.close()
    (tmp_path / "secret").write_bytes(bytes(32))
    stranger = opened(tmp_path)
    assert stranger.match("tenant-of-secret-name", tokens, 0) is None
    stranger.close()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "w1"},
        {"kv_dtype": "int8"},
        {"state_dtype": "bfloat16"},
        {"quantised": "int4"},
        {"rope": {"theta": 1e6}},
        {"architecture": {"layers": 5, "heads": 2}},
        {"arithmetic": "torch"},
        {"layout": 2},
        {"adapter": "a"},
    ],
)
def test_another_model_at_the_same_path_never_hits(tmp_path: Path, change: dict[str, object]) -> None:
    first, tokens = opened(tmp_path), prompt(300)
    written(first, tokens)
    first.close()
    other = opened(tmp_path, who=identity(**change))
    assert other.match(None, tokens, 0) is None
    assert (other.stats().snapshots, other.stats().others) == (0, 1)
    other.close()
    same = opened(tmp_path, who=identity(model="another name for it"))
    assert_hit(same, tokens, 300)
    same.close()


def test_rounded_bytes_never_reach_an_exact_engine(tmp_path: Path) -> None:
    rounding, tokens = opened(tmp_path, accept_inexact=True), prompt(600)
    written(rounding, tokens[:300], exact=False)
    prefix = rounding.match(None, tokens, 0)
    assert prefix is not None
    assert not prefix.exact
    rounding.close()
    exact = opened(tmp_path)
    assert exact.match(None, tokens, 0) is None
    written(exact, tokens[:300])
    written(exact, tokens)
    assert_hit(exact, tokens, 600)
    prefix = exact.match(None, tokens, 0)
    assert isinstance(prefix, StoredPrefix)
    assert prefix.exact
    exact.close()


def test_a_full_store_gives_up_what_saves_the_fewest_seconds(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=1 << 20)
    precious = prompt(512, 1000)
    written(store, precious, seconds=1000.0)
    for seed in range(80):
        ticket = put(store, prompt(256, seed), seconds=0.1)
        if ticket is not None:
            event_of(store, ticket)
        store.poll()
    stats = store.stats()
    assert stats.evicted > 20
    assert stats.stored_bytes <= stats.capacity_bytes == 1 << 20
    assert_hit(store, precious, 512)
    assert assert_right_or_none(store, prompt(256, 79)) in (0, 256)
    assert sum(assert_right_or_none(store, prompt(256, seed)) > 0 for seed in range(80)) > 10
    store.close()
    again = opened(tmp_path, capacity_bytes=1 << 20)
    assert again.stats().notes == ()
    assert_hit(again, precious, 512)
    assert all(assert_right_or_none(again, prompt(256, seed)) in (0, 256) for seed in range(80))
    again.close()


def test_a_restored_snapshot_outlives_one_that_is_not(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=1 << 20)
    liked, plain = prompt(256, 500), prompt(256, 501)
    written(store, liked)
    written(store, plain)
    for seed in range(75):
        assert_hit(store, liked, 256)
        ticket = put(store, prompt(256, seed))
        if ticket is not None:
            event_of(store, ticket)
    assert_hit(store, liked, 256)
    assert store.match(None, plain, 0) is None
    store.close()


def test_what_a_longer_prefix_goes_on_from_is_given_up_first(store: DirectoryStore) -> None:
    plain, turn = prompt(256, 1), prompt(256, 2)
    written(store, plain, seconds=2.0)
    written(store, turn)

    def victims() -> list[int]:
        index = store.records.index
        return [index.c["number"].item(entry) for entry in ranked_victims(index, ())]

    assert victims() == [2, 4], "the control: the older one is first"
    written(store, [*turn, *prompt(256, 3)])
    assert victims()[:2] == [4, 2]


def test_a_write_waits_for_the_reads_that_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "READS_FIRST_S", PATIENCE_S)
    waits, goes_on, order = threading.Event(), threading.Event(), list[str]()
    wait_idle, read, write = FetchThreads.wait_idle, Volumes.read, Volumes.write

    def waiting(threads: FetchThreads, seconds: float) -> None:
        waits.set()
        wait_idle(threads, seconds)

    def reading(volumes: Volumes, *place: Any) -> None:
        assert goes_on.wait(PATIENCE_S)
        read(volumes, *place)
        order.append("read")

    def writes(volumes: Volumes, *place: Any) -> None:
        order.append("write")
        write(volumes, *place)

    monkeypatch.setattr(FetchThreads, "wait_idle", waiting)
    monkeypatch.setattr(Volumes, "read", reading)
    monkeypatch.setattr(Volumes, "write", writes)
    store = opened(tmp_path)
    tokens = prompt(256)
    written(store, tokens)
    assert order == ["write", "write"], "the control: nothing is read, and nothing waits"
    waits.clear()
    order.clear()
    prefix = store.match(None, tokens, 0)
    assert prefix is not None
    fetch = store.fetch(
        prefix, 0, StagingBuffers(memoryview(bytearray(STORED_PAGE_BYTES * 16)), memoryview(bytearray(STATE_BYTES)))
    )
    ticket = put(store, prompt(256, 7))
    assert ticket is not None
    assert waits.wait(PATIENCE_S), "the write asks for no read"
    assert order == []
    goes_on.set()
    assert {event_of(store, fetch).kind} == {"fetched"}
    store.close()
    assert order == ["read", "read", "write", "write"]


def test_a_queue_that_is_full_refuses_and_counts(tmp_path: Path) -> None:
    store = opened(tmp_path, queue_bytes=30_000, write_bytes_per_second=20_000.0)
    tickets = [put(store, prompt(256, seed)) for seed in range(20)]
    assert 0 < sum(ticket is not None for ticket in tickets) < 20
    assert store.offer(None, prompt(256, 50), 256, exact=True) is None or store.stats().dropped["queue_full"]
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < 20
    again = opened(tmp_path)
    hits = [assert_right_or_none(again, prompt(256, seed)) for seed in range(20)]
    assert [hit > 0 for hit in hits] == [ticket is not None for ticket in tickets]
    again.close()


def test_a_write_rate_slows_writes_and_nothing_else(tmp_path: Path) -> None:
    now_s = [100.0]
    rate = writing.WriteRate(1000.0, lambda: now_s[0])
    assert [rate.delay(nbytes) for nbytes in (1000, 500, 1500)] == [0.0, 0.0, 0.5]
    now_s[0] += 50.0
    assert [rate.delay(1500), rate.delay(1)] == [0.0, 0.5], "no more than a second of idle time counts"
    store = opened(tmp_path)
    written(store, prompt(256, 1))
    store.close()
    store = opened(tmp_path, write_bytes_per_second=1.0)
    assert put(store, prompt(256, 2)) is not None
    assert_hit(store, prompt(256, 1), 256)
    assert store.match(None, prompt(256, 2), 0) is None
    store.close()
    again = opened(tmp_path)
    assert_hit(again, prompt(256, 2), 256)
    again.close()


@pytest.mark.parametrize(("capacity", "rows"), [(192 << 10, 1024), (40 << 20, 10_240), (1 << 40, 65_536)])
def test_the_ledger_of_a_small_store_is_written_anew_before_it_has_more_rows_than_the_store_blocks(
    tmp_path: Path, capacity: int, rows: int
) -> None:
    store = opened(tmp_path, capacity_bytes=capacity)
    assert store.upkeep.compact_rows_least == rows
    store.close()


def test_a_record_larger_than_a_volume_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=8192, volume_bytes=8192)
    assert put(store, prompt(256)) is None
    assert store.stats().dropped == {"too_large": 1}
    store.close()


def test_a_hit_that_was_evicted_meanwhile_is_missing(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=1 << 20)
    tokens = prompt(256, 7)
    written(store, tokens)
    prefix = store.match(None, tokens, 0)
    assert prefix is not None
    for seed in range(100, 190):
        ticket = put(store, prompt(256, seed), seconds=5.0)
        if ticket is not None:
            event_of(store, ticket)
    buffers = StagingBuffers(memoryview(bytearray(640 * 16)), memoryview(bytearray(5000)))
    assert event_of(store, store.fetch(prefix, 0, buffers)).kind == "missing"
    assert fetched(store, tokens) is None
    store.close()
