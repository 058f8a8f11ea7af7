"""The face of a source: it follows one sequence and proposes the tokens that may come next.

    Follower     one sequence, one source      extend(tokens)   the sequence has grown
                                               propose(count)   what may come next, and how well it matches

``match`` of a proposal counts the tokens before it that the source had right, or found again. It is what the
chances are learned by (``chances``): a proposal after 20 equal tokens is right more often than one after 3.
The token at index i of a proposal has the chance of a match of ``match + i`` tokens.

``propose`` changes nothing that a later call could see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

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
