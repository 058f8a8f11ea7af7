"""Which web pages may use this server: by default its own page alone.

    Host      a loopback name, the bind address, any IP address, or an --allowed-host     else 421
    Origin    absent, this server itself, or an --allowed-origin (not for GET and HEAD)   else 403
    CORS      answered for an --allowed-origin only

A browser sends requests for every page that its user visits, and the Origin header names that page. A page
can also resolve its own name to 127.0.0.1 (DNS rebinding); its Host header still has the foreign name. An IP
address cannot be rebound. Programs send no Origin. ``Sec-Fetch-Site`` is a second witness.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers

from weft.errors import ConfigError
from weft.server.errors import EdgeError

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
"""Of Sec-Fetch-Site; another port of the same host is ``same-site``."""
_ORIGIN = re.compile(r"https?://[^/\s]+")
_HEADER_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{0,1024}")
_PREFLIGHT_S = 600


class Origins:
    """Raises ConfigError for a value that is no host name or no origin."""

    def __init__(self, *, bound_host: str = "127.0.0.1", allowed_hosts: Sequence[str] = (),
                 allowed_origins: Sequence[str] = ()) -> None:
        for host in allowed_hosts:
            if not host.strip() or "/" in host or _host_name(host) is None:
                raise ConfigError(f"--allowed-host {host}: it takes a host name, such as weft.example.org",
                                  param="--allowed-host")
        for origin in allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--allowed-origin {origin}: it takes an origin, such as "
                                  "https://app.example.org, or *", param="--allowed-origin")
        self._hosts = {"localhost", bound_host.lower(), *(_host_name(host) for host in allowed_hosts)}
        self._origins = frozenset(allowed_origins)

    def refusal(self, method: str, headers: Headers) -> EdgeError | None:
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            return EdgeError(400, "the request has several Host headers", param="Host", code="invalid_host")
        host = hosts[0] if hosts else ""
        if hosts and not self._is_own_host(host):
            return EdgeError(421, f"this server is not {host[:200]!r}; --allowed-host adds a name",
                             param="Host", code="host_not_allowed")
        if method in _SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin is None:
            is_foreign = headers.get("sec-fetch-site") in _FOREIGN_SITES
        else:
            is_foreign = origin.partition("://")[2] != host and not self._is_allowed(origin)
        if is_foreign:
            page = (origin or "another site")[:200]
            return EdgeError(403, f"a page of {page} may not use this server; --allowed-origin "
                                  "adds an origin",
                             param="Origin", code="origin_not_allowed")
        return None

    def cors_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """For every answer to an allowed origin; none for others."""
        origin = headers.get("origin")
        if origin is None or not self._is_allowed(origin):
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"),
                (b"access-control-expose-headers", b"X-Request-Id, Retry-After, X-Weft-Ignored")]

    def preflight_headers(self, method: str, headers: Headers) -> dict[str, str] | None:
        """None if the request is no preflight of an allowed origin."""
        if method != "OPTIONS" or "access-control-request-method" not in headers:
            return None
        if not self.cors_headers(headers):
            return None
        names = headers.get("access-control-request-headers", "")
        return {"access-control-allow-methods": "GET, POST, DELETE",
                "access-control-max-age": str(_PREFLIGHT_S),
                "access-control-allow-headers": names if _HEADER_NAMES.fullmatch(names) else ""}

    def _is_allowed(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins

    def _is_own_host(self, host: str) -> bool:
        name = _host_name(host)
        return name is not None and (name in self._hosts or _is_address(name) or name.endswith(".localhost"))


def _host_name(host: str) -> str | None:
    """Without port and brackets, in lower case; None for what is no host."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", host.strip())
    return (match[1] or match[2]).lower().rstrip(".") if match else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
