"""Sealed records: with a key (``server.session_key``) a store has no token, no state and no digest in plain bytes.

    payload        nonce 12 | AES-256-GCM | tag 16      of each record; an empty one stays empty
    tokens         nonce 12 | AES-256-GCM | tag 16      of each KV record
    chain, head    one block of AES-256 in the row      equal digests are equal blocks, and no text can be tried
    namespace      has the id of the key                another key, or none, finds nothing

The associated data of a record are the fields of its row that give the bytes their meaning, so a record in the place of
another one fails authentication. Nonces are random: a key is for at most 2**32 records. ``docs/store.md`` has the
format.

Bytes go through the cipher in pieces, so that no other thread waits long for Python's lock.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import ConfigError
from weft.store.signing import read_secret

NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""Bytes that sealing adds to a record."""
PIECE_BYTES = 1 << 20
FLAG = "server.session_key"
_MEANING = (("kind", 1), ("flags", 1), ("form", 4), ("tokens", 2), ("position", 4), ("chain", 8), ("head", 8))
"""Fields of a row that are associated data, and their bytes."""


def sealed_size(nbytes: int) -> int:
    """Return the size of ``nbytes`` of a record once they are sealed."""
    return nbytes + SEAL_BYTES if nbytes else 0


class Sealer:
    """The ciphers of one key. ``secret``: as of ``read_secret``. Raises ConfigError without the package
    cryptography."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:
            raise ConfigError(
                f"{FLAG} needs the package cryptography: pip install 'weft[encryption]'", param=FLAG
            ) from None
        records = algorithms.AES(_derived(secret, b"weft-store-recs"))
        self._gcm: Callable[..., Any] = lambda nonce, tag=None: Cipher(records, modes.GCM(nonce, tag))
        # ECB: each block by itself, a permutation of 16 bytes that only the key has
        self._digests: Any = Cipher(algorithms.AES(_derived(secret, b"weft-store-rows")), modes.ECB())
        self.key_id = _derived(secret, b"weft-store-keyid")[:8].hex()
        """Name of the key, which says nothing of it."""

    def seal(self, content: bytes | memoryview, row: Mapping[str, Any], kind: bytes) -> memoryview:
        """Return ``content`` sealed. ``row``: of its record; ``kind``: payload or tokens."""
        if not len(content):
            return memoryview(b"")
        nonce = os.urandom(NONCE_BYTES)
        cipher = self._gcm(nonce).encryptor()
        cipher.authenticate_additional_data(_meaning(row, kind))
        view, sealed = memoryview(content), memoryview(bytearray(sealed_size(len(content))))
        for begin in range(0, len(view), PIECE_BYTES):
            piece = view[begin : begin + PIECE_BYTES]  # the cipher needs room for one more block: that of the tag
            cipher.update_into(piece, sealed[NONCE_BYTES + begin : NONCE_BYTES + begin + len(piece) + TAG_BYTES])
        cipher.finalize()
        sealed[:NONCE_BYTES], sealed[-TAG_BYTES:] = nonce, cipher.tag
        return sealed

    def open(self, sealed: memoryview, into: memoryview, row: Mapping[str, Any] | np.void, kind: bytes) -> bool:
        """Fill ``into`` and return True; False if this key did not seal ``sealed`` for ``row``. Then the content of
        ``into`` is unspecified."""
        from cryptography.exceptions import InvalidTag

        if len(sealed) != sealed_size(len(into)):
            return False
        if not len(into):
            return True
        nonce, tag = bytes(sealed[:NONCE_BYTES]), bytes(sealed[-TAG_BYTES:])
        cipher = self._gcm(nonce, tag).decryptor()
        cipher.authenticate_additional_data(_meaning(row, kind))
        body = sealed[NONCE_BYTES:-TAG_BYTES]
        for begin in range(0, len(body), PIECE_BYTES):
            piece = body[begin : begin + PIECE_BYTES]
            into[begin : begin + len(piece)] = cipher.update(piece)
        try:
            cipher.finalize()
        except InvalidTag:
            return False
        return True

    def veiled(self, digests: bytes) -> bytes:
        """Return ``digests``, blocks of 16 bytes, encrypted as rows have them."""
        return bytes(self._digests.encryptor().update(digests))

    def unveiled(self, digests: bytes) -> bytes:
        """Return ``digests`` of rows as they were before ``veiled``."""
        return bytes(self._digests.decryptor().update(digests))


PAYLOAD, TOKENS = b"payload", b"tokens"


def read_sealer(file: str | None) -> Sealer | None:
    """Return the sealer of a key file, None without one. Raises ConfigError that names the file."""
    return None if file is None else Sealer(read_secret(Path(file).expanduser(), flag=FLAG))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=purpose).digest()


def _meaning(row: Mapping[str, Any] | np.void, kind: bytes) -> bytes:
    fields = b"".join(int(row[name]).to_bytes(size, "little") for name, size in _MEANING)
    namespace = row["namespace"]
    return kind + fields + (namespace if isinstance(namespace, bytes) else namespace.tobytes())
