"""Mixtures of experts under softmax attention: Mixtral, Qwen 2, Granite 3, ERNIE 4.5, Hunyuan, Phi 3.5 and others.

Feed-forwards differ in the score of a router, in the shared expert, and in the layers without experts. Sources: the
configuration class and the model of transformers 5.24 for each ``model_type``; their defaults are in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from weft.families.architecture import Architecture
from weft.families.attention import NAMES, read_qwen
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import FULL_KIND, Decoder, all_biased, every, sizes
from weft.families.dense import HUNYUAN, HUNYUAN_NAMES, granite_multipliers, granite_residual, granite_scale
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.reading import Family, experts_per_token
from weft.families.residuals import Residual

MIXTRAL_FILES = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(experts\.\d+)\.w2\.", r"\1.down_proj."),
)
"""Patterns of names in files of Mixtral's kind, and the names here."""


def mixtral_experts(keys: ConfigKeys, layer: int, **more: Any) -> FeedForward:
    count = keys.integer("num_local_experts", keys.integer("num_experts", 8))
    width = keys.integer("intermediate_size")
    return Experts(count, experts_per_token(keys, count, 2), width, **({"normalized": True} | more))


def granite_experts(keys: ConfigKeys, layer: int) -> FeedForward:
    return mixtral_experts(keys, layer, shared_width=keys.integer("shared_intermediate_size", 0, least=0))


def _own_theta(keys: ConfigKeys, attentions: list[Attention]) -> list[Attention]:
    """Return ``attentions`` with the base that ``layer_rope_theta`` names for each layer; 0 means no positions."""
    listed = keys.get("layer_rope_theta")
    if listed is None:
        return attentions
    if not isinstance(listed, list) or len(listed) != len(attentions):
        fail("layer_rope_theta", listed, f"it must list a base for each of the {len(attentions)} layers")

    def turned(attention: Attention, theta: float) -> Attention:
        assert attention.rope is not None
        return replace(attention, rope=replace(attention.rope, theta=float(theta)) if theta else None)

    return [turned(attention, theta) for attention, theta in zip(attentions, listed, strict=True)]


def _ernie_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    """Read a feed-forward: experts in each ``moe_layer_interval``-th layer between the start and the end that keys
    name, else dense. A bias chooses, and weights are shares of the chosen experts."""
    count = keys.integer("moe_num_experts", 64)
    start, end = (
        keys.integer(f"moe_layer_{end}_index", default, least=-1) for end, default in (("start", 1), ("end", -1))
    )
    end = keys.integer("num_hidden_layers") - 1 if end == -1 else end
    if not start <= layer <= end or (layer + 1) % keys.integer("moe_layer_interval", 1):
        return Dense(keys.integer("intermediate_size"), bias=keys.boolean("use_bias", False))
    chosen, width = keys.integer("moe_k", 6), keys.integer("moe_intermediate_size", 1536)
    if chosen > count:
        fail("moe_k", chosen, f"the model has {count} experts")
    shared = keys.integer("moe_num_shared_experts", 2, least=0)
    return Experts(count, chosen, width, normalized=True, choice_bias=True, shared_width=width * shared)


def _one_of(keys: ConfigKeys, key: str, layer: int) -> int:
    """Return the number that ``key`` has for all layers, or for ``layer``."""
    stated = keys.get(key, 1)
    if isinstance(stated, list):
        if len(stated) <= layer:
            fail(key, stated, "it must be a number or one for each layer")
        return keys.over({key: stated[layer]}).integer(key)
    return keys.integer(key, 1)


def _hunyuan_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    count, chosen = _one_of(keys, "num_experts", layer), _one_of(keys, "moe_topk", layer)
    if chosen > count:
        fail("moe_topk", chosen, f"the model has {count} experts")
    width = keys.integer("intermediate_size")
    return Experts(count, chosen, width, normalized=True, shared_width=width)


def _minimax_m2_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    return mixtral_experts(keys, layer, scoring="sigmoid", choice_bias=True)


