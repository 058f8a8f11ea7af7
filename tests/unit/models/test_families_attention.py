"""Configurations of real releases, of the families beyond the first: their geometry, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models.test_families import changed
from weft.errors import CheckpointError, ConfigError
from weft.families import name_here, read_architecture, read_spec
from weft.families.architecture import MtpLayer
from weft.families.mixers.attention import Attention, Index, KeyIndex, Rope
from weft.families.mixers.combined import Again
from weft.families.mixers.compressed_attention import CompressedAttention, EntryIndex
from weft.families.mixers.delta import GatedDelta, KimiDelta
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.mixers.lightning import Lightning
from weft.families.mixers.ngrams import WithNgrams
from weft.families.mixers.short_conv import ShortConv
from weft.families.more.inkling import EmbeddingNorm, RelativeAttention
from weft.families.more.inkling2 import ClippedAttention
from weft.families.more.jet_nemotron import DynamicDelta
from weft.families.more.zaya import ConvolvedAttention
from weft.families.residuals import PLAIN, AttentionResiduals, NormedStream, Residual, Streams
from weft.families.sharding import possible_tps, rank_architecture
from weft.families.tensors import NormGate
from weft.models.checkpoint_files import SKIPPED_PREFIXES
from weft.planning.roofline import model_load
from weft.planning.weights import count_weights, form_of

Config = dict[str, Any]

LLAMA_3_1_8B: Config = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip

MISTRAL_7B: Config = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}

QWEN3_30B_A3B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936}  # fmt: skip

QWEN3_5_35B_A3B: Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "num_attention_heads": 16,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                            "rope_theta": 10000000, "partial_rotary_factor": 0.25}},
    "tie_word_embeddings": False, "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"}}  # fmt: skip

# Made of Qwen3.5-35B's sizes: no config.json of the release was found.
MOBIUS: Config = QWEN3_5_35B_A3B | {
    "architectures": ["InternS2MobiusForConditionalGeneration"], "model_type": "interns2_mobius",
    "text_config": QWEN3_5_35B_A3B["text_config"] | {
        "model_type": "interns2_mobius_text", "num_blocks": 4}}  # fmt: skip

OLMO_3_7B: Config = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                     "original_max_position_embeddings": 8192, "rope_type": "yarn"},
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 100278}  # fmt: skip

OLMO_HYBRID_7B: Config = {
    "architectures": ["OlmoHybridForCausalLM"], "attention_bias": False, "dtype": "bfloat16",
    "hidden_act": "silu", "hidden_size": 3840, "intermediate_size": 11008,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 96, "linear_num_key_heads": 30,
    "linear_num_value_heads": 30, "linear_value_head_dim": 192, "max_position_embeddings": 65536,
    "model_type": "olmo_hybrid", "num_attention_heads": 30, "num_hidden_layers": 32,
    "num_key_value_heads": 30, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "tie_word_embeddings": False,
    "vocab_size": 100352}  # fmt: skip

KIMI_LINEAR_48B: Config = {
    "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16", "first_k_dense_replace": 1,
    "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32, "short_conv_kernel_size": 4},
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear",
    "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
    "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840}  # fmt: skip

_K3_FULL = [*range(4, 93, 4), 93]
KIMI_K3: Config = {   # the text part, without its quantisation
    "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "architectures": ["KimiLinearForCausalLM"],
    "attn_res_block_size": 12, "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 74, "hidden_act": "situ", "hidden_size": 7168, "intermediate_size": 33792,
    "kv_lora_rank": 512, "latent_moe_use_norm": True, "linear_attn_config": {
        "full_attn_layers": _K3_FULL, "gate_lower_bound": -5.0, "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 94) if layer not in _K3_FULL], "num_heads": 96,
        "short_conv_kernel_size": 4, "use_full_rank_gate": True},
    "max_position_embeddings": 1048576, "mla_use_nope": True, "mla_use_output_gate": True, "model_type": "kimi_k3",
    "moe_intermediate_size": 3072, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_attention_heads": 96, "num_expert_group": 1, "num_experts": 896,
    "num_experts_per_token": 16, "num_hidden_layers": 93, "num_key_value_heads": 96, "num_nextn_predict_layers": 0,
    "num_shared_experts": 2, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "routed_expert_hidden_size": 3584, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840}  # fmt: skip

ALICE_AI: Config = {   # AliceAI-Foundation-80B-A3B: vLLM's defaults
    "architectures": ["AliceAIForCausalLM"], "block_attn_res_block_size": 4, "dtype": "bfloat16", "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 2048, "kda_allow_negative_eigenvalues": False,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 32,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "model_type": "alice_ai", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "number_of_conv_states": 3, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "router_bias_correction": True, "router_score_function": "sigmoid",
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 129024}  # fmt: skip

LING_3_FLASH: Config = {
    "architectures": ["BailingHybridForCausalLM"], "dtype": "bfloat16", "first_k_dense_replace": 2,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 6144,
    "kda_lower_bound": -5.0, "kda_safe_gate": True, "kv_lora_rank": 512, "layer_group_size": 6,
    "max_position_embeddings": 262144, "model_type": "bailing_hybrid", "moe_intermediate_size": 768,
    "n_group": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 512,
    "num_experts_per_tok": 8, "num_hidden_layers": 42, "num_key_value_heads": 32, "num_shared_experts": 1,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_theta": 6000000.0, "routed_scaling_factor": 2.5, "short_conv_kernel_size": 4,
    "tie_word_embeddings": False, "topk_group": 4, "v_head_dim": 128, "vocab_size": 157184}  # fmt: skip

GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "dtype": "bfloat16",
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(24)],
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                     "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088}  # fmt: skip

LFM2_8B_A1B: Config = {
    "architectures": ["Lfm2MoeForCausalLM"], "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16",
    "hidden_size": 2048, "intermediate_size": 7168,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792,
    "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2,
    "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "tie_embedding": True, "use_expert_bias": True,
    "vocab_size": 65536}  # fmt: skip

LFM3_1_7B: Config = {
    "architectures": ["Lfm3ForCausalLM"], "conv_L_cache": 7, "conv_bias": False, "dtype": "bfloat16",
    "head_dim": 128, "hidden_size": 2048, "intermediate_size": 7680, "max_position_embeddings": 128000,
    "model_type": "lfm3", "norm_eps": 1e-05, "num_attention_heads": 16, "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0,
                           "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    "sliding_window": 256, "tie_word_embeddings": True, "use_attention_gate": True,
    "use_sandwich_norm": True, "vocab_size": 128000}  # fmt: skip

MINIMAX_TEXT_01: Config = {
    "architectures": ["MiniMaxForCausalLM"], "dtype": "bfloat16",
    "full_attn_alpha_factor": 3.5565588200778455,
    "full_attn_beta_factor": 1.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "intermediate_size": 9216,
    "layer_types": ["linear_attention" if (i + 1) % 8 else "full_attention" for i in range(80)],
    "linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 1.0,
    "max_position_embeddings": 10240000, "mlp_alpha_factor": 3.5565588200778455, "mlp_beta_factor": 1.0,
    "model_type": "minimax", "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 10000000,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 200064}  # fmt: skip

QWEN4_EXP: Config = {
    "architectures": ["Qwen4ExpForCausalLM"], "attention_bias": False, "dtype": "bfloat16",
    "eos_token_id": 248044, "hc_count": 4, "hc_lowrank": 320, "head_dim": 256, "heads_per_ngram": 8,
    "hidden_act": "silu", "hidden_size": 2560, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "indexer_head_dim": 128, "indexer_kv_heads": 1, "indexer_n_heads": 4,
    "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(40)],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_value_head_dim": 128, "make_ngram_vocab_size_divisible_by": 128,
    "max_position_embeddings": 262144, "model_type": "qwen4_exp_text", "moe_intermediate_size": 640,
    "ngram_size": 3, "ngram_vocab_size_base": 20000000, "norm_topk_prob": True, "num_attention_heads": 24,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "output_gate_type": "sigmoid", "ple_conv_kernel_size": 4, "ple_embed_dim": 2560, "ple_layer_ids": [2],
    "rms_norm_eps": 1e-06, "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default"},
    "seed": 1234, "shared_expert_intermediate_size": 640, "split_ngram_parts": 128,
    "tie_word_embeddings": False, "vocab_size": 248320}  # fmt: skip

GLM_5_NEXT: Config = {
    "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next",
    "tie_word_embeddings": False, "attention_bias": False, "dtype": "bfloat16", "hc_eps": 1e-06, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128,
    "index_kpool": 16, "index_kpool_always_select_tail": True, "index_n_heads": 32, "index_topk": 2048,
    "intermediate_size": 12288, "kv_lora_rank": 512,
    "layer_types": ["linear_attention" if i % 4 != 3 else "full_attention" for i in range(45)],
    "linear_conv_kernel_dim": 4, "linear_head_dim": 128, "linear_lower_bound": -5.0, "linear_num_heads": 64,
    "max_position_embeddings": 1048576, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 288, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 45,
    "num_key_value_heads": 64, "q_lora_rank": 1536, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0,
    "rms_norm_eps": 1e-05, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0, "topk_group": 1,
    "v_head_dim": 256, "vocab_size": 154880}  # fmt: skip

DEEPSEEK_V4_FLASH: Config = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "eos_token_id": 1,
    "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu",
    "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
    "max_position_embeddings": 1048576, "model_type": "deepseek_v4", "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 6, "num_hash_layers": 3, "num_hidden_layers": 43, "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
                     "type": "yarn"},
    "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "vocab_size": 129280}  # fmt: skip

ZAYA1_8B: Config = {
    "architectures": ["ZayaForCausalLM"], "attention_bias": False, "cca_time0": 2, "cca_time1": 2,
    "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "layer_types": ["hybrid"] * 40, "lm_head_bias": False, "max_position_embeddings": 131072,
    "model_type": "zaya", "moe_intermediate_size": 2048, "num_attention_heads": 8, "num_experts": 16,
    "num_experts_per_tok": 1, "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "hybrid": {
        "partial_rotary_factor": 0.5, "rope_theta": 5000000.0, "rope_type": "default"}},
    "router_hidden_size": 256, "sliding_window": None, "tie_word_embeddings": True, "vocab_size": 262272,
}  # fmt: skip

LING_2_5: Config = {   # as inclusionAI's class of the configuration has it
    "architectures": ["BailingMoeV2_5ForCausalLM"], "dtype": "bfloat16", "first_k_dense_replace": 1,
    "group_norm_size": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5120, "kv_lora_rank": 512, "layer_group_size": 5, "linear_silu": False,
    "max_position_embeddings": 32768, "model_type": "bailing_moe_v2_5", "moe_intermediate_size": 512,
    "n_group": 8, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 20, "num_key_value_heads": 4, "num_shared_experts": 1, "partial_rotary_factor": 0.5,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_interleave": True, "rope_scaling": None, "rope_theta": 600000.0, "routed_scaling_factor": 1.0,
    "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "use_bias": False,
    "use_qk_norm": True, "use_qkv_bias": False, "v_head_dim": 128, "vocab_size": 157184}  # fmt: skip

GIGACHAT_3_5: Config = {   # as vLLM's class of the configuration has it, with the release's long context
    "architectures": ["GigaChat35ForCausalLM"], "attention_bias": False, "dtype": "bfloat16",
    "first_k_dense_replace": 3, "full_attention_layers": list(range(3, 40, 4)), "gated_attention": True,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "layernorm_gating_weight": 2.0, "layernorm_type": "pre_post",
    "linear_attention_type": "Qwen3NextGatedDeltaNet", "linear_conv_kernel_dim": 4,
    "linear_gating_type": "gated_rmsnorm_sigmoid_zero_centered", "linear_key_head_dim": 128,
    "linear_num_key_heads": 32, "linear_num_value_heads": 64, "linear_sigmoid_gate_scale": 2.0,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "model_type": "gigachat3_5",
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "nextn_is_sparse": False, "norm_topk_prob": True, "norm_type": "ZeroCenteredGatedNorm",
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 2, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_interleave": True, "rope_theta": 100000.0, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32768, "rope_type": "yarn"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "swiglu_limit": 10.0,
    "tie_word_embeddings": False, "topk_group": 1, "use_mla_scaling_factor": True, "v_head_dim": 128,
    "vocab_size": 128256}  # fmt: skip

JET_NEMOTRON_2B: Config = {
    "architectures": ["JetNemotronForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "efficient_attention_config": {
        "jet": {"conv_size": 4, "dconv_generator_reduction": 8, "dconv_implementation": "triton",
                "expand_v": 2.6666666667, "head_dim": 96, "mode": "chunk", "norm_eps": "1e-5",
                "num_heads": 12},
        "swa": {"window_size": 1152}},
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 8960,
    "layer_types": ["jet"] * 14 + ["attn"] + ["jet"] * 4 + ["attn", "swa", "swa"] + ["jet"] * 6,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "jet_nemotron",
    "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "use_mrope": False, "vocab_size": 151936}  # fmt: skip
JET_NEMOTRON_4B: Config = JET_NEMOTRON_2B | {
    "efficient_attention_config": {
        "jet": {"conv_size": 4, "dconv_generator_reduction": 8, "dconv_implementation": "triton",
                "expand_v": 2, "head_dim": 128, "mode": "chunk", "norm_eps": "1e-5", "num_heads": 16},
        "swa": {"window_size": 2048}},
    "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 32768,
    "layer_types": ["attn" if i in (17, 20, 32) else "swa" if i in (5, 16, 19, 21, 22, 25, 27) else "jet"
                    for i in range(36)],
    "max_window_layers": 36, "num_attention_heads": 16, "num_hidden_layers": 36}  # fmt: skip

INKLING: Config = {   # transformers' defaults
    "architectures": ["InklingForCausalLM"], "conv_kernel_size": 4, "d_rel": 16, "dtype": "bfloat16",
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 24576,
    "layer_types": ["hybrid" if i % 6 == 5 else "hybrid_sliding" for i in range(66)],
    "log_scaling_n_floor": None, "logits_mup_width_multiplier": 24.0, "max_position_embeddings": 131072,
    "mlp_layer_types": ["sparse"] * 66, "model_type": "inkling_text", "moe_intermediate_size": 3072,
    "n_routed_experts": 256, "n_shared_experts": 2, "num_attention_heads": 64, "num_experts_per_tok": 6,
    "num_hidden_layers": 66, "num_key_value_heads": 8, "rel_extent": 1024, "rms_norm_eps": 1e-06,
    "route_scale": 8.0, "shared_expert_sink": True, "sliding_window_size": 512, "swa_head_dim": 128,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "unpadded_vocab_size": 200058,
    "vocab_size": 201024}  # fmt: skip

INKLING_2_SMALL: Config = {   # transformers' defaults
    "architectures": ["Inkling2ForCausalLM"], "conv_kernel_size": 4, "d_rel": 16, "dtype": "bfloat16",
    "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4608,
    "layer_types": ["hybrid" if i % 6 == 5 else "hybrid_sliding" for i in range(48)], "log_scaling_alpha": 0.1,
    "log_scaling_n_floor": 128000, "max_position_embeddings": 1048576, "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 25.0, "model_type": "inkling2_text", "moe_intermediate_size": 2304,
    "n_layers_per_attn_res_block": 6, "n_routed_experts": 384, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "qk_l2_clip_threshold": 22.627416997969522, "rel_extent": 1024, "rel_l2_clip_threshold": 8.0,
    "rms_norm_eps": 1e-06, "route_scale": 8.0, "scoring_func": "sigmoid", "sliding_window_size": 1024,
    "swa_head_dim": 128, "swa_num_attention_heads": 48, "swa_num_key_value_heads": 8,
    "unpadded_vocab_size": 200058, "vocab_size": 201024}  # fmt: skip

INKLING_2_MINI: Config = INKLING_2_SMALL | {
    "architectures": ["Inkling2LoopForCausalLM"], "hidden_size": 2304, "log_scaling_n_floor": 8192,
    "layer_types": INKLING_2_SMALL["layer_types"][:24], "loop_gate_rank": 64, "loop_layer_index_end": 18,
    "loop_layer_index_start": 6, "loop_num_passes": 3, "model_type": "inkling2_loop_text",
    "moe_intermediate_size": 1152, "n_routed_experts": 128, "num_attention_heads": 24, "num_hidden_layers": 24,
    "swa_num_attention_heads": 24}  # fmt: skip

MINICPM_SALA: Config = {
    "architectures": ["MiniCPMSALAForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_use_output_gate": True, "attn_use_rope": False, "bos_token_id": 1, "dim_model_base": 256,
    "dtype": "bfloat16", "eos_token_id": [2, 73440], "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 16384, "lightning_head_dim": 128,
    "lightning_nh": 32, "lightning_nkv": 32, "lightning_scale": "1/sqrt(d)", "lightning_use_rope": True,
    "max_position_embeddings": 524288, "mixer_types": [
        "minicpm4" if layer in (0, 9, 16, 17, 22, 29, 30, 31) else "lightning-attn" for layer in range(32)],
    "model_type": "minicpm_sala", "mup_denominator": 32, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 2, "pad_token_id": 2, "pretraining_tp": 1, "qk_norm": True, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000.0, "scale_depth": 1.4, "scale_emb": 12, "sparse_config": {
        "block_size": 64, "dense_len": 8192, "init_blocks": 1, "kernel_size": 32, "kernel_stride": 16,
        "topk": 64, "use_nope": False, "window_size": 2048},
    "tie_word_embeddings": False, "use_output_gate": True, "use_output_norm": True, "vocab_size": 73448,
}  # fmt: skip

PLAMO_3: Config = {   # defaults of PFN's configuration class; no release could be read
    "architectures": ["Plamo3ForCausalLM"], "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2,
    "head_dim": 128, "hidden_size": 4096, "initial_context_length": 4096, "intermediate_size": 13312,
    "max_position_embeddings": 262144, "model_type": "plamo3", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_local_theta": 10000, "rope_scaling_factor": 64.0,
    "rope_theta": 150000, "scale_embedding": False, "sliding_window_pattern": 8, "tie_word_embeddings": True,
    "use_cache": True, "vocab_size": 32000, "window_size": 128}  # fmt: skip

SMOLLM3_3B: Config = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
    "use_cache": False, "use_sliding_window": False, "vocab_size": 128256}  # fmt: skip

RELEASES_MORE = {
    "smollm3": SMOLLM3_3B,
    "llama": LLAMA_3_1_8B, "mistral": MISTRAL_7B, "qwen3_moe": QWEN3_30B_A3B, "qwen3_5_moe": QWEN3_5_35B_A3B,
    "interns2_mobius": MOBIUS, "olmo3": OLMO_3_7B, "olmo_hybrid": OLMO_HYBRID_7B, "kimi_linear": KIMI_LINEAR_48B,
    "kimi_k3": KIMI_K3, "alice_ai": ALICE_AI,
    "ling": LING_3_FLASH, "gpt_oss": GPT_OSS_20B, "minimax": MINIMAX_TEXT_01,
    "zaya": ZAYA1_8B, "ling_2_5": LING_2_5, "minicpm_sala": MINICPM_SALA, "gigachat3_5": GIGACHAT_3_5,
    "jet_nemotron": JET_NEMOTRON_2B, "jet_nemotron_4b": JET_NEMOTRON_4B,
    "inkling": INKLING, "inkling2": INKLING_2_SMALL, "inkling2_loop": INKLING_2_MINI, "plamo3": PLAMO_3,
    "qwen4_exp": QWEN4_EXP, "glm5_next": GLM_5_NEXT, "deepseek_v4": DEEPSEEK_V4_FLASH,
    "lfm2_moe": LFM2_8B_A1B, "lfm3": LFM3_1_7B}  # fmt: skip

SMALLER_MORE: dict[str, Config] = {
    "llama": {"num_hidden_layers": 2}, "mistral": {"num_hidden_layers": 2},
    "smollm3": {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
    "qwen3_moe": {"num_hidden_layers": 2}, "qwen3_5_moe": {}, "interns2_mobius": {}, "olmo_hybrid": {},
    "lfm2_moe": {}, "lfm3": {},
    "olmo3": {"num_hidden_layers": 4, "layer_types": OLMO_3_7B["layer_types"][:4]}, "kimi_linear": {},
    "glm5_next": {"num_hidden_layers": 4, "layer_types": GLM_5_NEXT["layer_types"][:4],
                  "mlp_layer_types": GLM_5_NEXT["mlp_layer_types"][:4], "n_routed_experts": 16},
    "qwen4_exp": {"num_hidden_layers": 4, "layer_types": QWEN4_EXP["layer_types"][:4]},
    "deepseek_v4": {"num_hidden_layers": 4, "n_routed_experts": 16},
    "kimi_k3": {"num_hidden_layers": 3, "num_experts": 16, "linear_attn_config": KIMI_K3["linear_attn_config"] | {
        "kda_layers": [1, 3], "full_attn_layers": [2]}},
    "alice_ai": {"num_hidden_layers": 2, "num_experts": 16, "layer_types": ALICE_AI["layer_types"][2:4]},
    "ling": {"num_hidden_layers": 6, "num_experts": 64},
    "ling_2_5": {"num_hidden_layers": 6, "num_experts": 16},
    "gigachat3_5": {"num_hidden_layers": 4, "full_attention_layers": [3], "n_routed_experts": 16},
    "inkling": {"num_hidden_layers": 2, "layer_types": ["hybrid", "hybrid_sliding"],
                "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 16},
    "inkling2": {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "n_routed_experts": 16,
                 "unpadded_vocab_size": 201024},
    "inkling2_loop": {"num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2,
                      "n_routed_experts": 16, "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1,
                      "loop_layer_index_end": 3, "unpadded_vocab_size": 201024},
    "zaya": {"num_hidden_layers": 2, "layer_types": ["hybrid"] * 2},
    "plamo3": {"num_hidden_layers": 2},
    "jet_nemotron": {"num_hidden_layers": 3, "layer_types": ["jet", "attn", "swa"]},
    "jet_nemotron_4b": {"num_hidden_layers": 3, "layer_types": ["jet", "attn", "swa"]},
    "minicpm_sala": {"num_hidden_layers": 2, "mixer_types": MINICPM_SALA["mixer_types"][:2]},
    "minimax": {"num_hidden_layers": 8, "num_local_experts": 4,
                "layer_types": MINIMAX_TEXT_01["layer_types"][:8]},
    "gpt_oss": {"num_hidden_layers": 2, "num_local_experts": 8,
                "layer_types": GPT_OSS_20B["layer_types"][:2]}}  # fmt: skip
"""As many layers as show each kind: names repeat after that."""


def test_smollm3_turns_all_layers_but_every_fourth() -> None:
    model = read_architecture(SMOLLM3_3B)
    turned = Attention(16, 4, 128, 128**-0.5, Rope(5e6, 128))
    assert model.mixers == (turned, turned, turned, replace(turned, rope=None)) * 9
    assert (model.vocab_size, model.max_positions, model.tied_embeddings) == (128256, 65536, True)
    silent = read_architecture({"model_type": "smollm3", "no_rope_layer_interval": 2})
    turned = replace(turned, rope=Rope(2e6, 128))
    assert silent.mixers == (turned, replace(turned, rope=None)) * 18
    windows = {"use_sliding_window": True, "sliding_window": 64}
    unturned = read_architecture({"model_type": "smollm3", **windows}).mixers[3]
    assert unturned == replace(turned, rope=None, window=64)
    with pytest.raises(CheckpointError, match=r"no_rope_layers is .*must say 0 or 1 of each of the 36 layers"):
        read_architecture(SMOLLM3_3B | {"no_rope_layers": [1, 0]})


def test_llama_is_read_as_released() -> None:
    model = read_architecture(LLAMA_3_1_8B)
    rope = Rope(500_000.0, 128, "llama3", 8.0, 8192)
    assert set(model.mixers) == {Attention(32, 8, 128, 128**-0.5, rope)}
    assert set(model.feed_forwards) == {Dense(14336)}
    assert (model.vocab_size, model.max_positions, model.norm_eps) == (128256, 131072, 1e-5)


def test_mistral_has_its_window_unless_it_says_null_or_no_text_is_longer() -> None:
    assert read_architecture(MISTRAL_7B).mixers[0] == Attention(32, 8, 128, 128**-0.5, Rope(1e4, 128), window=4096)
    absent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert read_architecture(absent) == read_architecture(MISTRAL_7B)
    for config in (MISTRAL_7B | {"sliding_window": None}, MISTRAL_7B | {"sliding_window": 32768}):
        mixer = read_architecture(config).mixers[0]
        assert isinstance(mixer, Attention)
        assert mixer.window is None


def test_sparse_qwen3_is_read_as_released() -> None:
    model = read_architecture(QWEN3_30B_A3B)
    assert set(model.mixers) == {Attention(32, 4, 128, 128**-0.5, Rope(1e6, 128), qk_norm=True)}
    assert set(model.feed_forwards) == {Experts(128, 8, 768, True)}
    some = read_architecture(QWEN3_30B_A3B | {"mlp_only_layers": [0], "norm_topk_prob": None})
    assert some.feed_forwards[:2] == (Dense(6144), Experts(128, 8, 768, False))


def test_sparse_qwen3_5_is_the_text_part_of_its_wrapper() -> None:
    model = read_architecture(QWEN3_5_35B_A3B)
    assert model.mixers[0] == GatedDelta(16, 32, 128, 128, 4)
    assert model.mixers[3] == Attention(16, 2, 256, 256**-0.5, Rope(1e7, 64), qk_norm=True, gated=True)
    assert set(model.feed_forwards) == {Experts(256, 8, 512, True, shared_width=512, shared_gate=True)}
    assert model.vision is not None
    assert (model.vision.layer_count, model.turn_sections) == (27, (11, 11, 10))
    assert read_architecture(QWEN3_5_35B_A3B["text_config"]) == dataclasses.replace(model, vision=None)


def test_olmo3_scales_the_rotary_of_its_full_layers_only() -> None:
    model = read_architecture(OLMO_3_7B)
    window = Attention(32, 32, 128, 128**-0.5, Rope(5e5, 128), qk_norm=True, norm_whole=True, window=4096)
    assert model.mixers[:3] == (window,) * 3
    full = model.mixers[3]
    assert isinstance(full, Attention)
    assert full.window is None
    assert full.rope == Rope(5e5, 128, "yarn", 8.0, 8192, attention_factor=1.2079441541679836)
    nested = changed(OLMO_3_7B, rope_scaling=None, rope_theta=None) | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
            "full_attention": OLMO_3_7B["rope_scaling"] | {"rope_theta": 500000},
        }
    }
    assert read_architecture(nested) == model


def test_olmo_hybrid_is_read_as_released() -> None:
    model = read_architecture(OLMO_HYBRID_7B)
    assert model.mixers[0] == GatedDelta(30, 30, 96, 192, 4, beta_scale=2.0)
    assert model.mixers[3] == Attention(30, 30, 128, 128**-0.5, None, qk_norm=True, norm_whole=True)
    short = changed(
        OLMO_HYBRID_7B,
        layer_types=None,
        linear_num_key_heads=None,
        linear_num_value_heads=None,
        linear_key_head_dim=None,
        linear_value_head_dim=None,
        num_key_value_heads=None,
    )
    assert read_architecture(short) == model
    rotary = read_architecture(changed(OLMO_HYBRID_7B, rope_parameters=None)).mixers[3]
    assert isinstance(rotary, Attention)
    assert rotary.rope == Rope(1e4, 128)


def test_kimi_linear_is_read_as_released_and_as_saved_by_transformers() -> None:
    model = read_architecture(KIMI_LINEAR_48B)
    full = [i for i, mixer in enumerate(model.mixers) if isinstance(mixer, LatentAttention)]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    assert model.mixers[0] == KimiDelta(32, 128, 4)
    assert model.mixers[3] == LatentAttention(32, 512, 64, 128, 128, 192**-0.5)
    assert model.feed_forwards[0] == Dense(9216)
    assert set(model.feed_forwards[1:]) == {
        Experts(
            256,
            8,
            1024,
            True,
            shared_width=1024,
            scoring="sigmoid",
            choice_bias=True,
            scale=2.446,
            normalizer_eps=1e-20,
        )
    }
    saved = changed(
        KIMI_LINEAR_48B,
        linear_attn_config=None,
        num_experts_per_token=None,
        num_experts=None,
        moe_renormalize=None,
        num_shared_experts=None,
        num_expert_group=None,
        first_k_dense_replace=None,
        model_max_length=None,
    ) | {
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "n_group": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * 26,
        "max_position_embeddings": 1048576,
        "layer_types": ["full_attention" if i in full else "linear_attention" for i in range(27)],
    }
    assert read_architecture(saved) == model


def test_kimi_k3_is_read_as_released_in_its_wrapper_and_where_it_is_silent() -> None:
    model = read_architecture(KIMI_K3)
    latent = LatentAttention(96, 512, 64, 128, 128, 192**-0.5, query_rank=1536, gated=True)
    delta = KimiDelta(96, 128, 4, wide_gate=True, decay_floor=-5.0)
    assert model.mixers == tuple(latent if layer in _K3_FULL else delta for layer in range(1, 94))
    assert model.feed_forwards[0] == Dense(33792, "situ", caps=(4.0, 25.0))
    assert set(model.feed_forwards[1:]) == {
        Experts(896, 16, 3072, True, shared_width=6144, scoring="sigmoid", choice_bias=True, normalizer_eps=1e-20,
                activation="situ", caps=(4.0, 25.0), latent_width=3584, latent_normed=True)
    }  # fmt: skip
    assert model.residual == AttentionResiduals(every=12, eps=1e-5, weighed=True, first=True)
    wrapped = {"model_type": "kimi_k3", "vision_config": {"patch_size": 14},
               "text_config": KIMI_K3 | {"model_type": "kimi_linear"}}  # fmt: skip
    assert read_architecture(wrapped) == model
    assert name_here(wrapped)("mm_projector.proj.weight").startswith(SKIPPED_PREFIXES)
    silent = changed(KIMI_K3, hidden_size=None, num_hidden_layers=None, rms_norm_eps=None, vocab_size=None)
    assert read_architecture(silent) == model
    # Kimi Linear has the same settings, and none by default.
    known = {"first_k_dense_replace": 1, "num_experts_per_token": 16, "hidden_act": "silu"}
    plain = read_architecture(KIMI_K3 | known | {"model_type": "kimi_linear"})
    assert (plain.mixers, plain.residual) == (model.mixers, model.residual)
    assert read_architecture(changed(KIMI_K3, attn_res_block_size=None)).residual == PLAIN


def test_alice_ai_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(ALICE_AI)
    attention = Attention(16, 2, 256, 256**-0.5, Rope(1e6, 64), qk_norm=True, gated=True)
    assert model.mixers == ((KimiDelta(32, 128, 4),) * 3 + (attention,)) * 12
    assert set(model.feed_forwards) == {
        Experts(512, 10, 512, True, shared_width=512, shared_gate=True, scoring="sigmoid", choice_bias=True)
    }
    assert model.residual == AttentionResiduals(every=4, eps=1e-6, weighed=True)
    named = ("model_type", "architectures", "dtype")
    assert read_architecture({name: ALICE_AI[name] for name in named}) == model


def test_ling_is_read_as_released_and_as_saved_by_transformers() -> None:
    model = read_architecture(LING_3_FLASH)
    full = [i for i, mixer in enumerate(model.mixers) if isinstance(mixer, LatentAttention)]
    assert full == [5, 11, 17, 23, 29, 35, 41]
    assert model.mixers[0] == KimiDelta(32, 128, 4, wide_forget=True, wide_gate=True, decay_floor=-5.0)
    assert model.mixers[5] == LatentAttention(32, 512, 64, 128, 128, 192**-0.5, rope=Rope(6e6, 64), head_gated=True)
    assert model.feed_forwards[:2] == (Dense(6144), Dense(6144))
    assert set(model.feed_forwards[2:]) == {
        Experts(
            512,
            8,
            768,
            True,
            shared_width=768,
            scoring="sigmoid",
            choice_bias=True,
            scale=2.5,
            normalizer_eps=1e-20,
            groups=8,
            groups_chosen=4,
        )
    }
    silent = {
        key: LING_3_FLASH[key]
        for key in ("model_type", "vocab_size", "hidden_size", "dtype", "num_hidden_layers", "num_attention_heads")
    }
    assert read_architecture(silent) == model
    saved = changed(LING_3_FLASH, max_position_embeddings=None, num_experts_per_tok=None, n_group=None) | {
        "head_dim": 64,
        "linear_head_dim": 128,
        "model_max_length": 262144,
        "num_experts_per_token": 8,
        "num_expert_group": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 6000000.0},
        "layer_types": ["full_attention" if i in full else "linear_attention" for i in range(42)],
    }
    assert read_architecture(saved) == model
    assert read_architecture(changed(LING_3_FLASH, kda_safe_gate=None) | {"kda_safe_gate": False}).mixers[
        0
    ] == KimiDelta(32, 128, 4, wide_forget=True, wide_gate=True)


def test_sparse_lfm2_is_read_as_released() -> None:
    model = read_architecture(LFM2_8B_A1B)
    assert [i for i, m in enumerate(model.mixers) if isinstance(m, Attention)] == [2, 6, 10, 14, 18, 21]
    assert model.feed_forwards[:2] == (Dense(7168), Dense(7168))
    assert set(model.feed_forwards[2:]) == {
        Experts(32, 4, 1792, True, scoring="sigmoid", choice_bias=True, normalizer_eps=1e-6)
    }
    assert model.tied_embeddings


def test_lfm3_is_read_as_released() -> None:
    model = read_architecture(LFM3_1_7B)
    common = {"qk_norm": True, "head_gated": True}
    assert model.mixers[:5] == (
        ShortConv(2048, 7, False),
        ShortConv(2048, 7, False),
        Attention(16, 4, 128, 128**-0.5, Rope(1e6, 128, "proportional", turning_dim=64), **common),
        ShortConv(2048, 7, False),
        Attention(16, 4, 128, 128**-0.5, Rope(1e4, 128), window=256, **common),
    )
    assert model.residual.out_norms
    silent = {
        key: LFM3_1_7B[key]
        for key in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "dtype",
        )
    }
    assert read_architecture(silent) == model


def test_ling_2_5_shares_a_model_type_with_ling_3_and_has_lightning_attention() -> None:
    model, rope = read_architecture(LING_2_5), Rope(6e5, 64)
    full = [i for i, mixer in enumerate(model.mixers) if isinstance(mixer, LatentAttention)]
    assert full == [4, 9, 14, 19]
    assert model.mixers[4] == LatentAttention(16, 512, 64, 128, 128, 192**-0.5, rope=rope)
    assert model.mixers[3] == Lightning(
        16, 128, 1 - 2 / 19 + 1e-5, silu=False, qk_norm=True, rope=rope, scale=128**-0.5, norm_groups=4
    )
    assert model.feed_forwards[0] == Dense(5120)
    assert set(model.feed_forwards[1:]) == {
        Experts(
            256,
            8,
            512,
            True,
            shared_width=512,
            scoring="sigmoid",
            choice_bias=True,
            scale=1.0,
            normalizer_eps=1e-20,
            groups=8,
            groups_chosen=4,
        )
    }
    assert read_architecture(LING_2_5 | {"model_type": "bailing_hybrid"}) == model
    assert read_architecture({"model_type": "bailing_moe_v2_5", "dtype": "bfloat16"}) == model
    cut = read_architecture(LING_2_5 | {"num_hidden_layers": 7})
    assert [isinstance(mixer, LatentAttention) for mixer in cut.mixers] == [False] * 4 + [True] * 3


def test_gigachat_3_5_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(GIGACHAT_3_5)
    stretch = 0.1 * math.log(8) + 1
    assert model.mixers[3] == LatentAttention(
        64,
        512,
        64,
        128,
        128,
        pytest.approx(192**-0.5 * stretch**2),
        query_rank=1536,
        rope=Rope(1e5, 64, "yarn", 8.0, 32768),
        gated=True,
        norm_gate=NormGate(16, 2.0),
        query_factor=(7168 / 1536) ** 0.5,
        latent_factor=14**0.5,
    )
    assert model.mixers[4] == GatedDelta(32, 64, 128, 128, 4, sigmoid_gate=True, gate_scale=2.0, norm_plus_one=True)
    assert [isinstance(mixer, LatentAttention) for mixer in model.mixers] == [False, False, False, True] * 10
    assert set(model.feed_forwards[:3]) == {Dense(18432, limit=10.0)}
    assert set(model.feed_forwards[3:]) == {
        Experts(
            256,
            8,
            2048,
            True,
            shared_width=2048,
            scoring="sigmoid",
            choice_bias=True,
            scale=2.5,
            normalizer_eps=1e-20,
            limit=10.0,
        )
    }
    assert model.residual == Residual(out_norms=True, gate=NormGate(16, 2.0))
    assert model.mtp == MtpLayer(model.mixers[3], Dense(18432, limit=10.0), model.residual)
    said = (
        "model_type",
        "full_attention_layers",
        "dtype",
        "rope_scaling",
        "swiglu_limit",
        "max_position_embeddings",
        "num_nextn_predict_layers",
    )
    assert read_architecture({key: GIGACHAT_3_5[key] for key in said}) == model
    plain = read_architecture(
        GIGACHAT_3_5
        | {
            "q_lora_rank": None,
            "gated_attention": False,
            "use_mla_scaling_factor": False,
            "rope_scaling": None,
            "linear_gating_type": "gated_rmsnorm",
            "layer_types": ["attention"] + ["linear_attention"] * 39,
        }
    )
    assert plain.mixers[0] == LatentAttention(
        64, 512, 64, 128, 128, 192**-0.5, rope=Rope(1e5, 64), norm_gate=NormGate(16, 2.0)
    )
    assert set(plain.mixers[1:]) == {GatedDelta(32, 64, 128, 128, 4)}


def test_minicpm_sala_is_read_as_released() -> None:
    model = read_architecture(MINICPM_SALA)
    index = KeyIndex(stride=16, block=64, chosen=96, first=1, near=32, dense=8192)
    full = Attention(32, 2, 128, 128**-0.5, None, gated=True, index=index)
    assert model.indexed == (0, 9, 16, 17, 22, 29, 30, 31)
    assert {model.mixers[layer] for layer in model.indexed} == {full}
    assert model.mixers[1] == Lightning(32, 128, 1.0, silu=False, qk_norm=True, rope=Rope(1e4, 128), scale=128**-0.5)
    assert (model.embedding_multiplier, model.logits_divisor) == (12.0, 16.0)
    assert math.isclose(model.residual.scale, 1.4 / 32**0.5)
    assert full.index_width == 16
    dense = read_architecture(changed(MINICPM_SALA, sparse_config=None))
    assert dense.mixers[0] == dataclasses.replace(full, index=None)
    turned = read_architecture(MINICPM_SALA | {"attn_use_rope": True, "lightning_use_rope": False})
    assert (turned.mixers[0].rope, turned.mixers[1].rope) == (Rope(1e4, 128), None)


def test_a_kv_head_that_chooses_blocks_stays_whole() -> None:
    model = read_architecture(MINICPM_SALA)
    assert possible_tps(model) == [1, 2]
    assert rank_architecture(model, 2).spec().layers[32].head_dim == 8
    with pytest.raises(ConfigError, match=r"--tp is 4.*2 KV heads of attention.*it may be 1, 2"):
        rank_architecture(model, 4)


def test_gpt_oss_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(GPT_OSS_20B)
    window, full = model.mixers[:2]
    assert isinstance(window, Attention)
    assert isinstance(full, Attention)
    assert (window.window, full.window, window.sinks, window.bias) == (128, None, True, True)
    assert (
        window.rope
        == full.rope
        == Rope(150_000.0, 64, "yarn", 32.0, 4096, truncate=False, attention_factor=0.1 * math.log(32) + 1)
    )
    assert set(model.feed_forwards) == {Experts(32, 4, 2880, True, activation="clamped_swiglu", bias=True)}
    with pytest.raises(CheckpointError, match="no window"):
        read_architecture(GPT_OSS_20B | {"sliding_window": None})
    silent = {
        key: GPT_OSS_20B[key]
        for key in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "dtype",
            "num_local_experts",
            "num_experts_per_tok",
        )
    }
    assert read_architecture(silent) == model


def test_minimax_turns_part_of_a_head_if_it_says_so_and_its_layers_forget_at_rates_of_their_own() -> None:
    model = read_architecture(MINIMAX_TEXT_01)
    assert model.mixers[7] == Attention(64, 8, 128, 128**-0.5, Rope(1e7, 128))
    assert model.mixers[6] == Lightning(64, 128, 1 - 6 / (79 + 1e-5) + 1e-5)
    assert set(model.feed_forwards) == {Experts(32, 2, 9216, True)}
    alpha = 3.5565588200778455
    assert isinstance(model.residual, NormedStream)
    assert set(model.residual.factors) == {(alpha, 1.0, alpha, 1.0)}
    turned = read_architecture(MINIMAX_TEXT_01 | {"rotary_dim": 64}).mixers[7]
    assert isinstance(turned, Attention)
    assert turned.rope == Rope(1e7, 64)


def test_qwen4_keeps_index_rows_behind_its_layers_and_the_last_tokens_in_a_layer_with_tables() -> None:
    model = read_architecture(QWEN4_EXP)
    assert model.mixers[3] == Attention(
        24, 2, 256, 256**-0.5, Rope(1e7, 64), qk_norm=True, gated=True, index=Index(4, 128, 4, 512)
    )
    delta = GatedDelta(16, 48, 128, 128, 4, sigmoid_gate=True)
    with_tables = model.mixers[1]
    assert isinstance(with_tables, WithNgrams)
    assert (model.mixers[0], with_tables.mixer) == (delta, delta)
    assert [i for i, mixer in enumerate(model.mixers) if isinstance(mixer, WithNgrams)] == [1]
    tables = with_tables.ngrams
    assert (tables.rows[0], len(tables.rows), len(set(tables.rows))) == (20000003, 16, 16)
    assert (tables.width, tables.end, tables.table_rows % 128) == (160, 248044, 0)
    assert model.residual == Streams("gated", 4, rank=320)
    wrapped = {"model_type": "qwen4_exp", "tie_word_embeddings": False, "text_config": QWEN4_EXP}
    assert read_architecture(wrapped) == model
    layers = model.spec().layers
    assert [layer.kind for layer in layers[40:]] == ["index"] * 10
    assert [part.name for part in layers[1].state] == ["conv", "recurrent", "conv.tokens", "conv.values"]


def test_glm5_next_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(GLM_5_NEXT)
    assert model.mixers[0] == KimiDelta(64, 128, 4, decay_floor=-5.0)
    assert model.mixers[3] == LatentAttention(
        64, 512, 0, 256, 256, 256**-0.5, query_rank=1536, norm_eps=1e-5, index=Index(32, 128, 16, 128, "learned")
    )
    assert model.feed_forwards[2] == Dense(12288, limit=10.0)
    assert set(model.feed_forwards[3:]) == {
        Experts(
            288,
            8,
            2048,
            True,
            shared_width=2048,
            scoring="sigmoid",
            choice_bias=True,
            scale=2.5,
            normalizer_eps=1e-20,
            limit=10.0,
        )
    }
    assert model.residual == Streams("mixed", 4, rounds=20, eps=1e-6)
    silent = {key: GLM_5_NEXT[key] for key in ("model_type", "dtype", "mlp_layer_types")}
    assert read_architecture(silent) == model
    wrapped = {"model_type": "glm5_next", "tie_word_embeddings": False, "text_config": GLM_5_NEXT}
    assert read_architecture(wrapped) == model


def test_deepseek_v4_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(DEEPSEEK_V4_FLASH)
    plain = CompressedAttention(64, 512, Rope(10_000.0, 64), 128, 1024, 8, 1024, 1e-6)
    rope = Rope(160_000.0, 64, "yarn", 16.0, 65_536)
    sparse = replace(plain, rope=rope, group=4, overlaps=True, index=EntryIndex(64, 128, 512))
    assert model.mixers[:4] == (plain, plain, sparse, replace(plain, rope=rope, group=128))
    assert model.mixers[42] == sparse
    scored = Experts(
        256, 6, 2048, True, shared_width=2048, scoring="sqrtsoftplus", choice_bias=True, scale=1.5,
        normalizer_eps=1e-20, limit=10.0)  # fmt: skip
    assert model.feed_forwards == (replace(scored, choice_bias=False, hashed=129_280),) * 3 + (scored,) * 40
    assert model.residual == Streams("mixed", 4, rounds=20, eps=1e-6, weighed=True)
    assert (model.max_positions, model.mtp) == (1_048_576, None)
    listed = {"rope_scaling", "rope_theta", "compress_rope_theta", "compress_ratios", "num_hash_layers"}
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    saved = {key: value for key, value in DEEPSEEK_V4_FLASH.items() if key not in listed} | {
        "layer_types": [kinds[ratio] for ratio in DEEPSEEK_V4_FLASH["compress_ratios"][:43]],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
            "compress": {**DEEPSEEK_V4_FLASH["rope_scaling"], "rope_theta": 160000, "partial_rotary_factor": 0.125,
                         "attention_factor": 1.0},
        },
    }  # fmt: skip
    assert read_architecture(saved) == model
    silent = read_architecture({"model_type": "deepseek_v4", "dtype": "bfloat16"})
    assert [getattr(mixer, "group", 0) for mixer in silent.mixers[:5]] == [128, 128, 128, 4, 128]
    assert silent.feed_forwards == model.feed_forwards
    assert possible_tps(model) == [1, 2, 4, 8]


def test_zaya_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(ZAYA1_8B)
    attended = Attention(8, 2, 128, 128**-0.5, Rope(5e6, 64))
    assert set(model.mixers) == {ConvolvedAttention(attended, 2, 2, 128, 2)}
    first, second = model.feed_forwards[:2]
    assert second == Experts(16, 1, 2048, False, choice_bias=True, router_width=256, router_continues=True)
    assert isinstance(first, Experts)
    assert not first.router_continues
    assert read_architecture({"model_type": "zaya", "dtype": "bfloat16"}) == model
    windows = ["hybrid_sliding"] * 40
    [seen] = set(read_architecture(ZAYA1_8B | {"layer_types": windows, "sliding_window": 64}).mixers)
    assert isinstance(seen, ConvolvedAttention)
    assert (seen.attention.window, seen.attention.ring, seen.attention.rope) == (64, False, Rope(1e4, 64))


def test_jet_nemotron_is_read_as_released_and_where_it_is_silent() -> None:
    model = read_architecture(JET_NEMOTRON_2B)
    full = Attention(12, 2, 128, 128**-0.5, Rope(1e6, 128), bias=True, out_bias=False)
    delta = DynamicDelta(12, 96, 256, 4, 384, 1e-5)
    assert (model.mixers[13:15], model.mixers[20]) == ((delta, full), dataclasses.replace(full, window=1152))
    assert (model.norm_eps, model.tied_embeddings) == (1e-6, True)
    silent = {"model_type": "jet_nemotron", "torch_dtype": "bfloat16", "layer_types": ["jet"] * 28}
    settings = {"efficient_attention_config": {"jet": {"head_dim": 96, "num_heads": 12, "expand_v": 2}}}
    assert set(read_architecture(silent | settings).mixers) == {DynamicDelta(12, 96, 192, 4, 288, 1e-5)}
    assert set(read_architecture({"model_type": "jet_nemotron", "torch_dtype": "bfloat16"}).mixers) == {full}


def test_plamo3_is_read_in_the_words_of_both_configurations() -> None:
    model = read_architecture(PLAMO_3)
    plain = Attention(32, 4, 128, 128**-0.5, Rope(10_000.0, 128), qk_norm=True, window=128)
    yarn = Rope(150_000.0, 128, "yarn", 64.0, 4096, truncate=False, attention_factor=1 + 0.1 * math.log(64))
    full = dataclasses.replace(plain, window=None, rope=yarn)
    assert model.mixers == ((plain,) * 7 + (full,)) * 4
    assert (model.tied_embeddings, model.max_positions, model.embedding_multiplier) == (True, 262144, 1.0)
    assert read_architecture(PLAMO_3 | {"scale_embedding": True}).embedding_multiplier == 64.0
    # Older ones count only tokens before a token, and name the window of each layer, or of all.
    older = {"model_type": "plamo3", "max_position_embeddings": 4096, "sliding_window_pattern": 2}
    full = dataclasses.replace(full, rope=Rope(1e6, 128))
    for words, window in (({}, 2049), ({"sliding_window": 70}, 71), ({"sliding_window": [70, None] * 16}, 71)):
        assert read_architecture(older | words).mixers == (dataclasses.replace(plain, window=window), full) * 16
    assert read_architecture(older | {"rope_global_theta": 5e5}).mixers[1] == dataclasses.replace(
        full, rope=Rope(5e5, 128)
    )


def test_inkling_is_read_as_transformers_has_it_and_in_the_words_of_releases() -> None:
    model = read_architecture(INKLING)
    wide = Attention(64, 8, 128, 1 / 128, None, qk_norm=True)
    near = RelativeAttention(dataclasses.replace(wide, kv_heads=16, window=512), 16, 512, 4, 6144)
    full = RelativeAttention(wide, 16, 1024, 4, 6144)
    assert model.mixers == ((near,) * 5 + (full,)) * 11
    assert set(model.feed_forwards) == {
        Experts(256, 6, 3072, False, shared_width=3072, scoring="sigmoid", choice_bias=True, scale=8.0, shared_count=2)
    }
    assert (model.logits_divisor, model.residual, model.head_tokens) == (24.0, EmbeddingNorm(), 200058)
    silent = {"model_type": "inkling_text", "dtype": "bfloat16", "unpadded_vocab_size": 200058}
    assert read_architecture(silent) == model
    released = changed(
        INKLING,
        **dict.fromkeys(
            (
                "moe_intermediate_size",
                "conv_kernel_size",
                "sliding_window_size",
                "layer_types",
                "mlp_layer_types",
                "max_position_embeddings",
            )
        ),
    ) | {
        "intermediate_size": 3072,
        "dense_intermediate_size": 24576,
        "dense_mlp_idx": 2,
        "sconv_kernel_size": 4,
        "sliding_window": 512,
        "model_max_length": 131072,
        "local_layer_ids": [i for i in range(66) if i % 6 != 5],
    }
    other = read_architecture({"model_type": "inkling_mm_model", "text_config": released})
    assert other == dataclasses.replace(model, feed_forwards=(Dense(24576),) * 2 + model.feed_forwards[2:])
    far = read_architecture(INKLING | {"log_scaling_n_floor": 8192}).mixers
    assert far[0] == near
    assert far[5] == dataclasses.replace(full, floor=8192, growth=0.1)


def test_mobius_is_qwen3_5_with_banks_that_layers_share() -> None:
    """Each fourth layer has the same router and experts, which count once among the weights. The draft head has its
    own."""
    model, apart = read_architecture(MOBIUS), replace(read_architecture(QWEN3_5_35B_A3B), vision=None)
    assert [feed.bank for feed in model.feed_forwards if isinstance(feed, Experts)] == [0, 1, 2, 3] * 10
    assert model.mtp == apart.mtp
    assert (model.mixers, model.vision) == (apart.mixers, None)
    routed, router = 256 * 3 * 512 * 2048, 256 * 2048
    counted = [count_weights(each, each, 1, form_of({}, "bfloat16", None)).parameters for each in (model, apart)]
    assert counted[1] - counted[0] == 36 * (routed + router)
    loads = [
        model_load(each, parameters=count, weight_bytes=2.0, eight_bit=False, kv_bytes=0.0, state_bytes=0.0)
        for each, count in zip((model, apart), counted, strict=True)
    ]
    assert loads[1].dense_params - loads[0].dense_params == 36 * router
    assert loads[0].expert_params == loads[1].expert_params == 40 * routed


def test_inkling_2_runs_layers_again_with_memory_of_their_own() -> None:
    small, mini = read_architecture(INKLING_2_SMALL), read_architecture(INKLING_2_MINI)
    attended = Attention(48, 8, 128, 128**-0.5, None, qk_norm=True)
    near = ClippedAttention(
        dataclasses.replace(attended, window=1024),
        16,
        1024,
        4,
        4608,
        clips=(22.627416997969522, 8.0),
        dynamic=False,
        inputs=1,
    )
    full = dataclasses.replace(near, attention=attended, dynamic=True, inputs=3, floor=128_000, growth=0.1)
    assert small.mixers == ((near,) * 5 + (full,)) * 8
    [experts] = set(small.feed_forwards)
    assert isinstance(experts, Experts)
    assert (experts.activation, experts.caps, experts.scale) == ("situ", (4.0, 25.0), 8.0)
    assert (small.logits_cap, small.head_tokens) == (30.0, 200_058)
    assert read_architecture({"model_type": "inkling2_text", "dtype": "bfloat16"}) == small
    assert read_architecture({"model_type": "inkling2_loop_text", "dtype": "bfloat16"}) == mini
    loop = {"core_start": 6, "core_end": 18, "num_passes": 3, "gate_rank": 64}
    assert read_architecture({"model_type": "inkling2_loop_text", "dtype": "bfloat16", "loop_config": loop}) == mini
    assert mini.stored_layers == (*range(18), *range(6, 18), *range(6, 18), *range(18, 24))
    assert mini.mixers[18] == Again(mini.mixers[6], 6)
    assert [feed is None for feed in mini.feed_forwards] == [False] * 18 + [True] * 24 + [False] * 6
    assert (mini.mixers[6], mini.mixers[0]) == (dataclasses.replace(mini.mixers[0], gate_rank=64), mini.mixers[1])


def test_specs_have_the_bytes_per_token_and_per_sequence_of_the_real_models() -> None:
    sizes = {
        name: (spec.kv_bytes_per_token("bfloat16"), spec.state_bytes_per_sequence("bfloat16"))
        for name, spec in ((name, read_spec(config)) for name, config in RELEASES_MORE.items())
    }
    assert sizes == {
        "llama": (131072, 0),
        "mistral": (131072, 0),
        "smollm3": (36 * 2 * 4 * 128 * 2, 0),
        "qwen3_moe": (98304, 0),
        "olmo3": (524288, 0),
        "qwen3_5_moe": (20480, 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)),
        "interns2_mobius": (20480, 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)),
        "olmo_hybrid": (122880, 24 * (30 * 96 * 192 * 4 + 11520 * 3 * 2)),
        "kimi_linear": (7 * 576 * 2, 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)),
        "kimi_k3": (24 * 576 * 2, 69 * (96 * 128 * 128 * 4 + 3 * 96 * 128 * 3 * 2)),
        "alice_ai": (12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)),
        "ling": (7 * 576 * 2, 35 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)),
        "minimax": (10 * 2 * 8 * 128 * 2, 70 * 64 * 128 * 128 * 4),
        "ling_2_5": (4 * 576 * 2, 16 * 16 * 128 * 128 * 4),
        "gigachat3_5": (10 * 576 * 2, 30 * (64 * 128 * 128 * 4 + 16384 * 3 * 2)),
        "minicpm_sala": (8 * (2 * 2 * 128 + 16) * 2, 24 * 32 * 128 * 128 * 4),
        "glm5_next": (11 * (512 + 256) * 2, 34 * (64 * 128 * 128 * 4 + 3 * 8192 * 3 * 2)),
        "qwen4_exp": (
            10 * (2 * 2 * 256 + 128) * 2,
            30 * (48 * 128 * 128 * 4 + 10240 * 3 * 2) + (16 * 2 + 10240 * 9) * 2,
        ),
        "deepseek_v4": (
            (21 * (512 + 128) // 4 + 20 * 512 // 128) * 2,
            43 * 128 * 512 * 2 + 21 * (512 + 128) * (6 * 4 + 2) + 20 * 512 * (3 * 4 + 2),
        ),
        "zaya": (40 * 2 * 2 * 128 * 2, 40 * (2 * 1280 + 128) * 2),
        "jet_nemotron": (4 * 2 * 2 * 128 * 2, 24 * (12 * 96 * 256 * 4 + 3 * 3072 * 2)),
        "jet_nemotron_4b": (10 * 2 * 2 * 128 * 2, 26 * (16 * 128 * 256 * 4 + 3 * 4096 * 2)),
        "inkling": (
            11 * 2 * 8 * 128 * 2,
            55 * 2 * 16 * 128 * (512 + 3) * 2 + 11 * 2 * 8 * 128 * 3 * 2 + 66 * 2 * 6144 * 3 * 2,
        ),
        **{  # 24 layers in a loop are 48 as the memory counts them
            name: (8 * 2 * 8 * 128 * 2, (40 * (1024 + 3) + 8 * 3) * 2 * 8 * 128 * 2 + 48 * 2 * hidden * 3 * 2)
            for name, hidden in (("inkling2", 4608), ("inkling2_loop", 2304))
        },
        "plamo3": (4 * 2 * 4 * 128 * 2, 28 * 2 * 4 * 128 * 128 * 2),
        "gpt_oss": (12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 128 * 2),
        "lfm2_moe": (12288, 18 * 2048 * 2 * 2),
        "lfm3": (6 * 2 * 4 * 128 * 2, 5 * 2 * 4 * 128 * 256 * 2 + 13 * 2048 * 6 * 2),
    }


def test_windows_of_qwen3_are_those_that_layer_types_or_max_window_layers_name() -> None:
    base = changed(QWEN3_30B_A3B, num_experts=None, num_hidden_layers=4) | {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 1000,
        "max_window_layers": 3,
    }

    def windows(config: Config) -> list[int | None]:
        return [mixer.window for mixer in read_architecture(config).mixers if isinstance(mixer, Attention)]

    assert windows(base) == [None, None, None, 1000]
    listed = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(base | {"layer_types": listed}) == [1000, None, None, 1000]
    assert windows(base | {"use_sliding_window": False}) == [None] * 4
    assert windows(base | {"sliding_window": None}) == [None] * 4


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"mlp_bias": True}, ["mlp_bias"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 48}, ["sliding_attention", "use_sliding_window"]),
        ("qwen3_moe", {"layer_types": ["linear_attention"] * 48}, ["layer_types", "linear_attention"]),
        ("qwen3_moe", {"num_experts_per_tok": 200}, ["num_experts_per_tok", "200", "128"]),
        *[
            ("interns2_mobius", {"text_config": MOBIUS["text_config"] | changes}, words)
            for changes, words in (
                ({"layer_scale": True}, ["layer_scale", "only false"]),
                ({"num_blocks": 0}, ["num_blocks", "0"]),
                ({"mlp_only_layers": [3], "intermediate_size": 64}, ["num_experts", "every layer"]),
            )
        ],
        ("olmo3", {"layer_types": ["full_attention"] * 31}, ["layer_types", "32"]),
        ("olmo_hybrid", {"linear_num_value_heads": 45}, ["linear_num_value_heads", "45", "30"]),
        ("kimi_linear", {"mla_use_nope": False}, ["mla_use_nope"]),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, ["softmax", "sigmoid"]),
        ("kimi_k3", {"hidden_act": "silu"}, ["hidden_act", "silu", "situ"]),
        ("kimi_k3", {"linear_attn_config": {"gate_lower_bound": 2.0}}, ["gate_lower_bound", "2.0", "below 0"]),
        ("alice_ai", {"kda_allow_negative_eigenvalues": True}, ["kda_allow_negative_eigenvalues"]),
        ("alice_ai", {"linear_value_head_dim": 64}, ["linear_value_head_dim", "64", "128"]),
        ("alice_ai", {"mlp_only_layers": [0]}, ["mlp_only_layers", "experts"]),
        ("kimi_linear", {"num_key_value_heads": 8}, ["num_key_value_heads", "8", "32"]),
        ("kimi_linear", {"num_expert_group": 5}, ["num_expert_group", "5", "256"]),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1]}},
            ["linear_attn_config", "27"],
        ),
        ("kimi_linear", {"num_experts_per_token": 300}, ["num_experts_per_token", "300", "256"]),
        ("ling", {"kda_lower_bound": 0.5}, ["kda_lower_bound", "0.5", "below 0"]),
        ("ling", {"score_function": "softmax"}, ["score_function", "softmax", "sigmoid"]),
        ("ling", {"num_expert_group": 7}, ["num_expert_group", "7", "512"]),
        ("ling_2_5", {"num_attention_heads": 24}, ["num_attention_heads", "24", "power of two"]),
        ("ling_2_5", {"linear_silu": True}, ["linear_silu", "True", "only false"]),
        ("ling_2_5", {"group_norm_size": 3}, ["group_norm_size", "3", "2048"]),
        ("ling_2_5", {"qk_rope_head_dim": 32}, ["qk_rope_head_dim", "32", "64"]),
        ("gigachat3_5", {"norm_type": "GatedNorm"}, ["norm_type", "GatedNorm", "ZeroCenteredGatedNorm"]),
        ("gigachat3_5", {"linear_gating_type": "sigmoid_gate"}, ["linear_gating_type", "sigmoid_gate"]),
        ("gigachat3_5", {"full_attention_layers": [40]}, ["full_attention_layers", "40"]),
        ("gigachat3_5", {"linear_attn_o_norm_eps": 1e-5}, ["linear_attn_o_norm_eps", "1e-05", "rms_norm_eps"]),
        ("plamo3", {"sliding_window": [70, 71] * 16}, ["sliding_window", "70, 71"]),
        ("plamo3", {"initial_context_length": None}, ["initial_context_length"]),
        ("plamo3", {"linear_type": "fp8"}, ["linear_type", "fp8"]),
        ("jet_nemotron", {"layer_types": ["gdn"] * 28}, ["layer_types", "gdn", "jet, attn, swa"]),
        (
            "jet_nemotron",
            {"efficient_attention_config": {"swa": {"window_size": 9}}},
            ["efficient_attention_config.jet", "layer_types"],
        ),
        (
            "jet_nemotron_4b",
            {
                "efficient_attention_config": {
                    "swa": {"window_size": 9},
                    "jet": {"expand_v": 0.3, "head_dim": 128, "num_heads": 16},
                }
            },
            ["expand_v", "0.3", "128"],
        ),
        *[
            (
                "jet_nemotron",
                {"layer_types": ["jet"] * 28, "efficient_attention_config": {"jet": {key: value}}},
                [key, str(value)],
            )
            for key, value in (
                ("expand_v", -1.0),
                ("expand_v", 1e308),
                ("norm_eps", "tiny"),
                ("norm_eps", "nan"),
                ("conv_size", 1),
                ("dconv_generator_reduction", 99999),
            )
        ],
        ("minicpm_sala", {"mixer_types": ["minicpm4"] * 31}, ["mixer_types", "32 layers"]),
        ("minicpm_sala", {"mixer_types": [["minicpm4"]] * 32}, ["mixer_types", "32 layers"]),
        ("minicpm_sala", {"attn_use_rope": None}, ["attn_use_rope", "true or false"]),
        ("minicpm_sala", {"attention_bias": True}, ["attention_bias", "only false"]),
        ("minicpm_sala", {"lightning_nkv": 2}, ["lightning_nkv", "2", "32"]),
        ("minicpm_sala", {"use_output_norm": False}, ["use_output_norm", "only true"]),
        ("minicpm_sala", {"lightning_scale": 1}, ["lightning_scale", "1/d"]),
        ("minicpm_sala", {"head_dim": 64}, ["head_dim", "64", "4096"]),
        *[
            (
                "minicpm_sala",
                {"sparse_config": MINICPM_SALA["sparse_config"] | {key: value}},
                [f"sparse_config.{key}", str(value), *words],
            )
            for key, value, *words in (
                ("kernel_size", 48, "16"),
                ("kernel_stride", 5, "2, 4, 8"),
                ("block_size", 72, "16"),
                ("window_size", 2000, "64"),
                ("dense_len", 100, "32"),
                ("topk", 1, "init_blocks"),
            )
        ],
        ("minimax", {"rotary_dim": 256}, ["rotary_dim", "256", "128"]),
        ("minimax", {"num_experts_per_tok": 40}, ["num_experts_per_tok", "40", "32"]),
        ("qwen4_exp", {"indexer_budget": 2050}, ["indexer_budget", "2050", "4"]),
        ("qwen4_exp", {"ple_layer_ids": [4]}, ["ple_layer_ids", "4", "delta"]),
        ("qwen4_exp", {"ple_embed_dim": 2570}, ["ple_embed_dim", "2570", "16"]),
        ("qwen4_exp", {"output_gate_type": "gelu"}, ["output_gate_type", "gelu", "sigmoid"]),
        ("glm5_next", {"index_topk": 2050}, ["index_topk", "2050", "16"]),
        ("glm5_next", {"indexer_types": ["shared"] * 45}, ["indexer_types", "index of their own"]),
        ("glm5_next", {"qk_rope_head_dim": 64}, ["qk_rope_head_dim", "64", "without positions"]),
        ("deepseek_v4", {"compress_ratios": [0, 8] * 22}, ["compress_ratios", "8", "128"]),
        ("deepseek_v4", {"compress_ratios": [0, 4]}, ["compress_ratios", "43"]),
        ("deepseek_v4", {"sliding_window": 2000}, ["sliding_window", "2000", "1024"]),
        ("deepseek_v4", {"o_groups": 7}, ["o_groups", "7", "64"]),
        ("deepseek_v4", {"index_head_dim": 32}, ["index_head_dim", "32", "64"]),
        ("deepseek_v4", {"scoring_func": "softmax"}, ["scoring_func", "softmax", "sqrtsoftplus"]),
        ("deepseek_v4", {"mlp_layer_types": ["dense"] * 43}, ["mlp_layer_types", "dense", "hash_moe"]),
        ("inkling", {"shared_expert_sink": False}, ["shared_expert_sink", "router"]),
        ("inkling", {"swa_num_key_value_heads": 48}, ["swa_num_key_value_heads", "48", "64"]),
        ("inkling", {"mlp_layer_types": ["moe"] * 66}, ["mlp_layer_types", "66"]),
        ("inkling2", {"scoring_func": "softmax"}, ["scoring_func", "sigmoid"]),
        ("inkling2_loop", {"loop_layer_index_start": 5}, ["loop_layer_index_start", "5", "multiple", "6"]),
        ("inkling2_loop", {"loop_layer_index_end": 30}, ["loop_layer_index_end", "30", "24"]),
        ("zaya", {"attention_bias": True}, ["attention_bias", "only false"]),
        ("zaya", {"num_experts_per_tok": 2}, ["num_experts_per_tok", "2", "only 1"]),
        ("zaya", {"layer_types": ["hybrid_sliding"] * 40, "sliding_window": None}, ["sliding_window"]),
        ("gpt_oss", {"swiglu_limit": 8.0}, ["swiglu_limit", "8.0", "7.0"]),
        ("gpt_oss", {"swiglu_alpha": 1.0}, ["swiglu_alpha", "1.0", "1.702"]),
        ("gpt_oss", {"num_experts_per_tok": 40}, ["num_experts_per_tok", "40", "32"]),
        ("lfm2_moe", {"layer_types": None}, ["layer_types"]),
        ("lfm3", {"layer_types": ["mamba"] * 24}, ["layer_types", "mamba", "conv"]),
    ],
)
def test_a_setting_that_cannot_be_served_is_named(name: str, changes: Config, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec(changed(RELEASES_MORE[name], **changes))
    assert all(word in caught.value.message for word in ["config.json", *words])
