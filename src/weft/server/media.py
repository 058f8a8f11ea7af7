"""Pictures and videos at ``https`` addresses, of hosts that the operator allows with ``--media-domains``.

    https://img.example.org/cat.png
       its host is allowed --> resolved, once --> every address is public --> that address is dialled,
              ^                                                                TLS for the host's name
              |                                                                    |
              '--------------- Location of a redirect, REDIRECTS_MAX ---------------'--> bytes of the file

A server that fetches addresses of strangers gives them access to its own network: to the metadata of a cloud, or to
services that trust every machine of the network. A name may resolve to such an address, begin to do so between a check
and a connection, or redirect there.

Laws: a name is resolved once for each connection, and the socket goes to the very address that was checked. A redirect
is checked as the first address was. Only ``https`` on port 443 is fetched, without a proxy, cookies or credentials.
Bytes are counted as they come, and each fetch has a time limit. Law L11: at most FETCHES_MAX run at once, of them
HOST_FETCHES_MAX at one host, so that slow hosts do not hold up the others. All fetched files that are not decoded yet
have at most HELD_FILES times the bytes of a picture.

Bytes are received on the event loop, where a fetch can be cancelled while it waits for a host. Names are resolved in
threads of their own, so that a silent name server blocks only those. Nothing is decoded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit
from weakref import WeakValueDictionary

import httpcore
import httpx

from weft.errors import ConfigError, EngineUnavailableError, RequestError
from weft.request import PictureKind
from weft.units import format_bytes

REDIRECTS_MAX = 3
FETCHES_MAX = 32
HOST_FETCHES_MAX = 2
HELD_FILES = 8
_HTTPS = 443
_ADDRESSES_TRIED = 3
_URL_CHARS = 8192
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "2002::/16",
            "2001::/23",  # 6to4, Teredo and other protocols: an IPv4 address may be part of them
            "192.0.0.0/24",
            "192.88.99.0/24",  # of protocols; Python knows the first since 3.11.10
            "168.63.129.16/32",
        ),
    )
)  # a cloud's own service at an address that looks public
"""Networks in addition to those that Python knows. Mapped addresses and NAT64 are outside of ``2000::/3``."""

Resolve = Callable[[str, int], Sequence[str]]


def is_public(address: str) -> bool:
    """Return whether ``address`` (numeric) may belong to a host of the public internet."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    if number.version == 6 and number not in _GLOBAL_IPV6:
        return False
    return (
        number.is_global
        and not number.is_multicast
        and not number.is_reserved
        and not any(number in network for network in _REFUSED)
    )


