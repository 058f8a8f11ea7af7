"""The router without memory: the replica with the least work in flight.

    sequences in flight  ->  then tokens in flight  ->  then the lowest number

Sequences come first because each one adds a row to every step. Tokens break ties between replicas with the
same number of sequences. The counts are the fleet's own, so the choice never waits for a report.

Rejected: the engine's report of running sequences, which is up to a tenth of a second old. A burst of
requests within that time would go to one replica. Rejected: a random pair; all of a few can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.router.protocol import ReplicaLoad, RoutedRequest


class LeastLoaded:
    """A ``Router``."""

    def choose(self, request: RoutedRequest, candidates: Sequence[ReplicaLoad]) -> int:
        return min(candidates, key=lambda load: (load.sequences, load.known_tokens, load.replica)).replica

    def placed(self, request: RoutedRequest, replica: int) -> None:
        """The fleet counts what is in flight."""

    def admitted(self, request_id: str, cached_tokens: int) -> None:
        """Caches do not count."""

    def ended(self, request_id: str) -> None:
        """The fleet counts what is in flight."""

    def joined(self, replica: int) -> None:
        """A new replica has nothing in flight, so the next request goes there."""

    def left(self, replica: int) -> None:
        """It is no candidate any more."""
