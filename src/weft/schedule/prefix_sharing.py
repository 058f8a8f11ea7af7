"""Requests that share a prefix and arrive together compute it once: who waits for whom.

A *leader* is computing tokens that are not in the cache yet. A *follower* is waiting to be admitted, and the
front of its tokens is the same:

    leader     [============ computed ====|------------- to compute -------------]
                                          at            ^ point
    follower   [==== cached ====|------------------------|.. own tokens ..]
                              cached                   the last position of the grid that both share

    saved by waiting:   point - cached        tokens that are not computed twice
    waited for:         point - at            tokens that the leader has still to go through

It waits when it saves enough and the leader is not behind what the follower has itself, so that the state
comes no later than the follower could compute it. The leader is asked to keep its state at ``point``, on
its way, whether or not it wanted to.

Nobody waits for ever: a leader runs now and ranks better, so it gets memory and tokens first; when it is
preempted, ends or passes the point without having found a slot to keep its state in, it leads no more, and
whoever waited is admitted as if it had never been there. Followers are passed over meanwhile: who is behind
them in the queue does not wait with them.

Leaders are found by their first chunk of tokens, so looking for one costs a lookup and not a comparison with
everybody. Pure functions over numbers and arrays.

Rejected: merging twins into one sequence (they differ in seeds, ends and clients); waiting for a leader of
worse rank (that would be priority turned around); a timer (no clock here, and the conditions suffice).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.schedule.plan import Int32s
from weft.schedule.sequence import Rank
from weft.schedule.taps import on_grid
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, SeqId

SAVED_TOKENS_MIN = CHUNK_TOKENS
"""Nobody waits for less. It is also the front by which leaders are found."""


@dataclass(frozen=True, slots=True)
class Leader:
    """``at``: tokens that are computed now. ``arriving``: positions whose state this plan publishes, so the
    next one can match them. ``rank`` None: it ends with this plan, so waiting for it is one step."""

    seq: SeqId
    salt: str
    rank: Rank | None
    known: Int32s
    at: int
    arriving: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for ``leader``; it should keep its state at ``demand``, 0 when that is on its way already."""

    leader: SeqId
    demand: int = 0


def front(tokens: Int32s) -> bytes:
    """What leader and follower must share at least."""
    return tokens[:SAVED_TOKENS_MIN].tobytes()


def common_tokens(left: Int32s, right: Int32s) -> int:
    """Tokens at the front of both that are equal."""
    length = min(left.size, right.size)
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def wait_for(known: Int32s, cached: int, rank: Rank, leaders: Iterable[Leader], *,
             stateful: bool, grid: int = CHUNK_TOKENS) -> Wait | None:
    """Whether a follower with ``known`` tokens, ``cached`` of them in the cache, should wait for one of
    ``leaders``: for the one that saves it most, the first of equals. ``stateful`` False: the model resumes at
    any page, and every page that is computed is published. ``grid``: states are kept at its multiples."""
    best: Wait | None = None
    saved_most = SAVED_TOKENS_MIN - 1
    for leader in leaders:
        if leader.rank is not None and leader.rank > rank:
            continue
        if not _further(leader, known, cached + saved_most):
            continue
        shared = min(common_tokens(leader.known, known), known.size - 1)
        for point, waited_for, demand in _points(leader, shared, stateful=stateful, grid=grid):
            if point - cached > saved_most and waited_for <= point - cached:
                best, saved_most = Wait(leader.seq, demand), point - cached
    return best


def in_the_making(known: Int32s, cached: int, leaders: Iterable[Leader], *, stateful: bool,
                  grid: int = CHUNK_TOKENS) -> int:
    """How far of a prompt of ``known`` tokens, ``cached`` of them in the cache, the state (or KV) could be
    had by waiting for one of ``leaders``, whether that is worth it or not; 0 where it could not."""
    furthest = 0
    for leader in leaders:
        if _further(leader, known, max(cached, furthest)):
            shared = min(common_tokens(leader.known, known), known.size - 1)
            points = _points(leader, shared, stateful=stateful, grid=grid)
            furthest = max([furthest, *(point for point, _, _ in points)])
    return furthest if furthest > cached else 0


def _further(leader: Leader, known: Int32s, position: int) -> bool:
    """False where ``leader`` and ``known``, but for its last token, have no more than ``position`` tokens in
    common, as far as one look can tell: most twins part soon behind what is cached."""
    return (min(leader.known.size, known.size - 1) > position
            and bool(leader.known[position] == known[position]))


def _points(leader: Leader, shared: int, *, stateful: bool, grid: int) -> Iterator[tuple[int, int, int]]:
    """Positions up to ``shared`` that ``leader`` brings or can bring, the tokens it computes until then, and
    the tap to ask it for."""
    for position in leader.arriving:
        if position <= shared:
            yield position, 0, 0
        elif not stateful:
            yield _page_end(shared), 0, 0
    point = on_grid(shared, grid) if stateful else _page_end(shared)
    if leader.rank is not None and point > leader.at:
        yield point, point - leader.at, point if stateful else 0


def _page_end(position: int) -> int:
    return position - position % PAGE_TOKENS
