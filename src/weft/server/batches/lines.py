"""OpenAI's batch lines: a request in each line of the input, an answer in each line of the output.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}
    {"id": "batch_req_1f", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "9c", "body": {...}}}

``read_index`` reads the input once and keeps the position of each line, not its body: a line takes 100 bytes, and the
bytes of ``prefix_key``. A bad line is an error of the input, before anything is computed; the message names the line.

``response`` has the status and the body that the endpoint would have sent, errors too. ``error`` is for a
line that never ran: its batch was cancelled or expired.
"""

from __future__ import annotations

import codecs
import fcntl
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import msgspec

from weft.errors import RequestError
from weft.text.surrogates import whole_characters

CUSTOM_ID_CHARS_MAX = 512
LINE_BYTES_MAX = 64_000_000
_COMPLAINTS_MAX = 5


class BatchLine(msgspec.Struct, kw_only=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineAnswer(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class OutputLine(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str
    response: LineAnswer | None = None
    error: LineError | None = None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200


@dataclass(frozen=True, slots=True)
class IndexedLine:
    """The position of a line in the input, and its sort key."""

    custom_id: str
    url: str
    offset: int
    length: int
    key: bytes


class BadInputError(RequestError):
    """The input is not a batch; ``complaints``: (line, code, message), the first few."""

    def __init__(self, complaints: list[tuple[int, str, str]], *, param: str) -> None:
        super().__init__(
            "; ".join(f"line {line}: {message}" for line, _, message in complaints), param=param, code=complaints[0][1]
        )
        self.complaints = complaints


_line_decoder = msgspec.json.Decoder(BatchLine)
_output_encoder = msgspec.json.Encoder()


def read_index(
    path: Path, *, urls: Collection[str], lines_max: int | None = None, param: str = "input"
) -> list[IndexedLine]:
    """Read the input once. ``urls`` are the endpoints that a line may name. Raise BadInputError."""
    index: list[IndexedLine] = []
    complaints: list[tuple[int, str, str]] = []
    number_by_id: dict[str, int] = {}
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            try:
                line = _checked(raw, urls)
                before = number_by_id.setdefault(line.custom_id, number)
                if before != number:
                    raise RequestError(
                        f"custom_id {line.custom_id!r} is also that of line {before}", code="duplicate_custom_id"
                    )
                if lines_max is not None and len(index) >= lines_max:
                    raise RequestError(
                        f"the input has more than {lines_max} lines (limits.max_batch_lines)", code="too_many_lines"
                    )
            except RequestError as error:
                complaints.append((number, error.code or "invalid_line", error.message))
                if len(complaints) >= _COMPLAINTS_MAX:
                    break
                continue
            index.append(IndexedLine(line.custom_id, line.url, start, len(raw), prefix_key(bytes(line.body))))
    if complaints:
        raise BadInputError(complaints, param=param)
    return index


def _checked(raw: bytes, urls: Collection[str]) -> BatchLine:
    """Return the line, checked. Raise RequestError."""
    if len(raw) > LINE_BYTES_MAX:
        raise RequestError(f"it has {len(raw)} bytes; the limit is {LINE_BYTES_MAX}", code="line_too_long")
    try:
        line = _decoded(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"this is not a batch line: {error}", code="invalid_json_line") from None
    if not line.custom_id or len(line.custom_id) > CUSTOM_ID_CHARS_MAX:
        raise RequestError(
            f"custom_id has {len(line.custom_id)} characters; it must have 1 to {CUSTOM_ID_CHARS_MAX}",
            code="invalid_custom_id",
        )
    if line.method != "POST":
        raise RequestError(f"method is {line.method[:20]!r}; it must be POST", code="invalid_method")
    if line.url not in urls:
        raise RequestError(f"url is {line.url[:100]!r}; it must be {' or '.join(sorted(urls))}", code="invalid_url")
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise RequestError("body is not an object", code="invalid_body")
    return line


def _decoded(raw: bytes) -> BatchLine:
    """Return the line of a JSON text, which may begin with a byte order mark."""
    return _line_decoder.decode(whole_characters(raw.removeprefix(codecs.BOM_UTF8)))


def read_body_of(path: Path, line: IndexedLine) -> bytes:
    """Return the body of a line of the input, read again."""
    with path.open("rb") as file:
        file.seek(line.offset)
        return bytes(_decoded(file.read(line.length)).body)


def output_line(line: IndexedLine, status_code: int, body: bytes) -> OutputLine:
    return OutputLine(
        id=f"batch_req_{token_hex(16)}",
        custom_id=line.custom_id,
        response=LineAnswer(status_code, token_hex(16), msgspec.Raw(body)),
    )


def unanswered_line(line: IndexedLine, code: str, message: str) -> OutputLine:
    return OutputLine(id=f"batch_req_{token_hex(16)}", custom_id=line.custom_id, error=LineError(code, message))


def encode_output(line: OutputLine) -> bytes:
    return _output_encoder.encode(line) + b"\n"


BLOCK_CHARS = 256
KEY_BLOCKS_MAX = 512
_HASH_BYTES = 6
_FIELDS = ("model", "cache_salt", "tools", "instructions", "system", "messages", "prompt", "input")
"""Fields of a body, in the order in which templates write them."""


def prefix_key(body: bytes) -> bytes:
    """Return a key that sorts a request next to those with the same beginning: a hash for each block of the fields that
    shape its prompt.

        system A, question 3        A1 A2 q3
        system A, question 7        A1 A2 q7      sorted by key: neighbours
        system B, question 1        B1 q1

    This is the order in which a depth-first walk visits the tree of prefixes: each prefix is computed once, and reused
    while it is cached. Requests for one model come together, so each of several models is loaded once. The key is made
    from the fields of the request, not from the rendered template, which costs more. Any JSON has a key."""
    try:
        fields = msgspec.json.decode(body)
        text = b"".join(_parts(fields)) if isinstance(fields, dict) else body
    except (msgspec.DecodeError, ValueError, RecursionError):
        text, fields = body, None
    model = msgspec.json.encode(fields.get("model")) if isinstance(fields, dict) else b""
    blocks = range(0, min(len(text), BLOCK_CHARS * KEY_BLOCKS_MAX), BLOCK_CHARS)
    pieces = [model, *(text[start : start + BLOCK_CHARS] for start in blocks)]
    return b"".join(hashlib.blake2b(piece, digest_size=_HASH_BYTES).digest() for piece in pieces)


def _parts(fields: dict[str, Any]) -> Iterable[bytes]:
    for name in _FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        yield name.encode()
        yield from (msgspec.json.encode(item) for item in (value if isinstance(value, list) else [value]))


_decoder = msgspec.json.Decoder(OutputLine)


class OutputFile:
    """Answers appended line by line. An interrupted run leaves complete lines and at most one incomplete line: the next
    run cuts that line off and computes only the missing answers. A lock on the file keeps other runs away.

    ``known_ids``: the custom_ids of the input; a file with other answers stays as it is. Raises RequestError, which
    names --output, and OSError."""

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
        """Append a line. Once it returns, an interruption does not lose the line."""
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
                break  # incomplete: only the last line may lack its end
            try:
                line = _decoder.decode(raw)
            except (msgspec.DecodeError, ValueError, RecursionError):
                raise RequestError(
                    f"{self._path}: line {number} is not an answer of a batch; the file stays as it is",
                    param="--output",
                ) from None
            if line.custom_id not in known_ids:
                raise RequestError(
                    f"{self._path}: line {number} answers {line.custom_id[:100]!r}, which is "
                    "not in the input; name another output, or remove this one",
                    param="--output",
                )
            done.add(line.custom_id)
            self.failed_count += not line.succeeded
            good += len(raw)
        self._file.truncate(good)
        self._file.seek(good)
        return done
