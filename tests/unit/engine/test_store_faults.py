"""Each fault of a disk or an operator, under a whole engine: right tokens, no crash, a count, a line."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.engine.rig import Rig
from tests.unit.store.memory_disk import CHANGES, MemoryDisk
from weft.store import directory_store
from weft.store.directory_store import DirectoryStore
from weft.store.identity import NamespaceIdentity
from weft.store.ledger import ROW_BYTES
from weft.store.opening import StoreOptions, open_directory

PLACE = Path("/store")
ROWS, TOKENS = PLACE / "ledger-00000001.rows", PLACE / "ledger-00000001.tokens"
VOLUME = PLACE / "volumes" / "volume-00000"
PROMPT = [(11 * at + 5) % 97 for at in range(300)]
OTHER = [(13 * at + 2) % 97 for at in range(200)]
CACHED = 256
"""Tokens of PROMPT that the store has."""


class Life:
    """An engine over the store of ``disk``. It waits for real threads in real time; its clock stands still
    until ``late``, so no fetch is late by chance."""

    def __init__(self, disk: MemoryDisk, **clock: Callable[[], float]) -> None:
        arena = Rig().core.memory.plan
        identity = NamespaceIdentity("tiny", "w0", {}, {}, "", "", "", "", arena.page_bytes, arena.slot_bytes)
        options = StoreOptions(
            capacity_bytes=4 << 20, write_bytes_per_second=1e12, reserve_bytes=0, volume_bytes=1 << 20, read_threads=2
        )
        self.store = DirectoryStore(open_directory(PLACE, disk), identity, options, **clock)
        self.rig = Rig(cache=True, store=self.store)
        self.rig.core._pause = lambda seconds: time.sleep(1e-4)

    def tokens(self, name: str, prompt: list[int] = PROMPT) -> list[int]:
        self.rig.submit(name, prompt)
        self.rig.run(steps_max=1_000_000)
        assert self.rig.core.failure is None, self.rig.core.failure
        return self.rig.tokens(name)

    def late(self) -> None:
        self.rig.clock.advance(1e6)

    @property
    def lost(self) -> dict[str, int]:
        counts = self.rig.core.stats().memory.cache.numbers()
        return {
            name.removeprefix("lost_"): count
            for name, count in counts.items()
            if name in ("lost_stored", "lost_damaged", "lost_store_busy") and count
        }

    def close(self) -> None:
        self.rig.core.close()
        assert self.rig.core.failure is None, self.rig.core.failure


@pytest.fixture(scope="module")
def right() -> tuple[list[int], list[int]]:
    """The answers to PROMPT and OTHER of an engine without a store and without a cache."""
    rig = Rig()
    rig.submit("prompt", PROMPT)
    rig.submit("other", OTHER)
    rig.run()
    return rig.tokens("prompt"), rig.tokens("other")


@pytest.fixture(scope="module")
def filled() -> MemoryDisk:
    disk = MemoryDisk()
    life = Life(disk)
    life.tokens("cold")
    life.close()
    return disk


@pytest.fixture
def disk(filled: MemoryDisk) -> MemoryDisk:
    return filled.after_kill(len(filled.log))


def test_without_a_fault_the_prompt_is_a_hit(
    disk: MemoryDisk, right: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """The control: nothing is lost, counted or said."""
    life = Life(disk)
    assert life.tokens("warm") == right[0]
    assert life.rig.core.stats().cached_tokens == CACHED
    stats = life.store.stats()
    assert (life.lost, stats.damaged, stats.dropped, stats.notes, caplog.messages) == ({}, {}, {}, (), [])
    life.close()


def flip(disk: MemoryDisk, path: Path, at: int) -> None:
    disk.files[path].content[at] ^= 4


def a_torn_row(disk: MemoryDisk) -> None:
    disk.files[ROWS].content += disk.files[ROWS].content[:50]


def a_row_twice(disk: MemoryDisk) -> None:
    disk.files[ROWS].content += disk.files[ROWS].content[-ROW_BYTES:]


@pytest.mark.parametrize(
    ("fault", "reason", "says", "cached"),
    [
        (a_torn_row, "torn", "rows of the ledger were dropped: 1 torn", CACHED),
        (a_row_twice, "duplicate", "rows of the ledger were dropped: 1 duplicate", CACHED),
        (lambda disk: flip(disk, ROWS, ROW_BYTES + 20), "row_hash", "rows of the ledger were dropped: ", 0),
        (lambda disk: flip(disk, VOLUME, 4096 + 7), "checksum", "a record is damaged (checksum) and retired", 0),
        (lambda disk: flip(disk, TOKENS, 9), "tokens", "a record is damaged (tokens) and retired", 0),
        (lambda disk: disk.files.pop(VOLUME), "place", "rows of the ledger were dropped: ", 0),
    ],
    ids=["torn row", "row twice", "bit of a row", "bit of a payload", "bit of tokens", "no volume"],
)
def test_what_lies_wrong_on_the_disk_is_counted_and_said(
    disk: MemoryDisk,
    fault: Callable[[MemoryDisk], object],
    reason: str,
    says: str,
    cached: int,
    right: tuple[list[int], list[int]],
) -> None:
    fault(disk)
    life = Life(disk)
    assert life.tokens("warm") == right[0]
    assert life.rig.core.stats().cached_tokens == cached
    stats = life.store.stats()
    assert stats.damaged[reason] >= 1, stats
    assert any(f"{PLACE}: {says}" in note for note in stats.notes), stats.notes
    assert life.lost == ({"damaged": CACHED} if reason in ("checksum", "tokens") else {})
    life.close()
    again = Life(disk)
    assert again.tokens("computed and stored again") == right[0]
    assert again.rig.core.stats().cached_tokens == CACHED
    again.close()


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "disk_error"), (errno.EACCES, "disk_error")]
)
def test_a_disk_that_takes_no_bytes_serves_what_it_has(
    disk: MemoryDisk, number: int, reason: str, right: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(disk)

    def fault(operation: str, path: Path) -> None:
        if operation == "write":
            raise OSError(number, os.strerror(number))

    disk.fault = fault
    assert (life.tokens("warm"), life.tokens("other", OTHER)) == right
    assert life.rig.core.stats().cached_tokens == CACHED
    life.rig.core.write_all(20.0)
    life.close()
    assert life.store.stats().dropped[reason] >= 1
    assert f"{PLACE}: a write failed: {os.strerror(number)}" in caplog.messages


def test_permissions_that_are_lost_under_way_are_counted_and_said(
    disk: MemoryDisk, right: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(disk)

    def fault(operation: str, path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    disk.fault = fault
    assert life.tokens("warm") == right[0]
    assert life.lost == {"store_busy": CACHED}
    assert life.store.stats().damaged == {"Permission denied": 1}
    assert f"{PLACE}: a record could not be read (Permission denied); its prompt is computed" in caplog.messages
    disk.fault = lambda operation, path: None
    life.close()


def test_a_disk_that_stalls_delays_no_request_past_its_deadline(
    disk: MemoryDisk,
    right: tuple[list[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(directory_store, "STALL_S", 0.0)
    life = Life(disk)
    goes_on = threading.Event()
    disk.fault = lambda operation, path: goes_on.wait(60) or None if operation in ("read", "write") else None
    life.rig.submit("warm", PROMPT)
    while not life.rig.tier or not life.rig.tier.restores.fetches:
        life.rig.step()
    life.late()
    life.rig.run(steps_max=1_000_000)
    assert life.rig.tokens("warm") == right[0]
    assert life.tokens("other", OTHER) == right[1]
    assert life.rig.tier.restores.counts.late == 1
    assert life.lost == {"store_busy": CACHED}
    while not any("a write" in message for message in caplog.messages):
        life.rig.core.poll_store()
    assert f"{PLACE}: the disk has not answered a read for 0 s; prompts are computed" in caplog.messages
    goes_on.set()
    life.close()


def test_a_second_engine_reads_and_says_so(disk: MemoryDisk, right: tuple[list[int], list[int]]) -> None:
    first, second = Life(disk), Life(disk)
    assert [life.tokens("warm") for life in (first, second)] == [right[0]] * 2
    assert second.rig.core.stats().cached_tokens == CACHED
    assert second.tokens("other", OTHER) == right[1]
    second.rig.core.write_all(20.0)
    assert second.store.stats().dropped["read_only"] >= 1
    assert f"process {os.getpid()} on " in second.store.stats().notes[0]
    assert second.store.stats().notes[0].endswith(f"writes to {PLACE}; this process only reads it")
    second.close()
    first.close()


def test_a_volume_that_is_removed_under_way_is_counted_and_said(
    disk: MemoryDisk, right: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(disk)
    disk.remove(VOLUME)
    assert (life.tokens("warm"), life.tokens("other", OTHER)) == right
    life.rig.core.write_all(20.0)
    assert life.store.stats().damaged == {os.strerror(errno.ENOENT): 1}
    assert life.store.stats().dropped["disk_error"] >= 1
    assert f"{PLACE}: volume 0 is lost with its records" in caplog.messages
    life.close()
    again = Life(disk)
    assert (again.tokens("warm"), again.tokens("other", OTHER)) == right
    again.close()


def test_a_clock_that_jumps_changes_no_token(
    disk: MemoryDisk, right: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter([1e6, -5e5, 1e9, -1e9, 3e12] * 100_000)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    life = Life(disk, clock=lambda: next(jumps))
    assert (life.tokens("warm"), life.tokens("other", OTHER)) == right
    assert life.rig.core.stats().cached_tokens == CACHED
    life.close()
    assert life.store.stats().damaged == {}


def test_a_kill_at_any_operation_changes_no_token(filled: MemoryDisk, right: tuple[list[int], list[int]]) -> None:
    cached = set()
    for count, operation in enumerate(filled.log):
        if operation[0] not in CHANGES:
            continue
        life = Life(filled.after_torn_write(count))
        assert life.tokens("warm") == right[0]
        cached.add(life.rig.core.stats().cached_tokens)
        life.close()
    assert cached == {0, CACHED}
