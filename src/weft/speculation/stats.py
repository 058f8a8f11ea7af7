"""What speculation did since the start: drafts by source, and the time that they saved.

    saved = accepted / rows * cost(rows) - (seconds of the step - cost(rows))

A step of ``rows`` sequences with ``accepted`` right drafts does the work of 1 + accepted / rows steps, and it
took longer than one. Both come from the same table of costs, so the figure is an estimate and may be
negative. Counters only grow, except that one.
"""

from __future__ import annotations

import msgspec

from weft.speculation.proposal import SOURCES, SourceName


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
