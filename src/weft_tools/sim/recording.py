"""Traces in files: recordings of live traffic, Mooncake's form, and the sample that comes with weft.

    a recording   lines of ``weft.rpc.recording``: hashes of blocks, the model's geometry, times of steps
    Mooncake      ``{"timestamp", "input_length", "output_length", "hash_ids"}``
    ``sample``    a trace in Mooncake's form that is part of the package

The first line says which form a file has.

Equal beginnings have equal blocks, so a replay's pages match where the engine's did. Only ends of requests are inside
of blocks: the state is kept there, and the next turn continues from that token. The *front* of a block covers this:
hashes token by token, up to the end of an earlier request in the block. A replay of speculation needs ``tokens``:
hashes show nothing that repeats inside a text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.costs.step import Work
from weft.errors import ConfigError
from weft.memory.frames.plan import ArenaPlan, KvField, choose_frame
from weft.rpc.recording import ARENA_NUMBERS, BLOCK_BYTES, BLOCK_TOKENS, COMPRESSED_NUMBERS, TOKEN_HASH_BYTES, VERSION
from weft.units import CHUNK_TOKENS
from weft_tools.sim.traffic import Int32s, Traffic, TrafficRequest


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a file. ``cached_tokens``: tokens of each request that the engine had cached, in order.
    ``texts``: prompt and answer of each request, None where the recording has only hashes."""

    traffic: Traffic
    arena: ArenaPlan
    model: str
    rows_max: int
    step_tokens_max: int
    max_model_len: int
    grid_tokens: int
    snapshots: str
    steps: list[tuple[Work, float]] = field(repr=False)
    cached_tokens: tuple[int, ...] = field(repr=False)
    dropped: int = 0
    texts: tuple[Int32s | None, ...] = field(default=(), repr=False)


