"""Sessions: names for prefixes of conversations, as objects of the kind ``session`` of an ``ObjectDatabase``.

    name, owner --digest--> id        one object for each name of an owner; saving it again replaces it
    Content     --new_session--> StoredSession --msgpack--> [SessionCipher] --> body

The server and the Python API share this table. The state itself is in the prefix tree and in the store of the engine
(``weft.memory.prefix.pins``).

Count and bytes are bounded for each owner, so no session is removed for another owner's or for a newer session: a save
beyond the bounds is refused (law L11). Requests do not find an expired session; ``sweep`` removes it.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError, NotFoundError, RequestError, UserError
from weft.objects.database import NewObject, ObjectDatabase
from weft.store.signing import read_secret

KIND = "session"
NAME_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS - 1}}}")
_NONCE_BYTES = 12
_PLAIN, _SEALED = b"\0", b"\1"
KEY_FLAG = "server.session_key"
_WORDS = {
    "weights": "other weights",
    "config": "another config.json",
    "tokenizer": "another tokenizer",
    "adapter": "another adapter",
}
"""Words of an error for each fact of an identity that differs."""


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
    """Bounds of each owner's sessions. ``age_s``: the longest time that a session is kept, seconds."""

    count: int = 1000
    bytes: int = 256_000_000
    age_s: float = 30 * 86_400.0

    def age(self, expires_after: float | None) -> float:
        """Return the seconds that a session is kept. Raise RequestError for a value beyond ``age_s``."""
        if expires_after is None:
            return self.age_s
        if not 0 < expires_after <= self.age_s:
            raise RequestError(
                f"expires_after is {expires_after:g} s; it must be above 0 and at most {self.age_s:g} "
                "(limits.session_days)",
                param="expires_after",
            )
        return expires_after


DEFAULT_LIMITS = SessionLimits()


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens and the conversation of a new session. ``keys``: see ``StoredSession``. ``chars``, ``digest``:
    characters and SHA-256 of the text, as in ``KnownPrefix``."""

    tokens: list[int]
    keys: bytes = b""
    messages: bytes = b""
    tools: bytes = b""
    variables: bytes = b""
    chars: int = 0
    digest: bytes = b""


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is stored. ``model``: the name of the engine's model; ``requested``: the name of the adapter or
    created name that the request gave, None for the model itself. ``salt``: the salt of the requests; ``engine_salt``:
    the salt with the adapter. ``tokens``: int32 bytes; ``keys``: the tokens with the keys of the pictures
    (``weft.pictures``), empty without pictures. ``identity``: the facts that must be equal for the tokens and the state
    to mean the same.

    ``messages``, ``tools`` and ``variables`` are JSON of the conversation, empty for a session of tokens. The text of
    ``tokens`` has ``chars`` characters and the SHA-256 ``digest``; 0 characters where the text is not known.
    ``nbytes``: bytes of the state."""

    session_id: str
    name: str
    model: str
    requested: str | None = msgspec.field(name="asked")
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
    keys: bytes = b""

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4

    @property
    def compared(self) -> bytes:
        """The int32 bytes that the cache compares."""
        return self.keys or self.tokens


_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(StoredSession).decode


def session_id(name: str, owner: str) -> str:
    return f"sess_{hashlib.sha256(f'{owner}/{name}'.encode()).hexdigest()[:32]}"


_ID_CHARS = len(session_id("", ""))


