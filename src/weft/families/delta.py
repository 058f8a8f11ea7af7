"""Delta nets and attention: Qwen3-Next and Qwen3.5, OLMo hybrid, Ling 3, Lara 4 Mini.

Ling 3 (``bailing_hybrid``) has the layers of Kimi Linear (``kimi``), every sixth of them attention, with positions and
a gate for each head; its forget gate has a floor, and its gates have no bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.families.architecture import Architecture, MtpLayer
from weft.families.attention import qwen_feed_forward
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import Attention
from weft.families.mixers.delta import GatedDelta, KimiDelta
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.mixers.lightning import Lightning
from weft.families.names import Names
from weft.families.reading import (
    WINDOW_KIND,
    Family,
    build_architecture,
    every_nth_attention,
    expert_groups,
    experts_per_token,
    kinds_with_windows,
    layer_kinds,
    read_attention,
    windowed,
)
from weft.families.residuals import PLAIN, Residual
from weft.families.towers import read_qwen3_5_tower

RECURRENT_KIND = "linear_attention"


def read_qwen_hybrid(family: str, keys: ConfigKeys) -> Architecture:
    """Read Qwen3-Next or Qwen3.5: they differ in how tensors are stored, not in geometry. Qwen3.5 may have a vision
    tower."""
    kinds = layer_kinds(keys, every_nth_attention(keys))
    attention = read_attention(keys, qk_norm=True, gated=True, partial=0.25, head_dim=256)
    keys.only(attn_output_gate=True)
    delta = read_gated_delta(keys)
    architecture = build_architecture(
        family,
        keys,
        [attention if kind == "attention" else delta for kind in kinds],
        [qwen_feed_forward(keys, layer, shared=True, normalized=True) for layer in range(len(kinds))],
        tied=keys.outer_boolean("tie_word_embeddings", False),
        mtp=qwen_mtp(keys, attention),
    )
    return replace(architecture, vision=read_qwen3_5_tower(keys) if family == "qwen3_5" else None)


def read_mobius(family: str, keys: ConfigKeys) -> Architecture:
    """Read Intern-S2-Mobius: Qwen3.5 whose layers share ``num_blocks`` banks of routed experts in turn. Each layer has
    a shared expert of its own, as has the head, whose routed experts are its own too."""
    keys.only(layer_scale=False)
    banks, trunk = keys.integer("num_blocks", 4), read_qwen_hybrid(family, keys)
    feeds = []
    for layer, feed in enumerate(trunk.feed_forwards):
        if not isinstance(feed, Experts):
            fail("num_experts", keys.get("num_experts"), "every layer of this model has experts")
        feeds.append(replace(feed, bank=layer % banks))
    return replace(trunk, feed_forwards=tuple(feeds))


_LARA_KINDS = (RECURRENT_KIND, WINDOW_KIND, RECURRENT_KIND, "full_attention", WINDOW_KIND)


def read_lara_mini(family: str, keys: ConfigKeys) -> Architecture:
    """Read Lara 4 Mini: delta layers, windows, and full attention without positions."""
    keys = keys.with_defaults(
        vocab_size=151_936, hidden_size=1024, num_hidden_layers=34, num_attention_heads=16, num_key_value_heads=4,
        head_dim=128, max_position_embeddings=131_072, sliding_window=512)  # fmt: skip
    count = keys.integer("num_hidden_layers")
    silent = [_LARA_KINDS[layer % len(_LARA_KINDS)] for layer in range(count)]
    kinds = kinds_with_windows(keys, tuple(dict.fromkeys(_LARA_KINDS)), silent)
    plain = read_attention(keys, qk_norm=True)
    of_kind = {
        RECURRENT_KIND: read_gated_delta(keys, k_heads=8, v_heads=16),
        WINDOW_KIND: windowed(plain, keys),
        "full_attention": replace(plain, rope=None),
    }
    experts = keys.integer("num_experts", 128)
    sparse = Experts(
        experts,
        experts_per_token(keys, experts, 4),
        keys.integer("moe_intermediate_size", 512),
        normalized=keys.boolean("norm_topk_prob", True),
        shared_width=keys.integer("shared_expert_intermediate_size", 512),
    )
    tied = keys.boolean("tie_word_embeddings", True)
    return build_architecture(family, keys, [of_kind[kind] for kind in kinds], [sparse] * count, tied=tied)


def read_jev(family: str, keys: ConfigKeys) -> Architecture:
    """Read a decision model: Qwen3.5, and a head that ``models/score_head`` reads."""
    text = keys.get("model_type")
    if text not in ("qwen3_5_text", "qwen3_5_moe_text"):
        fail("text_config.model_type", text, "the text parts served here are qwen3_5_text and qwen3_5_moe_text")
    return read_qwen_hybrid(family, keys)


def read_gated_delta(
    keys: ConfigKeys,
    *,
    k_heads: int = 16,
    v_heads: int = 32,
    k_dim: int = 128,
    v_dim: int = 128,
    beta_scale: float = 1.0,
) -> GatedDelta:
    """Read a gated delta net from the ``linear_*`` keys; the arguments are the family's defaults."""
    delta = GatedDelta(
        k_heads=keys.integer("linear_num_key_heads", k_heads),
        v_heads=keys.integer("linear_num_value_heads", v_heads),
        k_dim=keys.integer("linear_key_head_dim", k_dim),
        v_dim=keys.integer("linear_value_head_dim", v_dim),
        conv_kernel=keys.integer("linear_conv_kernel_dim", 4),
        beta_scale=beta_scale,
    )
    if delta.v_heads % delta.k_heads:
        fail("linear_num_value_heads", delta.v_heads, f"it must be a multiple of linear_num_key_heads {delta.k_heads}")
    return delta


