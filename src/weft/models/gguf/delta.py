"""Qwen's delta nets in GGUF files: Qwen3.5, Qwen3-Next, Qwen4-Exp.

    architecture        model_type        changes by the converter besides names
    qwen35, qwen35moe   qwen3_5[_moe]     A = -exp(A_log); norms + 1; V heads in tiled order
    qwen3next           qwen3_5_moe       as these, V heads in order; q, k, v and z ungrouped
    qwen4exp            qwen4_exp         as qwen35moe; queries of the index apart from its key; n-gram tables
                                          in one tensor; the head's joins in one matrix

**V heads in tiled order.** Key head k of Qwen3.5 serves the value heads k r ... k r + r - 1; in the file those are k,
k + K, k + 2 K and so on. Rows go back into their order at load, in any form. So do columns (of the output projection):
a head is a number of groups of 32 columns, and each group has its own scale in memory.

**N-grams.** A checkpoint's config.json has the seeds of rows and multipliers of a hash; the file has the results,
exact in 64 bits, and they are used unchanged. llama.cpp has one layer with tables.

Source: llama.cpp's ``conversion`` package and its ``qwen4exp`` model, for the meaning of keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.models.gguf import parts
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import LOG, MINUS_ONE, FileLayout, Index, Names, Undo

_LIMIT = 1 << 63


def qwen_hybrid(keys: GgufKeys) -> FileLayout:
    """Return the layout of Qwen3.5, and of Qwen3-Next, whose differences to Qwen3.5 are undone here."""
    heads, groups = keys.integer("ssm.time_step_rank", least=1), keys.integer("ssm.group_count", least=1)
    width, inner = keys.integer("ssm.state_size", least=1), keys.integer("ssm.inner_size", least=1)
    if heads % groups or inner % heads:
        keys.fail("ssm.time_step_rank", heads, f"it must be a multiple of {groups} groups and divide {inner}")
    config = parts.base(
        keys,
        "qwen3_5_text",
        **parts.attention(keys),
        rms_norm_eps=parts.eps(keys),
        layer_types=parts.kinds(keys, "linear_attention"),
        linear_num_key_heads=groups,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=inner // heads,
        linear_conv_kernel_dim=keys.integer("ssm.conv_kernel"),
        mtp_num_hidden_layers=keys.integer("nextn_predict_layers", 0),
    )
    names = (
        parts.ATTENTION
        | parts.mamba("linear_attn")
        | parts.dense("mlp")
        | parts.sparse("mlp")
        | parts.shared("mlp.shared_expert")
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
            "ssm_dt": "linear_attn.dt_bias",  # without its end in Ollama's files
            "ssm_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        }
        | parts.NEXT_TOKENS
    )
    if keys.integer("expert_count", 0):
        config |= parts.experts(keys) | {
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        }
    config["intermediate_size"] = keys.integer("feed_forward_length", config.get("moe_intermediate_size"))
    if any(not has for has in keys.layers_with("ffn_gate_inp.weight")):
        config["mlp_only_layers"] = [
            layer for layer, has in enumerate(keys.layers_with("ffn_gate_inp.weight")) if not has
        ]
    undo = {
        f"{name}.weight": MINUS_ONE
        for name in (
            "model.norm",
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mtp.norm",
            "mtp.pre_fc_norm_embedding",
            "mtp.pre_fc_norm_hidden",
        )
    } | {"linear_attn.A_log": LOG}
    if keys.architecture == "qwen3next":
        undo |= ungrouped(groups, heads // groups, width, inner // heads)
    elif heads != groups:
        undo |= _untiled(groups, heads // groups, inner // heads, 2 * groups * width)
    return FileLayout(config, parts.WHOLE, names, undo)


def _untiled(groups: int, ratio: int, width: int, before: int) -> dict[str, Undo]:
    """Return the order of untiled heads. ``before``: rows of queries and keys before the values."""

    def order(each: int) -> Index:
        return np.arange(groups * ratio * each).reshape(ratio, groups, each).transpose(1, 0, 2).reshape(-1)

    behind = Undo(np.concatenate([np.arange(before), before + order(width)]))
    heads = Undo(order(1))
    return {
        f"linear_attn.{name}": undo
        for name, undo in {
            "in_proj_qkv.weight": behind,
            "conv1d.weight": behind,
            "in_proj_z.weight": Undo(order(width)),
            "in_proj_a.weight": heads,
            "in_proj_b.weight": heads,
            "dt_bias": heads,
            "A_log": Undo(order(1), log=True),
            "out_proj.weight": Undo(columns=order(width)),
        }.items()
    }


def ungrouped(groups: int, ratio: int, k_dim: int, v_dim: int) -> dict[str, Undo]:
    """Return the changes to undo in files whose ``ssm_ba`` and ``ssm_in`` are as in the checkpoint: each key head with
    all of its values.
    """
    each = 2 * k_dim + 2 * ratio * v_dim
    whole = np.arange(groups * each).reshape(groups, each)
    q, k, v, z = np.split(whole, np.cumsum([k_dim, k_dim, ratio * v_dim]), axis=1)
    pairs = np.arange(groups * 2 * ratio).reshape(groups, 2, ratio)
    return {
        "ssm_ba:linear_attn.in_proj_b.weight": Undo(pairs[:, 0].reshape(-1)),
        "ssm_ba:linear_attn.in_proj_a.weight": Undo(pairs[:, 1].reshape(-1)),
        "ssm_in:linear_attn.in_proj_qkv.weight": Undo(np.concatenate([x.reshape(-1) for x in (q, k, v)])),
        "ssm_in:linear_attn.in_proj_z.weight": Undo(z.reshape(-1)),
    }


_LAST = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
_QWEN4: Names = {
    "indexer.q_proj": "self_attn.indexer.index_q_proj",
    "indexer.k_proj": "self_attn.indexer.index_k_proj",
    "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm",
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
    "ple_conv1d": "ple.conv1d",
    **{f"ple_norm_{which}": f"ple.norm_{which}" for which in ("key", "query", "conv")},
    "nextn.eh_proj": ("mtp.fc_embedding", "mtp.fc_hidden"),
    **{f"nextn.hc_head_{theirs}": f"mtp.hyper_connection_mixer.{ours}" for theirs, ours in _LAST.items()},
    **{
        f"hc_{theirs}_{part}": f"{ours}_hyper_connection.{name}"
        for theirs, ours in (("attn", "attn"), ("ffn", "mlp"))
        for part, name in (*_LAST.items(), ("inject", "block_inject_weight"))
    },
}


def qwen4exp(keys: GgufKeys) -> FileLayout:
    """Return the layout of Qwen4-Exp. Its delta layers have the gate of the release, a sigmoid: the file does not say
    it.
    """
    layout = qwen_hybrid(keys)
    kinds, hidden = layout.config["layer_types"], layout.config["hidden_size"]
    stated = keys.integers("attention.compress_ratios", keys.layers)
    ratios = {ratio for kind, ratio in zip(kinds, stated, strict=False) if kind == "full_attention"}
    if len(ratios) != 1:
        keys.fail("attention.compress_ratios", stated, "one ratio for all attention layers is served")
    [ratio] = ratios
    budget = keys.integer("attention.indexer.top_k", least=1)
    config = layout.config | {
        "model_type": "qwen4_exp_text",
        "output_gate_type": "sigmoid",
        "indexer_kv_heads": 1,
        "hc_count": keys.integer("hyper_connection.count", least=2),
        "hc_lowrank": keys.integer("hyper_connection.low_rank", least=1),
        "indexer_n_heads": keys.integer("attention.indexer.head_count", least=1),
        "indexer_head_dim": keys.integer("attention.indexer.key_length", least=1),
        # A ratio of 0 is attention to all of the text.
        "indexer_budget": budget if ratio else layout.config["max_position_embeddings"],
        "indexer_compress_ratio": ratio or 1,
        "ple_layer_ids": [],
    }
    whole: Names = {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        **{f"output_hc_{theirs}": f"model.hyper_connection_mixer.{ours}" for theirs, ours in _LAST.items()},
    }
    tables = [] if keys.get("ple.layers") is None else keys.integers("ple.layers")
    if len(tables) > 1 or any(layer >= len(kinds) or kinds[layer] == "full_attention" for layer in tables):
        keys.fail("ple.layers", tables, "tables in front of one delta layer are served")
    for layer in tables:
        config |= _ngrams(keys, layer)
        whole["per_layer_token_embd"] = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
    norms = [ours for ours in _QWEN4.values() if isinstance(ours, str) and "norm" in ours.rpartition(".")[2]]
    halves = {
        f"mtp.fc_{name}.weight": Undo(columns=np.arange(hidden) + begin)
        for name, begin in (("embedding", 0), ("hidden", hidden))
    }
    undo = {f"{name}.weight": MINUS_ONE for name in (*norms, "model.hyper_connection_mixer.hc_norm")} | halves
    return FileLayout(config, whole, layout.names | _QWEN4, layout.undo | undo)


def _ngrams(keys: GgufKeys, layer: int) -> dict[str, Any]:
    size, each = keys.integer("ple.ngram_size", least=2), keys.integer("ple.heads_per_ngram", least=1)
    count = (size - 1) * each
    rows, firsts = keys.integers("ple.head_vocab_sizes", count), keys.integers("ple.head_offsets", count)
    if firsts != [sum(rows[:table]) for table in range(count)] or not all(rows):
        keys.fail("ple.head_offsets", firsts, "tables with rows, one after the other, are served")
    multipliers = keys.integers("ple.layer_multipliers", size)
    if not all(0 < number < _LIMIT for number in multipliers):
        keys.fail("ple.layer_multipliers", multipliers, f"they must be from 1 to {_LIMIT - 1}")
    table = keys.tensor("per_layer_token_embd.weight")
    if table is None or len(table.shape) != 2 or table.shape[0] < sum(rows):
        keys.fail("ple.head_vocab_sizes", rows, f"the file has no per_layer_token_embd of {sum(rows)} rows")
    return {
        "ple_layer_ids": [layer + 1],
        "ngram_size": size,
        "heads_per_ngram": each,
        "ple_embed_dim": count * keys.integer("embedding_length_per_layer_input", least=1),
        "ple_conv_kernel_size": keys.integer("ple.conv_kernel", least=1),
        "ple_eos_token_id": keys.integer("ple.eos_token_id"),
        "ngram_heads_vocab_sizes": rows,
        "layer_multipliers": multipliers,
        "make_ngram_vocab_size_divisible_by": table.shape[0],
    }
