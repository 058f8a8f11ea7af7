"""Generators of traffic by a seed, to test a cache policy on requests on which it was not tuned.

    document_traffic     a library of documents that branch; each request reads one way through a document and
                         asks, and some ask again

        document   [ front ] --+-- [ part ] --+-- [ part ]          readers leave it where the parts differ,
                               |              '-- [ part' ]         or at the end of the part they need
                               '-- [ part'' ] ...

    with_one_shots       long prompts that are never asked again, spread evenly
    with_scans           bursts of prompts that share an instruction and nothing else: a batch job

Popularity follows Zipf's law and changes: a document enters the library, is read for a while and leaves it, so a policy
that only counts does not win. Everything is drawn from one ``random.Random``: the same seed is the same traffic.
Documents come in blocks of 32 tokens, so that half of the branches are off the grid of the states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from weft_tools.sim.traffic import Traffic, TrafficRequest

BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Library:
    """The parameters of ``document_traffic``. ``documents`` are read at any time, each for ``lifetime_s`` seconds on
    average; tokens are medians, spread log-normally."""

    documents: int = 60
    lifetime_s: float = 600.0
    front_tokens: int = 2048
    part_tokens: int = 4096
    depth: int = 4
    branches: int = 3
    question_tokens: int = 160
    answer_tokens: int = 200
    requests_per_s: float = 3.0
    asks_again: float = 0.35
    """Share of the answers after which the reader goes on."""
    thinks_s: float = 40.0


@dataclass(slots=True)
class _Document:
    """Blocks by the way that leads there: () is the front, (1, 0) a part of its second branch."""

    weight: float
    parts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Due:
    """A request to come: ``blocks`` go before its question."""

    at_s: float
    blocks: tuple[int, ...]


def document_traffic(seed: int, requests: int, library: Library | None = None) -> Traffic:
    """Return ``requests`` questions to the documents of ``library``."""
    return _Readers(Random(seed), library or Library()).traffic(requests)


class _Readers:
    def __init__(self, random: Random, library: Library) -> None:
        self._random = random
        self._library = library
        self._numbers = count()
        self._documents = [self._document(rank) for rank in range(library.documents)]

    def traffic(self, requests: int) -> Traffic:
        library, random = self._library, self._random
        arrivals: list[TrafficRequest] = []
        again: list[_Due] = []
        now = 0.0
        while len(arrivals) < requests:
            now += random.expovariate(library.requests_per_s * (1 - library.asks_again))
            due = sorted((one for one in again if one.at_s <= now), key=lambda one: one.at_s)
            again = [one for one in again if one.at_s > now]
            for one in (*due, _Due(now, self._way(now))):
                arrivals.append(self._ask(one, again))
        arrivals = sorted(arrivals[:requests], key=lambda one: one.at_s)
        return Traffic(arrivals, block_tokens=BLOCK_TOKENS, block_count=next(self._numbers))

    def _ask(self, due: _Due, again: list[_Due]) -> TrafficRequest:
        """Return a request, and append to ``again`` the one that may continue it, whose prompt has the answer in
        blocks."""
        library, random = self._library, self._random
        question = self._blocks(self._about(library.question_tokens))
        blocks = (*due.blocks, *question)
        prompt_tokens = len(blocks) * BLOCK_TOKENS
        answer = self._blocks(self._about(library.answer_tokens))
        if random.random() < library.asks_again:
            thinks_s = random.lognormvariate(0.0, 0.7) * library.thinks_s
            again.append(_Due(due.at_s + thinks_s, (*blocks, *answer)))
        return TrafficRequest(due.at_s, prompt_tokens, len(answer) * BLOCK_TOKENS, (*blocks, *answer), whole=True)

    def _way(self, now: float) -> tuple[int, ...]:
        """Return the blocks of a way through a document: its front, and parts as deep as the reader goes."""
        library, random = self._library, self._random
        if random.random() < library.documents / (library.lifetime_s * library.requests_per_s):
            rank = random.randrange(library.documents)
            self._documents[rank] = self._document(rank)
        [document] = random.choices(self._documents, [one.weight for one in self._documents])
        way: tuple[int, ...] = ()
        blocks = self._part(document, way)
        for _ in range(random.randint(0, library.depth)):
            way = (*way, min(int(random.expovariate(1.0)), library.branches - 1))
            blocks += self._part(document, way)
        return blocks

    def _part(self, document: _Document, way: tuple[int, ...]) -> tuple[int, ...]:
        if way not in document.parts:
            median = self._library.part_tokens if way else self._library.front_tokens
            document.parts[way] = self._blocks(self._about(median))
        return document.parts[way]

    def _document(self, rank: int) -> _Document:
        return _Document(1.0 / (1 + rank))

    def _about(self, median: int) -> int:
        return int(median * self._random.lognormvariate(0.0, 0.5))

    def _blocks(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._numbers) for _ in range(max(1, tokens // BLOCK_TOKENS)))


def with_one_shots(traffic: Traffic, seed: int, *, share: float = 0.1, tokens: int = 48_000) -> Traffic:
    """Add ``share`` times the number of requests, each of about ``tokens`` tokens, that share nothing with others."""
    random = Random(seed)
    ends_s = traffic.requests[-1].at_s
    numbers = count(traffic.block_count)
    more = [
        _single(random.uniform(0.0, ends_s), int(tokens * random.uniform(0.5, 1.5)), traffic.block_tokens, numbers, ())
        for _ in range(int(share * len(traffic)))
    ]
    return _mixed(traffic, more, next(numbers))


def with_scans(
    traffic: Traffic,
    seed: int,
    *,
    every_s: float = 120.0,
    prompts: int = 60,
    tokens: int = 12_000,
    instruction_tokens: int = 1024,
    prompts_per_s: float = 4.0,
) -> Traffic:
    """Add a burst of ``prompts`` prompts that begin with the same instruction, every ``every_s`` seconds."""
    random = Random(seed)
    ends_s = traffic.requests[-1].at_s
    numbers = count(traffic.block_count)
    instruction = tuple(next(numbers) for _ in range(max(1, instruction_tokens // traffic.block_tokens)))
    more: list[TrafficRequest] = []
    start_s = every_s / 2
    while start_s < ends_s:
        more += [
            _single(
                start_s + number / prompts_per_s,
                int(tokens * random.uniform(0.5, 1.5)),
                traffic.block_tokens,
                numbers,
                instruction,
            )
            for number in range(prompts)
        ]
        start_s += every_s
    return _mixed(traffic, more, next(numbers))


def _single(
    at_s: float, tokens: int, block_tokens: int, numbers: Iterable[int], front: tuple[int, ...]
) -> TrafficRequest:
    own = max(1, tokens // block_tokens - len(front))
    blocks = (*front, *(number for number, _ in zip(numbers, range(own), strict=False)))
    return TrafficRequest(at_s, len(blocks) * block_tokens, 64, blocks)


def _mixed(traffic: Traffic, more: list[TrafficRequest], block_count: int) -> Traffic:
    """Merge both by arrival, and number the links between turns again."""
    order = sorted(range(len(traffic) + len(more)), key=lambda at: ((*traffic.requests, *more)[at].at_s, at))
    place = {at: number for number, at in enumerate(order)}
    every = [*traffic.requests, *more]
    requests = [
        one if one.next_turn is None else replace(one, next_turn=place[one.next_turn])
        for one in (every[at] for at in order)
    ]
    return Traffic(requests, block_tokens=traffic.block_tokens, fronts=traffic.fronts, block_count=block_count)