def qwen_mtp(keys: ConfigKeys, attention: Attention, residual: Residual = PLAIN) -> MtpLayer | None:
    """Return the head, if it is one layer that shares the embedding. Qwen3-Next's config.json does not mention its
    head."""
    layers = keys.integer("mtp_num_hidden_layers", 1, least=0)
    if layers != 1 or keys.boolean("mtp_use_dedicated_embeddings", False):
        return None
    return MtpLayer(attention, qwen_feed_forward(keys, 0, shared=True, normalized=True), residual)


def read_olmo_hybrid(family: str, keys: ConfigKeys) -> Architecture:
    """Read OLMo hybrid. A rotary base of null, as released, means attention without positions; silence means the
    default."""
    kinds = layer_kinds(keys, _last_of_four)
    rope = keys.get("rope_parameters") or {}
    theta = rope["rope_theta"] if "rope_theta" in rope else keys.get("rope_theta")
    stated = "rope_theta" in rope or keys.has("rope_theta")
    attention = read_attention(keys, qk_norm=True, rotary=theta is not None or not stated)
    heads = attention.heads
    k_heads = keys.integer("linear_num_key_heads", heads)
    k_dim = keys.integer("linear_key_head_dim", int(0.75 * keys.integer("hidden_size") / k_heads))
    delta = read_gated_delta(
        keys,
        k_heads=k_heads,
        v_heads=heads,
        k_dim=k_dim,
        v_dim=2 * k_dim,
        beta_scale=2.0 if keys.boolean("linear_allow_neg_eigval", True) else 1.0,
    )
    attention = replace(attention, norm_whole=True)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else delta for kind in kinds],
        [dense] * len(kinds),
        max_positions=65536,
    )


def _last_of_four(count: int) -> list[str]:
    kinds = ["attention" if i % 4 == 3 else "recurrent" for i in range(count)]
    return kinds if "attention" in kinds else [*kinds[:-1], "attention"]


