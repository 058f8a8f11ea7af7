"""Prefill apart from decode, as values that all parts share: roles of replicas, a handoff, and its cost.

    prompt --> prefill engine --first token--> client
                    |
                    '-- KV and state, chunk by chunk --> decode engine --second token, ...--> client

A *role* is a preference of the router and not a property of an engine. A ``prefill`` replica computes prompts whose
answers go on elsewhere, a ``decode`` replica goes on with them. Each can do both: with no partner left, any replica
serves complete requests.
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
"""Guessed latency and bandwidth of a link, until puts are measured."""
BEHIND_SHARE = 0.05


def parse_roles(text: str, *, flag: str = "--roles") -> list[Role]:
    """Parse ``1p2d``: one prefill replica, then two decode replicas; b is both. Raise ConfigError that names ``flag``:
    another form, or a role without a partner."""
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
    """Return the role that is missing in ``roles`` and needed by another one; empty if there is none."""
    if "both" in roles and len(roles) > 1:
        return ""
    has_prefill, has_decode = "prefill" in roles, "decode" in roles
    if has_prefill == has_decode:
        return ""
    return "decode" if has_prefill else "prefill"


class Handoff(msgspec.Struct, frozen=True):
    """An order that goes with a request: its records go to the engine at ``peer``. ``start``: tokens that this one
    has."""

    peer: str
    start: int = 0


class LinkStats(msgspec.Struct, frozen=True):
    """Counters of the handoffs of one engine: bytes that it ``sent`` and ``received``, orders that ``ended`` well and
    that ``failed``, parcels that it ``refused``. ``bytes_s``: of its puts, measured or guessed. ``kv_bytes``: of a page
    of 16 tokens; ``state_bytes``: of one state; ``chunk_tokens``: tokens sent at once. ``room_bytes``: the most that it
    takes of one prompt, 0 for no limit."""

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
        """Return whether the engine takes the records of [``start``, ``end``): the KV, and the last state."""
        kv_bytes = ceil_div(end - start, PAGE_TOKENS) * self.kv_bytes
        return not self.room_bytes or kv_bytes + self.state_bytes <= self.room_bytes

    def nbytes(self, start: int, end: int) -> int:
        """Return the bytes of the records of [``start``, ``end``): the KV, and a state for each chunk."""
        states = max(1, ceil_div(end - start, self.chunk_tokens))
        return ceil_div(end - start, PAGE_TOKENS) * self.kv_bytes + states * self.state_bytes

    def goes_beside(self, start: int, end: int, compute_s: float) -> bool:
        """Return whether records of [``start``, ``end``) leave chunk by chunk while the prompt is computed, which takes
        ``compute_s``. A state after each chunk evicts prefixes that clients come back for, so it has to be worth it:
        sending all at the end would take more than BEHIND_SHARE of the prompt's own seconds."""
        kv_bytes = ceil_div(end - start, PAGE_TOKENS) * self.kv_bytes
        return (kv_bytes + self.state_bytes) / self.bytes_s > BEHIND_SHARE * compute_s

    def chunk_ends(self, start: int, end: int, compute_s: float) -> range:
        """Return positions where the prefill of such a prompt saves a state only for its records."""
        return range(self.chunk_tokens, end if self.goes_beside(start, end, compute_s) else 0, self.chunk_tokens)

    def wait_s(self, start: int, computed_from: int, end: int, compute_s: float, *, is_guess: bool = False) -> float:
        """Return seconds from the end of the prompt until all records of [``start``, ``end``) have arrived.
        ``computed_from``: where the prefill begins, which takes ``compute_s``. Chunks may leave during the prefill:
        then the last one is left, or the backlog of the link."""
        is_beside = end - computed_from > self.chunk_tokens and (is_guess or self.goes_beside(start, end, compute_s))
        last_from = max(start, end - self.chunk_tokens) if is_beside else start
        last_s = self.nbytes(last_from, end) / self.bytes_s
        return self.latency_s + max(last_s, self.nbytes(start, end) / self.bytes_s - compute_s)
