"""A bucket over HTTP: an S3-speaking server in a process of its own, real requests, and its absence."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import from_url

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import eventually, running_server
from tests.support.given_costs import GIVEN_COSTS
from tests.unit.store.contents import assert_hit, fetched, identity, options, prompt, written
from weft.errors import ConfigError
from weft.memory.prefix_store import StoreEvent
from weft.store import bucket, uploads
from weft.store.bucket import Bucket
from weft.store.tiered_store import TieredStore, open_store

START_S = 90.0
PATIENCE_S = 30.0


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def point_at(patch: pytest.MonkeyPatch, url: str) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "w",
        "AWS_SECRET_ACCESS_KEY": "w",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }.items():
        patch.setenv(name, value)


class S3Server:
    """moto's server in a process, with a bucket named ``weft``. ``checks_keys``: it knows no key, and refuses
    every request but the one that creates the bucket."""

    def __init__(self, *, checks_keys: bool = False) -> None:
        self.environment = {"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if checks_keys else {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environment},
        )
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
    plain = {
        "AWS_ACCESS_KEY_ID": "weft",
        "AWS_SECRET_ACCESS_KEY": "weft",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.url,
    }
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
    _until(
        store, lambda: store.stats().remote.get("uploaded", 0) >= count and store.stats().remote["waiting_uploads"] == 0
    )


def test_what_one_server_computed_another_restores(server: S3Server, tmp_path: Path) -> None:
    location = "s3://weft/shared"
    first, second = _opened(location, tmp_path / "a"), _opened(location, tmp_path / "b")
    tokens = prompt(600)
    written(first, tokens[:300])
    written(first, tokens)
    _uploaded(first, 2)
    assert first.stats().remote["uploaded_bytes"] > 0
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "store-bucket"), (
        "none keeps a process"
    )
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


def test_a_server_that_starts_again_knows_the_records_of_the_others(server: S3Server, tmp_path: Path) -> None:
    location = "s3://weft/again"
    first, second = _opened(location, tmp_path / "a"), _opened(location, tmp_path / "b")
    tokens = prompt(300)
    written(first, tokens)
    _uploaded(first, 1)
    _until(second, lambda: second.match(None, tokens, 0) is not None)
    second.close()
    again = _opened(location, tmp_path / "b")
    _until(again, lambda: again.match(None, tokens, 0) is not None)
    assert_hit(again, tokens, 300)
    first.close()
    again.close()


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
        _until(
            third,
            lambda tokens=tokens, position=position: (  # type: ignore[misc]
                (hit := third.match(None, tokens, 0)) is not None and hit.position == position
            ),
        )
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
    assert {(answer.kind, answer.reason) for answer in answers if isinstance(answer, StoreEvent)} == {
        ("damaged", "checksum"),
        ("missing", "the object is gone"),
    }
    assert second.match(None, one, 0) is second.match(None, other, 0) is None
    assert second.stats().damaged == {"remote checksum": 1, "remote the object is gone": 1}
    second.close()


def test_a_bucket_that_goes_away_slows_nothing_and_loses_nothing(tmp_path: Path) -> None:
    server = S3Server()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        point_at(patch, server.url)
        store = _opened("s3://weft/away", tmp_path / "a")
        assert (store.stats().bucket_fault, store.stats().unreachable_s) == ("", 0.0)
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
        assert store.stats().bucket_fault.startswith("network: ")
        _until(store, lambda: store.stats().unreachable_s > 0.3)
        assert_hit(store, later, 200)
        server.start()
        store.bucket._retry_at = 0.0
        _until(store, lambda: store.stats().remote["waiting_uploads"] == 0)
        assert (store.stats().bucket_fault, store.stats().remote["lost_uploads"]) == ("", 0)
        seconds = store.stats().unreachable_s
        time.sleep(0.3)
        assert store.stats().unreachable_s == seconds, "a bucket that answers adds no seconds"
        store.close()
    server.stop()


def test_a_start_says_in_one_line_what_is_wrong_with_a_bucket(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Bucket("s3://weft/fine").check() == ""
    assert Bucket("s3://nowhere/x").check() == "bucket name: NoSuchBucket"
    strict = S3Server(checks_keys=True)
    strict.start()
    point_at(monkeypatch, strict.url)
    assert Bucket("s3://weft/x").check() == "credentials: InvalidAccessKeyId"
    strict.stop()
    assert Bucket("s3://weft/x").check() == "network: Connection refused"
    store = _opened("s3://weft/x", tmp_path / "a")
    assert store.stats().notes == ("s3://weft/x does not answer: network: Connection refused; uploads wait",)
    store.close()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert Bucket("s3://weft/x").check().startswith("credentials: ")


def test_a_bucket_that_accepts_and_never_answers_holds_no_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would wait for days."""
    monkeypatch.setattr(bucket, "REQUEST_S", 1e6)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_at(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert Bucket("s3://weft/x").check(0.5) == "network: no answer in 0.5 s"


def test_uploads_that_a_full_queue_pushes_out_are_lost_and_counted_and_the_log_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploads, "QUEUE_MAX", 2)
    monkeypatch.setattr(bucket, "RETRY_S", 0.0)
    point_at(monkeypatch, f"http://127.0.0.1:{free_port()}")
    store = _opened("s3://weft/x", tmp_path / "a")
    for seed in range(5):
        written(store, prompt(100, seed))
    _until(store, lambda: store.stats().remote["lost_uploads"] == 3)
    assert store.stats().remote["waiting_uploads"] == 2
    _until(store, lambda: store.stats().remote.get("unreachable", 0) > 3)
    assert len([line for line in caplog.messages if "does not answer: network: " in line]) == 1
    store.uploads.close(0.1)
    assert "2 uploads were not made before the end" in caplog.text
    store.close()


def test_a_server_says_that_its_bucket_is_away_and_where_it_is_required_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, f"http://127.0.0.1:{free_port()}")
    engine = {
        "model": str(checkpoint("qwen3_5")),
        "memory": "32MB",
        "threads": 1,
        "max_model_len": 512,
        "store": "s3://weft/x",
        "store_cache": str(tmp_path / "cache"),
        "step_costs": GIVEN_COSTS,
    }
    with running_server("", engine=engine) as server:
        assert "s3://weft/x does not answer: network: Connection refused" in server.output
        assert server.get("/health").json() == {"status": "ok", "store": "the bucket does not answer: network"}
        prompt_tokens = [(7 * i) % 500 for i in range(100)]
        server.client().completions.create(model="default", prompt=prompt_tokens, max_tokens=2)
        metrics = ["store_uploads_waiting", "store_unreachable_seconds_total"]

        def values() -> list[float]:
            lines = server.get("/metrics").text.splitlines()
            return [
                float(line.rsplit(" ", 1)[1]) for name in metrics for line in lines if line.startswith(f"weft:{name}")
            ]

        assert eventually(lambda: len(values()) == 2 and min(values()) > 0), "an idle engine reports too"
    with running_server("", engine=engine | {"store_required": True}, wait_for="listening") as server:
        assert server.exit_code() == 2
        said = server.rest_of_output()
    assert "error: --store s3://weft/x does not answer: network: Connection refused" in said
    assert "Traceback" not in said


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