def read_ling(family: str, keys: ConfigKeys) -> Architecture:
    """Read Ling 3. Ling 2.5 has lightning attention: ``lightning.read_ling_2_5``."""
    floor = keys.number("kda_lower_bound", -5.0) if keys.boolean("kda_safe_gate", True) else None
    if floor is not None and floor >= 0:
        fail("kda_lower_bound", floor, "a floor of log decays is below 0")
    # In files that transformers saves, head_dim is the number of dims that positions turn.
    head_dim = keys.integer("linear_head_dim", keys.integer("head_dim", 128))
    delta = KimiDelta(
        heads=keys.integer("num_attention_heads", 32),
        head_dim=head_dim,
        conv_kernel=keys.integer("short_conv_kernel_size", 4),
        wide_forget=True,
        wide_gate=True,
        decay_floor=floor,
    )
    keys.only(linear_num_heads=delta.heads, linear_conv_kernel_dim=delta.conv_kernel)
    every = keys.integer("layer_group_size", 6)
    kinds = layer_kinds(keys, lambda count: ["recurrent" if (i + 1) % every else "attention" for i in range(count)])
    latent = read_latent_attention(keys)
    rope = read_rope(keys, latent.shared_dim, theta=6e6, partial=1.0)
    attention = replace(latent, rope=rope, head_gated=True, scale=latent.scale * scale_of_rope(keys))
    feeds = read_kimi_feed_forwards(keys, len(kinds), _LING)
    return build_architecture(
        family,
        keys,
        [attention if kind == "attention" else delta for kind in kinds],
        feeds,
        max_positions=keys.integer("model_max_length", 262_144),
        mtp=mtp_behind(keys, attention, feeds[-1]),
    )


def mtp_behind(
    keys: ConfigKeys, attention: Attention | LatentAttention, feed: FeedForward, residual: Residual = PLAIN
) -> MtpLayer | None:
    """Return a head that is stored as the layer after the last (DeepSeek-V3), with the feed-forward ``feed``; None
    without it. If several are stored, one for each place of a draft, the first drafts all places."""
    stored = keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 0, least=0), least=0)
    return MtpLayer(attention, feed, residual) if stored else None


def scale_of_rope(keys: ConfigKeys) -> float:
    """Return the factor that DeepSeek's ``mscale_all_dim`` puts on the scale of the scores, where positions are
    stretched; else 1."""
    stated = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    inner = ConfigKeys(stated if isinstance(stated, Mapping) else {}, fallback={})
    factor, scale = inner.number("factor", 1.0), inner.number("mscale_all_dim", 0.0)
    if inner.get("rope_type", inner.get("type", "default")) == "default" or not scale or factor <= 1:
        return 1.0
    return float((0.1 * scale * math.log(factor) + 1.0) ** 2)


def read_latent_attention(keys: ConfigKeys) -> LatentAttention:
    heads = keys.integer("num_attention_heads", 32)
    if keys.integer("num_key_value_heads", heads) != heads:
        fail(
            "num_key_value_heads",
            keys.get("num_key_value_heads"),
            f"latent attention has as many as num_attention_heads, {heads}",
        )
    rank = keys.get("q_lora_rank")
    own, shared = keys.integer("qk_nope_head_dim", 128), keys.integer("qk_rope_head_dim", 64, least=0)
    return LatentAttention(
        heads=heads,
        latent_dim=keys.integer("kv_lora_rank", 512),
        shared_dim=shared,
        own_dim=own,
        value_dim=keys.integer("v_head_dim", 128),
        scale=(own + shared) ** -0.5,
        query_rank=None if rank is None else keys.integer("q_lora_rank"),
        bias=keys.boolean("attention_bias", False),
    )


@dataclass(frozen=True, slots=True)
class FeedDefaults:
    """Defaults of the feed-forwards, as in transformers' configuration classes."""

    dense_first: int
    dense_width: int
    experts: int
    width: int
    scale: float
    groups: int
    groups_chosen: int


