"""What the prefill of a request costs others: the share of its seconds that a router adds to its own.

    weight  =  sequences that decode beside it  +  requests that wait behind it  +  what it displaces

A request that goes where it has no checkpoint may get its first token sooner, and yet cost the fleet more.
Its prefill is computed a second time. The sequences that decode there get their next tokens later. Later
requests wait behind it, and its states and KV push out others.

*Decodes.* A step computes decodes and a chunk of a prefill together, so each sequence that decodes on the
same replica waits for the prefill: a second of it is a second of each. The mean of all placements counts.

*Waiting.* As many requests wait behind a prefill as a request has ahead of itself when it is placed: in a
queue both are the same mean. The router counts those ahead.

*Displaced.* In a full cache each computed token pushes out another one. What such a token was worth follows
from what the caches return: cached tokens over computed ones, at the price of computing. A cache that has
evicted nothing yet displaces nothing, so a replica with room gets what no replica has.

The means fade and are those of the whole fleet. So the weight follows the traffic and is no threshold.

*Amplified.* A request that is sent away from its state delays others, and some of these are sent away in
turn. The factor for that is the one constant here. It was chosen on a conversation trace (docs/simulate.md):
1 gives 93 % of the hits of one engine with the memory of all. A larger one costs no time to the first token.

Rejected: no such term (8 % of the hits of a conversation trace went, for tens of milliseconds in a burst);
the value of the checkpoint that would be evicted (each engine would report it for each size of prompt); the
returns of each cache by itself (the one with the fewest hits gets what no replica has, so its hits become
fewer still); the decodes of each replica at this moment (a prompt that another replica has goes to an idle
one: 2 of 26 points of the hits went).
"""

from __future__ import annotations

AMPLIFIED = 3.0
_FADE = 0.99


class SharedCosts:
    def __init__(self) -> None:
        self._delayed = 0.0
        self._cached_tokens = 0.0
        self._computed_tokens = 0.0
        self._full: set[int] = set()
        """Replicas that evicted something."""

    def placed(self, *, ahead: int, decodes: int) -> None:
        """A request was placed behind ``ahead`` prefills, beside ``decodes`` sequences."""
        self._delayed = _FADE * self._delayed + (1 - _FADE) * (ahead + decodes)

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._cached_tokens = _FADE * self._cached_tokens + cached_tokens
        self._computed_tokens = _FADE * self._computed_tokens + prompt_tokens - cached_tokens

    def evicted(self, replica: int) -> None:
        self._full.add(replica)

    def left(self, replica: int) -> None:
        """Its cache is gone."""
        self._full.discard(replica)

    def weight(self, replica: int) -> float:
        displaced = self._cached_tokens / self._computed_tokens if self._computed_tokens else 0.0
        return AMPLIFIED * (self._delayed + (displaced if replica in self._full else 0.0))
