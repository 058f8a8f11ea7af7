"""Interfaces of speculation: sources of drafts, the drafter that asks them, and counts of drafts.

    begin(key, tokens)           a sequence has its first token: prompt and answer so far
    draft(rows)                  for the step that is planned now: key -> tokens that may come next
    head_drafts(sequences)       how many tokens the model's own head drafts in that step
    settle(key, tokens, ...)     the tokens that the step chose, drafts among them
    offer(key, tokens, ...)      tokens that the head expects next
    observe(decodes, ...)        the seconds of the step, once all of its sequences are settled
    sleep_through(steps, ...)    steps of only decodes went by while the drafter slept
    end(key)                     the sequence has ended

    Follower     one sequence, one source      extend(tokens)   the sequence has grown
                                               propose(count)   tokens that may come next, and how well they match

    saved = accepted / rows * cost(rows) - (seconds of the step - cost(rows))

A token is a function of logits, seed and position (decision 0006), so the step chooses a token at every
drafted position. A draft is right if it equals the chosen token, and the first difference is the next token.
A wrong draft costs time and changes no text.

* ``draft`` and ``propose`` change nothing that a later call could see: a plan may be dropped.
* A preempted sequence stays begun. Its rows are missing from ``draft`` until it decodes again.
* Drafts of one salt never hold tokens of another (law L10).
* While the drafter is not ``awake``, it is neither asked nor fed. The next ``settle`` brings all tokens since then.

``match`` of a proposal counts the tokens before it that the source had right, or found again. Chances are learned by
match: the token at index i of a proposal has the chance of a match of ``match + i`` tokens. ``saved`` is an estimate
and may be negative; other counters only grow. Nothing here has a clock or a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from weft.errors import ConfigError

if TYPE_CHECKING:  # the HTTP process shows the counts without importing numpy
    import numpy as np
    import numpy.typing as npt

    Int32s = npt.NDArray[np.int32]

SourceName = Literal["prediction", "grammar", "tree", "suffix", "mtp"]
SOURCES: tuple[SourceName, ...] = ("prediction", "grammar", "tree", "suffix", "mtp")
"""Sources in the order in which equal proposals are preferred."""
SWITCHES = ("auto", "off")


class Proposal(NamedTuple):
    """Tokens that may come next. ``match``: see the module. ``chances``: the source's own, of each token, if it has
    any.
    """

    tokens: tuple[int, ...]
    match: int
    chances: tuple[float, ...] = ()

    def first(self, count: int) -> Proposal:
        return Proposal(self.tokens[:count], self.match, self.chances[:count])


class Follower(Protocol):
    """One source on one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add ``tokens`` to the sequence."""

    def propose(self, count: int) -> Proposal | None:
        """Return a proposal of at most ``count`` tokens, or None without a guess."""


def parse_sources(text: str) -> tuple[SourceName, ...]:
    """Return the sources that ``text`` names: ``auto`` (all sources), ``off`` (none), or names with commas. Raises
    ConfigError that lists the sources.
    """
    if text in SWITCHES:
        return SOURCES if text == "auto" else ()
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in SOURCES:
            raise ConfigError(
                f"--speculate is {text!r}, and {name!r} is not a source of drafts; it may be "
                f"auto, off, or a list of {', '.join(SOURCES)}",
                param="--speculate",
            )
    return tuple(source for source in SOURCES if source in names)


class SourceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one source. ``drafted``: tokens that were verified. ``accepted``: the right ones among them.
    ``proposed`` and ``right``: next tokens that the source named, verified or not, and how many were right.
    """

    drafted: int = 0
    accepted: int = 0
    proposed: int = 0
    right: int = 0


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of all sources. ``steps``: steps that verified drafts. ``sequence_steps``: verify runs, one for each
    sequence and step.
    """

    sources: dict[str, SourceCounts] = msgspec.field(
        default_factory=lambda: {source: SourceCounts() for source in SOURCES}
    )
    steps: int = 0
    sequence_steps: int = 0
    saved_s: float = 0.0

    @property
    def drafted(self) -> int:
        return sum(counts.drafted for counts in self.sources.values())

    @property
    def accepted(self) -> int:
        return sum(counts.accepted for counts in self.sources.values())


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
        sources = {
            str(source): SourceCounts(
                drafted=self.drafted[source],
                accepted=self.accepted[source],
                proposed=self.proposed[source],
                right=self.right[source],
            )
            for source in self.drafted
        }
        return SpeculationStats(
            sources=sources, steps=self.steps, sequence_steps=self.sequence_steps, saved_s=self.saved_s
        )


PLAIN_STEPS = 3
"""Number of plain steps in a row, the last of which measures the cost of a plain step."""


class DraftGrammar(Protocol):
    """Interface of a compiled grammar, as drafts need it."""

    def matcher(self) -> Any:
        """Return a new matcher (``llguidance.LLMatcher``) that has seen no token."""

    def forced_tokens(self, matcher: Any) -> list[int]:
        """Return the tokens of the only text that may come next; empty if there is a choice."""


class DraftRow(NamedTuple):
    """One decoding sequence of the step. ``key``: the number of the sequence. ``limit``: most tokens that may
    be drafted (taps, the context, ``max_tokens`` and the step's budget bound it)."""

    key: int
    limit: int


class Drafter(Protocol):
    """Source of drafts for the planner."""

    @property
    def awake(self) -> bool:
        """Whether the drafter may have drafts for the next step."""

    def wake(self) -> None:
        """Wake up, since a sequence that is likely to be drafted begins."""

    def begin(
        self,
        key: int,
        tokens: Int32s,
        *,
        prompt_length: int,
        salt: str | None,
        prediction: Sequence[int] | None,
        grammar: DraftGrammar | None = None,
        adapter: str = "",
    ) -> None:
        """Begin the sequence ``key``, which is about to decode. ``tokens``: its prompt of ``prompt_length`` tokens,
        and the answer so far. ``prediction``: the client's guess of the complete answer. ``adapter``: its digest.
        """

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        """Return the tokens to verify in the step of ``rows``, by key. Keys without drafts are missing."""

    def settle(self, key: int, tokens: Sequence[int], *, drafted: int, accepted: int) -> None:
        """Record that the step added ``tokens`` to the sequence. ``drafted`` tokens of the last ``draft`` were
        verified, and the first ``accepted`` of them were right. Both are 0 in a step without drafts.
        """

    def head_drafts(self, sequences: int, *, prompts: bool) -> int | None:
        """Return ``StepPlan.mtp_drafts`` for the step whose drafts were asked for last. ``sequences`` of it choose a
        token. ``prompts``: it prefills.
        """

    def offer(self, key: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Offer ``tokens``, which the model's own head expects after the settled ones, each with its chance."""

    def observe(self, decodes: int, drafted: int, seconds: float, *, prefills: bool = False) -> None:
        """Record that a step of ``decodes`` sequences that verified ``drafted`` tokens in all took ``seconds``,
        without the head's. With ``prefills`` the seconds include prompts, and say nothing about drafts.
        """

    def sleep_through(self, steps: int, seconds: float, decodes: int, last_s: float | None) -> None:
        """Record that ``steps`` steps of only decodes took ``seconds`` in all while the drafter was not awake.
        ``decodes``: sequences of the last one. ``last_s``: its seconds, if steps before it had the same number.
        """

    def observe_head(self, sequences: int, drafts: int, seconds: float, *, prefills: bool = False) -> None:
        """Record that the head took ``seconds`` for ``drafts`` tokens of each of ``sequences``, in the same step. With
        ``prefills`` it read prompts as well.
        """

    def forget(self) -> None:
        """Drop the answers of the old weights: the weights have changed."""

    def end(self, key: int) -> None:
        """End the sequence. A key that never began is ignored, because an answer may end in its first step."""
