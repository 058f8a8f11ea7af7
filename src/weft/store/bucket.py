"""``Bucket``: objects of S3, GCS, Azure or a directory, through obstore, with bounded waits.

    v1/namespaces/HEX.json                     the identity of a namespace
    v1/records/HEX/CHECKSUM-BYTES              a payload, by its content
    v1/ledger/HEX/WRITER/00000001.seg          rows and tokens, see ``segments``

With a ``Signer`` every object has a signature, and an object without a valid one reads as empty
(``weft.store.signing``).

Objects are never changed: every put is "if absent", so two writers of one object write the same bytes.
Credentials come from the environment, as the provider's own tools read them.

A bucket that goes away costs one failed request: for ``RETRY_S`` afterwards nothing asks the bucket. Only threads call
this class. The bucket counts as unreachable from a failed request to the next answer, and these seconds are counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from weft.errors import ConfigError
from weft.store.location import check_location
from weft.store.reading import UNREACHABLE
from weft.store.signing import TAG_BYTES, Signer

CONNECT_S, REQUEST_S, RETRY_S = 3.0, 20.0, 10.0
CHECK_S = 8.0
"""Most seconds that a start waits for a bucket."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")

_REFUSED = re.compile(
    r"\b(401 Unauthorized|403 Forbidden)\b|http://169\.254\.|/latest/api/token|InvalidAccessKeyId|AccessDenied"
    r"|SignatureDoesNotMatch|metadata\.google\.internal|credential",
    re.IGNORECASE,
)
"""Errors of a refusal. 169.254 is the address at which a machine of a cloud asks for its own credentials."""
_MISSING = re.compile(r"\b(404 Not Found|301 Moved Permanently)\b")
_STATUS = re.compile(r"non-2xx status code")


class Unreachable(OSError):
    """Error of a bucket that did not answer, or refused: nothing is known about the object."""

    def __init__(self, message: str) -> None:
        super().__init__(0, UNREACHABLE)
        self.message = message


@dataclass(frozen=True, slots=True)
class Stored:
    """An object of a bucket. ``modified``: with a time zone."""

    key: str
    nbytes: int
    modified: datetime


