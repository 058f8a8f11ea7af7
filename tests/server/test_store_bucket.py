"""A bucket over HTTP: an S3-speaking server in a process of its own, real requests, and its absence."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import from_url

from tests.unit.store.contents import assert_hit, fetched, identity, options, prompt, written
from weft.errors import ConfigError
from weft.memory.prefix_store import StoreEvent
from weft.store.store import open_store
from weft.store.tiered_store import TieredStore

START_S = 90.0
PATIENCE_S = 30.0


class S3Server:
    """moto's server in a process, with a bucket named ``weft``."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                self.request("PUT", "/weft")
                return
            time.sleep(0.1)
        raise AssertionError("the S3 server did not start")

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, data=body, method=method)
        with urllib.request.urlopen(request, timeout=20) as response:
            content: bytes = response.read()
        return content

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    plain = {"AWS_ACCESS_KEY_ID": "weft", "AWS_SECRET_ACCESS_KEY": "weft", "AWS_REGION": "us-east-1",
             "AWS_ENDPOINT_URL": server.url}
    before = {name: os.environ.get(name) for name in plain}
    os.environ.update(plain)
    yield server
    server.stop()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _opened(location: str, cache: Path, **changes: Any) -> TieredStore:
    store = open_store(location, identity(), options(cache_directory=str(cache), refresh_s=0.2, **changes))
    assert isinstance(store, TieredStore)
    return store


def _until(store: TieredStore, true: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        store.poll()
        assert time.monotonic() < end, store.stats()
        time.sleep(0.01)


def _uploaded(store: TieredStore, count: int) -> None:
    _until(store, lambda: store.stats().remote.get("uploaded", 0) >= count
           and store.stats().remote["waiting_uploads"] == 0)


def test_what_one_server_computed_another_restores(server: S3Server, tmp_path: Path) -> None:
    location = "s3://weft/shared"
    first, second = _opened(location, tmp_path / "a"), _opened(location, tmp_path / "b")
    tokens = prompt(600)
    written(first, tokens[:300])
    written(first, tokens)
    _uploaded(first, 2)
    _until(second, lambda: second.match(None, tokens, 0) is not None)
    prefix = second.match(None, tokens, 0)
    assert prefix is not None
    assert prefix.remote
    assert_hit(second, tokens, 600)
    assert_hit(second, tokens[:599], 300, start=256)
    _until(second, lambda: (hit := second.match(None, tokens, 0)) is not None and not hit.remote)
    assert second.stats().remote["hits"] == 2
    assert_hit(second, tokens, 600)
    assert second.match("tenant", tokens, 0) is None
    first.close()
    second.close()
    third = _opened(location, tmp_path / "a")
    assert_hit(third, tokens, 600)
    third.close()


def test_both_writers_trees_merge_and_objects_are_put_once(server: S3Server, tmp_path: Path) -> None:
    location = "s3://weft/merge"
    first, second = _opened(location, tmp_path / "a"), _opened(location, tmp_path / "b")
    base = prompt(300, 1)
    left, right = [*base, *prompt(100, 2)], [*base, *prompt(100, 3)]
    for store, longer in ((first, left), (second, right)):
        written(store, base)
        written(store, longer)
        _uploaded(store, 2)
    listing = server.request("GET", "/weft?list-type=2&prefix=merge/v1/records/").decode()
    assert listing.count("<Key>") == (2 + 1) + 2 * (1 + 1), "shared payloads are one object"
    third = _opened(location, tmp_path / "c")
    for tokens, position in ((left, 400), (right, 400), (base, 300)):
        _until(third, lambda tokens=tokens, position=position:  # type: ignore[misc]
               (hit := third.match(None, tokens, 0)) is not None and hit.position == position)
        assert_hit(third, tokens, position)
    for store in (first, second, third):
        store.close()


def test_a_damaged_or_missing_object_is_no_hit(server: S3Server, tmp_path: Path) -> None:
    location = "s3://weft/damage"
    first = _opened(location, tmp_path / "a")
    one, other = prompt(64, 1), prompt(64, 2)
    written(first, one)
    written(first, other)
    _uploaded(first, 2)
    first.close()
    second = _opened(location, tmp_path / "b")
    _until(second, lambda: second.match(None, one, 0) and second.match(None, other, 0))
    objects = from_url(location, client_options={"allow_http": True})
    keys = [entry["path"] for page in obstore.list(objects, "v1/records") for entry in page]
    states = sorted(key for key in keys if key.endswith("-5000"))
    content = bytearray(obstore.get(objects, states[0]).bytes())
    content[5] ^= 1
    obstore.put(objects, states[0], bytes(content))
    obstore.delete(objects, states[1])
    answers = [fetched(second, tokens) for tokens in (one, other)]
    assert {(answer.kind, answer.reason) for answer in answers if isinstance(answer, StoreEvent)} == \
        {("damaged", "checksum"), ("missing", "the object is gone")}
    assert second.match(None, one, 0) is second.match(None, other, 0) is None
    assert second.stats().damaged == {"remote checksum": 1, "remote the object is gone": 1}
    second.close()


def test_a_bucket_that_goes_away_slows_nothing_and_loses_nothing(tmp_path: Path) -> None:
    server = S3Server()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"AWS_ACCESS_KEY_ID": "w", "AWS_SECRET_ACCESS_KEY": "w", "AWS_REGION": "us-east-1",
                            "AWS_ENDPOINT_URL": server.url}.items():
            patch.setenv(name, value)
        store = _opened("s3://weft/away", tmp_path / "a")
        tokens = prompt(300)
        written(store, tokens)
        _uploaded(store, 1)
        server.stop()
        later = prompt(200, 5)
        began = time.monotonic()
        written(store, later)
        assert_hit(store, later, 200)
        assert_hit(store, tokens, 300)
        assert time.monotonic() - began < 20
        _until(store, lambda: not store.bucket.available)
        assert any("does not answer" in note for note in store.stats().notes)
        assert store.stats().remote["waiting_uploads"] >= 1
        assert_hit(store, later, 200)
        server.start()
        store.bucket._retry_at = 0.0
        _until(store, lambda: store.stats().remote["waiting_uploads"] == 0)
        store.close()
    server.stop()


