"""What the prefill of a request costs others: the share of its seconds that a router adds to its own.

    weight  =  requests that wait behind it  +  what it displaces from a full cache

A request that goes where it has no checkpoint may get its first token sooner, and yet cost the fleet more.
Its prefill is computed a second time. Later requests wait behind it, and its states and KV push out others.

*Waiting.* As many requests wait behind a prefill as a request has ahead of itself when it is placed: in a
queue both are the same mean. The router counts those ahead.

*Displaced.* In a full cache each computed token pushes out another one. What such a token was worth follows
from what the cache of that replica returns: cached tokens over computed ones, at the price of computing. A
cache that has evicted nothing yet displaces nothing. So a replica with room gets what no replica has.

All are fading means, so the weight follows the traffic and is no threshold.

Rejected: no such term (8 % of the hits of a conversation trace went, for tens of milliseconds in a burst);
the value of the checkpoint that would be evicted (each engine would report it for each size of prompt).
"""

from __future__ import annotations

from dataclasses import dataclass

_FADE = 0.99


@dataclass(slots=True)
class _CacheReturns:
    """Of one replica."""

    cached_tokens: float = 0.0
    computed_tokens: float = 0.0
    has_evicted: bool = False


class SharedCosts:
    def __init__(self) -> None:
        self._ahead = 0.0
        self._returns: dict[int, _CacheReturns] = {}

    def placed(self, ahead: int) -> None:
        """A request was placed behind ``ahead`` prefills."""
        self._ahead = _FADE * self._ahead + (1 - _FADE) * ahead

    def admitted(self, replica: int, prompt_tokens: int, cached_tokens: int) -> None:
        returns = self._returns.setdefault(replica, _CacheReturns())
        returns.cached_tokens = _FADE * returns.cached_tokens + cached_tokens
        returns.computed_tokens = _FADE * returns.computed_tokens + prompt_tokens - cached_tokens

    def evicted(self, replica: int) -> None:
        self._returns.setdefault(replica, _CacheReturns()).has_evicted = True

    def left(self, replica: int) -> None:
        """Its cache is gone."""
        self._returns.pop(replica, None)

    def weight(self, replica: int) -> float:
        returns = self._returns.get(replica)
        if returns is None or not returns.has_evicted or not returns.computed_tokens:
            return self._ahead
        return self._ahead + returns.cached_tokens / returns.computed_tokens
