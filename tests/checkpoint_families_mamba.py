"""Tiny configurations of the Mamba families, for the table in ``checkpoints``.

``time_step_min`` of Nemotron-H and Zamba2 is set so small that transformers' clamp of prompts does nothing:
weft does not have that clamp (see ``weft.families.nemotron_h`` and tests/oracle/test_time_step_clamp.py).
"""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 48, "num_hidden_layers": 3,
                          "tie_word_embeddings": False}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
_GRANITE_KEYS: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_d_conv": 4}

_BAMBA: dict[str, Any] = _SIZES | _HEADS | _GRANITE_KEYS | {
    "intermediate_size": 80, "attn_layer_indices": [1]}
_FALCON_H1: dict[str, Any] = _SIZES | _HEADS | _GRANITE_KEYS | {
    "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 80, "mamba_d_ssm": 96,
    "mamba_rms_norm": True, "mamba_norm_before_gate": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e11},
    "embedding_multiplier": 2.5, "lm_head_multiplier": 1.3, "key_multiplier": 1.7,
    "attention_in_multiplier": 1.2, "attention_out_multiplier": 1.4, "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.6], "mlp_multipliers": [0.8, 1.25]}
_NEMOTRON_H: dict[str, Any] = {key: value for key, value in (_SIZES | _HEADS).items()
                               if key != "num_hidden_layers"} | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "head_dim": 16, "intermediate_size": 96, "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16,
    "n_groups": 2, "conv_kernel": 4, "time_step_min": 1e-30}
_JAMBA: dict[str, Any] = _SIZES | _HEADS | {
    "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 3,
    "expert_layer_offset": 0, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 6}
_ZAMBA2: dict[str, Any] = _SIZES | _HEADS | {
    "num_key_value_heads": 4, "intermediate_size": 72,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_mem_blocks": 1,
    "adapter_rank": 8, "use_shared_attention_adapter": True, "use_mem_rope": True,
    "n_mamba_heads": 6, "mamba_d_state": 16, "mamba_ngroups": 2, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-2, "time_step_min": 1e-30}
_MAMBA2: dict[str, Any] = _SIZES | {
    "num_heads": 6, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "conv_kernel": 4}
_MAMBA: dict[str, Any] = _SIZES | {"state_size": 8, "expand": 2, "conv_kernel": 4}

MAMBA_CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", _MAMBA2),
    "mamba2_bias": ("mamba2", _MAMBA2 | {"use_bias": True, "use_conv_bias": False, "n_groups": 1,
                                         "tie_word_embeddings": True, "residual_in_fp32": False}),
    "bamba": ("bamba", _BAMBA),
    "bamba_bias": ("bamba", _BAMBA | {"mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True}),
    "falcon_h1": ("falcon_h1", _FALCON_H1),
    "falcon_h1_plain": ("falcon_h1", _FALCON_H1 | {
        "mamba_rms_norm": False, "projectors_bias": True, "mlp_bias": True, "lm_head_multiplier": 2.0}),
    "falcon_h1_late_gate": ("falcon_h1", _FALCON_H1 | {
        "mamba_norm_before_gate": True, "mamba_proj_bias": True, "tie_word_embeddings": True}),
    "nemotron_h": ("nemotron_h", _NEMOTRON_H),
    "nemotron_h_moe": ("nemotron_h", _NEMOTRON_H | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.7}),
    "nemotron_h_latent": ("nemotron_h", _NEMOTRON_H | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "norm_topk_prob": False,
        "n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 20, "routed_scaling_factor": 0.8, "use_bias": True, "mlp_bias": False}),
    "jamba": ("jamba", _JAMBA),
    "jamba_dense": ("jamba", _JAMBA | {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False,
                                       "attn_layer_offset": 0}),
    "zamba2": ("zamba2", _ZAMBA2),
    "zamba2_plain": ("zamba2", _ZAMBA2 | {"use_mem_rope": False, "use_shared_attention_adapter": False,
                                          "layers_block_type": ["hybrid", "hybrid", "hybrid"],
                                          "num_mem_blocks": 2}),
    "mamba": ("mamba", _MAMBA | {"tie_word_embeddings": True}),
    "mamba_bias": ("mamba", _MAMBA | {"use_bias": True, "use_conv_bias": False, "time_step_rank": 5}),
    "falcon_mamba": ("falcon_mamba", _MAMBA | {"expand": 16, "intermediate_size": 80}),
}

MAMBA_FAMILIES: tuple[str, ...] = ("mamba2", "bamba", "falcon_h1", "nemotron_h", "nemotron_h_moe", "jamba",
                                   "zamba2", "mamba", "falcon_mamba")
"""One of each structure, for the suite that serves them through the engine."""
