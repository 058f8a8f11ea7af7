"""Head scales of fp8: powers of two, from the checkpoint or from the model's own keys and values."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint
from weft.errors import CheckpointError
from weft.models.loading import load_model
from weft.runner.kv_scales import FP8_MAX, HEADROOM, head_scales


def with_tensors(directory: Path, name: str, **more: torch.Tensor) -> Path:
    """Checkpoint ``name`` with more tensors in its file; those that are there are multiplied."""
    shutil.copytree(checkpoint(name), directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for key, value in more.items():
        tensors[key] = tensors[key] * value if key in tensors else value
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def is_power_of_two(x: torch.Tensor) -> bool:
    return bool((x.log2() == x.log2().round()).all())


@pytest.mark.parametrize("name", ["qwen3", "granite", "kimi_linear", "mistral"])
def test_what_a_model_says_of_itself_fits_with_room_above(name: str) -> None:
    loaded = load_model(checkpoint(name))
    found = head_scales(loaded.model, {})
    assert sorted(found) == [i for i, layer in enumerate(loaded.spec.layers) if layer.cached_heads]
    for layer, scales in found.items():
        assert is_power_of_two(scales)
        kept = loaded.spec.layers[layer]
        assert scales.shape == (1 + kept.has_values, kept.cached_heads)
    again = head_scales(loaded.model, {})
    assert all(torch.equal(found[layer], again[layer]) for layer in found)


def test_values_of_another_size_get_another_scale_and_nothing_else_does(tmp_path: Path) -> None:
    key = "model.layers.1.self_attn.v_proj.weight"
    plain = head_scales(load_model(checkpoint("qwen3")).model, {})
    directory = with_tensors(tmp_path / "m", "qwen3", **{key: torch.tensor(2.0**-6)})
    small = head_scales(load_model(directory).model, {})
    assert torch.equal(small[1][1], plain[1][1] * 2.0**-6)
    assert torch.equal(small[1][0], plain[1][0])
    assert torch.equal(small[0], plain[0])


def test_scales_of_the_checkpoint_are_taken_rounded_up(tmp_path: Path) -> None:
    directory = with_tensors(
        tmp_path / "m",
        "qwen3",
        **{
            "model.layers.0.self_attn.k_scale": torch.tensor(0.3),
            "model.layers.0.self_attn.v_scale": torch.tensor([0.25, 5.0]),
            "model.layers.0.self_attn.q_scale": torch.tensor(3.0),
            "model.layers.2.self_attn.k_proj.output_scale": torch.tensor([1.0]),
            "model.layers.2.self_attn.v_proj.output_scale": torch.tensor([0.01]),
            "model.layers.3.self_attn.k_scale": torch.tensor(9.0),
        },
    )
    loaded = load_model(directory)
    assert not any("scale" in warning for warning in loaded.warnings)
    assert sorted(loaded.kv_scales) == [0, 2], "a layer with one of two scales is measured"
    found = head_scales(loaded.model, loaded.kv_scales)
    assert found[0].tolist() == [[0.5, 0.5], [0.25, 8.0]]
    assert found[2].tolist() == [[1.0, 1.0], [2.0**-6, 2.0**-6]]
    assert torch.equal(found[1], head_scales(loaded.model, {})[1])


def test_a_scale_of_a_shape_that_no_head_has_is_named(tmp_path: Path) -> None:
    directory = with_tensors(tmp_path / "m", "qwen3", **{"model.layers.0.self_attn.k_scale": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"k_scale holds 3 scales for 2 KV heads"):
        load_model(directory)


def test_a_head_that_says_nothing_has_scale_one(tmp_path: Path) -> None:
    key = "model.layers.1.self_attn.v_proj.weight"
    directory = with_tensors(tmp_path / "m", "qwen3", **{key: torch.tensor(0.0)})
    found = head_scales(load_model(directory).model, {})
    assert found[1][1].tolist() == [1.0, 1.0]
    assert HEADROOM < FP8_MAX
