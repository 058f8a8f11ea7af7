"""A checkpoint that cannot be loaded says which file, which tensor, and what would be right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint, make_checkpoint
from weft.errors import CheckpointError, UnknownArchitectureError
from weft.models import loading
from weft.models.generation import read_generation_defaults
from weft.models.loading import load_model
from weft.models.safetensors_header import all_stored

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the qwen3_5 checkpoint, to break."""
    return copy_checkpoint(checkpoint("qwen3_5"), tmp_path / "broken")


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Apply ``change`` to the tensors of the single weights file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors")


def failure(directory: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    missing = [word for word in words if word not in caught.value.message]
    assert not missing, (missing, caught.value.message)
    assert caught.value.param == "model"
    return caught.value.message


def test_loading_tells_dtype_bytes_defaults_and_progress() -> None:
    seen: list[tuple[int, int]] = []
    loaded = load_model(checkpoint("qwen3_5"), on_progress=lambda done, total: seen.append((done, total)))
    assert loaded.spec == loaded.model.spec
    assert loaded.spec.dtype == "float32"
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == loaded.weights_bytes
    assert loaded.generation_defaults.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    assert len(loaded.generation_defaults.eos_ids) == 2
    assert loaded.warnings == ()


def test_auto_takes_the_dtype_of_the_configuration_whatever_is_stored(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    loaded = load_model(directory)
    assert loaded.spec.dtype == "float32"
    assert loaded.model.embedding.dtype == torch.float32
    assert load_model(directory, "bfloat16").model.embedding.dtype == torch.bfloat16


def test_auto_takes_the_stored_dtype_where_the_configuration_is_silent(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    silent = copy_checkpoint(directory, directory.parent / "silent", dtype=None)
    assert "dtype" not in json.loads((silent / "config.json").read_text())
    assert load_model(silent).spec.dtype == "bfloat16"


def test_a_missing_tensor_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop(UP))
    failure(directory, str(directory / "model.safetensors"), UP, "[96, 64]", "missing")


def test_a_mis_shaped_tensor_is_named_with_both_shapes(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({UP: tensors[UP][:90]}))
    failure(directory, str(directory / "model.safetensors"), UP, "[90, 64]", "[96, 64]")


def test_every_fault_is_reported_at_once_and_a_flood_is_cut(directory: Path) -> None:
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layernorm" in name])
    message = failure(directory, "layers.0.input_layernorm", "layers.1.input_layernorm")
    assert message.count(" is missing") == 8
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp." in name])
    failure(directory, "more like these")


def test_faults_are_found_before_any_weight_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*args: object, **kwargs: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(loading, "TensorReader", reading)
    rewrite(directory, lambda tensors: tensors.pop("model.norm.weight"))
    failure(directory, "model.norm.weight")
    with pytest.raises(AssertionError, match="was read"):  # the same trap on a good checkpoint
        load_model(checkpoint("qwen3_5"))


def test_a_missing_head_is_named_unless_it_is_tied(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    failure(directory, "lm_head.weight", "missing")
    model = load_model(copy_checkpoint(directory, directory.parent / "tied", tie_word_embeddings=True)).model
    assert model.head.weight is model.embedding


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(directory: Path, kept: int) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    failure(directory, str(path), "truncated")
    path.write_bytes(whole)
    load_model(directory)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", ["git-lfs pointer"]),
        (b"PK\x03\x04" + b"\xff" * 100, ["header claims"]),
        ((8).to_bytes(8, "little") + b"not json", ["header cannot be read"]),
        ((21).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}', ["header cannot be read"]),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(directory: Path, content: bytes, words: list[str]) -> None:
    (directory / "model.safetensors").write_bytes(content)
    failure(directory, "model.safetensors", *words)


def test_quantised_tensors_are_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)}))
    failure(directory, UP, "F8_E4M3", "quantised")


