"""Decoders whose attention sees chosen blocks: MiniMax M3.

Queries and keys are normed, half of a head turns, and each KV head sees the blocks whose best token scores highest.
Feed-forwards have the clamped SwiGLU of gpt-oss.

Sources: the configuration class and the model of transformers 5.24 for each ``model_type``; their defaults are here.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import FULL_KIND, sizes
from weft.families.gpt_oss import SERVED as CLAMPED
from weft.families.mixers.attention import Attention, Index
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, experts_per_token, read_attention
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
        choosing = of_layers(sparse, "sparse_attention_freq", choosing)
        # Else the index has values too.
        silent = of_layers(sparse, "sparse_disable_index_value", choosing)
        if any(chooses and not without for chooses, without in zip(choosing, silent, strict=True)):
            fail("sparse_attention_config.sparse_disable_index_value", silent, "an index without values is served")
    kinds = reading.kinds_with_windows(
        keys, (FULL_KIND, _CHOOSING), [_CHOOSING if chooses else FULL_KIND for chooses in choosing]
    )
    full = read_attention(keys, theta=5e6, qk_norm=True)
    chosen = replace(full, index=_index(keys, full)) if _CHOOSING in kinds else full
    return build_architecture(
        family, keys, [chosen if kind == _CHOOSING else full for kind in kinds], _feeds(keys, count))  # fmt: skip


def of_layers(keys: ConfigKeys, key: str, silent: list[object]) -> list[object]:
    """Return the list of 0 and 1 that ``key`` has for each layer; ``silent`` where it has none."""
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
        listed = ["sparse" if sparse else "dense" for sparse in of_layers(keys, "moe_layer_freq", [1] * count)]
    if not isinstance(listed, list) or len(listed) != count or not {*listed} <= {"dense", "sparse"}:
        fail("mlp_layer_types", listed, f"it must say dense or sparse of each of the {count} layers")
    experts = keys.integer("num_local_experts", 128)
    sparse = Experts(
        experts, experts_per_token(keys, experts), keys.integer("intermediate_size"), normalized=True,
        shared_width=keys.integer("shared_intermediate_size", 3072), scoring="sigmoid", choice_bias=True,
        scale=keys.number("routed_scaling_factor", 2.0), activation="clamped_swiglu")  # fmt: skip
    dense = Dense(keys.integer("dense_intermediate_size", 12_288), "clamped_swiglu")
    return [dense if kind == "dense" else sparse for kind in listed]


FAMILIES = (
    Family("minimax_m3", ("minimax_m3_vl_text",), read_minimax_m3, "swigluoai", Names(
        {Attention: "self_attn"}, plus_one=True, swiglu=False, shared="shared_experts",
        spelled={Experts: {"exact_router": True}}),
        released=(*MIXTRAL_FILES, (r"\.mlp\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
                  (r"\.self_attn\.index_([qk])_", r".self_attn.indexer.\1_"),
                  (r"^(multi_modal_projector|patch_merge_mlp)\.", r"vision_tower.\1."))),
)  # fmt: skip
