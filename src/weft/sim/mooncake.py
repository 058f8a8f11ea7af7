"""Traces in the form that the Mooncake project published (FAST '25): a JSON object a line, 512-token blocks.

    {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [one per 512 tokens of the prompt]}

A trace of this form does not say which request continues which conversation, and its last, partial block has
an id of its own. So with ``linked`` turns are inferred. Request B continues A if three things hold: B shares
exactly A's full blocks (at least 2); B diverges inside A's last partial block; B is long enough to hold A's
answer. Then B's block begins with A's tail, and A's answer is what B's prompt holds there:

    A   [ b0 | b1 | b2.tail ]  answer
    B   [ b0 | b1 | b2'                | b3' ... ]      b2' begins with A's tail, then A's answer

An inference, and part of every figure that is computed with it; ``linked`` False leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weft.errors import ConfigError
from weft.sim.traffic import Int32s, Traffic, TrafficRequest

BLOCK_TOKENS = 512
_BLOCKS_SHARED_MIN = 2
"""A continued conversation shares as many full blocks at least: one is the service's own beginning."""


def mooncake_traffic(rows: Iterable[Mapping[str, Any]], *, linked: bool = True, name: str = "the trace",
                     block_tokens: int = BLOCK_TOKENS) -> Traffic:
    """Requests by their arrival. Raises ConfigError that names the line of a row that is not of the form."""
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
