"""Further routers that look at no cache: round robin, and a hash of the beginning of the prompt.

    round-robin     the next one
    prefix-hash     by the first tokens of the prompt; another one where that replica has too much in flight

The hash is rendezvous hashing: if a replica leaves, only its own prefixes move. A replica with more than
LOAD_SHARE_MAX of the mean load is passed over, so a prefix that all prompts have spreads. ROUTERS has all by
the names of ``debug.router``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import ConfigError
from weft.router.protocol import LeastLoaded, ReplicaLoad, Route, RoutedRequest, Router, Wants, least_loaded
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
        from weft.prefix_digests import prefix_digests  # numpy; the other routers need none

        length = min(len(request.tokens), self._prefix_tokens)
        digests = prefix_digests(request.tokens[: max(length, PAGE_TOKENS)], request.salt)
        if not digests.size:  # shorter than a page: there is nothing to share
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


DEFAULT_ROUTER = "seconds"


def _by_seconds(clock: Callable[[], float], wants: Wants = "states", *, always_splits: bool = False) -> Router:
    from weft.router.seconds import Seconds  # numpy, which a server of one replica has no use for

    return Seconds(clock, wants, always_splits=always_splits)


_MAKERS: dict[str, Callable[[Callable[[], float]], Router]] = {
    "seconds": _by_seconds,
    "kv-only": lambda clock: _by_seconds(clock, "pages"),
    "split": lambda clock: _by_seconds(clock, always_splits=True),
    "prefix-hash": lambda clock: PrefixHash(),
    "round-robin": lambda clock: RoundRobin(),
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
