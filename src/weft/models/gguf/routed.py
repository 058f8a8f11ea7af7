"""Layouts of files of experts under softmax attention (``families.routed``, ``deepseek``, ``mixed``), a row for each
architecture, as those of ``dense``.

    glm4moe, dots1                  experts that a bias and groups choose, after dense layers
    ernie4_5-moe, minimax-m2        a bias chooses
    afmoe                           gated attention, windows, norms around blocks
    granitemoe                      rows of q and k interleaved; multipliers
    mellum, laguna                  windows with positions of their own; in the second gates and heads by layer
    llama4                          chunks, and every fourth layer without positions
    hunyuan-moe, exaone-moe         queries and keys normed; in the second windows, and layers as DeepSeek V3's

Source: llama.cpp's ``conversion`` package, and gguf's ``tensor_mapping``.
"""

from __future__ import annotations

from typing import Any

from weft.models.gguf import parts
from weft.models.gguf.dense import AFTER, DenseLayout, every_fourth
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import Names

_BIAS: Names = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_EXPERTS = parts.sparse("mlp") | parts.shared("mlp.shared_experts") | _BIAS


def _dense_first(keys: GgufKeys) -> int:
    """Return the number of layers before the first one with experts."""
    sparse = keys.layers_with("ffn_gate_inp.weight")
    first = sparse.index(True) if any(sparse) else keys.layers
    if not all(sparse[first:]):
        keys.fail("leading_dense_block_count", first, "layers without experts after one that has some are not served")
    return first


def _deepseek(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of experts that DeepSeek V3 has."""
    parts.check_gating(keys, parts.SIGMOID)
    return {
        "first_k_dense_replace": _dense_first(keys),
        "n_routed_experts": keys.integer("expert_count", least=1),
        "num_experts_per_tok": keys.integer("expert_used_count", least=1),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", least=1),
        "n_shared_experts": keys.integer("expert_shared_count", 1),
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "num_nextn_predict_layers": keys.integer("nextn_predict_layers", 0),
    }


def _glm4(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return _deepseek(keys, config) | {"use_qk_norm": any(keys.layers_with("attn_q_norm.weight"))}


def _ernie(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "moe_num_experts": keys.integer("expert_count", least=1),
        "moe_k": keys.integer("expert_used_count", least=1),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", least=1),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1, least=1),
        "use_bias": config["attention_bias"],
    }


def _minimax(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    parts.check_gating(keys, parts.SIGMOID)
    return {
        "num_local_experts": keys.integer("expert_count", least=1),
        "num_experts_per_tok": keys.integer("expert_used_count", least=1),
        "intermediate_size": keys.integer("expert_feed_forward_length", least=1),
    }


def _afmoe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the further keys of Trinity. llama.cpp scales the embedding of each."""
    parts.check_gating(keys, parts.SIGMOID)
    return every_fourth(keys, config) | {
        "num_dense_layers": _dense_first(keys),
        "num_experts": keys.integer("expert_count", least=1),
        "num_experts_per_tok": keys.integer("expert_used_count", least=1),
        "num_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", least=1),
        "route_scale": keys.number("expert_weights_scale", 1.0),
        "mup_enabled": True,
    }


