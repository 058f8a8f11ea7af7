"""Bodies that a client compressed: ``Content-Encoding`` gzip, deflate, and zstd where ``zstandard`` is installed.

A few kilobytes can hold gigabytes. So a body comes out in pieces, each in a thread, and the caller counts a piece
before it asks for the next one.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from weft.errors import RequestError
from weft.server.errors import WrongMediaTypeError

try:
    import zstandard
except ModuleNotFoundError:
    zstandard = None  # type: ignore[assignment]

_PIECE_BYTES = 1 << 20
_WINDOW_BYTES_MAX = 8 << 20
"""Largest window of zstd, as RFC 9659 has it for HTTP."""
_ANY_HEADER = zlib.MAX_WBITS | 32
"""Headers of gzip and of zlib are told apart by zlib."""


def coding_of(header: str) -> str:
    """Return the coding that a ``Content-Encoding`` names, empty for none. Raise WrongMediaTypeError for one that is
    not read."""
    coding = header.strip().lower()
    if coding in ("", "identity"):
        return ""
    if coding not in _CODINGS:
        raise WrongMediaTypeError(
            f"the body is compressed as {coding[:32]!r}; this server reads {', '.join(_CODINGS)}, and plain JSON",
            param="Content-Encoding",
        )
    return coding


async def pieces(raw: bytes, coding: str) -> AsyncIterator[bytes]:
    """Yield the content of ``raw``, at most a megabyte at a time. Raise RequestError if it is damaged."""
    read = _CODINGS[coding](raw)
    while True:
        try:
            piece = await asyncio.to_thread(read)
        except (zlib.error, EOFError) as error:
            raise RequestError(
                f"the body is not {coding}: {error}", param="Content-Encoding", code="invalid_json"
            ) from None
        if not piece:
            return
        yield piece


def _zlib(raw: bytes) -> Callable[[], bytes]:
    """Return a function that returns the next piece, empty at the end."""
    inflating, rest = zlib.decompressobj(_ANY_HEADER), raw

    def read() -> bytes:
        nonlocal rest
        piece = b"" if inflating.eof else inflating.decompress(rest, _PIECE_BYTES)
        rest = inflating.unconsumed_tail
        if not piece and (not inflating.eof or inflating.unused_data):
            raise EOFError("it is cut, or other bytes follow it")
        return piece

    return read


def _zstd(raw: bytes) -> Callable[[], bytes]:
    """Return a function that returns the next piece, empty at the end."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    reader: Any = decompressor.stream_reader(io.BytesIO(raw), read_across_frames=True)

    def read() -> bytes:
        try:
            return bytes(reader.read(_PIECE_BYTES))
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from None

    return read


_CODINGS: dict[str, Callable[[bytes], Callable[[], bytes]]] = {
    "gzip": _zlib,
    "x-gzip": _zlib,
    "deflate": _zlib,
    **({} if zstandard is None else {"zstd": _zstd}),
}
