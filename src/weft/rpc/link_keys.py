"""The token of a fleet: one secret in a file, from which both ends of a link derive their keys.

    token file --SHA-256--> 32 bytes + "server"  -->  key pair of the server
                                     + "machine" -->  key pair of the joined machines

ZeroMQ's CURVE encrypts and authenticates every frame with these keys. Each end knows the other's public key
from the token, so no key crosses the network. A client without the token cannot open the first message of
the handshake, and sees a closed connection.

``weft serve --listen-engines`` creates the file if it does not exist: readable by its owner alone, 256 random
bits. It has to be copied to each machine that joins. A file that others can read is refused, as ssh refuses
such a key.

Rejected: a certificate authority (a fleet has one owner); a token on the command line (``ps`` shows it to
all users); a link without a token on loopback (other users of the machine could join, and read prompts).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from weft.errors import ConfigError

TOKEN_CHARS_MIN = 32
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """Of one fleet, from its token."""

    server: KeyPair
    machine: KeyPair

    @classmethod
    def of(cls, token: str) -> LinkKeys:
        return cls(_key_pair(token, b"server"), _key_pair(token, b"machine"))


def new_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


def read_token(file: str) -> str:
    """Raises ConfigError that names --token: no such file, readable by others, too short."""
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"--token {path}: other users can read or change it (mode "
                                  f"{stat.S_IMODE(mode):04o}); run: chmod 600 {path}", param="--token")
            token = opened.read(4096).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"--token {path}: {error.strerror}; the file is created by `weft serve "
                          "--listen-engines` and copied from there", param="--token") from None
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or "\ufffd" in token:
        raise ConfigError(f"--token {path}: it has {len(token)} characters; a token is one line of at least "
                          f"{TOKEN_CHARS_MIN} printable ASCII characters", param="--token")
    return token


def read_or_create_token(file: str) -> tuple[str, bool]:
    """The token, and whether its file is new. Raises ConfigError as ``read_token``."""
    path = Path(file).expanduser()
    with contextlib.suppress(FileExistsError):
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(f"--token {path}: it cannot be created: {error.strerror}",
                              param="--token") from None
        token = new_token()
        with open(opened, "w", encoding="ascii") as created:
            created.write(token + "\n")
        return token, True
    return read_token(file), False


def _key_pair(token: str, role: bytes) -> KeyPair:
    seed = hashlib.sha256(token.encode("ascii", "replace")).digest()
    secret = z85.encode(hashlib.sha256(b"weft link " + role + seed).digest())
    return KeyPair(zmq.curve_public(secret), secret)