def read_domains(entries: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts of ``--media-domains``: ``example.org``, ``*.example.org`` for those below it, ``*`` for all.
    Raise ConfigError."""
    domains = [name.strip().lower().rstrip(".") for entry in entries for name in entry.split(",")]
    for name in domains:
        if name != "*" and not _HOST.fullmatch(name.removeprefix("*.")):
            raise ConfigError(
                f"--media-domains {name[:100]!r}: it takes host names (img.example.org), "
                "*.example.org for the hosts below one, or * for every public host",
                param="--media-domains",
            )
    return tuple(dict.fromkeys(domains))


@dataclass(slots=True)
class _Fetch:
    """A fetch of one file. ``name``: of its limits in the config. ``received``: bytes so far."""

    name: PictureKind
    bytes_max: int
    seconds: float
    received: int = 0


class MediaFetcher:
    """Fetches of pictures and videos. ``domains`` of ``read_domains``; ``bytes_max``: of one file; ``seconds``: of one
    fetch with its redirects; ``videos``: both limits for a video. ``resolve`` (host, port) returns numeric addresses or
    raises OSError; ``backend`` opens sockets; ``trust``: the certificate authorities."""

    def __init__(
        self,
        domains: Sequence[str],
        *,
        bytes_max: int,
        seconds: float,
        videos: tuple[int, float] | None = None,
        resolve: Resolve | None = None,
        backend: httpcore.AsyncNetworkBackend | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._domains = frozenset(domains)
        self._limits = {"image": (bytes_max, seconds), "video": videos or (bytes_max, seconds)}
        self._dial = _CheckedDial(resolve or _addresses, backend or httpcore.AnyIOBackend())
        self._trust = trust or httpx.create_ssl_context()
        self._running = asyncio.Semaphore(FETCHES_MAX)
        self._at_host: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._held = 0

    @contextlib.asynccontextmanager
    async def file(self, url: str, kind: PictureKind = "image") -> AsyncIterator[bytes]:
        """Yield the bytes of the file at ``url``, and count them within the block. Raise RequestError with one line,
        and EngineUnavailableError if all fetched files together are too large."""
        fetch = _Fetch(kind, *self._limits[kind])
        host = str(self._checked(url).hostname)
        at_host = self._at_host.setdefault(host, asyncio.Semaphore(HOST_FETCHES_MAX))
        try:
            async with at_host, self._running:
                data = await self._fetch(url, fetch)
            yield data
        finally:
            self._held -= fetch.received

    async def _fetch(self, url: str, fetch: _Fetch) -> bytes:
        try:
            async with asyncio.timeout(fetch.seconds):
                for _ in range(REDIRECTS_MAX + 1):
                    target = self._checked(url)
                    location, data = await self._get(target, fetch)
                    if location is None:
                        return data
                    url = urljoin(target.geturl(), location)
        except TimeoutError:
            raise RequestError(
                f"the file takes more than {fetch.seconds:g} s to fetch (limits.{fetch.name}_seconds)"
            ) from None
        raise RequestError(f"the file's address redirects more than {REDIRECTS_MAX} times")

    def _checked(self, url: str) -> SplitResult:
        """Parse ``url``. Raise RequestError for an address that is not allowed, before its name is resolved."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise RequestError(f"the file is at {url[:100]!r}, which is not an address") from None
        if len(url) > _URL_CHARS or not url.isascii() or re.search(r"[\x00-\x20\x7f\\]", url):
            raise RequestError(
                f"the file is at {url[:100]!r}; an address has {_URL_CHARS} characters at "
                "most, percent-encoded, without blanks and backslashes"
            )
        if parts.scheme != "https" or port not in (None, _HTTPS) or "@" in parts.netloc:
            raise RequestError(
                f"the file is at {url[:100]!r}; files are fetched only by https, from port 443, without a user's name"
            )
        host = host.rstrip(".")
        below = {"*." + host.split(".", labels)[-1] for labels in range(1, host.count(".") + 1)}
        if not self._domains & {"*", host, *below}:
            raise RequestError(f"the file is at the host {host[:100]!r}, which --media-domains does not name")
        return parts._replace(netloc=f"[{host}]" if ":" in host else host, fragment="")

    async def _get(self, target: SplitResult, fetch: _Fetch) -> tuple[str | None, bytes]:
        """Fetch ``target``; return (where it redirects to, bytes)."""
        host = str(target.hostname)
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        url = httpcore.URL(scheme=b"https", host=host.encode(), port=_HTTPS, target=path.encode())
        headers = [
            ("Host", target.netloc),
            ("User-Agent", "weft"),
            ("Accept", f"{fetch.name}/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        try:
            async with (
                httpcore.AsyncConnectionPool(self._trust, network_backend=self._dial) as pool,
                pool.stream("GET", url, headers=headers) as response,
            ):
                said = {name.lower(): value.decode("latin-1") for name, value in response.headers}
                if response.status in (301, 302, 303, 307, 308) and b"location" in said:
                    return said[b"location"], b""
                if response.status != 200:
                    raise RequestError(f"the host {host!r} answers {response.status} for the file")
                return None, await self._body(response, said, fetch)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise RequestError(f"the file cannot be fetched from {host!r}: {_reason(error)}") from None

    async def _body(self, response: httpcore.Response, headers: dict[bytes, str], fetch: _Fetch) -> bytes:
        length = headers.get(b"content-length", "0")
        data = bytearray()
        too_many = length.isdecimal() and int(length[:20]) > fetch.bytes_max
        if not too_many:
            async for part in response.aiter_stream():
                data += part
                fetch.received += len(part)
                self._held += len(part)
                if too_many := len(data) > fetch.bytes_max:
                    break
                if self._held > (most := HELD_FILES * self._limits["image"][0]) and self._held > fetch.received:
                    raise EngineUnavailableError(
                        f"files that are fetched have {format_bytes(self._held)}; "
                        f"the limit is {format_bytes(most)}. Try again later"
                    )
        if too_many:
            raise RequestError(f"the file has more than {format_bytes(fetch.bytes_max)} (limits.{fetch.name}_bytes)")
        return bytes(data)


class _CheckedDial(httpcore.AsyncNetworkBackend):
    """A network backend that connects only to public addresses. Only ``resolve`` gets the name of the host."""

    def __init__(self, resolve: Resolve, backend: httpcore.AsyncNetworkBackend) -> None:
        self._resolve = resolve
        self._backend = backend
        self._threads = ThreadPoolExecutor(FETCHES_MAX, "weft-resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.run_in_executor(self._threads, self._resolve, host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise RequestError(f"the file's host {host!r} has no address")
        if not all(map(is_public, addresses)):  # one such address is enough: an honest host has none
            raise RequestError(
                f"the file's host {host!r} has an address that is not public; files are never fetched from there"
            )
        *others, last = addresses[:_ADDRESSES_TRIED]
        for address in others:
            try:
                return await self._backend.connect_tcp(address, port, timeout)
            except httpcore.NetworkError:
                continue
        return await self._backend.connect_tcp(last, port, timeout)

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


def _addresses(host: str, port: int) -> list[str]:
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in answers))


def _reason(error: Exception) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    return "TLS fails" if isinstance(cause, ssl.SSLError) else "the connection fails"
