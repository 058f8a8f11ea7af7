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
}  # fmt: skip


def _few(config: Config, layers: int = 4) -> Config:
    """As many layers as show each kind."""
    listed = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return {"num_hidden_layers": layers} | listed


SMALLER_DENSE: dict[str, Config] = {name: _few(config) for name, config in DENSE_RELEASES.items()}
