"""Routers by the names of ``--router``. A new one is a new row."""

from __future__ import annotations

from collections.abc import Callable

from weft.errors import ConfigError
from weft.router.blind import LeastLoaded, PrefixHash, RoundRobin
from weft.router.protocol import Router
from weft.router.seconds import Seconds

DEFAULT_ROUTER = "seconds"
_MAKERS: dict[str, Callable[[Callable[[], float]], Router]] = {
    "seconds": Seconds,
    "kv-only": lambda clock: Seconds(clock, "pages"),
    "prefix-hash": lambda clock: PrefixHash(),
    "round-robin": lambda clock: RoundRobin(),
    "least-loaded": lambda clock: LeastLoaded(),
}
ROUTERS = tuple(_MAKERS)


def make_router(name: str, clock: Callable[[], float]) -> Router:
    """Raises ConfigError that lists the names."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"--router {name!r} is no router: there are {', '.join(ROUTERS)}", param="--router")
    return maker(clock)
