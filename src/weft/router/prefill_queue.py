"""The prefills that one replica still has to compute, as its router placed them: seconds until the next one.

    [ head: placed, computed since began_s ][ next ][ next ]      + a new request
      work_s - elapsed                      + work_s + work_s     = seconds of waiting

An engine computes prompts in the order of arrival, as a step has room. The head began when the one before it
was admitted. A head that is late runs on an engine that is slower than its costs say, or that stands still:
it counts as much as it is late. So a replica that hangs gets fewer and fewer requests until it is noticed.

A request in flight is also a prefix to come. A later request with the same beginning waits for it and
computes only its own part (``weft.schedule.prefix_sharing``). Digests are those of whole chunks, the grid of
states. They are compared by bisection, because the digests of two prompts are equal up to where they part.

Law L11: bounded by the requests in flight. One lookup compares at most COMPARED_MAX of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.units import CHUNK_TOKENS

COMPARED_MAX = 16


@dataclass(slots=True)
class _Prefill:
    work_s: float
    digests: Sequence[int]


class PrefillQueue:
    def __init__(self) -> None:
        self._prefills: dict[str, _Prefill] = {}
        self._by_beginning: dict[int, dict[str, None]] = {}
        self._work_s = 0.0
        self._head_began_s = 0.0

    def __len__(self) -> int:
        return len(self._prefills)

    def add(self, request_id: str, work_s: float, digests: Sequence[int], now_s: float) -> None:
        if not self._prefills:
            self._head_began_s = now_s
        self._prefills[request_id] = _Prefill(work_s, digests)
        self._work_s += work_s
        if digests:
            self._by_beginning.setdefault(digests[0], {})[request_id] = None

    def remove(self, request_id: str, now_s: float) -> None:
        """It is computed, or gone. Unknown ids are ignored."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return
        if next(iter(self._prefills)) == request_id:
            self._head_began_s = now_s
        del self._prefills[request_id]
        self._work_s = self._work_s - prefill.work_s if self._prefills else 0.0
        if prefill.digests:
            same = self._by_beginning[prefill.digests[0]]
            del same[request_id]
            if not same:
                del self._by_beginning[prefill.digests[0]]

    def wait_s(self, now_s: float) -> float:
        """Seconds until a request that is placed now begins."""
        if not self._prefills:
            return 0.0
        head = next(iter(self._prefills.values()))
        elapsed_s = now_s - self._head_began_s
        return self._work_s - head.work_s + abs(head.work_s - elapsed_s)

    def shared_tokens(self, digests: Sequence[int]) -> int:
        """Tokens that a request with ``digests`` shares with one in flight, on the grid of states."""
        same = self._by_beginning.get(digests[0]) if digests else None
        if same is None:
            return 0
        longest = 0
        for at, request_id in enumerate(reversed(same)):
            if at == COMPARED_MAX:
                break
            longest = max(longest, _common(digests, self._prefills[request_id].digests, longest))
        return longest * CHUNK_TOKENS


def _common(left: Sequence[int], right: Sequence[int], least: int) -> int:
    """Equal digests at the front of both; ``least`` if there are no more."""
    high = min(len(left), len(right))
    if high <= least or left[least] != right[least]:
        return least
    low = least + 1
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
