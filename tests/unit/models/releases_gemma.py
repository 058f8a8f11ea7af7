"""Configurations of released Gemmas, as their repositories have them."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}

GEMMA_3_4B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
}

GEMMA_3N_E2B: Config = {
    "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "torch_dtype": "bfloat16",
    "audio_config": {"model_type": "gemma3n_audio"}, "vision_config": {"model_type": "gemma3n_vision"},
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
        "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
        "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
        "initializer_range": 0.02, "intermediate_size": [8192] * 30, "laurel_rank": 64,
        "layer_types": ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(30)],
        "max_position_embeddings": 32_768, "model_type": "gemma3n_text", "num_attention_heads": 8,
        "num_hidden_layers": 30, "num_key_value_heads": 2, "num_kv_shared_layers": 10, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10_000.0, "rope_scaling": None, "rope_theta": 1_000_000.0, "sliding_window": 512,
        "use_cache": True, "vocab_size": 262_400, "vocab_size_per_layer_input": 262_144}}  # fmt: skip

GEMMA_4_E2B: Config = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": {
        "attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(35)],
        "max_position_embeddings": 131072, "model_type": "gemma4_text", "num_attention_heads": 8,
        "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-06, "rope_parameters": _ROPES, "sliding_window": 512,
        "tie_word_embeddings": True, "use_double_wide_mlp": True, "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144}}  # fmt: skip

GEMMA_4_26B_A4B: Config = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "text_config": {
        "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_size": 2816, "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112, "max_position_embeddings": 262144, "model_type": "gemma4_text",
        "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
        "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8,
        "num_kv_shared_layers": 0, "rope_parameters": _ROPES, "sliding_window": 1024, "top_k_experts": 8,
        "vocab_size": 262144}}  # fmt: skip

GEMMA_4_12B: Config = {  # the shape of gemma-4-12B-it
    "architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified", "dtype": "bfloat16",
    "text_config": {
        "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma4_unified_text",
        "num_attention_heads": 16, "num_global_key_value_heads": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "rope_parameters": _ROPES, "use_bidirectional_attention": "vision", "vocab_size": 262144}}  # fmt: skip

RECURRENT_GEMMA_2B: Config = {
    "architectures": ["RecurrentGemmaForCausalLM"], "attention_bias": False, "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15360,
    "logits_soft_cap": 30.0, "lru_width": 2560, "model_type": "recurrent_gemma", "num_attention_heads": 10,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "torch_dtype": "float32", "vocab_size": 256000}  # fmt: skip


def with_text(config: Config, **changes: Any) -> Config:
    """A copy whose text part has ``changes``; a value of None removes the key."""
    text = {key: value for key, value in (config["text_config"] | changes).items() if value is not None}
    return config | {"text_config": text}


GEMMA_RELEASES: dict[str, Config] = {
    "gemma3": GEMMA_3_4B,
    "gemma3n": GEMMA_3N_E2B,
    "gemma4": GEMMA_4_E2B,
    "gemma4_moe": GEMMA_4_26B_A4B,
    "gemma4_unified": GEMMA_4_12B,
    "recurrent_gemma": RECURRENT_GEMMA_2B,
}
SMALLER_GEMMA: dict[str, Config] = {
    "gemma3": with_text(GEMMA_3_4B, num_hidden_layers=6),
    "gemma3n": GEMMA_3N_E2B,
    "gemma4": GEMMA_4_E2B,
    "gemma4_moe": with_text(GEMMA_4_26B_A4B, num_hidden_layers=6, num_experts=8),
    "gemma4_unified": with_text(GEMMA_4_12B, num_hidden_layers=6),
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""As many layers as show each kind: names repeat after that."""
