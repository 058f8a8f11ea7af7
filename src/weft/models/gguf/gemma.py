"""Gemma 3, 3n and 4 in GGUF files, their text part.

    architecture    model_type     changes by the converter besides names
    gemma3          gemma3_text    norms + 1; rows of the embedding that are no tokens cut off
    gemma3n         gemma3n_text   projections of the streams in one tensor; shares of sparse gates as quantiles
    gemma4          gemma4_text    a quarter of a head turns: divisors 1e30 (``rope_freqs``) for the rest

Heads are the embedding. The layers with a window are given by a number for Gemma 3 (each sixth has none), by a list
for Gemma 4. The factor of Gemma 3's scores is not in the file: it follows from the width of a head, except in the
release of 62 layers. The experts of Gemma 4 have gate and up in one tensor, cut here expert by expert.

Source: llama.cpp's ``conversion`` package and its ``gemma3``, ``gemma3n`` and ``gemma4`` models, for the meaning of
keys.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from weft.models.gguf import parts
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import FULL_KIND, WINDOW_KIND, FileLayout, Names

_LAYERS_27B = 62
_TURNS = 1e6
"""Divisor above which a dim does not turn."""
_NAMES: Names = (
    parts.ATTENTION
    | parts.dense("mlp")
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)


def gemma3(keys: GgufKeys) -> FileLayout:
    attended = parts.attention(keys)
    hidden, heads = keys.integer("embedding_length"), attended["num_attention_heads"]
    divisor = hidden // heads if keys.layers == _LAYERS_27B else attended["head_dim"]
    full = attended.pop("rope_parameters")
    config = (
        _config(keys, "gemma3_text")
        | attended
        | {"query_pre_attn_scalar": divisor, "rope_parameters": {FULL_KIND: full, WINDOW_KIND: _window_rope(keys)}}
    )
    undo = {
        f"{name}.weight": parts.MINUS_ONE for name in ("model.norm", *_NAMES.values()) if str(name).endswith("norm")
    }
    return FileLayout(config, parts.WHOLE, _NAMES, undo)


_SECOND_EMBEDDING: Names = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_OWN_NUMBERS: Names = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_DIGITS = 6
"""Digits of a share that a quantile of float32 has."""


def gemma3n(keys: GgufKeys) -> FileLayout:
    attended, layers = parts.attention(keys), keys.layers
    full = attended.pop("rope_parameters")
    low_rank, second = keys.tensor("blk.0.laurel_l.weight"), keys.tensor("per_layer_token_embd.weight")
    if low_rank is None or second is None:
        keys.fail("block_count", layers, "the file has no blk.0.laurel_l.weight or no per_layer_token_embd.weight")
    config = (
        _config(keys, "gemma3n_text")
        | attended
        | {
            "rope_parameters": {FULL_KIND: full, WINDOW_KIND: _window_rope(keys)},
            "intermediate_size": keys.by_layer("feed_forward_length", layers),
            "activation_sparsity_pattern": _sparsity(keys, layers),
            "num_kv_shared_layers": keys.integer("attention.shared_kv_layers", keys.integer("num_kv_shared_layers", 0)),
            "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", least=1),
            "vocab_size_per_layer_input": second.shape[0],
            "altup_num_inputs": keys.integer("altup.num_inputs"),
            "altup_active_idx": keys.integer("altup.active_idx", 0),
            "altup_correct_scale": keys.boolean("altup.correct_scale", True),
            "laurel_rank": keys.integer("laurel_rank", low_rank.shape[0]),
        }
    )
    whole: Names = {
        "altup_proj": "model.altup_projections.{e}",
        "altup_unembd_proj": "model.altup_unembed_projections.{e}",
    }
    names: Names = {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
    return FileLayout(config, parts.WHOLE | _SECOND_EMBEDDING | whole, _NAMES | _OWN_NUMBERS | names)


def _sparsity(keys: GgufKeys, layers: int) -> list[float]:
    """Return the share of each layer's gates that is cut; the file has its quantile, minus infinity for none."""
    stated = keys.get("activation_sparsity_scale")
    if stated is None:
        return [0.0] * layers
    if not isinstance(stated, np.ndarray) or stated.dtype.kind != "f" or stated.size != layers:
        keys.fail("activation_sparsity_scale", stated, f"it must list a number for each of the {layers} layers")
    return [round(NormalDist().cdf(float(quantile)), _DIGITS) for quantile in stated]


