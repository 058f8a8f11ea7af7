"""The drafts that speculation would accept on recorded traffic, and the decode steps that it would save.

    recording with tokens       every source that needs nothing but text: tree, suffix
    recording without tokens    only tree, on block numbers instead of tokens

A hash covers a block and all tokens before it. So hashes show the common beginning of two requests, as the tree needs,
but no repetition inside a text or between texts with different beginnings. A recording never has predictions or
grammars, so these sources are left out.

Requests are replayed in the order of arrival, one at a time, with a cache that forgets nothing: later texts find
earlier answers of their salt, as on a server with little load. The verification is exact, as drafts change no token:
those that equal the known answer are accepted. Seconds are an estimate. A step costs the cost model's seconds for one
decode and its drafts, at the mean context of the traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weft.costs.rows import RowCosts
from weft.costs.step import CostModel, Work
from weft.memory.prefix.edge import PAGE_KEY_BYTES
from weft.memory.prefix.tree import PrefixTree
from weft.speculation.drafter import Drafter, DraftGrammar, DraftRow, SourceName
from weft.speculation.speculator import DRAFTS_MAX, Speculator
from weft_tools.sim.recording import Recording
from weft_tools.sim.traffic import Traffic


@dataclass(frozen=True, slots=True)
class KnownText:
    """A prompt with the answer that it got."""

    prompt: Sequence[int]
    answer: Sequence[int]
    salt: str = ""
    prediction: Sequence[int] | None = None
    grammar: DraftGrammar | None = None


@dataclass(slots=True)
class ReplayedSpeculation:
    """The result of a replay. ``seconds`` and ``plain_seconds``: decode steps with and without drafts, in the unit of
    the costs."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def speedup(self) -> float:
        """Tokens per second with drafts over those without."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0


def replay(
    drafter: Drafter, texts: Iterable[KnownText], costs: RowCosts, tree: PrefixTree | None = None
) -> ReplayedSpeculation:
    """Replay answers with drafts. ``costs``: of the simulated machine, separate from the drafter's own table. ``tree``:
    an unpaged tree that the drafter reads."""
    total = ReplayedSpeculation()
    for key, text in enumerate(texts):
        answer = list(text.answer)
        if not answer:
            continue
        # The prefill chooses the first token.
        drafter.begin(
            key,
            np.asarray([*text.prompt, answer[0]], np.int32),
            prompt_length=len(text.prompt),
            salt=text.salt,
            prediction=text.prediction,
            grammar=text.grammar,
        )
        position = 1
        while position < len(answer):
            drafts = drafter.draft([DraftRow(key, len(answer) - position - 1)]).get(key, ())
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == answer[position + accepted]:
                accepted += 1
            chosen = answer[position : position + accepted + 1]
            drafter.settle(key, chosen, drafted=len(drafts), accepted=accepted)
            seconds = costs.verify_seconds(1, len(drafts)) if drafts else costs.seconds(1)
            drafter.observe(1, len(drafts), seconds)
            position += len(chosen)
            total.tokens += len(chosen)
            total.steps += 1
            total.drafted += len(drafts)
            total.accepted += accepted
            total.seconds += seconds
            total.plain_seconds += len(chosen) * costs.seconds(1)
        drafter.end(key)
        if tree is not None:
            _publish(tree, text)
    return total


def _publish(tree: PrefixTree, text: KnownText) -> None:
    """Publish a finished request to the cache: all tokens but the last, which was never computed."""
    data = np.asarray([*text.prompt, *text.answer][:-1], dtype=np.int32).tobytes()
    whole = len(data) // PAGE_KEY_BYTES * PAGE_KEY_BYTES
    node = tree.root(text.salt)
    if whole:
        node, _ = tree.insert(node, data[:whole], [])
    if data[whole:]:
        tree.add_tail(node, data[whole:], [])


_ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Drafts of one source: verified, and right."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """The report of a replay. ``requests``: answers of two tokens or more, with a text. ``speedup``: decode steps'
    tokens per second over those without speculation. ``left_out``: sources that the recording cannot replay, and
    why."""

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


def replay_speculation(
    traffic: Traffic, recording: Recording, sources: Sequence[SourceName], cost: CostModel
) -> SpeculationReport:
    """Replay the sources. ``traffic``: that of ``recording``."""
    has_tokens = bool(recording.texts) and all(text is not None for text in recording.texts)
    left_out = {"prediction": "a recording has no predictions", "grammar": "a recording has no grammars"}
    if not has_tokens:
        left_out["suffix"] = "it needs tokens: record with server.record_tokens"
    left_out = {source: why for source, why in left_out.items() if source in sources}
    replayed = tuple(source for source in sources if source not in left_out)
    tree = PrefixTree(paged=False)
    costs = step_costs(cost, traffic)
    drafter = Speculator(replayed, costs=RowCosts(costs), tree=tree)
    texts = list(_texts(traffic, recording, has_tokens=has_tokens))
    total = replay(drafter, texts, RowCosts(costs), tree)
    counts = drafter.stats().sources
    return SpeculationReport(
        requests=len(texts),
        tokens=total.tokens,
        steps=total.steps,
        speedup=total.speedup,
        left_out=left_out,
        sources={source: SourceReport(counts[source].drafted, counts[source].accepted) for source in replayed},
    )


def _texts(traffic: Traffic, recording: Recording, *, has_tokens: bool) -> Iterator[KnownText]:
    for index, request in enumerate(traffic.requests):
        if request.output_tokens < 2:
            continue
        tokens = recording.texts[index] if has_tokens else traffic.tokens(index)
        assert tokens is not None
        known: list[int] = tokens.tolist()
        yield KnownText(known[: request.prompt_tokens], known[request.prompt_tokens :], salt=request.salt)


def step_costs(cost: CostModel, traffic: Traffic) -> dict[int, float]:
    """Return the seconds of a step by the rows of one sequence: a decode, and drafts at the next positions."""
    lengths = [request.prompt_tokens + request.output_tokens // 2 for request in traffic.requests]
    context = sum(lengths) // max(1, len(lengths))
    assert max(_ROWS) == DRAFTS_MAX + 1
    return {rows: cost.step_s(Work(rows - 1, (rows - 1) * context, 1, context)) for rows in _ROWS}
