"""Gemma 3 and Gemma 4, their text part, and RecurrentGemma: GELU, an embedding times the root of its width.

The first two have full attention after each five layers with a window, and a norm before and behind each
block. RecurrentGemma has two layers of RG-LRU for each with a window, and biases.

Gemma 4 has more. Full layers have wider heads, of which a quarter turns, and values may be the keys before
their norm. Values are normed. The last layers have no keys: they read those of the last layer of their kind
before them. A second embedding gives each token some numbers for each layer.

    layer      0 w   1 w   2 full   3 w   4 full        w: a window, in a ring
    reads      0     1     2        1     2             1 is read by 3 too, so it is in pages

Source: transformers ``Gemma3TextConfig``, ``Gemma4TextConfig``, ``RecurrentGemmaConfig`` and their models;
their defaults stand here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture, Attention, Dense, Experts, FeedForward, RgLru, Rope
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.reading import WINDOW_KIND, Family, build_architecture, read_attention, windowed

FULL = "full_attention"
POSITIONS = 1 << 20
"""Of RecurrentGemma, which names no longest text."""
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
}


def read_gemma3(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(**_DEFAULTS, num_hidden_layers=26, vocab_size=262_208, sliding_window=4096)
    keys.only(hidden_activation="gelu_pytorch_tanh")
    both_ways = keys.boolean("use_bidirectional_attention", False)
    if both_ways:  # EmbeddingGemma: half of the window on either side
        keys = keys.over({"sliding_window": keys.integer("sliding_window", least=2) // 2})
    if keys.get("attn_logit_softcapping"):
        fail("attn_logit_softcapping", keys.get("attn_logit_softcapping"), "capped scores are not served")
    kinds = _kinds(keys, keys.integer("sliding_window_pattern", 6))
    plain = read_attention(keys, rotary=False, qk_norm=True, scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5)
    plain = replace(plain, causal=not both_ways)
    local = Rope(keys.number("rope_local_base_freq", 10_000.0), plain.head_dim)
    if WINDOW_KIND in (keys.get("rope_parameters") or {}):
        local = read_rope(keys, plain.head_dim, theta=10_000.0, partial=1.0, layer_kind=WINDOW_KIND)
    full = replace(plain, rope=read_rope(keys, plain.head_dim, theta=1e6, partial=1.0, layer_kind=FULL))
    window = windowed(replace(plain, rope=local), keys)
    return _architecture(
        family,
        keys,
        [window if kind == WINDOW_KIND else full for kind in kinds],
        [Dense(keys.integer("intermediate_size"), "gelu_tanh")] * len(kinds),
    )


def read_gemma4(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        **_DEFAULTS, num_hidden_layers=30, vocab_size=262_144, sliding_window=512, rope_parameters=_ROPES4
    )
    keys.only(hidden_activation="gelu_pytorch_tanh")
    if keys.get("use_bidirectional_attention") == "all":
        fail("use_bidirectional_attention", "all", "text is read from left to right here")
    kinds = [*_kinds(keys, 6)[:-1], FULL]  # the last one is full whatever is said, as in transformers
    count = len(kinds)
    own = count - keys.integer("num_kv_shared_layers", 0, least=0)
    if not 0 < own <= count or set(kinds[:own]) != set(kinds):
        fail("num_kv_shared_layers", count - own, "each kind of layer needs one that has keys of its own")
    source = {kind: own - 1 - kinds[:own][::-1].index(kind) for kind in set(kinds)}
    mixers = []
    for layer, kind in enumerate(kinds):
        mixer = _attention4(keys, layer, kind)
        if layer >= own:
            mixer = replace(mixer, kv_of=source[kind])
        mixers.append(replace(mixer, shared=own < count and source[kind] == layer))
    width = keys.integer("hidden_size_per_layer_input", 256, least=0)
    vocab = keys.integer("vocab_size_per_layer_input", keys.integer("vocab_size"))
    if width and vocab != keys.integer("vocab_size"):
        fail("vocab_size_per_layer_input", vocab, f"it must be vocab_size {keys.integer('vocab_size')}")
    return _architecture(
        family,
        keys,
        mixers,
        [_feed4(keys, layer >= own) for layer in range(count)],
        layer_scalars=True,
        per_layer_width=width,
    )


_ROPES4 = {
    WINDOW_KIND: {"rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _attention4(keys: ConfigKeys, layer: int, kind: str) -> Attention:
    """Of a layer with keys of its own."""
    same = kind == FULL and keys.boolean("attention_k_eq_v", False)
    stated: dict[str, Any] = {}
    if kind == FULL:
        stated["head_dim"] = keys.integer("global_head_dim", 512)
        if same and keys.get("num_global_key_value_heads") is not None:
            stated["num_key_value_heads"] = keys.integer("num_global_key_value_heads")
    if by_layer := keys.get("per_layer_config"):  # what transformers saves in place of both
        stated = by_layer.get(str(layer)) or {}
    plain = read_attention(keys.over(stated), rotary=False, scale=1.0, qk_norm=True)
    theta = 10_000.0 if kind == WINDOW_KIND else 1e6
    mixer = replace(
        plain,
        values_normed=True,
        values_are_keys=same,
        rope=reading.whole_or_proportional(
            read_rope(keys, plain.head_dim, theta=theta, partial=1.0, layer_kind=kind), plain.head_dim
        ),
    )
    return windowed(mixer, keys) if kind == WINDOW_KIND else mixer


def _feed4(keys: ConfigKeys, reuses: bool) -> FeedForward:
    wide = reuses and keys.boolean("use_double_wide_mlp", False)
    dense = Dense(keys.integer("intermediate_size") * (2 if wide else 1), "gelu_tanh")
    if not keys.boolean("enable_moe_block", False):
        return dense
    count = keys.integer("num_experts")
    chosen = keys.integer("top_k_experts")
    if chosen > count:
        fail("top_k_experts", chosen, f"the model has {count} experts")
    return Experts(
        count=count,
        per_token=chosen,
        width=keys.integer("moe_intermediate_size"),
        normalized=True,
        activation="gelu_tanh",
        shared_width=dense.width,
        normed_apart=True,
    )


def _kinds(keys: ConfigKeys, every: int) -> list[str]:
    return reading.kinds_with_windows(
        keys,
        (FULL, WINDOW_KIND),
        [WINDOW_KIND if (i + 1) % every else FULL for i in range(keys.integer("num_hidden_layers"))],
    )


def _architecture(
    family: str, keys: ConfigKeys, mixers: Sequence[Attention], feeds: Sequence[FeedForward], **more: Any
) -> Architecture:
    return build_architecture(
        family,
        keys,
        mixers,
        feeds,
        tied=keys.outer_boolean("tie_word_embeddings", True),
        sandwich_norms=True,
        rounded_multiplier=True,
        embedding_multiplier=keys.integer("hidden_size") ** 0.5,
        logits_cap=keys.number("final_logit_softcapping", 0.0),
        **more,
    )


def read_recurrent_gemma(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        hidden_size=2560,
        intermediate_size=7680,
        num_attention_heads=10,
        num_hidden_layers=26,
        vocab_size=256_000,
        attention_window_size=2048,
        max_position_embeddings=POSITIONS,
        hidden_activation="gelu_pytorch_tanh",
        block_types=["recurrent", "recurrent", "attention"],
    )
    keys.only(hidden_activation="gelu_pytorch_tanh")
    count, hidden = keys.integer("num_hidden_layers"), keys.integer("hidden_size")
    pattern = keys.get("block_types")
    if not isinstance(pattern, list) or not pattern or set(pattern) - {"recurrent", "attention"}:
        fail("block_types", pattern, "it must be a list of recurrent and attention")
    attended = replace(read_attention(keys, partial=0.5), window=keys.integer("attention_window_size"), out_bias=True)
    if attended.rope is not None and attended.rope.kind != "default":
        fail("rope_type", attended.rope.kind, "of RecurrentGemma only default is served, as in transformers")
    width = keys.integer("lru_width", hidden)
    if width % attended.heads:
        fail("lru_width", width, f"num_attention_heads {attended.heads} must divide it")
    recurrent = RgLru(attended.heads, width // attended.heads, keys.integer("conv1d_width", 4))
    mixers = [attended if pattern[i % len(pattern)] == "attention" else recurrent for i in range(count)]
    dense = Dense(keys.integer("intermediate_size") // 2, "gelu_tanh", bias=True)
    return build_architecture(
        family,
        keys,
        mixers,
        [dense] * count,
        tied=keys.boolean("tie_word_embeddings", True),
        embedding_multiplier=_bfloat16(hidden**0.5),
        logits_cap=keys.number("logits_soft_cap", 30.0),
    )


def _bfloat16(x: float) -> float:
    """``x`` rounded to bfloat16, as this model rounds its factor whatever the dtype of the weights."""
    [bits] = struct.unpack("<I", struct.pack("<f", x))
    [rounded] = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return float(rounded)


FAMILIES = (
    Family("gemma3", ("gemma3", "gemma3_text"), read_gemma3, "gelu_pytorch_tanh"),
    Family("recurrent_gemma", ("recurrent_gemma",), read_recurrent_gemma, "gelu_pytorch_tanh"),
    Family("gemma4", ("gemma4", "gemma4_text"), read_gemma4, "gelu_pytorch_tanh"),
)
