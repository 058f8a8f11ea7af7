"""Configurations shaped like the real releases, in every dialect, become the right geometry."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from weft.errors import CheckpointError, UnknownArchitectureError
from weft.families import named_dtype, read_architecture, read_spec, served
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.mamba import Mamba2
from weft.families.mixers.short_conv import ShortConv

Config = dict[str, Any]

QWEN3_NEXT_80B: Config = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936}  # fmt: skip

QWEN3_5_27B: Config = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
        "num_hidden_layers": 64, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "use_cache": True,
        "vocab_size": 248320,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                            "rope_theta": 10000000, "partial_rotary_factor": 0.25}},
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    "vision_end_token_id": 248054, "vision_start_token_id": 248053}  # fmt: skip

LFM2_1_2B: Config = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
    "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
    "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
    "use_cache": True, "use_pos_enc": True, "vocab_size": 65536}  # fmt: skip

GRANITE_4_H_SMALL: Config = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "init_method": "mup",
    "initializer_range": 0.1, "intermediate_size": 768,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "logits_scaling": 16, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
    "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 32, "num_experts_per_tok": 10,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72, "output_router_logits": False,
    "pad_token_id": 100256, "position_embedding_type": "nope", "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.0001,
    "shared_intermediate_size": 1536, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0", "use_cache": True, "vocab_size": 100352}  # fmt: skip

QWEN3_8B: Config = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size":
    4096, "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

RELEASES = {
    "qwen3_next": QWEN3_NEXT_80B,
    "qwen3_5": QWEN3_5_27B,
    "lfm2": LFM2_1_2B,
    "granite_hybrid": GRANITE_4_H_SMALL,
    "qwen3": QWEN3_8B,
}


def changed(config: Config, **changes: Any) -> Config:
    """A copy with ``changes``; a value of None removes the key."""
    new = copy.deepcopy(config) | changes
    return {key: value for key, value in new.items() if not (key in changes and value is None)}


def test_qwen3_next_is_read_as_released() -> None:
    model = read_architecture(QWEN3_NEXT_80B)
    assert model.family == "qwen3_next"
    assert (model.vocab_size, model.hidden_size, model.max_positions) == (151936, 2048, 262144)
    assert (model.dtype, model.tied_embeddings) == ("bfloat16", False)
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == list(range(3, 48, 4))
    assert model.mixers[3] == Attention(16, 2, 256, 256**-0.5, Rope(1e7, 64), qk_norm=True, gated=True)
    assert model.mixers[0] == GatedDelta(16, 32, 128, 128, 4)
    assert set(model.feed_forwards) == {Experts(512, 10, 512, True, shared_width=512, shared_gate=True)}


def test_qwen3_5_is_the_text_part_of_its_wrapper_and_its_tower() -> None:
    model = read_architecture(QWEN3_5_27B)
    assert model.family == "qwen3_5"
    assert (model.layer_count, model.hidden_size, model.dtype) == (64, 5120, "bfloat16")
    assert model.mixers[0] == GatedDelta(16, 48, 128, 128, 4)
    assert model.mixers[3] == Attention(24, 4, 256, 256**-0.5, Rope(1e7, 64), qk_norm=True, gated=True)
    assert set(model.feed_forwards) == {Dense(17408)}
    assert model.vision is not None
    assert (model.vision.heads, model.vision.joined_width, model.turn_sections) == (16, 4608, (11, 11, 10))
    assert read_architecture(QWEN3_5_27B["text_config"]) == dataclasses.replace(model, vision=None)
    assert read_architecture(changed(QWEN3_5_27B, tie_word_embeddings=True)).tied_embeddings


def test_lfm2_is_read_as_released() -> None:
    model = read_architecture(LFM2_1_2B)
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == [2, 5, 8, 10, 12, 14]
    assert model.mixers[2] == Attention(32, 8, 64, 0.125, Rope(1e6, 64), qk_norm=True)
    assert model.mixers[0] == ShortConv(2048, 3, False)
    assert set(model.feed_forwards) == {Dense(8192)}
    assert (model.tied_embeddings, model.norm_eps) == (True, 1e-5)


def test_granite_is_read_as_released() -> None:
    model = read_architecture(GRANITE_4_H_SMALL)
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == [5, 15, 25, 35]
    assert model.mixers[5] == Attention(32, 8, 128, 0.0078125, None)
    assert model.mixers[0] == Mamba2(128, 64, 1, 128, 4, True, False, (0.0, float("inf")))
    assert set(model.feed_forwards) == {Experts(72, 10, 768, True, shared_width=1536)}
    assert (model.embedding_multiplier, model.residual.scale, model.logits_divisor) == (12, 0.22, 16)
    assert model.tied_embeddings
    dense = read_architecture(changed(GRANITE_4_H_SMALL, num_local_experts=0, num_experts_per_tok=0))
    assert set(dense.feed_forwards) == {Dense(1536)}
    rotary = read_architecture(changed(GRANITE_4_H_SMALL, position_embedding_type="rope")).mixers[5]
    assert isinstance(rotary, Attention)
    assert rotary.rope == Rope(10000.0, 128)


def test_qwen3_is_read_as_released() -> None:
    model = read_architecture(QWEN3_8B)
    assert set(model.mixers) == {Attention(32, 8, 128, 128**-0.5, Rope(1e6, 128), qk_norm=True)}
    assert set(model.feed_forwards) == {Dense(12288)}


def test_specs_have_the_bytes_per_token_and_per_sequence_of_the_real_models() -> None:
    sizes = {
        name: (spec.kv_bytes_per_token("bfloat16"), spec.state_bytes_per_sequence("bfloat16"))
        for name, spec in ((name, read_spec(config)) for name, config in RELEASES.items())
    }
    assert sizes["qwen3_next"] == (24576, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2))
    assert sizes["lfm2"] == (12288, 10 * 2048 * 2 * 2)
    assert sizes["granite_hybrid"] == (16384, 36 * (128 * 64 * 128 * 4 + (8192 + 256) * 3 * 2))
    assert sizes["qwen3"] == (36 * 2 * 8 * 128 * 2, 0)


@pytest.mark.parametrize("name", RELEASES)
def test_the_new_spelling_of_rotary_settings_means_the_same(name: str) -> None:
    config = copy.deepcopy(RELEASES[name])
    inner = config.get("text_config", config)
    if "rope_theta" in inner:  # old -> new
        moved = {"rope_type": "default", "rope_theta": inner.pop("rope_theta")}
        inner.pop("rope_scaling", None)
        if "partial_rotary_factor" in inner:
            moved["partial_rotary_factor"] = inner.pop("partial_rotary_factor")
        inner["rope_parameters"] = moved
    else:  # new -> old
        stated = inner.pop("rope_parameters")
        inner |= {
            "rope_theta": stated["rope_theta"],
            "rope_scaling": None,
            "partial_rotary_factor": stated["partial_rotary_factor"],
        }
    assert read_architecture(config) == read_architecture(RELEASES[name])


@pytest.mark.parametrize("kinds", [("linear_attention", "full_attention"), ("mamba", "attention")])
@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
def test_layer_kinds_mean_the_same_under_each_name(key: str, kinds: tuple[str, str]) -> None:
    listed = [kinds[i in (5, 15, 25, 35)] for i in range(40)]
    assert read_architecture(changed(GRANITE_4_H_SMALL, layer_types=None) | {key: listed}) == read_architecture(
        GRANITE_4_H_SMALL
    )


def test_full_attn_idxs_and_layer_types_mean_the_same() -> None:
    listed = ["full_attention" if i in LFM2_1_2B["full_attn_idxs"] else "conv" for i in range(16)]
    later = changed(LFM2_1_2B, full_attn_idxs=None, layer_types=listed, tie_embedding=True)
    assert read_architecture(later) == read_architecture(LFM2_1_2B)


def test_dtype_is_read_under_both_names_and_may_be_absent() -> None:
    assert named_dtype(changed(QWEN3_8B, torch_dtype=None, dtype="float32")) == "float32"
    assert named_dtype(changed(QWEN3_8B, torch_dtype="torch.float16")) == "float16"
    assert named_dtype(changed(QWEN3_8B, torch_dtype=None)) is None
    assert named_dtype(QWEN3_5_27B) == "bfloat16"
    assert named_dtype(changed(QWEN3_8B, torch_dtype="half")) == "float16"
    for stored in ("float8_e4m3fn", "float64", "auto"):  # as quantised releases and unfinished exports have it
        assert named_dtype(changed(QWEN3_8B, torch_dtype=stored)) is None


@pytest.mark.parametrize("infinity", [float("inf"), "Infinity", {"__float__": "Infinity"}])
def test_an_infinite_time_step_limit_is_read_in_each_spelling(infinity: object) -> None:
    assert read_architecture(changed(GRANITE_4_H_SMALL, time_step_limit=[0.0, infinity])) == read_architecture(
        GRANITE_4_H_SMALL
    )


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}])
def test_old_and_new_scaling_keys_mean_the_same(scaling: Config) -> None:
    rope = read_architecture(changed(QWEN3_8B, rope_scaling=scaling)).mixers[0].rope  # type: ignore[union-attr]
    assert rope == Rope(1e6, 128, "linear", 2.0, 40960)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3", {"hidden_size": None}, ["hidden_size", "missing"]),
        ("qwen3", {"num_hidden_layers": "36"}, ["num_hidden_layers", "'36'"]),
        ("qwen3", {"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ("qwen3", {"num_key_value_heads": 5}, ["num_key_value_heads", "5", "32"]),
        ("qwen3", {"rope_scaling": {"rope_type": "wavy", "factor": 4.0}}, ["rope_type", "wavy", "yarn"]),
        ("qwen3", {"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ("qwen3", {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0}}, ["llama3 needs a factor"]),
        ("qwen3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["llama3 needs a low_freq_factor"]),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            ["rope_parameters is", "llama3 needs a high_freq_factor"],
        ),
        (
            "qwen3",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_theta": None,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            ["rope_scaling", "yarn", "rope_theta of rope_parameters"],
        ),
        ("qwen3", {"layer_types": ["sliding_attention"] * 36}, ["layer_types", "sliding_attention"]),
        ("qwen3", {"layer_types": ["full_attention"] * 35}, ["layer_types", "36"]),
        ("qwen3", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ("qwen3", {"is_causal": "no"}, ["is_causal", "'no'", "true or false"]),
        ("qwen3", {"architectures": ["Qwen3BidirectionalModel"]}, ["architectures", "Qwen3BidirectionalModel"]),
        ("qwen3", {"torch_dtype": "complex64"}, ["torch_dtype", "complex64", "bfloat16"]),
        ("qwen3", {"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq", "gptq"]),
        ("qwen3_next", {"num_experts_per_tok": 600}, ["num_experts_per_tok", "600", "512"]),
        ("qwen3_next", {"linear_num_value_heads": 24}, ["linear_num_value_heads", "24", "16"]),
        ("granite_hybrid", {"mamba_n_heads": 96}, ["mamba_n_heads", "96", "8192"]),
        ("granite_hybrid", {"position_embedding_type": "alibi"}, ["position_embedding_type", "alibi"]),
        ("granite_hybrid", {"time_step_limit": "wide"}, ["time_step_limit", "wide"]),
    ],
)
def test_a_setting_that_cannot_be_served_is_named(name: str, changes: Config, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(changed(RELEASES[name], **changes))
    assert all(word in caught.value.message for word in ["config.json", *words])


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "ctrl", "architectures": ["CTRLLMHeadModel"]}, {"model_type": ["qwen3"]}]
)
def test_an_unknown_architecture_is_named_beside_those_that_are_served(config: Config) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        read_spec(config)
    assert str(config.get("model_type")) in caught.value.message
    assert all(name in caught.value.message for name in served())


def test_of_a_family_that_is_not_served_the_nearest_and_what_is_missing_are_named() -> None:
    newer = changed(
        RELEASES["qwen3_next"],
        model_type="qwen9_next",
        dreams_per_layer=3,
        hidden_act="gelu",
        layer_types=["dream"] * 48,
        router_aux_loss_coef=0.1,
    )
    with pytest.raises(UnknownArchitectureError) as caught:
        read_spec(newer)
    assert (
        "by its keys the nearest is qwen3_next, which does not serve dreams_per_layer, hidden_act, "
        "intermediate_size, layer_types; weft serves"
    ) in caught.value.message
    with pytest.raises(UnknownArchitectureError) as caught:
        read_spec({"model_type": "x", "hidden_size": [], "num_hidden_layers": {}, "layer_types": 3, "a": 1})
    assert "does not serve a, hidden_size" in caught.value.message
