"""Traces in files: JSON, an object a line, of either form; or the sample that comes with weft.

The first line says which: a recording's has ``weft_recording``, anything else is read as Mooncake's form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import ConfigError
from weft.sim.recording import Recording, read_recording
from weft.sim.traffic import Int32s, Traffic, TrafficRequest

BLOCK_TOKENS = 512
_BLOCKS_SHARED_MIN = 2
"""A continued conversation shares as many full blocks at least: one is the service's own beginning."""


def mooncake_traffic(rows: Iterable[Mapping[str, Any]], *, linked: bool = True, name: str = "the trace",
                     block_tokens: int = BLOCK_TOKENS) -> Traffic:
    """Requests by their arrival, of rows as the Mooncake project published them (FAST '25), in blocks of 512
    tokens. Raises ConfigError that names the line of a row that is not of the form.

        {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [one per block of the prompt]}

    Such a trace does not say which request continues which conversation, and its last, partial block has an
    id of its own. So with ``linked`` turns are inferred, which is part of every figure that is computed with
    it. Request B continues A if three things hold: B shares exactly A's full blocks (at least 2); B diverges
    inside A's last partial block; B is long enough to hold A's answer.

        A   [ b0 | b1 | b2.tail ]  answer
        B   [ b0 | b1 | b2'                | b3' ... ]      b2' begins with A's tail, then A's answer
    """
    read = [_checked(row, f"{name}, request {number}", block_tokens) for number, row in enumerate(rows, 1)]
    read.sort(key=lambda row: row[0])
    numbers: dict[Any, int] = {}
    blocks = [tuple(numbers.setdefault(one, len(numbers)) for one in ids) for _, _, _, ids in read]
    links = _Links(read, blocks, block_tokens)
    if linked:
        links.find()
    first_ms = read[0][0] if read else 0.0
    requests = [TrafficRequest((at_ms - first_ms) / 1000, length, output, blocks[index],
                               next_turn=links.next_turn.get(index))
                for index, (at_ms, length, output, _) in enumerate(read)]
    return Traffic(requests, block_tokens=block_tokens, fronts=links.fronts())


_Row = tuple[float, int, int, Sequence[Any]]


def _checked(row: Mapping[str, Any], where: str, block_tokens: int) -> _Row:
    try:
        at_ms, length, output = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
        ids = list(row["hash_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: it needs timestamp, input_length, output_length and hash_ids "
                          f"({error!r})", param="TRACE") from None
    if length < 1 or output < 0 or len(ids) != -(-length // block_tokens):
        raise ConfigError(f"{where}: input_length {length} and output_length {output} with {len(ids)} "
                          f"hash_ids; there must be one for each {block_tokens} tokens of the prompt",
                          param="TRACE")
    return at_ms, length, max(1, output), ids


class _Links:
    """``next_turn``: request -> the one that goes on with it. ``_tails``: block -> (block it begins with,
    tokens of that)."""

    def __init__(self, rows: Sequence[_Row], blocks: Sequence[tuple[int, ...]], block_tokens: int) -> None:
        self._rows = rows
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._tails: dict[int, tuple[int, int]] = {}
        self.next_turn: dict[int, int] = {}

    def find(self) -> None:
        seen: set[int] = set()
        ends: dict[int, list[int]] = {}
        for index, (_, length, _, _) in enumerate(self._rows):
            ids = self._blocks[index]
            known = 0
            while known < len(ids) and ids[known] in seen:
                known += 1
            if _BLOCKS_SHARED_MIN <= known < len(ids):
                self._link(index, known, ends.get(ids[known - 1], []))
            seen.update(ids)
            if length >= self._block_tokens:
                ends.setdefault(ids[length // self._block_tokens - 1], []).append(index)

    def _link(self, index: int, known: int, candidates: list[int]) -> None:
        for earlier in reversed(candidates):
            _, length, output, _ = self._rows[earlier]
            if length // self._block_tokens == known and self._rows[index][1] >= length + output:
                tail = length - known * self._block_tokens
                if tail:
                    self._tails[self._blocks[index][known]] = self._blocks[earlier][known], tail
                self.next_turn.setdefault(earlier, index)
                return

    def fronts(self) -> dict[int, Int32s]:
        """Tokens by block. A block that begins with another's front does so to the token."""
        fronts: dict[int, Int32s] = {}

        def tokens_of(block: int) -> Int32s:
            first = block * self._block_tokens
            tokens = np.arange(first, first + self._block_tokens, dtype=np.int32)
            if block in fronts:
                tokens[:fronts[block].size] = fronts[block]
            return tokens

        for block, (source, tail) in self._tails.items():  # in order of arrival: sources come first
            fronts[block] = tokens_of(source)[:tail]
        return fronts


SAMPLE = "sample"


def sample_path() -> Path:
    """The first requests of the conversation trace that the Mooncake project published (Apache-2.0)."""
    return Path(__file__).parent / "sample" / "mooncake_conversation.jsonl"


def read_trace(name: str, *, limit: int | None = None, linked: bool = True,
               rate: float = 1.0) -> tuple[Traffic, Recording | None]:
    """``name``: a file, or "sample". The first ``limit`` requests by arrival, ``rate`` times as fast. Raises
    ConfigError that names the file, and the line where one is wrong."""
    path = sample_path() if name == SAMPLE and not Path(name).exists() else Path(name).expanduser()
    rows = list(_rows(path, name))
    if not rows:
        raise ConfigError(f"{name} has no requests in it", param="TRACE")
    recording = None
    if "weft_recording" in rows[0]:
        recording = read_recording(rows, name=name, limit=limit)
        traffic = recording.traffic
    else:
        if limit is not None:
            rows = sorted(rows, key=_arrival)[:limit]
        traffic = mooncake_traffic(rows, linked=linked, name=name)
    if not len(traffic):
        raise ConfigError(f"{name} has no requests in it", param="TRACE")
    return (traffic.faster(rate) if rate != 1.0 else traffic), recording


def _arrival(row: dict[str, Any]) -> float:
    at_ms = row.get("timestamp")
    return at_ms if isinstance(at_ms, int | float) else 0.0


def _rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    if number > 1 and not line.endswith("\n"):
                        return  # the server was killed, or the disk was full, in the middle of the last line
                    raise ConfigError(f"{name}, line {number}: not JSON ({error})", param="TRACE") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{name}, line {number}: a JSON object is needed", param="TRACE")
                yield row
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; name a trace, or `sample`",
                          param="TRACE") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not a text file: a trace is JSON, an object a line",
                          param="TRACE") from None
