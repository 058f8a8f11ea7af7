"""Routers of simulations: those of a server, and for comparison two that ignore caches.

    round-robin     the next replica
    prefix-hash     by the first tokens of the prompt; another replica if that one has too much in flight

The hash is rendezvous hashing: if a replica leaves, only its own prefixes move. A replica with more than LOAD_SHARE_MAX
of the mean load is passed over, so a prefix that all prompts share is spread over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import ConfigError
from weft.prefix_digests import prefix_digests
from weft.router.choice import ROUTERS as SERVED
from weft.router.choice import make_router as make_served
from weft.router.protocol import ReplicaLoad, Route, RoutedRequest, Router, least_loaded
from weft.units import PAGE_TOKENS

PREFIX_TOKENS = 2048
LOAD_SHARE_MAX = 1.25
_WORD = (1 << 64) - 1
_MIX = 0xBF58476D1CE4E5B9


class RoundRobin(Router):
    """A ``Router`` that takes each candidate in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        later = (load.replica for load in candidates if load.replica > self._last)
        return Route(next(later, candidates[0].replica))

    def placed(self, request: RoutedRequest, route: Route) -> None:
        self._last = route.replica


class PrefixHash(Router):
    """A ``Router`` by rendezvous hashing of the first ``prefix_tokens`` tokens of the prompt."""

    def __init__(self, prefix_tokens: int = PREFIX_TOKENS) -> None:
        self._prefix_tokens = prefix_tokens

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        length = min(len(request.tokens), self._prefix_tokens)
        digests = prefix_digests(request.tokens[: max(length, PAGE_TOKENS)], request.salt)
        if not digests.size:  # shorter than a page, so nothing can be shared
            return Route(least_loaded(candidates).replica)
        prefix = int(digests[-1])
        sequences = sum(load.sequences for load in candidates) + request.sequences
        limit = LOAD_SHARE_MAX * sequences / len(candidates)
        open_loads = [load for load in candidates if load.sequences + request.sequences <= limit]
        return Route(
            max(open_loads or [least_loaded(candidates)], key=lambda load: _weight(prefix, load.replica)).replica
        )


def _weight(prefix: int, replica: int) -> int:
    """Return a number that mixes both; the same in every process."""
    mixed = (prefix ^ ((replica + 1) * _MIX)) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _MIX) & _WORD
    return mixed ^ (mixed >> 31)


_BLIND: dict[str, Callable[[], Router]] = {"prefix-hash": PrefixHash, "round-robin": RoundRobin}
ROUTERS = (*SERVED, *_BLIND)


def check_router(name: str) -> None:
    """Raise ConfigError, which lists the names, where no router is called ``name``."""
    if name not in ROUTERS:
        raise ConfigError(f"--router {name!r} is not a router: there are {', '.join(ROUTERS)}", param="--router")


def make_router(name: str, clock: Callable[[], float]) -> Router:
    """Return the router called ``name``. Raise ConfigError that lists the names."""
    check_router(name)
    return _BLIND[name]() if name in _BLIND else make_served(name, clock)
