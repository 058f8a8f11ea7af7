"""Prefixes with contents that are a function of their tokens, and the calls of an engine in one place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.memory.prefix_store import KvPiece, NewSnapshot, StagingBuffers, Store, StoreEvent, Ticket
from weft.store.directory_store import DirectoryStore
from weft.store.disk import OsDisk
from weft.store.identity import NamespaceIdentity
from weft.store.opening import StoreOptions
from weft.store.tiered_store import open_local

STORED_PAGE_BYTES = 640
STATE_BYTES = 5000
PATIENCE_S = 20.0


def identity(**changes: Any) -> NamespaceIdentity:
    facts: dict[str, Any] = {
        "model": "tiny",
        "weights": "w0",
        "architecture": {"layers": 4, "heads": 2},
        "rope": {"theta": 1e4},
        "kv_dtype": "bfloat16",
        "state_dtype": "float32",
        "quantised": "none",
        "arithmetic": "native",
        "grain_bytes": STORED_PAGE_BYTES,
        "state_bytes": STATE_BYTES,
    }
    return NamespaceIdentity(**{**facts, **changes})


def options(**changes: Any) -> StoreOptions:
    plain: dict[str, Any] = {
        "capacity_bytes": 4 << 20,
        "write_bytes_per_second": 1e12,
        "reserve_bytes": 0,
        "volume_bytes": 1 << 20,
        "read_threads": 2,
    }
    return StoreOptions(**{**plain, **changes})


def opened(
    path: Path, *, disk: OsDisk | None = None, who: NamespaceIdentity | None = None, **changes: Any
) -> DirectoryStore:
    return open_local(path, who or identity(), options(**changes), disk=disk)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1 << 31, length).tolist()


def page_of(tokens: Sequence[int], page: int, salt: str | None = None) -> bytes:
    """KV of tokens [16 page, 16 page + 16): a function of all tokens before its end, and of the salt."""
    seed = hash((tuple(tokens[: 16 * page + 16]), salt)) & 0xFFFF_FFFF
    return np.random.default_rng(seed).bytes(STORED_PAGE_BYTES)


def kv_of(tokens: Sequence[int], start: int, end: int, salt: str | None = None) -> bytes:
    return b"".join(page_of(tokens[:end], page, salt) for page in range(start // 16, -(-end // 16)))


def state_of(tokens: Sequence[int], salt: str | None = None) -> bytes:
    seed = hash((tuple(tokens), salt, "state")) & 0xFFFF_FFFF
    return np.random.default_rng(seed).bytes(STATE_BYTES)


def put(
    store: Store, tokens: Sequence[int], *, salt: str | None = None, exact: bool = True, seconds: float = 1.0
) -> Ticket | None:
    """Offers and puts a snapshot at the end of ``tokens``, as an engine does."""
    position = len(tokens)
    offer = store.offer(salt, tokens, position, exact=exact)
    if offer is None:
        return None
    pieces = [
        KvPiece(start, end, memoryview(kv_of(tokens, start, end, salt)))
        for start in range(offer.start, position, 256)
        for end in [min(position, start + 256)]
    ]
    state = memoryview(state_of(tokens, salt))
    return store.put(NewSnapshot.of(salt, tokens, pieces, state, exact=exact, seconds=seconds))


def event_of(store: Store, ticket: Ticket) -> StoreEvent:
    """Polls until the ticket's event. Other events are lost."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for event in store.poll():
            if event.ticket == ticket:
                return event
        time.sleep(0.001)
    raise AssertionError("no event")


def written(store: Store, tokens: Sequence[int], **more: Any) -> None:
    ticket = put(store, tokens, **more)
    assert ticket is not None, store.stats()
    event = event_of(store, ticket)
    assert event.kind == "written", event


def fetched(
    store: Store, tokens: Sequence[int], *, above: int = 0, start: int = 0, salt: str | None = None
) -> tuple[int, bytes, bytes] | StoreEvent | None:
    """(position, KV, state) of the deepest hit; its event if that is not ``fetched``; None without a hit."""
    prefix = store.match(salt, tokens, above)
    if prefix is None:
        return None
    pages = -(-prefix.position // 16) - start // 16
    kv, state = bytearray(pages * STORED_PAGE_BYTES), bytearray(prefix.state_bytes)
    event = event_of(store, store.fetch(prefix, start, StagingBuffers(memoryview(kv), memoryview(state))))
    return (prefix.position, bytes(kv), bytes(state)) if event.kind == "fetched" else event


def assert_hit(store: Store, tokens: Sequence[int], position: int, *, start: int = 0, salt: str | None = None) -> None:
    """The hit is at ``position``, and every byte is that of a computation."""
    answer = fetched(store, tokens, start=start, salt=salt)
    assert isinstance(answer, tuple), answer
    assert answer[0] == position
    assert answer[1] == kv_of(tokens[:position], start, position, salt)
    assert answer[2] == state_of(tokens[:position], salt)


def assert_right_or_none(store: Store, tokens: Sequence[int], salt: str | None = None) -> int:
    """The bytes of a hit are right, or there is none. Returns its position, 0 without a hit."""
    answer = fetched(store, tokens, salt=salt)
    if not isinstance(answer, tuple):
        return 0
    assert answer[1] == kv_of(tokens[: answer[0]], 0, answer[0], salt)
    assert answer[2] == state_of(tokens[: answer[0]], salt)
    return answer[0]
