"""Pictures of requests: encoded between steps, before their sequences are admitted.

    submit --> waits --best rank first--> begun --piece, piece, ...--> rows ready --> admitted as any other
                                            |                                            |
                                            '------- its rows stay until it ends --------'
    rows of ended sequences stay too, up to ``budget_bytes``, the least recently used go first

A picture is encoded once, for any number of sequences. Its rows stay as long as one of these sequences is live, because
a preempted sequence computes the prompt again. An encoder computes in pieces of milliseconds. Between two steps, pieces
run for the seconds that ``advance`` is passed, so decodes go on meanwhile.

Laws: L11. The begun sequences hold rows of ``budget_bytes`` at most, unless a single sequence needs more. The others
wait in the bounded queue of the scheduler, and sequences without pictures pass them.

Rejected: encoding inside of a step (a picture takes longer than ``--max-step-ms``); a thread that runs during steps (it
takes cores from the steps).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from weft.engine.stats import PictureStats
from weft.errors import QueueFullError, RequestError
from weft.request import PlacedPicture, Request
from weft.schedule.sequence import Sequence
from weft.units import SeqId

WAITING_BYTES_MAX = 256 << 20
"""Most bytes of pixels of the pictures that wait to be encoded."""


class PictureEncoder(Protocol):
    """The encoder of an executor. ``row_bytes``: of one row; ``picture_tokens``: see ``weft.pictures``."""

    @property
    def row_bytes(self) -> int: ...

    @property
    def picture_tokens(self) -> tuple[int, ...]: ...

    def check(self, picture: PlacedPicture) -> None:
        """Raise RequestError for data that this encoder does not accept, or with another number of rows."""

    def pieces(self, picture: PlacedPicture) -> Iterator[None]:
        """Compute the rows, piece by piece. The executor has them when the iterator ends. Raises RequestError where
        memory does not suffice for this picture."""

    def drop(self, digest: bytes) -> None:
        """Free the rows of a picture in the executor."""


@dataclass(slots=True)
class _Rows:
    """The ``count`` rows of one picture. ``users``: begun sequences that need them. ``ready``: the executor has
    them."""

    count: int
    users: set[SeqId] = field(default_factory=set)
    ready: bool = False


class PictureQueue:
    """Pictures that wait, and rows that are kept. ``encoder`` None: the model reads text only. ``clock`` as the
    engine's."""

    def __init__(self, encoder: PictureEncoder | None, budget_bytes: int, clock: Callable[[], float]) -> None:
        self._encoder = encoder
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._waiting: dict[SeqId, Sequence] = {}
        self._begun: dict[SeqId, Sequence] = {}
        self._rows: OrderedDict[bytes, _Rows] = OrderedDict()
        self._current: tuple[bytes, Iterator[None]] | None = None
        self._encoded = self._reused = self._dropped = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def check(self, request: Request) -> None:
        """Raise RequestError for pictures that the encoder refuses, and QueueFullError where the waiting pictures are
        too large (law L11)."""
        if self._encoder is None or not request.pictures:
            return
        for picture in request.pictures:
            self._encoder.check(picture)
        waiting = sum(
            {picture.digest: len(picture.data) for seq in self._waiting.values() for picture in seq.pictures}.values()
        )
        new = sum(len(picture.data) for picture in request.pictures)
        if waiting and waiting + new > WAITING_BYTES_MAX:
            raise QueueFullError(
                f"{waiting} bytes of pictures wait to be encoded and this request brings {new}; the limit is "
                f"{WAITING_BYTES_MAX}. Try again later",
                param="messages",
                code="queue_full",
            )

    def submitted(self, seq: Sequence) -> None:
        if seq.pictures:
            self._waiting[seq.id] = seq

    def advance(self, limit_s: float) -> dict[SeqId, str]:
        """Encode for ``limit_s`` seconds, one piece at least. Returns the sequences that must end, with the reason: one
        of their pictures cannot be encoded."""
        end_s = self._clock() + limit_s
        while (seq := self._next()) is not None:
            missing = next((picture for picture in seq.pictures if not self._rows[picture.digest].ready), None)
            if missing is None:
                self._encoded_all(seq)
                continue
            try:
                self._advance_one(missing)
            except RequestError as error:
                self._current = None
                return dict.fromkeys(self._rows[missing.digest].users, error.message)
            if self._clock() >= end_s:
                break
        return {}

    def ended(self, seq: Sequence) -> None:
        """Note that ``seq`` ended, or was cancelled."""
        if not seq.pictures:
            return
        self._waiting.pop(seq.id, None)
        if self._begun.pop(seq.id, None) is not None:
            for picture in seq.pictures:
                self._rows[picture.digest].users.discard(seq.id)
            self._trim(self._budget_bytes)

    @property
    def begun(self) -> list[SeqId]:
        """Live sequences whose pictures were encoded, or are being encoded: their pixels may be gone."""
        return list(self._begun)

    def forget(self) -> None:
        """Drop the rows that no sequence needs."""
        self._trim(0)

    def stats(self) -> PictureStats:
        return PictureStats(
            self._encoded,
            self._reused,
            self._dropped,
            self._bytes(),
            len(self._waiting),
            0 if self._encoder is None else self._budget_bytes,
        )

    def audit(self) -> None:
        for rows in self._rows.values():
            assert rows.users <= self._begun.keys(), "rows are held for a sequence that has ended"
        needed = sum(rows.count for rows in self._rows.values() if rows.users) * self._row_bytes
        assert len(self._begun) <= 1 or needed <= self._budget_bytes, "more rows are held than the budget"

    # ------------------------------------------------------------------ rows

    def _next(self) -> Sequence | None:
        """Return the best sequence that is begun or may begin. If the rows of one find no room, no later sequence
        begins: otherwise a sequence with many pictures would wait for ever."""
        room = True
        for seq in sorted(self._waiting.values(), key=lambda seq: seq.rank):
            if seq.id in self._begun:
                return seq
            room = room and self._begins(seq)
            if room:
                return seq
        return None

    def _begins(self, seq: Sequence) -> bool:
        """Take the rows of ``seq`` and return True, unless others hold too many."""
        counts = {digest: rows.count for digest, rows in self._rows.items() if rows.users}
        counts |= {picture.digest: picture.row_count for picture in seq.pictures}
        if self._begun and sum(counts.values()) * self._row_bytes > self._budget_bytes:
            return False
        self._begun[seq.id] = seq
        for picture in seq.pictures:
            rows = self._rows.setdefault(picture.digest, _Rows(picture.row_count))
            self._reused += rows.ready
            rows.users.add(seq.id)
            self._rows.move_to_end(picture.digest)
        self._trim(self._budget_bytes)
        return True

    def _advance_one(self, picture: PlacedPicture) -> None:
        if self._current is None or self._current[0] != picture.digest:
            # Another sequence goes first now. Half of a picture is of no use: it is encoded from the start later.
            assert self._encoder is not None
            self._current = picture.digest, self._encoder.pieces(picture)
        try:
            next(self._current[1])
        except StopIteration:
            self._rows[picture.digest].ready, self._current = True, None
            self._encoded += 1

    def _encoded_all(self, seq: Sequence) -> None:
        """Admit ``seq`` from now on. Its pixels are not needed any more."""
        del self._waiting[seq.id]
        seq.pictures_due = False
        seq.pictures = tuple(msgspec.structs.replace(picture, data=b"") for picture in seq.pictures)

    def _trim(self, limit_bytes: int) -> None:
        """Drop rows without users until all rows have ``limit_bytes`` at most."""
        over = self._bytes() - limit_bytes
        for digest in [digest for digest, rows in self._rows.items() if not rows.users]:
            if over <= 0:
                return
            rows = self._rows.pop(digest)
            over -= rows.count * self._row_bytes
            if self._current is not None and self._current[0] == digest:
                self._current = None
            if rows.ready:
                assert self._encoder is not None
                self._encoder.drop(digest)
                self._dropped += 1

    def _bytes(self) -> int:
        return sum(rows.count for rows in self._rows.values()) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return 0 if self._encoder is None else self._encoder.row_bytes
