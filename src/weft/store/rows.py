"""Rows of the ledger: 144 bytes each, with a checksum of their own. docs/store.md has the table.

    | kind flags tokens form | number parent | position volume offset payload_bytes checksum |
    | tokens_at chain head | namespace salt | seconds written uses | row_hash |

A row is one of four kinds:

* ``KV``: the KV record ``number`` holds ``tokens`` tokens from ``position`` on. ``parent`` is the record that
  ends there, 0 at the root.
* ``CHECKPOINT``: the state after ``position`` tokens; ``parent`` is the KV record that ends there.
* ``RETIRED``: record ``parent`` is gone, and its slot may be used again.
* ``USED``: checkpoint ``parent`` was restored ``uses`` times more.

Rows have one length, so a damaged row costs itself alone: the next begins at a known byte. A row with a wrong
hash is ignored and counted. A torn row at the end is the trace of a crash.

``chain`` names a prefix by 64 bits: xxh3 of the parent's chain and the tokens. ``head`` is the same over at
most 16 tokens; with it a lookup finds a child without knowing the child's length.

Rejected: JSON lines (100,000 of them take a second to parse); one line for each checkpoint with all of its
tokens (a line of 100,000 tokens for each turn of a long conversation).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from weft.memory.prefix_store import GRAIN_TOKENS

ROW = np.dtype([
    ("kind", "u1"), ("flags", "u1"), ("tokens", "<u2"), ("form", "<u4"), ("number", "<u8"),
    ("parent", "<u8"), ("position", "<u4"), ("volume", "<u4"), ("offset", "<u8"), ("payload_bytes", "<u8"),
    ("checksum", "V16"), ("tokens_at", "<u8"), ("chain", "<u8"), ("head", "<u8"), ("namespace", "V16"),
    ("salt", "V16"), ("seconds", "<f4"), ("written", "<u4"), ("uses", "<u4"), ("reserved", "<u4"),
    ("row_hash", "<u8"),
])
ROW_BYTES = 144
assert ROW.itemsize == ROW_BYTES

HEADER, KV, CHECKPOINT, RETIRED, USED = 0, 1, 2, 3, 4
INEXACT = 1
"""Bit of ``flags``: the bytes were rounded, or computed from rounded ones."""
REMOTE_VOLUME = 0xFFFF_FFFF
"""``volume`` of a record that is an object of a bucket."""
FORMAT_VERSION = 1
MAGIC = b"weft-store-rows\0"
NO_SALT = bytes(16)

LedgerRows = npt.NDArray[np.void]


def row_of(**fields: Any) -> bytes:
    """One row with its hash; fields that are not named are 0."""
    row = np.zeros(1, dtype=ROW)
    for name, value in fields.items():
        row[name] = np.void(value) if isinstance(value, bytes) else value
    body = row.tobytes()[:-8]
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def header_row(generation: int) -> bytes:
    """The first row of a rows file: magic, format version, generation."""
    body = (MAGIC + FORMAT_VERSION.to_bytes(4, "little") + bytes(4)
            + generation.to_bytes(8, "little")).ljust(ROW_BYTES - 8, b"\0")
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def header_generation(row: bytes) -> int | None:
    """The generation in a header row; None where it is no header of this format version."""
    version = int.from_bytes(row[16:20], "little")
    if len(row) != ROW_BYTES or not row.startswith(MAGIC) or version != FORMAT_VERSION \
            or not hash_matches(row):
        return None
    return int.from_bytes(row[24:32], "little")


def hash_matches(row: bytes | memoryview) -> bool:
    return xxh3_64_intdigest(row[:-8]) == int.from_bytes(row[-8:], "little")


def parse_rows(content: bytes | memoryview) -> tuple[LedgerRows, npt.NDArray[np.bool_]]:
    """(rows, which of them have the right hash); bytes past the last whole row are left out."""
    count = len(content) // ROW_BYTES
    view = memoryview(content)[:count * ROW_BYTES]
    rows = np.frombuffer(view, dtype=ROW)
    digest, body = xxh3_64_intdigest, ROW_BYTES - 8
    hashes = np.fromiter((digest(view[at:at + body]) for at in range(0, len(view), ROW_BYTES)),
                         dtype=np.uint64, count=count)
    return rows, hashes == rows["row_hash"]


def with_hashes(rows: LedgerRows) -> bytes:
    """The bytes of ``rows``, each with its hash; the array is changed."""
    view, body = memoryview(rows.tobytes()), ROW_BYTES - 8
    rows["row_hash"] = np.fromiter((xxh3_64_intdigest(view[at:at + body])
                                    for at in range(0, len(view), ROW_BYTES)), np.uint64, len(rows))
    return rows.tobytes()


def token_bytes(tokens: Any) -> bytes:
    """Tokens as little-endian uint32."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def root_chain(namespace: bytes, salt: bytes) -> int:
    return xxh3_64_intdigest(namespace + salt)


def chain_of(parent_chain: int, tokens: bytes | memoryview) -> int:
    """The name of the prefix that ``tokens`` extend."""
    return xxh3_64_intdigest(parent_chain.to_bytes(8, "little") + bytes(tokens))


def head_of(parent_chain: int, tokens: bytes | memoryview) -> int:
    """``chain_of`` of at most the first 16 of ``tokens``."""
    return chain_of(parent_chain, memoryview(tokens)[:4 * GRAIN_TOKENS])


def payload_checksum(payload: bytes | memoryview) -> bytes:
    """xxh3-128, the canonical (big-endian) 16 bytes."""
    return xxh3_128_digest(payload)
