"""Packing: fewer bytes for the same floats, without rounding. Exponents are coded, the rest stays as it is.

    bfloat16   s eeeeeeee mmmmmmm      -->  n bytes (s, m)             + zstd of n bytes (e)     0.65 to 0.75
    float32    s eeeeeeee m x 23       -->  2 n bytes, n bytes (s, m)  + zstd of n bytes (e)     0.82 to 0.88

    packed     xxh3_64 of the decoded bytes | their length | chunk | chunk | ...
    chunk      encoding and length | its bytes           a MiB of decoded bytes each

KV and states are numbers of about one size, so their exponents have two to four bits of information in eight.
Signs and mantissas have no pattern. Each chunk names its encoding, the one in which samples of the chunk are smallest.
Other bytes, such as codes or float16, stay as they are if packing gains nothing.

``docs/store.md`` has the format. Needs ``zstandard``; without it a store packs nothing.

Laws: the decoded bytes are those that were packed, by a hash of their own; anything else is a PackingError.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

try:
    import zstandard
except ImportError:  # weft[store] brings it
    zstandard = None  # type: ignore[assignment]

CHUNK_BYTES = 1 << 20
HEADER_BYTES = 16
AS_IS, WORDS_2, WORDS_4 = range(3)
_LENGTH_BITS = 30
_SAMPLES, _SAMPLE_BYTES = 8, 2 << 10
_WORTH = 0.97
"""Share below which a sample of a chunk must shrink, for the chunk to be packed."""

Uint8s = npt.NDArray[np.uint8]


class _Coders(threading.local):
    """Coders of one thread: a coder serves one thread at a time."""

    def __init__(self) -> None:
        self.compressor: Any = zstandard.ZstdCompressor(level=1)
        self.decompressor: Any = zstandard.ZstdDecompressor()


_coders = None if zstandard is None else _Coders()


class PackingError(ValueError):
    """Error of bytes that no packing has written."""


def is_available() -> bool:
    """Return whether this process can pack and unpack."""
    return zstandard is not None


def pack_part(part: memoryview) -> bytes:
    """Return the chunks of ``part``, which begins at a multiple of CHUNK_BYTES of its payload."""
    chunks: list[bytes] = []
    for begin in range(0, len(part), CHUNK_BYTES):
        chunk = np.frombuffer(part[begin : begin + CHUNK_BYTES], np.uint8)
        encoding = _encoding_of(chunk)
        pieces = [chunk.tobytes()] if encoding == AS_IS else _encoded(chunk, encoding)
        size = sum(map(len, pieces))
        if size >= chunk.size:
            encoding, pieces, size = AS_IS, [chunk.tobytes()], chunk.size
        chunks += [(size | encoding << _LENGTH_BITS).to_bytes(4, "little"), *pieces]
    return b"".join(chunks)


def join_parts(payload: memoryview, parts: Sequence[bytes]) -> bytes:
    """Return the packed form of ``payload``, whose parts were packed one by one."""
    header = xxh3_64_intdigest(payload).to_bytes(8, "little") + len(payload).to_bytes(8, "little")
    return b"".join([header, *parts])


def unpack(content: memoryview, into: memoryview) -> None:
    """Unpack ``content`` into ``into``. Raise PackingError if it does not unpack to exactly ``len(into)`` bytes with
    the stored hash.
    """
    if len(content) < HEADER_BYTES or int.from_bytes(content[8:16], "little") != len(into):
        raise PackingError("another length")
    offset = HEADER_BYTES
    for begin in range(0, len(into), CHUNK_BYTES):
        target = np.frombuffer(into[begin : begin + CHUNK_BYTES], np.uint8)
        word = int.from_bytes(content[offset : offset + 4], "little")
        encoding, size = word >> _LENGTH_BITS, word & (1 << _LENGTH_BITS) - 1
        source = content[offset + 4 : offset + 4 + size]
        if len(source) != size:
            raise PackingError("a chunk is cut")
        _decode(np.frombuffer(source, np.uint8), encoding, target)
        offset += 4 + size
    if offset != len(content) or xxh3_64_intdigest(into) != int.from_bytes(content[:8], "little"):
        raise PackingError("other bytes")


def _encoding_of(chunk: Uint8s) -> int:
    """Return the encoding in which samples of ``chunk`` are smallest."""
    distance = max(_SAMPLE_BYTES, chunk.size // _SAMPLES // 4 * 4)
    sample = np.concatenate([chunk[begin : begin + _SAMPLE_BYTES] for begin in range(0, max(1, chunk.size), distance)])
    best, encoding = sample.size * _WORTH, AS_IS
    for tried in (WORDS_2, WORDS_4):
        if chunk.size % (2 * tried) == 0:  # the sample has complete words too: its pieces begin and end at words
            size = sum(map(len, _encoded(sample, tried)))
            if size < best:
                best, encoding = size, tried
    return encoding


def _encoded(chunk: Uint8s, encoding: int) -> list[bytes]:
    if encoding == WORDS_2:
        words = chunk.view("<u2")
        exponents = (words >> 7).astype(np.uint8)
        rest = (words & np.uint16(0x7F) | words >> 8 & np.uint16(0x80)).astype(np.uint8)
        return [rest.tobytes(), _compressed(exponents)]
    wide = chunk.view("<u4")
    exponents = (wide >> 23).astype(np.uint8)
    high = (wide >> 16 & np.uint32(0x7F) | wide >> 24 & np.uint32(0x80)).astype(np.uint8)
    return [wide.astype("<u2").tobytes(), high.tobytes(), _compressed(exponents)]


def _compressed(exponents: Uint8s) -> bytes:
    try:
        content: bytes = _of_thread().compressor.compress(exponents.data)
    except zstandard.ZstdError as error:
        raise PackingError(str(error)) from None
    return content


def _decode(source: Uint8s, encoding: int, target: Uint8s) -> None:
    if encoding == AS_IS:
        if source.size != target.size:
            raise PackingError("a chunk has another length")
        target[:] = source
        return
    if encoding not in (WORDS_2, WORDS_4) or target.size % (2 * encoding):
        raise PackingError("an unknown encoding")
    count = target.size // (2 * encoding)
    plain = count * (2 * encoding - 1)
    if source.size < plain:
        raise PackingError("a chunk is cut")
    try:
        decoder = _of_thread().decompressor
        exponents = np.frombuffer(decoder.decompress(source[plain:].data, max_output_size=count), np.uint8)
    except zstandard.ZstdError as error:
        raise PackingError(str(error)) from None
    if exponents.size != count:
        raise PackingError("a chunk has another length")
    if encoding == WORDS_2:
        rest = source[:count].astype(np.uint16)
        target.view("<u2")[:] = (
            exponents.astype(np.uint16) << 7 | rest & np.uint16(0x7F) | (rest & np.uint16(0x80)) << 8
        )
        return
    high = source[2 * count : plain].astype(np.uint32)
    target.view("<u4")[:] = (
        exponents.astype(np.uint32) << 23
        | (high & np.uint32(0x80)) << 24
        | (high & np.uint32(0x7F)) << 16
        | source[: 2 * count].view("<u2")
    )


def _of_thread() -> _Coders:
    assert _coders is not None, "packing needs zstandard"
    return _coders
