"""Models of DeepSeek V3's shape: experts that a bias and groups choose, after some dense layers.

Attention is latent (DeepSeek V2 and V3, GLM 4.7 Flash, Youtu, MiniCPM 3) or usual (GLM 4.5, dots.llm1). That of
DeepSeek V3.2 and GLM 5 sees tokens that an index chooses. Sources: the
configuration class and the model of transformers 5.24 for each ``model_type``; their defaults are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.attention import NAMES
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.decoders import FULL_KIND, Decoder, sizes
from weft.families.delta import FeedDefaults, mtp_behind, read_kimi_feed_forwards, read_latent_attention, scale_of_rope
from weft.families.dense import exaone_attention
from weft.families.mixers.attention import Attention, Index
from weft.families.mixers.feed_forward import Dense, Experts
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.reading import WINDOW_KIND, Family, build_architecture, experts_per_token
from weft.families.residuals import Residual


def deepseek(
    keys: ConfigKeys, default: FeedDefaults, attention: Callable[[ConfigKeys], Any], family: str, **sized: Any
) -> Architecture:
    """Return a model whose experts are DeepSeek V3's, with ``attention`` in every layer."""
    keys = keys.with_defaults(**sized)
    keys = keys.over({"num_experts": keys.integer("n_routed_experts", keys.integer("num_experts", default.experts))})
    mixer, count = attention(keys), keys.integer("num_hidden_layers")
    feeds = read_kimi_feed_forwards(keys, count, default)
    mixers = mixer if isinstance(mixer, list) else [mixer] * count
    return build_architecture(family, keys, mixers, feeds, mtp=mtp_behind(keys, mixers[-1], feeds[-1]))


def turned_latent(keys: ConfigKeys, theta: float = 10_000.0) -> LatentAttention:
    latent = read_latent_attention(keys)
    rope = read_rope(keys, latent.shared_dim, theta=theta, partial=1.0)
    interleaved = keys.boolean("rope_interleave", True)
    return replace(latent, rope=rope, scale=latent.scale * scale_of_rope(keys), interleaved=interleaved)


def read_deepseek_v3(family: str, keys: ConfigKeys) -> Architecture:
    keys.only(scoring_func="sigmoid", topk_method="noaux_tc")
    return deepseek(keys, FeedDefaults(3, 18_432, 256, 2048, 2.5, 8, 4), turned_latent, family,
                    **sizes(129_280, 7168, 18_432, 61, 128, 128, 4096), **query_rank(keys, 1536))  # fmt: skip


def read_deepseek_v32(family: str, keys: ConfigKeys) -> Architecture:
    keys.only(scoring_func="sigmoid", topk_method="noaux_tc")
    return deepseek(
        keys, FeedDefaults(3, 18_432, 256, 2048, 2.5, 8, 4), partial(choosing, interleaved=False), family,
        **sizes(129_280, 7168, 18_432, 61, 128, 128, 163_840), **query_rank(keys, 1536), index_n_heads=64)  # fmt: skip


def read_glm_moe_dsa(family: str, keys: ConfigKeys) -> Architecture:
    """Read GLM 5: DeepSeek V3.2, in which layers may see what the layer before chose."""
    keys.only(scoring_func="sigmoid", topk_method="noaux_tc")
    architecture = deepseek(
        keys, FeedDefaults(3, 12_288, 256, 2048, 2.5, 1, 1), partial(choosing, interleaved=True), family,
        **sizes(154_880, 6144, 12_288, 78, 64, 64, 202_752), **query_rank(keys, 2048), index_n_heads=32,
        qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5)  # fmt: skip
    own, feed = architecture.mixers[0], architecture.feed_forwards[-1]
    assert isinstance(own, LatentAttention)
    assert feed is not None
    return replace(architecture, mtp=mtp_behind(keys, own, feed))


