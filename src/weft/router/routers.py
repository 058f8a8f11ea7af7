"""A router chooses the replica that computes a request. The fleet asks it, and reports what came of it.

    fleet                                     router
    -----                                     ------
    joined(replica), left(replica)   ----->   an engine serves, or its process ended: its cache is empty
    choose(request, candidates)      ----->   a Route: one of the candidates
    placed(request, route)           ----->   the request went there
    admitted(request_id, tokens)     ----->   its prompt is computed; tokens that the engine had cached
    ended(request_id)                ----->   the request left its replica, for any reason
    reported(replica, report)        ----->   snapshots that came and went; True asks for a full report

A replica is a number from 0. ``choose`` gets only replicas that serve and take requests; the fleet holds a
request while there is none. ``choose`` changes nothing, so a dropped choice needs no repair. Each ``placed``
has exactly one ``ended``. A request that resumes after the end of its engine is placed again under its id,
with the tokens of its answer behind its prompt.

Law L10: the digest of a prefix begins with its salt, so two salts share no prefix. Law L11: a router forgets
a request at its end and a replica when it leaves, and every other table has a bound.

ROUTERS has the names of ``debug.router``. Those here look at no cache; ``seconds`` does.

    least-loaded    the fewest sequences in flight, then the fewest tokens, then the lowest number
    round-robin     the next one
    prefix-hash     by the first tokens of the prompt; another one where that replica has too much in flight

Sequences come first because each one adds a row to every step. The hash is rendezvous hashing: if a replica
leaves, only its own prefixes move. A replica with more than LOAD_SHARE_MAX of the mean load is passed over,
so a prefix that all prompts have spreads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from weft.costs.step import StepCost
from weft.errors import ConfigError
from weft.snapshot_report import SnapshotReport
from weft.units import PAGE_TOKENS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Wants = Literal["nothing", "states", "pages"]
"""What engines report to a router: nothing; where requests can resume; where KV pages end."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router knows of a request. ``tokens``: its prompt, and the tokens of its answer so far if it
    resumes. ``sequences``: its answers that have not ended. ``new_tokens_max`` of each of them, None without
    a bound of its own. ``boundaries``: positions up to which another prompt is likely to be the same."""

    request_id: str
    tokens: Sequence[int] | npt.NDArray[np.int32]
    salt: str = ""
    sequences: int = 1
    new_tokens_max: int | None = None
    boundaries: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that takes requests, as the fleet counts it: exact at this moment, without a report of the
    engine. ``sequences`` and ``known_tokens`` are what the requests in flight brought there: prompts, and
    answers so far of those that resumed. ``rows``: sequences that its engine runs at once. ``costs``: what
    its engine has measured, None before that."""

    replica: int
    sequences: int
    known_tokens: int
    rows: int
    costs: StepCost | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """``predicted_tokens``: tokens that the router expects in the cache of ``replica``. ``boundaries``:
    positions where prompts of this fleet part, for the engine to save a state there. ``digests`` (of whole
    chunks) and ``work_s`` (seconds of prefill) are for ``placed``."""

    replica: int
    predicted_tokens: int = 0
    boundaries: tuple[int, ...] = ()
    digests: Sequence[int] = field(default=(), repr=False, compare=False)
    work_s: float = field(default=0.0, repr=False, compare=False)


@dataclass(slots=True)
class RouterCounts:
    """Of one replica. ``predicted_tokens`` and ``cached_tokens``: expected in its cache, and reported by its
    engine, of requests that were admitted. ``snapshots``: known now. ``is_stale``: reports were lost, or
    its full report is on the way. ``gaps``: how often reports were lost."""

    requests: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    snapshots: int = 0
    is_stale: bool = False
    gaps: int = 0


class Router(Protocol):
    """One for a fleet; called by one thread. The bodies are those of a router without tables."""

    @property
    def wants(self) -> Wants:
        return "nothing"

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        """One of ``candidates``, which are never empty and in the order of their numbers."""
        ...

    def placed(self, request: RoutedRequest, route: Route) -> None:
        return None

    def admitted(self, request_id: str, cached_tokens: int) -> None:
        return None

    def ended(self, request_id: str) -> None:
        return None

    def joined(self, replica: int) -> None:
        return None

    def left(self, replica: int) -> None:
        return None

    def reported(self, replica: int, report: SnapshotReport) -> bool:
        return False

    def counts(self) -> dict[int, RouterCounts]:
        """By replica; empty for a router that predicts nothing."""
        return {}


PREFIX_TOKENS = 2048
LOAD_SHARE_MAX = 1.25
_WORD = (1 << 64) - 1
_MIX = 0xBF58476D1CE4E5B9


class LeastLoaded(Router):
    """A ``Router``."""

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        return Route(least_loaded(candidates).replica)


class RoundRobin(Router):
    """A ``Router``."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        later = (load.replica for load in candidates if load.replica > self._last)
        return Route(next(later, candidates[0].replica))

    def placed(self, request: RoutedRequest, route: Route) -> None:
        self._last = route.replica


class PrefixHash(Router):
    """A ``Router``. ``prefix_tokens``: the part of the prompt that is hashed."""

    def __init__(self, prefix_tokens: int = PREFIX_TOKENS) -> None:
        self._prefix_tokens = prefix_tokens

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        from weft.prefix_digests import prefix_digests  # numpy; the other routers need none

        length = min(len(request.tokens), self._prefix_tokens)
        digests = prefix_digests(request.tokens[:max(length, PAGE_TOKENS)], request.salt)
        if not digests.size:  # shorter than a page: there is nothing to share
            return Route(least_loaded(candidates).replica)
        prefix = int(digests[-1])
        sequences = sum(load.sequences for load in candidates) + request.sequences
        limit = LOAD_SHARE_MAX * sequences / len(candidates)
        open_loads = [load for load in candidates if load.sequences + request.sequences <= limit]
        return Route(max(open_loads or [least_loaded(candidates)],
                          key=lambda load: _weight(prefix, load.replica)).replica)


def least_loaded(candidates: Sequence[ReplicaLoad]) -> ReplicaLoad:
    return min(candidates, key=lambda load: (load.sequences, load.known_tokens, load.replica))


def _weight(prefix: int, replica: int) -> int:
    """A number that mixes both; the same in every process."""
    mixed = (prefix ^ ((replica + 1) * _MIX)) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _MIX) & _WORD
    return mixed ^ (mixed >> 31)


DEFAULT_ROUTER = "seconds"


def _by_seconds(clock: Callable[[], float], wants: Wants = "states") -> Router:
    from weft.router.seconds import Seconds  # numpy, which a server of one replica has no use for

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
