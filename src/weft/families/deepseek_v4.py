"""DeepSeek V4: attention over the last tokens and over entries, each made of a group of tokens; several streams.

    sliding_attention              the last ``sliding_window`` tokens
    compressed_sparse_attention    and the best entries of 4 tokens each, which an index chooses
    heavily_compressed_attention   and all entries of 128 tokens each

Keys are values, of one head that all queries share. Tables choose the experts of the first layers by a token's number.

Sources: DeepSeek-V4 (2026), section 2; transformers ``DeepseekV4Config`` and ``DeepseekV4ForCausalLM``, whose defaults
are used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import RING_TOKENS_MAX, Rope
from weft.families.mixers.compressed_attention import CompressedAttention, EntryIndex
from weft.families.mixers.feed_forward import Experts
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, experts_per_token
from weft.families.residuals import Streams

_SLIDING, _SPARSE, _HEAVY = LAYER_KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_KIND_OF_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_HASHED, _SCORED = "hash_moe", "moe"


def read_deepseek_v4(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=129_280,
        hidden_size=4096,
        moe_intermediate_size=2048,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        num_experts_per_tok=6,
        max_position_embeddings=1_048_576,
    )
    keys.only(
        num_key_value_heads=1,
        n_shared_experts=1,
        attention_bias=False,
        mlp_bias=False,
        norm_topk_prob=True,
        topk_method="noaux_tc",
    )
    count = keys.integer("num_hidden_layers")
    kinds, feeds = _layer_kinds(keys, count), _feed_kinds(keys, count)
    mixers = {kind: _attention(keys, kind) for kind in dict.fromkeys(kinds)}
    experts = {kind: _experts(keys, hashed=kind == _HASHED) for kind in dict.fromkeys(feeds)}
    streams = Streams(
        "mixed",
        keys.integer("hc_mult", 4),
        rounds=keys.integer("hc_sinkhorn_iters", 20),
        eps=keys.number("hc_eps", 1e-6),
        weighed=True,
    )
    return build_architecture(
        family, keys, [mixers[kind] for kind in kinds], [experts[kind] for kind in feeds], residual=streams
    )


def _layer_kinds(keys: ConfigKeys, count: int) -> list[str]:
    """Return the kind of each layer, by ``layer_types``, or by ``compress_ratios`` (a head may follow the layers)."""
    listed, ratios = keys.get("layer_types"), keys.get("compress_ratios")
    if listed is None and ratios is not None:
        if not isinstance(ratios, list) or any(ratio not in _KIND_OF_RATIO for ratio in ratios):
            fail("compress_ratios", ratios, "it must list 0, 4 or 128 for each layer")
        if len(ratios) < count:
            fail("compress_ratios", ratios, f"num_hidden_layers is {count}")
        listed = [_KIND_OF_RATIO[ratio] for ratio in ratios]
    if listed is None:
        listed = [_SPARSE if layer > 1 and layer % 2 else _HEAVY for layer in range(count)]
    return _checked(keys, "layer_types", listed, LAYER_KINDS, count)


def _feed_kinds(keys: ConfigKeys, count: int) -> list[str]:
    hashed = keys.integer("num_hash_layers", 3, least=0)
    listed = keys.get("mlp_layer_types", [_HASHED if layer < hashed else _SCORED for layer in range(count)])
    return _checked(keys, "mlp_layer_types", listed, (_HASHED, _SCORED), count)


def _checked(keys: ConfigKeys, key: str, listed: Any, known: tuple[str, ...], count: int) -> list[str]:
    """Return the first ``count`` of ``listed``, each of which must be known."""
    if not isinstance(listed, list) or len(listed) < count:
        fail(key, listed, f"it must list the kind of each layer; num_hidden_layers is {count}")
    for kind in listed[:count]:
        if kind not in known:
            fail(key, kind, f"the kinds served here are {', '.join(known)}")
    return listed[:count]


def _attention(keys: ConfigKeys, kind: str) -> CompressedAttention:
    heads, dim, groups = keys.integer("num_attention_heads"), keys.integer("head_dim"), keys.integer("o_groups", 8)
    window = keys.integer("sliding_window", 128)
    if heads % groups:
        fail("o_groups", groups, f"it must divide num_attention_heads {heads}")
    if window > RING_TOKENS_MAX:
        fail("sliding_window", window, f"it must be at most {RING_TOKENS_MAX}")
    rope, group, index = _rope(keys, dim, entries=kind != _SLIDING), 0, None
    if kind != _SLIDING:
        rates = keys.inner("compress_rates") or ConfigKeys({}, fallback={})
        name, usual = ("compress_rate_csa", 4) if kind == _SPARSE else ("compress_rate_hca", 128)
        group = keys.integer(name, rates.integer(kind, usual))
    if kind == _SPARSE:
        index = EntryIndex(
            keys.integer("index_n_heads", 64), keys.integer("index_head_dim", 128), keys.integer("index_topk", 512)
        )
        if index.key_dim < rope.rotary_dim:
            fail("index_head_dim", index.key_dim, f"its keys turn by {rope.rotary_dim} dims, as those of heads")
    return CompressedAttention(
        heads,
        dim,
        rope,
        window,
        keys.integer("q_lora_rank", 1024),
        groups,
        keys.integer("o_lora_rank", 1024),
        keys.number("rms_norm_eps", 1e-6),
        group,
        kind == _SPARSE,
        index,
    )


def _rope(keys: ConfigKeys, dim: int, *, entries: bool) -> Rope:
    """Return the positions of a layer. Layers with ``entries`` have a base of their own, and only they are scaled."""
    partial = keys.integer("qk_rope_head_dim", 64) / dim if keys.has("qk_rope_head_dim") else 64 / 512
    partial = keys.number("partial_rotary_factor", partial)
    stated = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    theta, kind = keys.number("rope_theta", 10_000.0), "compress" if entries else "main"
    theta = keys.number("compress_rope_theta", 160_000.0) if entries else theta
    if not isinstance(stated, Mapping):
        fail("rope_parameters", stated, "it must be a set of rotary settings")
    if isinstance(stated.get(kind), Mapping):
        own = dict(stated[kind])
    else:
        own = {key: value for key, value in stated.items() if key not in ("main", "compress")} if entries else {}
        own["rope_theta"] = theta
    # Cosines and sines are not stretched: DeepSeek's code has no such factor.
    own = {"attention_factor": 1.0, "partial_rotary_factor": partial} | own
    return read_rope(keys.over({"rope_scaling": None, "rope_parameters": own}), dim, theta=theta, partial=partial)


def _experts(keys: ConfigKeys, *, hashed: bool) -> Experts:
    count, width = (
        keys.integer("n_routed_experts", keys.integer("num_local_experts", 256)),
        keys.integer("moe_intermediate_size"),
    )
    scoring = keys.get("scoring_func", "sqrtsoftplus")
    if scoring not in ("sqrtsoftplus", "sigmoid"):
        fail("scoring_func", scoring, "sqrtsoftplus and sigmoid are served")
    return Experts(
        count,
        experts_per_token(keys, count),
        width,
        normalized=True,
        shared_width=width,
        scoring=scoring,
        choice_bias=not hashed,
        scale=keys.number("routed_scaling_factor", 1.5),
        normalizer_eps=1e-20,
        limit=keys.number("swiglu_limit", 10.0),
        hashed=keys.integer("vocab_size") if hashed else 0,
    )


_RELEASED = (
    (r"^head\.", "lm_head."),
    (r"^embed\.", "model.embed_tokens."),
    (r"^(layers\.|norm\.|hc_head)", r"model.\1"),
    (r"\.hc_head_(fn|base|scale)$", r".hc_head.hc_\1"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"_proj\.scale$", "_proj.weight_scale_inv"),
)
"""Names in the release's files, and in those that transformers saves."""
_NAMES = Names(
    {CompressedAttention: "self_attn"},
    mixes=("attn", "ffn"),
    shared="shared_experts",
    swiglu=False,
    spelled={Experts: {"exact_router": True}},
    layer_reader="weft.models.blocks.compressed_attention:layer_reader",
    ends_reader="weft.models.blocks.compressed_attention:ends_reader",
)
FAMILIES = (Family("deepseek_v4", ("deepseek_v4",), read_deepseek_v4, names=_NAMES, released=_RELEASED),)
