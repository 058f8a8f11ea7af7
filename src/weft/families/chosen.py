"""Decoders whose attention sees chosen blocks or tokens: MiniMax M3, Hy4.

MiniMax M3 is attention with norms of queries and keys, half of a head turns, and each KV head sees the blocks whose
best token scores highest. Feed-forwards have the clamped SwiGLU of gpt-oss.

Hy4 has the latent attention of GLM 5 with a gate and sinks, whose index turns the last numbers of a key by halves, and
several residual streams that are not mixed with each other. Only routed experts have a limit.

Sources: the configuration class and the model of transformers 5.24 for each ``model_type``; their defaults are here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import FULL_KIND, sizes
from weft.families.deepseek import LATENT_NAMES, choosing, deepseek, query_rank
from weft.families.delta import FeedDefaults
from weft.families.gpt_oss import SERVED as CLAMPED
from weft.families.mixers.attention import Attention, Index
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, experts_per_token, read_attention
from weft.families.residuals import Streams
from weft.families.routed import MIXTRAL_FILES, rotary_dim

_CHOOSING = "minimax_m3_sparse"
_OF_INDEX = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Names of the keys in releases, which have them in ``sparse_attention_config``."""


def read_minimax_m3(family: str, keys: ConfigKeys) -> Architecture:
    keys = rotary_dim(
        keys.with_defaults(
            **sizes(200_064, 6144, 3072, 60, 64, 4, 524_288), head_dim=128, num_experts_per_tok=4, rotary_dim=64
        )
    )
    keys.only(
        **CLAMPED, attention_bias=False, use_gemma_norm=True, use_qk_norm=True, qk_norm_type="per_head",
        scoring_func="sigmoid", use_routing_bias=True, n_shared_experts=1)  # fmt: skip
    count, sparse = keys.integer("num_hidden_layers"), keys.inner("sparse_attention_config")
    choosing: list[object] = [0] * count
    if sparse is not None:
        sparse.only("sparse_attention_config.", use_sparse_attention=True, sparse_score_type="max", sparse_init_block=0)
        keys = keys.over({here: sparse.get(theirs) for here, theirs in _OF_INDEX.items() if sparse.has(theirs)})
        choosing = _of_layers(sparse, "sparse_attention_freq", choosing)
        # Else the index has values too.
        silent = _of_layers(sparse, "sparse_disable_index_value", choosing)
        if any(chooses and not without for chooses, without in zip(choosing, silent, strict=True)):
            fail("sparse_attention_config.sparse_disable_index_value", silent, "an index without values is served")
    kinds = reading.kinds_with_windows(
        keys, (FULL_KIND, _CHOOSING), [_CHOOSING if chooses else FULL_KIND for chooses in choosing]
    )
    full = read_attention(keys, theta=5e6, qk_norm=True)
    chosen = replace(full, index=_index(keys, full)) if _CHOOSING in kinds else full
    return build_architecture(
        family, keys, [chosen if kind == _CHOOSING else full for kind in kinds], _feeds(keys, count))  # fmt: skip


def _of_layers(keys: ConfigKeys, key: str, silent: list[object]) -> list[object]:
    stated = keys.get(key, silent)
    if not isinstance(stated, list) or len(stated) != len(silent) or not {*map(type, stated)} <= {int, bool}:
        fail(key, stated, f"it must list 0 or 1 for each of the {len(silent)} layers")
    return stated


def _index(keys: ConfigKeys, attention: Attention) -> Index:
    queries, dim = keys.integer("index_n_heads", 4), keys.integer("index_head_dim", 128)
    chosen, near = keys.integer("index_topk_blocks", 16), keys.integer("index_local_blocks", 1)
    if queries != attention.kv_heads:
        fail("index_n_heads", queries, f"each of num_key_value_heads {attention.kv_heads} chooses by one")
    assert attention.rope is not None
    if dim < attention.rope.rotary_dim:
        fail("index_head_dim", dim, f"its keys turn by {attention.rope.rotary_dim} numbers, as those of heads")
    if near > chosen:
        fail("index_local_blocks", near, f"index_topk_blocks is {chosen}")
    return Index(queries, dim, keys.integer("index_block_size", 128), chosen, "maxima", near=near)


def _feeds(keys: ConfigKeys, count: int) -> list[Dense | Experts]:
    listed = keys.get("mlp_layer_types")
    if listed is None:
        listed = ["sparse" if sparse else "dense" for sparse in _of_layers(keys, "moe_layer_freq", [1] * count)]
    if not isinstance(listed, list) or len(listed) != count or not {*listed} <= {"dense", "sparse"}:
        fail("mlp_layer_types", listed, f"it must say dense or sparse of each of the {count} layers")
    experts = keys.integer("num_local_experts", 128)
    sparse = Experts(
        experts, experts_per_token(keys, experts), keys.integer("intermediate_size"), normalized=True,
        shared_width=keys.integer("shared_intermediate_size", 3072), scoring="sigmoid", choice_bias=True,
        scale=keys.number("routed_scaling_factor", 2.0), activation="clamped_swiglu")  # fmt: skip
    dense = Dense(keys.integer("dense_intermediate_size", 12_288), "clamped_swiglu")
    return [dense if kind == "dense" else sparse for kind in listed]


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
FAMILIES = (
    Family("hy_v4", ("hy_v4",), read_hy_v4, names=_HY4_NAMES, released=_HY4_FILES),
    Family("hy_v4", ("hy_v4_vl_text",), read_hy_v4_vl, names=_HY4_NAMES, released=_HY4_FILES),
    Family("minimax_m3", ("minimax_m3_vl_text",), read_minimax_m3, "swigluoai", Names(
        {Attention: "self_attn"}, plus_one=True, swiglu=False, shared="shared_experts",
        spelled={Experts: {"exact_router": True}}),
        released=(*MIXTRAL_FILES, (r"\.mlp\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
                  (r"\.self_attn\.index_([qk])_", r".self_attn.indexer.\1_"),
                  (r"^(multi_modal_projector|patch_merge_mlp)\.", r"vision_tower.\1."))),
)  # fmt: skip