class Bucket:
    """A bucket at ``location``, such as s3://bucket/prefix. Raises ConfigError for a location that obstore cannot
    read."""

    def __init__(
        self, location: str, *, signer: Signer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_location(location)
        scheme = location.partition("://")[0]
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(f"--store {location} needs obstore: pip install 'weft[store]'", param="--store") from None
        if signer is not None:
            location = f"{location.rstrip('/')}/{signer.folder}"
        self.location, self._obstore, self._clock, self._signer = location, obstore, clock, signer
        self._retry_at = 0.0
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._past_failing_s = 0.0
        self.last_error = ""
        if scheme == "file":
            os.makedirs(location.removeprefix("file://"), exist_ok=True)
        try:
            self._store: Any = from_url(location, **_network(scheme))
        except Exception as error:  # obstore raises its own types for each provider
            raise ConfigError(f"--store {location}: {_first_line(error)}", param="--store") from None

    @property
    def available(self) -> bool:
        """Whether the bucket may be asked: false for a while after a request has failed."""
        return self._clock() >= self._retry_at

    @property
    def fault(self) -> str:
        """The reason of the last failure; empty while the bucket answers."""
        return "" if self._failing_since is None else self.last_error

    @property
    def unreachable_s(self) -> float:
        """Seconds without an answer since the bucket was opened: from each failed request to the next that
        did not fail."""
        with self._lock:
            since = self._failing_since
            return self._past_failing_s + (0.0 if since is None else self._clock() - since)

    def check(self, limit_s: float = CHECK_S) -> str:
        """Ask the bucket once, for at most ``limit_s``, and return ``fault``."""
        # The thread bounds the steps that the client's own limits leave out: names, and credentials of the machine.
        asking = threading.Thread(target=self._ask, name="store-check", daemon=True)
        asking.start()
        asking.join(limit_s)
        if asking.is_alive():
            self._failed(TimeoutError(f"no answer in {limit_s:g} s"))
        return self.fault

    def _ask(self) -> None:
        try:
            self._obstore.list_with_delimiter(self._store, "v1")
        except Exception as error:
            self._failed(error)
        else:
            self._answered()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Note the outcome of one request. "Not found" does not count as an answer: the bucket itself may be
        missing.
        """
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._failed(error) from None
        self._answered()

    def put_new(self, key: str, payload: bytes | memoryview) -> bool:
        """Write an object, and return False if it exists already. Raise Unreachable."""
        content = bytes(payload) if self._signer is None else self._signer.signed(key, payload)
        try:
            self._obstore.put(self._store, key, content, mode="create")
        except Exception as error:
            if not isinstance(error, FileExistsError) and type(error).__name__ != "AlreadyExistsError":
                raise self._failed(error) from None
            self._answered()
            return False
        self._answered()
        return True

    def exists(self, key: str) -> bool:
        """Return whether the object exists. Raise Unreachable."""
        with contextlib.suppress(FileNotFoundError), self._asking():
            self._obstore.head(self._store, key)
            return True
        return False

    def read(self, key: str, into: memoryview) -> None:
        """Read the first bytes of an object; zeros, whose checksum is wrong, for an object without its signature. Raise
        FileNotFoundError, Unreachable, or OSError if the object is too short."""
        length = len(into) + (0 if self._signer is None else TAG_BYTES)
        try:
            with self._asking():
                content = memoryview(self._obstore.get_range(self._store, key, start=0, length=length))
        except FileNotFoundError:
            raise FileNotFoundError(2, "the object is gone") from None
        if len(content) != length:
            raise OSError(5, "the object is shorter than its ledger says")
        signed = content if self._signer is None else self._signer.content(key, content)
        into[:] = bytes(len(into)) if signed is None else signed

    def read_all(self, key: str) -> bytes:
        """Return the content of an object; b"" if its signature is missing. Raises FileNotFoundError, Unreachable."""
        with self._asking():
            content = bytes(self._obstore.get(self._store, key).bytes())
        return content if self._signer is None else bytes(self._signer.content(key, memoryview(content)) or b"")

    def objects(self, prefix: str) -> Iterator[Stored]:
        """Yield the objects below ``prefix``. Raise Unreachable."""
        try:
            for page in self._obstore.list(self._store, prefix):
                yield from (Stored(str(entry["path"]), int(entry["size"]), entry["last_modified"]) for entry in page)
        except Exception as error:
            raise self._failed(error) from None
        self._answered()

    def delete(self, key: str) -> None:
        """Delete an object; one that is gone already causes no error. Raise Unreachable."""
        with contextlib.suppress(FileNotFoundError), self._asking():
            self._obstore.delete(self._store, key)

    def _failed(self, error: Exception) -> Unreachable:
        with self._lock:
            now_s = self._clock()
            self._retry_at, self.last_error = now_s + RETRY_S, fault_of(error)
            if self._failing_since is None:
                self._failing_since = now_s
            return Unreachable(self.last_error)

    def _answered(self) -> None:
        if self._failing_since is None:
            return
        with self._lock:
            if self._failing_since is not None:
                self._past_failing_s += self._clock() - self._failing_since
                self._failing_since = None


def _network(scheme: str) -> dict[str, Any]:
    if scheme == "file":
        return {}
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return {
        "client_options": {
            "timeout": timedelta(seconds=REQUEST_S),
            "allow_http": plain,
            "connect_timeout": timedelta(seconds=CONNECT_S),
        },
        "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=REQUEST_S)},
    }


def fault_of(error: Exception) -> str:
    """Return the kind of failure (credentials, bucket name or network) and the service's own words."""
    text = str(error)
    words = re.search(r"<Code>(\w+)</Code>", text) or re.search(r'message: "([^"\n]+)"', text)
    detail = words[1] if words else _first_line(error)
    if _REFUSED.search(text) or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"credentials: {detail}"
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text or _MISSING.search(text):
        return f"bucket name: {detail}"
    return f"service: {detail}" if _STATUS.search(text) else f"network: {detail}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def record_key(namespace: str, checksum: bytes, payload_bytes: int) -> str:
    return f"v1/records/{namespace}/{checksum.hex()}-{payload_bytes}"


def segment_key(namespace: str, writer: str, number: int) -> str:
    return f"{segment_prefix(namespace)}/{writer}/{number:08d}.seg"


def segment_prefix(namespace: str) -> str:
    return f"v1/ledger/{namespace}"


def namespace_key(namespace: str) -> str:
    return f"v1/namespaces/{namespace}.json"
