"""``Bucket``: objects of S3, GCS, Azure or a directory, through obstore, with bounded waits.

    v1/namespaces/HEX.json                     what a namespace stands for
    v1/records/HEX/CHECKSUM-BYTES              a payload, by its content
    v1/ledger/HEX/WRITER/00000001.seg          rows and tokens, see ``segments``

Objects are never changed: every put is "if absent", so two writers of one object write the same bytes.
Credentials come from the environment, as the provider's own tools read them.

A bucket that goes away costs one failed request: after it, nothing asks the bucket for ``RETRY_S``. Only
threads call this class.

Rejected: boto3, gcsfs and adlfs (one client for each provider); fsspec (no put-if-absent).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from weft.errors import ConfigError
from weft.store.reading import UNREACHABLE

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
CONNECT_S, REQUEST_S, RETRY_S = 3.0, 20.0, 10.0
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_ENDPOINT",
              "AZURITE_BLOB_STORAGE_URL")


class Unreachable(OSError):
    """The bucket did not answer, or refused: nothing is said about the object."""

    def __init__(self, message: str) -> None:
        super().__init__(0, UNREACHABLE)
        self.message = message


@dataclass(frozen=True, slots=True)
class Stored:
    """An object of a bucket. ``modified``: with a time zone."""

    key: str
    nbytes: int
    modified: datetime


def is_bucket(location: str) -> bool:
    return "://" in location


class Bucket:
    """``location``: such as s3://bucket/prefix. Raises ConfigError for one that obstore cannot read."""

    def __init__(self, location: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        scheme = location.partition("://")[0]
        if scheme not in SCHEMES:
            raise ConfigError(f"--store {location}: the scheme {scheme} is not one of {', '.join(SCHEMES)}",
                              param="--store")
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(f"--store {location} needs obstore: pip install 'weft[store]'",
                              param="--store") from None
        self.location, self._obstore, self._clock = location, obstore, clock
        self._retry_at = 0.0
        self.last_error = ""
        if scheme == "file":
            os.makedirs(location.removeprefix("file://"), exist_ok=True)
        try:
            self._store: Any = from_url(location, **_network(scheme))
        except Exception as error:  # obstore raises its own types for each provider
            raise ConfigError(f"--store {location}: {_first_line(error)}", param="--store") from None

    @property
    def available(self) -> bool:
        """False for a while after a request has failed."""
        return self._clock() >= self._retry_at

    def put_new(self, key: str, payload: bytes | memoryview) -> bool:
        """False if the object exists already. Raises Unreachable."""
        try:
            self._obstore.put(self._store, key, bytes(payload), mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":
                return False
            raise self._failed(error) from None
        return True

    def exists(self, key: str) -> bool:
        """Raises Unreachable."""
        try:
            self._obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._failed(error) from None
        return True

    def read(self, key: str, into: memoryview) -> None:
        """The first bytes of an object. Raises FileNotFoundError, Unreachable, or OSError if it is short."""
        try:
            content = memoryview(self._obstore.get_range(self._store, key, start=0, length=len(into)))
        except FileNotFoundError:
            raise FileNotFoundError(2, "the object is gone") from None
        except Exception as error:
            raise self._failed(error) from None
        if len(content) != len(into):
            raise OSError(5, "the object is shorter than its ledger says")
        into[:] = content

    def read_all(self, key: str) -> bytes:
        """Raises FileNotFoundError, Unreachable."""
        try:
            return bytes(self._obstore.get(self._store, key).bytes())
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._failed(error) from None

    def objects(self, prefix: str) -> Iterator[Stored]:
        """Raises Unreachable."""
        try:
            for page in self._obstore.list(self._store, prefix):
                yield from (Stored(str(one["path"]), int(one["size"]), one["last_modified"]) for one in page)
        except Exception as error:
            raise self._failed(error) from None

    def delete(self, key: str) -> None:
        """An object that is gone already is no error. Raises Unreachable."""
        try:
            self._obstore.delete(self._store, key)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> Unreachable:
        self._retry_at = self._clock() + RETRY_S
        self.last_error = _first_line(error)
        return Unreachable(self.last_error)


def _network(scheme: str) -> dict[str, Any]:
    if scheme == "file":
        return {}
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return {"client_options": {"timeout": timedelta(seconds=REQUEST_S), "allow_http": plain,
                               "connect_timeout": timedelta(seconds=CONNECT_S)},
            "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=REQUEST_S)}}


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
