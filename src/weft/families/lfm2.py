"""LFM2 (short convolution + attention), dense, with experts or with a vision tower; LFM3, with windows and another
tower."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.short_conv import ShortConv
from weft.families.names import W_NAMES, Names
from weft.families.reading import (
    CONVOLVED_KINDS,
    WINDOW_KIND,
    Family,
    build_architecture,
    experts_per_token,
    kinds_with_windows,
    layer_kinds,
    read_attention,
    whole_or_proportional,
    windowed,
)
from weft.families.residuals import Residual
from weft.families.towers import read_lfm3_tower, read_siglip2
from weft.families.vision import VisionTower


def read_lfm2(family: str, keys: ConfigKeys) -> Architecture:
    chosen = keys.get("full_attn_idxs")
    kinds = layer_kinds(
        keys,
        lambda count: ["attention" if chosen is None or i in chosen else "recurrent" for i in range(count)],
        CONVOLVED_KINDS,
    )
    hidden = keys.integer("hidden_size")
    attention = read_attention(keys, qk_norm=True, theta=1e6)
    conv = ShortConv(hidden, keys.integer("conv_L_cache", 3), keys.boolean("conv_bias", False))
    dense = Dense(_lfm2_width(keys))
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else conv for kind in kinds],
        [dense] * len(kinds),
        tied=keys.boolean("tie_embedding", keys.boolean("tie_word_embeddings", True)),
        eps=keys.number("norm_eps", keys.number("block_norm_eps", 1e-5)),
        max_positions=128_000,
    )


def _lfm2_width(keys: ConfigKeys) -> int:
    """Return the inner width. config.json has the width of a feed-forward with two matrices. SwiGLU has three, so 2/3
    of that width is used, rounded up to a multiple, unless ``block_auto_adjust_ff_dim`` is false."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size", 0, least=0))
    if not keys.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if keys.get("block_ffn_dim_multiplier", 1.0) is not None:
        width = int(keys.number("block_ffn_dim_multiplier", 1.0) * width)
        multiple = keys.integer("block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    return width


def read_lfm2_moe(family: str, keys: ConfigKeys) -> Architecture:
    """Read LFM2 with experts. The defaults are those of LFM2-8B-A1B. ``layer_types`` has no default."""
    kinds = layer_kinds(
        keys, lambda count: fail("layer_types", None, "it must list the kind of each layer"), CONVOLVED_KINDS
    )
    hidden = keys.integer("hidden_size", 2048)
    attention = read_attention(keys, qk_norm=True, theta=1e6)
    conv = ShortConv(hidden, keys.integer("conv_L_cache", 3), keys.boolean("conv_bias", False))
    count = keys.integer("num_experts", 32)
    experts = Experts(
        count=count,
        per_token=experts_per_token(keys, count),
        width=keys.integer("moe_intermediate_size", 1792),
        normalized=keys.boolean("norm_topk_prob", True),
        scoring="sigmoid",
        choice_bias=keys.boolean("use_expert_bias", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        normalizer_eps=1e-6,
    )
    dense = Dense(keys.integer("intermediate_size", 7168))
    first = keys.integer("num_dense_layers", 2, least=0)
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else conv for kind in kinds],
        [dense if layer < first else experts for layer in range(len(kinds))],
        tied=keys.boolean("tie_embedding", keys.boolean("tie_word_embeddings", True)),
        eps=keys.number("norm_eps", 1e-5),
        max_positions=128_000,
    )


def read_lfm2_vl(family: str, keys: ConfigKeys) -> Architecture:
    """Read a text part of LFM2 and a SigLIP2 tower, whose settings are in the wrapper. A configuration without
    ``vision_config`` has only the text part."""
    text = keys.get("model_type", "lfm2")
    readers = {"lfm2": read_lfm2, "lfm2_vl": read_lfm2, "lfm2_moe": read_lfm2_moe}
    if text not in readers:
        fail("text_config.model_type", text, "the text parts served here are lfm2 and lfm2_moe")
    return _seeing(readers[text](family, keys), keys, read_siglip2(keys.outer))


