"""Keys of config.json that no family reads, each with the reason why it changes no token. The lists are closed.

    a key that the family reads                             served, or refused by its name
    a key that transformers' class knows, and weft does not  here, or a test fails
    a key that transformers' class does not know             changes nothing there either

Keys that layers of any class read without the class knowing them (``is_causal``) are refused by name in
``weft.families``. Source: the configuration classes and models of transformers 5.24. Pure.
"""

from __future__ import annotations

COMMON: dict[str, tuple[str, ...]] = {
    "names, and how the file was saved": (
        "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "is_encoder_decoder", "label2id",
        "model_type", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    ),
    "read elsewhere: by the generation settings, the reader of files, the wrapper": (
        "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings",
    ),
    "training": (
        "attention_dropout", "hidden_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef",
    ),
    "which code computes the same, and what it returns": (
        "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "pretraining_tp", "use_cache",
    ),
}  # fmt: skip
_STEP_SIZES = ("time_step_floor", "time_step_max", "time_step_min")
"""Of Mamba: the first values of a parameter that is stored. transformers' plain torch code also keeps step sizes
above ``time_step_min``; its kernels, with which these models were trained and are served, do not."""
_MAMBA_CODE = ("use_associative_scan", "use_mamba_kernels", "use_mambapy", "use_mem_eff_path", "num_logits_to_keep")
_SCANNED = ("chunk_size", "mamba_chunk_size")
"""Tokens that are computed at once."""
OF_FAMILY: dict[str, tuple[str, ...]] = {
    # Of batches with padding, which there is none of here.
    "lfm2": ("conv_zero_padding",),
    "granite_hybrid": _SCANNED,
    "mamba2": (*_SCANNED, *_STEP_SIZES, "rescale_prenorm_residual", "time_step_rank"),
    "bamba": (*_SCANNED, "num_logits_to_keep", "z_loss_coefficient"),
    # The width is mamba_d_ssm.
    "falcon_h1": (*_SCANNED, "num_logits_to_keep", "mamba_expand"),
    # Width and number of shared experts follow from other keys.
    "nemotron_h": (*_SCANNED, *_STEP_SIZES, *_MAMBA_CODE, "rescale_prenorm_residual", "expand", "mamba_proj_bias",
                   "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type", "n_shared_experts"),
    "jamba": _MAMBA_CODE,
    "zamba": (*_STEP_SIZES, *_MAMBA_CODE),
    # Sizes that transformers derives itself.
    "zamba2": (*_SCANNED, *_STEP_SIZES, *_MAMBA_CODE,
               "hybrid_layer_ids", "kv_channels", "num_query_groups", "use_conv_bias"),
    "mamba": (*_STEP_SIZES, *_MAMBA_CODE, "rescale_prenorm_residual", "time_step_init_scheme", "time_step_scale"),
    "falcon_mamba": (*_STEP_SIZES, *_MAMBA_CODE, "rescale_prenorm_residual", "time_step_init_scheme",
                     "time_step_scale"),
    "xlstm": (*_SCANNED, "autocast_kernel_dtype", "chunkwise_kernel", "inference_state_dtype",
              "max_inference_chunksize", "mode", "norm_reduction_force_float32", "return_last_states",
              "sequence_kernel", "step_kernel"),
    "olmo_hybrid": ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max",
                    "linear_dt_min"),
    "kimi_linear": ("head_dim", "qk_head_dim"),
    "gemma3": ("_sliding_window_pattern",),
    "recurrent_gemma": ("final_w_init_variance_scale", "w_init_variance_scale"),
    "minimax": ("block_size", "router_jitter_noise"),
    "glm5_next": ("head_dim", "qk_head_dim"),
    "qwen4_exp": ("number_of_conv_states", "split_ngram_parts"),
    "zaya": ("intermediate_size",),
    "gigachat3_5": ("head_dim",),
    # Heads that predict further tokens are not read.
    "inkling": ("chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids", "num_mtp_layers",
                "number_of_conv_states", "rms_norm_eps_moe_gate"),
    "ling": ("mtp_loss_scaling_factor", "qk_head_dim"),
}  # fmt: skip
_COMMON = frozenset(key for keys in COMMON.values() for key in keys)


def is_harmless(family: str, key: str) -> bool:
    """Whether ``key`` changes no token of a model of ``family``."""
    return key in _COMMON or key in OF_FAMILY.get(family, ())
