"""Decoders of latent attention over chosen tokens: Hy4, A.X K2, dots 3.

Hy4 is the attention of GLM 5 with a gate and sinks, whose index turns the last numbers of a key, and several residual
streams that are not mixed with each other. Only routed experts have a limit.

A.X K2 is DeepSeek V3.2 with gates of norms, and gates of attention that come from the bottleneck of queries.

dots 3 norms the part of a key that turns, and its layers with windows have sizes of their own.

Sources: the configuration class and the model of transformers 5.24 for each ``model_type``; their defaults are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.chosen import of_layers
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.decoders import FULL_KIND, sizes
from weft.families.deepseek import LATENT_NAMES, choosing, deepseek, query_rank
from weft.families.delta import FeedDefaults, read_kimi_feed_forwards, read_latent_attention
from weft.families.mixers.attention import Index
from weft.families.mixers.feed_forward import Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.reading import WINDOW_KIND, Family, build_architecture
from weft.families.residuals import GatedNorms, Streams
from weft.families.tensors import NormGate

_HY4 = FeedDefaults(1, 6912, 256, 768, 2.827, 1, 1)
_HY4_VL = FeedDefaults(1, 18_432, 256, 2048, 2.827, 1, 1)


def read_hy_v4(family: str, keys: ConfigKeys) -> Architecture:
    sized = sizes(120_832, 2816, 6912, 34, 32, 32, 262_144) | query_rank(keys, 1536)
    return _hy4(family, keys, _HY4, paired=False, **sized, index_n_heads=16)


def read_hy_v4_vl(family: str, keys: ConfigKeys) -> Architecture:
    """Read the text of the larger Hy4: positions turn pairs of neighbours, and the norms of bottleneck and latent have
    the epsilon of the others."""
    sized = sizes(120_832, 6144, 18_432, 78, 64, 64, 262_144) | query_rank(keys, 2048)
    model = _hy4(family, keys, _HY4_VL, paired=True, **sized, index_n_heads=32)
    eps = model.norm_eps
    return replace(model, mixers=tuple(replace(mixer, norm_eps=eps) for mixer in model.mixers))  # type: ignore[type-var]


def _hy4(family: str, keys: ConfigKeys, default: FeedDefaults, *, paired: bool, **sized: Any) -> Architecture:
    keys = keys.with_defaults(**sized, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5, rope_interleave=paired)
    keys.only(rope_interleave=paired, indexer_rope_interleave=paired)
    count, eps = keys.integer("num_hidden_layers"), keys.number("rms_norm_eps", 1e-5)
    if keys.get("indexer_types") is None:
        # Each fourth layer chooses, from the second on, and so does the first.
        keys = keys.over({"indexer_types": ["shared" if max(layer - 1, 0) % 4 else "full" for layer in range(count)]})
    model = deepseek(keys, default, partial(choosing, interleaved=paired, turned_last=True, norm_eps=eps), family)
    limit = max(keys.number("swiglu_limit", 10.0), 0.0)
    feeds = [
        replace(feed, limit=limit, limits_shared=False) if isinstance(feed, Experts) else feed
        for feed in model.feed_forwards
    ]
    streams = Streams(
        "apart", keys.integer("hc_mult", 4), eps=keys.number("hc_eps", 1e-6), weighed=True,
        magnitude=keys.number("hc_magnitude", 2.0))  # fmt: skip
    mixers = tuple(replace(mixer, gated=True, sinks=True) for mixer in model.mixers)  # type: ignore[type-var]
    return replace(model, mixers=mixers, feed_forwards=tuple(feeds), residual=streams, mtp=None)


_AXK2 = FeedDefaults(1, 5120, 128, 512, 2.5, 1, 1)


def read_axk2(family: str, keys: ConfigKeys) -> Architecture:
    """Read A.X K2: DeepSeek V3.2 whose norms before blocks have gates, but for those of dense feed-forwards."""
    keys = keys.with_defaults(
        **sizes(163_840, 2048, 5120, 48, 32, 32, 131_072), **query_rank(keys, 384), kv_lora_rank=128,
        qk_rope_head_dim=32, v_head_dim=64, qk_nope_head_dim=64, index_n_heads=16, head_dim=None)  # fmt: skip
    keys.only(rope_interleave=True, indexer_rope_interleave=False)
    model = deepseek(keys, _AXK2, partial(choosing, interleaved=False), family)
    feeds = tuple(
        replace(feed, others_zero=True) if isinstance(feed, Experts) else feed for feed in model.feed_forwards
    )
    gates = GatedNorms(
        gate=NormGate(keys.integer("gated_norm_rank", 16), 1.0),
        feeds=tuple(isinstance(feed, Experts) for feed in feeds),
    )
    mixers = tuple(replace(mixer, query_gated=True) for mixer in model.mixers)  # type: ignore[type-var]
    return replace(model, mixers=mixers, feed_forwards=feeds, residual=gates, mtp=None)


_DOTS3 = FeedDefaults(1, 13_824, 256, 1536, 1.0, 1, 1)
_CHOSEN_KIND = "indexed_attention"
_OF_WINDOWS = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256,
    "qk_nope_head_dim": 192, "v_head_dim": 128}  # fmt: skip
"""Defaults of layers with windows, which releases have under the same names after ``swa_``."""


def read_dots3_note(family: str, keys: ConfigKeys) -> Architecture:
    """Read dots 3: latent attention over chosen tokens, or over a window with sizes of its own."""
    keys = keys.with_defaults(
        **sizes(152_064, 5120, 13_824, 46, 128, 128, 524_288), **query_rank(keys, 1024), rms_norm_eps=1e-5,
        head_dim=256, sliding_window=keys.integer("sliding_window_size", 512))  # fmt: skip
    keys.only(mlp_bias=False, attention_bias=False, rope_scaling=None)
    count = keys.integer("num_hidden_layers")
    if isinstance(keys.get("moe_layer_freq"), list) and keys.get("mlp_layer_types") is None:
        first = keys.integer("first_k_dense_replace", 1, least=0)
        sparse = enumerate(of_layers(keys, "moe_layer_freq", [1] * count))
        feed_kinds = ["sparse" if layer >= first and chooses else "dense" for layer, chooses in sparse]
        keys = keys.over({"mlp_layer_types": feed_kinds})
    mixers = [
        _dots3_attention(keys.over(_dots3_sizes(keys, layer, kind)), kind)
        for layer, kind in enumerate(_dots3_kinds(keys, count))
    ]
    keys = keys.over({"num_experts": keys.integer("n_routed_experts", _DOTS3.experts)})
    shared = keys.integer("moe_shared_expert_intermediate_size", keys.integer("shared_experts_intermediate_size", 1536))
    shared *= keys.integer("n_shared_experts", 1)
    feeds = [
        replace(feed, shared_width=shared) if isinstance(feed, Experts) else feed
        for feed in read_kimi_feed_forwards(keys, count, _DOTS3)
    ]
    return build_architecture(family, keys, mixers, feeds)


def _dots3_sizes(keys: ConfigKeys, layer: int, kind: str) -> Mapping[str, Any]:
    """Return the sizes of a layer that are not those of the model: transformers saves them by layer."""
    if keys.get("per_layer_config") is not None:
        saved = keys.inner("per_layer_config")
        own = None if saved is None else saved.get(str(layer), {})
        if not isinstance(own, Mapping):
            fail("per_layer_config", keys.get("per_layer_config"), "it must have the sizes of layers, by their numbers")
        return own
    if kind != WINDOW_KIND:
        return {}
    own = {name: keys.integer(f"swa_{name}", default) for name, default in _OF_WINDOWS.items()}
    turned = own["head_dim"] - own["qk_nope_head_dim"]
    return own | {"qk_rope_head_dim": keys.get("swa_qk_rope_head_dim", turned)}


def _dots3_kinds(keys: ConfigKeys, count: int) -> list[str]:
    """Return the kind of each layer. Releases call layers that choose full."""
    choose = keys.get("use_dsa", None if keys.has("per_layer_config") else True)
    windows, full = keys.boolean("use_sliding_window", True), FULL_KIND if choose is False else _CHOSEN_KIND
    silent = [full if not windows or layer < 2 or layer % 4 == 1 else WINDOW_KIND for layer in range(count)]
    kinds = reading.kinds_with_windows(keys, (FULL_KIND, _CHOSEN_KIND, WINDOW_KIND), silent)
    if choose is None:
        return kinds
    return [kind if kind == WINDOW_KIND else full for kind in kinds]


def _dots3_attention(keys: ConfigKeys, kind: str) -> LatentAttention:
    latent, hidden, eps = read_latent_attention(keys), keys.integer("hidden_size"), keys.number("rms_norm_eps", 1e-5)
    if latent.query_rank is None:
        fail("q_lora_rank", None, "queries have a bottleneck here")
    width = keys.integer("head_dim")
    if kind == WINDOW_KIND:
        keys = keys.over({"rope_theta": keys.number("swa_rope_theta", 50_000.0)})
    rope = read_rope(keys, width, theta=8e7, partial=latent.shared_dim / width, layer_kind=kind)
    if rope.rotary_dim != latent.shared_dim:
        fail("partial_rotary_factor", rope.rotary_dim / width, f"qk_rope_head_dim {latent.shared_dim} numbers turn")
    index = None
    if kind == _CHOSEN_KIND:
        dim = keys.integer("index_head_dim", 128)
        if dim < latent.shared_dim:
            fail("index_head_dim", dim, f"its keys turn by qk_rope_head_dim {latent.shared_dim}")
        index = Index(
            keys.integer("index_n_heads", 64), dim, 1, keys.integer("index_topk", 2048), "tokens",
            interleaved=True)  # fmt: skip
    window = keys.integer("sliding_window") if kind == WINDOW_KIND else None
    factors = {f"{of}_factor": (hidden / rank) ** 0.5 for of, rank in (
        ("query", latent.query_rank), ("latent", latent.latent_dim))}  # fmt: skip
    return replace(
        latent, rope=rope, index=index, head_gated=True, norm_eps=eps, shared_normed=True, window=window, **factors
    )


_HY4_NAMES = replace(
    LATENT_NAMES,
    mixes=("attn", "ffn"),
    layer_reader="weft.models.blocks.streams:layer_reader",
    ends_reader="weft.models.blocks.streams:ends_reader",
)
_HY4_FILES = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.learnable_sink_param", ".sinks"),
    (r"\.linear_gate", ".gate_proj"),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head_(fn|base|scale)", r".hc_\1"),
    (r"^model\.mtp_layers\.", "mtp.layers."),
    (r"^vit\.", "vision_tower."),
)
_AXK2_FILES = (
    (r"(layernorm)\.norm\.", r"\1."),
    (r"layernorm\.(?:W_down|mlp\.fc1)\.", "layernorm.gate_up_projection."),
    (r"layernorm\.(?:W_up|mlp\.fc2)\.", "layernorm.gate_down_projection."),
    (r"\.q_gate_proj\.", ".q_b_proj."),
)
FAMILIES = (
    Family("axk2", ("axk2",), read_axk2, names=LATENT_NAMES, released=_AXK2_FILES),
    Family("dots3_note", ("dots3_note", "dots3_note_text"), read_dots3_note, names=LATENT_NAMES, released=(
        (r"^(?:model\.)?vision_encoder\.", "vision_tower."), (r"^(?:model\.)?audio_encoder\.", "audio_tower."))),
    Family("hy_v4", ("hy_v4",), read_hy_v4, names=_HY4_NAMES, released=_HY4_FILES),
    Family("hy_v4", ("hy_v4_vl_text",), read_hy_v4_vl, names=_HY4_NAMES, released=_HY4_FILES),
)  # fmt: skip
