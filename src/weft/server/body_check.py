"""Large bodies are looked through in a process, before the server parses them.

    raw body --up to 1 MiB--> parsed at once, on the event loop
             --larger-------> body_worker: count of values, keys twice --> parsed in a thread

msgspec decodes some ten million values a second and holds the interpreter's lock meanwhile. So a thread is
enough only for a body with a bounded number of values (``limits.max_json_values``). Long texts and a million
token ids are below that bound; a body of 60 MB with twenty million empty objects is not.

The worker starts with the first large body, and takes one body at a time. The budget of buffered bytes
(``edge.py``) bounds the line before it. A worker that takes longer than its seconds is killed.

Rejected: a thread for the count (its regular expression holds the lock too); answers of the parser sent
between processes (the server would have to decode those).
"""

from __future__ import annotations

import msgspec

from weft.errors import EngineUnavailableError, RequestError
from weft.server.body_worker import LARGE_BODY_BYTES, BodyVerdict
from weft.text.worker_process import WorkerLane, WorkerProcess

_SECONDS = 30.0


class TooManyValuesError(RequestError):
    """The body is over limits.max_json_values."""

    status = 413


class BodyChecker:
    def __init__(self, values_max: int) -> None:
        start = values_max.to_bytes(8, "little")
        self._lane = WorkerLane(lambda: WorkerProcess("weft.server.body_worker", start), _SECONDS)

    async def check(self, raw: bytes) -> None:
        """Returns at once for a small body.

        Raises TooManyValuesError, RequestError, EngineUnavailableError."""
        if len(raw) <= LARGE_BODY_BYTES:
            return
        try:
            answer = msgspec.msgpack.decode(await self._lane.ask(raw), type=BodyVerdict)
        except OSError:
            raise EngineUnavailableError("the body took too long to look through; try "
                                         "again later") from None
        if answer.is_too_large:
            raise TooManyValuesError(answer.message, param="limits.max_json_values", code="too_many_values")
        if answer.message:
            raise RequestError(answer.message, param=answer.param, code="invalid_json")

    def close(self) -> None:
        self._lane.end()
