"""``general.architecture`` -> config.json and names of tensors: the converters' work, undone.

    architecture             model_type           changes by the converter besides names
    lfm2, lfm2moe            lfm2, lfm2_moe       convolutions squeezed; experts stacked
    granite, granitehybrid   granitemoehybrid     rows of q and k interleaved; gate and up apart; A
    nemotron_h[_moe]         nemotron_h           A = -exp(A_log); experts stacked; Puzzle's too
    falcon-h1                falcon_h1            all multipliers folded into the weights
    jamba, mamba, mamba2     jamba, mamba, mamba2 A = -exp(A_log); convolutions squeezed
    qwen3[vl], qwen3[vl]moe  qwen3, qwen3_moe     towers are files of their own
    gpt-oss, gptoss          gpt_oss              rows of gate and up apart; Ollama's ``gptoss``
    llama                    llama                rows of q and k interleaved
    qwen35[moe], qwen3next, qwen4exp              ``delta``
    kimi-linear, kimi-k3, bailingmoe3, gigachat35, glm5-next  ``latent``
    gemma3, gemma3n, gemma4                       ``gemma``
    rwkv7                                         ``rwkv``
    deepseek2, glm-dsa, minicpm3                  ``latent``
    qwen2, phi3, gemma, gemma2, glm4 ...          ``dense``
    glm4moe, dots1, minimax-m2, llama4 ...        ``routed``
    plamo2, plamo3                                ``plamo``

``FileLayout.names`` is from a name in the file ("attn_q", after ``blk.3.``) to ours ("self_attn.q_proj", after
``layers.3.``); the ends .weight and .bias stay. ``{e}`` is the number of an expert; all experts are one tensor in the
file. A name with several of ours is divided by the rows of their ``Undo``. The kind of a layer follows from its
tensors. Other shapes of the same values (a squeezed dim, a column for each head) need no code here: the reader takes
the numbers in their order.

Source: llama.cpp's ``conversion`` package, and gguf's ``tensor_mapping``; Ollama's ``convert`` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from weft.errors import UnknownArchitectureError
from weft.models.gguf import dense, parts, routed
from weft.models.gguf.delta import qwen4exp, qwen_hybrid
from weft.models.gguf.gemma import gemma3, gemma3n, gemma4
from weft.models.gguf.header import Header
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.latent import deepseek2, gigachat35, glm5_next, glm_dsa, kimi_k3, kimi_linear, ling, minicpm3
from weft.models.gguf.parts import LOG, FileLayout, Names, Undo
from weft.models.gguf.plamo import plamo2, plamo3
from weft.models.gguf.rwkv import rwkv7


def read_layout(header: Header) -> FileLayout:
    """Return the layout of a file. Raises UnknownArchitectureError, or CheckpointError naming the key."""
    name = header.keys.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{header.path}: general.architecture is {name!r}; of GGUF files weft serves {', '.join(ARCHITECTURES)}",
            param="model",
        )
    keys = GgufKeys(header, name)
    layout = ARCHITECTURES[name](keys)
    keys.refuse_unknown()
    return layout


def _lfm2(keys: GgufKeys) -> FileLayout:
    config = parts.base(
        keys,
        "lfm2",
        norm_eps=parts.eps(keys),
        conv_L_cache=keys.integer("shortconv.l_cache"),
        layer_types=parts.kinds(keys, "conv"),
        intermediate_size=keys.integer("feed_forward_length"),
        block_auto_adjust_ff_dim=False,
        **parts.attention(keys),
        conv_bias=keys.tensor(parts.first(keys, "shortconv.conv.bias")) is not None,
    )
    spelled = {"gate": "w1", "up": "w3", "down": "w2"}
    names = (
        parts.ATTENTION
        | parts.dense("feed_forward", spelled)
        | {
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        }
    )
    if keys.architecture == "lfm2moe":
        config |= parts.experts(keys) | {
            "model_type": "lfm2_moe",
            "num_dense_layers": keys.integer("leading_dense_block_count"),
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
            "use_expert_bias": any(keys.layers_with("exp_probs_b.bias")),
        }
        names |= parts.sparse("feed_forward", spelled) | {"exp_probs_b.bias": "feed_forward.expert_bias"}
        parts.check_gating(keys, parts.SIGMOID)
    if "is_causal" in config:  # LFM2.5-Embedding, the one such model: its convolutions are centred as well
        config["architectures"] = ["Lfm2BidirectionalModel"]
    whole: Names = {
        "token_embd": "model.embed_tokens",
        "token_embd_norm": "model.embedding_norm",
        "output_norm": "model.embedding_norm",
        "output": "lm_head",
    }
    return FileLayout(config, whole, names)


def _mamba2_numbers(keys: GgufKeys) -> tuple[int, int, int, int, int]:
    """Return (heads, width of a head, groups, state, kernel)."""
    heads, inner = keys.integer("ssm.time_step_rank", least=1), keys.integer("ssm.inner_size", least=1)
    return (
        heads,
        inner // heads,
        keys.integer("ssm.group_count", least=1),
        keys.integer("ssm.state_size"),
        keys.integer("ssm.conv_kernel"),
    )


def _granite_mamba(keys: GgufKeys) -> dict[str, Any]:
    """Return the ``mamba_*`` keys of Granite and Falcon-H1."""
    heads, width, groups, state, kernel = _mamba2_numbers(keys)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": kernel,
        "mamba_proj_bias": keys.tensor(parts.first(keys, "ssm_in.bias")) is not None,
        "mamba_conv_bias": keys.tensor(parts.first(keys, "ssm_conv1d.bias")) is not None,
    }


def _granite(keys: GgufKeys) -> FileLayout:
    """Return the layout of Granite, hybrid or only attention: one family with other kinds of layers."""
    kinds = ["attention" if kind == "full_attention" else "mamba" for kind in parts.kinds(keys, "mamba")]
    count = keys.integer("expert_count", 0)
    width = keys.integer("feed_forward_length")
    rotary = keys.boolean("rope.scaling.finetuned", "mamba" not in kinds)
    config = parts.base(
        keys,
        "granitemoehybrid",
        **parts.attention(keys),
        rms_norm_eps=parts.eps(keys),
        layer_types=kinds,
        intermediate_size=width,
        num_local_experts=count,
        num_experts_per_tok=keys.integer("expert_used_count", 0),
        shared_intermediate_size=keys.integer("expert_shared_feed_forward_length", width) or width,
        position_embedding_type="rope" if rotary else "nope",
        attention_multiplier=keys.number("attention.scale", 1.0),
        embedding_multiplier=keys.number("embedding_scale", 1.0),
        residual_multiplier=keys.number("residual_scale", 1.0),
        logits_scaling=keys.number("logit_scale", 1.0),
    )
    if "mamba" in kinds:
        mamba = _granite_mamba(keys)
        config |= mamba | {"mamba_expand": mamba["mamba_n_heads"] * mamba["mamba_d_head"] // config["hidden_size"]}
    else:  # layers of the kind that this model lacks: numbers that agree with each other
        config |= {"mamba_n_heads": 1, "mamba_d_head": config["hidden_size"], "mamba_expand": 1}
    names = (
        parts.ATTENTION
        | parts.NORMS
        | parts.mamba("mamba")
        | parts.sparse("block_sparse_moe", router="router.layer")
        | (parts.shared("shared_mlp") if count else parts.dense("shared_mlp"))
    )
    return FileLayout(config, parts.WHOLE, names, parts.interleaved(config) | {"mamba.A_log": LOG})


def _nemotron_h(keys: GgufKeys) -> FileLayout:
    heads, width, groups, state, kernel = _mamba2_numbers(keys)
    kinds = []
    for layer in range(keys.layers):
        matching = [
            kind
            for kind, part in (("mamba", "ssm_in"), ("attention", "attn_q"), ("moe", "ffn_gate_inp"), ("mlp", "ffn_up"))
            if keys.tensor(f"blk.{layer}.{part}.weight")
        ]
        if not matching:
            keys.fail("block_count", keys.layers, f"block {layer} is not a kind of layer that weft knows")
        kinds.append(matching[0])
    config = parts.base(
        keys,
        "nemotron_h",
        **parts.attention(keys),
        layer_norm_epsilon=keys.number("attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon")),
        layers_block_type=kinds,
        mamba_num_heads=heads,
        mamba_head_dim=width,
        n_groups=groups,
        ssm_state_size=state,
        conv_kernel=kernel,
        use_bias=keys.tensor(parts.first(keys, "ssm_in.bias")) is not None,
        use_conv_bias=keys.tensor(parts.first(keys, "ssm_conv1d.bias")) is not None,
        mlp_bias=keys.tensor(parts.first(keys, "ffn_up.bias")) is not None,
        intermediate_size=keys.integer("feed_forward_length", 1),
    )
    if keys.varies("expert_used_count"):
        config["block_configs"] = _blocks_of_puzzle(keys, kinds)
    del config["num_hidden_layers"]
    if "moe" in kinds:
        parts.check_gating(keys, parts.SIGMOID)
        config |= {
            "n_routed_experts": keys.integer("expert_count"),
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
            "norm_topk_prob": keys.boolean("expert_weights_norm", True),
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
            "n_group": keys.integer("expert_group_count", 1),
            "topk_group": keys.integer("expert_group_used_count", 1),
            "moe_latent_size": keys.integer("moe_latent_size", 0),
        }
    inside = {
        theirs: ours.replace("self_attn", "mixer") for theirs, ours in parts.ATTENTION.items() if isinstance(ours, str)
    }
    names: Names = (
        inside
        | parts.mamba("mixer")
        | parts.dense("mixer")
        | parts.sparse("mixer")
        | parts.shared("mixer.shared_experts")
        | {
            "attn_norm": "norm",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
            "ffn_latent_in": "mixer.fc1_latent_proj",  # Ollama's names
            "ffn_latent_out": "mixer.fc2_latent_proj",
        }
    )
    return FileLayout(config, _MIXERS, names, {"mixer.A_log": LOG})


def _blocks_of_puzzle(keys: GgufKeys, kinds: list[str]) -> list[dict[str, Any]]:
    """Return the settings of each layer of Nemotron-H Puzzle, whose layers of experts differ."""
    widths, chosen = (keys.by_layer(f"expert_{name}", len(kinds)) for name in ("feed_forward_length", "used_count"))
    return [
        {"block_type": kind} | ({"moe_intermediate_size": width, "num_experts_per_tok": count} if kind == "moe" else {})
        for kind, width, count in zip(kinds, widths, chosen, strict=True)
    ]


_MIXERS: Names = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}


def _falcon_h1(keys: GgufKeys) -> FileLayout:
    """Return the layout of Falcon-H1. The multipliers are in the weights, even if a key names one. All releases have
    this ``norm_before_gate``.
    """
    mamba = _granite_mamba(keys)
    keys.seen.add("embedding_scale")
    config = parts.base(
        keys,
        "falcon_h1",
        **parts.attention(keys),
        **mamba,
        rms_norm_eps=parts.eps(keys),
        mamba_d_ssm=keys.integer("ssm.inner_size"),
        intermediate_size=keys.integer("feed_forward_length"),
        mamba_rms_norm=any(keys.layers_with("ssm_norm.weight")),
        mamba_norm_before_gate=False,
        mlp_bias=keys.tensor(parts.first(keys, "ffn_up.bias")) is not None,
        projectors_bias=keys.tensor(parts.first(keys, "ssm_out.bias")) is not None,
    )
    names = (
        parts.ATTENTION
        | parts.mamba("mamba")
        | parts.dense("feed_forward")
        | {
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_ff_layernorm.weight",
            "ffn_norm.weight": "pre_ff_layernorm.weight",
        }
    )  # the converter leaves the end out
    whole = parts.WHOLE | {"output_norm": "model.final_layernorm"}
    return FileLayout(config, whole, names, {"mamba.A_log": LOG})


def _jamba(keys: GgufKeys) -> FileLayout:
    sparse = [layer for layer, has in enumerate(keys.layers_with("ffn_gate_inp.weight")) if has]
    config = parts.base(
        keys,
        "jamba",
        **parts.attention(keys),
        rms_norm_eps=parts.eps(keys),
        layer_types=parts.kinds(keys, "mamba"),
        intermediate_size=keys.integer("feed_forward_length"),
        num_experts=keys.integer("expert_count", 1) if sparse else 1,
        num_experts_per_tok=keys.integer("expert_used_count", 1) if sparse else 1,
        mamba_d_state=keys.integer("ssm.state_size"),
        mamba_d_conv=keys.integer("ssm.conv_kernel"),
        mamba_dt_rank=keys.integer("ssm.time_step_rank"),
        mamba_expand=keys.integer("ssm.inner_size") // keys.integer("embedding_length", least=1),
        mamba_conv_bias=keys.tensor(parts.first(keys, "ssm_conv1d.bias")) is not None,
        mamba_proj_bias=keys.tensor(parts.first(keys, "ssm_in.bias")) is not None,
    )
    if sparse:
        period = sparse[1] - sparse[0] if len(sparse) > 1 else keys.layers
        if sparse != list(range(sparse[0], keys.layers, period)):
            keys.fail("expert_count", config["num_experts"], f"experts in the layers {sparse} are not served")
        config |= {"expert_layer_offset": sparse[0], "expert_layer_period": period}
    names = (
        parts.ATTENTION
        | parts.mamba1("mamba")
        | parts.dense("feed_forward")
        | parts.sparse("feed_forward", router="router")
        | {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    )
    whole = parts.WHOLE | {"output_norm": "model.final_layernorm"}
    return FileLayout(config, whole, names, {"mamba.A_log": LOG})


def _mamba_alone(keys: GgufKeys) -> FileLayout:
    """Return the layout of Mamba, Falcon-Mamba (norms of dt, B and C), Mamba-2."""
    config = parts.base(
        keys,
        keys.architecture,
        layer_norm_epsilon=parts.eps(keys),
        state_size=keys.integer("ssm.state_size"),
        conv_kernel=keys.integer("ssm.conv_kernel"),
        use_bias=keys.tensor(parts.first(keys, "ssm_in.bias")) is not None,
        use_conv_bias=keys.tensor(parts.first(keys, "ssm_conv1d.bias")) is not None,
    )
    inner, hidden = keys.integer("ssm.inner_size"), keys.integer("embedding_length", least=1)
    if keys.architecture == "mamba2":
        heads, width, groups, _, _ = _mamba2_numbers(keys)
        config |= {"num_heads": heads, "head_dim": width, "n_groups": groups, "expand": inner / hidden}
        names = parts.mamba("mixer")
    else:
        plain = keys.boolean("ssm.dt_b_c_rms", False)
        config |= {
            "model_type": "falcon_mamba" if plain else "mamba",
            "intermediate_size": inner,
            "time_step_rank": keys.integer("ssm.time_step_rank"),
        }
        names = parts.mamba1("mixer")
    return FileLayout(config, _MIXERS, names | {"attn_norm": "norm"}, {"mixer.A_log": LOG})


def _plain(keys: GgufKeys) -> FileLayout:
    """Return the layout of models with attention in every layer: Qwen3 with norms of queries and keys, Llama with
    interleaved rows. Rows of pictures that Qwen3-VL adds in some layers change no text.
    """
    keys.seen.add("n_deepstack_layers")
    llama, count = keys.architecture == "llama", keys.integer("expert_count", 0)
    if llama and count:
        mixtral = dense.of_row(keys, dense.MIXTRAL)
        return replace(mixtral, undo=parts.interleaved(mixtral.config))
    config = parts.base(
        keys,
        "llama" if llama else "qwen3_moe" if count else "qwen3",
        **parts.attention(keys),
        rms_norm_eps=parts.eps(keys),
        intermediate_size=keys.integer("feed_forward_length"),
        **(parts.experts(keys) if count else {}),
    )
    names = parts.ATTENTION | parts.NORMS | parts.dense("mlp") | parts.sparse("mlp")
    return FileLayout(config, parts.WHOLE, names, parts.interleaved(config) if llama else {})


def _gpt_oss(keys: GgufKeys) -> FileLayout:
    """Return the layout of GPT-OSS. Rows of gate and up are apart; in older files of Ollama they take turns. Its files
    use YaRN without saying so. llama.cpp rounds YaRN's ends to integer dims; releases do not.
    """
    attended = parts.attention(keys, scaled="yarn" if keys.architecture == "gptoss" else "linear")
    attended["rope_parameters"]["truncate"] = False
    experts = parts.experts(keys)
    parts.check_gating(keys, parts.CHOSEN_SOFTMAX)
    config = parts.base(
        keys,
        "gpt_oss",
        **attended,
        rms_norm_eps=parts.eps(keys),
        intermediate_size=experts["moe_intermediate_size"],
        num_local_experts=experts["num_experts"],
        num_experts_per_tok=experts["num_experts_per_tok"],
        sliding_window=keys.integer("attention.sliding_window", least=1),
        layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(keys.layers)],
    )
    names: Names = {
        "attn_sinks.weight": "self_attn.sinks",
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
    }
    names |= {f"ffn_{part}_exps.bias": f"mlp.experts.{part}_proj_bias" for part in parts.PARTS}
    undo: dict[str, Undo] = {}
    if keys.architecture == "gptoss":
        ollama, undo = _of_ollama(config)
        names |= ollama
    return FileLayout(config, parts.WHOLE, parts.ATTENTION | names | parts.sparse("mlp", router="router"), undo)


def _of_ollama(config: Mapping[str, Any]) -> tuple[Names, dict[str, Undo]]:
    """Return names of tensors of GPT-OSS in Ollama's files, and the joined tensors in them: all rows of q, k and v,
    and the rows of gate and up in turns.
    """
    heads = [config["num_attention_heads"], *[config["num_key_value_heads"]] * 2]
    ends = np.cumsum([0, *heads]) * config["head_dim"]
    both = ("gate_proj", "up_proj")
    qkv = tuple(f"self_attn.{part}_proj" for part in "qkv")
    names: Names = {
        "attn_out": "self_attn.o_proj",
        "attn_sinks": "self_attn.sinks",
        "ffn_norm": "post_attention_layernorm",
        "attn_qkv": qkv,
        "ffn_gate_up_exps": tuple(f"mlp.experts.{{e}}.{part}" for part in both),
        "ffn_gate_up_exps.bias": tuple(f"mlp.experts.{part}_bias" for part in both),
    }
    undo = {
        f"attn_qkv:{part}.{end}": Undo(rows=np.arange(*rows))
        for part, rows in zip(qkv, pairwise(ends), strict=True)
        for end in ("weight", "bias")
    }
    for first, part in enumerate(both):
        turns = np.arange(first, 2 * config["intermediate_size"], 2)
        undo[f"ffn_gate_up_exps:mlp.experts.{{e}}.{part}.weight"] = Undo(rows=turns)
        undo[f"ffn_gate_up_exps.bias:mlp.experts.{part}_bias"] = Undo(columns=turns)
    return names, undo


_ROWS = dense.ROWS | routed.ROWS
ARCHITECTURES: dict[str, Callable[[GgufKeys], FileLayout]] = {
    "lfm2": _lfm2, "lfm2moe": _lfm2, "qwen35": qwen_hybrid, "qwen35moe": qwen_hybrid,
    "qwen3next": qwen_hybrid, "granitehybrid": _granite, "granite": _granite, "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h, "falcon-h1": _falcon_h1, "jamba": _jamba, "mamba": _mamba_alone,
    "mamba2": _mamba_alone, "llama": _plain, "gpt-oss": _gpt_oss,
    **dict.fromkeys(("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"), _plain),
    "gptoss": _gpt_oss, "kimi-linear": kimi_linear, "kimi-k3": kimi_k3, "bailingmoe3": ling, "gigachat35": gigachat35,
    "gemma3": gemma3, "gemma3n": gemma3n, "gemma4": gemma4, "rwkv7": rwkv7, "qwen4exp": qwen4exp,
    "glm5-next": glm5_next, "deepseek2": deepseek2, "glm-dsa": glm_dsa, "minicpm3": minicpm3,
    "falcon": dense.falcon, "plamo2": plamo2, "plamo3": plamo3,
    **dict.fromkeys(_ROWS, lambda keys: dense.of_row(keys, _ROWS[keys.architecture])),
}  # fmt: skip