def test_a_directory_as_a_bucket_needs_no_server(tmp_path: Path) -> None:
    location = f"file://{tmp_path / 'bucket'}"
    first = _opened(location, tmp_path / "a")
    written(first, prompt(100))
    _uploaded(first, 1)
    first.close()
    second = _opened(location, tmp_path / "b")
    _until(second, lambda: second.match(None, prompt(100), 0) is not None)
    assert_hit(second, prompt(100), 100)
    second.close()


def test_segments_on_the_local_disk_are_bounded_and_go_with_those_of_the_bucket(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"file://{tmp_path / 'bucket'}"
    first = _opened(location, tmp_path / "a")
    written(first, prompt(100))
    _uploaded(first, 1)
    first.close()
    with monkeypatch.context() as patch:
        patch.setattr("weft.store.uploads.SEGMENT_BYTES_MAX", 100)
        bounded = _opened(location, tmp_path / "b")
    _until(bounded, lambda: bounded.stats().remote.get("segments_left_out", 0) == 1)
    assert bounded.match(None, prompt(100), 0) is None
    assert any("weft store prune" in note for note in bounded.stats().notes)
    bounded.close()
    second = _opened(location, tmp_path / "c")
    _until(second, lambda: second.match(None, prompt(100), 0) is not None)
    segments = list((tmp_path / "c").glob("remote/*/*.seg"))
    assert segments
    for one in (tmp_path / "bucket").glob("v1/ledger/*/*/*"):
        one.unlink()
    _until(second, lambda: second.match(None, prompt(100), 0) is None)
    assert not any(one.exists() for one in segments)
    second.close()


def test_a_scheme_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the scheme ftp is not one of s3, "):
        open_store("ftp://somewhere", identity(), options(cache_directory=str(tmp_path)))
