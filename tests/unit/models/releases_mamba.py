"""Configurations of the Mamba families as they were released, with what matters of them."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

MAMBA_2_8B: Config = {
    "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 0,
    "expand": 2, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.1,
    "intermediate_size": 5120, "layer_norm_epsilon": 1e-05, "model_type": "mamba", "num_hidden_layers": 64,
    "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True, "state_size": 16,
    "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
    "time_step_min": 0.001, "time_step_rank": 160, "time_step_scale": 1.0, "torch_dtype": "float32",
    "transformers_version": "4.39.0.dev0", "use_bias": False, "use_cache": True, "use_conv_bias": True,
    "vocab_size": 50280}  # fmt: skip

FALCON_MAMBA_7B: Config = {
    "architectures": ["FalconMambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 11,
    "expand": 16, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "falcon_mamba",
    "num_hidden_layers": 64, "pad_token_id": 11, "rescale_prenorm_residual": False, "residual_in_fp32": True,
    "state_size": 16, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "time_step_scale": 1.0, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
    "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 65024}  # fmt: skip

MAMBA_CODESTRAL_7B: Config = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4,
    "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 8, "norm_before_gate": True,
    "num_heads": 128, "num_hidden_layers": 64, "pad_token_id": 0, "residual_in_fp32": True, "rms_norm": True,
    "state_size": 128, "tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "torch_dtype": "bfloat16",
    "use_bias": False, "use_conv_bias": True, "vocab_size": 32768}  # fmt: skip

BAMBA_9B: Config = {
    "architectures": ["BambaForCausalLM"], "attention_bias": False, "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False,
    "model_type": "bamba", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_logits_to_keep": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip

FALCON_H1_0_5B: Config = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375, "bos_token_id": 1, "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048,
    "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
    "mamba_proj_bias": False, "mamba_rms_norm": False, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": False, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 100000000000.0, "max_position_embeddings": 16384,
    "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5,
                                                   0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 32784}  # fmt: skip

NEMOTRON_H_8B: Config = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_head_dim": 128,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 8192, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 32,
    "num_hidden_layers": 52, "num_key_value_heads": 8, "residual_in_fp32": False, "sliding_window": None,
    "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
    "torch_dtype": "bfloat16", "use_bias": False, "use_conv_bias": True, "vocab_size": 131072}  # fmt: skip

NEMOTRON_3_NANO_30B: Config = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "chunk_size": 128, "conv_kernel": 4,
    "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 52, "num_key_value_heads": 2, "residual_in_fp32": False,
    "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": False,
    "use_conv_bias": True, "vocab_size": 131072}  # fmt: skip

_PUZZLE_EXPERTS = {"block_type": "moe", "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376,
                   "n_routed_experts": 512}  # fmt: skip
_PUZZLE_BLOCKS: list[Config] = [
    {"block_type": "mamba"},
    _PUZZLE_EXPERTS | {"moe_intermediate_size": 1280, "num_experts_per_tok": 4},
    {"block_type": "mamba"},
    _PUZZLE_EXPERTS | {"moe_intermediate_size": 2048, "num_experts_per_tok": 12},
    {"block_type": "attention"},
]
NEMOTRON_3_PUZZLE: Config = NEMOTRON_3_NANO_30B | {   # sizes as published, in an order of the tests' own
    "architectures": ["NemotronHPuzzleForCausalLM"], "block_configs": _PUZZLE_BLOCKS * 17 + _PUZZLE_BLOCKS[:3],
    "hidden_size": 4096, "hybrid_override_pattern": None, "mamba_num_heads": 128, "model_type": "nemotron_h_puzzle",
    "mtp_block_configs": [{"block_type": "attention"}, _PUZZLE_EXPERTS | {
        "moe_intermediate_size": 2688, "num_experts_per_tok": 22}],
    "num_hidden_layers": 88, "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0, "ssm_state_size": 96,
}  # fmt: skip

JAMBA_1_5_MINI: Config = {
    "architectures": ["JambaForCausalLM"], "attn_layer_offset": 4, "attn_layer_period": 8, "bos_token_id": 1,
    "eos_token_id": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": False,
    "max_position_embeddings": 262144, "model_type": "jamba", "num_attention_heads": 32, "num_experts": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-06, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_mamba_kernels": True, "vocab_size": 65536}  # fmt: skip

ZAMBA_7B: Config = {
    "architectures": ["ZambaForCausalLM"], "attention_dropout": 0.0, "attention_head_dim": 464,
    "attention_hidden_size": 7424, "attn_layer_offset": 4, "attn_layer_period": 6, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "gelu", "hidden_mamba_act": "silu", "hidden_size": 3712,
    "intermediate_size": 14848,
    "layers_block_type": ["hybrid" if i == 2 or (i > 2 and (i - 3) % 6 == 4) else "mamba" for i in range(76)],
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 232, "mamba_expand": 2,
    "mamba_proj_bias": False, "max_position_embeddings": 4096, "model_type": "zamba", "n_mamba_heads": 2,
    "num_attention_heads": 16, "num_hidden_layers": 76, "num_key_value_heads": 16, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "time_step_floor": 0.0001, "time_step_max": 0.1,
    "time_step_min": 0.001, "torch_dtype": "bfloat16", "use_cache": True, "use_mamba_kernels": True,
    "vocab_size": 32000}  # fmt: skip

ZAMBA2_2_7B: Config = {
    "adapter_rank": 128, "add_bias_linear": False, "architectures": ["Zamba2ForCausalLM"],
    "attention_head_dim": 160, "attention_hidden_size": 5120, "bos_token_id": 1, "chunk_size": 256,
    "eos_token_id": 2, "hidden_act": "gelu", "hidden_size": 2560,
    "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51], "intermediate_size": 10240, "kv_channels": 80,
    "layers_block_type": ["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba"
                          for i in range(54)],
    "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 1,
    "max_position_embeddings": 4096, "model_type": "zamba2", "n_mamba_heads": 80, "num_attention_heads": 32,
    "num_hidden_layers": 54, "num_key_value_heads": 32, "num_mem_blocks": 2, "num_query_groups": 32,
    "rms_norm_eps": 1e-05, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001,
    "torch_dtype": "bfloat16", "use_conv_bias": True, "use_long_context": False, "use_mem_rope": False,
    "use_shared_attention_adapter": False, "vocab_size": 32000}  # fmt: skip

PLAMO_2_1B: Config = {
    "architectures": ["Plamo2ForCausalLM"], "attention_window_size": 2048, "bos_token_id": 1, "eos_token_id": 2,
    "full_attention_idx": None, "hidden_size": 2048, "hidden_size_per_head": 128, "image_feature_size": None,
    "image_token_id": None, "intermediate_size": 8192, "linear_type": "normal", "mamba_chunk_size": 256,
    "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_enabled": True, "mamba_num_heads": 32, "mamba_step": 2,
    "max_position_embeddings": 10485760, "model_type": "plamo2", "num_attention_heads": 16,
    "num_hidden_layers": 16, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "tie_word_embeddings": True,
    "torch_dtype": "float32", "use_cache": True, "vocab_size": 100000}  # fmt: skip

RWKV7_2_9B: Config = {
    "a_low_rank_dim": 96, "architectures": ["RWKV7ForCausalLM"], "attn": None, "attn_mode": "chunk",
    "decay_low_rank_dim": 96, "fuse_cross_entropy": True, "fuse_norm": False, "gate_low_rank_dim": 320,
    "head_dim": 64, "hidden_act": "sqrelu", "hidden_ratio": 4.0, "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 10240, "max_position_embeddings": 2048,
    "model_type": "rwkv7", "norm_bias": True, "norm_eps": 1e-05, "norm_first": True, "num_heads": None,
    "num_hidden_layers": 32, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "v_low_rank_dim": 64, "value_dim": [2560] * 32, "vocab_size": 65536}  # fmt: skip

XLSTM_7B: Config = {
    "add_out_norm": True, "architectures": ["xLSTMForCausalLM"], "autocast_kernel_dtype": "bfloat16",
    "bos_token_id": 0, "chunk_size": 64, "chunkwise_kernel": "chunkwise--triton_xl_chunk",
    "embedding_dim": 4096, "eos_token_id": 2, "eps": 1e-06, "ffn_proj_factor": 2.667,
    "ffn_round_up_to_multiple_of": 64, "gate_soft_cap": 15.0, "head_dim": 512, "hidden_size": 4096,
    "inference_state_dtype": "float32", "mode": "inference", "model_type": "xlstm", "norm_eps": 1e-06,
    "norm_reduction_force_float32": True, "num_blocks": 32, "num_heads": 8, "output_logit_soft_cap": 30.0,
    "qk_dim_factor": 0.5, "sequence_kernel": "native_sequence__triton", "step_kernel": "triton",
    "tie_word_embeddings": False, "torch_dtype": "float32", "use_bias": False, "v_dim_factor": 1.0,
    "vocab_size": 50304, "weight_mode": "single"}  # fmt: skip

MAMBA_RELEASES: dict[str, Config] = {
    "mamba": MAMBA_2_8B,
    "falcon_mamba": FALCON_MAMBA_7B,
    "mamba2": MAMBA_CODESTRAL_7B,
    "bamba": BAMBA_9B,
    "falcon_h1": FALCON_H1_0_5B,
    "nemotron_h": NEMOTRON_H_8B,
    "nemotron_h_puzzle": NEMOTRON_3_PUZZLE,
    "jamba": JAMBA_1_5_MINI,
    "zamba": ZAMBA_7B,
    "zamba2": ZAMBA2_2_7B,
    "xlstm": XLSTM_7B,
    "rwkv7": RWKV7_2_9B,
    "plamo2": PLAMO_2_1B,
}
"""One of each family."""

SMALLER_MAMBA: dict[str, Config] = {  # as many layers as show each kind: names repeat after that
    "mamba": {"num_hidden_layers": 2},
    "falcon_mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2},
    "bamba": {"num_hidden_layers": 10},
    "falcon_h1": {"num_hidden_layers": 2},
    "nemotron_h": {"hybrid_override_pattern": "M-*-", "num_hidden_layers": 4},
    "nemotron_h_puzzle": {"block_configs": _PUZZLE_BLOCKS, "num_nextn_predict_layers": 0, "mtp_block_configs": None},
    "jamba": {"num_hidden_layers": 6},
    "rwkv7": {"num_hidden_layers": 2},
    "plamo2": {"num_hidden_layers": 2, "full_attention_idx": [], "rope_theta": 10_000.0, "rope_local_theta": 10_000.0},
    "xlstm": {
        "num_blocks": 2,
        "chunkwise_kernel": "chunkwise--native_autograd",  # as without its package
        "sequence_kernel": "native_sequence__native",
        "step_kernel": "native",
    },
    "zamba": {"num_hidden_layers": 8, "layers_block_type": ZAMBA_7B["layers_block_type"][:8]},
    "zamba2": {
        "num_hidden_layers": 20,
        "hybrid_layer_ids": [6, 12, 18],
        "layers_block_type": ZAMBA2_2_7B["layers_block_type"][:20],
    },
}
