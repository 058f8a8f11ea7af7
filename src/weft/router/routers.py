"""Routers by the names of ``debug.router``. A new one is a new row.

The router with tables is imported when it is asked for: it needs numpy, and a server of one replica has none.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.errors import ConfigError
from weft.router.blind import LeastLoaded, PrefixHash, RoundRobin
from weft.router.protocol import Router, Wants

DEFAULT_ROUTER = "seconds"


def _by_seconds(clock: Callable[[], float], wants: Wants = "states") -> Router:
    from weft.router.seconds import Seconds

    return Seconds(clock, wants)


_MAKERS: dict[str, Callable[[Callable[[], float]], Router]] = {
    "seconds": _by_seconds,
    "kv-only": lambda clock: _by_seconds(clock, "pages"),
    "prefix-hash": lambda clock: PrefixHash(),
    "round-robin": lambda clock: RoundRobin(),
    "least-loaded": lambda clock: LeastLoaded(),
}
ROUTERS = tuple(_MAKERS)


def make_router(name: str, clock: Callable[[], float]) -> Router:
    """Raises ConfigError that lists the names."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"debug.router {name!r} is no router: there are {', '.join(ROUTERS)}",
                          param="debug.router")
    return maker(clock)
