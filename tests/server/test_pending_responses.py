"""Responses between their answer and the database: read everywhere, and there after a death."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.server.test_response_store import MANY, opened, stored
from weft.server.responses import store as module
from weft.server.responses.database import ResponseStoreError, UnknownResponseError
from weft.server.responses.pending import PendingLog, left_behind
from weft.server.responses.store import ResponseStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.sqlite"


def pending_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.pending-*"))


async def store_with(path: Path, *names: str) -> ResponseStore:
    """An open store, whose responses ``names`` are a conversation that is pending."""
    store = ResponseStore(path, MANY)
    assert await store.put(lambda: stored("first"), "me")
    for at, name in enumerate(names):
        parent = names[at - 1] if at else None
        assert await store.put(lambda name=name, parent=parent: stored(name, parent), "me",  # type: ignore[misc]
                               is_small=True)
    return store


def in_database(path: Path, *names: str) -> list[str]:
    database = opened(path, clock=time.time)  # type: ignore[arg-type]
    return [name for name in names if database.get(name, "me") is not None]


async def test_a_pending_response_is_read_continued_and_deleted(path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 60.0)
    store = await store_with(path, "a", "b")
    assert in_database(path, "first", "a", "b") == ["first"], "one transaction has to wait for nothing"
    assert (await store.get("b", "me")).parent == "a"
    with pytest.raises(UnknownResponseError):
        await store.get("b", "you")
    assert [one.response_id for one in await store.path_to("b", "me")] == ["a", "b"]
    assert in_database(path, "a", "b") == ["a", "b"]
    await store.put(lambda: stored("c"), "me", is_small=True)
    await store.delete("c", "me")
    with pytest.raises(UnknownResponseError):
        await store.get("c", "me")
    await store.close()
    assert not pending_files(path)


async def test_another_process_waits_for_what_is_pending(path: Path) -> None:
    store = await store_with(path, "a")
    other = ResponseStore(path, MANY)
    assert (await other.get("a", "me")).response_id == "a"
    with pytest.raises(UnknownResponseError):
        await other.get("nothing", "me")
    await store.close()
    await other.close()


@pytest.mark.parametrize("torn_bytes", [0, 1])
async def test_a_process_that_dies_leaves_its_responses_to_the_next(
        path: Path, monkeypatch: pytest.MonkeyPatch, torn_bytes: int) -> None:
    monkeypatch.setattr(module, "LINGER_S", 60.0)
    dying = await store_with(path, "a", "b")
    [file] = pending_files(path)
    image = file.read_bytes()
    dying.close_now()  # as a kill: nothing is entered
    dying._files.rotate()[0].remove()  # the system closes its files, and with them the lock
    file.write_bytes(image[:len(image) - torn_bytes])
    assert in_database(path, "a", "b") == []
    heir = ResponseStore(path, MANY)
    heir.open_now()
    assert (await heir.get("a", "me")).response_id == "a"
    assert in_database(path, "a", "b") == (["a"] if torn_bytes else ["a", "b"])
    assert not pending_files(path)
    await heir.close()


async def test_what_a_live_process_has_is_left_alone(path: Path) -> None:
    log = PendingLog(path)
    log.append("me", stored("a"))
    [file] = pending_files(path)
    with left_behind(file) as entries:
        assert entries is None
    assert file.exists()
    [own] = log.rotate()
    own.remove()
    with left_behind(file) as entries:
        assert entries is None, "it is gone"


async def test_a_disk_that_refuses_is_said_and_the_responses_before_stay(
        path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 60.0)
    store = await store_with(path, "a")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(PendingLog, "append", refuse)
        with pytest.raises(ResponseStoreError, match="no space left"):
            await store.put(lambda: stored("b"), "me", is_small=True)
    assert (await store.get("a", "me")).response_id == "a"
    await store.close()
    assert in_database(path, "a", "b") == ["a"]


async def test_a_transaction_that_fails_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.001)
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    store = await store_with(path)
    database = store._database
    assert database is not None
    enter, failures = database.put_all, iter((True, False, False))

    def fail_once(entries: object) -> None:
        if next(failures):
            raise OSError("the disk is away")
        enter(entries)  # type: ignore[arg-type]

    monkeypatch.setattr(database, "put_all", fail_once)
    await store.put(lambda: stored("a"), "me", is_small=True)
    deadline_s = time.monotonic() + 5
    while pending_files(path) and time.monotonic() < deadline_s:
        assert (await store.get("a", "me")).response_id == "a"
        await asyncio.sleep(0.005)
    assert in_database(path, "a") == ["a"]
    await store.close()
