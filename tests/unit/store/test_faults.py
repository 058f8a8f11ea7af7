"""Disks and operators that do their worst: right bytes or none, a counted reason, a clear line."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.unit.store.contents import (
    STATE_BYTES,
    STORED_PAGE_BYTES,
    assert_hit,
    assert_right_or_none,
    event_of,
    fetched,
    identity,
    opened,
    options,
    prompt,
    put,
    written,
)
from tests.unit.store.memory_disk import MemoryDisk
from weft.errors import ConfigError
from weft.memory.prefix_store import StagingBuffers, StoreEvent
from weft.store.directory_store import DirectoryStore
from weft.store.ledger import ROW, ROW_BYTES, header_generation, header_row
from weft.store.opening import LOCK_FILE, open_directory

PLACE = Path("/store")
ROWS, TOKENS = PLACE / "ledger-00000001.rows", PLACE / "ledger-00000001.tokens"
VOLUME = PLACE / "volumes" / "volume-00000"


@pytest.fixture
def disk() -> MemoryDisk:
    """Two prompts are stored: one of two KV records, one that continues it."""
    disk = MemoryDisk()
    store = opened(PLACE, disk=disk)
    written(store, prompt(300))
    written(store, [*prompt(300)[:288], *prompt(100, 1)])
    written(store, prompt(64, 5))
    store.close()
    return disk


def _hits(disk: MemoryDisk) -> tuple[list[int], DirectoryStore]:
    """Positions of the hits of a fresh store; it is closed."""
    store = opened(PLACE, disk=disk)
    prompts = (prompt(300), [*prompt(300)[:288], *prompt(100, 1)], prompt(64, 5))
    hits = [assert_right_or_none(store, tokens) for tokens in prompts]
    store.close()
    return hits, store


def test_the_plain_disk_has_three_hits(disk: MemoryDisk) -> None:
    hits, store = _hits(disk)
    assert hits == [300, 388, 64]
    assert store.stats().damaged == {}


@pytest.mark.parametrize("field", list(ROW.names or ()))
def test_a_flipped_bit_in_a_field_costs_its_row_alone(disk: MemoryDisk, field: str) -> None:
    offset = ROW.fields[field][1]  # type: ignore[index]
    count = len(disk.files[ROWS].content) // ROW_BYTES
    for row in range(1, count):
        disk.files[ROWS].content[row * ROW_BYTES + offset] ^= 1 << row % 8
        hits, store = _hits(disk)
        assert hits != [300, 388, 64]
        assert hits[2] == 64 or row >= count - 2, "other rows are unharmed"
        assert store.stats().damaged["row_hash"] == 1
        assert "row_hash" in store.stats().notes[0]
        disk.files[ROWS].content[row * ROW_BYTES + offset] ^= 1 << row % 8


def test_a_flipped_bit_in_a_payload_is_damaged_and_retired(disk: MemoryDisk) -> None:
    rows = np.frombuffer(bytes(disk.files[ROWS].content[ROW_BYTES:]), dtype=ROW)
    for row in rows:
        for at in (0, int(row["payload_bytes"]) - 1):
            broken = disk.after_kill(len(disk.log))
            broken.files[VOLUME].content[int(row["offset"]) + at] ^= 16
            hits, store = _hits(broken)
            assert hits != [300, 388, 64]
            assert store.stats().damaged["checksum"] >= 1
            assert any("is damaged (checksum) and retired" in note for note in store.stats().notes)
            again, store = _hits(broken)
            assert again == hits
            assert store.stats().damaged == {}, "the record is retired durably"


def test_a_flipped_bit_in_the_tokens_is_another_prompt(disk: MemoryDisk) -> None:
    for at in range(0, len(disk.files[TOKENS].content), 397):
        disk.files[TOKENS].content[at] ^= 1
        broken = disk.after_kill(len(disk.log))
        broken.files[TOKENS].content[:] = disk.files[TOKENS].content
        hits, store = _hits(broken)
        assert hits != [300, 388, 64]
        assert store.stats().damaged["tokens"] >= 1
        assert any("is damaged (tokens) and retired" in note for note in store.stats().notes)
        disk.files[TOKENS].content[at] ^= 1


def test_equal_hashes_of_other_tokens_are_no_hit(disk: MemoryDisk) -> None:
    """A collision of the 64-bit chain: the fetch compares the tokens themselves."""
    store = opened(PLACE, disk=disk)
    tokens = prompt(64, 5)
    prefix = store.match(None, tokens, 0)
    assert prefix is not None
    object.__setattr__(prefix, "tokens", np.asarray(prompt(64, 6), dtype="<u4").tobytes())
    buffers = StagingBuffers(memoryview(bytearray(4 * STORED_PAGE_BYTES)), memoryview(bytearray(STATE_BYTES)))
    event = event_of(store, store.fetch(prefix, 0, buffers))
    assert (event.kind, event.reason) == ("damaged", "tokens")
    assert not any(bytes(buffers.kv))
    store.close()


def test_torn_and_repeated_rows_are_counted(disk: MemoryDisk) -> None:
    rows = disk.files[ROWS].content
    rows += rows[-ROW_BYTES:]
    rows += rows[ROW_BYTES : ROW_BYTES + 50]
    hits, store = _hits(disk)
    assert hits == [300, 388, 64]
    assert store.stats().damaged == {"duplicate": 1, "torn": 1}
    assert "rows of the ledger were dropped: 1 duplicate, 1 torn" in store.stats().notes[0]
    store = opened(PLACE, disk=disk)
    written(store, prompt(80, 8))
    store.close()
    store = opened(PLACE, disk=disk)
    assert_hit(store, prompt(80, 8), 80)
    assert store.stats().damaged == {"duplicate": 1}
    store.close()


@pytest.mark.parametrize("at", [0, 16, 24, 60, ROW_BYTES - 1])
def test_a_flipped_bit_in_the_ledger_s_header_costs_nothing(disk: MemoryDisk, at: int) -> None:
    disk.files[ROWS].content[at] ^= 2
    assert _hits(disk)[0] == [300, 388, 64]


def test_a_header_says_its_generation_and_another_format_has_none() -> None:
    assert header_generation(header_row(7)) == 7
    assert header_generation(header_row(1 << 40)) == 1 << 40
    assert header_generation(header_row(7)[:-1]) is None
    assert header_generation(bytes(ROW_BYTES)) is None


@pytest.mark.parametrize("length", [0, 10, ROW_BYTES - 1])
def test_a_ledger_without_a_header_begins_anew(disk: MemoryDisk, length: int) -> None:
    del disk.files[ROWS].content[length:]
    hits, _ = _hits(disk)
    assert hits == [0, 0, 0]
    store = opened(PLACE, disk=disk)
    written(store, prompt(300))
    assert_hit(store, prompt(300), 300)
    store.close()


@pytest.mark.parametrize(
    ("where", "operation"),
    [
        ("volumes", "create"),
        ("volumes", "preallocate"),
        ("volumes", "write"),
        ("volumes", "sync"),
        ("ledger-00000001.tokens", "write"),
        ("ledger-00000001.tokens", "sync"),
        ("ledger-00000001.rows", "write"),
        ("ledger-00000001.rows", "sync"),
    ],
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_writes_drops_and_goes_on(where: str, operation: str, number: int) -> None:
    disk = MemoryDisk()
    store = opened(PLACE, disk=disk)
    broken = True

    def fault(name: str, path: Path) -> None:
        if broken and name == operation and where in (path.name, path.parent.name):
            raise OSError(number, os.strerror(number))

    disk.fault = fault
    ticket = put(store, prompt(300))
    assert ticket is not None
    child = put(store, prompt(300) + prompt(60, 4))
    event = event_of(store, ticket)
    assert event.kind == "dropped"
    if child is not None:
        time.sleep(0.05)
        store.poll()
    reason = "disk_full" if number == errno.ENOSPC else "disk_error"
    assert store.stats().dropped[reason] >= 1
    assert set(store.stats().dropped) <= {reason, "parent"}
    assert any(os.strerror(number) in note for note in store.stats().notes)
    assert store.match(None, prompt(300), 0) is None
    broken = False
    written(store, prompt(300))
    assert_hit(store, prompt(300), 300)
    assert store.stats().stored_bytes == (3 + 1 + 2) * 4096, "blocks of the failed puts are free again"
    store.close()
    again = opened(PLACE, disk=disk)
    assert_hit(again, prompt(300), 300)
    again.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_a_directory_whose_lock_cannot_be_written_is_refused_in_one_line(number: int) -> None:
    disk = MemoryDisk()

    def fault(name: str, path: Path) -> None:
        if name == "write" and path.name == LOCK_FILE:
            raise OSError(number, os.strerror(number))

    disk.fault = fault
    with pytest.raises(ConfigError, match=f"^--store {PLACE}: {os.strerror(number)}$"):
        opened(PLACE, disk=disk)
    number = errno.ENOSPC
    opened(PLACE, disk=disk).close()  # a full disk: the store is there to be read


def test_a_full_disk_keeps_its_reserve_and_the_store_grows_when_there_is_room() -> None:
    disk = MemoryDisk()
    disk.free = (3 << 20) + (64 << 10)
    store = opened(PLACE, disk=disk, reserve_bytes=2 << 20, capacity_bytes=64 << 20)
    tickets = [put(store, prompt(256, seed)) for seed in range(60)]
    assert tickets[0] is not None
    event_of(store, tickets[0])  # its volume is on the disk now
    assert store.stats().dropped["store_full"] > 5
    assert len([path for path in disk.files if path.parent.name == "volumes"]) == 1
    disk.free = 1 << 30
    store.upkeep.next_free_space = 0.0
    end = time.monotonic() + 10
    while len([path for path in disk.files if path.parent.name == "volumes"]) == 1:
        ticket = put(store, prompt(256, int(time.monotonic() * 1000)))
        if ticket is not None:
            event_of(store, ticket)
        assert time.monotonic() < end
        store.poll()
    store.close()


def test_a_disk_that_stalls_holds_up_no_caller(disk: MemoryDisk) -> None:
    store = opened(PLACE, disk=disk, queue_bytes=40_000)
    stall = threading.Event()

    def fault(name: str, path: Path) -> None:
        if name in ("read", "write"):
            stall.wait(20)

    disk.fault = fault
    began = time.monotonic()
    prefix = store.match(None, prompt(300), 0)
    assert prefix is not None
    buffers = StagingBuffers(memoryview(bytearray(19 * STORED_PAGE_BYTES)), memoryview(bytearray(STATE_BYTES)))
    ticket = store.fetch(prefix, 0, buffers)
    tickets = [put(store, prompt(256, seed)) for seed in range(10, 20)]
    assert tickets[0] is not None
    assert tickets[-1] is None
    assert store.poll() == []
    assert store.match(None, prompt(64, 5), 0) is not None
    assert time.monotonic() - began < 15.0, "the disk stalls for 20 s"
    stall.set()
    assert event_of(store, ticket).kind == "fetched"
    store.close()


def test_permissions_that_are_lost_under_way_are_a_miss(disk: MemoryDisk) -> None:
    store = opened(PLACE, disk=disk)

    def fault(name: str, path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    disk.fault = fault
    answer = fetched(store, prompt(64, 5))
    assert isinstance(answer, StoreEvent)
    assert (answer.kind, answer.reason) == ("missing", "Permission denied")
    ticket = put(store, prompt(100, 7))
    assert ticket is not None
    assert event_of(store, ticket).kind == "dropped"
    disk.fault = lambda name, path: None
    store.close()
    assert _hits(disk)[0] == [300, 388, 64], "what could not be read is not retired"


def test_a_directory_that_cannot_be_written_is_read(disk: MemoryDisk) -> None:
    def fault(name: str, path: Path) -> None:
        if name in ("make_directory", "create", "write", "truncate", "rename"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    disk.fault = fault
    store = opened(PLACE, disk=disk)
    assert_hit(store, prompt(300), 300)
    assert put(store, prompt(50)) is None
    assert any("Permission denied" in note and "only reads" in note for note in store.stats().notes)
    assert not store.stats().writable
    store.close()


def test_a_second_server_on_a_directory_says_so_and_reads(tmp_path: Path) -> None:
    first = opened(tmp_path)
    written(first, prompt(300))
    second = opened(tmp_path)
    assert f"process {os.getpid()} on " in second.stats().notes[0]
    assert "only reads it" in second.stats().notes[0]
    assert_hit(second, prompt(300), 300)
    assert second.offer(None, prompt(400), 400, exact=True) is None
    assert put(second, prompt(400)) is None
    written(first, prompt(100, 3))
    second.upkeep.next_follow = 0.0
    end = time.monotonic() + 10
    while second.match(None, prompt(100, 3), 0) is None and time.monotonic() < end:
        second.poll()
        time.sleep(0.01)
    assert_hit(second, prompt(100, 3), 100)
    second.close()
    first.close()
    third = opened(tmp_path)
    assert third.stats().writable
    third.close()


def test_a_volume_that_is_removed_under_way_is_lost_and_counted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    written(store, prompt(300))
    (tmp_path / "volumes" / "volume-00000").unlink()
    assert_right_or_none(store, prompt(300))
    ticket = put(store, prompt(100, 1))
    assert ticket is not None
    assert event_of(store, ticket).kind == "dropped"
    assert store.stats().damaged["volume"] >= 1
    assert any("volume 0 is lost" in note for note in store.stats().notes)
    assert store.match(None, prompt(300), 0) is None
    written(store, prompt(100, 1))
    store.close()
    again = opened(tmp_path)
    assert_hit(again, prompt(100, 1), 100)
    again.close()


def test_volumes_that_are_removed_between_two_runs_are_counted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    written(store, prompt(300))
    store.close()
    shutil.rmtree(tmp_path / "volumes")
    again = opened(tmp_path)
    assert again.match(None, prompt(300), 0) is None
    assert again.stats().damaged == {"place": 3}
    written(again, prompt(300))
    assert_hit(again, prompt(300), 300)
    again.close()


def test_a_damaged_volume_header_is_no_volume(disk: MemoryDisk) -> None:
    disk.files[VOLUME].content[17] ^= 1
    hits, store = _hits(disk)
    assert hits == [0, 0, 0]
    assert "is not a volume" in store.stats().notes[0]


def test_a_clock_that_jumps_changes_nothing(disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e6]
    monkeypatch.setattr(time, "time", lambda: -1e12)
    store = DirectoryStore(open_directory(PLACE, disk), identity(), options(), clock=lambda: now[0])
    for number, jump in enumerate((-5e5, 1e9, -1e9, 3e12)):
        now[0] += jump
        assert_hit(store, prompt(300), 300)
        ticket = put(store, prompt(48, 50 + number))
        assert ticket is not None
        assert event_of(store, ticket).kind == "written"
    store.close()


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(ConfigError, match=r"thesis\.tex.*name an empty or a new directory"):
        opened(tmp_path)


def test_another_format_is_refused(disk: MemoryDisk) -> None:
    disk.files[PLACE / "store.json"].content[:] = b'{"format": 2}'
    with pytest.raises(ConfigError, match="has format 2, and this weft reads format 1"):
        opened(PLACE, disk=disk)
    disk.files[PLACE / "store.json"].content[:] = b"{"
    with pytest.raises(ConfigError, match=r"store\.json is damaged"):
        opened(PLACE, disk=disk)
