"""``VirtualDisk``: a disk on a clock that its caller moves. Reads come first, and writes use the rest.

    reads    one after the other, at the rate of the disk
    writes   one after the other, at the write limit, while no read is under way

    time     |-- read --|-- read --|       |-- read --|
    writes                         |-- w --|          |-- w --|-- w --|

A read that begins stops the write that is under way, as ``WriteThread`` stops between two pieces of a
record. So reads and writes together never move more than the disk does. A read's latency is no work of the
disk: other bytes move meanwhile.

Rejected: half of the rate for each (reads need a tenth of the time, and writes need more than half); a lane
for both in order of arrival (a write of 500 MB would delay each read behind it, as no SSD does).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from weft.memory.prefix_store import Ticket


@dataclass(frozen=True, slots=True)
class DiskModel:
    """Bytes it holds, bytes it moves in a second, seconds until the first byte, and the most bytes a second
    that writes may take."""

    capacity_bytes: int
    bytes_s: float
    latency_s: float
    write_bytes_s: float


@dataclass(frozen=True, slots=True)
class PackingModel:
    """What packing makes of records (``packed_store``). ``kv``, ``state``: stored bytes over bytes in memory.
    ``pack_bytes_s`` and ``unpack_bytes_s``: bytes in memory, all threads together."""

    kv: float = 1.0
    state: float = 1.0
    pack_bytes_s: float = inf
    unpack_bytes_s: float = inf


NO_PACKING = PackingModel()


class VirtualDisk:
    """``now_s`` of every call never goes back."""

    def __init__(self, model: DiskModel) -> None:
        self.model = model
        self._now_s = self._reads_end_s = 0.0
        self._writes: deque[tuple[Ticket, float]] = deque()
        """Writes under way with the bytes that are left of them."""
        self._written: list[Ticket] = []

    def read(self, nbytes: int, now_s: float) -> float:
        """The time at which a read of ``nbytes`` that begins now has arrived."""
        self._advance(now_s)
        self._reads_end_s = max(self._reads_end_s, now_s) + nbytes / self.model.bytes_s
        return self._reads_end_s + self.model.latency_s

    def write(self, ticket: Ticket, nbytes: int, now_s: float) -> None:
        self._advance(now_s)
        self._writes.append((ticket, float(nbytes)))

    def written(self, now_s: float) -> list[Ticket]:
        """Writes that have ended since the last call."""
        self._advance(now_s)
        tickets, self._written = self._written, []
        return tickets

    @property
    def next_written_s(self) -> float:
        """When the next write ends if no read begins; infinity without one."""
        if self._written:
            return self._now_s
        if not self._writes:
            return inf
        return max(self._now_s, self._reads_end_s) + self._writes[0][1] / self._write_rate

    @property
    def _write_rate(self) -> float:
        return min(self.model.write_bytes_s, self.model.bytes_s)

    def _advance(self, now_s: float) -> None:
        at_s, self._now_s = max(self._now_s, self._reads_end_s), now_s
        while self._writes:
            ticket, left = self._writes[0]
            end_s = at_s + left / self._write_rate
            if end_s > now_s:
                if at_s < now_s:
                    self._writes[0] = ticket, left - (now_s - at_s) * self._write_rate
                return
            self._writes.popleft()
            self._written.append(ticket)
            at_s = end_s
