"""Further mixtures of experts: Hy3, A.X K1, MiMo V2 Flash, the sparse Command, Aria's text.

Each is a served family but for a part: a factor on values that are narrower than keys, a norm of the experts' sum, a
mean of routed and shared experts. Sources: the configuration class and the model of transformers 5.24 for each
``model_type``; their defaults are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.families.architecture import Architecture
from weft.families.attention import NAMES
from weft.families.centred import logit_scale
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import FULL_KIND, Decoder, sizes
from weft.families.deepseek import LATENT_NAMES, SHARED_NAMES, deepseek, query_rank, turned_latent
from weft.families.delta import FeedDefaults
from weft.families.mixed import sparse_layers
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.reading import WINDOW_KIND, Family, experts_per_token
from weft.families.residuals import Residual


def read_hy_v3(family: str, keys: ConfigKeys) -> Architecture:
    """Read Hy3: experts of DeepSeek V3 without groups, and usual attention."""
    keys.only(mlp_bias=False)
    decoder = Decoder(
        defaults=sizes(120_832, 4096, 13_312, 80, 64, 8, 131_072) | {"head_dim": 128, "rms_norm_eps": 1e-5},
        theta=11_158_840.0,
        attention={"qk_norm": True},
    )
    scale = keys.number("router_scaling_factor", 2.826)
    keys = keys.over({"routed_scaling_factor": scale, "n_group": 1, "topk_group": 1, "norm_topk_prob": True})
    default = FeedDefaults(1, 13_312, 192, 1536, scale, 1, 1)
    return deepseek(keys, default, decoder.attentions, family, **decoder.defaults)


def read_axk1(family: str, keys: ConfigKeys) -> Architecture:
    """Read A.X K1: DeepSeek V3, with a norm of what the experts give."""
    keys.only(head_dim=keys.integer("qk_rope_head_dim", 64))
    architecture = deepseek(
        keys, FeedDefaults(1, 18_432, 192, 2048, 2.5, 8, 4), turned_latent, family,
        **sizes(163_840, 7168, 18_432, 61, 64, 64, 32_768), **query_rank(keys, 1536))  # fmt: skip
    feeds = (replace(feed, out_normed=True) if isinstance(feed, Experts) else feed
             for feed in architecture.feed_forwards)  # fmt: skip
    return replace(architecture, feed_forwards=tuple(feeds))


def _cohere_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    if not sparse_layers(keys, keys.integer("first_k_dense_replace", 0, least=0))[layer]:
        width = keys.integer("prefix_dense_intermediate_size", keys.integer("intermediate_size"))
        return Dense(width)
    count, width = keys.integer("num_experts", 8), keys.integer("intermediate_size")
    scoring, joined = keys.get("expert_selection_fn", "softmax"), keys.get("shared_expert_combination_strategy")
    if scoring not in ("softmax", "sigmoid"):
        fail("expert_selection_fn", scoring, "softmax and sigmoid are served")
    if joined not in (None, "average", "sum"):
        fail("shared_expert_combination_strategy", joined, "average and sum are served")
    shared = keys.integer("num_shared_experts", 0, least=0)
    factor = 1.0 if joined == "sum" or not shared else 0.5
    return Experts(
        count,
        experts_per_token(keys, count, 2),
        width,
        normalized=scoring == "softmax" or keys.boolean("norm_topk_prob", True),
        shared_width=width * shared,
        scoring=scoring,
        scale=factor,
        shared_factor=factor,
    )


def _cohere_kinds(keys: ConfigKeys, count: int) -> list[str]:
    """Return kinds of which each of the last layers in a group has no window, counted apart in the dense layers."""
    dense = keys.integer("first_k_dense_replace", 0, least=0)
    groups = keys.integer("prefix_dense_sliding_window_pattern", 1), keys.integer("sliding_window_pattern", 4)
    return [
        WINDOW_KIND if (layer + 1 if layer < dense else layer - dense + 1) % groups[layer >= dense] else FULL_KIND
        for layer in range(count)
    ]


def read_cohere2_moe(family: str, keys: ConfigKeys) -> Architecture:
    """Read the sparse Command: full layers have no positions, but for dense ones where all of those are full."""
    rms = keys.get("rms_norm_eps") is not None
    decoder = Decoder(
        defaults=sizes(256_000, 8192, 22_528, 40, 64, 64, 8192)
        | {"head_dim": 128, "sliding_window": 4096, "tie_word_embeddings": True, "layer_norm_eps": 1e-5},
        renamed={} if rms else {"rms_norm_eps": "layer_norm_eps"},
        kinds=_cohere_kinds,
        unturned=(FULL_KIND,),
        feed=_cohere_feed,
        residual=lambda keys: Residual(centred="" if rms else "weight", parallel="one"),
        more=logit_scale,
    )
    architecture = decoder(family, keys)
    if keys.integer("prefix_dense_sliding_window_pattern", 1) != 1:
        return architecture
    turned = replace(decoder, unturned=()).attentions(decoder.keys(keys))
    layers = zip(architecture.mixers, turned, architecture.feed_forwards, strict=True)
    mixers = (mixer if isinstance(feed, Experts) else with_positions for mixer, with_positions, feed in layers)
    return replace(architecture, mixers=tuple(mixers))


def _aria_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    count, chosen, width = (
        keys.integer(key, default)
        for key, default in (("moe_num_experts", 8), ("moe_topk", 2), ("intermediate_size", 4096))
    )
    if chosen > count:
        fail("moe_topk", chosen, f"the model has {count} experts")
    shared = keys.integer("moe_num_shared_experts", 2)
    return Experts(count, chosen, width, normalized=True, shared_width=width * shared)


_MIMO_TURNED = 0.334
"""Part of a head that turns."""
_MIMO_THETAS = {FULL_KIND: 5e6, WINDOW_KIND: 10_000.0}


def _mimo_keys(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys`` of a release in the words of transformers."""
    renamed: dict[str, Any] = {}
    partial = keys.number("partial_rotary_factor", _MIMO_TURNED)
    if keys.get("rope_parameters") is None:
        thetas = keys.number("rope_theta", _MIMO_THETAS[FULL_KIND]), keys.number("swa_rope_theta", 10_000.0)
        renamed["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial}
            for kind, theta in zip(_MIMO_THETAS, thetas, strict=True)
        }
    if keys.get("sliding_window_size") is not None:
        renamed["sliding_window"] = keys.integer("sliding_window_size") + 1
    if isinstance(pattern := keys.get("hybrid_layer_pattern"), list):
        renamed["layer_types"] = [WINDOW_KIND if windowed else FULL_KIND for windowed in pattern]
    if isinstance(sparse := keys.get("moe_layer_freq"), list):
        renamed |= {
            "mlp_layer_types": ["sparse" if has_experts else "dense" for has_experts in sparse],
            "moe_layer_freq": 1,
        }
    if keys.get("layernorm_epsilon") is not None:
        renamed["rms_norm_eps"] = keys.number("layernorm_epsilon", 1e-5)
    for key, whole in (("swa_num_attention_heads", "num_attention_heads"), ("swa_head_dim", "head_dim"),
                       ("swa_v_head_dim", "v_head_dim")):  # fmt: skip
        if keys.get(key) is not None:
            keys.only(**{key: keys.get(whole)})
    keys.only(add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, topk_method="noaux_tc",
              scoring_func="sigmoid")  # fmt: skip
    return keys.over(renamed)


