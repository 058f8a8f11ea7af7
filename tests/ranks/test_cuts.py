"""Cuts of names and parts, and that a wrong cut shows. Right ones: ``test_every_family``."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.ranks.threads import load_ranks, logits_of
from weft.errors import CheckpointError, ConfigError
from weft.families import read_architecture
from weft.models.cuts import Cutter, Part, RankPlace, StoredCut, lookup
from weft.models.cuts.tables import Cut
from weft.models.loading import load_model
from weft.planning.ranks import rank_architecture

TOLERANCE = 1e-5


def distance(family: str, size: int) -> float:
    """Of the logits of ``size`` ranks from those of one, relative to the largest."""
    expected = logits_of([load_model(checkpoint(family))])
    gap = (logits_of(load_ranks(checkpoint(family), size)) - expected).abs().max()
    return float(gap / expected.abs().max())


def test_a_kv_head_by_modulo_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: two KV heads on four ranks, rank 1 with head 1 in place of head 0."""
    def by_modulo(place: RankPlace, units: int, width: int = 1) -> Part:
        if units >= place.size:
            return place.even(units, width)
        return Part(units * width, place.rank % units * width, width)

    monkeypatch.setattr(RankPlace, "copied", by_modulo)
    assert distance("qwen3", 4) > 0.05


def test_a_convolution_cut_as_one_block_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rank 0 with the first half of all channels, as if they were one part."""
    def one_span(cut: Cut, stored: StoredCut, place: RankPlace) -> StoredCut:
        if cut.axis != "channels":
            return stored
        return StoredCut(stored.dim, ((place.rank * stored.count, stored.count),), stored.total)

    stored_cut = Cutter.stored_cut

    def wrong(cutter: Cutter, name: str, shape: tuple[int, ...], piece: object = None) -> StoredCut | None:
        stored = stored_cut(cutter, name, shape)
        return None if stored is None else one_span(cutter.cut(name), stored, cutter.place)

    monkeypatch.setattr(Cutter, "stored_cut", wrong)
    assert distance("qwen3_5", 2) > 0.05


def test_a_tensor_without_a_cut_is_an_error() -> None:
    config = json.loads((checkpoint("qwen3_5") / "config.json").read_text())
    cutter = Cutter.of(read_architecture(config), RankPlace(0, 2))
    with pytest.raises(CheckpointError, match=r"no cut for tensor layers\.0\.mlp\.mystery\.weight"):
        cutter.cut("layers.0.mlp.mystery.weight")


def test_fused_projections_are_cut_by_part() -> None:
    """Rank 1 of 2: the second half of q, of k and of v."""
    config = json.loads((checkpoint("qwen3_5") / "config.json").read_text())
    cutter = Cutter.of(read_architecture(config), RankPlace(1, 2))
    cut = cutter.stored_cut("layers.0.linear_attn.in_proj_qkv.weight", (128, 64))
    assert cut == lookup.StoredCut(0, ((16, 16), (48, 16), (96, 32)), 128)
    assert cut.of_rank((128, 64)) == (64, 64)


def test_the_bias_of_a_sum_is_the_first_ranks() -> None:
    config = json.loads((checkpoint("lfm2_bias") / "config.json").read_text())
    cutters = [Cutter.of(read_architecture(config), RankPlace(rank, 2)) for rank in range(2)]
    name = "layers.0.conv.out_proj.bias"
    assert cutters[0].stored_cut(name, (64,)) is None
    other = cutters[1].stored_cut(name, (64,))
    assert other is not None
    assert other.absent


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    divide = partial(rank_architecture, tp=3)
    with pytest.raises(ConfigError, match=r"--tp is 3.*it may be 1, 2, 4"):
        divide(read_architecture(json.loads((checkpoint("qwen3") / "config.json").read_text())))


def test_a_sum_of_many_rows_is_the_sum_of_few() -> None:
    """The tables aside: what a vocabulary of uneven shares looks like."""
    parts = [RankPlace(rank, 3).uneven(512) for rank in range(3)]
    assert [(part.begin, part.count) for part in parts] == [(0, 171), (171, 171), (342, 170)]
    assert torch.arange(512).tensor_split(3)[0].numel() == 171
