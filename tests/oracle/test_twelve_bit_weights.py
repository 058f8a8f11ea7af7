"""Weights in 12 bits change no logit by a bit, in prompts, decodes and the embedding alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.packed_weights import pack_small_weights, packs_twelve_bits, stored_in_bfloat16
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import prompt
from weft.models.loading import LoadedModel, load_model
from weft.models.safetensors_header import StoredTensor
from weft.models.sharding import Shard
from weft.models.stored_values import MappedFiles
from weft.tensor.weights.tiles import TwelveBitWeight

FAMILIES = ["lfm2", "qwen3_5", "granite", "falcon_h1", "jamba", "qwen3_5_moe"]
FORM = "bfloat16 in 12 bits"


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_small_weights(monkeypatch)


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    """A prompt on its own, then another beside decodes, then decodes alone."""
    driver, made = ModelDriver(loaded.model, sequences=2, length=96), []
    made += driver.step((0, prompt(40, seed=1)))
    made += driver.step((0, [7]), (1, prompt(33, seed=2)))
    for token in range(3):
        made += driver.step((0, [token]), (1, [token + 5]))
    return torch.cat(made)


@pytest.mark.parametrize("name", FAMILIES)
def test_twelve_bit_weights_change_no_bit_of_a_logit(name: str) -> None:
    made, plain = (load_model(checkpoint(name), "bfloat16", twelve_bit=packed) for packed in (True, False))
    assert (FORM in made.weights_form) == packs_twelve_bits()
    assert FORM not in plain.weights_form
    assert torch.equal(logits_of(made), logits_of(plain))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_large_matrices_are_packed_where_they_lie_in_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined ones with small parts and with rows in another order too: no copy of a projection is made."""
    copied: list[str] = []
    read = MappedFiles.read

    def noted(files: MappedFiles, stored: StoredTensor, shard: Shard | None = None) -> torch.Tensor:
        copied.append(stored.name)
        return read(files, stored, shard)

    monkeypatch.setattr(MappedFiles, "read", noted)
    directory = stored_in_bfloat16(name, tmp_path / "model")
    for twelve_bit in (True, False):
        copied.clear()
        load_model(directory, "bfloat16", twelve_bit=twelve_bit)
        large = [one for one in copied if "in_proj_qkv" in one or "q_proj" in one]
        assert (not large) == (twelve_bit and packs_twelve_bits()), large


def test_a_wrong_bit_of_a_twelve_bit_weight_shows() -> None:
    """The control: the embedding, which is the head as well."""
    if not packs_twelve_bits():
        return  # no weight is in 12 bits here
    made, plain = (load_model(checkpoint("lfm2"), "bfloat16", twelve_bit=packed) for packed in (True, False))
    table = made.model.embedding
    assert isinstance(table, TwelveBitWeight)
    with torch.inference_mode():
        table.units[..., 0, :] ^= 0x40
    assert not torch.equal(logits_of(made), logits_of(plain))
