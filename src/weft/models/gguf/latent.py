"""Kimi Linear, Kimi K3, Ling 3, GigaChat 3.5, GLM 5 and others in GGUF files: delta layers and latent attention.

    architecture    model_type        changes by the converter besides names
    kimi-linear     kimi_linear       A = -exp(A_log); convolutions [1, C, 1, K]; kv_b_proj apart
    kimi-k3         kimi_k3           as kimi-linear; queries of attention residuals times the norms of their keys
    bailingmoe3     bailing_hybrid    A = exp(A_log), and as these
    gigachat35      gigachat3_5       A = -exp(A_log); norms + 1; q, k, v and z, b and a ungrouped; kv_b_proj
    glm5-next       glm5_next         as kimi-linear
    glm-dsa         glm_moe_dsa       kv_b_proj apart

**kv_b_proj apart.** llama.cpp multiplies queries with the matrix that makes keys of latents. So its converter cuts the
matrix, head by head, into keys and values, and transposes the keys' part:

    kv_b_proj [H (own + value), latent]  ->  attn_k_b [H, latent, own]    attn_v_b [H, value, latent]

``read_latent_attention`` reads either. A block of the file extends along ``own`` there, so the parts cannot be joined
in their form; both are values in memory, as the matrix of a checkpoint is.

Source: llama.cpp's ``conversion`` package.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from weft.models.gguf import parts
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import LOG, MINUS_ONE, FileLayout, Names

_NAMES: Names = (
    parts.ATTENTION | parts.NORMS | parts.dense("mlp") | parts.sparse("mlp")
    | parts.shared("mlp.shared_experts") | parts.NEXT_TOKENS | {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
        "ssm_conv1d_q": "self_attn.q_conv1d", "ssm_conv1d_k": "self_attn.k_conv1d",
        "ssm_conv1d_v": "self_attn.v_conv1d", "ssm_beta": "self_attn.b_proj", "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias", "ssm_norm": "self_attn.o_norm",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "layer_output_norm": "mtp.norm"
    })  # fmt: skip


def kimi_linear(keys: GgufKeys) -> FileLayout:
    config = _config(keys, "kimi_linear") | {
        "linear_num_heads": keys.integer("attention.head_count", least=1),
        "linear_head_dim": keys.integer("kda.head_dim", least=1),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", least=1),
    }
    return FileLayout(config, parts.WHOLE, _NAMES | _NARROW_GATES, {"self_attn.A_log": LOG})


def kimi_k3(keys: GgufKeys) -> FileLayout:
    """Return the layout of Kimi K3. Files have one wide output gate in delta layers, and may have gates of attention
    and a norm of the experts' sum.
    """
    heads, latent = keys.integer("attention.head_count", least=1), keys.integer("expert_latent_length", 0)
    caps = keys.number("activation.situ_beta"), keys.number("activation.situ_linear_beta")
    floor = keys.get("kda.gate_lower_bound")
    config = _config(keys, "kimi_k3") | {
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": keys.integer("kda.head_dim", least=1),
            "short_conv_kernel_size": keys.integer("ssm.conv_kernel", least=1),
            "use_full_rank_gate": True,
            "gate_lower_bound": None if floor is None else keys.number("kda.gate_lower_bound"),
        },
        "mla_use_output_gate": any(keys.layers_with("attn_gate.weight")),
        "hidden_act": "situ",
        "activation_situ_beta": caps[0],
        "activation_situ_linear_beta": max(caps[1], 0.0) or None,
        "routed_expert_hidden_size": latent or None,
        "latent_moe_use_norm": any(keys.layers_with("ffn_routed_norm.weight")),
        "attn_res_block_size": keys.integer("attn_res.block_size", 0) or None,
    }
    names: Names = {
        **{f"ssm_f_{end}": f"self_attn.f_{end}_proj" for end in "ab"},
        "ssm_g": "self_attn.g_proj",
        "attn_gate": "self_attn.g_proj",
        "attn_res_score": "self_attention_res_proj",
        "ffn_res_score": "mlp_res_proj",
        "ffn_routed_down": "mlp.fc1_latent_proj",
        "ffn_routed_up": "mlp.fc2_latent_proj",
        "ffn_routed_norm": "mlp.latent_norm",
    }
    whole: Names = {**parts.WHOLE, "output_res_score": "model.output_attn_res_proj"}
    return FileLayout(config, whole, _NAMES | names, {"self_attn.A_log": LOG})


_NARROW_GATES: Names = {f"ssm_{gate}_{end}": f"self_attn.{gate}_{end}_proj" for gate in "fg" for end in "ab"}


def ling(keys: GgufKeys) -> FileLayout:
    """Return the layout of Ling. A delta layer has one wide gate instead of two matrices, an attention layer a gate
    for each head.
    """
    kind = keys.get("rope.scaling.type", "none")
    if kind != "none":  # the file does not state its effect on the scale of the scores
        keys.fail("rope.scaling.type", kind, "stretched positions of this architecture are not served")
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        limits = keys.get(name)
        if limits is not None and any(limits):
            keys.fail(name, limits, "limits of feed-forwards are not served for this architecture")
    safe = keys.boolean("kda.safe_gate", True)
    theta = keys.number("rope.freq_base", 10000.0)
    config = _config(keys, "bailing_hybrid") | {
        "linear_head_dim": keys.integer("kda.head_dim", least=1),
        "short_conv_kernel_size": keys.integer("ssm.conv_kernel", least=1),
        "kda_safe_gate": safe,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    if safe:
        config["kda_lower_bound"] = keys.number("kda.gate_lower_bound")
    names: Names = {"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"}
    return FileLayout(config, parts.WHOLE, _NAMES | names, {"self_attn.A_log": LOG})


def deepseek2(keys: GgufKeys) -> FileLayout:
    """Return the layout of DeepSeek V2 and V3, and of models of their shape: in V3 a bias chooses experts. A file says
    nothing about which model it is of but these numbers.
    """
    if not any(keys.layers_with("exp_probs_b.bias")) and any(keys.layers_with("ffn_gate_inp.weight")):
        config = _config(keys, "deepseek_v2", served=parts.SOFTMAX)
        groups = config["num_expert_group"]
        config |= {"topk_method": "group_limited_greedy" if groups > 1 else "greedy", "moe_renormalize": False}
    else:
        config = _config(keys, "deepseek_v3")
    sparse = config["mlp_layer_types"]
    first = sparse.index("sparse") if "sparse" in sparse else len(sparse)
    if "dense" in sparse[first:]:
        keys.fail("leading_dense_block_count", first, "layers without experts after one that has some are not served")
    config |= {
        "first_k_dense_replace": first,
        "num_nextn_predict_layers": keys.integer("nextn_predict_layers", 0),
        "rope_parameters": parts.positions(keys, config["qk_rope_head_dim"]) | _stretch(keys),
    }
    del config["layer_types"], config["mlp_layer_types"]
    for theirs, ours in _OF_DEEPSEEK.items():
        if theirs in config:
            config[ours] = config.pop(theirs)
    return FileLayout(config, parts.WHOLE, _NAMES, {})


_OF_DEEPSEEK = {
    "num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
}  # fmt: skip
"""Kimi's keys -> those of DeepSeek."""


