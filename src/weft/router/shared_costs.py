"""What the prefill of a request costs others: the share of its seconds that a router adds to its own.

    weight  =  requests that wait behind it  +  what it displaces from a full cache

A request that goes where it has no checkpoint may get its first token sooner, and yet cost the fleet more.
Its prefill is computed a second time. Later requests wait behind it, and its states and KV push out others.

*Waiting.* As many requests wait behind a prefill as a request has ahead of itself when it is placed: in a
queue both are the same mean. The router counts those ahead.

*Displaced.* In a full cache each computed token pushes out another one. What such a token was worth follows
from what the cache returns: cached tokens over computed ones, at the price of computing. A cache that evicts
nothing displaces nothing.

Both are fading means over the whole fleet, so the weight follows the traffic and is no threshold.

Rejected: no such term (8 % of the hits of a conversation trace went, for tens of milliseconds in a burst);
the value of the checkpoint that would be evicted (each engine would report it for each size of prompt).
"""

from __future__ import annotations

_FADE = 0.99


class SharedCosts:
    def __init__(self) -> None:
        self._ahead = 0.0
        self._cached_tokens = 0.0
        self._computed_tokens = 0.0
        self._has_evicted = False

    def placed(self, ahead: int) -> None:
        """A request was placed behind ``ahead`` prefills."""
        self._ahead = _FADE * self._ahead + (1 - _FADE) * ahead

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._cached_tokens = _FADE * self._cached_tokens + cached_tokens
        self._computed_tokens = _FADE * self._computed_tokens + prompt_tokens - cached_tokens

    def evicted(self, checkpoints: int) -> None:
        self._has_evicted |= checkpoints > 0

    @property
    def weight(self) -> float:
        displaced = self._cached_tokens / self._computed_tokens if self._computed_tokens else 0.0
        return self._ahead + (displaced if self._has_evicted else 0.0)
