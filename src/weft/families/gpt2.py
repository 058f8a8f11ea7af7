"""GPT-2 and its kin, with positions at the embedding: OPT, StarCoder 1, GPT-Neo, XGLM, BioGPT. GPT-J and CodeGen turn
instead.

    x = embed(token) * factor + table[position]

Sources: the configuration class and the model of transformers 5.24 for each ``model_type``; their defaults are in the
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.families.attention import NAMES
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import BIAS, FULL_KIND, Decoder, all_biased
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import Activation, Dense, FeedForward
from weft.families.reading import WINDOW_KIND, Family
from weft.families.residuals import Positions, Residual

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in transformers."""


def _feed(default: str, bias: bool = True) -> Callable[[ConfigKeys, int], FeedForward]:
    """Return a reader of down(activation(up(x))), whose activation ``activation_function`` names."""

    def read(keys: ConfigKeys, layer: int) -> FeedForward:
        name = keys.get("activation_function", default)
        if name not in _ACTIVATIONS:
            fail("activation_function", name, f"those served are {', '.join(_ACTIVATIONS)}")
        width = keys.integer("intermediate_size", 4 * keys.integer("hidden_size"))
        return Dense(width, _ACTIVATIONS[name], gated=False, bias=keys.boolean(BIAS, bias))

    return read


def _placed(first: int = 0, kind: str = "learned") -> Callable[[ConfigKeys], Residual]:
    """Return a reader of a stream with ``Positions``, before whose rows the table has ``first`` others."""

    def read(keys: ConfigKeys) -> Residual:
        count = keys.integer("max_position_embeddings")
        weighted = keys.boolean("layer_norm_elementwise_affine", True)
        return Residual(
            centred="bias" if weighted else "plain",
            positions=Positions(count + first, first, sinusoids=kind == "sinusoids"),
        )

    return read


def _own_heads(**fields: Any) -> Callable[[ConfigKeys], Mapping[str, Any]]:
    """Return a reader of attention without rotary positions, in which each head has keys and values of its own."""
    return lambda keys: {"rope": None, "kv_heads": keys.integer("num_attention_heads"), **fields}


def _gpt2_attention(keys: ConfigKeys) -> Mapping[str, Any]:
    scale = {} if keys.boolean("scale_attn_weights", True) else {"scale": 1.0}
    return {**_own_heads(bias=True)(keys), **scale}


def _bigcode_attention(keys: ConfigKeys) -> Mapping[str, Any]:
    """Return the fields of one KV head for all queries, or of as many as queries, whose rows follow each other."""
    single = keys.boolean("multi_query", True)
    return {**_gpt2_attention(keys), **({"kv_heads": 1} if single else {"grouped": True})}


