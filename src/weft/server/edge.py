"""The shared part of all connections: limits, counters, and the sweep that ends slow phases.

    socket ---> BoundedProtocol (connection.py) ---> Gate ---> routes
                     |      |
              enter, leave  BodyLease.grow, release
                     v      v
                   HttpEdge: connections by address, buffered bytes
                     |
                   sweep, twice a second: every connection checks its own clock

The edge refuses before a key is checked and before memory grows (law L11: each limit is a flag, and each refusal names
it). Bytes of a body count as buffered until its request has ended. The first FREE_BYTES of each are not counted: a
small request always fits, even while an attack holds the whole budget.

``Origins`` says which web pages may use this server: by default only its own page.

    Host      a loopback name, the bind address, any IP address, or an --allowed-host     else 421
    Origin    absent, this server itself, or an --allowed-origin (not for GET and HEAD)   else 403
    CORS      answered for an --allowed-origin only

A browser sends requests for every page that its user visits, and the Origin header names that page. A page can also
resolve its own name to 127.0.0.1 (DNS rebinding); its Host header still has the foreign name. An IP address cannot be
rebound. Programs send no Origin. ``Sec-Fetch-Site`` is a second sign of a page's request.

Counts that all HTTP processes share (connections, requests, bytes, quotas of keys) are in one mapped file:

    tallies   one cell for each process; a process writes its own cell, the sum is the count     no lock
    buckets   level and time of a rate, read and written by all                                  flock

A limit holds for the server, not for each process. If a process dies, the supervisor clears its cells.
Addresses of clients share ADDRESS_CELLS cells by their hash, which matters only near the limit of one
address.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import ipaddress
import mmap
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from weft.errors import ConfigError, UserError
from weft.host import trim_heap

if TYPE_CHECKING:
    from starlette.datastructures import Headers

RETRY_AFTER_S = 1
_KINDS = {
    403: "permission_error",
    404: "not_found_error",
    421: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
FREE_BYTES = 65536
"""Bytes of each body that are not counted against the shared budget."""
SWEEP_S = 0.5
_SWEPT_AT_ONCE = 32
"""Connections swept between two other turns of the loop: a thousand refusals at once would hold up every client."""
_TRIM_ABOVE_BYTES = 1 << 20
_TRIM_AFTER_S = 0.5
"""Seconds before the heap is trimmed: by then the answer has been written and its request is garbage."""
LINGER_S = 1.0
"""Seconds that a refused client may go on sending, so that it reads the refusal instead of a reset."""


class EdgeError(UserError):
    """A limit of the HTTP edge was passed; ``status`` is the HTTP status and ``param`` the flag."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.kind = _KINDS.get(status, self.kind)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Limits of the edge: sizes in bytes, times in seconds. 0: no limit for ``connections_per_address`` and
    ``body_rate_min``."""

    request_line_bytes: int = 8192
    header_bytes: int = 32768
    header_count: int = 100
    header_s: float = 10.0
    body_bytes: int = 64_000_000
    body_s: float = 300.0
    body_rate_min: int = 10_000
    idle_s: float = 60.0
    write_s: float = 60.0
    connections: int = 4096
    connections_per_address: int = 1024
    pipelined: int = 16
    buffered_bytes: int = 256_000_000
    blob_bytes: int = 100_000_000_000


ADDRESS_CELLS = 8192
_DOUBLE_BYTES = 8
_BUCKETS_A_KEY = 2
_CELLS_A_BUCKET = 2
_CONNECTIONS, _BUFFERED, _REQUESTS, _DRAINS, _FIRST_FREE = 0, 1, 2, 3, 4

Cells: TypeAlias = "MutableSequence[float] | memoryview[float]"


class Tally:
    """One shared count. ``cells``: one for each process; without them, of a server with one HTTP process."""

    def __init__(self, cells: Cells | None = None, process: int = 0) -> None:
        self._cells: Cells = [0.0] if cells is None else cells
        self._process = process

    def add(self, amount: int) -> None:
        self._cells[self._process] += float(amount)

    def total(self) -> int:
        """Sum over all processes."""
        return int(sum(self._cells))


@dataclass(slots=True)
class KeyCounts:
    """Counts of one API key. A bucket is its level, and the time of that level; ``since_s`` 0 means a full bucket."""

    bytes_in_flight: Tally = field(default_factory=Tally)
    requests: Cells = field(default_factory=lambda: [0.0, 0.0])
    tokens: Cells = field(default_factory=lambda: [0.0, 0.0])
    lock: contextlib.AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)


class SharedCounts:
    """The counts that all HTTP processes share. ``process``: the number of this one, below ``processes``. ``keys``:
    client keys of the server."""

    def __init__(self, file: Path, *, process: int, processes: int, keys: int) -> None:
        self._process = process
        self.processes = processes
        self._keys = keys
        tallies = _FIRST_FREE + keys + ADDRESS_CELLS
        self._buckets_at = tallies * processes
        cells = self._buckets_at + keys * _BUCKETS_A_KEY * _CELLS_A_BUCKET
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, cells * _DOUBLE_BYTES)
        self._cells = memoryview(mmap.mmap(self._file, cells * _DOUBLE_BYTES)).cast("d")

    @property
    def connections(self) -> Tally:
        return self._tally(_CONNECTIONS)

    @property
    def buffered_bytes(self) -> Tally:
        return self._tally(_BUFFERED)

    @property
    def requests(self) -> Tally:
        """Requests that are being answered."""
        return self._tally(_REQUESTS)

    @property
    def drains(self) -> Tally:
        """Marker of all processes: above 0 once the server drains."""
        return self._tally(_DRAINS)

    def address(self, address: str) -> Tally:
        """Return the count of connections from clients of this address."""
        cell = zlib.crc32(address.encode()) % ADDRESS_CELLS
        return self._tally(_FIRST_FREE + self._keys + cell)

    def key(self, number: int) -> KeyCounts:
        start = self._buckets_at + number * _BUCKETS_A_KEY * _CELLS_A_BUCKET
        return KeyCounts(
            self._tally(_FIRST_FREE + number),
            self._cells[start : start + 2],
            self._cells[start + 2 : start + 4],
            _Locked(self._file),
        )

    def clear(self, process: int) -> None:
        """Clear the cells of a process that has died."""
        for cell in range(process, self._buckets_at, self.processes):
            self._cells[cell] = 0.0

    def _tally(self, number: int) -> Tally:
        start = number * self.processes
        return Tally(self._cells[start : start + self.processes], self._process)


class _Locked(contextlib.AbstractContextManager[None]):
    """A lock by ``flock`` of the file, for all processes."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


