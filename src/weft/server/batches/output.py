"""The output of ``weft batch``: answers appended line by line, and what an earlier run has left there.

    open --> lock --> read what is there --> cut a torn last line --> append

A run that was interrupted leaves whole lines and at most one torn line, the last. The next run keeps the
lines, cuts off the torn one and computes only what is missing. Another line that is no answer is damage: the
file is then left alone. So is a file with answers to other requests.

The lock is on the file, so two runs cannot write the same output. It ends with the process.
"""

from __future__ import annotations

import fcntl
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

import msgspec

from weft.errors import RequestError
from weft.server.batches.lines import OutputLine, encode_output

_decoder = msgspec.json.Decoder(OutputLine)


class OutputFile:
    """``known_ids``: the custom_ids of the input. Raises RequestError, which names --output, and OSError."""

    def __init__(self, path: Path, known_ids: Collection[str]) -> None:
        self._path = path
        self._file: BinaryIO = path.open("ab+")
        try:
            self._lock()
            self.failed_count = 0
            self.done: frozenset[str] = frozenset(self._read(known_ids))
        except BaseException:
            self._file.close()
            raise

    def write(self, line: OutputLine) -> None:
        """Once it returns, an interruption does not lose the line."""
        self._file.write(encode_output(line))
        self._file.flush()
        self.failed_count += not line.succeeded

    def close(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(f"{self._path}: another run is writing it", param="--output") from None

    def _read(self, known_ids: Collection[str]) -> set[str]:
        done: set[str] = set()
        self._file.seek(0)
        good = 0
        for number, raw in enumerate(self._file, start=1):
            if not raw.endswith(b"\n"):
                break  # torn: only the last line has no end
            try:
                line = _decoder.decode(raw)
            except (msgspec.DecodeError, ValueError, RecursionError):
                raise RequestError(f"{self._path}: line {number} is no answer of a batch; the file stays as "
                                   "it is", param="--output") from None
            if line.custom_id not in known_ids:
                raise RequestError(f"{self._path}: line {number} answers {line.custom_id[:100]!r}, which is "
                                   "not in the input; name another output, or remove this one",
                                   param="--output")
            done.add(line.custom_id)
            self.failed_count += not line.succeeded
            good += len(raw)
        self._file.truncate(good)
        self._file.seek(good)
        return done
