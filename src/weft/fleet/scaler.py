"""How many replicas a fleet should have: by the seconds that queued work takes. Pure: no clock and no I/O.

    waiting sequences / sequences admitted a second   = seconds of queued work
    above GROW_AT_S, and no replica is starting       -> one more, up to the most
    an empty queue, and the others have room          -> one less after IDLE_S, down to the least

The rate is measured over the last RATE_S. While nothing is admitted, the queue takes as long as it has been
there. A replica that is starting counts as capacity: it is waited for before another one is asked for.

Rejected: the share of busy rows (a full batch with an empty queue is fine); a target of requests for
each replica (a request may be ten tokens or a hundred thousand).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

GROW_AT_S = 5.0
IDLE_S = 120.0
RATE_S = 30.0


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """A look at a fleet. ``admitted``: sequences since its start. ``ready`` and ``starting`` count replicas,
    ``rows`` the sequences that one of them runs at once."""

    running: int
    waiting: int
    admitted: int
    ready: int
    starting: int
    rows: int


class Scaler:
    """Between ``least`` and ``most`` replicas."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self.target = least
        self.queued_s = 0.0
        """Seconds of queued work, at the last look."""
        self._looks: deque[tuple[float, int]] = deque()
        self._waiting_since_s: float | None = None
        self._roomy_since_s: float | None = None

    def look(self, now_s: float, load: FleetLoad) -> int:
        """The number of replicas that there should be."""
        self._note(now_s, load)
        if self.queued_s > GROW_AT_S and not load.starting and load.ready >= self.target:
            self.target = min(self._most, self.target + 1)
        others_have_room = load.running <= load.rows * (self.target - 1)
        if load.waiting or load.starting or not others_have_room:
            self._roomy_since_s = None
        elif self._roomy_since_s is None:
            self._roomy_since_s = now_s
        elif now_s - self._roomy_since_s >= IDLE_S:
            self.target = max(self._least, self.target - 1)
            self._roomy_since_s = None
        return self.target

    def _note(self, now_s: float, load: FleetLoad) -> None:
        self._looks.append((now_s, load.admitted))
        while now_s - self._looks[0][0] > RATE_S:
            self._looks.popleft()
        if not load.waiting:
            self._waiting_since_s, self.queued_s = None, 0.0
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        waited_s = now_s - self._waiting_since_s
        self.queued_s = (load.waiting * (last_s - first_s) / (last - first) if last > first else waited_s)
