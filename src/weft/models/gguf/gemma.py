"""Gemma 3 and Gemma 4 in GGUF files, their text part.

    architecture    model_type     changes by the converter besides names
    gemma3          gemma3_text    norms + 1; rows of the embedding that are no tokens cut off
    gemma4          gemma4_text    a quarter of a head turns: divisors 1e30 (``rope_freqs``) for the rest

Heads are the embedding. The layers with a window are given by a number for Gemma 3 (each sixth has none), by a list
for Gemma 4. The factor of Gemma 3's scores is not in the file: it follows from the width of a head, except in the
release of 62 layers. The experts of Gemma 4 have gate and up in one tensor, cut here expert by expert.

Source: llama.cpp's ``conversion`` package and its ``gemma3`` and ``gemma4`` models, for the meaning of keys.
"""

from __future__ import annotations

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
    whole: Names = {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    names: Names = {
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
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
    return FileLayout(config, parts.WHOLE | whole, _NAMES | names)


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
    """Return the rotary settings of layers with a window. The second name is Ollama's."""
    theta = keys.number("rope.freq_base_swa", keys.number("rope.local.freq_base", 10_000.0))
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