def minicpm3(keys: GgufKeys) -> FileLayout:
    """Return the layout of MiniCPM 3, with llama.cpp's constants: multipliers of the release."""
    heads, shared = keys.integer("attention.head_count", least=1), keys.integer("rope.dimension_count", least=1)
    width, latent = keys.integer("attention.key_length", least=1), keys.integer("attention.kv_lora_rank", least=1)
    table = keys.tensor("blk.0.attn_kv_b.weight")
    rows = table.shape[0] // heads if table is not None else 0
    if rows <= width - shared:
        keys.fail("attention.key_length", width, f"blk.0.attn_kv_b.weight has {rows} rows for each head")
    divisors = [keys.tensor(f"rope_factors_{kind}.weight") for kind in ("long", "short")]
    if any(divisor is not None for divisor in divisors):
        keys.fail("rope.scaling.type", "longrope", "files with factors of LongRoPE are not served")
    config = parts.base(
        keys,
        "minicpm3",
        rms_norm_eps=parts.eps(keys),
        intermediate_size=keys.integer("feed_forward_length", least=1),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        qk_rope_head_dim=shared,
        qk_nope_head_dim=width - shared,
        v_head_dim=rows - (width - shared),
        kv_lora_rank=latent,
        q_lora_rank=keys.integer("attention.q_lora_rank", least=1),
        rope_parameters={"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10_000.0)},
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
    )
    return FileLayout(config, parts.WHOLE, _NAMES, {})


_GATED_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}


