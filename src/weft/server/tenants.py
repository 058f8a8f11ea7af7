"""API keys as tenants: a salt and quotas for each.

    key --SHA-256--> digest --compared with all, in constant time--> Tenant
                                       |
                salt: SHA-256(digest, salt)              --tenant-by-key
                buckets:   requests, tokens              limits.key_requests_per_minute, key_tokens_per_minute
                in flight: bytes of bodies               limits.key_mb_in_flight

With ``--tenant-by-key`` requests of two keys never share a cached prefix (law L10); a ``cache_salt`` separates prefixes
of one key further. A bucket holds one minute of its rate and refills all the time. Tokens are known when a request has
ended, so a bucket may go below zero; the next request then waits (law L11).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.server.edge import Cells, EdgeError, KeyCounts, SharedCounts

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Quotas:
    """Quotas of each key; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    bytes_in_flight: int = 0

    @property
    def any(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.bytes_in_flight)


class _Bucket:
    """A rate limit. ``cells``: its level, and the time of that level; all HTTP processes read and write them."""

    def __init__(self, per_minute: int, clock: Callable[[], float], cells: Cells) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._cells = cells

    def wait_s(self) -> float:
        """Return seconds until one unit can be taken; 0 for now."""
        if not self._per_minute:
            return 0.0
        now_s = self._clock()
        rate = self._per_minute / _MINUTE_S
        used, used_s = self._cells
        used = max(0.0, used - (now_s - used_s) * rate)
        self._cells[0], self._cells[1] = used, now_s
        return max(0.0, (1 - (self._per_minute - used)) / rate)

    def take(self, amount: int) -> None:
        self._cells[0] += amount


class Tenant:
    """One API key. ``name``: for logs, made from the key's position among the keys of the server."""

    def __init__(
        self,
        digest: bytes,
        quotas: Quotas,
        *,
        name: str = "",
        salts_its_own: bool,
        clock: Callable[[], float] = time.monotonic,
        counts: KeyCounts | None = None,
    ) -> None:
        counts = counts or KeyCounts()
        self.name = name
        self._digest = digest
        self._lock = counts.lock
        self._in_flight = counts.bytes_in_flight
        self._quotas = quotas
        self._salts_its_own = salts_its_own
        self._requests = _Bucket(quotas.requests_per_minute, clock, counts.requests)
        self._tokens = _Bucket(quotas.tokens_per_minute, clock, counts.tokens)

    @property
    def owner(self) -> str:
        """Name of this key on disk; neither the key nor its salt can be derived from it."""
        return hashlib.sha256(b"owner" + self._digest).hexdigest()

    def salt(self, salt: str | None) -> str | None:
        """Return the cache salt of a request whose body has ``salt``."""
        if not self._salts_its_own:
            return salt
        return hashlib.sha256(self._digest + (salt or "").encode("utf-8", "surrogatepass")).hexdigest()

    def admit(self, body_bytes: int) -> EdgeError | None:
        """Count a request whose body has arrived, or return the refusal. ``release`` must follow."""
        self._in_flight.add(body_bytes)
        quotas = self._quotas
        in_flight = self._in_flight.total() if quotas.bytes_in_flight else 0
        if in_flight > quotas.bytes_in_flight:
            return _over(
                f"the requests of your API key hold {in_flight} bytes; the limit is {quotas.bytes_in_flight}",
                "limits.key_mb_in_flight",
                1.0,
            )
        if not quotas.any:
            return None
        with self._lock:
            for bucket, flag, unit, limit in (
                (self._requests, "limits.key_requests_per_minute", "requests", quotas.requests_per_minute),
                (self._tokens, "limits.key_tokens_per_minute", "tokens", quotas.tokens_per_minute),
            ):
                wait_s = bucket.wait_s()
                if wait_s > 0:
                    return _over(f"your API key has used its {limit} {unit} a minute", flag, wait_s)
            self._requests.take(1)
        return None

    def release(self, body_bytes: int) -> None:
        self._in_flight.add(-body_bytes)

    def withdraw(self, body_bytes: int) -> None:
        """Undo ``admit`` and ``release``: another process admits this request."""
        self.release(body_bytes)
        with self._lock:
            self._requests.take(-1)

    def spend(self, tokens: int) -> None:
        """Take the tokens of the prompt and the answer from the quota, when a request has ended."""
        if self._quotas.any:
            with self._lock:
                self._tokens.take(tokens)


class Keys:
    """The keys of a server. A key is compared with all of them each time, as digests and in constant time: timing
    reveals nothing about any key."""

    def __init__(
        self,
        client_keys: Sequence[str],
        operator_keys: Sequence[str] = (),
        *,
        quotas: Quotas | None = None,
        tenant_by_key: bool = False,
        counts: SharedCounts | None = None,
    ) -> None:
        self._tenants = [
            Tenant(
                _digest(key),
                quotas or Quotas(),
                name=f"key {number + 1}",
                salts_its_own=tenant_by_key,
                counts=None if counts is None else counts.key(number),
            )
            for number, key in enumerate(client_keys)
        ]
        self._clients = [_digest(key) for key in client_keys]
        self._operators = [
            Tenant(_digest(key), Quotas(), name=f"operator key {number + 1}", salts_its_own=tenant_by_key)
            for number, key in enumerate(operator_keys)
        ]
        self._operator_digests = [_digest(key) for key in operator_keys]
        self.has_clients, self.has_operators = bool(self._clients), bool(self._operators)

    def tenant_of(self, owner: str) -> Tenant | None:
        """Return the key that ``Tenant.owner`` names; None if the server no longer has it."""
        return next((tenant for tenant in (*self._tenants, *self._operators) if tenant.owner == owner), None)

    def match(self, key: str) -> tuple[Tenant | None, bool]:
        """Return the tenant of a key (None if the key is unknown) and whether it is an operator key."""
        digest = _digest(key)
        clients = [hmac.compare_digest(digest, known) for known in self._clients]
        operators = [hmac.compare_digest(digest, known) for known in self._operator_digests]
        if any(operators):
            return self._operators[operators.index(True)], True
        return (self._tenants[clients.index(True)], False) if any(clients) else (None, False)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _over(message: str, flag: str, wait_s: float) -> EdgeError:
    return EdgeError(
        429, f"{message} ({flag})", param=flag, code="rate_limit_exceeded", retry_after_s=max(1, math.ceil(wait_s))
    )
