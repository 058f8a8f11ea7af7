"""Layouts of files of common decoders (``families.dense``, ``centred``, ``routed``), a row for each architecture.

    qwen2, qwen2moe, seed_oss, arcee, ernie4_5      names of Llama, rows of q and k as they are
    gemma, gemma2, nemotron                         norms as the distance from 1
    phi3, glm4                                      queries, keys and values, or gate and up, are one tensor
    olmo2, exaone4                                  norms that follow blocks
    command-r, cohere2, starcoder2, stablelm        norms that subtract the mean
    gptneox, bloom, falcon                          the same; rows of each head, or of each KV head, apart
    gpt2, starcoder, mpt                            the same; positions at the embedding, or ALiBi
    dbrx                                            the same; experts
    apertus                                         the numbers of its activation are keys

Source: llama.cpp's ``conversion`` package, and gguf's ``tensor_mapping``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    for Llama. ``whole``: further names outside of layers. ``joined``: name of queries, keys and values whose rows the
    converter takes out of each KV head. ``more``: further keys, of the file and of the configuration so far.
    ``numbers``: as in ``FileLayout``."""

    model_type: str
    names: Names = field(default_factory=dict)
    eps: str = ""
    minus_one: bool = False
    interleaved: bool = False
    final_norm: str = "norm"
    whole: Names = field(default_factory=dict)
    joined: str = ""
    more: More = lambda keys, config: {}
    numbers: Mapping[str, str] = field(default_factory=dict)


