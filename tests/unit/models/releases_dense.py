"""Configurations of releases of ``weft.families.dense`` and ``weft.families.routed``.

Keys that change nothing (dropout, ids of tokens, the version) are left out.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def release(model_type: str, sizes: tuple[int, ...], **more: Any) -> Config:
    """``sizes``: vocabulary, width, width of a feed-forward, layers, heads, KV heads, positions."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    common = {"model_type": model_type, "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    return common | dict(zip(names, sizes, strict=True)) | more


DENSE_RELEASES: dict[str, Config] = {
    "qwen2": release(  # Qwen2.5-7B-Instruct
        "qwen2", (152_064, 3584, 18_944, 28, 28, 4, 32_768), max_window_layers=28, rms_norm_eps=1e-06,
        rope_theta=1_000_000.0, sliding_window=131_072, use_sliding_window=False),
    "phi3": release(  # phi-4
        "phi3", (100_352, 5120, 17_920, 40, 40, 10, 16_384), attention_bias=False, rms_norm_eps=1e-05,
        original_max_position_embeddings=16_384, rope_scaling=None, rope_theta=250_000, sliding_window=None),
    "granite_dense": release(  # granite-3.3-8b-instruct
        "granite", (49_159, 4096, 12_800, 40, 32, 8, 131_072), attention_bias=False, attention_multiplier=0.0078125,
        embedding_multiplier=12.0, logits_scaling=16.0, mlp_bias=False, residual_multiplier=0.22, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=10_000_000.0, tie_word_embeddings=True),
    "glm": release(  # glm-4-9b-chat-hf
        "glm", (151_552, 4096, 13_696, 40, 32, 2, 131_072), attention_bias=True, head_dim=128,
        partial_rotary_factor=0.5, rms_norm_eps=1.5625e-07, rope_theta=10_000.0),
    "glm4": release(  # GLM-4-9B-0414
        "glm4", (151_552, 4096, 13_696, 40, 32, 2, 32_768), attention_bias=False, head_dim=128,
        partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_theta=10_000.0),
    "cohere": release(  # c4ai-command-r-v01
        "cohere", (256_000, 8192, 22_528, 40, 64, 64, 8192), attention_bias=False, layer_norm_eps=1e-05,
        logit_scale=0.0625, model_max_length=131_072, rope_theta=8_000_000.0, tie_word_embeddings=True,
        use_qk_norm=False),
    "cohere_plus": release(  # c4ai-command-r-plus
        "cohere", (256_000, 12_288, 33_792, 64, 96, 8, 8192), attention_bias=False, layer_norm_eps=1e-05,
        logit_scale=0.8333333333333334, model_max_length=131_072, rope_theta=75_000_000.0, tie_word_embeddings=True,
        use_qk_norm=True),
    "cohere2": release(  # c4ai-command-r7b-12-2024
        "cohere2", (256_000, 4096, 14_336, 32, 32, 8, 8192), attention_bias=False, head_dim=128, layer_norm_eps=1e-05,
        logit_scale=0.25, position_embedding_type="rope_gptj", rope_scaling=None, rope_theta=50_000, rotary_pct=1.0,
        sliding_window=4096, sliding_window_pattern=4, tie_word_embeddings=True, use_parallel_block=True),
    "olmo": release(  # OLMo-1B-hf
        "olmo", (50_304, 2048, 8192, 16, 16, 16, 2048), attention_bias=False, clip_qkv=None, rope_theta=10_000.0,
        tie_word_embeddings=True),
    "olmo2": release(  # OLMo-2-1124-7B-Instruct
        "olmo2", (100_352, 4096, 11_008, 32, 32, 32, 4096), attention_bias=False, rms_norm_eps=1e-06,
        rope_theta=500_000),
    "exaone4": release(  # EXAONE-4.0-32B
        "exaone4", (102_400, 5120, 27_392, 64, 40, 8, 131_072), head_dim=128, rms_norm_eps=1e-05, rope_scaling={
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        rope_theta=1_000_000, sliding_window=4096, sliding_window_pattern="LLLG",
        layer_types=["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(64)]),
    "ministral": release(  # the shape of Ministral-8B-Instruct-2410
        "ministral", (131_072, 4096, 12_288, 36, 32, 8, 32_768), head_dim=128, layer_types=[
            "sliding_attention" if layer % 4 else "full_attention" for layer in range(36)],
        rms_norm_eps=1e-05, rope_theta=100_000_000.0, sliding_window=4096),
    "seed_oss": release(  # Seed-OSS-36B-Instruct
        "seed_oss", (155_136, 5120, 27_648, 64, 80, 8, 524_288), attention_bias=True, attention_out_bias=False,
        head_dim=128, mlp_bias=False, rms_norm_eps=1e-06, rope_scaling={"rope_type": "default"},
        rope_theta=10_000_000.0),
    "arcee": release(  # AFM-4.5B
        "arcee", (128_004, 2560, 18_432, 36, 20, 4, 65_536), attention_bias=False, head_dim=128, hidden_act="relu2",
        mlp_bias=False, rms_norm_eps=1e-05, rope_scaling={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn"},
        rope_theta=10_000.0),
    "ernie4_5": release(  # ERNIE-4.5-0.3B-PT
        "ernie4_5", (103_424, 1024, 3072, 18, 16, 2, 131_072), head_dim=128, rms_norm_eps=1e-05, rope_scaling=None,
        rope_theta=500_000.0, tie_word_embeddings=True, use_bias=False),
    "helium": release(  # helium-1-2b
        "helium", (64_000, 2048, 8192, 28, 16, 8, 4096), attention_bias=False, head_dim=128, mlp_bias=False,
        rms_norm_eps=1e-08, rope_theta=20_000.0),
    "cwm": release(  # cwm
        "cwm", (128_256, 6144, 21_504, 64, 48, 8, 131_072), head_dim=128, rms_norm_eps=1e-05, rope_scaling={
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        rope_theta=1_000_000.0, sliding_window=8192, layer_types=[
            "sliding_attention" if layer % 4 else "full_attention" for layer in range(64)]),
    "starcoder2": release(  # starcoder2-3b
        "starcoder2", (49_152, 3072, 12_288, 30, 24, 2, 16_384), hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-05,
        rope_theta=999_999.4420358813, sliding_window=4096, tie_word_embeddings=True, use_bias=True),
    "stablelm": release(  # stablelm-2-zephyr-1_6b
        "stablelm", (100_352, 2048, 5632, 24, 32, 32, 4096), layer_norm_eps=1e-05, partial_rotary_factor=0.25,
        qk_layernorm=False, rope_scaling=None, rope_theta=10_000, use_parallel_residual=False, use_qkv_bias=True),
    "nemotron": release(  # Nemotron-Mini-4B-Instruct
        "nemotron", (256_000, 3072, 9216, 32, 24, 8, 4096), attention_bias=False, head_dim=128, hidden_act="relu2",
        mlp_bias=False, norm_eps=1e-05, partial_rotary_factor=0.5, rope_theta=10_000.0),
    "gemma": release(  # gemma-1.1-7b-it
        "gemma", (256_000, 3072, 24_576, 28, 16, 16, 8192), attention_bias=False, head_dim=256,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-06, rope_theta=10_000.0,
        tie_word_embeddings=True),
    "gemma2": release(  # gemma-2-9b-it
        "gemma2", (256_000, 3584, 14_336, 42, 16, 8, 8192), attention_bias=False, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10_000.0,
        sliding_window=4096, sliding_window_size=4096, tie_word_embeddings=True),
    "hunyuan": release(  # Hunyuan-7B-Instruct
        "hunyuan_v1_dense", (128_167, 4096, 14_336, 32, 32, 8, 32_768), attention_bias=False, attention_head_dim=128,
        head_dim=128, mlp_bias=False, rms_norm_eps=1e-05, rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic"},
        rope_theta=10_000.0, tie_word_embeddings=True, use_qk_norm=True),
    "ministral3": release(  # the text part of Ministral-3-8B-Instruct-2512, in transformers' defaults
        "ministral3", (131_072, 4096, 14_336, 34, 32, 8, 262_144), head_dim=128, rms_norm_eps=1e-05, rope_parameters={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384, "rope_theta": 1_000_000.0,
            "rope_type": "yarn", "type": "yarn"},
        sliding_window=None),
    "apertus": release(  # Apertus-8B-Instruct-2509
        "apertus", (131_072, 4096, 21_504, 32, 32, 8, 65_536), attention_bias=False, hidden_act="xielu", mlp_bias=False,
        post_norm=False, qk_norm=True, rms_norm_eps=1e-05, rope_scaling={
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"},
        rope_theta=12_000_000),
    "hyperclovax": release(  # HyperCLOVAX-SEED-Think-14B
        "hyperclovax", (110_592, 6144, 14_336, 38, 48, 8, 131_072), attention_bias=False,
        attention_multiplier=0.0078125, embedding_multiplier=10.0, head_dim=128, logits_scaling=0.125, mlp_bias=False,
        residual_multiplier=1.0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=100_000_000, use_post_norm=True),
    "jais2": release(  # transformers' defaults
        "jais2", (150_272, 3328, 26_624, 32, 26, 26, 8192), attention_bias=True, head_dim=128, hidden_act="relu2",
        layer_norm_eps=1e-05, mlp_bias=True, rope_theta=10_000.0),
    "solar_open": release(  # Solar-Open-100B
        "solar_open", (196_608, 4096, 10_240, 48, 64, 8, 131_072), attention_bias=False, first_k_dense_replace=0,
        head_dim=128, moe_intermediate_size=1280, n_group=1, n_routed_experts=128, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, rms_norm_eps=1e-05, rope_theta=1_000_000, routed_scaling_factor=1.0,
        topk_group=1),
    "exaone_moe": release(  # transformers' defaults, with a window in three of four layers
        "exaone_moe", (102_400, 4096, 16_384, 32, 32, 32, 2048), layer_types=[
            "full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)],
        mlp_layer_types=["dense"] + ["sparse"] * 31, moe_intermediate_size=1024, n_group=1, norm_topk_prob=True,
        num_experts=64, num_experts_per_tok=8, num_shared_experts=1, rms_norm_eps=1e-05, rope_theta=10_000.0,
        routed_scaling_factor=2.5, sliding_window=4096, topk_group=1),
    "flint": release(  # transformers' defaults
        "flint", (150_144, 2048, 6144, 49, 32, 4, 262_144), head_dim=128, layer_types=[
            "full_attention" if layer < 2 or layer % 4 == 1 else "sliding_attention" for layer in range(49)],
        mlp_only_layers=[0, 1], moe_intermediate_size=512, norm_topk_prob=True, num_experts=256, num_experts_per_tok=6,
        rms_norm_eps=1e-06, rope_theta=10_000.0, shared_expert_intermediate_size=1024, sliding_window=513),
    "mixtral": release(  # Mixtral-8x7B-Instruct-v0.1
        "mixtral", (32_000, 4096, 14_336, 32, 32, 8, 32_768), num_experts_per_tok=2, num_local_experts=8,
        rms_norm_eps=1e-05, rope_theta=1_000_000.0, sliding_window=None),
    "qwen2_moe": release(  # Qwen1.5-MoE-A2.7B-Chat
        "qwen2_moe", (151_936, 2048, 5632, 24, 16, 16, 8192), decoder_sparse_step=1, max_window_layers=21,
        moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60, num_experts_per_tok=4, rms_norm_eps=1e-06,
        rope_theta=1_000_000.0, shared_expert_intermediate_size=5632, sliding_window=32_768, use_sliding_window=False),
    "granite_moe": release(  # granite-3.1-3b-a800m-instruct
        "granitemoe", (49_155, 1536, 512, 32, 24, 8, 131_072), attention_bias=False, attention_multiplier=0.015625,
        embedding_multiplier=12.0, logits_scaling=6.0, num_experts_per_tok=8, num_local_experts=40,
        residual_multiplier=0.22, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10_000_000.0,
        tie_word_embeddings=True),
    "granite_swa": release(  # transformers' defaults
        "granite_swa", (100_352, 2560, 8192, 24, 20, 4, 8192), attention_bias=False, layer_rope_theta=[10_000.0] * 24,
        layer_types=["sliding_attention" if layer % 4 else "full_attention" for layer in range(24)], mlp_bias=False,
        rms_norm_eps=1e-05, sliding_window=128, tie_word_embeddings=True),
    "granite_moe_swa": release(  # transformers' defaults
        "granitemoe_swa", (32_000, 4096, 11_008, 32, 32, 32, 2048), attention_bias=False, num_experts_per_tok=2,
        layer_rope_theta=[10_000.0] * 32, num_local_experts=8, rms_norm_eps=1e-06, shared_intermediate_size=0,
        layer_types=["sliding_attention" if layer % 4 else "full_attention" for layer in range(32)],
        sliding_window=128),
    "glm4_moe": release(  # GLM-4.5-Air
        "glm4_moe", (151_552, 4096, 10_944, 46, 96, 8, 131_072), attention_bias=True, first_k_dense_replace=1,
        head_dim=128, moe_intermediate_size=1408, n_group=1, n_routed_experts=128, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, partial_rotary_factor=0.5,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1_000_000, routed_scaling_factor=1.0, topk_group=1,
        use_qk_norm=False),
    "glm4_moe_lite": release(  # GLM-4.7-Flash
        "glm4_moe_lite", (154_880, 2048, 10_240, 47, 20, 20, 202_752), attention_bias=False, first_k_dense_replace=1,
        kv_lora_rank=512, moe_intermediate_size=1536, n_group=1, n_routed_experts=64, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=4, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
        q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_scaling=None,
        rope_theta=1_000_000, routed_scaling_factor=1.8, topk_group=1, topk_method="noaux_tc", v_head_dim=256),
    "deepseek_v3": release(  # DeepSeek-V3-0324
        "deepseek_v3", (129_280, 7168, 18_432, 61, 128, 128, 163_840), attention_bias=False, first_k_dense_replace=3,
        kv_lora_rank=512, moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06, rope_scaling={
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        rope_theta=10_000, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc",
        v_head_dim=128),
    "deepseek_v2": release(  # DeepSeek-V2-Lite-Chat
        "deepseek_v2", (102_400, 2048, 10_944, 27, 16, 16, 163_840), attention_bias=False, first_k_dense_replace=1,
        kv_lora_rank=512, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64,
        n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, rms_norm_eps=1e-06, rope_scaling={
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn"},
        rope_theta=10_000, routed_scaling_factor=1.0, scoring_func="softmax", topk_group=1, topk_method="greedy",
        v_head_dim=128),
    "youtu": release(  # Youtu-LLM-2B
        "youtu", (128_256, 2048, 6144, 32, 16, 16, 131_072), attention_bias=False, kv_lora_rank=512, mlp_bias=False,
        q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06, rope_interleave=True,
        rope_scaling=None, rope_theta=1_600_000, tie_word_embeddings=True, v_head_dim=128),
    "dots1": release(  # dots.llm1.inst
        "dots1", (152_064, 4096, 10_944, 62, 32, 32, 32_768), attention_bias=False, first_k_dense_replace=1,
        head_dim=128, max_window_layers=62, moe_intermediate_size=1408, n_group=1, n_routed_experts=128,
        n_shared_experts=2, norm_topk_prob=True, num_experts_per_tok=6, rms_norm_eps=1e-05, rope_scaling=None,
        rope_theta=10_000_000, routed_scaling_factor=2.5, scoring_func="noaux_tc", sliding_window=None, topk_group=1),
    "hunyuan_moe": release(  # Hunyuan-A13B-Instruct
        "hunyuan_v1_moe", (128_167, 4096, 3072, 32, 32, 8, 32_768), attention_bias=False, attention_head_dim=128,
        head_dim=128, mlp_bias=False, moe_intermediate_size=[3072] * 32, moe_topk=[8] * 32, num_experts=64,
        num_shared_expert=[1] * 32, rms_norm_eps=1e-05, rope_scaling={
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic"},
        rope_theta=10_000.0, tie_word_embeddings=True, use_mixed_mlp_moe=True, use_qk_norm=True),
    "minimax_m2": release(  # MiniMax-M2
        "minimax_m2", (200_064, 3072, 1536, 62, 48, 8, 196_608), head_dim=128, num_experts_per_tok=8,
        num_local_experts=256, qk_norm_type="per_layer", rms_norm_eps=1e-06, rope_theta=5_000_000, rotary_dim=64,
        scoring_func="sigmoid", shared_intermediate_size=0, use_mtp=True, use_qk_norm=True, use_routing_bias=True),
    "olmoe": release(  # OLMoE-1B-7B-0924-Instruct
        "olmoe", (50_304, 2048, 1024, 16, 16, 16, 4096), attention_bias=False, clip_qkv=None, norm_topk_prob=False,
        num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10_000.0),
    "ernie4_5_moe": release(  # ERNIE-4.5-21B-A3B-PT
        "ernie4_5_moe", (103_424, 2560, 12_288, 28, 20, 4, 131_072), moe_capacity=[64, 64, 64], moe_gate="topk",
        moe_intermediate_size=1536, moe_k=6, moe_layer_interval=1, moe_layer_start_index=1, moe_num_experts=64,
        moe_num_shared_experts=2, moe_use_aux_free=True, rms_norm_eps=1e-05, rope_theta=500_000.0,
        tie_word_embeddings=True, use_bias=False),
    "exaone": release(  # EXAONE-3.5-7.8B-Instruct, in transformers' names
        "exaone", (102_400, 4096, 14_336, 32, 32, 8, 32_768), rms_norm_eps=1e-05, rope_theta=1_000_000, rope_scaling={
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
    "internlm3": release(  # internlm3-8b-instruct
        "internlm3", (128_512, 4096, 10_240, 48, 32, 2, 32_768), attention_bias=False, head_dim=128, mlp_bias=False,
        rms_norm_eps=1e-05, rope_scaling={"factor": 6.0, "rope_type": "dynamic"}, rope_theta=50_000_000),
    "iquestcoder": release(  # the shape of IQuest-Coder-V1-40B-Instruct
        "iquestcoder", (76_800, 5120, 27_648, 80, 40, 8, 131_072), attention_bias=False, head_dim=128, mlp_bias=False,
        rms_norm_eps=1e-05, rope_theta=500_000.0),
    "phi": release(  # phi-2
        "phi", (51_200, 2560, 10_240, 32, 32, 32, 2048), hidden_act="gelu_new", layer_norm_eps=1e-05,
        partial_rotary_factor=0.4, qk_layernorm=False, rope_theta=10_000.0),
    "gpt_neox": release(  # pythia-6.9b
        "gpt_neox", (50_432, 4096, 16_384, 32, 32, 32, 2048), hidden_act="gelu", layer_norm_eps=1e-05,
        rotary_emb_base=10_000, rotary_pct=0.25, use_parallel_residual=True),
    "minicpm3": release(  # MiniCPM3-4B
        "minicpm3", (73_448, 2560, 6400, 62, 40, 40, 32_768), dim_model_base=256, kv_lora_rank=256, q_lora_rank=768,
        qk_nope_head_dim=64, qk_rope_head_dim=32, rms_norm_eps=1e-05, scale_depth=1.4, scale_emb=12, rope_scaling={
            "long_factor": [1.1] * 16, "original_max_position_embeddings": 32_768, "short_factor": [1.1] * 16,
            "type": "longrope"},
        tie_word_embeddings=True),
    "sarvam_mla": release(  # sarvam-105b
        "sarvam_mla", (262_144, 4096, 16_384, 32, 64, 64, 131_072), first_k_dense_replace=1, kv_lora_rank=512,
        moe_intermediate_size=2048, num_experts=128, num_experts_per_tok=8, num_shared_experts=1, q_lora_rank=None,
        qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06, rope_scaling={
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "deepseek_yarn"},
        rope_theta=10_000.0, routed_scaling_factor=2.5, v_head_dim=128),
    "sarvam_moe": release(  # sarvam-30b
        "sarvam_moe", (262_144, 4096, 8192, 19, 64, 4, 131_072), first_k_dense_replace=1, head_dim=64,
        moe_intermediate_size=1024, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=6,
        rms_norm_eps=1e-06, rope_theta=8_000_000.0, routed_scaling_factor=2.5, use_qk_norm=True),
    "vaultgemma": release(  # vaultgemma-1b
        "vaultgemma", (256_000, 1152, 6912, 26, 4, 4, 1024), attention_bias=False, attn_logit_softcapping=None,
        final_logit_softcapping=None, head_dim=256, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10_000.0,
        sliding_window=512, tie_word_embeddings=True),
    "flex_olmo": release(  # FlexOlmo-7x7B-1T
        "flex_olmo", (100_352, 4096, 11_008, 32, 32, 32, 4096), attention_bias=False, num_experts=7,
        num_experts_per_tok=5, rms_norm_eps=1e-06, rope_theta=500_000.0),
    "llama4": release(  # the text of Llama-4-Scout-17B-16E-Instruct
        "llama4_text", (202_048, 5120, 8192, 48, 40, 8, 10_485_760), attention_bias=False, attention_chunk_size=8192,
        attn_scale=0.1, attn_temperature_tuning=True, floor_scale=8192, head_dim=128, intermediate_size_mlp=16_384,
        interleave_moe_layer_step=1, num_experts_per_tok=1, num_local_experts=16, rms_norm_eps=1e-05, rope_scaling={
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        rope_theta=500_000.0, use_qk_norm=True),
    "laguna": release(  # the shape of Laguna-XS.2
        "laguna", (100_352, 2048, 8192, 40, 48, 8, 131_072), head_dim=128, gating=True, moe_intermediate_size=512,
        layer_types=["sliding_attention" if layer % 4 else "full_attention" for layer in range(40)],
        mlp_layer_types=["dense"] + ["sparse"] * 39, num_attention_heads_per_layer=[48, 64, 64, 64] * 10,
        num_experts=256, num_experts_per_tok=8, rms_norm_eps=1e-06, shared_expert_intermediate_size=512,
        sliding_window=512, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}}),
    "afmoe": release(  # Trinity-Mini
        "afmoe", (200_192, 2048, 6144, 32, 32, 4, 131_072), global_attn_every_n_layers=4, head_dim=128,
        layer_types=["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)],
        moe_intermediate_size=1024, mup_enabled=True, num_dense_layers=2, num_experts=128, num_experts_per_tok=8,
        num_shared_experts=1, rms_norm_eps=1e-05, rope_theta=10_000.0, route_scale=2.826, sliding_window=2048),
    "mellum": release(  # the shape of Mellum2-12B-A2.5B-Base
        "mellum", (98_304, 2304, 7168, 28, 32, 4, 131_072), head_dim=128, moe_intermediate_size=896,
        layer_types=["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(28)],
        mlp_layer_types=["sparse"] * 28, norm_topk_prob=True, num_experts=64, num_experts_per_tok=8,
        rms_norm_eps=1e-06, sliding_window=1024, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "kolibri": release(  # the shape of Kolibri-1
        "kolibri1", (128_000, 2560, 6144, 50, 48, 4, 262_144), head_dim=128, moe_intermediate_size=512,
        layer_types=["full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(50)],
        norm_topk_prob=True, num_experts=384, num_experts_per_tok=6, rms_norm_eps=1e-06, rope_theta=10_000.0,
        shared_expert_intermediate_size=512, sliding_window=513),
    "lara_mini": release(  # the shape of Lara-4-Mini-Base
        "lara_mini", (151_936, 1024, 3072, 34, 16, 4, 131_072), head_dim=128, linear_conv_kernel_dim=4,
        layer_types=(["linear_attention", "sliding_attention", "linear_attention", "full_attention",
                      "sliding_attention"] * 7)[:34], linear_key_head_dim=128, linear_num_key_heads=8,
        linear_num_value_heads=16, linear_value_head_dim=128, moe_intermediate_size=512, norm_topk_prob=True,
        num_experts=128, num_experts_per_tok=4, rms_norm_eps=1e-06, rope_theta=10_000.0,
        shared_expert_intermediate_size=512, sliding_window=512, tie_word_embeddings=True),
    "nanochat": release(  # nanochat-d32
        "nanochat", (65_536, 2048, 8192, 32, 16, 16, 2048), attention_bias=False, final_logit_softcapping=15.0,
        hidden_act="relu2", rms_norm_eps=1e-06, rope_theta=10_000.0),
    "cohere_compass": release(  # the text of North-Micro-Vision, in transformers' default sizes
        "cohere_compass_text", (256_000, 8192, 22_528, 40, 64, 64, 8192), attention_bias=False, layer_norm_eps=1e-5,
        layer_types=["sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(40)],
        logit_scale=0.25, rope_parameters={"full_attention": None, "sliding_attention": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 50_000.0, "rope_type": "default"}},
        sliding_window=4096, tie_word_embeddings=True),
    "muse_glimmer": release(  # the shape of Muse-Glimmer-30B, its text
        "muse_glimmer_text", (202_048, 6656, 19_968, 52, 32, 2, 131_072), attention_bias=False,
        final_logit_softcapping=20.0, head_dim=128, hidden_activation="silu",
        layer_rope_theta=[0 if layer % 4 == 3 else 500_000.0 for layer in range(52)],
        layer_types=["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(52)],
        output_multiplier=0.19611613513818404, post_norm_eps=1e-8, qk_scale_factor=3.87, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, sliding_window=2048),
    "muse_spark": release(  # Muse-Spark-Open-816B-A42B, its text, by transformers' defaults
        "muse_spark_text", (202_048, 8192, 16_384, 62, 128, 16, 1_048_576), attention_bias=False,
        final_logit_softcapping=20.0, head_dim=64, mlp_layer_types=["sparse"] * 62, moe_hidden_size=4096,
        layer_rope_theta=[0 if layer % 4 == 1 else 500_000.0 for layer in range(62)],
        layer_types=["full_attention" if layer % 4 == 1 else "sliding_attention" for layer in range(62)],
        moe_intermediate_size=4096, num_experts_per_tok=8, num_local_experts=256,
        output_multiplier=0.1767766952966369, post_norm_eps=1e-8, qk_scale_factor=5.4730064863875,
        residual_gate_temperature=0.3, rms_norm_eps=1e-5, routed_scaling_factor=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, sliding_window=2048),
    "hy_v3": release(  # Hy3-preview
        "hy_v3", (120_832, 4096, 13_312, 80, 64, 8, 262_144), first_k_dense_replace=1, head_dim=128,
        moe_intermediate_size=1536, num_experts=192, num_experts_per_tok=8, num_shared_experts=1, qk_norm=True,
        rms_norm_eps=1e-05, rope_parameters={"rope_theta": 11_158_840.0, "rope_type": "default"}, route_norm=True,
        router_scaling_factor=2.826),
    "axk1": release(  # the shape of A.X-K1
        "axk1", (163_840, 7168, 18_432, 61, 64, 64, 131_072), first_k_dense_replace=1, kv_lora_rank=512,
        moe_intermediate_size=2048, n_group=8, n_routed_experts=192, n_shared_experts=1, num_experts_per_tok=8,
        q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06, routed_scaling_factor=2.5,
        topk_group=4, v_head_dim=128),
    "mimo_v2_flash": release(  # MiMo-V2-Flash
        "mimo_v2_flash", (152_576, 4096, 16_384, 48, 64, 4, 262_144), add_full_attention_sink_bias=False,
        add_swa_attention_sink_bias=True, attention_bias=False, attention_value_scale=0.707, head_dim=192,
        hybrid_layer_pattern=[int(layer > 0 and layer % 6 != 5) for layer in range(48)], layernorm_epsilon=1e-05,
        moe_intermediate_size=2048, moe_layer_freq=[0] + [1] * 47, n_group=1, n_routed_experts=256,
        n_shared_experts=None, norm_topk_prob=True, num_experts_per_tok=8, partial_rotary_factor=0.334,
        rope_theta=5_000_000, routed_scaling_factor=None, scoring_func="sigmoid", sliding_window=128,
        sliding_window_size=128, swa_head_dim=192, swa_num_attention_heads=64, swa_num_key_value_heads=8,
        swa_rope_theta=10_000, swa_v_head_dim=128, topk_group=1, topk_method="noaux_tc", v_head_dim=128),
    "cohere2_moe": release(  # transformers' default
        "cohere2_moe", (256_000, 8192, 22_528, 40, 64, 64, 8192), head_dim=128, layer_norm_eps=1e-05,
        logit_scale=0.0625, num_experts=8, num_experts_per_tok=2, rope_theta=10_000.0, sliding_window=4096,
        tie_word_embeddings=True),
    "deepseek_v32": release(  # DeepSeek-V3.2
        "deepseek_v32", (129_280, 7168, 18_432, 61, 128, 128, 163_840), attention_bias=False, first_k_dense_replace=3,
        index_head_dim=128, index_n_heads=64, index_topk=2048, kv_lora_rank=512, moe_intermediate_size=2048,
        moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
        num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-06, rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "type": "yarn",
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}, rope_theta=10_000, routed_scaling_factor=2.5,
        scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc", v_head_dim=128),
    "glm_moe_dsa": release(  # the shape of GLM-5.2
        "glm_moe_dsa", (154_880, 6144, 12_288, 78, 64, 64, 1_048_576), attention_bias=False, first_k_dense_replace=3,
        index_head_dim=128, index_n_heads=32, index_skip_topk_offset=3, index_topk=2048, index_topk_freq=4,
        indexer_rope_interleave=True, kv_lora_rank=512, moe_intermediate_size=2048, n_group=1, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=2048,
        qk_nope_head_dim=192, qk_rope_head_dim=64, rms_norm_eps=1e-05,
        rope_parameters={"rope_theta": 8_000_000, "rope_type": "default"}, routed_scaling_factor=2.5,
        scoring_func="sigmoid", topk_group=1, topk_method="noaux_tc", v_head_dim=256),
    "hy_v4": release(  # transformers' default
        "hy_v4", (120_832, 2816, 6912, 34, 32, 32, 262_144), hc_eps=1e-06, hc_magnitude=2.0, hc_mult=4,
        index_head_dim=128, index_n_heads=16, index_topk=2048, kv_lora_rank=512, learnable_sink_init=0.0,
        mlp_layer_types=["dense"] + ["sparse"] * 33, moe_intermediate_size=768, n_group=1, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, q_lora_rank=1536, qk_nope_head_dim=192,
        qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
        routed_scaling_factor=2.827, swiglu_limit=10.0, topk_group=1, v_head_dim=256),
    "axk2": release(  # transformers' default, A.X-K2-Light
        "axk2", (163_840, 2048, 5120, 48, 32, 32, 131_072), attention_bias=False, first_k_dense_replace=1,
        gated_norm_rank=16, index_head_dim=128, index_n_heads=16, index_topk=2048, kv_lora_rank=128,
        moe_intermediate_size=512, moe_layer_freq=1, n_group=None, n_routed_experts=128, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, q_lora_rank=384, qk_nope_head_dim=64, qk_rope_head_dim=32,
        rms_norm_eps=1e-06, rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
        routed_scaling_factor=2.5, topk_group=None, v_head_dim=64),
    "dots3_note": release(  # the text of dots3-note-prev, by transformers' defaults
        "dots3_note_text", (152_064, 5120, 13_824, 46, 128, 128, 524_288), attention_bias=False,
        first_k_dense_replace=1, index_head_dim=128, index_n_heads=64, index_topk=2048, kv_lora_rank=512,
        moe_intermediate_size=1536, moe_layer_freq=[0] + [1] * 45, moe_shared_expert_intermediate_size=1536, n_group=1,
        n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, q_lora_rank=1024,
        qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_theta=80_000_000, sliding_window_size=512,
        routed_scaling_factor=1.0, swa_rope_theta=50_000, topk_group=1, use_dsa=True, use_sliding_window=True,
        v_head_dim=128, layer_types=[
            "full_attention" if layer < 2 or layer % 4 == 1 else "sliding_attention" for layer in range(46)]),
    "longcat_flash": {  # LongCat-Flash-Chat
        "model_type": "longcat_flash", "torch_dtype": "bfloat16", "vocab_size": 131_072, "hidden_size": 6144,
        "ffn_hidden_size": 12_288, "expert_ffn_hidden_size": 2048, "num_layers": 28, "num_attention_heads": 64,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "routed_scaling_factor": 6.0, "n_routed_experts": 512,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-05, "rope_theta": 10_000_000.0, "attention_bias": False,
        "attention_method": "MLA", "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12},
    "falcon": release(  # falcon-7b-instruct
        "falcon", (65_024, 4544, 0, 32, 71, 0, 2048), alibi=False, bias=False, hidden_act="gelu",
        layer_norm_epsilon=1e-05, multi_query=True, new_decoder_architecture=False, parallel_attn=True,
        tie_word_embeddings=True),
    "falcon_40b": release(  # falcon-40b-instruct
        "falcon", (65_024, 8192, 0, 60, 128, 0, 2048), alibi=False, bias=False, hidden_act="gelu",
        layer_norm_epsilon=1e-05, multi_query=True, new_decoder_architecture=True, num_kv_heads=8, parallel_attn=True,
        tie_word_embeddings=True),
    "phimoe": release(  # Phi-3.5-MoE-instruct
        "phimoe", (32_064, 4096, 6400, 32, 32, 8, 131_072), attention_bias=True, lm_head_bias=True,
        num_experts_per_tok=2, num_local_experts=16, original_max_position_embeddings=4096, rms_norm_eps=1e-05,
        rope_scaling={"long_factor": [1.5] * 64, "long_mscale": 1.243163121016122, "short_factor": [1.0] * 64,
                      "original_max_position_embeddings": 4096, "short_mscale": 1.1, "type": "longrope"},
        rope_theta=10_000.0, router_jitter_noise=0.01, sliding_window=131_072),
    "aria": release(  # the text of Aria
        "aria_text", (100_352, 2560, 1664, 28, 20, 20, 65_536), moe_num_experts=64, moe_num_shared_experts=2,
        moe_topk=6, rms_norm_eps=1e-06, rope_theta=5_000_000),
    "diffllama": release(  # DiffLlama-1B
        "diffllama", (102_400, 2048, 8192, 16, 32, 8, 8192), attention_bias=False, attention_dropout=0.0,
        head_dim=64, initializer_range=0.02, lambda_std_dev=0.1, mlp_bias=False, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=10_000.0),
    "persimmon": {  # persimmon-8b-base
        "attention_dropout": 0.0, "bos_token_id": 71_013, "eos_token_id": 71_013, "hidden_act": "relu2",
        "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 16_384,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 16_384, "model_type": "persimmon",
        "num_attention_heads": 64, "num_hidden_layers": 36, "partial_rotary_factor": 0.5, "qk_layernorm": True,
        "rope_scaling": None, "rope_theta": 25_000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 262_144},
    "gpt_neox_japanese": {  # gpt-neox-japanese-2.7b
        "attention_dropout": 0.1, "bos_token_id": 31_999, "eos_token_id": 31_999, "hidden_act": "gelu",
        "hidden_dropout": 0, "hidden_size": 2560, "initializer_range": 0.02, "intermediate_multiple_size": 4,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox_japanese",
        "num_attention_heads": 32, "num_hidden_layers": 32, "rotary_emb_base": 10_000, "rotary_pct": 1.0,
        "use_cache": True, "vocab_size": 32_000},
    "opt": {  # opt-125m
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "model_type": "opt", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "prefix": "</s>", "torch_dtype": "float16", "use_cache": True, "vocab_size": 50_272,
        "word_embed_proj_dim": 768},
    "gpt2": {
        "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50_256, "embd_pdrop": 0.1,
        "eos_token_id": 50_256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50_257},
    "gpt_bigcode": {  # starcoderbase
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "attn_pdrop": 0.1, "bos_token_id": 0,
        "embd_pdrop": 0.1, "eos_token_id": 0, "layer_norm_epsilon": 1e-05, "model_type": "gpt_bigcode",
        "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24_576, "n_layer": 40, "n_positions": 8192,
        "resid_pdrop": 0.1, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
        "torch_dtype": "float32", "vocab_size": 49_152},
    "gptj": {  # gpt-j-6b
        "activation_function": "gelu_new", "attn_pdrop": 0.0, "bos_token_id": 50_256, "embd_pdrop": 0.0,
        "eos_token_id": 50_256, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16,
        "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64,
        "scale_attn_weights": True, "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 50_400},
    "codegen": {  # codegen-2B-mono
        "activation_function": "gelu_new", "attn_pdrop": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0,
        "eos_token_id": 50_256, "gradient_checkpointing": False, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "codegen", "n_ctx": 2048, "n_embd": 2560, "n_head": 32,
        "n_inner": None, "n_layer": 32, "n_positions": 2048, "resid_pdrop": 0.0, "rotary_dim": 64,
        "scale_attn_weights": True, "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 51_200},
    "bloom": {  # bloom-7b1
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True,
        "model_type": "bloom", "n_embed": 4096, "n_inner": None, "n_layer": 30, "num_attention_heads": 32,
        "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 4, "seq_length": 2048, "skip_bias_add": True,
        "skip_bias_add_qkv": False, "unk_token_id": 0, "use_cache": True, "vocab_size": 250_880},
    "mpt": {  # mpt-7b
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
            "qk_ln": False, "softmax_scale": None},
        "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu",
        "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "model_type": "mpt", "n_heads": 32,
        "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
        "torch_dtype": "bfloat16", "use_cache": False, "vocab_size": 50_432},
    "dbrx": {  # dbrx-instruct
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500_000}, "d_model": 6144,
        "emb_pdrop": 0.0, "ffn_config": {
            "ffn_hidden_size": 10_752, "model_type": "", "moe_jitter_eps": 0, "moe_loss_weight": 0.05,
            "moe_num_experts": 16, "moe_top_k": 4},
        "initializer_range": 0.02, "max_seq_len": 32_768, "model_type": "dbrx", "n_heads": 48, "n_layers": 40,
        "output_router_logits": False, "resid_pdrop": 0.0, "router_aux_loss_coef": 0.05,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100_352},
    "jetmoe": {  # jetmoe-8b
        "activation_function": "silu", "attention_dropout": 0.0, "aux_loss_coef": 0.01, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_size": 2048, "initializer_range": 0.01, "intermediate_size": 5632,
        "kv_channels": 128, "max_position_embeddings": 4096, "model_type": "jetmoe", "num_experts_per_tok": 2,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 10_000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 32_000},
    "gpt_neo": {  # gpt-neo-1.3B
        "activation_function": "gelu_new", "attention_dropout": 0, "bos_token_id": 50_256, "eos_token_id": 50_256,
        "attention_layers": ["global", "local"] * 2, "attention_types": [[["global", "local"], 2]],
        "embed_dropout": 0, "gradient_checkpointing": False, "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": None, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neo", "num_heads": 16, "num_layers": 4, "resid_dropout": 0, "vocab_size": 50_257,
        "window_size": 256},
    "xglm": {  # xglm-564M
        "activation_dropout": 0, "activation_function": "gelu", "attention_dropout": 0.1, "attention_heads": 16,
        "bos_token_id": 0, "d_model": 1024, "decoder_start_token_id": 2, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 4096, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "xglm",
        "num_layers": 24, "pad_token_id": 1, "scale_embedding": True, "vocab_size": 256_008},
    "biogpt": {
        "activation_dropout": 0.0, "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 4096, "layer_norm_eps": 1e-12, "layerdrop": 0.0, "max_position_embeddings": 1024,
        "model_type": "biogpt", "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1,
        "scale_embedding": True, "vocab_size": 42_384},
    "nemotron_nas": {   # Super 49B: its sizes, in an order of the tests' own
        "architectures": ["DeciLMForCausalLM"], "attention_bias": False, "block_configs": [
            {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False},
             "ffn": {"ffn_mult": 5.25, "no_op": False, "replace_with_linear": False}},
            {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
             "ffn": {"ffn_mult": 2.625, "no_op": False, "replace_with_linear": False}}] * 31 + [
            {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 1.3125, "no_op": False}}] * 18,
        "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": None, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "nemotron-nas", "num_attention_heads": 64, "num_hidden_layers": 80,
        "num_key_value_heads": None, "rms_norm_eps": 1e-05, "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256},
    "minimax_m3": release(  # the shape of MiniMax-M3
        "minimax_m3_vl_text", (200_064, 6144, 3072, 60, 64, 4, 524_288), dense_intermediate_size=12_288, head_dim=128,
        moe_layer_freq=[0] * 3 + [1] * 57, n_shared_experts=1, num_experts_per_tok=4, num_local_experts=128,
        num_mtp_modules=0, qk_norm_type="per_head", rms_norm_eps=1e-06, rope_theta=5_000_000, rotary_dim=64,
        routed_scaling_factor=2.0, scoring_func="sigmoid", shared_intermediate_size=3072, swiglu_alpha=1.702,
        swiglu_limit=7.0, use_gemma_norm=True, use_qk_norm=True, use_routing_bias=True, sparse_attention_config={
            "sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_block_size": 128, "sparse_index_dim": 128,
            "sparse_disable_index_value": [0] * 3 + [1] * 57, "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_num_index_heads": 4, "sparse_score_type": "max", "sparse_topk_blocks": 16,
            "use_sparse_attention": True}) | {"hidden_act": "swigluoai"},
}  # fmt: skip


def _few(config: Config, layers: int = 4) -> Config:
    """As many layers as show each kind."""
    lists = (
        "block_configs",
        "layer_types",
        "mlp_layer_types",
        "layer_rope_theta",
        "moe_topk",
        "moe_intermediate_size",
        "num_shared_expert",
        "num_attention_heads_per_layer",
        "hybrid_layer_pattern",
        "moe_layer_freq",
    )
    listed = {key: config[key][:layers] for key in lists if isinstance(config.get(key), list)}
    if sparse := config.get("sparse_attention_config"):
        cut = {key: value[:layers] if isinstance(value, list) else value for key, value in sparse.items()}
        listed["sparse_attention_config"] = cut
    experts = {key: 16 for key in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(key, 0) > 16}
    count = next((key for key in ("n_layer", "n_layers", "num_layers") if key in config), "num_hidden_layers")
    return {count: layers} | listed | experts


SMALLER_DENSE: dict[str, Config] = {name: _few(config) for name, config in DENSE_RELEASES.items()}
