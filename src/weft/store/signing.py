"""Signatures of objects in a bucket, so that a writer without the key cannot change answers.

    object of the bucket    content | 32 bytes: keyed BLAKE2b of the object's name and its content
    location                BUCKET/signed-ID/v1/...          ID: of the key, so another key finds nothing

The key is a file outside of the bucket (``cache.store_key``). Segments have all rows and tokens, and rows have the
checksums of payloads, so a signed segment vouches for every payload that it names. Payloads are signed too, since their
checksums are not cryptographic. A writer without the key can only delete objects, which are misses then.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from weft.errors import ConfigError

TAG_BYTES = 32
_CHARS_MIN = 32
_CHARS_MAX = 4096


class Signer:
    """A key of signatures. ``secret``: text of at least 32 characters."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, digest_size=64, person=b"weft-store-key").digest()
        self.folder = f"signed-{hashlib.blake2b(self._key, digest_size=8, person=b'weft-store-id').hexdigest()}"

    def tag(self, name: str, content: bytes | memoryview) -> bytes:
        encoded = name.encode()
        whole = hashlib.blake2b(key=self._key, digest_size=TAG_BYTES)
        whole.update(len(encoded).to_bytes(8, "little") + encoded)
        whole.update(content)
        return whole.digest()

    def signed(self, name: str, content: bytes | memoryview) -> bytes:
        return bytes(content) + self.tag(name, content)

    def content(self, name: str, signed: memoryview) -> memoryview | None:
        """Return the content of an object, None if it is not signed with the key."""
        content, tag = signed[:-TAG_BYTES], signed[-TAG_BYTES:]
        return content if hmac.compare_digest(self.tag(name, content), tag) else None


def read_signer(file: str, *, flag: str) -> Signer:
    """Return the signer of a key file. Raise ConfigError that names ``flag``."""
    return Signer(read_secret(Path(file).expanduser(), flag=flag))


def read_secret(path: Path, *, flag: str) -> bytes:
    """Return the secret in ``path``, a file that only its owner can read. Raises ConfigError that names ``flag``."""
    try:
        with path.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            secret = opened.read(_CHARS_MAX).strip()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", param=flag) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{flag} {path}: other users can read or change it (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}",
            param=flag,
        )
    if len(secret) < _CHARS_MIN:
        raise ConfigError(
            f"{flag} {path}: it has {len(secret)} bytes; a key has at least {_CHARS_MIN}, such as those of "
            "`openssl rand -hex 32`",
            param=flag,
        )
    return secret
