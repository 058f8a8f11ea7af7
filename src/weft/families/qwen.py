"""Qwen3 (attention only), Qwen3-Next and Qwen3.5 (gated delta net + gated attention, dense or sparse)."""

from __future__ import annotations

from weft.architecture import Architecture, Dense, Experts, FeedForward, GatedDelta
from weft.config_keys import ConfigKeys, fail
from weft.families.reading import (
    build_architecture,
    every_nth_attention,
    experts_per_token,
    layer_kinds,
    read_attention,
)


def read_qwen3(family: str, keys: ConfigKeys) -> Architecture:
    kinds = layer_kinds(keys, lambda count: ["attention"] * count)
    if "recurrent" in kinds:
        fail("layer_types", kinds, "every layer of qwen3 is full attention")
    if keys.boolean("use_sliding_window", False) and keys.get("sliding_window") is not None:
        fail("use_sliding_window", True, "sliding windows are not served")
    attention = read_attention(keys, qk_norm=True, head_dim=128)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(family, keys, [attention] * len(kinds), [dense] * len(kinds),
                         tied=keys.boolean("tie_word_embeddings", False),
                         eps=keys.number("rms_norm_eps", 1e-6))


def read_qwen_hybrid(family: str, keys: ConfigKeys) -> Architecture:
    """Qwen3-Next and Qwen3.5 differ in how tensors are stored, not in geometry."""
    kinds = layer_kinds(keys, every_nth_attention(keys))
    attention = read_attention(keys, qk_norm=True, gated=True, partial=0.25, head_dim=256)
    if not keys.boolean("attn_output_gate", True):
        fail("attn_output_gate", False, "only the gated attention of the released checkpoints is served")
    delta = GatedDelta(k_heads=keys.integer("linear_num_key_heads", 16),
                       v_heads=keys.integer("linear_num_value_heads", 32),
                       k_dim=keys.integer("linear_key_head_dim", 128),
                       v_dim=keys.integer("linear_value_head_dim", 128),
                       conv_kernel=keys.integer("linear_conv_kernel_dim", 4))
    if delta.v_heads % delta.k_heads:
        fail("linear_num_value_heads", delta.v_heads,
             f"it must be a multiple of linear_num_key_heads {delta.k_heads}")
    return build_architecture(family, keys, [attention if kind == "attention" else delta for kind in kinds],
                         [_qwen_feed_forward(keys, layer) for layer in range(len(kinds))],
                         tied=keys.outer_boolean("tie_word_embeddings", False),
                         eps=keys.number("rms_norm_eps", 1e-6))


def _qwen_feed_forward(keys: ConfigKeys, layer: int) -> FeedForward:
    count = keys.integer("num_experts", 0, least=0)
    sparse = count > 0 and (layer + 1) % keys.integer("decoder_sparse_step", 1) == 0
    if not sparse or layer in (keys.get("mlp_only_layers") or ()):
        return Dense(keys.integer("intermediate_size"))
    return Experts(count=count, per_token=experts_per_token(keys, count),
                   width=keys.integer("moe_intermediate_size"),
                   normalized=keys.boolean("norm_topk_prob", True),
                   shared_width=keys.integer("shared_expert_intermediate_size"), shared_gate=True)
