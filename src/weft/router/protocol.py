"""A router chooses the replica that computes a request. The fleet asks it, and reports what came of it.

    fleet                                     router
    -----                                     ------
    joined(replica), left(replica)   ----->   an engine serves, or its process ended: its cache is empty
    choose(request, candidates)      ----->   one of the candidates
    placed(request, replica)         ----->   the request went there
    admitted(request_id, tokens)     ----->   prompt tokens that the engine found in its cache
    ended(request_id)                ----->   the request left its replica, for any reason

A replica is a number from 0. ``choose`` gets only replicas that serve and take requests; the fleet holds a
request while there is none. ``choose`` changes nothing, so a dropped choice needs no repair. Each ``placed``
has exactly one ``ended``. A request that resumes after the end of its engine is placed again under its id,
with the tokens of its answer behind its prompt.

Law L10: two salts share no prefix, so a router compares salts before tokens. Law L11: a router forgets a
request at its end, so its tables are bounded by the requests in flight.

Rejected: a router that owns queues (the engines have queues with ranks, and a held request is the fleet's);
a coroutine (a choice must cost microseconds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router knows of a request. ``tokens``: its prompt, and the tokens of its answer so far if it
    resumes. ``sequences``: its answers that have not ended. ``new_tokens_max`` of each of them, None without
    a bound of its own. ``boundaries``: positions up to which another prompt is likely to be the same."""

    request_id: str
    tokens: Sequence[int]
    salt: str = ""
    sequences: int = 1
    new_tokens_max: int | None = None
    boundaries: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that takes requests, as the fleet counts it: exact at this moment, without a report of the
    engine. ``sequences`` and ``known_tokens`` are what the requests in flight brought there: prompts, and
    answers so far of those that resumed. ``rows``: sequences that its engine runs at once."""

    replica: int
    sequences: int
    known_tokens: int
    rows: int


class Router(Protocol):
    """One for a fleet; called by one thread."""

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> int:
        """The number of one of ``candidates``, which are never empty and in the order of their numbers."""
        ...

    def placed(self, request: RoutedRequest, replica: int) -> None: ...

    def admitted(self, request_id: str, cached_tokens: int) -> None: ...

    def ended(self, request_id: str) -> None: ...

    def joined(self, replica: int) -> None: ...

    def left(self, replica: int) -> None: ...