_KIMI = FeedDefaults(1, 9216, 256, 1024, 2.446, 1, 1)
_LING = FeedDefaults(2, 6144, 512, 768, 2.5, 8, 4)


def read_kimi_feed_forwards(keys: ConfigKeys, count: int, default: FeedDefaults = _KIMI) -> list[FeedForward]:
    listed = keys.get("mlp_layer_types")
    if listed is None:
        first = keys.integer("first_k_dense_replace", default.dense_first, least=0)
        every = keys.integer("moe_layer_freq", 1)
        listed = ["dense" if i < first or i % every else "sparse" for i in range(count)]
    if not isinstance(listed, list) or len(listed) != count or not set(listed) <= {"dense", "sparse"}:
        fail("mlp_layer_types", listed, f"it must say dense or sparse for each of the {count} layers")
    dense = Dense(keys.integer("intermediate_size", default.dense_width))
    if "sparse" not in listed:
        return [dense] * count
    sparse = _kimi_experts(keys, default)
    return [sparse if kind == "sparse" else dense for kind in listed]


def _kimi_experts(keys: ConfigKeys, default: FeedDefaults) -> Experts:
    keys.only(moe_router_activation_func="sigmoid", score_function="sigmoid")
    count = keys.integer("num_experts", keys.integer("num_local_experts", default.experts))
    per_token = keys.integer("num_experts_per_token", keys.integer("num_experts_per_tok", 8))
    if per_token > count:
        fail("num_experts_per_token", per_token, f"the model has {count} experts")
    width = keys.integer("moe_intermediate_size", default.width)
    shared = keys.integer("num_shared_experts", keys.integer("n_shared_experts", 1))
    groups = keys.integer("num_expert_group", keys.integer("n_group", default.groups))
    groups, chosen = expert_groups(keys, count, "num_expert_group", groups, default.groups_chosen)
    return Experts(
        count=count,
        per_token=per_token,
        width=width,
        normalized=keys.boolean("moe_renormalize", keys.boolean("norm_topk_prob", True)),
        shared_width=width * shared,
        scoring="sigmoid",
        choice_bias=True,
        scale=keys.number("routed_scaling_factor", default.scale),
        normalizer_eps=1e-20,
        groups=groups,
        groups_chosen=chosen,
    )


_QWEN = Names({Attention: "self_attn", GatedDelta: "linear_attn"}, shared="shared_expert", plus_one=True)
# Two tensors for the projection of a delta layer instead of four, with rows grouped by key head.
_QWEN_NEXT = replace(_QWEN, spelled={GatedDelta: {"names": "by_key_head"}})
KIMI_NAMES = Names(
    layer_reader="weft.models.spellings:kimi_layers",
    spelled={Lightning: {"names": ("query_key_value", "g_proj", "g_norm", "dense"), "by_head": False, "eps": None}},
    feed_reader="weft.models.spellings:kimi_feed",
    embeddings=("word_embeddings", "embed_tokens"),
)
FAMILIES = (
    Family("qwen3_5", ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), read_qwen_hybrid, names=_QWEN),
    Family(
        "interns2_mobius",
        ("interns2_mobius", "interns2_mobius_text"),
        read_mobius,
        names=replace(_QWEN, feed_reader="weft.models.spellings:banked_feed"),
    ),
    Family("qwen3_5", ("jev",), read_jev, names=_QWEN),
    Family(
        "lara_mini",
        ("lara_mini",),
        read_lara_mini,
        names=Names(
            {Attention: "self_attn", GatedDelta: "linear_attn"},
            shared="shared_expert",
            spelled={GatedDelta: {"names": "joined", "norm": "out_norm"}, Experts: {"exact_router": True}},
        ),
    ),
    Family("qwen3_next", ("qwen3_next",), read_qwen_hybrid, names=_QWEN_NEXT),
    Family(
        "olmo_hybrid", ("olmo_hybrid",), read_olmo_hybrid, names=Names(layer_reader="weft.models.spellings:olmo_layers")
    ),
)