def choosing(keys: ConfigKeys, *, interleaved: bool, **more: Any) -> list[LatentAttention]:
    """Return latent attention over tokens that an index chooses. ``interleaved``: default for the index; ``more``: its
    further fields."""
    keys.only(mlp_bias=False)
    count = keys.integer("num_hidden_layers")
    reading.kinds_with_windows(keys, ("indexed_attention",), ["indexed_attention"] * count)
    latent, dim = turned_latent(keys), keys.integer("index_head_dim", 128)
    if latent.query_rank is None:
        fail("q_lora_rank", None, "queries of the index come from the bottleneck of queries")
    if dim < latent.shared_dim:
        fail("index_head_dim", dim, f"its keys turn by qk_rope_head_dim {latent.shared_dim}")
    index = Index(
        keys.integer("index_n_heads"), dim, 1, keys.integer("index_topk", 2048), "tokens",
        interleaved=keys.boolean("indexer_rope_interleave", interleaved), **more)  # fmt: skip
    own, reused = replace(latent, index=index), replace(latent, reuses_choice=True)
    return [own if kind == _OWN else reused for kind in _index_kinds(keys, count)]


_OWN = "full"


def _index_kinds(keys: ConfigKeys, count: int) -> list[str]:
    """Return "full" or "shared" for each layer: by ``indexer_types``, by a pattern of their initials, or from
    ``index_skip_topk_offset`` - 1 on full in each ``index_topk_freq``-th layer."""
    pattern, stated = keys.get("index_topk_pattern"), keys.get("indexer_types")
    every, offset = keys.integer("index_topk_freq", 1, least=0), keys.integer("index_skip_topk_offset", 2, least=0)
    if stated is None and pattern is not None:
        stated = [{"F": _OWN, "S": "shared"}.get(kind, kind) for kind in pattern]
    if stated is None:
        stated = [_OWN if max(layer - offset + 1, 0) % max(every, 1) == 0 else "shared" for layer in range(count)]
    if not isinstance(stated, list) or len(stated) != count or not {*stated} <= {_OWN, "shared"} or stated[0] != _OWN:
        fail("indexer_types", stated, f"it must say full or shared of each of the {count} layers, full of the first")
    return stated


def read_youtu(family: str, keys: ConfigKeys) -> Architecture:
    """Read a model of latent attention without experts."""
    keys = keys.with_defaults(**sizes(128_256, 2048, 6144, 32, 16, 16, 131_072), **query_rank(keys, 1536))
    keys.only(head_dim=keys.integer("qk_rope_head_dim", 64))
    layers, dense = keys.integer("num_hidden_layers"), Dense(keys.integer("intermediate_size"))
    tied = keys.boolean("tie_word_embeddings", True)
    return build_architecture(family, keys, [turned_latent(keys)] * layers, [dense] * layers, tied=tied)


def read_glm4_moe_lite(family: str, keys: ConfigKeys) -> Architecture:
    return deepseek(keys, FeedDefaults(1, 10_240, 64, 1536, 1.8, 1, 1), turned_latent, family,
                    **sizes(154_880, 2048, 10_240, 47, 20, 20, 202_752), **query_rank(keys, 768), num_experts_per_tok=4,
                    qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5)  # fmt: skip


def query_rank(keys: ConfigKeys, default: int) -> dict[str, int]:
    """Return the default of ``q_lora_rank`` if it is missing; null means none."""
    return {} if keys.has("q_lora_rank") else {"q_lora_rank": default}


def read_glm4_moe(family: str, keys: ConfigKeys) -> Architecture:
    """Read GLM 4.5, and the text of GLM 4.5V and 4.6V, which has no norms of queries and keys."""
    decoder = Decoder(
        defaults=sizes(151_552, 4096, 10_944, 46, 96, 8, 131_072) | {"rms_norm_eps": 1e-5},
        partial=0.5,
        attention={"out_bias": False},
        attention_of=lambda keys: {"qk_norm": keys.boolean("use_qk_norm", False)},
    )
    default = FeedDefaults(1, 10_944, 128, 1408, 1.0, 1, 1)
    return deepseek(keys, default, decoder.attentions, family, **decoder.defaults)