def test_a_directory_without_weights_or_with_old_ones_says_so(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    failure(directory, str(directory), "model.safetensors.index.json")
    (directory / "pytorch_model.bin").write_bytes(b"")
    failure(directory, ".bin", "safetensors")


@pytest.mark.parametrize(("content", "words"), [(None, ["missing"]), ("{", ["JSON"]), ("[1]", ["object"])])
def test_a_bad_config_json_is_named(directory: Path, content: str | None, words: list[str]) -> None:
    path = directory / "config.json"
    path.unlink() if content is None else path.write_text(content)
    failure(directory, str(path), *words)


def test_a_bad_generation_config_is_named_and_an_absent_one_falls_back(directory: Path) -> None:
    path = directory / "generation_config.json"
    path.write_text("{")
    failure(directory, str(path), "JSON")
    path.unlink()
    defaults = load_model(directory).generation_defaults
    assert (len(defaults.eos_ids), defaults.sampling) == (1, {})


@pytest.mark.parametrize(
    ("stated", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"temperature": 0.6}, 0.6),
        ({}, None),
    ],
)
def test_a_checkpoint_that_does_not_sample_is_greedy(
    directory: Path, stated: dict[str, object], temperature: float | None
) -> None:
    (directory / "generation_config.json").write_text(json.dumps(stated))
    assert read_generation_defaults(directory, {}).sampling.get("temperature") == temperature


def test_generation_settings_that_are_not_applied_are_named(directory: Path) -> None:
    stated = {
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [7],
        "num_beams": 1,
        "typical_p": 1.0,
        "bad_words_ids": None,
    }
    (directory / "generation_config.json").write_text(json.dumps(stated))
    [warning] = load_model(directory).warnings
    assert warning == "Not applied of generation_config.json: no_repeat_ngram_size, suppress_tokens."


def test_an_unknown_architecture_is_told_from_a_broken_checkpoint(directory: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match="ctrl"):
        load_model(copy_checkpoint(directory, directory.parent / "other", model_type="ctrl"))


def test_tensors_of_other_parts_are_ignored_and_strangers_are_reported(directory: Path) -> None:
    rewrite(
        directory,
        lambda tensors: tensors.update(
            {
                "mtp.fc.weight": torch.zeros(2),
                "model.visual.patch_embed.proj.weight": torch.zeros(2),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
            }
        ),
    )
    [skipped] = load_model(directory).warnings
    assert skipped == "Skipped the vision tower (1 tensor, 8 B): weft serves the text part of this model."
    rewrite(directory, lambda tensors: tensors.update({f"value_head.{i}": torch.zeros(2) for i in range(7)}))
    rewrite(
        directory,
        lambda tensors: tensors.update(
            {
                f"{name}.{i}.weight": torch.zeros(300)
                for i in range(3)
                for name in ("vision_tower.blocks", "model.multi_modal_projector", "model.audio_tower.layers")
            }
        ),
    )
    skipped, warning = load_model(directory).warnings
    assert "vision tower (7 tensors, 7.0 KiB) and the audio tower (3 tensors, 3.5 KiB)" in skipped
    assert "7 tensors are not used" in warning
    assert "value_head.0" in warning
    assert "2 more" in warning


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.lora_A.weight",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.4.input_layernorm.weight",
        "model.adapter.weight",
        "lm_head.bias",
    ],
)
def test_a_tensor_of_the_model_that_nothing_reads_is_refused_by_its_name(directory: Path, name: str) -> None:
    """An adapter that was not merged, a bias, a layer that config.json does not count: the model was trained with
    it. A bias of zeros, as quantisation tools write them, is none."""
    rewrite(directory, lambda tensors: tensors.update({name: torch.ones(64)}))
    assert "\n" not in failure(directory, str(directory / "model.safetensors"), "the model has no", name)
    if name.endswith("up_proj.bias"):
        rewrite(directory, lambda tensors: tensors.update({name: torch.zeros(96)}))
        assert "up_proj.bias" in str(load_model(directory).warnings)


