"""Salts enter a store by HMAC: neither the salt nor a hash that can be guessed lies on the disk.

    request's cache_salt --HMAC-SHA256, secret--> 16 bytes of a ledger row --> the root of its prefixes

The secret is 32 random bytes in ``secret``, a file with mode 0600. Without it, an attacker that reads the
ledger could try salts from a list. Servers that share a bucket and want to share salted prefixes copy the
file; without that, prefixes without a salt are shared and salted ones are not.

Laws: L10 (another salt, another root).

Rejected: a plain digest of the salt (salts are user names more often than random numbers).
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from weft.store.disk import OsDisk
from weft.store.rows import NO_SALT

SECRET_FILE = "secret"
SECRET_BYTES = 32


def read_secret(directory: Path, disk: OsDisk) -> bytes | None:
    """The directory's secret; None where the file is missing or has another length."""
    try:
        secret = disk.read_file(directory / SECRET_FILE)
    except OSError:
        return None
    return secret if len(secret) == SECRET_BYTES else None


def salt_key(secret: bytes, salt: str | None) -> bytes:
    """16 bytes for a salt; zeros for none."""
    if not salt:
        return NO_SALT
    return hmac.new(secret, salt.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()[:16]
