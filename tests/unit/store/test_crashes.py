"""A kill after every operation, a torn write, a loss of power: right bytes or none, and the store goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.store.contents import assert_right_or_none, event_of, identity, opened, options, prompt, put, written
from tests.unit.store.memory_disk import CHANGES, MemoryDisk
from weft.store.directory_store import DirectoryStore
from weft.store.opening import open_directory, write_namespace

PLACE = Path("/store")
PROMPTS = [
    prompt(300, 1),
    [*prompt(300, 1), *prompt(200, 2)],
    prompt(64, 3),
    *(prompt(256, number) for number in range(9, 21)),
]
SMALL = {"capacity_bytes": 192 << 10, "volume_bytes": 96 << 10}


def _compacting(disk: MemoryDisk) -> DirectoryStore:
    directory = open_directory(PLACE, disk)
    write_namespace(PLACE, disk, identity())
    return DirectoryStore(directory, identity(), options(**SMALL), compact_rows_least=20)


@pytest.fixture(scope="module")
def history() -> tuple[MemoryDisk, list[tuple[int, int]]]:
    """A disk whose store was filled, evicted, restored from, and compacted. Second: (length of the log when
    a prompt was durable, its number)."""
    disk = MemoryDisk()
    store = _compacting(disk)
    durable = []
    for number, tokens in enumerate(PROMPTS):
        for _ in range(20):
            ticket = put(store, tokens)
            if ticket is not None:
                assert event_of(store, ticket).kind == "written"
                durable.append((len(disk.log), number))
                break
            store.poll()
        assert_right_or_none(store, tokens)
    stats = store.stats()
    store.close()
    assert stats.evicted > 5
    assert len(durable) == len(PROMPTS)
    renames = [operation[2].name for operation in disk.log if operation[0] == "rename"]
    assert "ledger-00000002.rows" in renames, "the scenario has a compaction"
    return disk, durable


def _check(disk: MemoryDisk) -> int:
    """Opens what a crash left: every hit has the right bytes, and a new prompt can be stored. Returns the
    number of hits."""
    store = opened(PLACE, disk=disk, **SMALL)
    hits = sum(assert_right_or_none(store, tokens) > 0 for tokens in PROMPTS)
    assert not store.stats().damaged.keys() & {"checksum", "tokens", "row"}, store.stats()
    fresh = prompt(48, 99)
    for _ in range(20):
        ticket = put(store, fresh)
        if ticket is not None and event_of(store, ticket).kind == "written":
            break
        store.poll()
    assert assert_right_or_none(store, fresh) == 48
    store.close()
    return hits


def _cuts(disk: MemoryDisk) -> list[int]:
    return [count for count in range(len(disk.log) + 1) if count == len(disk.log) or disk.log[count][0] in CHANGES]


def test_a_kill_at_any_operation_leaves_right_bytes_or_none(history: tuple[MemoryDisk, list[tuple[int, int]]]) -> None:
    disk, _ = history
    hits = [_check(disk.after_kill(count)) for count in _cuts(disk)]
    assert hits[0] == 0
    assert max(hits) > 3
    assert hits[-1] > 2


def test_a_torn_write_leaves_right_bytes_or_none(history: tuple[MemoryDisk, list[tuple[int, int]]]) -> None:
    disk, _ = history
    writes = [count for count, operation in enumerate(disk.log) if operation[0] == "write"]
    hits = [_check(disk.after_torn_write(count)) for count in writes]
    assert max(hits) > 3


def test_a_loss_of_power_loses_nothing_that_was_synced(history: tuple[MemoryDisk, list[tuple[int, int]]]) -> None:
    disk, durable = history
    for seed, (count, number) in enumerate(durable):
        lost = disk.after_power_loss(count, seed)
        store = opened(PLACE, disk=lost, **SMALL)
        assert assert_right_or_none(store, PROMPTS[number]) == len(PROMPTS[number])
        store.close()
    for seed, count in enumerate(_cuts(disk)):
        _check(disk.after_power_loss(count, seed))


def _reordered(disk: MemoryDisk) -> MemoryDisk:
    """What a store would leave that wrote its rows before its payloads: the payloads are lost."""
    payloads = {
        operation[1] for operation in disk.log if operation[0] == "create" and operation[2].parent.name == "volumes"
    }
    kept = [
        operation
        for operation in disk.log
        if not (operation[0] == "write" and operation[1] in payloads and operation[2] > 0)
    ]
    return disk.replayed(kept)


def test_rows_without_payloads_are_noticed(history: tuple[MemoryDisk, list[tuple[int, int]]]) -> None:
    """The control of the tests above: their check fails where rows are durable before payloads."""
    with pytest.raises(AssertionError, match="checksum"):
        _check(_reordered(history[0]))


def test_the_kill_of_a_put_keeps_the_puts_before_it() -> None:
    disk = MemoryDisk()
    store = opened(PLACE, disk=disk)
    first, second = prompt(256, 1), prompt(256, 2)
    written(store, first)
    begin = len(disk.log)
    written(store, second)
    store.close()
    seen = set()
    for count in range(begin, len(disk.log) + 1):
        again = opened(PLACE, disk=disk.after_kill(count))
        assert assert_right_or_none(again, first) == 256
        seen.add(assert_right_or_none(again, second))
        again.close()
    assert seen == {0, 256}