class Connection(Protocol):
    def sweep(self, now_s: float) -> None: ...

    def abort(self) -> None: ...


class HttpEdge:
    """The edge of one HTTP process, shared by all its connections; it belongs to the event loop's thread. ``counts``:
    of all processes of the server, so that the limits hold for all processes together. ``is_inner``: the clients are
    HTTP workers, which count their own clients."""

    def __init__(self, limits: EdgeLimits, counts: SharedCounts | None = None, *, is_inner: bool = False) -> None:
        self.limits = limits
        own = Tally(), Tally()
        of_clients = own if counts is None else (counts.connections, counts.buffered_bytes)
        self._of_clients = of_clients
        self._counts = None if is_inner else counts
        self._entered, self._buffered = own if is_inner else of_clients
        self.on_refusal: Callable[[str], None] = lambda code: None
        self._connections: dict[Connection, str] = {}
        self._by_address: Counter[str] = Counter()

    @property
    def connection_count(self) -> int:
        """Connections of clients, at all HTTP processes."""
        return self._of_clients[0].total()

    @property
    def client_bytes(self) -> int:
        """Buffered bytes of clients, counted as ``buffered_bytes``."""
        return self._of_clients[1].total()

    @property
    def buffered_bytes(self) -> int:
        """Buffered bytes, compared with the limit."""
        return self._buffered.total()

    def buffer(self, size_bytes: int) -> None:
        """Count bytes of bodies, or give them back (negative)."""
        self._buffered.add(size_bytes)

    def cap_connections(self, most: int) -> None:
        """Lower the limit to ``most`` connections, for which the system has descriptors."""
        self.limits = dataclasses.replace(self.limits, connections=min(self.limits.connections, most))

    def enter(self, connection: Connection, address: str) -> EdgeError | None:
        """Count the connection, refused or not; ``leave`` must follow. Return the refusal, if any. A connection whose
        TLS handshake was counted is not counted again. ``address``: empty at a Unix socket, whose clients have none."""
        more = int(connection not in self._connections)
        self._connections[connection] = address
        self._by_address[address] += more
        self._entered.add(more)
        of_address = self._by_address[address]
        if self._counts is not None:
            tally = self._counts.address(address)
            tally.add(more)
            of_address = tally.total()
        limits = self.limits
        if self._entered.total() > limits.connections:
            return EdgeError(
                503,
                f"this server has {limits.connections} open connections (limits.max_connections)",
                param="limits.max_connections",
                code="too_many_connections",
            )
        if address and 0 < limits.connections_per_address < of_address:
            return EdgeError(
                429,
                f"your address has {limits.connections_per_address} open connections "
                "(limits.max_connections_per_address)",
                param="limits.max_connections_per_address",
                code="too_many_connections",
            )
        return None

    def leave(self, connection: Connection) -> None:
        address = self._connections.pop(connection, None)
        if address is None:
            return
        self._by_address[address] -= 1
        self._entered.add(-1)
        if self._counts is not None:
            self._counts.address(address).add(-1)
        if not self._by_address[address]:
            del self._by_address[address]

    def is_crowded(self) -> bool:
        """Return whether there are too many connections to write even a refusal."""
        return self._entered.total() > 2 * self.limits.connections

    def lease(self) -> BodyLease:
        return BodyLease(self)

    async def sweep_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            # uvloop runs timers before it reads. After a pause of this process, bodies that came meanwhile are unread
            # in their sockets: one turn of the loop reads them before a client is called slow
            await asyncio.sleep(0)
            for number, connection in enumerate(list(self._connections)):
                if number % _SWEPT_AT_ONCE == _SWEPT_AT_ONCE - 1:
                    await asyncio.sleep(0)
                if connection in self._connections:
                    connection.sweep(loop.time())

    def trim(self) -> None:
        """Trim the heap, in a thread: for a large heap it takes milliseconds."""
        asyncio.get_running_loop().run_in_executor(None, trim_heap)

    def abort_all(self) -> None:
        """Abort all connections at the end of the server: a client that never reads cannot hold it up."""
        for connection in list(self._connections):
            connection.abort()