def _seeing(text: Architecture, keys: ConfigKeys, tower: VisionTower | None) -> Architecture:
    """Return ``text`` with a tower. The wrapper says whether embeddings are tied."""
    tied = keys.outer_boolean("tie_embedding", keys.outer_boolean("tie_word_embeddings", text.tied_embeddings))
    return dataclasses.replace(text, tied_embeddings=tied, vision=tower)


def read_lfm3(family: str, keys: ConfigKeys) -> Architecture:
    """Read LFM3. Window and full layers have rotary settings of their own. The defaults are those of LFM3-1.7B."""
    hidden, count = keys.integer("hidden_size", 2048), keys.integer("num_hidden_layers", 24)
    of_four = (WINDOW_KIND, "conv", "full_attention", "conv")
    kinds = kinds_with_windows(
        keys, ("conv", "full_attention", WINDOW_KIND), [of_four[i % 4] if i else "conv" for i in range(count)]
    )
    plain = dataclasses.replace(
        read_attention(keys, rotary=False, qk_norm=True, head_dim=128),
        head_gated=keys.boolean("use_attention_gate", True),
    )
    default = ConfigKeys({"rope_parameters": LFM3_ROPE}, fallback={})

    def turned(kind: str) -> Attention:
        stated = keys.get("rope_parameters") or keys.get("rope_scaling")
        rope = read_rope(keys if stated else default, plain.head_dim, theta=1e6, partial=1.0, layer_kind=kind)
        return dataclasses.replace(plain, rope=whole_or_proportional(rope, plain.head_dim))

    mixers: dict[str, Mixer] = {
        "conv": ShortConv(hidden, keys.integer("conv_L_cache", 7), keys.boolean("conv_bias", False)),
        "full_attention": turned("full_attention"),
        WINDOW_KIND: windowed(turned(WINDOW_KIND), keys, default=256),
    }
    return build_architecture(
        family,
        keys,
        [mixers[kind] for kind in kinds],
        [Dense(keys.integer("intermediate_size", 7680))] * count,
        tied=keys.boolean("tie_word_embeddings", True),
        eps=keys.number("norm_eps", 1e-5),
        max_positions=128_000,
        residual=Residual(out_norms=keys.boolean("use_sandwich_norm", True)),
    )


def read_lfm3_vl(family: str, keys: ConfigKeys) -> Architecture:
    """Read a text part of LFM3 and a tower of convolutions and attention. A configuration without ``vision_config``
    has only the text part."""
    text = keys.get("model_type", "lfm3")
    if text not in ("lfm3", "lfm3_vl"):
        fail("text_config.model_type", text, "the text part served here is lfm3")
    return _seeing(read_lfm3(family, keys), keys, read_lfm3_tower(keys.outer))


LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}

_LFM3 = Names(
    {Attention: "self_attn", ShortConv: "conv"},
    feed="feed_forward",
    mixer_norm="operator_norm",
    feed_norm="ffn_norm",
    final_norm="embedding_norm",  # after the last layer, not the embedding
    spelled={Dense: {"names": W_NAMES}, Experts: {"names": W_NAMES, "choice_bias": "expert_bias"}},
)
_LFM2 = replace(
    _LFM3, spelled={**_LFM3.spelled, Attention: {"out": "out_proj", "norms": ("q_layernorm", "k_layernorm")}}
)
FAMILIES = (
    Family("lfm2", ("lfm2", "lfm2_bidirectional"), read_lfm2, names=_LFM2),
    Family("lfm2", ("lfm2_moe",), read_lfm2_moe, names=_LFM2),
    Family("lfm2", ("lfm2_vl",), read_lfm2_vl, names=_LFM2),
    Family("lfm3", ("lfm3",), read_lfm3, names=_LFM3),
    Family("lfm3", ("lfm3_vl",), read_lfm3_vl, names=_LFM3),
)
