"""Ranks in bfloat16: as close to float32 as one rank, and the same tokens alone and in company."""

from __future__ import annotations

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.ranks.engines import GREEDY, Story, engine, prompt, run
from weft.ranks.peers import Peers

FAMILIES = ("qwen3_5", "granite")
BOUND = 2.0
"""How much further from float32 two ranks may be than one: a sum over ranks is rounded at another place."""
ASKED = {
    name: (prompt(length, salt), GREEDY)
    for salt, (name, length) in enumerate({"a": 61, "b": 30, "c": 17, "d": 9}.items())
}


def story(family: str, peers: Peers | None, *, together: bool, dtype: str = "bfloat16") -> Story:
    assembled = engine(checkpoint(family), peers=peers, dtype=dtype, speculate="off", prefix_cache=False)
    said = Story()
    for group in [list(ASKED)] if together else [[name] for name in ASKED]:
        run(assembled, {name: ASKED[name] for name in group}, said)
    assembled.core.close()
    return said


def gap(story: Story, truth: Story) -> float:
    """Of the logits that chose the first token of each answer; later ones may follow from other tokens."""
    return max(
        float((story.logits[name, len(tokens)] - truth.logits[name, len(tokens)]).abs().max())
        for name, (tokens, _) in ASKED.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_as_close_to_float32_as_one(family: str, two: Peers) -> None:
    truth = story(family, None, together=True, dtype="float32")
    alone, ranked = story(family, None, together=True), story(family, two, together=True)
    assert gap(ranked, alone) > 0.0, "nothing was rounded"
    assert gap(ranked, truth) < BOUND * gap(alone, truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_no_token(family: str, two: Peers) -> None:
    together = story(family, two, together=True)
    by_itself = story(family, two, together=False)
    assert by_itself.tokens == together.tokens
