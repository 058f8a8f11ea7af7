"""Keys of a GGUF header that no layout asks for, each with the reason why it changes no answer. The lists are closed.

    a key that the layout of the architecture asks for       served, or refused by its name
    a key that says nothing at one value (``NEUTRAL``)       only that value
    a key that is here                                       ignored
    any other key of the architecture or the tokenizer       refused by its name
    a key of another namespace (names, licences, imatrix)    says nothing of the model

As ``families.known_keys`` for config.json. Spellings are those of llama.cpp's converters and of Ollama's. Source: the
keys of the package ``gguf``, llama.cpp's ``conversion`` package, Ollama's ``convert`` package.
"""

from __future__ import annotations

NEUTRAL: dict[str, object] = {
    "activation_sparsity_scale": 0.0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.output_scale": 1.0,
    "attention.relative_buckets_count": 0,
    "attention.scale": 0.0,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 0,
    "attention.temperature_length": 0,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_gating_func": 1,
    "expert_group_scale": 1.0,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "n_deepstack_layers": 0,
    "norm_top_k_prob": True,
    "rescale_every_n_layers": 0,
    "residual_scale": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.extrapolation_factor": 1.0,
    "rope.scaling.factor": 1.0,
    "rope.scaling.type": "none",
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scale_linear": 1.0,
    "router_logit_softcapping": 0.0,
    "ssm.v_head_reordered": True,
    "swiglu_clamp_exp": 0.0,
    "swiglu_clamp_shexp": 0.0,
    "swin_norm": False,
    "token_shift_count": 2,
    "use_parallel_residual": False,
}
"""Keys of some architecture that change its answers, and the values at which they change nothing. A file of an
architecture that does not read a key may only have it at this value.
"""
OF_ARCHITECTURE: dict[str, tuple[str, ...]] = {
    "sizes that tensors have": (
        "attention.decay_lora_rank", "attention.gate_lora_rank", "attention.iclr_lora_rank",
        "attention.head_dim", "head_dim", "attention.key_length", "attention.value_length",
        "attention.value_length_swa", "attention.value_residual_mix_lora_rank",
        "classifier.output_labels", "embedding_length_out", "expert_feed_forward_length",
        "expert_shared_feed_forward_length", "feed_forward_length", "features_length", "vocab_size",
    ),
    "the kind of a layer, which its tensors show": (
        "attention.head_count_kv", "full_attention_interval", "leading_dense_block_count", "moe_every_n_layers",
        "attention.recurrent_layers", "recurrent_layers",
    ),
    "parts that a model without them has numbers for": (
        "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.head_count",
        "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "expert_count", "expert_group_count",
        "expert_group_used_count", "expert_shared_count", "expert_used_count", "nextn_predict_layers",
        "rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base", "rope.freq_base_swa",
        "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "ssm.conv_kernel", "ssm.dt_b_c_rms", "ssm.group_count", "ssm.inner_size",
        "ssm.state_size", "ssm.time_step_rank",
    ),
    "turns by the places of pictures, which are not read out of GGUF files": (
        "mrope_sections", "rope.dimension_sections", "rope.mrope_interleaved", "rope.mrope_section",
        "image_token_id", "vision_end_token_id", "vision_start_token_id", "vision_token_id",
    ),
    "read elsewhere, or how the file was made": (
        "altup.lr_multiplier", "pooling_type", "split.count", "split.no", "split.tensors.count", "tensor_data_layout",
    ),
}  # fmt: skip
TOWERS = ("audio.", "mm.", "vision.")
"""Beginnings of keys of towers, whose tensors are not read."""
OF_TOKENIZER: dict[str, tuple[str, ...]] = {
    "read by ``vocabulary``": (
        "ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix", "ggml.bos_token_id", "ggml.eom_token_id",
        "ggml.eos_token_id", "ggml.eos_token_ids", "ggml.eot_token_id", "ggml.merges", "ggml.model",
        "ggml.padding_token_id", "ggml.pre", "ggml.scores", "ggml.token_type", "ggml.tokens",
        "ggml.unknown_token_id", "chat_template",
    ),
    "names of tokens that nothing asks for": (
        "ggml.bos_token_ids", "ggml.cls_token_id", "ggml.fim_mid_token_id", "ggml.fim_pad_token_id",
        "ggml.fim_pre_token_id", "ggml.fim_rep_token_id", "ggml.fim_sep_token_id", "ggml.fim_suf_token_id",
        "ggml.mask_token_id", "ggml.middle_token_id", "ggml.prefix_token_id", "ggml.separator_token_id",
        "ggml.seperator_token_id", "ggml.suffix_token_id", "ggml.token_type_count",
    ),
    "put before or after a text only by encoders": (
        "ggml.add_cls_token", "ggml.add_mask_token", "ggml.add_padding_token", "ggml.add_unknown_token",
    ),
    "the same tokenizer in another form, or templates of other names": (
        "chat_templates", "huggingface.json", "rwkv.world",
    ),
}  # fmt: skip
NEUTRAL_OF_TOKENIZER: dict[str, object] = {
    "ggml.add_sep_token": False,
    "ggml.add_separator_token": False,
    "ggml.remove_extra_whitespaces": False,
}
_KNOWN = frozenset(name for names in OF_ARCHITECTURE.values() for name in names)
_KNOWN_OF_TOKENIZER = frozenset(name for names in OF_TOKENIZER.values() for name in names)


def is_harmless(name: str) -> bool:
    """Return whether the key ``name`` of an architecture that does not ask for it changes no answer."""
    return name in _KNOWN or name.startswith(TOWERS)


def is_known_of_tokenizer(name: str) -> bool:
    """Return whether ``tokenizer.`` + ``name`` is read or changes no token id."""
    return name in _KNOWN_OF_TOKENIZER or name.startswith("chat_template.")
