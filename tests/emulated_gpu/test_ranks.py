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

STORED, OTHERS = list(range(3, 69)), [[300, 20, 411], [7]]


@pytest.fixture(scope="module")
def two() -> Iterator[Peers]:
    with mock.patch.object(rank_peers, "RANK_PROCESS", MODULE):
        peers = Peers(2, 120.0)
    yield peers
    peers.close()


@pytest.mark.parametrize("family", sample(["qwen3_5", "qwen3"], 1))
def test_two_ranks_answer_load_and_store_as_transformers_does_and_nothing_is_reported(
        family: str, two: Peers, tmp_path: Path) -> None:
    """Two lives with one store, each then with two prompts side by side. Fault 6: with memory that is not
    pinned at the start each copy of rank 1 waits, which is a report."""
    checkpoint(family)
    made = []
    for _ in range(2):
        with emulated() as card, started(card, family, peers=two, tp=2, rank_timeout=120.0,
                                         store=str(tmp_path)) as engine:
            made += answers(engine.core, [STORED])
            engine.core.write_all(20.0)
            assert engine.core.store is not None
            restored = engine.core.store.stats().restores.restored_tokens
            made += answers(engine.core, OTHERS, name="then")   # rank 1 says with it what it has noticed
            assert card.replays
        assert not card.reports, [str(report) for report in card.reports]
    assert restored >= 48
    assert made[:3] == made[3:]
    assert_tokens_of_transformers(family, [STORED, *OTHERS], made[:3])
