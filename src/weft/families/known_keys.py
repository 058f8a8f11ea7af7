"""Keys of a checkpoint's JSON files that nothing reads, each with the reason why it changes no token. The lists are
closed.

    a key that is read                                       served, or refused by its name
    a key that transformers' class knows, and weft does not  here, or a test fails
    a key that transformers' class does not know             changes nothing there either; of the files next to
                                                             config.json it is named at the start

``COMMON`` and ``OF_FAMILY`` are of config.json, whose readers note each key that they ask for. ``OF_FILE`` is of the
files next to it, whose readers do not: it has the keys that are read as well. GGUF files have lists of the same kind
(``models.gguf.known_keys``). Source: the classes of transformers 5.24. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

COMMON: dict[str, tuple[str, ...]] = {
    "names, and how the file was saved": (
        "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "is_encoder_decoder", "label2id",
        "model_type", "problem_type", "return_dict", "torch_dtype", "transformers_version",
    ),
    "read elsewhere: by the generation settings, the reader of files, the wrapper": (
        "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings",
    ),
    "ids of tokens that nothing asks for": ("eod_token_id", "sep_token_id"),
    "training": (
        "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout",
        "emb_pdrop", "embd_pdrop", "embed_dropout", "embedding_dropout", "embedding_initializer_range",
        "hidden_dropout", "hidden_dropout_prob", "init_std", "initializer_range", "input_jitter_noise", "layerdrop",
        "output_router_logits", "resid_dropout", "resid_pdrop", "residual_dropout", "router_aux_loss_coef",
        "router_jitter_noise",
    ),
    "choice of code that computes the same, and forms of results": (
        "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "pretraining_tp", "use_cache",
    ),
}  # fmt: skip
_STEP_SIZES = ("time_step_floor", "time_step_max", "time_step_min")
"""Keys of Mamba's first step sizes, values of a parameter that is stored. transformers' plain torch code also keeps
step sizes above ``time_step_min``; its kernels, with which these models were trained and are served, do not."""
_MAMBA_CODE = ("use_associative_scan", "use_mamba_kernels", "use_mambapy", "use_mem_eff_path", "num_logits_to_keep")
_SCANNED = ("chunk_size", "mamba_chunk_size")
"""Keys of the number of tokens that are computed at once."""
OF_FAMILY: dict[str, tuple[str, ...]] = {
    "granite_hybrid": _SCANNED,
    "mamba2": (*_SCANNED, *_STEP_SIZES, "rescale_prenorm_residual", "time_step_rank"),
    "bamba": (*_SCANNED, "num_logits_to_keep", "z_loss_coefficient"),
    # The width is mamba_d_ssm.
    "falcon_h1": (*_SCANNED, "num_logits_to_keep", "mamba_expand"),
    # Width and number of shared experts follow from other keys.
    "nemotron_h": (*_SCANNED, *_STEP_SIZES, *_MAMBA_CODE, "rescale_prenorm_residual", "expand", "mamba_proj_bias",
                   "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type", "n_shared_experts"),
    "jamba": _MAMBA_CODE,
    "plamo2": _SCANNED,
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
    "alice_ai": ("intermediate_size",),  # of dense layers, which it has none of
    "gemma3": ("_sliding_window_pattern",),
    # A weight of training, and a number that transformers derives itself.
    "jetmoe": ("aux_loss_coef", "num_attention_heads"),
    # A limit of weights in training.
    "gemma3n": ("altup_coef_clip",),
    "recurrent_gemma": ("final_w_init_variance_scale", "w_init_variance_scale"),
    "minimax": ("block_size",),
    # Sizes that transformers derives itself.
    "deepseek_v2": ("head_dim", "qk_head_dim"),
    "deepseek_v3": ("head_dim", "qk_head_dim"),
    # mlp_layer_types has the content of the first key.
    "deepseek_v32": ("first_k_dense_replace", "head_dim", "qk_head_dim"),
    "glm_moe_dsa": ("first_k_dense_replace", "head_dim", "qk_head_dim"),
    "glm4_moe_lite": ("qk_head_dim",),
    "youtu": ("qk_head_dim",),
    "minicpm3": ("head_dim", "qk_head_dim"),
    "sarvam_mla": ("head_dim", "qk_head_dim"),
    "axk1": ("qk_head_dim",),
    # layer_types has the same content.
    "afmoe": ("global_attn_every_n_layers",),
    "cohere2_moe": ("sliding_window_pattern",),
    # Setting of a head that is not the one for next tokens.
    "cohere2": ("pooling",),
    "dots1": ("max_window_layers",),
    "exaone4": ("sliding_window_pattern",),
    # Whether a sum is in float32: it is rounded alike.
    "hy_v3": ("enable_moe_fp32_combine",),
    # Settings of heads other than the one for next tokens.
    "gpt_neox": ("classifier_dropout", "is_decoder"),
    "gpt_neox_japanese": ("is_decoder",),
    # Settings of a head that is not read, and of the order of a product.
    "gpt2": ("reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
             "summary_type", "summary_use_proj"),
    # Whether a softmax is in float32: it is here.
    "gpt_bigcode": ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    # Its positions end with n_positions, whatever this says.
    "codegen": ("n_ctx",),
    # Of the first values of the learned factors.
    "diffllama": ("lambda_std_dev",),
    "gpt_neo": ("classifier_dropout",),
    # Another order of the same sums.
    "bloom": ("slow_but_exact",),
    # Its class has feed-forwards four times as wide as the stream and no positions, whatever these say.
    "mpt": ("embedding_fraction", "expansion_ratio", "init_device", "learned_pos_emb", "norm_type"),
    "xglm": ("decoder_start_token_id",),
    # Its class has norms with another epsilon whatever this says.
    "biogpt": ("layer_norm_eps",),
    # mlp_layer_types has the content of the first key.
    "exaone_moe": ("first_k_dense_replace", "sliding_window_pattern"),
    "glm5_next": ("head_dim", "qk_head_dim"),
    "axk2": ("head_dim", "qk_head_dim"),
    "hy_v4": ("head_dim", "learnable_sink_init", "qk_head_dim"),
    "qwen4_exp": ("number_of_conv_states", "split_ngram_parts"),
    # Heads that predict further tokens are not read.
    "deepseek_v4": ("num_nextn_predict_layers",),
    "zaya": ("intermediate_size",),
    "gigachat3_5": ("head_dim",),
    # Heads that predict further tokens are not read.
    "mellum": ("mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers"),
    "inkling": ("chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids", "num_mtp_layers",
                "number_of_conv_states", "rms_norm_eps_moe_gate"),
    "ling": ("mtp_loss_scaling_factor", "qk_head_dim"),
}  # fmt: skip
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
PREPROCESSOR_CONFIG, VIDEO_PREPROCESSOR_CONFIG = "preprocessor_config.json", "video_preprocessor_config.json"
READ = "read"
"""Name of the entry of ``OF_FILE`` with the keys that readers ask for."""
_PIXELS: dict[str, tuple[str, ...]] = {
    READ: (
        "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "merge_size", "min_pixels", "max_pixels",
        "patch_size", "rescale_factor", "resample", "size", "temporal_patch_size",
    ),
    "names, and where code runs": (
        "auto_map", "backend", "device", "disable_grouping", "feature_extractor_type", "image_processor_type",
        "processor_class", "return_tensors", "transformers_version", "video_processor_type", "_processor_class",
    ),
    "forms of pictures that are decoded to RGB, whole, in one order": (
        "data_format", "default_to_square", "do_convert_rgb", "input_data_format", "model_input_names",
    ),
    "of crops, which are refused": ("crop_size",),
    "padding of batches, and forms of results": (
        "do_pad", "image_seq_length", "pad_size", "return_metadata", "return_row_col_info",
    ),
}  # fmt: skip
OF_FILE: dict[str, dict[str, tuple[str, ...]]] = {
    TOKENIZER_CONFIG: {
        READ: (
            "added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens",
            "fix_mistral_regex", "model_specific_special_tokens", "split_special_tokens",
        ),
        "names, and how the file was saved": (
            "auto_map", "backend", "files_loaded", "init_inputs", "is_local", "local_files_only", "name_or_path",
            "processor_class", "special_tokens_map_file", "tokenizer_class", "tokenizer_file", "transformers_version",
            "verbose", "_commit_hash",
        ),
        # TokenizersBackend drops or overrides them where there is a tokenizer.json.
        "said by tokenizer.json": (
            "add_bos_token", "add_dummy_prefix", "add_eos_token", "add_prefix_space", "byte_fallback", "do_lower_case",
            "legacy", "merges_file", "sp_model_kwargs", "trim_offsets", "unk_id", "vocab_file",
        ),
        "lengths of batches, which are neither padded nor cut": (
            "max_len", "max_length", "model_input_names", "model_max_length", "pad_to_multiple_of",
            "pad_token_type_id", "padding", "padding_side", "stride", "truncation", "truncation_side",
            "truncation_strategy",
        ),
        "spaces that byte-level and byte-fallback decoders leave as they are": (
            "clean_up_tokenization_spaces",
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "errors",
            "spaces_between_special_tokens",
        ),
        # Calls and reasoning are read by ``text.tools.formats``; control tokens of messages are the template's.
        "parsers of answers, templates of former versions": (
            "chat_control_tokens", "response_schema", "response_template", "use_default_system_prompt",
        ),
    },
    SPECIAL_TOKENS: {READ: ("additional_special_tokens", "extra_special_tokens")},
    GENERATION_CONFIG: {
        READ: ("do_sample", "eos_token_id", "min_p", "repetition_penalty", "temperature", "top_k", "top_p"),
        "names, ids that nothing asks for": (
            "_commit_hash", "_from_model_config", "bos_token_id", "decoder_start_token_id", "pad_token_id",
            "transformers_version",
        ),
        "what a call returns": (
            "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
        ),
        "of searches with beams, which are named": (
            "diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups",
        ),
        "of encoders": ("encoder_no_repeat_ngram_size", "is_encoder_decoder"),
        "how the same tokens are computed": (
            "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
            "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config",
            "continuous_batching_config", "disable_compile", "is_assistant", "low_memory", "max_cache_len",
            "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "prefill_chunk_size",
            "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits", "speculation_type",
            "target_lookbehind", "use_cache", "use_mtp",
        ),
    },
    PREPROCESSOR_CONFIG: _PIXELS | {
        READ: (
            *_PIXELS[READ], "do_center_crop", "do_image_splitting", "downsample_factor",
            "encoder_patch_size", "max_image_tokens", "max_pixels_tolerance", "max_tiles", "min_image_tokens",
            "min_tiles", "tile_size", "use_thumbnail",
        ),
    },
    VIDEO_PREPROCESSOR_CONFIG: _PIXELS | {
        READ: (
            *_PIXELS[READ], "cap_pixels_per_frame", "do_center_crop", "do_sample_frames", "fps",
            "max_frames", "max_video_tokens", "min_frames",
        ),
        "of a call, where the file's frames are sampled by fps": ("num_frames", "video_metadata"),
    },
}  # fmt: skip
_NAMED_TOKENS = "_token"
"""Suffix of the names of tokens in ``TOKENIZER_CONFIG`` and ``SPECIAL_TOKENS``: all of them are read."""
_SHOWN_KEYS = 8
_COMMON = frozenset(key for keys in COMMON.values() for key in keys)


def is_harmless(family: str, key: str) -> bool:
    """Return whether ``key`` changes no token of a model of ``family``."""
    return key in _COMMON or key in OF_FAMILY.get(family, ())


def is_known(file: str, key: str) -> bool:
    """Return whether ``key`` of the side file ``file`` is read, or changes no token."""
    named = file in (TOKENIZER_CONFIG, SPECIAL_TOKENS) and key.endswith(_NAMED_TOKENS)
    return named or any(key in keys for keys in OF_FILE[file].values())


def unknown_line(file: str, stated: Mapping[str, object], more: Mapping[str, object] | None = None) -> str | None:
    """Return a line that names the keys of ``stated`` that weft does not know; None where it knows them all.
    ``more``: keys that the reader of the file names itself."""
    unknown = [key for key in stated if not is_known(file, key) and key not in (more or ())]
    if not unknown:
        return None
    left = f" and {len(unknown) - _SHOWN_KEYS} more" if len(unknown) > _SHOWN_KEYS else ""
    return f"Not known in {file}, and left out: {', '.join(unknown[:_SHOWN_KEYS])}{left}."