def read_sarvam_moe(family: str, keys: ConfigKeys) -> Architecture:
    """Read the smaller Sarvam: GLM 4.5 with rotary positions over the complete head."""
    if keys.get("use_qkv_bias") is not None:
        keys = keys.over({"attention_bias": keys.boolean("use_qkv_bias", False)})
    decoder = Decoder(
        defaults=sizes(262_144, 4096, 8192, 19, 64, 4, 131_072)
        | {"head_dim": 64, "num_experts_per_tok": 6, "num_mtp_layers": 0},
        theta=8e6,
        attention={"out_bias": False},
        attention_of=lambda keys: {"qk_norm": keys.boolean("use_qk_norm", True)},
    )
    return deepseek(keys, FeedDefaults(1, 8192, 128, 1024, 2.5, 1, 1), decoder.attentions, family, **decoder.defaults)


def read_sarvam_mla(family: str, keys: ConfigKeys) -> Architecture:
    """Read the larger Sarvam: DeepSeek V3 without groups and without a bottleneck of queries."""
    keys.only(scoring_func="sigmoid", topk_method="noaux_tc")
    return deepseek(keys, FeedDefaults(1, 16_384, 128, 2048, 2.5, 1, 1), turned_latent, family,
                    **sizes(262_144, 4096, 16_384, 32, 64, 64, 4096))  # fmt: skip


