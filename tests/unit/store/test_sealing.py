"""Sealed records: a store with a key has no known bytes on the disk, and opens for that key and its own bytes only."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from tests.unit.store import page_reader
from tests.unit.store.contents import (
    STATE_BYTES,
    STORED_PAGE_BYTES,
    assert_hit,
    assert_right_or_none,
    event_of,
    fetched,
    identity,
    kv_of,
    opened,
    options,
    page_of,
    prompt,
    put,
    state_of,
    written,
)
from weft.memory.prefix_store import PACKED
from weft.store import upkeep
from weft.store.directory_store import DirectoryStore
from weft.store.ledger import ROW, ROW_BYTES, with_hashes
from weft.store.packed_store import PackedStore
from weft.store.pruning import prune
from weft.store.sealing import Sealer
from weft.store.survey import verify
from weft.store.tiered_store import TieredStore, open_store

SECRET, OTHER = b"k" * 40, b"x" * 40
TOKENS = prompt(300)


def sealed(path: Path, secret: bytes = SECRET, **changes: Any) -> DirectoryStore:
    sealer = Sealer(secret)
    return opened(path, who=identity(more={"key": sealer.key_id}), sealer=sealer, **changes)


def known_bytes(tokens: list[int]) -> list[bytes]:
    """Parts of a record that anyone who knows the prompt could look for."""
    return [
        np.asarray(tokens[:16], "<u4").tobytes(),
        np.asarray(tokens[-8:], "<u4").tobytes(),
        page_of(tokens, 0)[:64],
        page_of(tokens, len(tokens) // 16 - 1)[-64:],
        state_of(tokens)[:64],
        state_of(tokens)[-64:],
    ]


def found(folder: Path, parts: list[bytes]) -> list[bool]:
    everything = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    return [part in everything for part in parts]


@pytest.mark.parametrize("has_key", [True, False])
def test_no_known_bytes_are_on_the_disk_with_a_key(tmp_path: Path, has_key: bool) -> None:
    store = sealed(tmp_path) if has_key else opened(tmp_path)
    written(store, TOKENS)
    row = store.records.index.c["chain"][0].item()
    store.close()
    assert found(tmp_path, known_bytes(TOKENS)) == [not has_key] * 6
    assert found(tmp_path, [row.to_bytes(8, "little")]) == [not has_key]


def test_the_key_opens_the_records_at_the_next_start(tmp_path: Path) -> None:
    store = sealed(tmp_path)
    written(store, TOKENS)
    written(store, [*TOKENS[:288], *prompt(90, 1)])
    written(store, prompt(70, 3), salt="tenant")
    store.close()
    again = sealed(tmp_path)
    assert_hit(again, TOKENS, 300)
    assert_hit(again, TOKENS, 300, start=32)
    assert_hit(again, [*TOKENS[:288], *prompt(90, 1)], 378)
    assert_hit(again, prompt(70, 3), 70, salt="tenant")
    assert fetched(again, prompt(70, 3)) is None
    assert put(again, TOKENS) is None
    assert again.stats().damaged == {}
    again.close()


NOTES = {
    (SECRET, OTHER): "1 snapshots of this model are encrypted with another key",
    (SECRET, b""): "1 snapshots of this model are encrypted, and no key is given",
    (b"", SECRET): "1 snapshots of this model are not encrypted",
    (SECRET, SECRET): "",
    (b"", b""): "",
}


@pytest.mark.parametrize(("wrote", "reads"), NOTES)
def test_another_key_finds_nothing_and_says_so_in_one_line(tmp_path: Path, wrote: bytes, reads: bytes) -> None:
    store = sealed(tmp_path, wrote) if wrote else opened(tmp_path)
    written(store, TOKENS)
    store.close()
    again = sealed(tmp_path, reads) if reads else opened(tmp_path)
    note = NOTES[wrote, reads]
    assert (again.match(None, TOKENS, 0) is None) == bool(note)
    assert [note in one for one in again.stats().notes] == [True] * bool(note)
    written(again, prompt(64, 9))
    assert_hit(again, prompt(64, 9), 64)
    again.close()


def changed_rows(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the rows of a store as someone without the key can, who knows the format."""
    [file] = folder.glob("ledger-*.rows")
    content = file.read_bytes()
    rows = np.frombuffer(content[ROW_BYTES:], ROW).copy()
    change(rows)
    file.write_bytes(content[:ROW_BYTES] + with_hashes(rows))


