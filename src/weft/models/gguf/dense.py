"""Layouts of files of common decoders (``families.dense``, ``centred``, ``routed``), a row for each architecture.

    qwen2, qwen2moe, seed_oss, arcee, ernie4_5      names of Llama, rows of q and k as they are
    gemma, gemma2, nemotron                         norms as the distance from 1
    phi3, glm4                                      queries, keys and values, or gate and up, are one tensor
    olmo2, exaone4                                  norms that follow blocks
    command-r, cohere2, starcoder2, stablelm        norms that subtract the mean
    gptneox                                         the same; rows of each head apart

Source: llama.cpp's ``conversion`` package, and gguf's ``tensor_mapping``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.models.gguf import parts
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import FileLayout, Names, Undo

_LAYERS_27B = 46
"""Layers of Gemma 2 27B, whose scores are scaled by the width of the stream."""
More = Callable[[GgufKeys, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """``names``: those that differ from Llama's. ``eps``: the key of config.json for the epsilon of norms that subtract
    the mean, "" for those that do not. ``interleaved``: the converter changes the order of rows of queries and keys, as
    for Llama. ``more``: further keys, of the file and of the configuration so far."""

    model_type: str
    names: Names = field(default_factory=dict)
    eps: str = ""
    minus_one: bool = False
    interleaved: bool = False
    final_norm: str = "norm"
    more: More = lambda keys, config: {}


def _window(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": keys.integer("attention.sliding_window", 0) or None}


def every_fourth(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the windows of a file in which every fourth layer has none."""
    window = keys.integer("attention.sliding_window", 0)
    return {"sliding_window": window or None, "layer_types": parts.window_kinds(keys, window, every=4)}


