"""Weights that are packed straight from the file, or mapped from ``--weights-cache``, change no logit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.packed_weights import pack_small_weights, stored_in_bfloat16
from tests.oracle.test_twelve_bit_weights import FORM, logits_of
from weft.api import Engine
from weft.errors import CheckpointError
from weft.models import reader
from weft.models.loading import load_model
from weft.models.weights_cache import WeightsCache


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_small_weights(monkeypatch)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return stored_in_bfloat16("qwen3_5", tmp_path / "model")


def test_experts_are_packed_from_the_map_and_from_the_cache_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stored_in_bfloat16("qwen3_5_moe", tmp_path / "model")
    first, second = (
        load_model(directory, "bfloat16", weights_cache=WeightsCache(tmp_path / "cache", "key")) for _ in range(2)
    )
    expected = logits_of(first)
    assert torch.equal(logits_of(second), expected)
    monkeypatch.setattr(reader.TensorReader, "_serves_by_rows", lambda self, tensor: False)
    copied = load_model(directory, "bfloat16")
    assert copied.weights_bytes == first.weights_bytes
    assert torch.equal(logits_of(copied), expected)


def test_packing_from_the_map_gives_the_bits_of_a_copy(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, calls = load_model(stored, "bfloat16"), []
    monkeypatch.setattr(reader.TensorReader, "_serves_by_rows", lambda self, tensor: calls.append(tensor) is not None)
    copied = load_model(stored, "bfloat16")
    assert len(calls) > 10
    assert packed.weights_form == copied.weights_form
    assert torch.equal(logits_of(packed), logits_of(copied))


def test_nan_in_a_packed_matrix_is_refused_by_its_name(stored: Path) -> None:
    [file] = stored.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name][3, 5] = torch.nan
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"tensor {name} has NaN"):
        load_model(stored, "bfloat16")


def test_an_engine_answers_alike_from_the_cache(stored: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"

    def answer() -> tuple[list[int], bool]:
        with Engine(
            str(stored), dtype="bfloat16", memory="16MB", max_model_len=128, threads=1, weights_cache=str(directory)
        ) as engine:
            done = engine.generate([list(range(3, 60))], progress=False, max_tokens=12, temperature=0.0)
            words = next(row.remark for row in engine.info.memory if row.name == "weights")
            return done[0].tokens, FORM in words

    first = answer()
    files = list(directory.iterdir())
    assert len(files) == first[1]
    written = [file.stat().st_mtime_ns for file in files]
    assert answer() == first
    assert [file.stat().st_mtime_ns for file in directory.iterdir()] == written
    [file] = stored.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name][3, 5] *= -1
    save_file(tensors, file)
    answer()
    assert len(list(directory.iterdir())) == 2 * len(files), "other weights took the file of these"
