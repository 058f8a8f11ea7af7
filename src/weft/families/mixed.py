"""Mixtures of experts whose attention layers differ: Llama 4, AFMoE, Laguna, Mellum, Kolibri, FlexOlmo.

Layers see a window, their own chunk of the text, or all of it, and some have no positions. Sources: the configuration
class and the model of transformers 5.24 for each ``model_type``; their defaults are in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.attention import NAMES, OUT_NAMES, OUT_NORMED
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import FULL_KIND, Decoder, every, sizes
from weft.families.mixers.attention import Attention, Growth
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.reading import WINDOW_KIND, Family, build_architecture, experts_per_token
from weft.families.residuals import Residual
from weft.families.routed import olmoe_feed
from weft.units import PAGE_TOKENS

CHUNK_KIND = "chunked_attention"
_TUNED = 4
"""Value of ``attn_temperature_tuning`` in the first files of Llama 4, for true."""


def _all_full(keys: ConfigKeys, count: int) -> list[str]:
    return [FULL_KIND] * count


def sparse_layers(keys: ConfigKeys, dense_first: int) -> list[bool]:
    """Return which layers have experts, by ``mlp_layer_types``: all but the first ``dense_first`` if it is missing."""
    count = keys.integer("num_hidden_layers")
    listed = keys.get("mlp_layer_types", ["dense"] * dense_first + ["sparse"] * (count - dense_first))
    if not isinstance(listed, list) or len(listed) != count or any(kind not in ("dense", "sparse") for kind in listed):
        fail("mlp_layer_types", listed, f"it must say dense or sparse for each of the {count} layers")
    return [kind == "sparse" for kind in listed]


def _mellum_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    if not sparse_layers(keys, 0)[layer]:
        return Dense(keys.integer("intermediate_size"))
    count = keys.integer("num_experts", keys.integer("num_local_experts", 64))
    normalized = keys.boolean("norm_topk_prob", True)
    return Experts(count, experts_per_token(keys, count, 8), keys.integer("moe_intermediate_size", 896), normalized)


def _laguna_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    if not sparse_layers(keys, 1)[layer]:
        return Dense(keys.integer("intermediate_size"))
    count, width = keys.integer("num_experts", 256), keys.integer("moe_intermediate_size", 512)
    return Experts(
        count,
        experts_per_token(keys, count, 8),
        width,
        normalized=True,
        shared_width=keys.integer("shared_expert_intermediate_size", 512),
        scoring="sigmoid",
        choice_bias=True,
        scale=keys.number("moe_routed_scaling_factor", 1.0),
    )


def _laguna_gate(keys: ConfigKeys) -> Mapping[str, Any]:
    gating = keys.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        fail("gating", gating, "true, per-head and per-element are served")
    by_head = gating is True or gating == "per-head"
    return {"softplus_gate": True, "head_gated": by_head, "gated": not by_head}


def read_laguna(family: str, keys: ConfigKeys) -> Architecture:
    """Read Laguna: layers may differ in their number of heads, and gates are a softplus."""
    architecture = _LAGUNA(family, keys)
    keys = _LAGUNA.keys(keys)
    count, heads = keys.integer("num_hidden_layers"), keys.get("num_attention_heads_per_layer")
    if heads is None:
        return architecture
    if not isinstance(heads, list) or len(heads) != count:
        fail("num_attention_heads_per_layer", heads, f"it must be a number of heads for each of the {count} layers")
    mixers = []
    for mixer, stated in zip(architecture.mixers, heads, strict=True):
        own = keys.over({"num_attention_heads_per_layer": stated}).integer("num_attention_heads_per_layer")
        assert isinstance(mixer, Attention)
        if own % mixer.kv_heads:
            fail("num_attention_heads_per_layer", own, f"num_key_value_heads {mixer.kv_heads} must divide it")
        mixers.append(replace(mixer, heads=own))
    return replace(architecture, mixers=tuple(mixers))


def _afmoe_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    if layer < keys.integer("num_dense_layers", 1, least=0):
        return Dense(keys.integer("intermediate_size"))
    count, width = keys.integer("num_experts", 64), keys.integer("moe_intermediate_size", 1408)
    return Experts(
        count,
        experts_per_token(keys, count, 6),
        width,
        normalized=True,
        shared_width=width * keys.integer("num_shared_experts", 2, least=0),
        scoring="sigmoid",
        choice_bias=True,
        scale=keys.number("route_scale", 1.0),
        normalizer_eps=1e-20,
    )


def _afmoe_embedding(keys: ConfigKeys) -> Mapping[str, Any]:
    scaled = keys.boolean("mup_enabled", False)
    return {"embedding_multiplier": keys.integer("hidden_size") ** 0.5 if scaled else 1.0}


def _kolibri_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    count = keys.integer("num_experts", keys.integer("num_local_experts", 384))
    return Experts(
        count,
        experts_per_token(keys, count, 6),
        keys.integer("moe_intermediate_size", 512),
        normalized=keys.boolean("norm_topk_prob", False),
        shared_width=keys.integer("shared_expert_intermediate_size", 512),
        scoring="late_sigmoid",
        choice_bias=True,
    )


def _llama4_sparse(keys: ConfigKeys, count: int) -> list[bool]:
    """Return which layers have experts."""
    step, listed = keys.integer("interleave_moe_layer_step", 1), keys.get("moe_layers")
    if listed is None:
        return [(layer + 1) % step == 0 for layer in range(count)]
    if not isinstance(listed, list) or not set(listed) <= set(range(count)):
        fail("moe_layers", listed, f"it must list layers from 0 to {count - 1}")
    return [layer in listed for layer in range(count)]


def _llama4_turns(keys: ConfigKeys, count: int) -> list[bool]:
    """Return which layers have positions."""
    every_nth = keys.integer("no_rope_layer_interval", 4)
    listed = keys.get("no_rope_layers") or [int((layer + 1) % every_nth != 0) for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(turn not in (0, 1) for turn in listed):
        fail("no_rope_layers", listed, f"it must be 0 or 1 for each of the {count} layers")
    return [bool(turn) for turn in listed[:count]]


def read_llama4(family: str, keys: ConfigKeys) -> Architecture:
    """Read Llama 4: tokens of layers with positions see their own chunk; in layers without, queries grow with the
    position."""
    keys = keys.with_defaults(
        **sizes(202_048, 5120, 8192, 48, 40, 8, 131_072), head_dim=128, rms_norm_eps=1e-5, intermediate_size_mlp=16_384
    )
    count = keys.integer("num_hidden_layers")
    plain = reading.read_attention(keys, theta=500_000.0)
    if keys.boolean("use_qk_norm", True):
        turned = replace(plain, qk_norm=True, norm_after=True, norm_plain=True)
    else:
        turned = plain
    still = replace(plain, rope=None)
    if keys.get("attn_temperature_tuning") == _TUNED or keys.boolean("attn_temperature_tuning", True):
        growth = Growth(keys.number("attn_scale", 0.1), keys.integer("floor_scale", 8192), first=1)
        still = replace(still, growth=growth)
    chunk = keys.integer("attention_chunk_size", 8192) if reading.states_window(keys, "attention_chunk_size") else None
    turns = _llama4_turns(keys, count)
    silent = [CHUNK_KIND if turn and chunk is not None else FULL_KIND for turn in turns]
    kinds = reading.kinds_with_windows(keys, (FULL_KIND, CHUNK_KIND), silent)
    if chunk is not None and chunk % PAGE_TOKENS:
        fail("attention_chunk_size", chunk, f"it must be a multiple of {PAGE_TOKENS}")
    if chunk is None and CHUNK_KIND in kinds:
        fail("attention_chunk_size", None, f"layer_types has layers that are {CHUNK_KIND}")
    mixers = [
        replace(turned if turn else still, chunk=chunk if kind == CHUNK_KIND else None)
        for turn, kind in zip(turns, kinds, strict=True)
    ]
    experts, width = keys.integer("num_local_experts", 16), keys.integer("intermediate_size")
    sparse = Experts(
        experts,
        experts_per_token(keys, experts, 1),
        width,
        normalized=False,
        shared_width=width,
        scoring="sigmoid",
        weighs_input=True,
    )
    dense = Dense(keys.integer("intermediate_size_mlp"))
    feeds = [sparse if has_experts else dense for has_experts in _llama4_sparse(keys, count)]
    return build_architecture(family, keys, mixers, feeds)


_MELLUM = Decoder(
    defaults=sizes(98_304, 2304, 7168, 28, 32, 4, 131_072) | {"head_dim": 128, "sliding_window": 1024},
    ropes={FULL_KIND: (500_000.0, 1.0), WINDOW_KIND: (10_000.0, 1.0)},
    attention={"qk_norm": True},
    kinds=_all_full,
    feed=_mellum_feed,
)
_LAGUNA = Decoder(
    defaults=sizes(100_352, 2048, 8192, 40, 48, 8, 131_072) | {"head_dim": 128, "sliding_window": 512},
    ropes={FULL_KIND: (500_000.0, 0.5), WINDOW_KIND: (10_000.0, 1.0)},
    attention={"qk_norm": True},
    attention_of=_laguna_gate,
    kinds=_all_full,
    feed=_laguna_feed,
    only={"attention_bias": False, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
)
_AFMOE = Decoder(
    defaults=sizes(200_192, 2048, 6144, 32, 16, 16, 16_384)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024},
    attention={"qk_norm": True, "gated": True},
    kinds=lambda keys, count: every(keys.integer("global_attn_every_n_layers", 4))(keys, count),
    unturned=(FULL_KIND,),
    feed=_afmoe_feed,
    residual=lambda keys: Residual(out_norms=True),
    more=_afmoe_embedding,
    only={"attention_bias": False},
)
_KOLIBRI = Decoder(
    defaults=sizes(128_000, 2560, 1, 50, 48, 4, 262_144) | {"head_dim": 128, "sliding_window": 513},
    attention={"qk_norm": True, "bias": False},
    kinds=every(5),
    unturned=(FULL_KIND,),
    feed=_kolibri_feed,
    residual=lambda keys: Residual(out_norms=True),
)
_FLEX_OLMO = Decoder(
    defaults=sizes(100_352, 4096, 11_008, 32, 32, 32, 4096) | {"num_experts": 7, "num_experts_per_tok": 5},
    theta=500_000.0,
    attention={"qk_norm": True, "norm_whole": True},
    feed=olmoe_feed,
    residual=lambda keys: OUT_NORMED,
)
_SHARED = replace(NAMES, shared="shared_experts")
FAMILIES = (
    Family("llama4", ("llama4_text",), read_llama4, names=replace(
        NAMES, feed="feed_forward", shared="shared_expert", spelled={
            Attention: {"paired": True}, Experts: {"router": "router.weight", "transposed": True}})),
    Family("laguna", ("laguna",), read_laguna, names=replace(
        _SHARED, spelled={Attention: {"gate": "g_proj"}}), released=(
        (r"mlp\.experts\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        (r"mlp\.shared_expert\.", "mlp.shared_experts."))),
    Family("afmoe", ("afmoe",), _AFMOE, names=replace(
        _SHARED, feed_norm="pre_mlp_layernorm", out_norms=("post_attention_layernorm", "post_mlp_layernorm"), spelled={
            Attention: {"gate": "gate_proj"},
            Experts: {"router": "router.gate.weight", "choice_bias": "expert_bias"}})),
    Family("mellum", ("mellum",), _MELLUM, names=NAMES),
    Family("kolibri", ("kolibri1",), _KOLIBRI, names=replace(
        _SHARED, out_norms=("post_self_attn_layernorm", "post_mlp_layernorm"), spelled={
            Experts: {"exact_router": True}}), released=(
        (r"moe\.router\.expert_bias", "mlp.gate.e_score_correction_bias"),
        (r"post_attn_norm", "post_self_attn_layernorm"), (r"post_ffn_norm", "post_mlp_layernorm"))),
    Family("flex_olmo", ("flex_olmo",), _FLEX_OLMO, names=OUT_NAMES),
)  # fmt: skip