class BodyLease:
    """The buffered bytes of one request."""

    __slots__ = ("_counted_bytes", "_edge", "_size_bytes")

    def __init__(self, edge: HttpEdge) -> None:
        self._edge = edge
        self._size_bytes = 0
        self._counted_bytes = 0

    def grow(self, size_bytes: int) -> EdgeError | None:
        """Count more bytes; return the refusal if the shared budget is spent."""
        self._size_bytes += size_bytes
        more_bytes = max(self._size_bytes - FREE_BYTES, 0) - self._counted_bytes
        limit = self._edge.limits.buffered_bytes
        if more_bytes and self._edge.buffered_bytes + more_bytes > limit:
            return EdgeError(
                503,
                f"the bodies of unfinished requests hold {self._edge.buffered_bytes} bytes; the limit "
                f"is {limit} bytes (limits.max_buffered_mb)",
                param="limits.max_buffered_mb",
                code="server_buffers_full",
            )
        self._counted_bytes += more_bytes
        self._edge.buffer(more_bytes)
        return None

    def release(self) -> None:
        """Give the bytes back. Idempotent. After a large body, the heap goes back to the system."""
        if self._size_bytes > _TRIM_ABOVE_BYTES:
            asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._edge.trim)
        self._edge.buffer(-self._counted_bytes)
        self._counted_bytes = 0
        self._size_bytes = 0