def _scaled(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale", 1.0)}


def _gemma2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    whole = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": whole if keys.layers == _LAYERS_27B else config["head_dim"],
        "sliding_window": keys.integer("attention.sliding_window", least=1),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _biases(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"mlp_bias": keys.tensor(parts.first(keys, "ffn_up.bias")) is not None}


def _used(key: str) -> More:
    """Return a reader of a bias on all products, under ``key``."""
    return lambda keys, config: {key: config["attention_bias"]}


def _experts(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    experts = parts.experts(keys)
    return experts | {"num_local_experts": experts["num_experts"]}


def _qwen2moe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return parts.experts(keys) | {
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }


def _olmoe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return parts.experts(keys) | {"norm_topk_prob": False}


def _exaone(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"num_layers": keys.layers, "layer_norm_epsilon": config["rms_norm_eps"]}


def _clipped(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None}


def _phi2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the width of the feed-forward, for which the converter writes four times the width of the stream."""
    up = keys.tensor("blk.0.ffn_up.weight")
    return {"intermediate_size": up.shape[0]} if up is not None else {}


def _ministral3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the positions of Ministral 3, whose file states YaRN's temperature for queries that do not grow."""
    scale = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    grown = keys.number("attention.temperature_scale", 0.0)
    temperature = {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return {"rope_parameters": config["rope_parameters"] | temperature | {"llama_4_scaling_beta": grown}}


AFTER: Names = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GATE_UP: Names = {"ffn_up": "mlp.gate_up_proj"}
ROWS: dict[str, DenseLayout] = {
    "qwen2": DenseLayout("qwen2"),
    "qwen2vl": DenseLayout("qwen2"),
    "internlm2": DenseLayout("llama", interleaved=True),
    "qwen2moe": DenseLayout("qwen2_moe", parts.sparse("mlp") | parts.shared("mlp.shared_expert") | {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, more=_qwen2moe),
    "phi3": DenseLayout("phi3", {"attn_qkv": "self_attn.qkv_proj", **_GATE_UP}, more=_window),
    "gemma": DenseLayout("gemma", minus_one=True),
    "gemma2": DenseLayout("gemma2", {"ffn_norm": "pre_feedforward_layernorm", **AFTER}, minus_one=True, more=_gemma2),
    "glm4": DenseLayout("glm4", {
        "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm", **_GATE_UP}),
    "olmo2": DenseLayout("olmo2", AFTER),
    "olmoe": DenseLayout("olmoe", parts.sparse("mlp"), more=_olmoe),
    "exaone4": DenseLayout("exaone4", AFTER, more=every_fourth),
    "command-r": DenseLayout("cohere", eps="layer_norm_eps", more=_scaled),
    "cohere2": DenseLayout("cohere2", eps="layer_norm_eps", more=lambda keys, config: {
        **_scaled(keys, config), **every_fourth(keys, config)}),
    "starcoder2": DenseLayout("starcoder2", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, "norm_epsilon",
                      more=_used("use_bias")),
    "stablelm": DenseLayout("stablelm", eps="layer_norm_eps", more=_used("use_qkv_bias")),
    "nemotron": DenseLayout("nemotron", eps="norm_eps", minus_one=True, more=_biases),
    "seed_oss": DenseLayout("seed_oss", {"post_attention_norm": "post_attention_layernorm"}),
    "arcee": DenseLayout("arcee", interleaved=True, more=_biases),
    "ernie4_5": DenseLayout("ernie4_5", more=_used("use_bias")),
    "smollm3": DenseLayout("smollm3", interleaved=True),
    "exaone": DenseLayout("exaone", more=_exaone),
    "chatglm": DenseLayout("glm", _GATE_UP),
    "olmo": DenseLayout("olmo", eps="rms_norm_eps", interleaved=True, more=_clipped),
    "jais2": DenseLayout("jais2", eps="layer_norm_eps", more=_biases),
    "mistral3": DenseLayout("ministral3", interleaved=True, more=_ministral3),
    "phi2": DenseLayout("phi", {
        "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, "layer_norm_eps",
        final_norm="final_layernorm", more=_phi2),
    "hunyuan-dense": DenseLayout("hunyuan_v1_dense", {
        "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}),
}  # fmt: skip
"""Architecture -> its row."""
MIXTRAL = DenseLayout("mixtral", parts.sparse("mlp"), more=_experts)
"""DenseLayout of Mixtral, whose files have the architecture of Llama."""


def of_row(keys: GgufKeys, row: DenseLayout) -> FileLayout:
    """Return the layout of a file by its row."""
    eps = {row.eps: keys.number("attention.layer_norm_epsilon")} if row.eps else {"rms_norm_eps": parts.eps(keys)}
    config = parts.base(
        keys, row.model_type, **parts.attention(keys), **eps, intermediate_size=keys.integer("feed_forward_length")
    )
    config |= row.more(keys, config)
    names = parts.ATTENTION | parts.NORMS | parts.dense("mlp") | row.names
    whole = parts.WHOLE | {"output_norm": f"model.{row.final_norm}"}
    shifted = [name for name in ("model.norm", *names.values()) if str(name).endswith("norm")] if row.minus_one else []
    undo = parts.interleaved(config) if row.interleaved else {}
    return FileLayout(config, whole, names, undo | {f"{name}.weight": _MINUS_ONE for name in shifted})


def gptneox(keys: GgufKeys) -> FileLayout:
    """Return the layout of GPT-NeoX. The converter puts the rows of each head into all queries, keys, values."""
    layout = of_row(keys, _NEOX)
    heads, width = layout.config["num_attention_heads"], layout.config["head_dim"]
    rows = np.arange(3 * heads * width).reshape(3, heads, width).transpose(1, 0, 2).reshape(-1)
    joined = "attention.query_key_value"
    return replace(layout, undo={f"{joined}.{end}": Undo(rows=rows) for end in ("weight", "bias")})


_NEOX = DenseLayout("gpt_neox", {
    "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense", "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h"}, "layer_norm_eps", final_norm="final_layer_norm", more=lambda keys, config: {
    "use_parallel_residual": keys.boolean("use_parallel_residual", True)})  # fmt: skip
_MINUS_ONE = Undo(values="minus_one")
