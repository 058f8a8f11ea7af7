"""All sequences of a trace as one forest of shared prefixes, to the token: for bounds and for hindsight.

    root of a salt
      └─ [0..512)                     an edge is a run of tokens, named by (request, start, end)
           ├─ [512..1093)             nodes stand where sequences part, end, or where somebody looks
           └─ [512..768)

It only grows and holds no tokens: an edge names the request whose tokens it has, and they are made again when
it is compared. That is what memory's own tree is not: there edges are pages, and what is cached comes and
goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from weft.sim.traffic import Int32s, Traffic
from weft.units import CHUNK_TOKENS, PAGE_TOKENS

_SEQUENCES_AT_HAND = 64


@dataclass(eq=False, slots=True)
class Place:
    """The tokens [start, end) of sequence ``owner``, behind those of ``parent``."""

    owner: int
    start: int
    end: int
    parent: Place | None = field(repr=False)
    children: dict[int, Place] = field(default_factory=dict, repr=False)
    """By first token."""


class Forest:
    """Grows one sequence at a time; ``common`` says how far each was there before."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._tokens: Callable[[int], Int32s] = lru_cache(_SEQUENCES_AT_HAND)(traffic.tokens)
        self._roots: dict[str, Place] = {}
        self._last: dict[int, Place] = {}

    def add(self, index: int, length: int) -> tuple[int, Place]:
        """The first ``length`` tokens of request ``index``. Returns how many of them an earlier one had, and
        the place at their end."""
        tokens = self._tokens(index)[:length]
        root = self._roots.get(self._traffic.requests[index].salt)
        if root is None:
            root = self._roots[self._traffic.requests[index].salt] = Place(index, 0, 0, None)
        place, at = root, 0
        while at < length:
            child = place.children.get(int(tokens[at]))
            if child is None:
                child = place.children[int(tokens[at])] = Place(index, at, length, place)
                self._last[index] = child
                return at, child
            same = self._same(tokens, child)
            if same < child.end:
                place = self._split(child, same)
                at = same
                continue
            place, at = child, child.end
        self._last[index] = place
        return length, place

    def place_at(self, index: int, position: int) -> Place:
        """The place of request ``index``, which was added, that ends at ``position``; an edge is cut if need
        be."""
        place = self._last[index]
        assert 0 < position <= place.end
        while place.start >= position:
            assert place.parent is not None
            place = place.parent
        return place if place.end == position else self._split(place, position)

    def path(self, index: int) -> list[Place]:
        """Places of request ``index``, from its first tokens to its last."""
        places = []
        place: Place | None = self._last[index]
        while place is not None and place.end:
            places.append(place)
            place = place.parent
        return places[::-1]

    def _same(self, tokens: Int32s, child: Place) -> int:
        """The position up to which ``tokens`` go along the edge of ``child``."""
        end = min(child.end, tokens.size)
        differ = np.flatnonzero(tokens[child.start:end] != self._tokens(child.owner)[child.start:end])
        return child.start + int(differ[0]) if differ.size else end

    def _split(self, place: Place, at: int) -> Place:
        """Cut the edge of ``place``, which stays the lower part; returns the upper one."""
        assert place.parent is not None
        assert place.start < at < place.end
        tokens = self._tokens(place.owner)
        upper = Place(place.owner, place.start, at, place.parent)
        place.parent.children[int(tokens[place.start])] = upper
        upper.children[int(tokens[at])] = place
        place.parent, place.start = upper, at
        return upper


def computed_tokens(traffic: Traffic, index: int) -> int:
    """How far request ``index`` is in memory when it ends: its last token is chosen and never computed."""
    one = traffic.requests[index]
    return one.prompt_tokens + max(0, one.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class InfiniteCache:
    """Tokens of all prompts, and how many of them a cache without end finds: what no cache can exceed.

        of each prompt     the longest prefix that any request which arrived before it had, prompt and answer,
                           and one token less than the prompt, as its last logits choose the first token
        pages              that, down to a multiple of 16: where KV can be taken up
        states             that, down to a multiple of the engine's grid, or the end of an earlier request if
                           that lies further on: where a recurrent state can stand

    Arrivals count and not ends: a request may take up what another has not computed yet, so that nothing that
    waits well, or computes twins once, can be better."""

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
