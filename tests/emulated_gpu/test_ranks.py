"""Two ranks with a card each, in processes of their own: tokens of transformers, and no report of either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import answers, assert_tokens_of_transformers, started
from tests.emulated_gpu.rank_process import MODULE, UNPINNED
from tests.emulated_gpu.sample import ALL, sample
from tests.fixtures.checkpoints import checkpoint
from weft.ranks import peers as rank_peers
from weft.ranks.peers import Peers

LIMIT_S = 120.0
STORED, OTHERS = list(range(3, 69)), [[300, 20, 411], [7]]


@pytest.fixture(scope="module")
def two() -> Iterator[Peers]:
    with mock.patch.object(rank_peers, "RANK_PROCESS", MODULE):
        peers = Peers(2, LIMIT_S)
    yield peers
    peers.close()


def life(family: str, two: Peers, store: Path) -> tuple[list[list[int]], int]:
    """The answers to ``STORED``, and then to two prompts side by side; the tokens that were loaded."""
    with emulated() as card, started(card, family, peers=two, tp=2, rank_timeout=LIMIT_S, store=str(store)) as engine:
        made = answers(engine.core, [STORED])
        engine.core.write_all(20.0)
        assert engine.core.store is not None
        restored = engine.core.store.stats().restores.restored_tokens
        made += answers(engine.core, OTHERS, name="then")  # rank 1 says with it what it has noticed
        assert card.replays
    assert not card.reports, [str(report) for report in card.reports]
    return made, restored


@pytest.mark.parametrize("family", sample(["qwen3_5", "qwen3"], 1))
def test_two_ranks_answer_load_and_store_as_transformers_does_and_nothing_is_reported(
    family: str, two: Peers, tmp_path: Path
) -> None:
    """Two lives with one store."""
    checkpoint(family)
    made, _ = life(family, two, tmp_path)
    again, restored = life(family, two, tmp_path)
    assert restored >= 48
    assert made == again
    assert_tokens_of_transformers(family, [STORED, *OTHERS], made)


if ALL:

    def test_the_control_a_rank_that_pins_no_buffers_is_reported(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault 6: each copy of rank 1 waits."""
        checkpoint("qwen3")
        monkeypatch.setenv(UNPINNED, "1")
        monkeypatch.setattr(rank_peers, "RANK_PROCESS", MODULE)
        peers = Peers(2, LIMIT_S)
        try:
            with pytest.raises(Exception, match=r"rank 1 failed.* wait: a copy to the host at weft/runner/"):
                life("qwen3", peers, tmp_path)
        finally:
            peers.close()
