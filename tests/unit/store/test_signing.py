"""Signed objects of a bucket: who can write to it, and has no key, decides no answer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.store.contents import assert_hit, identity, options, prompt, written
from weft.errors import ConfigError
from weft.store.bucket import Bucket
from weft.store.signing import Signer, read_signer
from weft.store.survey import verify_bucket
from weft.store.tiered_store import TieredStore, open_store

PATIENCE_S = 20.0
TOKENS = prompt(100)


def key_file(folder: Path, letter: str = "k", *, mode: int = 0o600) -> str:
    path = folder / f"key-{letter}"
    path.write_text(letter * 32 + "\n")
    path.chmod(mode)
    return str(path)


def opened(folder: Path, cache: str, key: str | None) -> TieredStore:
    changes: dict[str, Any] = {"cache_directory": str(folder / cache), "refresh_s": 0.05, "key_file": key}
    store = open_store(f"file://{folder / 'bucket'}", identity(), options(**changes))
    assert isinstance(store, TieredStore)
    return store


def until(store: TieredStore, true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        store.poll()
        assert time.monotonic() < end, store.stats()
        time.sleep(0.01)


def uploaded(folder: Path, cache: str, key: str | None) -> None:
    store = opened(folder, cache, key)
    written(store, TOKENS)
    until(store, lambda: store.stats().remote.get("segments", 0) == 1)
    store.close()


def looked(store: TieredStore) -> None:
    """Wait until the segments of others have been looked for twice."""
    done: list[None] = []
    refresh = store.uploads._refresh
    store.uploads._refresh = lambda: done.append(refresh())  # type: ignore[method-assign]
    until(store, lambda: len(done) > 1)


def test_servers_with_the_key_share_a_bucket_and_others_find_nothing(tmp_path: Path) -> None:
    uploaded(tmp_path, "a", key_file(tmp_path))
    second = opened(tmp_path, "b", key_file(tmp_path))
    until(second, lambda: second.match(None, TOKENS, 0) is not None)
    assert_hit(second, TOKENS, 100)
    second.close()
    for cache, key in (("c", key_file(tmp_path, "x")), ("d", None)):
        other = opened(tmp_path, cache, key)
        looked(other)
        assert other.match(None, TOKENS, 0) is None
        other.close()


@pytest.mark.parametrize("signed", [True, False])
def test_objects_without_a_signature_are_not_found(tmp_path: Path, signed: bool) -> None:
    """A stranger puts whole records, with right checksums, to where a server looks. The control: one without a key."""
    uploaded(tmp_path, "stranger", None)
    key = key_file(tmp_path) if signed else None
    if key is not None:
        folder = read_signer(key, flag="--key").folder
        shutil.copytree(tmp_path / "bucket" / "v1", tmp_path / "bucket" / folder / "v1")
    server = opened(tmp_path, "a", key)
    if signed:
        until(server, lambda: server.stats().remote.get("damaged_segments", 0) == 1)
        assert server.match(None, TOKENS, 0) is None
    else:
        until(server, lambda: server.match(None, TOKENS, 0) is not None)
        assert_hit(server, TOKENS, 100)
    server.close()


def test_a_changed_payload_under_a_signed_segment_is_damaged(tmp_path: Path) -> None:
    key = key_file(tmp_path)
    uploaded(tmp_path, "a", key)
    bucket = Bucket(f"file://{tmp_path / 'bucket'}", signer=read_signer(key, flag="--key"))
    assert verify_bucket(bucket, lambda done, total: None).good
    payloads = [one.key for one in bucket.objects("v1/records/")]
    assert payloads
    for name in payloads:
        path = tmp_path / "bucket" / read_signer(key, flag="--key").folder / name
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert bucket.read_all(name) == b""
        into = bytearray(b"x" * (len(content) - 32))
        bucket.read(name, memoryview(into))
        assert not any(into)
    assert len(verify_bucket(bucket, lambda done, total: None).damaged) == len(payloads)
    server = opened(tmp_path, "b", key)
    until(server, lambda: server.match(None, TOKENS, 0) is not None)
    with pytest.raises(AssertionError, match="damaged"):
        assert_hit(server, TOKENS, 100)
    server.close()


def test_a_signature_is_of_a_name_and_a_content() -> None:
    one, other = Signer(b"k" * 32), Signer(b"x" * 32)
    signed = memoryview(one.signed("v1/a", b"content"))
    assert one.content("v1/a", signed) == b"content"
    assert one.content("v1/b", signed) is None
    assert other.content("v1/a", signed) is None
    assert one.content("v1/a", memoryview(b"short")) is None
    assert one.folder != other.folder


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [("k" * 31, 0o600, "31 bytes; a key has at least 32"), ("k" * 32, 0o640, "chmod 600"), (None, 0, "No such file")],
)
def test_a_key_that_cannot_be_one_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        read_signer(str(path), flag="cache.store_key")
    assert caught.value.param == "cache.store_key"
