"""What no cache can exceed: the hit rate of a memory without end, exactly.

    of each prompt     the longest prefix that any request which arrived before it had, prompt and answer,
                       and one token less than the prompt, as its last logits choose the first token
    pages              that, down to a multiple of 16: where KV can be taken up
    states             that, down to a multiple of the engine's grid, or the end of an earlier request if
                       that lies further on: where a recurrent state can stand

Arrivals count and not ends: a request may take up what another has not computed yet, so that nothing that
waits well, or computes twins once, can be better.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.sim.forest import Forest, Place, computed_tokens
from weft.sim.traffic import Traffic
from weft.units import CHUNK_TOKENS, PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class InfiniteCache:
    """Tokens of all prompts, and how many of them a cache without end finds."""

    prompt_tokens: int
    at_pages: int
    at_states: int

    @property
    def page_rate(self) -> float:
        return self.at_pages / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def state_rate(self) -> float:
        return self.at_states / self.prompt_tokens if self.prompt_tokens else 0.0


def infinite_cache(traffic: Traffic, grid_tokens: int = CHUNK_TOKENS) -> InfiniteCache:
    """``grid_tokens``: an engine keeps states at multiples of it."""
    forest = Forest(traffic)
    ends: set[Place] = set()
    at_pages = at_states = 0
    for index, one in enumerate(traffic.requests):
        common, last = forest.add(index, computed_tokens(traffic, index))
        common = min(common, one.prompt_tokens - 1)
        at_pages += common - common % PAGE_TOKENS
        at_states += max(common - common % grid_tokens, _deepest(ends, last, common))
        ends.add(last)
    return InfiniteCache(traffic.prompt_tokens, at_pages, at_states)


def _deepest(ends: set[Place], place: Place | None, common: int) -> int:
    """The end of an earlier request on the way to ``place``, not behind ``common``."""
    while place is not None:
        if place.end <= common and place in ends:
            return place.end
        place = place.parent
    return 0
