"""Values of disaggregated prefill that all parts share: roles of replicas, handoffs, and their costs.

    prompt --> prefill engine --first token--> client
                    |
                    '-- KV and state, chunk by chunk --> decode engine --second token, ...--> client

A *role* is a preference of the router and not a property of an engine. A ``prefill`` replica computes prompts, and a
``decode`` replica generates the answers. Each can do both: without a partner, any replica serves complete requests.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from weft.errors import ConfigError
from weft.units import PAGE_TOKENS, ceil_div

Role = Literal["both", "prefill", "decode"]
ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "b": "both"}
REPLICAS_MAX = 1000
"""Most replicas of one server, and of a simulated fleet."""
LINK_BYTES_S = 1e9
LINK_LATENCY_S = 2e-3
"""Assumed latency and bandwidth of a link, until sends are measured."""
BEHIND_SHARE = 0.05


def parse_roles(text: str, *, flag: str = "--roles") -> list[Role]:
    """Parse ``1p2d``: one prefill replica, then two decode replicas; b is both. Raise ConfigError that names ``flag``
    for another form, or for a role without a partner."""
    parts = re.findall(r"(\d{1,4})([pdb])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise ConfigError(
            f"{flag} {text}: it is a list of counts and roles without spaces, such as 1p2d: "
            "one replica for prompts (p), two that go on with the answers (d); b does both",
            param=flag,
        )
    count = sum(int(count) for count, _ in parts)
    if not count:
        raise ConfigError(f"{flag} {text}: 0 replicas; there must be at least 1", param=flag)
    check_replicas(f"{flag} {text}", count, flag=flag)
    return [ROLES[letter] for count, letter in parts for _ in range(int(count))]


def check_replicas(flag_text: str, count: int, *, flag: str) -> None:
    """Raise ConfigError for a count of replicas out of range. ``flag_text``: the flag with its value."""
    if count > REPLICAS_MAX:
        raise ConfigError(f"{flag_text}: {count} replicas; the most are {REPLICAS_MAX}", param=flag)


def partner_missing(roles: list[Role]) -> str:
    """Return the role that is missing in ``roles`` as the partner of another; empty if none is missing."""
    if "both" in roles and len(roles) > 1:
        return ""
    has_prefill, has_decode = "prefill" in roles, "decode" in roles
    if has_prefill == has_decode:
        return ""
    return "decode" if has_prefill else "prefill"


class Handoff(msgspec.Struct, frozen=True):
    """An order with a request: send its records to the engine at ``peer``. ``start``: tokens that this engine already
    has."""

    peer: str
    start: int = 0


class LinkStats(msgspec.Struct, frozen=True):
    """Counters of the handoffs of one engine: bytes ``sent`` and ``received``, orders that succeeded (``ended``) and
    ``failed``, parcels ``refused``. ``bytes_s``: bandwidth, measured or assumed. ``kv_bytes``: of a page of 16 tokens;
    ``state_bytes``: of a state; ``chunk_tokens``: tokens sent at once. ``room_bytes``: most bytes that the engine
    accepts for a prompt, 0 for no limit."""

    sent: int = 0
    received: int = 0
    ended: int = 0
    failed: int = 0
    refused: int = 0
    bytes_s: float = LINK_BYTES_S
    latency_s: float = LINK_LATENCY_S
    kv_bytes: int = 0
    state_bytes: int = 0
    chunk_tokens: int = 1024
    room_bytes: int = 0

    def has_room(self, start: int, end: int) -> bool:
        """Return whether the engine accepts the records of [``start``, ``end``): the KV, and the last state."""
        kv_bytes = ceil_div(end - start, PAGE_TOKENS) * self.kv_bytes
        return not self.room_bytes or kv_bytes + self.state_bytes <= self.room_bytes

    def nbytes(self, start: int, end: int) -> int:
        """Return the bytes of the records of [``start``, ``end``): the KV, and a state for each chunk."""
        states = max(1, ceil_div(end - start, self.chunk_tokens))
        return ceil_div(end - start, PAGE_TOKENS) * self.kv_bytes + states * self.state_bytes

    def goes_beside(self, start: int, end: int, compute_s: float) -> bool:
        """Return whether records of [``start``, ``end``) are sent chunk by chunk while the prompt is computed, which
        takes ``compute_s``. A state after each chunk evicts other prefixes, so this is done only if sending everything
        at the end would take more than BEHIND_SHARE of ``compute_s``."""
        kv_bytes = ceil_div(end - start, PAGE_TOKENS) * self.kv_bytes
        return (kv_bytes + self.state_bytes) / self.bytes_s > BEHIND_SHARE * compute_s

    def chunk_ends(self, start: int, end: int, compute_s: float) -> range:
        """Return the positions where the prefill saves states only for the handoff."""
        return range(self.chunk_tokens, end if self.goes_beside(start, end, compute_s) else 0, self.chunk_tokens)

    def wait_s(self, start: int, computed_from: int, end: int, compute_s: float, *, is_guess: bool = False) -> float:
        """Return seconds from the end of the prompt until all records of [``start``, ``end``) have arrived.
        ``computed_from``: where the prefill begins; ``compute_s``: its time. If chunks are sent during the prefill,
        only the last chunk or the backlog of the link remains."""
        is_beside = end - computed_from > self.chunk_tokens and (is_guess or self.goes_beside(start, end, compute_s))
        last_from = max(start, end - self.chunk_tokens) if is_beside else start
        last_s = self.nbytes(last_from, end) / self.bytes_s
        return self.latency_s + max(last_s, self.nbytes(start, end) / self.bytes_s - compute_s)
