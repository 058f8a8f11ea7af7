"""Tokens of two and of four ranks are those of one, whatever the engine does to the text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.fixtures.checkpoints import VOCAB_SIZE, asked, checkpoint
from tests.fixtures.drafters import AnswerDrafter
from tests.oracle.test_replaced_weights import change_one_element
from tests.ranks.engines import GREEDY, Story, engine, prompt, run, whole_story
from tests.support.refused_growth import refuse_growth
from weft.assemble import assembly
from weft.engine.sleeper import Sleeper
from weft.ranks.peers import Peers

FAMILIES = asked("qwen3_5", "lfm2", "granite_moe", "kimi_linear", "ling", "zamba2", "jamba", "gpt_oss")
"""One of each mixer; ``test_every_family`` has the others, without processes."""
TOLERANCE = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_one_says(family: str, two: Peers) -> None:
    """Cold, chunked, sampled, and from a cached prefix."""
    alone = whole_story(engine(checkpoint(family)))
    ranked = whole_story(engine(checkpoint(family), peers=two))
    assert ranked.tokens == alone.tokens
    assert ranked.cached_tokens["hit"] == alone.cached_tokens["hit"] > 0
    assert ranked.distance(alone) < TOLERANCE * max(1.0, _size(alone))


@pytest.mark.parametrize("family", ["granite", "lfm2"])
def test_four_ranks_say_what_one_says(family: str, four: Peers) -> None:
    """With two KV heads for four ranks, and two groups of Mamba-2: copies by ``rank // factor``."""
    alone = whole_story(engine(checkpoint(family)))
    ranked = whole_story(engine(checkpoint(family), peers=four))
    assert ranked.tokens == alone.tokens
    assert ranked.distance(alone) < TOLERANCE * max(1.0, _size(alone))


def test_a_preempted_sequence(two: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the first sequence grows, the arena seems full once: the last one gives way and resumes."""
    requests = {
        "a": (prompt(40, 1), replace(GREEDY, max_tokens=24)),
        "b": (prompt(30, 2), replace(GREEDY, max_tokens=24)),
    }
    alone = engine(checkpoint("lfm2"))
    expected = run(alone, requests, Story())
    alone.core.close()
    assert not expected.preemptions
    refused = refuse_growth(monkeypatch, lambda: ranked.core.scheduler.running)
    ranked = engine(checkpoint("lfm2"), peers=two)
    story = run(ranked, requests, Story())
    ranked.core.close()
    assert story.preemptions >= len(refused) > 0
    assert story.tokens == expected.tokens


def test_steps_that_are_planned_ahead(two: Peers) -> None:
    """Overlap: rank 0 sends the tokens that a plan does not know yet."""
    alone = whole_story(engine(checkpoint("granite")))
    assert whole_story(engine(checkpoint("granite"), peers=two, overlap="on")).tokens == alone.tokens


def test_windows_of_drafts(two: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends how many drafts were right: some, none, or all."""
    requests = {"a": (prompt(50, 1), replace(GREEDY, max_tokens=40))}
    alone = engine(checkpoint("qwen3_5"))
    expected = run(alone, requests, Story())
    alone.core.close()
    drafter = AnswerDrafter("random", dict.fromkeys(range(4), expected.tokens["a"]), VOCAB_SIZE)
    monkeypatch.setattr(assembly, "make_drafter", lambda *more: drafter)
    ranked = engine(checkpoint("qwen3_5"), peers=two, speculate="suffix")
    story = run(ranked, requests, Story())
    ranked.core.close()
    assert 0 < drafter.accepted < drafter.drafted
    assert story.tokens == expected.tokens


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_sleep_and_wake(level: int, two: Peers) -> None:
    requests = {"a": (prompt(40, 1), GREEDY)}
    assembled = engine(checkpoint("lfm2"), peers=two)
    before = run(assembled, requests, Story())
    executor = assembled.core.executor
    assembled.core.flush_cache()
    for part in executor.sleep(level):
        executor.wake(part)
    after = run(assembled, {"b": requests["a"]}, Story())
    assembled.core.close()
    assert after.tokens["b"] == before.tokens["a"]


def test_ranks_read_other_weights_together(two: Peers, tmp_path: Path) -> None:
    """Each rank reads its share of the new files, and the answer is that of one rank on them."""
    requests = {"a": (prompt(40, 1), GREEDY)}
    other = Path(shutil.copytree(checkpoint("lfm2"), tmp_path / "other"))
    change_one_element(other)
    alone = engine(other)
    expected = run(alone, requests, Story())
    alone.core.close()
    assembled = engine(checkpoint("lfm2"), peers=two)
    before = run(assembled, {"before": requests["a"]}, Story())
    Sleeper(assembled.core).refit(str(other), "other")
    after = run(assembled, requests, Story())
    weights = assembled.core.weights
    assembled.core.close()
    assert (weights.version, weights.updates) == ("other", 1)
    assert after.cached_tokens["a"] == 0
    assert after.tokens["a"] == expected.tokens["a"]
    assert after.distance(expected) < TOLERANCE * max(1.0, _size(expected))
    first = min(position for _, position in after.logits)
    assert not torch.equal(after.logits["a", first], before.logits["before", first])


def _size(story: Story) -> float:
    return max(float(row.abs().max()) for row in story.logits.values())
