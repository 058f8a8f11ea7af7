"""Stores that are emptied, and stores whose model has other weights from some moment on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.unit.store.contents import event_of, fetched, identity, opened, prompt, put, written
from weft.memory.prefix_store import Store, token_bytes
from weft.store.inbox import parcel_of
from weft.store.packed_store import PackedStore
from weft.store.peer_store import NO_STORE, QUIET_S, PeerStore
from weft.store.renewable_store import RenewableStore

OLD, NEW = b"o" * 16, b"n" * 16
BASE = prompt(300)
OTHER = prompt(200, 5)


def hits(store: Store, tokens: list[int]) -> bool:
    return store.match(None, np.asarray([*tokens, 1], np.int32), 0) is not None


def test_a_cleared_directory_has_nothing_now_and_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    written(store, BASE)
    written(store, [*BASE[:288], *OTHER])
    written(store, OTHER, salt="tenant")
    assert hits(store, BASE)
    store.clear()
    assert not hits(store, BASE)
    assert store.match("tenant", np.asarray([*OTHER, 1], np.int32), 0) is None
    written(store, OTHER)
    store.close()
    again = opened(tmp_path)
    assert not hits(again, BASE)
    assert isinstance(fetched(again, OTHER), tuple), "what came later is whole"
    again.close()


def test_a_put_that_is_under_way_is_cleared_too(tmp_path: Path) -> None:
    store = opened(tmp_path)
    ticket = put(store, BASE)
    assert ticket is not None
    store.clear()
    assert event_of(store, ticket).kind == "dropped"
    store.close()
    again = opened(tmp_path)
    assert not hits(again, BASE)
    again.close()


def test_records_of_another_model_outlive_a_clear(tmp_path: Path) -> None:
    other = identity(weights="w1")
    first = opened(tmp_path, who=other)
    written(first, BASE)
    first.close()
    store = opened(tmp_path)
    written(store, BASE)
    store.clear()
    store.close()
    again = opened(tmp_path, who=other)
    assert hits(again, BASE)
    again.close()


def test_a_reader_clears_nothing(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    written(writer, BASE)
    reader = opened(tmp_path)
    reader.clear()
    assert hits(writer, BASE)
    reader.close()
    writer.close()


def test_puts_that_are_being_packed_are_cleared(tmp_path: Path) -> None:
    below = opened(tmp_path)
    store = PackedStore(below, 640, 5000, queue_bytes=1 << 26)
    put(store, BASE)
    store.clear()
    events = []
    while not events:
        events += store.poll()
    assert [(event.kind, event.reason) for event in events] == [("dropped", "flushed")]
    assert not hits(store, BASE)
    store.close()


def test_a_renewed_store_ends_what_was_under_way_and_finds_nothing_old(tmp_path: Path) -> None:
    store = RenewableStore(opened(tmp_path))
    written(store, BASE)
    pending = put(store, OTHER)
    before = store.changes
    store.renew(lambda: opened(tmp_path, who=identity(weights="w1")))
    assert [event.ticket for event in store.poll()] == [pending], "each put ends once"
    assert store.changes > before
    assert not hits(store, BASE)
    assert not hits(store, OTHER)
    written(store, BASE)
    store.renew(lambda: opened(tmp_path))
    assert hits(store, BASE)
    assert hits(store, OTHER), "closing wrote it, under its own name"
    store.close()


def test_a_store_that_cannot_be_opened_again_is_none(tmp_path: Path) -> None:
    store = RenewableStore(opened(tmp_path))

    def fails() -> Store:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        store.renew(fails)
    assert not hits(store, BASE)
    assert put_nothing(store)


def put_nothing(store: Store) -> bool:
    return store.offer(None, np.asarray(BASE, np.int32), len(BASE), exact=True) is None


def peers() -> PeerStore:
    store = PeerStore(
        NO_STORE, OLD, page_bytes=640, state_bytes=5000, chunk_tokens=64, inbox_bytes=1 << 24, clock=lambda: 0.0
    )
    store.plug(cast(Any, object()))
    return store


def sent(store: PeerStore, namespace: bytes) -> str:
    """Why records of ``namespace`` are refused; empty if they are not."""
    state = memoryview(bytes(5000))
    kv = memoryview(bytes(640))
    parcel = parcel_of(
        namespace, "request", None, token_bytes(BASE[:16]), 0, [(0, 16, 0, kv), (16, 16, 0, state)], exact=True
    )
    return store.inbox.accept(parcel, memoryview(bytes(5640)))


def test_records_of_old_weights_are_dropped_and_refused_between_engines() -> None:
    store = peers()
    assert sent(store, OLD) == ""
    assert hits(store, BASE[:16])
    store.order("waits", "address", "", BASE, 0)
    store.renew(NEW)
    assert not hits(store, BASE[:16])
    assert store.inbox.held_bytes == 0
    assert store.ended() == [("waits", "the weights were replaced")]
    assert "another model" in sent(store, OLD)
    assert sent(store, NEW) == ""


def test_an_order_ends_once_nothing_was_to_be_sent_for_a_while_after_its_prompt() -> None:
    now_s = 100.0
    store = PeerStore(
        NO_STORE, OLD, page_bytes=640, state_bytes=5000, chunk_tokens=64, inbox_bytes=1 << 24, clock=lambda: now_s
    )
    store.plug(cast(Any, object()))
    store.order("waits", "address", "", BASE, 0)
    now_s += 2 * QUIET_S
    assert store.ended() == [], "its prompt is being computed"
    store.computed("waits", len(BASE))
    assert store.ended() == []
    now_s += 0.9 * QUIET_S
    assert store.ended() == []
    now_s += 0.2 * QUIET_S
    [(name, why)] = store.ended()
    assert (name, why[:19]) == ("waits", "nothing to send for")


@pytest.mark.parametrize(("length", "why"), [(80, "its prefix is not cached any more"), (79, ""), (64, "")])
def test_an_order_of_which_nothing_more_is_cached_ends_with_the_reason(length: int, why: str) -> None:
    """Its receiver has 64 tokens. Of 79, whole pages reach no further; of 80, a page was lost."""
    store = peers()
    store.order("waits", "address", "", list(range(length)), 64)
    store.computed("waits", 64)
    assert store.ended() == [("waits", why)]


def test_the_control_an_inbox_that_keeps_its_name_takes_old_records() -> None:
    store = peers()
    store.namespace = NEW
    assert sent(store, OLD) == ""
    assert hits(store, BASE[:16])
