"""``--weights-cache`` under ranks: each rank packs and maps its own part, and no logit changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint
from tests.ranks.threads import load_ranks, logits_of
from weft.models.reader import TensorReader
from weft.models.weights_cache import WeightsCache
from weft.tensor import native
from weft.tensor.weights import tiled
from weft.tensor.weights import twelve_bit as packing


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    native.choose("auto")
    monkeypatch.setattr(tiled, "TILED_ELEMENTS_MIN", 0)
    monkeypatch.setattr(packing, "TWELVE_BIT_SIZE_MIN", 0)
    monkeypatch.setattr(packing, "ODD_MOST", 0.1)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A checkpoint whose files are bfloat16."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_5"), directory)
    for file in directory.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    return directory


def test_each_rank_maps_its_own_part(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def caches() -> list[WeightsCache]:
        return [WeightsCache(tmp_path / "cache", f"rank{rank}") for rank in range(2)]

    first = caches()
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
    monkeypatch.setattr(TensorReader, "_packs", lambda reader, tensor: False)
    assert torch.equal(logits_of(load_ranks(stored, 2, dtype="bfloat16")), written)
