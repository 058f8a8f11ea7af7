"""Shards by table, and that a wrong one shows. Right ones: ``test_every_family``."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.ranks.threads import load_ranks, logits_of
from weft.errors import CheckpointError, ConfigError
from weft.families import read_architecture
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.short_conv import ShortConv
from weft.families.rank_place import RankPlace, ShardSpan
from weft.families.sharding import rank_architecture
from weft.families.tensors import Tensor
from weft.models import weights
from weft.models.loading import load_model
from weft.models.sharding import Shard, shard_of

TOLERANCE = 1e-5


def distance(family: str, size: int) -> float:
    """Of the logits of ``size`` ranks from those of one, relative to the largest."""
    expected = logits_of([load_model(checkpoint(family))])
    gap = (logits_of(load_ranks(checkpoint(family), size)) - expected).abs().max()
    return float(gap / expected.abs().max())


def test_a_kv_head_by_modulo_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: two KV heads on four ranks, rank 1 with head 1 in place of head 0."""
    of_units = RankPlace.of_units

    def by_modulo(place: RankPlace, own: int, width: int = 1, copies: int = 1) -> ShardSpan:
        if copies == 1:
            return of_units(place, own, width)
        heads = place.size // copies
        return ShardSpan(heads * width, place.rank % heads * width, width)

    monkeypatch.setattr(RankPlace, "of_units", by_modulo)
    assert distance("qwen3", 4) > 0.05


def test_a_convolution_cut_as_one_block_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rank 0 with the first half of all channels, as if they were one part."""
    right = weights.shard_of

    def one_span(tensor: Tensor, place: RankPlace) -> Shard | None:
        shard = right(tensor, place)
        if shard is None or not tensor.name.startswith("conv1d"):
            return shard
        return Shard(shard.dim, ((place.rank * shard.count, shard.count),), shard.total)

    monkeypatch.setattr(weights, "shard_of", one_span)
    assert distance("qwen3_5", 2) > 0.05


def test_a_tensor_that_is_wrongly_read_whole_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = weights.shard_of
    monkeypatch.setattr(
        weights, "shard_of", lambda tensor, place: None if tensor.name == "up_proj.weight" else right(tensor, place)
    )
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight has shape"):
        load_ranks(checkpoint("qwen3_5"), 2)


def test_fused_projections_are_divided_by_part() -> None:
    """Rank 1 of 2: the second half of q, of k and of v."""
    config = json.loads((checkpoint("qwen3_5") / "config.json").read_text())
    [delta] = {
        mixer for mixer in rank_architecture(read_architecture(config), 2).mixers if isinstance(mixer, GatedDelta)
    }
    fused, *_ = delta.table(64)["project"]
    shard = shard_of(fused, RankPlace(1, 2))
    assert (fused.name, shard) == ("in_proj_qkv.weight", Shard(0, ((16, 16), (48, 16), (96, 32)), 128))
    assert shard is not None
    assert shard.of_rank((128, 64)) == fused.shape(RankPlace(1, 2)) == (64, 64)


def test_the_bias_of_a_sum_is_the_first_ranks() -> None:
    [bias] = ShortConv(32, 3, bias=True).table(64)["out.bias"]
    assert shard_of(bias, RankPlace(0, 2)) is None
    other = shard_of(bias, RankPlace(1, 2))
    assert other is not None
    assert other.absent


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    divide = partial(rank_architecture, tp=3)
    with pytest.raises(ConfigError, match=r"--tp is 3.*it may be 1, 2, 4"):
        divide(read_architecture(json.loads((checkpoint("qwen3") / "config.json").read_text())))


def test_a_sum_of_many_rows_is_the_sum_of_few() -> None:
    """The tables aside: what a vocabulary of uneven shares looks like."""
    parts = [RankPlace(rank, 3).of_tokens(512) for rank in range(3)]
    assert [(part.begin, part.count) for part in parts] == [(0, 171), (171, 171), (342, 170)]
    assert torch.arange(512).tensor_split(3)[0].numel() == 171
