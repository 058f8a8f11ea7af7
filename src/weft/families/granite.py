"""Mamba-2 and attention: Bamba, Falcon-H1 (both in every layer), Granite 4 H."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.mamba import BAMBA, HYBRID
from weft.families.mixers.combined import Parallel
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.mixers.mamba import GatedNorm
from weft.families.names import Names
from weft.families.reading import (
    Family,
    build_architecture,
    experts_per_token,
    layer_kinds,
    read_attention,
    read_mamba2,
)
from weft.families.residuals import Residual


def read_bamba(family: str, keys: ConfigKeys) -> Architecture:
    chosen = keys.get("attn_layer_indices") or ()
    kinds = layer_kinds(keys, lambda count: ["attention" if i in chosen else "recurrent" for i in range(count)])
    attention, mamba = read_attention(keys, partial=0.5), read_mamba2(keys)
    dense = Dense(keys.integer("intermediate_size", 14336), bias=keys.boolean("mlp_bias", False))
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else mamba for kind in kinds],
        [dense] * len(kinds),
        default_eps=1e-5,
        max_positions=262_144,
    )


def read_falcon_h1(family: str, keys: ConfigKeys) -> Architecture:
    """Read Falcon-H1. The key's multiplier joins the attention scale; that of the head is a divisor of the logits
    here."""
    count = keys.integer("num_hidden_layers")
    attention = read_attention(keys)
    attention = replace(attention, scale=attention.scale * keys.number("key_multiplier", 1.0))
    norm: GatedNorm = "none"
    if keys.boolean("mamba_rms_norm", False):
        norm = "gate_last" if keys.boolean("mamba_norm_before_gate", True) else "gate_first"
    mamba = read_mamba2(
        keys,
        inner=keys.get("mamba_d_ssm") and keys.integer("mamba_d_ssm"),
        norm=norm,
        multipliers=keys.numbers("ssm_multipliers", (1.0,) * 5),
        output_bias=keys.boolean("projectors_bias", False),
    )
    mixer = Parallel(
        attention,
        mamba,
        attention_in=keys.number("attention_in_multiplier", 1.0),
        attention_out=keys.number("attention_out_multiplier", 1.0),
        mamba_in=keys.number("ssm_in_multiplier", 1.0),
        mamba_out=keys.number("ssm_out_multiplier", 1.0),
    )
    multipliers = cast(tuple[float, float], keys.numbers("mlp_multipliers", (1.0, 1.0)))
    dense = Dense(
        keys.integer("intermediate_size", 14336), bias=keys.boolean("mlp_bias", False), multipliers=multipliers
    )
    head = keys.number("lm_head_multiplier", 1.0)
    if head == 0:
        fail("lm_head_multiplier", head, "it must not be 0")
    return build_architecture(
        family,
        keys,
        [mixer] * count,
        [dense] * count,
        default_eps=1e-5,
        max_positions=8192,
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        logits_divisor=1.0 / head,
    )


def read_granite(family: str, keys: ConfigKeys) -> Architecture:
    kinds = layer_kinds(keys, lambda count: ["recurrent"] * count)
    position = keys.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        fail("position_embedding_type", position, "null, 'nope' and 'rope' are served")
    attention = read_attention(keys, rotary=position == "rope", scale=keys.number("attention_multiplier", 1.0))
    mamba = read_mamba2(keys)
    shared = keys.integer("shared_intermediate_size", 1024)
    count = keys.integer("num_local_experts", 8, least=0)
    feed: FeedForward = Dense(shared)
    if count:
        feed = Experts(
            count=count,
            per_token=experts_per_token(keys, count),
            width=keys.integer("intermediate_size"),
            normalized=True,
            shared_width=shared,
        )
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else mamba for kind in kinds],
        [feed] * len(kinds),
        max_positions=2048,
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        residual=Residual(scale=keys.number("residual_multiplier", 1.0)),
        logits_divisor=keys.number("logits_scaling", 1.0),
    )


_GRANITE = Names(HYBRID, feed_reader="weft.models.spellings:granite_feed")
FAMILIES = (
    Family("bamba", ("bamba",), read_bamba, names=BAMBA),
    Family("falcon_h1", ("falcon_h1",), read_falcon_h1, names=BAMBA),
    Family("granite_hybrid", ("granitemoehybrid",), read_granite, names=_GRANITE),
)