def _granite(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.integer("expert_count", least=1),
        "num_experts_per_tok": keys.integer("expert_used_count", least=1),
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _hunyuan(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    width = keys.integer("expert_feed_forward_length", least=1)
    if (shared := keys.integer("expert_shared_feed_forward_length", width)) != width:
        keys.fail("expert_shared_feed_forward_length", shared, f"the shared expert is as wide as the others, {width}")
    return {
        "num_experts": keys.integer("expert_count", least=1),
        "moe_topk": keys.integer("expert_used_count", least=1),
        "intermediate_size": width,
    }


def _exaone(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    experts = _deepseek(keys, config)
    more = {"num_experts": experts["n_routed_experts"], "num_shared_experts": experts["n_shared_experts"]}
    return experts | more | every_fourth(keys, config)


def _kinds_of_positions(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings of layers that see the whole text, and of those with a window."""
    full = config["rope_parameters"] | parts.yarn_factor(keys)
    near = parts.near_positions(keys, config["head_dim"])
    return {"rope_parameters": {parts.FULL_KIND: full, parts.WINDOW_KIND: near}}


def _mellum(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {**parts.experts(keys), **every_fourth(keys, config), **_kinds_of_positions(keys, config)}


def _laguna(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the further keys of Laguna: the first of four layers sees the whole text. A gate has a number for each
    head, or for each number of the heads."""
    parts.check_gating(keys, parts.SIGMOID)
    heads, gate = keys.by_layer("attention.head_count", keys.layers), keys.tensor("blk.0.attn_gate.weight")
    by_head = gate is not None and gate.shape[0] == heads[0]
    window, sparse = keys.integer("attention.sliding_window", 0), keys.layers_with("ffn_gate_inp.weight")
    return {
        **parts.experts(keys),
        **_kinds_of_positions(keys, config),
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if by_head else "per-element",
        "sliding_window": window or None,
        "layer_types": parts.window_kinds(keys, window, every=4, full_first=True),
        "mlp_layer_types": ["sparse" if has_experts else "dense" for has_experts in sparse],
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", least=1),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


_WITHOUT_NORMS = 128
"""Experts of Llama 4 Maverick, which has no norms of queries and keys."""


def _llama4(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the further keys of Llama 4. llama.cpp has the same chunks for all files, but of those whose window is 0,
    in which every layer has positions and sees the whole text."""
    parts.check_gating(keys, parts.SIGMOID)
    whole = keys.integer("attention.sliding_window", 8192) == 0
    every_nth = keys.integer("attention.sliding_window_pattern", 4, least=1)
    experts, step = parts.experts(keys), keys.integer("interleave_moe_layer_step", 1, least=1)
    return {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": experts["moe_intermediate_size"],
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": step,
        "use_qk_norm": experts["num_experts"] != _WITHOUT_NORMS,
        "attention_chunk_size": None if whole else 8192,
        "no_rope_layers": [int(whole or (layer + 1) % every_nth > 0) for layer in range(keys.layers)],
    }


ROWS: dict[str, DenseLayout] = {
    "mellum": DenseLayout("mellum", parts.sparse("mlp"), more=_mellum),
    "laguna": DenseLayout("laguna", _EXPERTS | {"attn_gate": "self_attn.g_proj"}, more=_laguna),
    "llama4": DenseLayout("llama4_text", parts.dense("feed_forward") | parts.sparse("feed_forward", router="router") |
                          parts.shared("feed_forward.shared_expert"), more=_llama4),
    "glm4moe": DenseLayout("glm4_moe", _EXPERTS | parts.NEXT_TOKENS | {
        "post_attention_norm": "post_attention_layernorm"}, more=_glm4),
    "dots1": DenseLayout("dots1", _EXPERTS, more=lambda keys, config: {
        **_deepseek(keys, config), "sliding_window": None}),
    "ernie4_5-moe": DenseLayout("ernie4_5_moe", parts.sparse("mlp") | parts.shared("mlp.shared_experts") | {
        "exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"}, more=_ernie),
    "minimax-m2": DenseLayout("minimax_m2", parts.sparse("mlp") | {
        "exp_probs_b.bias": "mlp.e_score_correction_bias"}, more=_minimax),
    "afmoe": DenseLayout("afmoe", parts.sparse("mlp", router="router.gate") | parts.shared("mlp.shared_experts") | {
        "exp_probs_b.bias": "mlp.expert_bias", "attn_gate": "self_attn.gate_proj", **AFTER,
        "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm"}, more=_afmoe),
    "hunyuan-moe": DenseLayout("hunyuan_v1_moe", parts.sparse("mlp", router="gate.wg") | parts.shared(
        "mlp.shared_mlp") | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        more=_hunyuan),
    "exaone-moe": DenseLayout("exaone_moe", _EXPERTS | parts.NEXT_TOKENS, more=_exaone),
    "granitemoe": DenseLayout("granitemoe", parts.sparse("block_sparse_moe", router="router.layer"),
                              interleaved=True, more=_granite),
}  # fmt: skip
"""Architecture -> its row."""
