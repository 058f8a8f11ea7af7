"""Granite 4 H: Mamba-2 + attention, a shared feed-forward with or without experts."""

from __future__ import annotations

from weft.families.architecture import Architecture, Dense, Experts, FeedForward
from weft.families.config_keys import ConfigKeys, fail
from weft.families.reading import (
    Family,
    build_architecture,
    experts_per_token,
    layer_kinds,
    read_attention,
    read_mamba2,
)


def read_granite(family: str, keys: ConfigKeys) -> Architecture:
    kinds = layer_kinds(keys, lambda count: ["recurrent"] * count)
    position = keys.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        fail("position_embedding_type", position, "null, 'nope' and 'rope' are served")
    attention = read_attention(keys, rotary=position == "rope",
                               scale=keys.number("attention_multiplier", 1.0))
    mamba = read_mamba2(keys)
    shared = keys.integer("shared_intermediate_size", 1024)
    count = keys.integer("num_local_experts", 8, least=0)
    feed: FeedForward = Dense(shared)
    if count:
        feed = Experts(count=count, per_token=experts_per_token(keys, count),
                       width=keys.integer("intermediate_size"), normalized=True, shared_width=shared)
    return build_architecture(family, keys, [attention if kind == "attention" else mamba for kind in kinds],
                         [feed] * len(kinds), tied=keys.boolean("tie_word_embeddings", False),
                         eps=keys.number("rms_norm_eps", 1e-6), max_positions=2048,
                         embedding_multiplier=keys.number("embedding_multiplier", 1.0),
                         residual_multiplier=keys.number("residual_multiplier", 1.0),
                         logits_divisor=keys.number("logits_scaling", 1.0))


FAMILIES = (
    Family("granite_hybrid", ("granitemoehybrid",), read_granite, builder="granite_hybrid"),
)