_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site for foreign pages; another port of the same host is ``same-site``."""
_ORIGIN = re.compile(r"https?://[^/\s]+")
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{0,1024}")
_PREFLIGHT_S = 600


class Origins:
    """The web pages that may use this server. Raises ConfigError for a value that is not a host name or not an
    origin."""

    def __init__(
        self, *, bound_host: str = "127.0.0.1", allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = ()
    ) -> None:
        for host in allowed_hosts:
            if not host.strip() or "/" in host or _host_name(host) is None:
                raise ConfigError(
                    f"--allowed-host {host}: it takes a host name, such as weft.example.org", param="--allowed-host"
                )
        for origin in allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origin {origin}: it takes an origin, such as https://app.example.org, or *",
                    param="--allowed-origin",
                )
        self._hosts = {"localhost", bound_host.lower(), *(_host_name(host) for host in allowed_hosts)}
        self._origins = frozenset(allowed_origins)

    def refusal(self, method: str, headers: Headers) -> EdgeError | None:
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            return EdgeError(400, "the request has several Host headers", param="Host", code="invalid_host")
        host = hosts[0] if hosts else ""
        if hosts and not self._is_own_host(host):
            return EdgeError(
                421,
                f"this server is not {host[:200]!r}; --allowed-host adds a name",
                param="Host",
                code="host_not_allowed",
            )
        if method in _SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin is None:
            is_foreign = headers.get("sec-fetch-site") in _FOREIGN_SITES
        else:
            is_foreign = origin.partition("://")[2] != host and not self._is_allowed(origin)
        if is_foreign:
            page = (origin or "another site")[:200]
            return EdgeError(
                403,
                f"a page of {page} may not use this server; --allowed-origin adds an origin",
                param="Origin",
                code="origin_not_allowed",
            )
        return None

    def cors_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers of every answer to an allowed origin; none for others."""
        origin = headers.get("origin")
        if origin is None or not self._is_allowed(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"vary", b"Origin"),
            (b"access-control-expose-headers", b"X-Request-Id, Retry-After, X-Weft-Ignored, X-Weft-Weight-Version"),
        ]

    def preflight_headers(self, method: str, headers: Headers) -> dict[str, str] | None:
        """Return the headers of a preflight; None if the request is not a preflight of an allowed origin."""
        if method != "OPTIONS" or "access-control-request-method" not in headers:
            return None
        if not self.cors_headers(headers):
            return None
        names = headers.get("access-control-request-headers", "")
        return {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-max-age": str(_PREFLIGHT_S),
            "access-control-allow-headers": names if _HEADER_NAMES.fullmatch(names) else "",
        }

    def _is_allowed(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins

    def _is_own_host(self, host: str) -> bool:
        name = _host_name(host)
        return name is not None and (name in self._hosts or _is_address(name) or name.endswith(".localhost"))


def _host_name(host: str) -> str | None:
    """Return the host name without port and brackets, in lower case; None if it is not a host."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", host.strip())
    return (match[1] or match[2]).lower().rstrip(".") if match else None


def names_loopback(header: str | None) -> bool:
    """Return whether the Host header of a request, if it has one, names the machine that the client is on."""
    if header is None:
        return True
    name = _host_name(header)
    return name is not None and is_loopback(name)


def is_loopback(host: str) -> bool:
    """Return whether ``host``, a name or an address, means this machine only."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