def rotary_dim(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys``, whose ``rotary_dim`` says which part of a head turns."""
    turned, head_dim = keys.get("rotary_dim"), keys.integer("head_dim", 128)
    return keys if turned is None else keys.over({"partial_rotary_factor": keys.integer("rotary_dim") / head_dim})


def read_minimax_m2(family: str, keys: ConfigKeys) -> Architecture:
    decoder = Decoder(
        defaults=sizes(200_064, 3072, 1536, 62, 48, 8, 196_608)
        | {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
        theta=5e6,
        attention={"qk_norm": True, "norm_whole": True},
        feed=_minimax_m2_feed,
    )
    keys.only(scoring_func="sigmoid", use_qk_norm=True, qk_norm_type="per_layer", attention_bias=False)
    return decoder(family, rotary_dim(keys))


def olmoe_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    count = keys.integer("num_experts", 64)
    normalized = keys.boolean("norm_topk_prob", False)
    return Experts(count, experts_per_token(keys, count, 8), keys.integer("intermediate_size"), normalized)


def _flint_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    only = keys.get("mlp_only_layers")
    if layer in ((0, 1) if only is None else only) or (layer + 1) % keys.integer("decoder_sparse_step", 1):
        return Dense(keys.integer("intermediate_size"))
    count, shared = keys.integer("num_experts", 256), keys.integer("shared_expert_intermediate_size", 1024)
    normalized, width = keys.boolean("norm_topk_prob", True), keys.integer("moe_intermediate_size", 512)
    chosen = experts_per_token(keys, count, 6)
    return Experts(count, chosen, width, normalized, shared_width=shared, scoring="sigmoid")


def _stated_kinds(keys: ConfigKeys, count: int) -> list[str]:
    fail("layer_types", None, "it must list the kind of each layer")


def read_granite_swa(family: str, keys: ConfigKeys, *, decoder: Decoder) -> Architecture:
    """Read a model with sinks, windows, and a rotary base for each layer."""
    architecture = decoder(family, keys)
    return replace(architecture, mixers=tuple(_own_theta(decoder.keys(keys), list(architecture.mixers))))  # type: ignore[arg-type]


def _phimoe_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    band = 2 * keys.number("router_jitter_noise", 0.01)
    return mixtral_experts(keys, layer, normalized=False, scoring="sparsemixer", band=band)


def _phimoe_positions(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys``, whose LongRoPE names its factor as others do: there is one for short texts and one for long."""
    stated = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        return keys
    inner = ConfigKeys(stated, fallback=stated)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if kind not in ("default", "longrope", "su"):
        fail("rope_type", kind, "default and longrope are served")
    if "long_mscale" not in stated:
        return keys
    most = keys.integer("max_position_embeddings")
    length = "long" if most > inner.integer("original_max_position_embeddings", most) else "short"
    factor = inner.number(f"{length}_mscale", 1.0)
    return keys.over({"rope_scaling": None, "rope_parameters": {**stated, "attention_factor": factor}})


_MIXTRAL = Decoder(
    defaults=sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072) | {"rms_norm_eps": 1e-5}, theta=1e6, feed=mixtral_experts
)
_GRANITE = Decoder(
    defaults=sizes(32_000, 4096, 11_008, 32, 32, 32, 2048),
    attention_of=granite_scale,
    residual=granite_residual,
    more=granite_multipliers,
    feed=granite_experts,
)
_SWA: dict[str, Any] = {"attention": {"sinks": True}, "kinds": every(4, last=False)}
_GRANITE_SWA = Decoder(
    **_SWA,
    defaults=sizes(100_352, 2560, 8192, 24, 20, 4, 8192)
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128},
    attention_of=granite_scale,
    residual=granite_residual,
    more=granite_multipliers,
)
_ERNIE = Decoder(
    defaults=sizes(103_424, 2560, 12_288, 28, 20, 4, 131_072) | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    theta=500_000.0,
    attention_of=all_biased,
    feed=_ernie_feed,
    only={"use_bias": False, "moe_norm_min": 1e-12},
)
_OLMOE = Decoder(
    defaults=sizes(50_304, 2048, 2048, 16, 16, 16, 4096) | {"rms_norm_eps": 1e-5},
    attention={"qk_norm": True, "norm_whole": True},
    feed=olmoe_feed,
    only={"clip_qkv": None},
)
_FLINT = Decoder(
    defaults=sizes(150_144, 2048, 6144, 49, 32, 4, 262_144) | {"head_dim": 128, "sliding_window": 513},
    attention={"qk_norm": True, "sinks": True},
    kinds=_stated_kinds,
    unturned=(FULL_KIND,),
    feed=_flint_feed,
)
_PHIMOE = Decoder(
    defaults=sizes(32_064, 4096, 6400, 32, 32, 8, 131_072)
    | {"rms_norm_eps": 1e-5, "num_local_experts": 16, "num_experts_per_tok": 2},
    theta=1e6,
    feed=_phimoe_feed,
    residual=lambda keys: Residual(centred="bias"),
    more=lambda keys: {"head_bias": keys.boolean("lm_head_bias", False)},
    only={"num_experts_per_tok": 2},
    keys_of=_phimoe_positions,
)
_SHARED = replace(NAMES, shared="shared_experts", spelled={Experts: {"exact_router": True}})
_GRANITE_NAMES = replace(NAMES, feed_reader="weft.models.spellings:granite_feed")
FAMILIES = (
    Family("mixtral", ("mixtral",), _MIXTRAL, names=NAMES, released=MIXTRAL_FILES),
    Family("qwen2_moe", ("qwen2_moe",), partial(read_qwen, qk_norm=False), names=replace(
        NAMES, shared="shared_expert")),
    Family("flint", ("flint",), _FLINT, released=((r"self_attn\.softmax_offset", "self_attn.sinks"),), names=replace(
        NAMES, shared="shared_expert", spelled={Experts: {"exact_router": True}})),
    Family("granite_moe", ("granitemoe", "granitemoeshared"), _GRANITE, names=_GRANITE_NAMES),
    Family("granite_swa", ("granite_swa",), partial(read_granite_swa, decoder=_GRANITE_SWA), names=NAMES),
    Family("granite_moe_swa", ("granitemoe_swa",), partial(read_granite_swa, decoder=replace(
        _GRANITE, **_SWA, defaults={**_GRANITE.defaults, "sliding_window": 128})), names=_GRANITE_NAMES),
    Family("minimax_m2", ("minimax_m2",), read_minimax_m2, released=MIXTRAL_FILES, names=replace(
        NAMES, spelled={Experts: {"choice_bias": "e_score_correction_bias"}})),
    Family("hunyuan_moe", ("hunyuan_v1_moe",), replace(
        HUNYUAN, only={"mlp_bias": False}, feed=_hunyuan_feed), names=replace(
        HUNYUAN_NAMES, shared="shared_mlp", spelled={
            **HUNYUAN_NAMES.spelled, Experts: {"router": "gate.wg.weight", "exact_router": True}})),
    Family("olmoe", ("olmoe",), _OLMOE, names=NAMES),
    Family("phimoe", ("phimoe",), _PHIMOE, names=replace(NAMES, spelled={Experts: {"router": "router.weight"}}),
           released=(*MIXTRAL_FILES, (r"mlp\.gate\.weight", "mlp.router.weight"))),
    Family("ernie4_5_moe", ("ernie4_5_moe",), _ERNIE, names=replace(
        _SHARED, spelled={Attention: {"paired": True}, Experts: {
            "exact_router": True, "choice_bias": "gate.moe_statics.e_score_correction_bias", "choice_row": True}}),
        released=((r"mlp\.moe_statics", "mlp.gate.moe_statics"),)),
)  # fmt: skip