def _neo_keys(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys`` with the kinds of all layers; ``attention_types`` says them as [[kinds, times], ...]."""
    count = keys.integer("num_hidden_layers")
    stated = keys.get("attention_types", [[["global", "local"], count // 2]])
    kinds = keys.get("attention_layers")
    try:
        kinds = kinds or [kind for group, times in stated for _ in range(min(times, count)) for kind in group]
        named = [{"global": FULL_KIND, "local": WINDOW_KIND}[kind] for kind in kinds]
    except (KeyError, TypeError, ValueError):
        fail("attention_types", stated, "it must be a list of pairs: a list of global and local, and a count")
    return keys.over({"layer_types": named, "sliding_window": keys.integer("window_size", 256)})


def _turned(keys: ConfigKeys) -> Mapping[str, Any]:
    dim, head_dim = keys.integer("rotary_dim", 64), keys.integer("hidden_size") // keys.integer("num_attention_heads")
    if dim % 2 or dim > head_dim:
        fail("rotary_dim", dim, f"it must be even, and at most the {head_dim} numbers of a head")
    return {**_own_heads()(keys), "rope": Rope(10_000.0, dim)}


def _turned_parts(keys: ConfigKeys) -> Mapping[str, Any]:
    """Return the fields of CodeGen, whose matrices have the order of the four devices that trained it. Two sizes of
    CodeGen 2 were trained on eight: their configurations, and no others, state the width of a head."""
    heads, stated = keys.integer("num_attention_heads"), keys.has("head_dim")
    parts = 8 if stated else 4
    keys.only(head_dim=keys.integer("hidden_size") // heads if stated else None)
    if heads % parts:
        fail("n_head", heads, f"it must be a multiple of {parts}")
    return {**_turned(keys), "parts": parts}


def _scaled(keys: ConfigKeys) -> Mapping[str, Any]:
    factor = math.sqrt(keys.integer("hidden_size")) if keys.boolean("scale_embedding", True) else 1.0
    return {"embedding_multiplier": factor}


def _sizes(vocab: int, hidden: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "rms_norm_eps": "layer_norm_epsilon",
}
"""Names here, and GPT-2's."""
_TIED = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_GPT2 = Decoder(
    defaults=_sizes(50_257, 768, 12, 12, 1024) | _TIED,
    renamed=_KEYS,
    attention_of=_gpt2_attention,
    feed=_feed("gelu_new"),
    residual=_placed(),
    only={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
)
_BIGCODE = replace(_GPT2, attention_of=_bigcode_attention, feed=_feed("gelu_pytorch_tanh"), only={
    "add_cross_attention": False})  # fmt: skip
_NEO = Decoder(
    defaults=_sizes(50_257, 2048, 24, 16, 2048) | _TIED,
    renamed={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
             "rms_norm_eps": "layer_norm_epsilon"},
    attention_of=_own_heads(scale=1.0, out_bias=True),
    kinds=lambda keys, count: [FULL_KIND] * count,
    feed=_feed("gelu_new"),
    residual=_placed(),
    keys_of=_neo_keys,
)  # fmt: skip
_GPTJ = Decoder(
    defaults=_sizes(50_400, 4096, 28, 16, 2048) | {"rms_norm_eps": 1e-5},
    renamed=_KEYS,
    attention_of=_turned,
    feed=_feed("gelu_new"),
    residual=lambda keys: Residual(centred="bias", parallel="one"),
    more=lambda keys: {"head_bias": True},
)
_CODEGEN = replace(_GPTJ, attention_of=_turned_parts)
_OPT = Decoder(
    defaults=_sizes(50_272, 768, 12, 12, 2048) | _TIED | {"intermediate_size": 3072, BIAS: True},
    renamed={"intermediate_size": "ffn_dim", BIAS: "enable_bias"},
    attention_of=lambda keys: {**_own_heads()(keys), **all_biased(keys)},
    feed=_feed("relu"),
    residual=_placed(first=2),
    only={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
    keys_of=lambda keys: _same_width(keys),
)
_XGLM = Decoder(
    defaults=_sizes(256_008, 1024, 24, 16, 2048) | _TIED | {"intermediate_size": 4096},
    renamed={"intermediate_size": "ffn_dim", "hidden_size": "d_model", "num_hidden_layers": "num_layers",
             "num_attention_heads": "attention_heads"},
    attention_of=_own_heads(bias=True),
    feed=_feed("gelu"),
    residual=_placed(first=2, kind="sinusoids"),
    more=_scaled,
    only={"add_cross_attention": False},
)  # fmt: skip
_BIOGPT = Decoder(
    defaults=_sizes(42_384, 1024, 24, 16, 1024) | _TIED | {"intermediate_size": 4096},
    attention_of=_own_heads(bias=True),
    feed=lambda keys, layer: Dense(keys.integer("intermediate_size"), "gelu", gated=False, bias=True),
    residual=_placed(first=2),
    more=_scaled,
)


def _same_width(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys`` of a model whose embedding is as wide as its stream; the one of OPT 350M is not."""
    keys.only(word_embed_proj_dim=keys.integer("hidden_size"))
    return keys


_FILES = (
    (r"^(?:transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
    (r"^(?:transformer\.)?h\.", "model.layers."),
    (r"\.attn\.(?:attention\.)?", ".self_attn."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
)
_UNGATED = replace(NAMES, swiglu=False)
_GPT2_NAMES = replace(
    _UNGATED, spelled={Attention: {"joined": "c_attn", "out": "c_proj"}, Dense: {"names": ("c_fc", "c_proj")}}
)
_NEO_NAMES = replace(_UNGATED, spelled={Attention: {"out": "out_proj"}, Dense: {"names": ("c_fc", "c_proj")}})
_GPTJ_NAMES = replace(
    _UNGATED, spelled={Attention: {"out": "out_proj", "paired": True}, Dense: {"names": ("fc_in", "fc_out")}}
)
_CODEGEN_NAMES = replace(
    _UNGATED,
    spelled={
        Attention: {"joined": "qkv_proj", "out": "out_proj", "paired": True},
        Dense: {"names": ("fc_in", "fc_out")},
    },
)
_FAIRSEQ_NAMES = replace(
    _UNGATED,
    feed="",
    mixer_norm="self_attn_layer_norm",
    feed_norm="final_layer_norm",
    final_norm="layer_norm",
    spelled={Attention: {"out": "out_proj"}, Dense: {"names": ("fc1", "fc2")}},
)
FAMILIES = (
    Family("opt", ("opt",), _OPT, names=replace(_FAIRSEQ_NAMES, final_norm="final_layer_norm")),
    Family("gpt2", ("gpt2", "gpt-sw3"), _GPT2, names=_GPT2_NAMES, released=_FILES,
           transposed=r"\.(?:c_attn|c_proj|c_fc)\.weight$"),
    Family("gpt_bigcode", ("gpt_bigcode",), _BIGCODE, names=_GPT2_NAMES, released=_FILES),
    Family("gpt_neo", ("gpt_neo",), _NEO, names=_NEO_NAMES, released=_FILES),
    Family("gptj", ("gptj",), _GPTJ, names=_GPTJ_NAMES, released=_FILES),
    Family("codegen", ("codegen",), _CODEGEN, names=_CODEGEN_NAMES, released=_FILES),
    Family("xglm", ("xglm",), _XGLM, names=_FAIRSEQ_NAMES),
    Family("biogpt", ("biogpt",), _BIOGPT, "gelu", _FAIRSEQ_NAMES, ((r"^output_projection\.", "lm_head."),)),
)  # fmt: skip