def test_bytes_that_the_key_has_not_sealed_are_damaged(tmp_path: Path) -> None:
    store = sealed(tmp_path)
    written(store, TOKENS)
    store.close()
    volume = tmp_path / "volumes" / "volume-00000"

    def flip(rows: Any) -> None:
        content, row = bytearray(volume.read_bytes()), rows[-1]
        at, size = int(row["offset"]), int(row["payload_bytes"])
        content[at + size // 2] ^= 1
        volume.write_bytes(content)
        rows["checksum"][-1] = np.void(xxh3_128_digest(content[at : at + size]))

    changed_rows(tmp_path, flip)
    again = sealed(tmp_path)
    assert assert_right_or_none(again, TOKENS) == 0
    assert again.stats().damaged == {"seal": 1}
    written(again, TOKENS)
    assert_hit(again, TOKENS, 300)
    again.close()


@pytest.mark.parametrize("field", ["offset", "tokens_at", "form"])
def test_a_record_in_the_place_of_another_one_does_not_open(tmp_path: Path, field: str) -> None:
    store = sealed(tmp_path)
    for seed in (1, 2):
        written(store, prompt(256, seed))
    store.close()

    def swap(rows: Any) -> None:
        assert rows["kind"].tolist() == [1, 2, 1, 2]
        if field == "form":
            rows["form"][[0, 2]] = 2
            return
        for name in ("tokens_at",) if field == "tokens_at" else ("offset", "checksum"):
            rows[name][[0, 2]] = rows[name][[2, 0]].copy()

    changed_rows(tmp_path, swap)
    again = sealed(tmp_path)
    for seed in (1, 2):
        assert assert_right_or_none(again, prompt(256, seed)) == 0
    assert again.stats().damaged.get("seal") == 2
    again.close()


def test_tokens_that_were_changed_are_a_miss(tmp_path: Path) -> None:
    store = sealed(tmp_path)
    written(store, TOKENS)
    store.close()
    [file] = tmp_path.glob("ledger-*.tokens")
    content = bytearray(file.read_bytes())
    assert len(content) == 4 * 300 + 2 * 28
    content[20] ^= 1
    file.write_bytes(content)
    again = sealed(tmp_path)
    assert assert_right_or_none(again, TOKENS) == 0
    again.close()


def test_compaction_pruning_and_verification_need_no_key(tmp_path: Path) -> None:
    store = sealed(tmp_path)
    plain = opened(tmp_path / "plain")
    for one in (store, plain):
        for seed in range(3):
            written(one, prompt(300, seed))
        one.close()
    for folder in (tmp_path, tmp_path / "plain"):
        assert verify(folder, lambda done, count: None).good
        prune(folder, size_bytes=None)
        assert verify(folder, lambda done, count: None).good
    again = sealed(tmp_path)
    assert again.records.ledger is not None
    compacted = upkeep.compact(again.records.ledger, dict(again.records.space.volumes))
    again.records.compacted(compacted)
    for seed in range(3):
        assert_hit(again, prompt(300, seed), 300)
    again.close()


def test_a_second_server_on_the_directory_reads_what_the_first_one_adds(tmp_path: Path) -> None:
    first = sealed(tmp_path)
    second = sealed(tmp_path)
    written(first, TOKENS)
    second.upkeep.next_follow = 0.0
    end = time.monotonic() + 20
    while second.match(None, TOKENS, 0) is None:
        second.poll()
        assert time.monotonic() < end
    assert_hit(second, TOKENS, 300)
    for one in (first, second):
        one.close()


def test_packed_records_are_sealed_too(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=STATE_BYTES // 4).astype(np.float32).tobytes()
    store = PackedStore(sealed(tmp_path), STORED_PAGE_BYTES, STATE_BYTES, queue_bytes=1 << 20)
    offer = store.offer(None, TOKENS, 300, exact=True)
    assert offer is not None
    from weft.memory.prefix_store import KvPiece, NewSnapshot

    pieces = [KvPiece(at, min(300, at + 256), memoryview(kv_of(TOKENS, at, min(300, at + 256)))) for at in (0, 256)]
    ticket = store.put(NewSnapshot.of(None, TOKENS[:300], pieces, memoryview(numbers), exact=True))
    assert ticket is not None
    assert event_of(store, ticket).kind == "written"
    match = store.store.match(None, TOKENS, 0)
    assert match is not None
    assert match.state_form == PACKED
    assert found(tmp_path, [numbers[:64]]) == [False]
    answer = fetched(store, TOKENS)
    assert isinstance(answer, tuple)
    assert answer[2] == numbers
    store.close()


def test_servers_with_the_key_share_a_bucket_and_others_find_nothing(tmp_path: Path) -> None:
    def at(cache: str, secret: bytes) -> TieredStore:
        sealer = Sealer(secret)
        changes: dict[str, Any] = {"cache_directory": str(tmp_path / cache), "refresh_s": 0.05, "sealer": sealer}
        who = identity(more={"key": sealer.key_id})
        store = open_store(f"file://{tmp_path / 'bucket'}", who, options(**changes))
        assert isinstance(store, TieredStore)
        return store

    def until(store: TieredStore, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not true():
            store.poll()
            assert time.monotonic() < end, store.stats()
            time.sleep(0.01)

    first = at("a", SECRET)
    written(first, TOKENS)
    until(first, lambda: first.stats().remote.get("segments", 0) == 1)
    first.close()
    assert found(tmp_path / "bucket", known_bytes(TOKENS)) == [False] * 6
    second = at("b", SECRET)
    until(second, lambda: second.match(None, TOKENS, 0) is not None)
    assert_hit(second, TOKENS, 300)
    until(second, lambda: second.local.match(None, TOKENS, 0) is not None)  # the copy in front is sealed again
    second.close()
    assert found(tmp_path / "b", known_bytes(TOKENS)) == [False] * 6
    other = at("c", OTHER)
    done: list[None] = []
    refresh = other.uploads._refresh
    other.uploads._refresh = lambda: done.append(refresh())  # type: ignore[method-assign]
    until(other, lambda: len(done) > 1)
    assert other.match(None, TOKENS, 0) is None
    other.close()


def test_a_reader_written_from_the_page_opens_them(tmp_path: Path) -> None:
    store = sealed(tmp_path)
    written(store, TOKENS)
    store.close()
    [prefix] = page_reader.read_store(tmp_path, SECRET)
    assert prefix.tokens == tuple(TOKENS)
    assert (prefix.kv, prefix.state) == (kv_of(TOKENS, 0, 300), state_of(TOKENS))
    assert page_reader.read_store(tmp_path) == []
    assert page_reader.read_store(tmp_path, OTHER) == []


def test_a_key_leaves_nothing_of_itself(tmp_path: Path) -> None:
    store = sealed(tmp_path)
    written(store, TOKENS)
    store.close()
    assert found(tmp_path, [SECRET, SECRET[:16]]) == [False, False]
    assert dataclasses.replace(identity(more={"key": "a"})).without_key == identity().digest
