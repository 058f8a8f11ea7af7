"""A head in the files that differs from the embedding is the head, whatever ``tie_word_embeddings`` says; and tensors
that follow from config.json are those that it leads to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint, load_reference
from tests.oracle.model_driver import ModelDriver
from weft.errors import CheckpointError
from weft.models.loading import LoadedModel, load_model

TOKENS = [5, 17, 400, 33, 8, 91, 91, 260]


def with_head(source: str, directory: Path, *, gain: float = 0.0, last_row: float = 0.0) -> Path:
    """A copy of a tied checkpoint that stores its head: the embedding, changed by an adapter that was merged."""
    copy_checkpoint(checkpoint(source), directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    head += gain * torch.randn(head.shape, generator=torch.Generator().manual_seed(3))
    head[-1] += last_row
    save_file(tensors | {"lm_head.weight": head}, path, metadata={"format": "pt"})
    return directory


def logits(loaded: LoadedModel) -> torch.Tensor:
    [rows] = ModelDriver(loaded.model, sequences=1, length=16).step((0, TOKENS))
    return rows


@torch.inference_mode()
def truth(directory: Path) -> torch.Tensor:
    return load_reference(directory)(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("change", [{"gain": 0.1}, {"last_row": 0.5}])
@pytest.mark.parametrize("source", ["qwen3_tied", "lfm2"])
def test_a_merged_head_is_used_as_transformers_uses_it(source: str, change: dict[str, float], tmp_path: Path) -> None:
    merged = with_head(source, tmp_path / "merged", **change)
    loaded = load_model(merged)
    assert (logits(loaded) - truth(merged)).abs().max() < 1e-4
    assert loaded.warnings == ()
    tied = load_model(checkpoint(source))
    assert (logits(tied) - truth(merged)).abs().max() > 1e-2, "the control: the embedding is not that head"
    assert loaded.weights_bytes == tied.weights_bytes + loaded.model.embedding.nbytes  # type: ignore[union-attr]


def test_a_wrapper_that_says_tied_does_not_drop_the_head_of_its_text_part(tmp_path: Path) -> None:
    """vllm #51063: the wrapper's default is tied, the text part is not, and the file has a head."""
    directory = copy_checkpoint(checkpoint("qwen3_5"), tmp_path / "wrapped")
    path = directory / "config.json"
    text = json.loads(path.read_text())
    assert text["tie_word_embeddings"] is False
    path.write_text(json.dumps({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}))
    assert torch.equal(logits(load_model(directory)), logits(load_model(checkpoint("qwen3_5"))))


def test_a_stored_copy_of_the_embedding_stays_one_matrix(tmp_path: Path) -> None:
    tied, copy = load_model(checkpoint("qwen3_tied")), load_model(with_head("qwen3_tied", tmp_path / "copy"))
    assert copy.weights_bytes == tied.weights_bytes
    assert torch.equal(logits(copy), logits(tied))


@pytest.mark.parametrize(
    ("family", "tensor", "keys"),
    [
        ("qwen4_exp", "layers.0.ple.ple_embedding.layer_multipliers", "seed"),
        ("qwen4_exp", "layers.2.ple.ple_embedding.ngram_heads_offsets", "ngram_vocab_size_base"),
        ("minimax", "layers.0.self_attn.slope_rate", "num_attention_heads"),
    ],
)
def test_a_stored_tensor_that_config_json_contradicts_is_refused(
    family: str, tensor: str, keys: str, tmp_path: Path
) -> None:
    """transformers computes with the stored one, and weft with the one of config.json."""
    directory = tmp_path / family
    copy_checkpoint(checkpoint(family), directory)
    load_model(directory, "float32")
    file = directory / "model.safetensors"
    stored = load_file(file)
    [name] = [name for name in stored if name.endswith(tensor)]
    save_file(stored | {name: stored[name] * 2}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{tensor} has other values than config.json leads to \({keys}"):
        load_model(directory, "float32")
