"""Routers that a server offers, by the names of ``debug.router``; ``weft simulate`` has further routers for
comparison."""

from __future__ import annotations

from collections.abc import Callable

from weft.errors import ConfigError
from weft.router.protocol import LeastLoaded, Router, Wants

DEFAULT_ROUTER = "seconds"


def _by_seconds(clock: Callable[[], float], wants: Wants = "states", *, always_splits: bool = False) -> Router:
    from weft.router.seconds import Seconds  # imports numpy, which a server with one replica does not need

    return Seconds(clock, wants, always_splits=always_splits)


_MAKERS: dict[str, Callable[[Callable[[], float]], Router]] = {
    "seconds": _by_seconds,
    "kv-only": lambda clock: _by_seconds(clock, "pages"),
    "split": lambda clock: _by_seconds(clock, always_splits=True),
    "least-loaded": lambda clock: LeastLoaded(),
}
ROUTERS = tuple(_MAKERS)


def make_router(name: str, clock: Callable[[], float]) -> Router:
    """Return the router called ``name``. Raise ConfigError that lists the names."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(
            f"debug.router {name!r} is not a router: there are {', '.join(ROUTERS)}", param="debug.router"
        )
    return maker(clock)
