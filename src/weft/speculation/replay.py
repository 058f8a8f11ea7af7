"""What speculation would have accepted: known prompts and answers through a drafter, without a model.

    for each step    draft  ->  the drafts that equal the known answer are accepted  ->  settle, observe

The verification is exact: drafts change no token, so the answer would have been the same. Seconds come from a
table of costs, so they are an estimate.

Texts run one after the other, each alone. So later texts find earlier answers of their salt, as they would on
a server with little load. ``tree`` gets each text when it ends and forgets none: a cache without limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.costs.rows import RowCosts
from weft.memory.prefix.edge import PAGE_KEY_BYTES
from weft.memory.prefix.tree import PrefixTree
from weft.speculation.drafter import Drafter, DraftGrammar, DraftRow


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
    """``seconds`` and ``plain_seconds``: decode steps with and without drafts, in the unit of the costs."""

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


def replay(drafter: Drafter, texts: Iterable[KnownText], costs: RowCosts,
           tree: PrefixTree | None = None) -> ReplayedSpeculation:
    """``costs``: of the machine that is imagined. The drafter's own table is another object. ``tree``: an
    unpaged tree that the drafter reads."""
    total = ReplayedSpeculation()
    for key, text in enumerate(texts):
        answer = list(text.answer)
        if not answer:
            continue
        # The prefill chooses the first token.
        drafter.begin(key, np.asarray([*text.prompt, answer[0]], np.int32), prompt_length=len(text.prompt),
                      salt=text.salt, prediction=text.prediction, grammar=text.grammar)
        at = 1
        while at < len(answer):
            drafts = drafter.draft([DraftRow(key, len(answer) - at - 1)]).get(key, ())
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == answer[at + accepted]:
                accepted += 1
            chosen = answer[at:at + accepted + 1]
            drafter.settle(key, chosen, drafted=len(drafts), accepted=accepted)
            seconds = costs.verify_seconds(1, len(drafts)) if drafts else costs.seconds(1)
            drafter.observe(1, len(drafts), seconds)
            at += len(chosen)
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
    """What a finished request leaves in the cache: all tokens but the last, which was never computed."""
    data = np.asarray([*text.prompt, *text.answer][:-1], dtype=np.int32).tobytes()
    whole = len(data) // PAGE_KEY_BYTES * PAGE_KEY_BYTES
    node = tree.root(text.salt)
    if whole:
        node, _ = tree.insert(node, data[:whole], [])
    if data[whole:]:
        tree.add_tail(node, data[whole:], [])
