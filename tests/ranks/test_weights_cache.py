"""``--weights-cache`` under ranks: each rank packs and maps its own part, and no logit changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures.packed_weights import pack_small_weights, packs_twelve_bits, stored_in_bfloat16
from tests.ranks.threads import load_ranks, logits_of
from weft.models.reader import TensorReader
from weft.models.weights_cache import WeightsCache


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_small_weights(monkeypatch)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return stored_in_bfloat16("qwen3_5", tmp_path / "model")


def test_each_rank_maps_its_own_part(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def caches() -> list[WeightsCache]:
        return [WeightsCache(tmp_path / "cache", f"rank{rank}") for rank in range(2)]

    first = caches()
    if not packs_twelve_bits():
        load_ranks(stored, 2, dtype="bfloat16", caches=first)
        assert not list((tmp_path / "cache").glob("*.weft")), "a cache without packed matrices"
        return
    written = logits_of(load_ranks(stored, 2, dtype="bfloat16", caches=first))
    sizes = [(tmp_path / "cache" / f"rank{rank}.weft").stat().st_size for rank in range(2)]
    second = caches()
    mapped = logits_of(load_ranks(stored, 2, dtype="bfloat16", caches=second))
    assert not any(cache.is_mapped for cache in first)
    assert all(cache.is_mapped for cache in second)
    assert torch.equal(mapped, written)
    [whole] = load_ranks(stored, 1, dtype="bfloat16", caches=[WeightsCache(tmp_path / "cache", "whole")])
    assert whole.weights_bytes
    whole_bytes = (tmp_path / "cache" / "whole.weft").stat().st_size
    assert all(0.4 * whole_bytes < size < 0.75 * whole_bytes for size in sizes)
    monkeypatch.setattr(TensorReader, "_serves_by_rows", lambda reader, tensor: False)
    assert torch.equal(logits_of(load_ranks(stored, 2, dtype="bfloat16")), written)
