"""Uploaded files: they go after their days, and no upload passes the bounds."""

from __future__ import annotations

import io
import time
from pathlib import Path

import msgspec
import pytest

from weft.errors import ConfigError
from weft.objects.database import Bounds
from weft.server.batches.files import FileStore, FileStoreFullError, UnknownFileError

LIMITS = Bounds(count=3, bytes=100, age_s=60.0)
EVERYONE = ""
"""The owner where there are no API keys."""


def test_a_file_goes_after_its_days_and_so_do_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    store = FileStore(tmp_path, LIMITS)
    old = store.add(EVERYONE, "old.jsonl", "batch", io.BytesIO(b"x" * 60))
    assert old.expires_at == old.created_at + 60
    monkeypatch.setattr(time, "time", lambda: now_s + 30)
    new = store.add(EVERYONE, "new.jsonl", "batch", io.BytesIO(b"y" * 40))
    assert [one.id for one in store.listed(EVERYONE)] == [new.id, old.id]
    monkeypatch.setattr(time, "time", lambda: now_s + 61)
    with pytest.raises(UnknownFileError):
        store.get(old.id, EVERYONE)
    assert [one.id for one in store.listed(EVERYONE)] == [new.id]
    assert [path.stem for path in tmp_path.glob("file-*")] == [new.id]
    store.add(EVERYONE, "more.jsonl", "batch", io.BytesIO(b"z" * 60))  # the room of the old one
    store.close()
    monkeypatch.setattr(time, "time", lambda: now_s + 1000)
    again = FileStore(tmp_path, LIMITS)
    assert again.listed(EVERYONE) == []
    assert list(tmp_path.glob("file-*")) == []
    again.close()


def test_a_file_whose_bytes_are_gone_can_be_deleted_and_grows_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, LIMITS)
    deleted, old = (store.add(EVERYONE, name, "batch", io.BytesIO(b"x")) for name in ("a", "b"))
    for path in tmp_path.glob("file-*"):
        path.unlink()
    store.delete(deleted.id, EVERYONE)
    assert [one.id for one in store.listed(EVERYONE)] == [old.id]
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 61)
    assert store.listed(EVERYONE) == []
    store.close()


def test_an_upload_beyond_a_bound_names_its_flag_and_leaves_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LIMITS)
    for _ in range(2):
        store.add(EVERYONE, "a", "batch", io.BytesIO(b"x" * 10))
    with pytest.raises(FileStoreFullError, match=r"20 bytes of files and this one has 81; .* 100") as full:
        store.add(EVERYONE, "b", "batch", io.BytesIO(b"x" * 81))
    assert full.value.param == "limits.file_store_size"
    third = store.add(EVERYONE, "c", "batch", io.BytesIO(b"x" * 80))
    with pytest.raises(FileStoreFullError, match="keeps 3 files; the limit is 3") as full:
        store.add(EVERYONE, "d", "batch", io.BytesIO(b""))
    assert full.value.param == "limits.max_stored_files"
    assert len(list(tmp_path.glob("file-*"))) == 3
    with pytest.raises(UnknownFileError):
        store.delete(third.id, "me")
    with pytest.raises(ConfigError, match=r"server\.file_store"):
        FileStore(tmp_path, LIMITS)
    store.close()


def test_an_api_key_fills_half_of_the_store_at_most(tmp_path: Path) -> None:
    store = FileStore(tmp_path, Bounds(count=6, bytes=1000, age_s=60.0))
    for _ in range(3):
        store.add("attacker", "a", "batch", io.BytesIO(b"x"))
    with pytest.raises(FileStoreFullError, match="your API key has 3 files; the limit is 3, half of") as full:
        store.add("attacker", "a", "batch", io.BytesIO(b"x"))
    assert full.value.param == "limits.max_stored_files"
    store.add("bystander", "b", "batch", io.BytesIO(b"x" * 500))
    with pytest.raises(FileStoreFullError, match="500 bytes of files and this one has 1; the limit is 500, half of"):
        store.add("bystander", "b", "batch", io.BytesIO(b"x"))
    store.close()


def test_records_of_an_older_weft_are_entered(tmp_path: Path) -> None:
    now, ids = int(time.time()), ["file-b", "file-a"]
    for at, file_id in enumerate(ids):
        record = {"id": file_id, "owner": "me", "filename": "f", "purpose": "batch", "bytes": 3, "created_at": now + at}
        (tmp_path / f"{file_id}.json").write_bytes(msgspec.json.encode(record))
        (tmp_path / f"{file_id}.data").write_bytes(b"abc")
    batch = {"owner": "me", "batch": {"id": "batch_1", "created_at": now}}
    (tmp_path / "batch_1.json").write_bytes(msgspec.json.encode(batch))
    (tmp_path / "file-torn.data").write_bytes(b"left by a crash")
    for _ in range(2):
        store = FileStore(tmp_path, LIMITS)
        assert [one.id for one in store.listed("me")] == ["file-a", "file-b"]
        assert store.path("file-a", "me").read_bytes() == b"abc"
        assert [msgspec.json.decode(record) for record in store.batches()] == [batch]
        store.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".json", ".data")) == [
        "file-a.data",
        "file-b.data",
    ]
