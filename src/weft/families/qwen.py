"""Qwen3 (attention only), Qwen3-Next and Qwen3.5 (gated delta net + gated attention), dense or sparse."""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    MtpLayer,
)
from weft.families.config_keys import ConfigKeys, fail
from weft.families.reading import (
    WINDOW_KIND,
    Family,
    build_architecture,
    every_nth_attention,
    experts_per_token,
    kinds_with_windows,
    layer_kinds,
    read_attention,
    states_window,
    windowed,
)


def read_qwen3(family: str, keys: ConfigKeys) -> Architecture:
    """Dense and mixture of experts. Windows, where ``use_sliding_window`` says so: the layers that
    ``layer_types`` names, or those from ``max_window_layers`` on; in the sparse models all."""
    count = keys.integer("num_hidden_layers")
    sparse = _expert_count(keys) > 0
    full = read_attention(keys, qk_norm=True, head_dim=None if sparse else 128)
    windows = keys.boolean("use_sliding_window", False) and states_window(keys)
    first = 0 if sparse else keys.integer("max_window_layers", 28, least=0)
    kinds = kinds_with_windows(keys, ("full_attention", WINDOW_KIND),
                               [WINDOW_KIND if windows and i >= first else "full_attention"
                                for i in range(count)])
    if WINDOW_KIND in kinds and not windows:
        fail("layer_types", WINDOW_KIND, "use_sliding_window and sliding_window say that there is no window")
    window = windowed(full, keys, default=4096, max_positions=32768) if windows else full
    return build_architecture(family, keys, [window if kind == WINDOW_KIND else full for kind in kinds],
                         [_qwen_feed_forward(keys, layer, shared=False) for layer in range(count)],
                         tied=keys.boolean("tie_word_embeddings", False),
                         eps=keys.number("rms_norm_eps", 1e-6), max_positions=32768)


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
    return build_architecture(
        family, keys, [attention if kind == "attention" else delta for kind in kinds],
        [_qwen_feed_forward(keys, layer, shared=True) for layer in range(len(kinds))],
        tied=keys.outer_boolean("tie_word_embeddings", False), eps=keys.number("rms_norm_eps", 1e-6),
        mtp=_mtp(keys, attention))


def _mtp(keys: ConfigKeys, attention: Attention) -> MtpLayer | None:
    """One layer that shares the embedding. Qwen3-Next's config.json does not mention its head."""
    layers = keys.integer("mtp_num_hidden_layers", 1, least=0)
    if layers != 1 or keys.boolean("mtp_use_dedicated_embeddings", False):
        return None
    return MtpLayer(attention, _qwen_feed_forward(keys, 0, shared=True))


def _expert_count(keys: ConfigKeys) -> int:
    return keys.integer("num_experts", keys.integer("num_local_experts", 0, least=0), least=0)


def _qwen_feed_forward(keys: ConfigKeys, layer: int, *, shared: bool) -> FeedForward:
    """``shared``: the families with a shared expert; they normalise weights where config.json is silent."""
    count = _expert_count(keys)
    sparse = count > 0 and (layer + 1) % keys.integer("decoder_sparse_step", 1) == 0
    if not sparse or layer in (keys.get("mlp_only_layers") or ()):
        return Dense(keys.integer("intermediate_size"))
    return Experts(count=count, per_token=experts_per_token(keys, count),
                   width=keys.integer("moe_intermediate_size"),
                   normalized=keys.boolean("norm_topk_prob", shared),
                   shared_width=keys.integer("shared_expert_intermediate_size") if shared else 0,
                   shared_gate=shared)


FAMILIES = (
    Family("qwen3", ("qwen3", "qwen3_moe"), read_qwen3, builder="llama"),
    Family("qwen3_5", ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), read_qwen_hybrid,
           builder="qwen3_5"),
    Family("qwen3_next", ("qwen3_next",), read_qwen_hybrid, builder="qwen3_5"),
)
