"""Decoders without positions, whose scores have a bias by distance for each head (ALiBi): BLOOM, MPT.

    scores = scale q . k - slope[head] * distance

Sources: the configuration class and the model of transformers 5.24 for each ``model_type``; Press et al., "Train short,
test long" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.families.attention import NAMES
from weft.families.config_keys import ConfigKeys
from weft.families.decoders import Decoder
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense
from weft.families.reading import Family
from weft.families.residuals import LayerNorms, Residual

EXPONENT = 8.0
"""Exponent of the slope of the last head, 2^-8, in all of these models."""


def _mpt_attention(keys: ConfigKeys) -> Mapping[str, Any]:
    stated = ConfigKeys(keys.get("attn_config") or {}, fallback={})
    stated.only(
        "attn_config.",
        alibi=True,
        alibi_bias_max=int(EXPONENT),
        attn_type="multihead_attention",
        prefix_lm=False,
        qk_ln=False,
    )
    heads = keys.integer("num_attention_heads")
    scale = stated.number("softmax_scale", (keys.integer("hidden_size") // heads) ** -0.5)
    return {"kv_heads": heads, "clip": stated.number("clip_qkv", 0.0), "scale": scale}


_BLOOM = Decoder(
    defaults={
        "vocab_size": 250_880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    renamed={
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    attention={"rope": None, "bias": True, "grouped": True, "alibi": EXPONENT},
    attention_of=lambda keys: {"kv_heads": keys.integer("num_attention_heads")},
    feed=lambda keys, layer: Dense(4 * keys.integer("hidden_size"), "gelu_tanh", gated=False, bias=True),
    residual=lambda keys: LayerNorms(),
    only={"apply_residual_connection_post_layernorm": False},
)
_MPT = Decoder(
    defaults={
        "vocab_size": 50_368,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    renamed={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    attention={"rope": None, "alibi": EXPONENT},
    attention_of=_mpt_attention,
    feed=lambda keys, layer: Dense(4 * keys.integer("hidden_size"), "gelu", gated=False),
    residual=lambda keys: Residual(centred="weight"),
    only={"logit_scale": None, "no_bias": True},
)
_BLOOM_FILES = (
    (r"^(?:transformer\.)?word_embeddings\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
    (r"^(?:transformer\.)?h\.", "model.layers."),
)
_MPT_FILES = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.norm_f\.", "model.norm."),
    (r"^transformer\.blocks\.", "model.layers."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.norm_1\.", ".input_layernorm."),
    (r"\.norm_2\.", ".post_attention_layernorm."),
)
_UNGATED = replace(NAMES, swiglu=False)
FAMILIES = (
    Family("bloom", ("bloom",), _BLOOM, names=replace(
        _UNGATED, mixers={Attention: "self_attention"}, embedding_norm="embed_norm", spelled={
            Attention: {"joined": "query_key_value", "out": "dense"},
            Dense: {"names": ("dense_h_to_4h", "dense_4h_to_h")}}), released=_BLOOM_FILES),
    Family("mpt", ("mpt",), _MPT, names=replace(
        _UNGATED, spelled={Attention: {"joined": "Wqkv", "out": "out_proj"}, Dense: {"names": ("up_proj", "down_proj")}}
    ), released=_MPT_FILES),
)  # fmt: skip