def gigachat35(keys: GgufKeys) -> FileLayout:
    """Return the layout of GigaChat 3.5. One name, ``attn_gate``, is the gate of both kinds of layers. llama.cpp's
    constants are those of the release: factors of norms and gates.
    """
    heads, inner = keys.integer("ssm.time_step_rank", least=1), keys.integer("ssm.inner_size", least=1)
    config = _config(keys, "gigachat3_5") | {
        "num_nextn_predict_layers": keys.integer("nextn_predict_layers", 0),
        "linear_num_key_heads": keys.integer("ssm.group_count", least=1),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size", least=1),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", least=1),
        "swiglu_limit": _limit(keys),
        "rope_parameters": parts.attention(keys)["rope_parameters"] | _stretch(keys),
    }
    config["rope_parameters"].pop("partial_rotary_factor", None)  # of the latent, not of a head
    names: Names = (
        _NAMES
        | parts.mamba("self_attn")
        | _GATED_NORMS
        | {
            "attn_gate": "self_attn.gate_proj",
            "attn_qkv": "self_attn.in_proj_qkv",
            "ssm_beta": "self_attn.in_proj_b",
            "ssm_alpha": "self_attn.in_proj_a",
        }
    )
    names |= _OWN_TABLES
    whole, norms = (
        dict(parts.WHOLE),
        {
            **_GATED_NORMS,
            "output_norm": "model.norm",
            **{theirs: str(ours) for theirs, ours in parts.NEXT_TOKENS.items() if theirs.endswith("norm")},
        },
    )
    for theirs, ours in norms.items():
        of = whole if theirs == "output_norm" else names
        of |= {f"{theirs}_gate_{end}": f"{ours}.gate_{end}_projection" for end in ("up", "down")}
    shifted = {f"{ours}.weight": MINUS_ONE for ours in (*norms.values(), "self_attn.norm")}
    return FileLayout(config, whole, names, shifted | {"self_attn.A_log": LOG})


_OWN_TABLES: Names = {"nextn.embed_tokens": "mtp.embed_tokens", "nextn.shared_head_head": "mtp.shared_head"}
"""Names of the copies of the trunk's tables in a head, which are not read."""


def _limit(keys: GgufKeys) -> float:
    limits = {
        float(limit)
        for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
        for limit in np.atleast_1d(keys.get(name, 0.0))
    }
    if len(limits) > 1:
        keys.fail("swiglu_clamp_exp", sorted(limits), "one limit for all feed-forwards is served")
    return limits.pop()


_INDEX: Names = {
    "indexer.attn_k": "wk",
    "indexer.attn_q_b": "wq_b",
    "indexer.proj": "weights_proj",
    "indexer.k_norm": "k_norm",
    "indexer_compressor_gate.weight": "index_kpool_compress_gate",
    "indexer_compressor_ape.weight": "index_kpool_compress_ape",
}


def glm5_next(keys: GgufKeys) -> FileLayout:
    """Return the layout of GLM-5-next. Each attention layer has its own index. Attention sees the unfinished block if
    the file has no key for that: llama.cpp's converter always writes the key, and ik_llama.cpp, whose converter does
    not, always lets attention see the block.
    """
    if not keys.boolean("attention.indexer.kpool_select_tail", True):
        keys.fail("attention.indexer.kpool_select_tail", False, "attention sees the unfinished block")
    config = _config(keys, "glm5_next_text")
    own = np.atleast_1d(keys.get("attention.indexer.types", True))
    if any(
        kind == "full_attention" and not has
        for kind, has in zip(config["layer_types"], np.resize(own, keys.layers), strict=True)
    ):
        keys.fail("attention.indexer.types", own.tolist(), "attention layers with an index of their own are served")
    config |= {
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": keys.integer("kda.head_dim", least=1),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", least=1),
        "linear_lower_bound": None if keys.get("kda.gate_lower_bound") is None else keys.number("kda.gate_lower_bound"),
        "index_n_heads": keys.integer("attention.indexer.head_count", least=1),
        "index_head_dim": keys.integer("attention.indexer.key_length", least=1),
        "index_topk": keys.integer("attention.indexer.top_k", least=1),
        "index_kpool": keys.integer("attention.indexer.kpool", least=1),
        "swiglu_limit": _limit(keys),
        "hc_mult": keys.integer("hyper_connection.count", least=1),
        "hc_sinkhorn_iters": keys.integer("hyper_connection.sinkhorn_iterations", least=1),
        "hc_eps": keys.number("hyper_connection.epsilon"),
        "num_nextn_predict_layers": keys.integer("nextn_predict_layers", 0),
    }
    names: Names = _NARROW_GATES | _OWN_TABLES
    names |= {theirs: f"self_attn.indexer.{ours}" for theirs, ours in _INDEX.items()}
    names |= {
        f"hc_{block}_{part}.weight": f"hc_{block}_{part}"
        for block in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    }
    return FileLayout(config, parts.WHOLE, _NAMES | names, {"self_attn.A_log": LOG})