def _window(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": keys.integer("attention.sliding_window", 0) or None}


def every_fourth(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the windows of a file in which every fourth layer has none."""
    window = keys.integer("attention.sliding_window", 0)
    return {"sliding_window": window or None, "layer_types": parts.window_kinds(keys, window, every=4)}


def _scaled(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale", 1.0)}


def _command_r(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    normed = keys.tensor(parts.first(keys, "attn_q_norm.weight")) is not None
    return {**_scaled(keys, config), "use_qk_norm": normed}


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


def _mpt(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    exponent = keys.number("attention.max_alibi_bias", 0.0)
    stated = {"alibi": exponent > 0, "alibi_bias_max": int(exponent), "clip_qkv": _clipped(keys, config)["clip_qkv"]}
    return {"attn_config": stated}


def _dbrx(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attn_config": {"kv_n_heads": config["num_key_value_heads"]} | _clipped(keys, config),
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "moe_num_experts": keys.integer("expert_count", least=1),
            "moe_top_k": keys.integer("expert_used_count", least=1),
        },
    }


def _starcoder(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the activation of StarCoder, which files do not state."""
    if config["num_key_value_heads"] != 1:
        keys.fail("attention.head_count_kv", config["num_key_value_heads"], "only 1 is served")
    return _phi2(keys, config) | {"activation_function": "gelu"}


def _olmo2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the windows and the positions of OLMo 3, whose files have the architecture of OLMo 2."""
    window = keys.integer("attention.sliding_window", 0)
    if not window:
        return {}
    positions = config["rope_parameters"] | parts.yarn_factor(keys)
    return every_fourth(keys, config) | {"model_type": "olmo3", "rope_parameters": positions}


_PHIMOE_FACTOR = 1.243163121016122
"""Factor on long and short texts of all releases. The converter writes another number, by the lengths of texts."""


def _phimoe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    positions = config["rope_parameters"]
    if positions["rope_type"] == "longrope":
        positions = positions | dict.fromkeys(("long_mscale", "short_mscale"), _PHIMOE_FACTOR)
    head = {"lm_head_bias": keys.tensor("output.bias") is not None}
    return {**_window(keys, config), **_experts(keys, config), **head, "rope_parameters": positions}


def _falcon(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the kind of Falcon: a group of heads for each KV head under two norms or one, or one KV head."""
    kv_heads = config["num_key_value_heads"]
    two = any(keys.layers_with("attn_norm_2.weight"))
    grouped = two or kv_heads not in (1, config["num_attention_heads"])
    return _phi2(keys, config) | {
        "new_decoder_architecture": grouped,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "multi_query": kv_heads == 1,
        "bias": config["attention_bias"],
        "ffn_hidden_size": (_phi2(keys, config) or config)["intermediate_size"],
    }


def _ministral3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the positions of Ministral 3, whose file states YaRN's temperature for queries that do not grow."""
    scale = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    grown = keys.number("attention.temperature_scale", 0.0)
    temperature = {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return {"rope_parameters": config["rope_parameters"] | temperature | {"llama_4_scaling_beta": grown}}


AFTER: Names = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GATE_UP: Names = {"ffn_up": "mlp.gate_up_proj"}
_EPS = "layer_norm_epsilon"
_GPT2: Names = {
    "attn_qkv": "self_attn.c_attn", "attn_output": "self_attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"
}  # fmt: skip
_WQKV: Names = {"attn_qkv": "self_attn.Wqkv", "attn_output": "self_attn.out_proj"}
_PLACES: Names = {"position_embd": "model.embed_positions"}


def _by_head(attention: str) -> Names:
    return {
        "attn_qkv": f"{attention}.query_key_value",
        "attn_output": f"{attention}.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }


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
    "olmo2": DenseLayout("olmo2", AFTER, more=_olmo2),
    "olmoe": DenseLayout("olmoe", parts.sparse("mlp"), more=_olmoe),
    "exaone4": DenseLayout("exaone4", AFTER, more=every_fourth),
    "command-r": DenseLayout("cohere", eps="layer_norm_eps", more=_command_r),
    "cohere2": DenseLayout("cohere2", eps="layer_norm_eps", more=lambda keys, config: {
        **_scaled(keys, config), **every_fourth(keys, config)}),
    "starcoder2": DenseLayout("starcoder2", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, "norm_epsilon",
                      more=_used("use_bias")),
    "stablelm": DenseLayout("stablelm", eps="layer_norm_eps", more=_used("use_qkv_bias")),
    "nemotron": DenseLayout("nemotron", eps="norm_eps", minus_one=True, more=_biases),
    "seed_oss": DenseLayout("seed_oss", {"post_attention_norm": "post_attention_layernorm"}),
    "arcee": DenseLayout("arcee", interleaved=True, more=_biases),
    "apertus": DenseLayout("apertus", {
        "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}, numbers={
        f"xielu.{number}": f"mlp.act_fn.{number}" for number in ("alpha_p", "alpha_n", "beta", "eps")}),
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
    "phimoe": DenseLayout("phimoe", parts.sparse("mlp", router="router"), more=_phimoe),
    "gpt2": DenseLayout("gpt2", _GPT2, _EPS, whole=_PLACES, more=_phi2),
    "starcoder": DenseLayout("gpt_bigcode", _GPT2, _EPS, whole=_PLACES, more=_starcoder),
    "mpt": DenseLayout("mpt", _WQKV, _EPS, more=_mpt),
    "dbrx": DenseLayout("dbrx", parts.sparse("mlp") | _WQKV | {"attn_output_norm": "post_attention_layernorm"},
                        "rms_norm_eps", more=_dbrx),
    "bloom": DenseLayout("bloom", _by_head("self_attention"), _EPS, joined="self_attention.query_key_value", whole={
        "token_embd_norm": "model.embed_norm"}),
    "gptneox": DenseLayout("gpt_neox", _by_head("attention"), "layer_norm_eps", final_norm="final_layer_norm",
                           joined="attention.query_key_value", more=lambda keys, config: {
        "use_parallel_residual": keys.boolean("use_parallel_residual", True)}),
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
    whole = parts.WHOLE | {"output_norm": f"model.{row.final_norm}"} | row.whole
    shifted = [name for name in ("model.norm", *names.values()) if str(name).endswith("norm")] if row.minus_one else []
    undo = parts.interleaved(config) if row.interleaved else {}
    if row.joined:
        undo |= {f"{row.joined}.{end}": _of_groups(config) for end in ("weight", "bias")}
    undo |= {f"{name}.weight": parts.MINUS_ONE for name in shifted}
    return FileLayout(config, whole, names, undo, numbers=row.numbers)


def _of_groups(config: Mapping[str, Any]) -> Undo:
    """Return rows in which the queries of each KV head, its key and its value follow each other; the file has all
    queries, then all keys, then all values."""
    heads, groups, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, k, v = np.split(np.arange((heads + 2 * groups) * width).reshape(-1, width), (heads, heads + groups))
    joined = np.concatenate([q.reshape(groups, -1, width), k[:, None], v[:, None]], axis=1)
    return Undo(rows=joined.reshape(-1))


def falcon(keys: GgufKeys) -> FileLayout:
    """Return the layout of Falcon, whose norm of the mixer has another name where the feed-forward has one too."""
    norms: Names = {"attn_norm": "input_layernorm"}
    if any(keys.layers_with("attn_norm_2.weight")):
        norms = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
    return of_row(keys, replace(_FALCON, names=_FALCON.names | norms))


_FALCON = DenseLayout("falcon", _by_head("self_attention"), _EPS, joined="self_attention.query_key_value", more=_falcon)