def gemma4(keys: GgufKeys) -> FileLayout:
    config, layers = _config(keys, "gemma4_text"), keys.layers
    reused = keys.integer("attention.shared_kv_layers", 0)
    kinds, has_values = config["layer_types"], keys.layers_with("attn_v.weight")
    kv_heads = keys.by_layer("attention.head_count_kv", layers)
    widths = keys.by_layer("feed_forward_length", layers)
    window_dim = keys.integer("attention.key_length_swa", keys.integer("attention.key_length"), least=1)
    full_dim = keys.integer("attention.key_length", least=1)
    config |= {
        "num_attention_heads": keys.integer("attention.head_count", least=1),
        "head_dim": window_dim,
        "num_key_value_heads": kv_heads[kinds.index(WINDOW_KIND) if WINDOW_KIND in kinds else 0],
        "num_kv_shared_layers": reused,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "attention_k_eq_v": any(
            kind == FULL_KIND and not has for kind, has in list(zip(kinds, has_values, strict=True))[: layers - reused]
        ),
        "per_layer_config": {
            str(layer): {"head_dim": full_dim, "num_key_value_heads": kv_heads[layer]}
            for layer, kind in enumerate(kinds)
            if kind == FULL_KIND
        },
        "rope_parameters": {FULL_KIND: _partial_rope(keys, full_dim), WINDOW_KIND: _window_rope(keys)},
    }
    if any(keys.layers_with("ffn_gate_inp.weight")):
        config |= {
            "enable_moe_block": True,
            "num_experts": keys.integer("expert_count", least=1),
            "top_k_experts": keys.integer("expert_used_count", least=1),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length", least=1),
        }
    names: Names = {
        "layer_output_scale.weight": "layer_scalar",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps": ("experts.{e}.gate_proj", "experts.{e}.up_proj"),
        "ffn_gate_exps": "experts.{e}.gate_proj",
        "ffn_up_exps": "experts.{e}.up_proj",
        "ffn_down_exps": "experts.{e}.down_proj",
    }
    return FileLayout(config, parts.WHOLE | _SECOND_EMBEDDING, _NAMES | _OWN_NUMBERS | names)


def _config(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    window, cap = keys.integer("attention.sliding_window", 0), keys.number("final_logit_softcapping", 0.0)
    return parts.base(
        keys,
        model_type,
        rms_norm_eps=parts.eps(keys),
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=window or None,
        layer_types=parts.window_kinds(keys, window, every=6),
        intermediate_size=keys.integer("feed_forward_length", least=1),
        final_logit_softcapping=cap or None,
    )


def _window_rope(keys: GgufKeys) -> dict[str, Any]:
    """Return the rotary settings of layers with a window. The further names are Ollama's."""
    theta = 10_000.0
    for name in ("rope.freq_base_local", "rope.local.freq_base", "rope.freq_base_swa"):
        theta = keys.number(name, theta)
    return {"rope_type": "default", "rope_theta": theta}


def _partial_rope(keys: GgufKeys, width: int) -> dict[str, Any]:
    """Return the rotary settings of full layers: the share of dims whose divisor is 1."""
    divisors, theta = keys.tensor("rope_freqs.weight"), keys.number("rope.freq_base", 1e6)
    share = 1.0
    if divisors is not None:
        if divisors.type != "F32" or divisors.shape != (width // 2,):
            keys.fail("attention.key_length", width, f"rope_freqs is {divisors.type} of {divisors.shape}")
        numbers = np.fromfile(divisors.file, "<f4", width // 2, offset=divisors.begin)
        turning = int((numbers < _TURNS).sum())
        if not ((numbers[:turning] == 1).all() and (numbers[turning:] >= _TURNS).all()):
            keys.fail("rope.freq_base", theta, "rope_freqs has other numbers than Gemma 4's")
        share = turning / len(numbers)
    return {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta}