def test_fewer_layers_than_the_files_have_are_refused(directory: Path) -> None:
    fewer = copy_checkpoint(
        directory, directory.parent / "fewer", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    failure(fewer, "the model has no", "model.layers.2.")


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_5", max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    whole, sharded = load_model(checkpoint("qwen3_5")).model, load_model(tmp_path).model
    for columns, one, other in (
        (64, whole.head, sharded.head),
        (
            96,
            whole.layers[3].feed_forward.down,  # type: ignore[attr-defined]
            sharded.layers[3].feed_forward.down,
        ),
    ):  # type: ignore[attr-defined]
        each_column = torch.eye(columns)
        assert torch.equal(one(each_column), other(each_column))


def test_a_fault_in_a_shard_names_the_shard(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_5", max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"][UP]
    tensors = load_file(shard)
    save_file(tensors | {UP: torch.zeros(3)}, shard)
    failure(tmp_path, str(shard), UP, "[3]", "[96, 64]")
    tensors.pop(UP)
    save_file(tensors, shard)
    failure(tmp_path, "index.json", UP, shard.name)
    shard.unlink()
    failure(tmp_path, str(shard), "missing", "index.json")


def test_of_two_sets_of_weights_the_complete_index_is_read(tmp_path: Path) -> None:
    """mlx-vlm 1464: a quantised model.safetensors next to the shards of the model."""
    make_checkpoint(tmp_path, "qwen3_5", max_shard_size="200KB")
    save_file({"another.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert any("model.safetensors is not read" in line for line in loaded.warnings)
    shard = tmp_path / json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"][UP]
    assert {tensor.name for tensor in all_stored(tmp_path)} >= {UP}, "plans count what is loaded"
    shard.unlink()  # the index of shards that one file replaced
    failure(tmp_path, str(tmp_path / "model.safetensors"), "missing")
    assert [tensor.name for tensor in all_stored(tmp_path)] == ["another.weight"]


def test_weights_in_one_file_of_another_name_are_found(directory: Path) -> None:
    shutil.move(directory / "model.safetensors", directory / "weights.safetensors")
    assert load_model(directory).weights_bytes == load_model(checkpoint("qwen3_5")).weights_bytes


def shared_blocks(directory: Path) -> tuple[str, str]:
    """Rewrite a Zamba2 checkpoint so that each layer with a shared block stores it; an original and its
    copy."""
    tensors = load_file(directory / "model.safetensors")
    first = next(name for name in tensors if ".shared_transformer.feed_forward.down_proj.weight" in name)
    layer = first.split(".shared_transformer")[0]
    config = json.loads((directory / "config.json").read_text())
    kinds = config.get("layers_block_type") or config["layer_types"]
    users = [number for number, kind in enumerate(kinds) if kind == "hybrid"]
    last = f"model.layers.{users[config.get('num_mem_blocks', 1)]}"
    rewrite(
        directory,
        lambda stored: stored.update(
            {
                last + name.removeprefix(layer): tensor.clone()
                for name, tensor in tensors.items()
                if name.startswith(f"{layer}.shared_transformer.")
            }
        ),
    )
    return first, last + first.removeprefix(layer)


def test_copies_of_a_shared_block_are_compared_and_left(tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("zamba2"), tmp_path / "copies")
    shared_blocks(directory)
    assert load_model(directory).warnings == ()


def test_a_copy_of_a_shared_block_that_differs_is_refused_by_both_names(tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("zamba2"), tmp_path / "differ")
    original, copy = shared_blocks(directory)
    rewrite(directory, lambda tensors: tensors[copy][0, :1].add_(1))
    failure(directory, original, copy, "copies differ")
    rewrite(directory, lambda tensors: tensors.update({copy: tensors[original][:1].clone()}))
    failure(directory, original, copy, "copies differ")


def test_keys_of_layers_that_share_those_of_others_may_be_stored(tmp_path: Path) -> None:
    """Releases of Gemma 4 have them, and their own configuration says that nothing uses them."""
    whole = copy_checkpoint(checkpoint("gemma4"), tmp_path / "whole")
    first, last = "model.layers.0.self_attn", "model.layers.5.self_attn"
    parts = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    rewrite(
        whole, lambda tensors: tensors.update({f"{last}.{part}": tensors[f"{first}.{part}"].clone() for part in parts})
    )
    assert load_model(whole).warnings == ()
    rewrite(whole, lambda tensors: tensors.update({f"{last}.o_proj.bias": torch.ones(64)}))
    failure(whole, "the model has no", f"{last}.o_proj.bias")