def glm_dsa(keys: GgufKeys) -> FileLayout:
    """Return the layout of GLM 5. Files that do not say which layers have an index are of GLM 5 and 5.1, where all
    have one, or, with a longer context, of GLM 5.2, as llama.cpp takes them.
    """
    layout = deepseek2(keys)
    if layout.config["model_type"] != "deepseek_v3":
        keys.fail("expert_gating_func", keys.get("expert_gating_func"), "the file has no bias on the choice of experts")
    config = layout.config | {
        "model_type": "glm_moe_dsa",
        "index_n_heads": keys.integer("attention.indexer.head_count", least=1),
        "index_head_dim": keys.integer("attention.indexer.key_length", least=1),
        "index_topk": keys.integer("attention.indexer.top_k", least=1),
    }
    stated = keys.get("attention.indexer.types")
    if stated is not None:
        own = np.resize(np.atleast_1d(stated), keys.layers)
        config["indexer_types"] = ["full" if has else "shared" for has in own]
    elif config["max_position_embeddings"] >= _CONTEXT_5_2:
        config |= {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    names: Names = {theirs: f"self_attn.indexer.{ours}" for theirs, ours in _INDEX.items()}
    return replace(layout, config=config, names=layout.names | names | _OWN_TABLES)


_CONTEXT_5_2 = 1 << 20
"""Longest context of GLM 5.2."""


def _stretch(keys: GgufKeys) -> dict[str, Any]:
    """Return YaRN's temperature. The file only has its effect on the scale of the scores."""
    if keys.get("rope.scaling.type", "none") != "yarn":
        return {}
    scale = 10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {"mscale": scale, "mscale_all_dim": scale} if scale else {}


def _config(keys: GgufKeys, model_type: str, served: int = parts.SIGMOID) -> dict[str, Any]:
    heads, shared = keys.integer("attention.head_count", least=1), keys.integer("rope.dimension_count", 0)
    width = keys.integer("attention.key_length_mla", least=1)
    if width <= shared:
        keys.fail("attention.key_length_mla", width, f"it must be above rope.dimension_count {shared}")
    sparse, attended = (keys.layers_with(f"{part}.weight") for part in ("ffn_gate_inp", "attn_kv_a_mqa"))
    kinds = ["full_attention" if has else "linear_attention" for has in attended]
    return parts.base(
        keys,
        model_type,
        rms_norm_eps=parts.eps(keys),
        layer_types=kinds,
        model_max_length=keys.integer("context_length", least=1),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        qk_rope_head_dim=shared,
        qk_nope_head_dim=width - shared,
        v_head_dim=keys.integer("attention.value_length_mla", least=1),
        kv_lora_rank=keys.integer("attention.kv_lora_rank", least=1),
        q_lora_rank=keys.integer("attention.q_lora_rank", 0) or None,
        attention_bias=keys.tensor(parts.first(keys, "attn_kv_a_mqa.bias")) is not None,
        mlp_layer_types=["sparse" if has else "dense" for has in sparse],
        intermediate_size=keys.integer("feed_forward_length", 0) or 1,
        **(_experts(keys, served) if any(sparse) else {}),
    )


def _experts(keys: GgufKeys, served: int) -> dict[str, Any]:
    parts.check_gating(keys, served)
    width = keys.integer("expert_feed_forward_length", least=1)
    shared = keys.tensor(parts.first(keys, "ffn_gate_shexp.weight"))
    return {
        "num_experts": keys.integer("expert_count", least=1),
        "num_experts_per_token": keys.integer("expert_used_count", least=1),
        "moe_intermediate_size": width,
        "num_shared_experts": max(1, shared.shape[0] // width) if shared else keys.integer("expert_shared_count", 1),
        "moe_renormalize": keys.boolean("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "num_expert_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }
