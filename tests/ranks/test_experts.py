"""Experts over ranks by their number: uneven shares, a step in which a rank has no token, a wrong share."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.ranks.engines import engine, whole_story
from tests.ranks.threads import load_ranks, logits_of
from weft.engine.stats import EngineStats
from weft.errors import ConfigError
from weft.families import read_architecture
from weft.families.rank_place import RankPlace
from weft.families.sharding import rank_architecture
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.loading import load_model
from weft.models.rank_share import RankShare, Summed
from weft.planning.weights import count_weights, form_of
from weft.ranks.peers import Peers
from weft.server.edge import EdgeLimits, HttpEdge
from weft.server.metrics import EngineReport, FleetReport, Metrics

TOLERANCE = 1e-5


def distance(family: str, size: int) -> float:
    expected = logits_of([load_model(checkpoint(family))])
    ranks = load_ranks(checkpoint(family), size, by_expert=True)
    gap = (logits_of(ranks) - expected).abs().max()
    assert all(sum(rank.model.expert_choices()) for rank in ranks), "choices are counted"
    return float(gap / expected.abs().max())


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("granite_moe", 4),
        ("kimi_linear", 4),
        ("kimi_k3", 2),
        ("nemotron_h_latent", 2),
        ("qwen3_moe", 4),
        ("lfm2_moe", 4),
        ("jamba", 4),
        ("qwen3_5_moe", 2),
        ("interns2_mobius", 2),
        ("longcat_flash", 4),
        ("muse_spark", 2),
        ("nemotron_h_moe", 2),
    ],
)
def test_experts_by_number(family: str, size: int) -> None:
    """Six experts on four ranks; experts in one tensor and one by one; a latent width; shared experts."""
    assert distance(family, size) < TOLERANCE


def test_a_wrong_share_of_experts_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: ranks that take the experts of their neighbour for their own."""
    experts = RankShare.experts

    def one_before(share: RankShare, count: int) -> range:
        own = experts(share, count)
        return range(own.start - 1, own.stop - 1) if own.start else own

    monkeypatch.setattr(RankShare, "experts", one_before)
    assert distance("qwen3_5_moe", 2) > 0.01


def test_a_rank_without_a_token_adds_nothing() -> None:
    """Most steps of one decode: its two experts lie on one of four ranks, or on two."""
    ranks = load_ranks(checkpoint("kimi_linear"), 4, by_expert=True)
    empty = 0
    for rank in ranks:
        summed = rank.model.layers[-1].feed_forward
        assert isinstance(summed, Summed)
        block = summed.block
        assert isinstance(block, ExpertsBlock)
        block.shared = None
        x_TD = torch.linspace(-1, 1, 64)[None]
        chosen = set(block.route(x_TD)[1].flatten().tolist())
        y_TD = block(x_TD)
        if not chosen.intersection(block.own or range(0)):
            empty += 1
            assert not y_TD.any()
        else:
            assert y_TD.abs().max() > 0
    assert 2 <= empty <= 3


def test_experts_through_the_engine(two: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """/metrics has each choice of the router, whichever rank has the expert. Rank 0 has experts 0 to 3. Some
    layers of some steps choose none of these, and some choose only these."""
    alone = whole_story(engine(checkpoint("qwen3_next")))
    routed, route = list[list[int]](), ExpertsBlock.route

    def counted(block: ExpertsBlock, *x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TX, ids_TX = route(block, *x)
        routed.append(ids_TX[ids_TX >= 0].tolist())
        return weights_TX, ids_TX

    monkeypatch.setattr(ExpertsBlock, "route", counted)
    assembled = engine(checkpoint("qwen3_next"), peers=two, ep=True)
    routed.clear()
    assert assembled.core.stats().ranks.expert_choices == [0] * 8
    ranked = whole_story(assembled)
    assert ranked.tokens == alone.tokens
    stats = assembled.core.stats()
    assert stats.ranks.size == 2
    assert stats.ranks.collective_s > 0
    chosen = Counter(expert for choices in routed for expert in choices)
    assert stats.ranks.expert_choices == [chosen[expert] for expert in range(8)]
    assert sum(chosen.values()) == sum(map(len, routed)) > 2 * stats.computed_tokens
    assert any(max(choices) < 4 for choices in routed), "the other rank has no token"
    assert any(min(choices) >= 4 for choices in routed), "rank 0 has no token"
    lines = metrics_of(stats)
    assert 'weft:ranks{engine="3",model_name="tiny"} 2.0' in lines
    assert [
        f'weft:expert_choices_total{{engine="3",expert="{expert}",model_name="tiny"}} {float(count)}'
        for expert, count in enumerate(stats.ranks.expert_choices)
    ] == [line for line in lines if line.startswith("weft:expert_choices_total{")]


def metrics_of(stats: EngineStats) -> list[str]:
    """What /metrics says of them, as those of replica 3."""
    metrics = Metrics("weft", HttpEdge(EdgeLimits()))
    return metrics.text([FleetReport("tiny", [EngineReport(3, True, 0, stats)], 0, 0)]).decode().splitlines()


def test_bytes_of_a_rank_are_those_of_the_plan() -> None:
    """Within 1 %: what the plan says of ``--tp 2 --ep``, and what a rank holds."""
    config = json.loads((checkpoint("qwen3_5_moe") / "config.json").read_text())
    whole = read_architecture(config)
    rank = rank_architecture(whole, 2, ep=True)
    planned = count_weights(whole, rank, 2, form_of(config, whole.dtype, None)).rank_bytes
    for loaded in load_ranks(checkpoint("qwen3_5_moe"), 2, by_expert=True):
        assert loaded.weights_bytes == pytest.approx(planned, rel=0.01)


def test_shares_differ_by_one_at_most() -> None:
    assert [RankPlace(rank, 4).of_experts(6).count for rank in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("family", "tp", "message"),
    [
        ("qwen3_5", 2, "--ep divides experts over ranks, and this model has none"),
        ("granite_moe", 8, "--tp is 8 with --ep, and this model has 6 experts; use --tp 6 or less"),
    ],
)
def test_what_experts_do_not_divide_is_refused(family: str, tp: int, message: str) -> None:
    architecture = read_architecture(json.loads((checkpoint(family) / "config.json").read_text()))
    with pytest.raises(ConfigError, match=message):
        rank_architecture(architecture, tp, ep=True)