def check_name(name: str, *, field: str = "name") -> str:
    """Return ``name``. Raise RequestError for a name that no session can have."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{field} is {str(name)[:40]!r}; a session's name has 1 to {NAME_CHARS} letters, digits, '.', '_' and '-', "
            "and begins with a letter or a digit",
            param=field,
        )
    return name


def new_session(
    content: Content,
    *,
    name: str,
    owner: str,
    model: str,
    identity: dict[str, str],
    now_s: float,
    age_s: float,
    engine_salt: str,
    requested: str | None = None,
    salt: str = "",
    parent: str | None = None,
) -> StoredSession:
    """Return a new session ``name`` of ``content``. Raise RequestError for no tokens and for a bad name."""
    check_name(name)
    if not content.tokens:
        raise RequestError("the prompt is empty: a session has at least one token", param="prompt")
    return StoredSession(
        session_id=session_id(name, owner),
        name=name,
        model=model,
        requested=requested,
        salt=salt,
        engine_salt=engine_salt,
        tokens=array("i", content.tokens).tobytes(),
        keys=content.keys,
        identity=identity,
        created_s=now_s,
        expires_s=now_s + age_s,
        parent=parent,
        messages=content.messages,
        tools=content.tools,
        variables=content.variables,
        chars=content.chars,
        digest=content.digest,
    )


def forked_session(session: StoredSession, into: str, *, owner: str, now_s: float, age_s: float) -> StoredSession:
    """Return a copy of ``session`` with the name ``into``. Raise RequestError for a bad name."""
    return msgspec.structs.replace(
        session,
        session_id=session_id(check_name(into), owner),
        name=into,
        parent=session.name,
        created_s=now_s,
        expires_s=now_s + age_s,
    )


# ---------------------------------------------------------------------- the same tokens, the same model


def identity_facts(known: Mapping[str, str], weights: str | None, adapter: str) -> dict[str, str]:
    """Return the facts that must be equal for tokens and states to mean the same. ``known``: the identity of the engine
    at its start; ``weights``: the digest of the weights now, None if unknown, empty for the weights of the start."""
    first = known.get("weights", "")
    return {
        "weights": "" if weights is None else weights[: len(first)] or first,
        "config": known.get("config", ""),
        "tokenizer": known.get("tokenizer", ""),
        "adapter": adapter,
    }


def check_identity(session: StoredSession, model: str, now: Mapping[str, str]) -> None:
    """Raise SessionConflictError that names the first difference. ``now``: the identity facts of ``model``."""
    if session.model != model:
        raise conflict(session, f"is of the model {session.model!r}, and the request asks for {model!r}")
    for fact, value in now.items():
        saved = session.identity.get(fact, "")
        if saved != value:
            raise conflict(
                session, f"was saved with {_WORDS[fact]} ({saved[:12] or 'none'}, and now {value[:12] or 'none'})"
            )


def conflict(session: StoredSession, why: str) -> SessionConflictError:
    return SessionConflictError(
        f"the session {session.name!r} {why}: save it again", param="session", code="session_differs"
    )


def tokens_of(session: StoredSession) -> list[int]:
    return memoryview(session.tokens).cast("i").tolist()


def decoded(value: bytes) -> Any:
    return msgspec.json.decode(value)


# ---------------------------------------------------------------------- the file


class SessionCipher:
    """AES-256-GCM with a key derived from ``secret``. Raise ConfigError without the package cryptography."""

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
        """Return the body; None if it was sealed with another key or under another name."""
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = self._aead.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name.encode())
        except InvalidTag:
            return None
        return opened


def read_cipher(file: str | None) -> SessionCipher | None:
    """Return the cipher with the key of ``file``; None without a file. Raise ConfigError that names the file."""
    return None if file is None else SessionCipher(read_secret(Path(file).expanduser(), flag=KEY_FLAG))


class SessionTable:
    """The sessions in a database. Call each method in the thread of the database that it gets."""

    def __init__(
        self, limits: SessionLimits, cipher: SessionCipher | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.limits, self.clock = limits, clock
        self.count = self.bytes = 0
        """Sessions of all owners and their bytes, as of the last change."""
        self._cipher = cipher

    def check_room(self, database: ObjectDatabase, name: str, owner: str, size: int) -> None:
        """Raise SessionLimitError if a session of ``size`` bytes would exceed the limits."""
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

    def put(self, database: ObjectDatabase, session: StoredSession, owner: str) -> None:
        """Store ``session``, replacing one with the same name. Raise SessionLimitError."""
        body = self._sealed(session)
        self.check_room(database, session.name, owner, len(body))
        database.replace(KIND, NewObject(id=session.session_id, owner=owner, body=body))
        self._count(database)

    def get(self, database: ObjectDatabase, name: str, owner: str) -> StoredSession:
        """Return the session ``name``. Raise UnknownSessionError, SessionConflictError, and RequestError for a bad
        name."""
        key = session_id(check_name(name, field="session"), owner)
        body = database.get(KIND, key, owner)
        session = None if body is None else self._opened(body, name, key)
        if session is None or session.expires_s <= self.clock():
            raise unknown_session(name)
        return session

    def listed(self, database: ObjectDatabase, owner: str | None = None) -> list[StoredSession]:
        """Return the sessions of an owner, or of all owners, the oldest first, without sessions that another key
        encrypted."""
        now_s = self.clock()
        sessions = [session for body in database.listed(KIND, owner) if (session := self._readable(body)) is not None]
        return [session for session in sessions if session.expires_s > now_s]

    def delete(self, database: ObjectDatabase, name: str, owner: str) -> str:
        """Delete a session, and return its id. Raise UnknownSessionError, RequestError."""
        key = session_id(check_name(name, field="session"), owner)
        is_deleted = database.delete(key, owner)
        self._count(database)
        if not is_deleted:
            raise unknown_session(name)
        return key

    def sweep(self, database: ObjectDatabase) -> list[str]:
        """Remove expired sessions, and return their ids."""
        now_s = self.clock()
        gone = database.drop_old(KIND)
        for body in database.listed(KIND):
            session = self._readable(body)
            if session is not None and session.expires_s <= now_s:
                database.forget(session.session_id)
                gone.append(session.session_id)
        self._count(database)
        return gone

    def _count(self, database: ObjectDatabase) -> None:
        self.count, self.bytes = database.totals(KIND)

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


def unknown_session(name: str) -> UnknownSessionError:
    return UnknownSessionError(f"there is no session {name!r}", param="session", code="session_not_found")
