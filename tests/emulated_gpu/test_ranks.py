"""Two ranks with a card each, in processes of their own: tokens of transformers, and no report of either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import answers, assert_tokens_of_transformers, started
from tests.emulated_gpu.rank_process import MODULE
from tests.emulated_gpu.sample import sample
from tests.fixtures.checkpoints import checkpoint
from weft.ranks import peers as rank_peers
from weft.ranks.peers import Peers

PROMPTS = [list(range(3, 23)), [300, 20, 411]]


@pytest.fixture(scope="module")
def two() -> Iterator[Peers]:
    with mock.patch.object(rank_peers, "RANK_PROCESS", MODULE):
        peers = Peers(2, 120.0)
    yield peers
    peers.close()


@pytest.mark.parametrize("family", sample(["qwen3_5", "qwen3"], 1))
def test_two_ranks_answer_as_transformers_does_and_nothing_is_reported(family: str, two: Peers) -> None:
    checkpoint(family)
    with emulated() as card, started(card, family, peers=two, tp=2, rank_timeout=120.0) as engine:
        made = answers(engine.core, PROMPTS)
        made += answers(engine.core, PROMPTS[:1], name="again")
        assert card.replays
    assert not card.reports, [str(report) for report in card.reports]
    assert_tokens_of_transformers(family, [*PROMPTS, PROMPTS[0]], made)


def test_both_ranks_load_and_store_out_of_memory_that_was_pinned_at_the_start(
        two: Peers, tmp_path: Path) -> None:
    """Fault 6: with memory that is not pinned each copy of rank 1 waits, which is a report."""
    family, prompt = "qwen3_5", list(range(3, 69))
    checkpoint(family)
    made = []
    for _ in range(2):
        with emulated() as card, started(card, family, peers=two, tp=2, rank_timeout=120.0,
                                         store=str(tmp_path)) as engine:
            made += answers(engine.core, [prompt])
            engine.core.write_all(20.0)
            assert engine.core.store is not None
            restored = engine.core.store.stats().restores.restored_tokens
            made += answers(engine.core, PROMPTS[1:], name="then")   # rank 1 says with it what it has noticed
        assert not card.reports, [str(report) for report in card.reports]
    assert restored >= 48
    assert made[:2] == made[2:]
    assert_tokens_of_transformers(family, [prompt], made[:1])
