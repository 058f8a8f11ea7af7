"""The face of a source, and what speculation did since the start.

    Follower     one sequence, one source      extend(tokens)   the sequence has grown
                                               propose(count)   what may come next, and how well it matches

    saved = accepted / rows * cost(rows) - (seconds of the step - cost(rows))

``match`` of a proposal counts the tokens before it that the source had right, or found again. It is what the
chances are learned by: a proposal after 20 equal tokens is right more often than one after 3. The token at
index i of a proposal has the chance of a match of ``match + i`` tokens. ``propose`` changes nothing that a
later call could see.

A step of ``rows`` sequences with ``accepted`` right drafts does the work of 1 + accepted / rows steps, and it
took longer than one. Both come from the same table of costs, so ``saved`` is an estimate and may be negative.
Other counters only grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from weft.errors import ConfigError

SourceName = Literal["prediction", "grammar", "tree", "suffix", "mtp"]
SOURCES: tuple[SourceName, ...] = ("prediction", "grammar", "tree", "suffix", "mtp")
"""In the order in which equal proposals are preferred."""
SWITCHES = ("auto", "off")


class Proposal(NamedTuple):
    """``tokens`` may come next. ``match``: see the module. ``chances``: the source's own, of each token, if
    it has any."""

    tokens: tuple[int, ...]
    match: int
    chances: tuple[float, ...] = ()

    def first(self, count: int) -> Proposal:
        return Proposal(self.tokens[:count], self.match, self.chances[:count])


class Follower(Protocol):
    """One source on one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has ``tokens`` in addition."""
        ...

    def propose(self, count: int) -> Proposal | None:
        """At most ``count`` tokens, or None without a guess."""
        ...


def parse_sources(text: str) -> tuple[SourceName, ...]:
    """``auto`` (all sources), ``off`` (none), or names with commas. Raises ConfigError that lists the
    sources."""
    if text in SWITCHES:
        return SOURCES if text == "auto" else ()
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in SOURCES:
            raise ConfigError(f"--speculate is {text!r}, and {name!r} is no source of drafts; it may be "
                              f"auto, off, or a list of {', '.join(SOURCES)}", param="--speculate")
    return tuple(source for source in SOURCES if source in names)


class SourceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """``drafted``: tokens that were verified. ``accepted``: of them, the right ones. ``proposed`` and
    ``right``: next tokens that the source named, verified or not, and how many were right."""

    drafted: int = 0
    accepted: int = 0
    proposed: int = 0
    right: int = 0


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """``steps``: steps that verified drafts. ``sequence_steps``: verified windows, one for each sequence and
    step."""

    sources: dict[str, SourceCounts] = msgspec.field(
        default_factory=lambda: {source: SourceCounts() for source in SOURCES})
    steps: int = 0
    sequence_steps: int = 0
    saved_s: float = 0.0

    @property
    def drafted(self) -> int:
        return sum(counts.drafted for counts in self.sources.values())

    @property
    def accepted(self) -> int:
        return sum(counts.accepted for counts in self.sources.values())

    @property
    def accepted_length(self) -> float:
        """Tokens that a verified window brought on average, the chosen one included; 1 without windows."""
        return 1 + self.accepted / self.sequence_steps if self.sequence_steps else 1.0


class SpeculationCounters:
    """The counters that ``SpeculationStats`` reports under the same names, for the sources in use."""

    def __init__(self, sources: tuple[SourceName, ...] = SOURCES) -> None:
        self.drafted: dict[SourceName, int] = dict.fromkeys(sources, 0)
        self.accepted: dict[SourceName, int] = dict.fromkeys(sources, 0)
        self.proposed: dict[SourceName, int] = dict.fromkeys(sources, 0)
        self.right: dict[SourceName, int] = dict.fromkeys(sources, 0)
        self.steps = 0
        self.sequence_steps = 0
        self.saved_s = 0.0

    def stats(self) -> SpeculationStats:
        sources = {str(source): SourceCounts(drafted=self.drafted[source], accepted=self.accepted[source],
                                             proposed=self.proposed[source], right=self.right[source])
                   for source in self.drafted}
        return SpeculationStats(sources=sources, steps=self.steps, sequence_steps=self.sequence_steps,
                                saved_s=self.saved_s)
