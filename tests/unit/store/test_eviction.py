"""What a full store gives up: the snapshot above, found for all at once, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.unit.store.contents import event_of, opened, prompt, put, written
from weft.memory.prefix_store import token_bytes
from weft.store.directory_store import DirectoryStore, pinned_entries
from weft.store.eviction import positions_above, ranked_victims
from weft.store.index import NO_ENTRY, StoreIndex
from weft.store.ledger import KV, SNAPSHOT


def add_record(index: StoreIndex, parent: int, start: int, tokens: int, number: int) -> int:
    return index.add(
        parent=parent,
        space=0,
        kind=KV,
        number=number,
        head=number,
        chain=number,
        position=start,
        tokens=tokens,
        payload=tokens,
        durable=True,
    )


def add_snapshot(index: StoreIndex, record: int, number: int) -> int:
    position = index.c["position"].item(record) + index.c["tokens"].item(record)
    return index.add(
        parent=record,
        space=0,
        kind=SNAPSHOT,
        number=number,
        head=0,
        chain=0,
        position=position,
        payload=64,
        durable=True,
        seconds=1.0,
    )


def walked(index: StoreIndex, snapshot: int) -> int:
    """The position of the snapshot above, one parent after the other. A snapshot inside a stored page stands
    at the end of the record before its own."""
    c = index.c

    def end_of(record: int) -> int:
        return int(c["position"][record]) + int(c["tokens"][record])

    def is_stop(record: int, beside: bool) -> bool:
        inner = [
            one
            for one in range(index.length)
            if c["kind"][one] == KV
            and c["parent"][one] == record
            and c["tokens"][one] % 16
            and c["snapshot"][one] != NO_ENTRY
        ]
        return bool(c["snapshot"][record] != NO_ENTRY or (beside and inner))

    last = int(c["parent"][snapshot])
    record, beside = int(c["parent"][last]), c["tokens"][last] % 16 == 0
    while record != NO_ENTRY:
        if is_stop(record, beside):
            return end_of(record)
        record, beside = int(c["parent"][record]), True
    return 0


@pytest.mark.parametrize("seed", range(6))
def test_the_snapshot_above_is_that_of_a_walk(seed: int) -> None:
    random, index = Random(seed), StoreIndex()
    records, snapshots, number = list[int](), list[int](), 0
    for _ in range(120):
        whole = [one for one in records if not index.c["tokens"][one] % 16]
        parent = random.choice(whole) if whole and random.random() < 0.9 else NO_ENTRY
        start = 0 if parent == NO_ENTRY else int(index.c["position"][parent] + index.c["tokens"][parent])
        number += 1
        records.append(add_record(index, parent, start, random.choice((16, 64, 256, 7, 21)), number))
        if random.random() < 0.4:
            number += 1
            snapshots.append(add_snapshot(index, records[-1], number))
        if snapshots and random.random() < 0.2:
            index.remove(snapshots.pop(random.randrange(len(snapshots))))
    expected = [walked(index, one) for one in snapshots]
    assert positions_above(index, np.asarray(snapshots)).tolist() == expected
    assert len({*expected}) > 3, "the control: there are several answers"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return opened(tmp_path)


def victims(store: DirectoryStore) -> list[int]:
    """Positions of snapshots, the first that goes first."""
    c = store.records.index.c
    return [int(c["position"][one]) for one in ranked_victims(store.records.index, ()) if c["kind"][one] == SNAPSHOT]


def test_a_walk_is_remembered_until_the_index_changes(store: DirectoryStore) -> None:
    tokens = prompt(300)
    index, root = store.records.index, store.root(None)
    assert root is not None
    written(store, tokens[:256])
    first = index.covered(root[1], token_bytes(tokens), exact=True)
    assert first.end == 256
    assert index.covered(root[1], token_bytes(tokens), exact=True) is first
    written(store, tokens)
    assert index.covered(root[1], token_bytes(tokens), exact=True).end == 300
    store.close()


def test_an_answer_shortly_behind_a_stored_prompt_goes_before_the_prompt(store: DirectoryStore) -> None:
    tokens = prompt(1100)
    written(store, tokens[:1024], seconds=10.24)
    written(store, tokens[:1090], seconds=10.90)
    assert victims(store) == [1090, 1024]
    store.close()


def test_an_answer_far_behind_a_stored_prompt_goes_after_it(store: DirectoryStore) -> None:
    tokens = prompt(1100)
    written(store, tokens[:64], seconds=0.64)
    written(store, tokens[:1090], seconds=10.90)
    assert victims(store) == [64, 1090]
    store.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_prefix_outlives_what_fills_the_store(tmp_path: Path, pinned: bool) -> None:
    session = prompt(64, seed=1)
    kept = [("", token_bytes(session))] if pinned else []
    store = opened(tmp_path, capacity_bytes=1 << 20, volume_bytes=1 << 18, pinned=lambda: kept)
    written(store, session)
    for seed in range(2, 1000):
        ticket = put(store, prompt(64, seed=seed))
        if ticket is not None:
            event_of(store, ticket)
        if store.stats().evicted > 40:
            break
    assert store.stats().evicted > 40
    assert (store.match(None, session, 0) is not None) == pinned
    store.close()


def test_pinned_prefixes_take_half_of_a_store_at_most(tmp_path: Path) -> None:
    prompts = [prompt(64, seed=seed) for seed in range(60)]
    kept = [("", token_bytes(tokens)) for tokens in prompts]
    store = opened(tmp_path, capacity_bytes=1 << 20, volume_bytes=1 << 18, pinned=lambda: kept)
    for tokens in prompts:
        written(store, tokens)
    entries = pinned_entries(store, kept)
    size = sum(int(store.records.index.c["payload"][entry]) for entry in entries)
    assert (1 << 18) < size <= 1 << 19
    store.close()
