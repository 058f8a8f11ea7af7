"""What speculation would accept on recorded traffic, and the decode steps that it would save.

    recording with tokens       every source that needs nothing but text: tree, suffix
    recording without tokens    tree alone, on block numbers in place of tokens

A hash covers a block and all tokens before it. So it shows how far two requests are equal from their first
token on, which is what the tree needs. It shows nothing that repeats inside a text, or between two texts that
begin differently. A recording never has predictions or grammars, so these sources are left out.

Requests are replayed in the order of arrival, one at a time, with a cache that forgets nothing. A step costs
what the cost model says for one decode and its drafts, at the mean context of the traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.costs.rows import RowCosts
from weft.costs.step import CostModel, Work
from weft.memory.prefix.tree import PrefixTree
from weft.sim.recording import Recording
from weft.sim.traffic import Traffic
from weft.speculation.proposal import SourceName
from weft.speculation.replay import KnownText, replay
from weft.speculation.speculator import DRAFTS_MAX, Speculator

_ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Drafts of one source: verified, and right."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """``requests``: answers of two tokens or more, with a text. ``speedup``: decode steps' tokens per second
    over those without speculation. ``left_out``: sources that the recording cannot replay, and why."""

    requests: int
    tokens: int
    steps: int
    sources: dict[str, SourceReport]
    speedup: float
    left_out: dict[str, str]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_step": self.tokens_per_step}


def replay_speculation(traffic: Traffic, recording: Recording, sources: Sequence[SourceName],
                       cost: CostModel) -> SpeculationReport:
    """``traffic``: that of ``recording``."""
    has_tokens = bool(recording.texts) and all(text is not None for text in recording.texts)
    left_out = {"prediction": "a recording has no predictions", "grammar": "a recording has no grammars"}
    if not has_tokens:
        left_out["suffix"] = "it needs tokens: record with --record-tokens"
    left_out = {source: why for source, why in left_out.items() if source in sources}
    replayed = tuple(source for source in sources if source not in left_out)
    tree = PrefixTree(paged=False)
    costs = step_costs(cost, traffic)
    drafter = Speculator(replayed, costs=RowCosts(costs), tree=tree)
    texts = list(_texts(traffic, recording, has_tokens=has_tokens))
    total = replay(drafter, texts, RowCosts(costs), tree)
    counts = drafter.stats().sources
    return SpeculationReport(
        requests=len(texts), tokens=total.tokens, steps=total.steps, speedup=total.speedup, left_out=left_out,
        sources={source: SourceReport(counts[source].drafted, counts[source].accepted)
                 for source in replayed})


def _texts(traffic: Traffic, recording: Recording, *, has_tokens: bool) -> Iterator[KnownText]:
    for at, request in enumerate(traffic.requests):
        if request.output_tokens < 2:
            continue
        tokens = recording.texts[at] if has_tokens else traffic.tokens(at)
        assert tokens is not None
        known: list[int] = tokens.tolist()
        yield KnownText(known[:request.prompt_tokens], known[request.prompt_tokens:], salt=request.salt)


def step_costs(cost: CostModel, traffic: Traffic) -> dict[int, float]:
    """Seconds of a step by the rows of one sequence: a decode, and drafts at the positions behind it."""
    lengths = [request.prompt_tokens + request.output_tokens // 2 for request in traffic.requests]
    context = sum(lengths) // max(1, len(lengths))
    assert max(_ROWS) == DRAFTS_MAX + 1
    return {rows: cost.step_s(Work(rows - 1, (rows - 1) * context, 1, context)) for rows in _ROWS}
