"""Tiny checkpoints of the families beyond the first: latent attention, windows, experts, and Llama.

``tests.checkpoints`` takes these into its table. Windows are much shorter than the prompts and no multiple of
anything.
"""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "intermediate_size": 96}
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
_KIMI: dict[str, Any] = _BASE | {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}

MORE_CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _BASE),
    "llama3": ("llama", _BASE | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True,
                                 "attention_bias": True, "head_dim": 32}),
    "mistral": ("mistral", _BASE | {"sliding_window": 50}),
    "qwen3_moe": ("qwen3_moe", _BASE | {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_window": ("qwen3", _BASE | {
        "head_dim": 32, "use_sliding_window": True, "sliding_window": 70, "max_window_layers": 2}),
    "olmo3": ("olmo3", _BASE | {
        "sliding_window": 37, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0,
                               "original_max_position_embeddings": 512, "attention_factor": 1.2}}}),
    "olmo_hybrid": ("olmo_hybrid", _BASE | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmo_hybrid_rope": ("olmo_hybrid", _BASE | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
        "linear_value_head_dim": 16, "linear_allow_neg_eigval": False, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "lfm2_moe": ("lfm2_moe", _BASE | {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1,
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "conv_L_cache": 3,
        "routed_scaling_factor": 1.3, "tie_word_embeddings": True}),
    "lfm2_moe_plain": ("lfm2_moe", _BASE | {
        "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 0, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "use_expert_bias": False,
        "norm_topk_prob": False, "conv_bias": True}),
    "lfm3": ("lfm3", _BASE | {
        "head_dim": 32, "sliding_window": 45, "conv_L_cache": 7, "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"]}),
    "lfm3_plain": ("lfm3", _BASE | {
        "head_dim": 32, "sliding_window": 200, "conv_L_cache": 3, "use_sandwich_norm": False,
        "use_attention_gate": False, "attention_bias": True, "conv_bias": True,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"]}),
    "kimi_linear": ("kimi_linear", _KIMI),
    "kimi_linear_groups": ("kimi_linear", _KIMI | {
        "n_group": 4, "topk_group": 2, "q_lora_rank": 32, "attention_bias": True, "norm_topk_prob": False,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
}
"""name -> (model_type, configuration)."""

MORE_FAMILIES: tuple[str, ...] = ("qwen3_moe", "mistral", "olmo3", "olmo_hybrid", "lfm2_moe", "lfm3",
                                  "kimi_linear")
"""One of each structure, for the suite that serves them through the engine."""
