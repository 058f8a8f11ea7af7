"""``weft serve --record FILE``: times, lengths and hashes of requests, for ``weft simulate``.

    engine loop    accepted(request)  events(...)  stepped(plan, seconds)      a list append each
                        |  ended sequences
                   bounded queue ---> a separate thread: hashes (``recording``), JSON, the file

``weft.rpc.recording`` describes the file, and why no text can be read out of it. The key of the hashes is drawn here
and exists only in this process. Nothing waits for the file: if the thread is too slow or the disk is full, lines are
dropped and counted. A sample of the steps is kept, thinned as their number doubles. Queue, file and steps are bounded
(law L11).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from weft.engine.engine import EngineCore
from weft.errors import ConfigError
from weft.pictures import request_keys
from weft.request import Request, TokenEvent
from weft.rpc.recording import Fingerprints, header_line, sequence_line, token_text
from weft.schedule.plan import StepPlan, work_of

_QUEUE_MAX = 1024
_STEPS_A_LINE = 256
_STEPS_BEFORE_THINNING = 4096
_log = logging.getLogger("weft.server")


@dataclass(slots=True)
class _Open:
    """A sequence that has not ended."""

    request: Request
    number: int
    at_s: float
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    cancelled_at_s: float | None = None


class Recorder:
    """A recorder of traffic. ``clock`` is the engine's. Raises ConfigError (``--record``) if the file exists or cannot
    be created."""

    def __init__(
        self,
        file: Path,
        core: EngineCore,
        *,
        model: str,
        snapshots: str,
        limit_bytes: int,
        clock: Callable[[], float],
        has_tokens: bool = False,
    ) -> None:
        self._clock = clock
        self._has_tokens = has_tokens
        self._start_s = clock()
        self._open: dict[tuple[str, int], _Open] = {}
        self._number = 0
        self._steps: list[tuple[float, ...]] = []
        self._step_count = 0
        self._stride = 1
        self._dropped = 0
        self._lines: queue.Queue[Callable[[], dict[str, Any]] | None] = queue.Queue(_QUEUE_MAX)
        self._fingerprints = Fingerprints(secrets.token_bytes(32))
        self._writer = _Writer(file, limit_bytes)
        self._writer.write(header_line(model=model, arena=core.memory.plan, sizes=core.sizes, snapshots=snapshots))
        core.on_step.append(self.stepped)
        self._thread = threading.Thread(target=self._write_lines, name="recorder", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ called by the engine's loop

    def accepted(self, request: Request) -> None:
        now = self._clock()
        resumption = request.resumption
        answers = dict.fromkeys(range(request.sampling.n), ()) if resumption is None else resumption.answers
        for index, tokens in answers.items():
            self._open[request.request_id, index] = _Open(request, self._number, now - self._start_s, tokens=[*tokens])
            self._number += 1

    def cancelled(self, request_id: str, index: int | None) -> None:
        """Note a cancel before the engine gets it."""
        now = self._clock() - self._start_s
        for (name, number), sequence in self._open.items():
            if name == request_id and index in (None, number):
                sequence.cancelled_at_s = now

    def events(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            sequence = self._open.get((event.request_id, event.index))
            if sequence is None:
                continue
            sequence.tokens += event.tokens
            sequence.cached = event.cached_tokens
            if event.finish_reason is not None:
                del self._open[event.request_id, event.index]
                if event.finish_reason in ("cancelled", "error") and sequence.cancelled_at_s is None:
                    sequence.cancelled_at_s = self._clock() - self._start_s
                self._put(_Ended(sequence, self._fingerprints, self._has_tokens).line)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        self._step_count += 1
        if not plan.run_count or self._step_count % self._stride:
            return
        self._steps.append((*work_of(plan), seconds))
        if len(self._steps) == _STEPS_A_LINE:
            self._put_steps()
            if self._step_count >= _STEPS_BEFORE_THINNING * self._stride:
                self._stride *= 2

    def close(self) -> None:
        """Write waiting lines, and the last line. Idempotent."""
        if not self._thread.is_alive():
            return
        self._put_steps()
        self._lines.put(lambda: {"ended": True, "dropped": self._dropped})
        self._lines.put(None)
        self._thread.join()
        self._writer.close()

    def _put_steps(self) -> None:
        if self._steps:
            steps, self._steps = self._steps, []
            self._put(lambda: {"steps": steps})

    def _put(self, line: Callable[[], dict[str, Any]]) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    # ------------------------------------------------------------------ on the thread

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._writer.open and not self._writer.write(line()):
                self._dropped += 1


@dataclass(frozen=True, slots=True)
class _Ended:
    """An ended sequence. Its line is made on the thread, since hashing a long prompt takes a millisecond."""

    sequence: _Open
    fingerprints: Fingerprints
    has_tokens: bool

    def line(self) -> dict[str, Any]:
        sequence, request = self.sequence, self.sequence.request
        tokens = [*request_keys(request), *sequence.tokens]
        computed = len(tokens) - bool(sequence.tokens)  # the last token is chosen but never computed
        fingerprint = self.fingerprints.of(tokens, request.salt, computed=computed)
        return sequence_line(
            fingerprint,
            at_s=sequence.at_s,
            number=sequence.number,
            input_length=len(request.prompt_tokens),
            output_length=len(sequence.tokens),
            cached=sequence.cached,
            salt=self.fingerprints.salt(request.salt),
            priority=request.priority,
            boundaries=list(request.boundaries),
            marks=list(request.marks),
            # Mean and first-row pooling never use a cached prefix.
            prompt_logprobs=(
                request.sampling.prompt_logprobs is not None
                or (request.pooling is not None and request.pooling.kind != "last")
            ),
            cancelled_at_s=None if sequence.tokens else sequence.cancelled_at_s,
            tokens=token_text(tokens) if self.has_tokens else "",
        )


class _Writer:
    """A writer of lines of JSON up to a limit."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._left = limit_bytes
        self._size = 0
        self._has_failed = False
        try:
            self._file: FileIO | None = FileIO(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))
        except FileExistsError:
            raise ConfigError(
                f"--record {path}: the file is there already, and a recording begins a "
                "new one: name another, or remove it",
                param="--record",
            ) from None
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}", param="--record") from None

    @property
    def open(self) -> bool:
        return self._file is not None

    def write(self, line: dict[str, Any]) -> bool:
        """Write a line, and return whether all of it is in the file."""
        assert self._file is not None
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if len(text) > self._left:
            _log.warning(
                "--record: %s is full and ends here; limits.record_limit sets how large it may grow", self._path
            )
            self.close()
            return False
        try:
            unwritten = memoryview(text)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            if not self._has_failed:
                _log.warning(
                    "--record: %s cannot be written: %s; lines are dropped while this lasts", self._path, error.strerror
                )
            self._has_failed = True
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
                self._file.seek(self._size)
            return False
        self._size += len(text)
        self._left -= len(text)
        return True

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
