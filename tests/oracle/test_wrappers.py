"""Multimodal wrappers: the text part is served, and a line says that the rest is not read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import CHECKPOINTS, IM_END, _scale_of, checkpoint, tokenizer
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import TOLERANCE, prompt
from tests.ranks.threads import load_ranks, logits_of
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
    "glm_ocr": (
        "glm4",
        {
            "model_type": "glm_ocr_text",
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
            },
        },
        _QWEN_EYES,
    ),
    "hunyuan_vl": (
        "hunyuan",
        {
            "model_type": "hunyuan_vl_text",
            "rope_parameters": {
                "rope_type": "xdrope",
                "rope_theta": 1e4,
                "alpha": 3.0,
                "factor": 1.0,
                "xdrope_section": [8, 4, 4],
            },
        },
        _EYES | {"patch_size": 14, "text_hidden_size": 64, "out_hidden_size": 64},
    ),
    "paddleocr_vl": (
        "ernie4_5",
        {
            "model_type": "paddleocr_vl_text",
            "use_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
        },
        _EYES,
    ),
    "cosmos3_edge": (
        "llama",
        {
            "model_type": "cosmos3_edge_text",
            "hidden_act": "relu2",
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
        },
        _EYES,
    ),
    "hy_v4_vl": (
        "hy_v4",
        {
            "model_type": "hy_v4_vl_text",
            "rms_norm_eps": 0.03,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        _EYES | {"patch_size": 14, "text_hidden_size": 64, "out_hidden_size": 64},
    ),
    "minimax_m3_vl": ("minimax_m3_near", {}, _EYES | {"projection_dim": 16, "image_size": 28, "patch_size": 14}),
    "deepseek_ocr2": (
        "deepseek_v2",
        {
            "model_type": "deepseek_ocr2_text",
            "num_key_value_heads": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {
            "sam_config": _EYES
            | {"mlp_dim": 16, "image_size": 64, "downsample_channels": [16, 16], "output_channels": 16},
            "encoder_config": _EYES | {"num_key_value_heads": 2, "vocab_size": 8},
        },
    ),
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


_LLAMA = CHECKPOINTS["llama"][1] | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
_SMALL_HEADS = {"num_key_value_heads": 2, "num_hidden_layers": 2}
ALONE: dict[str, tuple[type[transformers.PreTrainedModel], dict[str, Any]]] = {
    "emu3_text_model": (transformers.Emu3ForCausalLM, _LLAMA),
    "mllama_text_model": (transformers.MllamaForCausalLM, _LLAMA | {"cross_attention_layers": [1, 3]}),
    "apertus1p5_text": (transformers.Apertus1p5TextForCausalLM, _LLAMA | {"output_vocab_size": 480}),
    "phi4_multimodal": (
        transformers.Phi4MultimodalForCausalLM,
        _LLAMA
        | {
            "vision_config": _EYES | {"image_size": 28, "patch_size": 14, "crop_size": 28},
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_blocks": 1,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 16,
                "nemo_conv_channels": 16,
                "input_size": 16,
                "depthwise_separable_out_channel": 16,
            },
        },
    ),
}
"""``model_type`` of a text with a class of its own, and its configuration."""


@pytest.mark.parametrize("model_type", ALONE)
def test_a_text_by_itself_has_the_logits_of_its_class(model_type: str, tmp_path: Path) -> None:
    kind, settings = ALONE[model_type]
    config = kind.config_class(**settings, dtype="float32")
    torch.manual_seed(0)
    theirs = kind._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            _scale_of(name)(parameter, generator)
    theirs.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded, tokens = load_model(tmp_path), prompt(60)
    driver = ModelDriver(loaded.model, sequences=1, length=64)
    [logits] = driver.step((0, tokens[:50]))
    logits = torch.cat([logits, *driver.step((0, tokens[50:]))])
    with torch.inference_mode():
        truth = theirs(input_ids=torch.tensor([tokens])).logits[0]
    known = truth.shape[1]
    assert (logits[:, :known] - truth).abs().max().item() < TOLERANCE
    assert (logits[:, known:] == float("-inf")).all(), "tokens that the head does not have"
    both, single = logits_of(load_ranks(tmp_path, 2)), logits_of([loaded])
    assert torch.equal(both.isinf(), single.isinf())
    assert (both[:, :known] - single[:, :known]).abs().max().item() < TOLERANCE


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


@pytest.mark.parametrize(
    ("name", "wrapper", "prefix", "other"),
    [
        (
            "lfm2",
            lambda text: {"model_type": "lfm_audio", "lfm": text, "codebooks": 8, "encoder": {"d_model": 16}},
            "lfm.",
            ["conformer.layers.0.norm_out.weight", "depth_embeddings.0.embedding.weight", "codebook_offsets"],
        ),
        (
            "dots3_note",
            lambda text: text | {"model_type": "dots3_note", "vision_config": {"depth": 2}},
            "model.",
            ["vision_encoder.blocks.0.norm_1.weight", "model.vision_encoder.adapter.proj.weight"],
        ),
        (
            "ling",
            lambda text: {"model_type": "bailing_moe_v3_vl", "text_config": text, "vision_config": {"depth": 2}},
            "model.",
            ["model.visual.blocks.0.norm1.weight", "model.linear_proj.0.weight"],
        ),
        (
            "gemma3n",
            lambda text: {
                "model_type": "gemma3n",
                "text_config": text,
                "audio_config": {},
                "tie_word_embeddings": False,
            },
            "model.language_model.",
            ["model.audio_tower.conformer.0.norm.weight", "model.embed_audio.embedding.weight"],
        ),
        (
            "muse_glimmer",
            lambda text: {"model_type": "muse_glimmer", "text_config": text, "vision_config": {"patch_size": 14}},
            "model.language_model.",
            ["model.vision_tower.ln_pre.weight", "model.vision_adapter.fc1.weight", "model.vision_projection.weight"],
        ),
        (
            "muse_spark",
            lambda text: {"model_type": "muse_spark", "text_config": text, "vision_config": {}, "audio_config": {}},
            "model.language_model.",
            ["model.vision_projection.weight", "model.vision_adapter.fc1.weight"],
        ),
    ],
)
def test_the_text_of_a_release_in_its_own_form(
    name: str, wrapper: Callable[[Any], Any], prefix: str, other: list[str], tmp_path: Path
) -> None:
    """LFM2-Audio and Ling V3 VL, of which transformers has no class, and Gemma 3n and Muse Glimmer, whose parts
    for pictures are large: their text is that of the family."""
    source, tokens = checkpoint(name), prompt(40)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(wrapper(config) | {"dtype": "float32"}))
    tensors = {
        key.replace("model.", prefix, 1) if key.startswith("model.") else key: value
        for key, value in load_file(source / "model.safetensors").items()
    }
    save_file(tensors | {key: torch.ones(8) for key in other}, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    [logits] = ModelDriver(loaded.model, sequences=1, length=48).step((0, tokens))
    [same] = ModelDriver(load_model(source).model, sequences=1, length=48).step((0, tokens))
    assert torch.equal(logits, same)
    said = "; ".join(loaded.warnings)
    assert f"{len(other)} tensors" in said
    assert "not used" not in said
    assert "is served" in said or "weft serves the text part" in said