def read_recording(
    lines: Iterable[Mapping[str, Any]], *, name: str = "the recording", limit: int | None = None
) -> Recording:
    """Parse ``lines`` in the order of the file; the first ``limit`` requests by arrival. Raise ConfigError that names
    the error."""
    rows = iter(lines)
    header = next(rows, None)
    form = None if header is None else (header.get("weft_recording"), header.get("block_tokens"))
    if header is None or form != (VERSION, BLOCK_TOKENS):
        raise ConfigError(
            f"{name} is not a recording of version {VERSION} with blocks of {BLOCK_TOKENS} tokens", param="TRACE"
        )
    sequences: list[Mapping[str, Any]] = []
    steps: list[tuple[Work, float]] = []
    dropped = 0
    for number, row in enumerate(rows, 2):
        try:
            if "blocks" in row:
                _checked(row)
                sequences.append(row)
            for prefill, pairs, decodes, context, seconds in row.get("steps", ()):
                steps.append((Work(prefill, pairs, decodes, context), float(seconds)))
            dropped += int(row.get("dropped", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}, line {number}: not a line of a recording ({error!r})", param="TRACE") from None
    sequences.sort(key=lambda row: (row["at_s"], row.get("number", 0)))
    sequences = sequences[:limit]
    return Recording(
        traffic=_Reader().traffic(sequences),
        arena=_arena(header, name),
        model=str(header.get("model", "")),
        rows_max=int(header["rows_max"]),
        step_tokens_max=int(header["step_tokens_max"]),
        max_model_len=int(header["max_model_len"]),
        grid_tokens=int(header.get("grid_tokens", CHUNK_TOKENS)),
        snapshots=str(header.get("checkpoints", "auto")),
        steps=steps,
        cached_tokens=tuple(int(row.get("cached", 0)) for row in sequences),
        dropped=dropped,
        texts=tuple(map(_tokens, sequences)),
    )


def _checked(row: Mapping[str, Any]) -> None:
    """Check a row. Raise KeyError, TypeError or ValueError."""
    length = int(row["input_length"]) + int(row["output_length"])
    float(row["at_s"])
    blocks = base64.b64decode(row["blocks"], validate=True)
    if int(row["input_length"]) < 1 or len(blocks) != -(-length // BLOCK_TOKENS) * BLOCK_BYTES:
        raise ValueError(f"{len(blocks) // BLOCK_BYTES} blocks for {length} tokens")
    tokens = _tokens(row)
    if tokens is not None and tokens.size != length:
        raise ValueError(f"{tokens.size} tokens in a sequence of {length}")


def _tokens(row: Mapping[str, Any]) -> Int32s | None:
    text = row.get("tokens")
    return None if text is None else np.frombuffer(base64.b64decode(text, validate=True), "<i4")


def _arena(header: Mapping[str, Any], name: str) -> ArenaPlan:
    try:
        numbers = {key: header["arena"][key] for key in ARENA_NUMBERS}
        compressed = {key: header["arena"][key] for key in COMPRESSED_NUMBERS if key in header["arena"]}
        kv_fields = tuple(KvField(*kv_field) for kv_field in header["arena"].get("kv_fields", ()))
        return ArenaPlan(**numbers, kv_fields=kv_fields, state_fields=(), **compressed)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{name}: the geometry in its first line is incomplete ({error!r})", param="TRACE") from None


def resized(arena: ArenaPlan, memory_bytes: int) -> ArenaPlan:
    """Return the same pages and states in another memory."""
    pages, slots = choose_frame(arena.page_bytes, arena.slot_bytes, memory_bytes)
    frame_bytes = pages * arena.page_bytes or slots * arena.slot_bytes
    return replace(
        arena,
        pages_per_frame=pages,
        slots_per_frame=slots,
        frame_bytes=frame_bytes,
        slot_stride_bytes=frame_bytes // slots if slots else 0,
        frame_count=memory_bytes // frame_bytes,
    )


class _Reader:
    """Numbers for hashes: one for each block, and one for each token of a front, which then represents that token."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._fronts: dict[int, list[int]] = {}

    def traffic(self, rows: Sequence[Mapping[str, Any]]) -> Traffic:
        requests = [self._request(row) for row in rows]
        fronts = {block: np.asarray(numbers, dtype=np.int32) * BLOCK_TOKENS for block, numbers in self._fronts.items()}
        return Traffic(requests, block_tokens=BLOCK_TOKENS, fronts=fronts, block_count=len(self._numbers))

    def _number(self, hashed: bytes) -> int:
        return self._numbers.setdefault(hashed, len(self._numbers))

    def _request(self, row: Mapping[str, Any]) -> TrafficRequest:
        raw = base64.b64decode(row["blocks"])
        hashes = [raw[start : start + BLOCK_BYTES] for start in range(0, len(raw), BLOCK_BYTES)]
        blocks = tuple(self._number(block_hash) for block_hash in hashes)
        salt = str(row.get("salt", ""))
        for index, text in row.get("front", ()):
            before = hashes[index - 1] if index else salt.encode()
            front = base64.b64decode(text)
            numbers = [
                self._number(b"%b:%b" % (before, front[start : start + TOKEN_HASH_BYTES]))
                for start in range(0, len(front), TOKEN_HASH_BYTES)
            ]
            if len(numbers) > len(self._fronts.get(blocks[index], ())):
                self._fronts[blocks[index]] = numbers
        return TrafficRequest(
            at_s=float(row["at_s"]),
            prompt_tokens=int(row["input_length"]),
            output_tokens=int(row["output_length"]),
            blocks=blocks,
            whole=True,
            salt=salt,
            priority=int(row.get("priority", 0)),
            boundaries=tuple(row.get("boundaries", ())),
            marks=tuple(row.get("marks", ())),
            prompt_logprobs=bool(row.get("prompt_logprobs", False)),
            cancelled_at_s=row.get("cancelled_at_s"),
        )


MOONCAKE_BLOCK_TOKENS = 512
_BLOCKS_SHARED_MIN = 2
"""Least number of full blocks that a continued conversation shares: the first block may be the service's system
prompt."""


def mooncake_traffic(rows: Iterable[Mapping[str, Any]], *, linked: bool = True, name: str = "the trace") -> Traffic:
    """Return requests by their arrival, of rows as the Mooncake project published them (FAST '25), in blocks of 512
    tokens. Raise ConfigError that names the line of a row that is not of the form.

        {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [one per block of the prompt]}

    Such a trace does not say which request continues which conversation, and its last, partial block has an
    id of its own. So with ``linked`` turns are inferred, which is part of every figure that is computed with
    it. Request B continues A if three things hold: B shares exactly A's full blocks (at least 2); B diverges
    inside A's last partial block; B is long enough to hold A's answer.

        A   [ b0 | b1 | b2.tail ]  answer
        B   [ b0 | b1 | b2'                | b3' ... ]      b2' begins with A's tail, then A's answer
    """
    read = sorted(
        (_checked_row(row, f"{name}, request {number}") for number, row in enumerate(rows, 1)), key=lambda row: row[0]
    )
    numbers: dict[Any, int] = {}
    blocks = [tuple(numbers.setdefault(block, len(numbers)) for block in ids) for _, _, _, ids in read]
    links = _Links(read, blocks)
    if linked:
        links.find()
    first_ms = read[0][0] if read else 0.0
    requests = [
        TrafficRequest((at_ms - first_ms) / 1000, length, output, blocks[index], next_turn=links.next_turn.get(index))
        for index, (at_ms, length, output, _) in enumerate(read)
    ]
    return Traffic(requests, block_tokens=MOONCAKE_BLOCK_TOKENS, fronts=links.fronts())


_Row = tuple[float, int, int, Sequence[Any]]


def _checked_row(row: Mapping[str, Any], where: str) -> _Row:
    try:
        at_ms, length, output = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
        ids = list(row["hash_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: it needs timestamp, input_length, output_length and hash_ids ({error!r})", param="TRACE"
        ) from None
    if length < 1 or output < 0 or len(ids) != -(-length // MOONCAKE_BLOCK_TOKENS):
        raise ConfigError(
            f"{where}: input_length {length} and output_length {output} with {len(ids)} "
            f"hash_ids; there must be one for each {MOONCAKE_BLOCK_TOKENS} tokens of the "
            "prompt",
            param="TRACE",
        )
    return at_ms, length, max(1, output), ids


class _Links:
    """Links between requests. ``next_turn``: request -> the request that continues it. ``_tails``: block -> (block with
    which it begins, number of its tokens)."""

    def __init__(self, rows: Sequence[_Row], blocks: Sequence[tuple[int, ...]]) -> None:
        self._rows = rows
        self._blocks = blocks
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
            if length >= MOONCAKE_BLOCK_TOKENS:
                ends.setdefault(ids[length // MOONCAKE_BLOCK_TOKENS - 1], []).append(index)

    def _link(self, index: int, known: int, candidates: list[int]) -> None:
        for earlier in reversed(candidates):
            _, length, output, _ = self._rows[earlier]
            if length // MOONCAKE_BLOCK_TOKENS == known and self._rows[index][1] >= length + output:
                tail = length - known * MOONCAKE_BLOCK_TOKENS
                if tail:
                    self._tails[self._blocks[index][known]] = self._blocks[earlier][known], tail
                self.next_turn.setdefault(earlier, index)
                return

    def fronts(self) -> dict[int, Int32s]:
        """Return tokens by block. A block that begins with another's front has exactly its tokens."""
        fronts: dict[int, Int32s] = {}

        def tokens_of(block: int) -> Int32s:
            first = block * MOONCAKE_BLOCK_TOKENS
            tokens = np.arange(first, first + MOONCAKE_BLOCK_TOKENS, dtype=np.int32)
            if block in fronts:
                tokens[: fronts[block].size] = fronts[block]
            return tokens

        for block, (source, tail) in self._tails.items():  # in order of arrival: sources come first
            fronts[block] = tokens_of(source)[:tail]
        return fronts


SAMPLE = "sample"


def sample_path() -> Path:
    """Return the path of the first requests of the conversation trace that the Mooncake project published
    (Apache-2.0)."""
    return Path(__file__).parent / "sample" / "mooncake_conversation.jsonl"


def read_trace(
    name: str, *, limit: int | None = None, linked: bool = True, rate: float = 1.0
) -> tuple[Traffic, Recording | None]:
    """Read a trace. ``name``: a file, or "sample". The first ``limit`` requests by arrival, ``rate`` times as fast.
    Raise ConfigError that names the file, and the line where one is wrong."""
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
                        return  # the last line is incomplete: the server was killed, or the disk was full
                    raise ConfigError(f"{name}, line {number}: not JSON ({error})", param="TRACE") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{name}, line {number}: a JSON object is needed", param="TRACE")
                yield row
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read: {error.strerror}; name a trace, or `sample`", param="TRACE"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not a text file: a trace is JSON, an object a line", param="TRACE") from None