def read_minicpm3(family: str, keys: ConfigKeys) -> Architecture:
    """Read MiniCPM 3: multipliers of MiniCPM, and rotary positions by halves of a head."""
    keys = keys.with_defaults(
        **sizes(73_448, 2560, 6400, 62, 40, 40, 32_768), **query_rank(keys, 768), kv_lora_rank=256, qk_nope_head_dim=64,
        qk_rope_head_dim=32, rms_norm_eps=1e-5, rope_interleave=False)  # fmt: skip
    keys.only(mlp_bias=False)
    hidden, layers = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    keys = keys.with_defaults(v_head_dim=hidden // keys.integer("num_attention_heads"))
    depth = keys.number("scale_depth", math.sqrt(layers) if keys.has("scale_depth") else 1.4)
    base = keys.integer("dim_model_base", hidden if keys.has("dim_model_base") else 256)
    return build_architecture(
        family,
        keys,
        [turned_latent(keys)] * layers,
        [Dense(keys.integer("intermediate_size"))] * layers,
        tied=keys.boolean("tie_word_embeddings", True),
        residual=Residual(scale=depth / math.sqrt(layers)),
        embedding_multiplier=keys.number("scale_emb", 12.0),
        rounded_multiplier=True,
        logits_divisor=hidden / base,
    )


def read_solar_open(family: str, keys: ConfigKeys) -> Architecture:
    decoder = Decoder(
        defaults={
            **sizes(196_608, 4096, 10_240, 48, 64, 8, 131_072),
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 0,
        },
        theta=1e6,
        attention={"out_bias": False},
    )
    return deepseek(keys, FeedDefaults(0, 10_240, 128, 1280, 1.0, 1, 1), decoder.attentions, family, **decoder.defaults)


def read_exaone_moe(family: str, keys: ConfigKeys) -> Architecture:
    """Read a model with the attention of EXAONE 4, and norms before blocks."""
    decoder = exaone_attention(keys)
    return deepseek(decoder.keys(keys), FeedDefaults(1, 16_384, 64, 1024, 2.5, 1, 1), decoder.attentions, family)


def read_dots1(family: str, keys: ConfigKeys) -> Architecture:
    """Read dots.llm1: windows are in the layers from ``max_window_layers`` on, if ``layer_types`` is missing."""

    def kinds(keys: ConfigKeys, count: int) -> list[str]:
        first = keys.integer("max_window_layers", 62, least=0)
        windows = keys.get("sliding_window") is not None
        return [WINDOW_KIND if windows and layer >= first else FULL_KIND for layer in range(count)]

    decoder = Decoder(
        defaults=sizes(152_064, 4608, 10_944, 62, 32, 32, 2048)
        | {"norm_topk_prob": False}
        | ({} if keys.has("sliding_window") else {"sliding_window": 4096}),
        attention={"qk_norm": True},
        kinds=kinds,
    )
    default = FeedDefaults(0, 10_944, 128, 1408, 1.0, 1, 1)
    return deepseek(keys, default, decoder.attentions, family, **decoder.defaults)


def read_deepseek_v2(family: str, keys: ConfigKeys) -> Architecture:
    """Read DeepSeek V2: a group counts by its best score, and weights are shares of the sum over all experts."""
    keys = keys.with_defaults(**V2_SIZES, **query_rank(keys, 1536))
    layers = keys.integer("num_hidden_layers")
    first = keys.integer("first_k_dense_replace", 0, least=0)
    dense, sparse = Dense(keys.integer("intermediate_size")), experts_of_v2(keys)
    feeds = [dense if layer < first else sparse for layer in range(layers)]
    return build_architecture(family, keys, [turned_latent(keys)] * layers, feeds)


V2_SIZES = sizes(102_400, 4096, 11_008, 32, 32, 32, 2048)


def experts_of_v2(keys: ConfigKeys) -> Experts:
    """Return the experts of DeepSeek V2."""
    keys.only(scoring_func="softmax", mlp_bias=False, norm_topk_prob=False, moe_layer_freq=1)
    method = keys.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fail("topk_method", method, "greedy and group_limited_greedy are served")
    count = keys.integer("n_routed_experts", 64)
    groups = chosen = 1
    if method != "greedy":
        groups, chosen = reading.expert_groups(keys, count, "n_group", keys.integer("n_group", 1), best=1)
    width = keys.integer("moe_intermediate_size", 1407)
    return Experts(
        count,
        experts_per_token(keys, count),
        width,
        normalized=False,
        shared_width=width * keys.integer("n_shared_experts", 2),
        scale=keys.number("routed_scaling_factor", 1.0),
        groups=groups,
        groups_chosen=chosen,
        group_best=1,
    )


_SARVAM_FILES = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
SHARED_NAMES = replace(NAMES, shared="shared_experts", spelled={Experts: {"exact_router": True}})
LATENT_NAMES = replace(SHARED_NAMES, mixers={LatentAttention: "self_attn"})
FAMILIES = (
    Family("glm4_moe", ("glm4_moe", "glm4v_moe_text"), read_glm4_moe, names=SHARED_NAMES),
    Family("glm4_moe_lite", ("glm4_moe_lite",), read_glm4_moe_lite, names=LATENT_NAMES),
    Family("deepseek_v3", ("deepseek_v3",), read_deepseek_v3, names=LATENT_NAMES),
    Family("deepseek_v32", ("deepseek_v32",), read_deepseek_v32, names=LATENT_NAMES),
    Family("glm_moe_dsa", ("glm_moe_dsa",), read_glm_moe_dsa, names=LATENT_NAMES),
    Family("deepseek_v2", ("deepseek_v2",), read_deepseek_v2, names=LATENT_NAMES),
    Family("youtu", ("youtu",), read_youtu, names=LATENT_NAMES),
    Family("minicpm3", ("minicpm3",), read_minicpm3, names=LATENT_NAMES),
    Family("sarvam_mla", ("sarvam_mla",), read_sarvam_mla, names=LATENT_NAMES),
    Family(
        "sarvam_moe",
        ("sarvam_moe",),
        read_sarvam_moe,
        names=replace(SHARED_NAMES, spelled={**SHARED_NAMES.spelled, Attention: {"joined": "query_key_value"}}),
        released=_SARVAM_FILES,
    ),
    Family("solar_open", ("solar_open",), read_solar_open, names=SHARED_NAMES),
    Family(
        "exaone_moe",
        ("exaone_moe",),
        read_exaone_moe,
        names=SHARED_NAMES,
        released=((r"mlp\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
    ),
    Family("dots1", ("dots1",), read_dots1, names=SHARED_NAMES),
)
