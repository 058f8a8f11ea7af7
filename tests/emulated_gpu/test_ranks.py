"""Two ranks with a card each, in processes of their own: tokens of transformers, and no report of either."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import answers, assert_tokens_of_transformers, started
from tests.emulated_gpu.rank_process import MODULE
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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_two_ranks_answer_as_transformers_does_and_nothing_is_reported(family: str, two: Peers) -> None:
    checkpoint(family)
    with emulated() as card, started(card, family, peers=two, tp=2, rank_timeout=120.0) as engine:
        made = answers(engine.core, PROMPTS)
        made += answers(engine.core, PROMPTS[:1], name="again")
        assert card.replays
    assert not card.reports, [str(report) for report in card.reports]
    assert_tokens_of_transformers(family, [*PROMPTS, PROMPTS[0]], made)