def _mimo_kinds(keys: ConfigKeys, count: int) -> list[str]:
    return [FULL_KIND if layer == 0 or (layer + 1) % 6 == 0 else WINDOW_KIND for layer in range(count)]


def read_mimo(family: str, keys: ConfigKeys) -> Architecture:
    """Read MiMo V2 Flash: layers with a window have twice the KV heads and sinks; values are narrower than keys."""
    decoder = Decoder(
        defaults=sizes(152_576, 4096, 16_384, 48, 64, 4, 131_072)
        | {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "rms_norm_eps": 1e-5},
        keys_of=_mimo_keys,
        kinds=_mimo_kinds,
        ropes={kind: (theta, _MIMO_TURNED) for kind, theta in _MIMO_THETAS.items()},
        attention={"out_bias": False},
        attention_of=_mimo_values,
    )
    keys = decoder.keys(keys)
    keys = keys.over({"n_shared_experts": 1, "num_nextn_predict_layers": 0})  # no shared one: removed below
    default = FeedDefaults(1, 16_384, 256, 2048, 1.0, 1, 1)
    architecture = deepseek(keys, default, lambda keys: decoder.attentions(keys), family)
    feeds = (replace(feed, shared_width=0) if isinstance(feed, Experts) else feed
             for feed in architecture.feed_forwards)  # fmt: skip
    mixers = []
    for mixer in architecture.mixers:
        assert isinstance(mixer, Attention)
        mixers.append(mixer if mixer.window is None else replace(mixer, kv_heads=2 * mixer.kv_heads, sinks=True))
    return replace(architecture, mixers=tuple(mixers), feed_forwards=tuple(feeds))


def _mimo_values(keys: ConfigKeys) -> Mapping[str, Any]:
    width, head_dim = keys.integer("v_head_dim"), keys.integer("head_dim")
    if width > head_dim:
        fail("v_head_dim", width, f"it must be at most head_dim {head_dim}")
    stated = keys.get("attention_value_scale") is not None or not keys.has("attention_value_scale")
    return {"value_dim": width, "value_factor": keys.number("attention_value_scale", 0.707) if stated else 1.0}


_ARIA = Decoder(defaults=sizes(32_000, 4096, 4096, 32, 32, 32, 2048), feed=_aria_feed, only={"mlp_bias": False})
FAMILIES = (
    Family("hy_v3", ("hy_v3",), read_hy_v3, names=replace(
        SHARED_NAMES, spelled={Experts: {"exact_router": True, "choice_bias": "e_score_correction_bias"}}), released=(
        (r"mlp\.router\.gate\.weight", "mlp.gate.weight"), (r"mlp\.expert_bias", "mlp.e_score_correction_bias"),
        (r"mlp\.shared_mlp\.", "mlp.shared_experts."))),
    Family("axk1", ("axk1",), read_axk1, names=replace(
        LATENT_NAMES, feed_reader="weft.models.spellings:axk1_feed"), released=(
        (r"mlp\.post_mlp_layernorm", "post_mlp_layernorm"),)),
    Family("mimo_v2_flash", ("mimo_v2_flash",), read_mimo, names=SHARED_NAMES, released=(
        (r"self_attn\.attention_sink_bias", "self_attn.sinks"),)),
    Family("cohere2_moe", ("cohere2_moe",), read_cohere2_moe, names=replace(
        NAMES, shared="shared_experts", swiglu=False, spelled={Attention: {"paired": True}})),
    Family("aria", ("aria_text",), _ARIA, names=replace(
        NAMES, shared="shared_experts", spelled={Experts: {"router": "router.weight", "transposed": True}}), released=(
        (r"mlp\.experts\.fc1\.weight", "mlp.experts.gate_up_proj"),
        (r"mlp\.experts\.fc2\.weight", "mlp.experts.down_proj"))),
)  # fmt: skip
