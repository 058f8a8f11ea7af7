"""Stored sessions: objects of the kind ``session`` in the file of the stored responses.

    name, owner --digest--> id        one object for each name of an owner; saving it again replaces it
    StoredSession --msgpack--> [SessionCipher] --> body

Count and bytes are bounded for each owner, so no owner's session goes for another one's, and none goes for a
newer one: a save beyond the bounds is refused (law L11). Expired sessions are not found, and ``sweep`` removes them.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError, NotFoundError, RequestError, UserError
from weft.server.objects import NewObject, ObjectDatabase
from weft.server.responses.store import SESSION_KIND as KIND
from weft.server.responses.store import ResponseStore
from weft.store.signing import read_secret

NAME_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS - 1}}}")
_NONCE_BYTES = 12
_PLAIN, _SEALED = b"\0", b"\1"
KEY_FLAG = "server.session_key"


class UnknownSessionError(NotFoundError):
    """The owner has no session of this name."""


class SessionConflictError(UserError):
    """The session is of another model, tokenizer or adapter, or encrypted with another key."""

    status = 409
    kind = "conflict_error"


class SessionLimitError(UserError):
    """The owner has reached the limit of sessions, or of their bytes."""

    status = 429
    kind = "rate_limit_error"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of each owner's sessions. ``age_s``: the longest that one is kept."""

    count: int
    bytes: int
    age_s: float


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """``model``: the name of the engine's model; ``asked``: that of an adapter or a created name, if it is one.
    ``salt``: that of its requests; ``engine_salt``: with its adapter. ``tokens``: int32 bytes. ``identity``: the
    facts by which they mean the same.

    ``messages``, ``tools`` and ``variables`` are JSON of the conversation, empty for a session of tokens. The text
    of ``tokens`` has ``chars`` characters and the SHA-256 ``digest``; 0 where it is not known. ``nbytes``: of the
    state."""

    session_id: str
    name: str
    model: str
    asked: str | None
    salt: str
    tokens: bytes
    identity: dict[str, str]
    created_s: float
    expires_s: float
    parent: str | None = None
    messages: bytes = b""
    tools: bytes = b""
    variables: bytes = b""
    chars: int = 0
    digest: bytes = b""
    nbytes: int = 0
    engine_salt: str = ""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4


_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(StoredSession).decode


def session_id(name: str, owner: str) -> str:
    return f"sess_{hashlib.sha256(f'{owner}/{name}'.encode()).hexdigest()[:32]}"


