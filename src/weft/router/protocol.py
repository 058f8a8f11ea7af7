"""The protocol of routers, which choose the replica that computes a request and learn the outcome from the fleet.

    fleet                                     router
    -----                                     ------
    joined(replica), left(replica)   ----->   an engine serves with an empty cache, or its process ended
    choose(request, candidates)      ----->   a Route: one of the candidates
    placed(request, route)           ----->   the request went there
    admitted(request_id, tokens)     ----->   the prompt is computed; ``tokens`` of it were cached
    ended(request_id)                ----->   the request left its replica, for any reason
    reported(replica, report)        ----->   snapshots that came and went; True asks for a full report

A replica is a number from 0. ``choose`` gets only replicas that serve and take requests; the fleet holds a request
while there is none. ``choose`` changes nothing, so a dropped choice needs no repair. Each ``placed`` has exactly one
``ended``. A request that resumes after the end of an engine is placed again under the same id; its tokens are then the
prompt and the answer so far.

Law L10: the digest of a prefix begins with its salt, so two salts share no prefix. Law L11: a router forgets
a request at its end and a replica when it leaves, and every other table has a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from weft.costs.step import StepCost
from weft.handoff import LinkStats, Role
from weft.snapshot_report import SnapshotReport

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Wants = Literal["nothing", "states", "pages"]
"""Reports of engines to a router: none; positions where requests can resume; ends of KV pages."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as a router sees it. ``tokens``: the prompt, followed by the answer so far if the request resumes.
    ``sequences``: answers that have not ended. ``new_tokens_max``: of each answer, None without a bound.
    ``boundaries``: positions up to which another prompt is likely to be equal. ``may_split``: whether one replica may
    compute the prompt and another the answer."""

    request_id: str
    tokens: Sequence[int] | npt.NDArray[np.int32]
    salt: str = ""
    sequences: int = 1
    new_tokens_max: int | None = None
    boundaries: Sequence[int] = ()
    may_split: bool = False


class ReplicaLoad(NamedTuple):
    """A replica that takes requests, with the fleet's own counts, which are exact at this moment. ``sequences`` and
    ``known_tokens``: totals of the requests in flight there; the tokens are prompts, and answers so far of resumed
    requests. ``rows``: sequences that the engine runs at once. ``costs``: measured by the engine, None before that.
    ``role``: preferred work; ``link``: cost of sending records to the replica, None if it receives none."""

    replica: int
    sequences: int
    known_tokens: int
    rows: int
    costs: StepCost | None = None
    role: Role = "both"
    link: LinkStats | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """The choice of a router. ``predicted_tokens``: tokens that the router expects in the cache of ``replica``.
    ``boundaries``: positions where prompts of this fleet diverge, at which the engine should save a state. ``digests``
    (of whole chunks) and ``work_s`` (seconds of prefill) are for ``placed``. ``decode``: the replica that continues
    once the prompt is computed, None for the same one; ``decode_tokens``: tokens of the prompt in that replica's cache.
    ``moved``: whether this replica continues after another computed the prompt."""

    replica: int
    predicted_tokens: int = 0
    boundaries: tuple[int, ...] = ()
    digests: Sequence[int] = field(default=(), repr=False, compare=False)
    work_s: float = field(default=0.0, repr=False, compare=False)
    decode: int | None = None
    decode_tokens: int = 0
    moved: bool = False


@dataclass(slots=True)
class RouterCounts:
    """Counters of one replica. ``predicted_tokens``, ``cached_tokens``: cached tokens that the router expected and that
    the engine reported, for admitted requests. ``snapshots``: number known now. ``is_stale``: whether reports were
    lost, or the full report has not come yet. ``gaps``: how often reports were lost."""

    requests: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    snapshots: int = 0
    is_stale: bool = False
    gaps: int = 0


class Router(Protocol):
    """A router of one fleet, called from one thread. The default methods are those of a router without tables."""

    @property
    def wants(self) -> Wants:
        return "nothing"

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        """Return one of ``candidates``, which are never empty and in the order of their numbers; a ``prefill`` replica
        serves a complete request only if there is no other candidate."""

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

    def handoff_failed(self, prefill: int, decode: int) -> None:
        """Note that records did not get from ``prefill`` to ``decode``."""
        return None

    def counts(self) -> dict[int, RouterCounts]:
        """Return the counters by replica; empty for a router that predicts nothing."""
        return {}


class LeastLoaded(Router):
    """A ``Router`` that takes the replica with the fewest sequences in flight, since each adds a row to every step;
    then the one with the fewest tokens, then the lowest number."""

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> Route:
        return Route(least_loaded(candidates).replica)


def least_loaded(candidates: Sequence[ReplicaLoad]) -> ReplicaLoad:
    return min(candidates, key=lambda load: (load.sequences, load.known_tokens, load.replica))
