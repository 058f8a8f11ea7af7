"""Multimodal wrappers: the text part is served, and a line says that the rest is not read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import CHECKPOINTS, IM_END, _scale_of, checkpoint, tokenizer
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import TOLERANCE, prompt
from weft.errors import CheckpointError
from weft.families import read_architecture
from weft.models.loading import load_model

_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_EYES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}}
_PLACES = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}

WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("llama", {}, _EYES | {"image_size": 28, "patch_size": 14}),
    "internvl": ("qwen2", {}, _EYES | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "mistral3": ("ministral3", {}, _EYES | {"head_dim": 8, "image_size": 28, "patch_size": 14}),
    "idefics3": ("llama", {}, _EYES | {"image_size": 28, "patch_size": 14}),
    "qwen2_5_vl": ("qwen2", _SECTIONS, _QWEN_EYES),
    "gemma4_unified": (
        "gemma4_moe",
        {
            "model_type": "gemma4_unified_text",
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "hidden_size_per_layer_input": None,
        },
        {},
    ),
    "glm4v": ("glm4", _PLACES | {"model_type": "glm4v_text", "attention_bias": True, "head_dim": None}, _QWEN_EYES),
    "glm4v_moe": ("glm4_moe", _PLACES | {"model_type": "glm4v_moe_text", "use_qk_norm": False}, _QWEN_EYES),
    "qwen3_vl": ("qwen3", _SECTIONS, _QWEN_EYES | {"deepstack_visual_indexes": [0]}),
}
"""Wrapper -> (checkpoint whose text it has, changes to it, tiny vision tower)."""


def make(directory: Path, wrapper: str) -> transformers.PreTrainedModel:
    """Write a tiny checkpoint, and return it as transformers runs it."""
    name, changes, eyes = WRAPPERS[wrapper]
    model_type, settings = CHECKPOINTS[name]
    text = copy.deepcopy({"model_type": model_type} | settings | changes) | {"eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(wrapper, text_config=text, vision_config=eyes, tie_word_embeddings=False)
    config.dtype = "float32"
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _scale_of(parameter_name)(parameter, generator)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_text_of_a_wrapper_is_computed_as_transformers_does(wrapper: str, tmp_path: Path) -> None:
    theirs, tokens = make(tmp_path, wrapper), prompt(60)
    loaded = load_model(tmp_path)
    [logits] = ModelDriver(loaded.model, sequences=1, length=64).step((0, tokens))
    with torch.inference_mode():
        truth = theirs(input_ids=torch.tensor([tokens])).logits[0]
    assert (logits - truth).abs().max().item() < TOLERANCE
    said = "; ".join(loaded.warnings)
    assert "weft serves the text part of this model" in said or f"Of {wrapper} the text is served" in said, said


def test_a_wrapper_whose_text_is_something_else_is_refused() -> None:
    text = {"model_type": "gemma", **CHECKPOINTS["gemma"][1]}
    with pytest.raises(CheckpointError, match="model_type is 'paligemma': its prompts are read in both directions"):
        read_architecture({"model_type": "paligemma", "text_config": text})


@pytest.mark.parametrize(("wrapper", "name"), [("qwen2_5_omni", "qwen2"), ("qwen3_omni_moe", "qwen3_moe")])
def test_the_text_of_an_omni_model_is_that_of_its_thinker(wrapper: str, name: str, tmp_path: Path) -> None:
    source, tokens = checkpoint(name), prompt(40)
    config = json.loads((source / "config.json").read_text())
    thinker = {"model_type": f"{wrapper}_thinker", "text_config": config | {"model_type": f"{wrapper}_text"}}
    whole = {"model_type": wrapper, "thinker_config": thinker, "talker_config": {}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {f"thinker.{key}": value for key, value in load_file(source / "model.safetensors").items()}
    spoken = {"talker.model.norm.weight": torch.ones(8), "thinker.audio_tower.conv.weight": torch.ones(8)}
    save_file(tensors | spoken, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    [logits] = ModelDriver(loaded.model, sequences=1, length=48).step((0, tokens))
    [same] = ModelDriver(load_model(source).model, sequences=1, length=48).step((0, tokens))
    assert torch.equal(logits, same)
    assert "audio tower" in "; ".join(loaded.warnings)


def test_a_wrapper_that_nobody_knows_is_its_text() -> None:
    text = {"model_type": "qwen2", **CHECKPOINTS["qwen2"][1]}
    wrapper = {"model_type": "new_eyes", "vision_config": {"model_type": "new_tower"}, "eos_token_id": IM_END}
    assert read_architecture(wrapper | {"text_config": text}) == read_architecture(text)