def check_name(name: str, *, field: str = "name") -> str:
    """Return ``name``. Raises RequestError."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{field} is {name[:40]!r}; a session's name has 1 to {NAME_CHARS} letters, digits, '.', '_' and '-', and "
            "begins with a letter or a digit",
            param=field,
        )
    return name


class SessionCipher:
    """AES-256-GCM with a key derived from ``secret``. Raises ConfigError without the package cryptography."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                f"{KEY_FLAG} needs the package cryptography: pip install 'weft[encryption]'", param=KEY_FLAG
            ) from None
        self._aead: Any = AESGCM(hashlib.blake2b(secret, digest_size=32, person=b"weft-sessions").digest())

    def seal(self, body: bytes, name: str) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._aead.encrypt(nonce, body, name.encode())
        return nonce + sealed

    def open(self, sealed: bytes, name: str) -> bytes | None:
        """Return the body, None where it was sealed with another key or under another name."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name.encode())
        except InvalidTag:
            return None
        return opened


def read_cipher(file: str | None) -> SessionCipher | None:
    """Raises ConfigError that names the file."""
    return None if file is None else SessionCipher(read_secret(Path(file).expanduser(), flag=KEY_FLAG))


class SessionStore:
    """Raises ResponseStoreError where the file fails."""

    def __init__(
        self,
        responses: ResponseStore,
        limits: SessionLimits,
        cipher: SessionCipher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.count = self.bytes = 0
        """Sessions of all owners and their bytes, as of the last change."""
        self._responses = responses
        self._cipher = cipher

    async def check_room(self, name: str, owner: str, size: int) -> None:
        """Raises SessionLimitError where a session of ``size`` bytes would be one too many."""
        await self._responses.run(lambda database: self._check_room(database, name, owner, size))

    async def put(self, session: StoredSession, owner: str) -> None:
        """Store ``session``, and drop one with the same name. Raises SessionLimitError."""
        body = self._sealed(session)

        def put(database: ObjectDatabase) -> None:
            self._check_room(database, session.name, owner, len(body))
            database.replace(KIND, NewObject(id=session.session_id, owner=owner, body=body))
            self._count(database)

        await self._responses.run(put)

    async def get(self, name: str, owner: str) -> StoredSession:
        """Raises UnknownSessionError, SessionConflictError."""
        key = session_id(check_name(name, field="session"), owner)
        body = await self._responses.run(lambda database: database.get(KIND, key, owner))
        session = None if body is None else self._opened(body, name, key)
        if session is None or session.expires_s <= self.clock():
            raise UnknownSessionError(f"there is no session {name!r}", param="session", code="session_not_found")
        return session

    async def listed(self, owner: str | None = None) -> list[StoredSession]:
        """Return those of an owner, or of all; the oldest first. Left out: those that another key encrypted."""
        bodies = await self._responses.run(lambda database: database.listed(KIND, owner))
        now_s = self.clock()
        sessions = [session for body in bodies if (session := self._readable(body)) is not None]
        return [session for session in sessions if session.expires_s > now_s]

    async def delete(self, name: str, owner: str) -> str:
        """Return its id. Raises UnknownSessionError."""
        key = session_id(check_name(name, field="session"), owner)

        def delete(database: ObjectDatabase) -> bool:
            deleted = database.delete(key, owner)
            self._count(database)
            return deleted

        if not await self._responses.run(delete):
            raise UnknownSessionError(f"there is no session {name!r}", param="session", code="session_not_found")
        return key

    async def sweep(self) -> list[str]:
        """Remove those that have expired. Return their ids."""
        now_s = self.clock()

        def sweep(database: ObjectDatabase) -> list[str]:
            gone = database.drop_old(KIND)
            for body in database.listed(KIND):
                session = self._readable(body)
                if session is not None and session.expires_s <= now_s:
                    database.forget(session.session_id)
                    gone.append(session.session_id)
            self._count(database)
            return gone

        return await self._responses.run(sweep)

    def _count(self, database: ObjectDatabase) -> None:
        self.count, self.bytes = database.totals(KIND)

    def _check_room(self, database: ObjectDatabase, name: str, owner: str, size: int) -> None:
        count, total = database.owned(KIND, owner, but=session_id(name, owner))
        if count >= self.limits.count:
            raise SessionLimitError(
                f"you have {count} sessions; the limit is {self.limits.count} (limits.max_sessions). Delete some",
                param="limits.max_sessions",
                code="too_many_sessions",
            )
        if total + size > self.limits.bytes:
            raise SessionLimitError(
                f"your sessions have {total} bytes and this one {size}; the limit is {self.limits.bytes} "
                "(limits.session_store_size). Delete some",
                param="limits.session_store_size",
                code="too_many_sessions",
            )

    def _sealed(self, session: StoredSession) -> bytes:
        body = _encoder.encode(session)
        if self._cipher is None:
            return _PLAIN + body
        return _SEALED + session.session_id.encode() + self._cipher.seal(body, session.session_id)

    def _readable(self, body: bytes) -> StoredSession | None:
        if body[:1] == _PLAIN:
            return _decode(body[1:])
        name = body[1 : 1 + _ID_CHARS].decode()
        opened = None if self._cipher is None else self._cipher.open(body[1 + _ID_CHARS :], name)
        return None if opened is None else _decode(opened)

    def _opened(self, body: bytes, name: str, key: str) -> StoredSession:
        session = self._readable(body)
        if session is None or session.session_id != key:
            raise SessionConflictError(
                f"the session {name!r} was encrypted with another key ({KEY_FLAG})",
                param="session",
                code="session_key_differs",
            )
        return session


_ID_CHARS = len(session_id("", ""))
