"""Lightning attention and softmax attention: MiniMax-Text-01, Ling and Ring 2.5.

Each head has a state that forgets at a rate of its own, the same for every token: the later the layer and the
head, the slower. Queries, keys and values pass a silu; a norm over all heads and a gate follow. The output of
the norm before a block becomes the stream, so the input of that norm is lost.

    x = norm(x);   x = alpha x + beta block(x)

Ling 2.5 has latent attention in its other layers, and the feed-forwards and the ``model_type`` of Ling 3. Queries
and keys of lightning layers pass a norm and are turned, instead of the silu, and the norm of the output has groups.

Sources: Qin et al., "Lightning Attention-2" (2024); transformers ``MiniMaxConfig`` and
``MiniMaxForCausalLM``; ``modeling_bailing_moe_v2_5.py`` of inclusionAI's repository Ring-V2.5. Their defaults
are used here.
"""

from __future__ import annotations

from dataclasses import replace

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.delta import (
    KIMI_NAMES,
    FeedDefaults,
    mtp_behind,
    read_kimi_feed_forwards,
    read_latent_attention,
    scale_of_rope,
)
from weft.families.delta import read_ling as read_ling_3
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Experts
from weft.families.mixers.lightning import Lightning
from weft.families.names import Names
from weft.families.reading import Family, build_architecture, read_attention, windowed
from weft.families.residuals import NormedStream


def read_minimax(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    count = keys.integer("num_hidden_layers")
    kinds = reading.layer_kinds(keys, lambda count: ["recurrent" if i % 2 else "attention" for i in range(count)])
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))
    turning = keys.integer("rotary_dim", head_dim)
    if turning > head_dim:
        fail("rotary_dim", turning, f"heads have {head_dim} dims")
    full = replace(read_attention(keys, theta=1e6, partial=turning / head_dim), bias=False)
    if keys.get("sliding_window") is not None:
        full = windowed(full, keys)
    factors = [1 - layer / (count - 1 + 1e-5) + 1e-5 for layer in range(count)]
    experts = keys.integer("num_local_experts", keys.integer("num_experts", 8))
    feed = Experts(
        count=experts,
        per_token=reading.experts_per_token(keys, experts),
        width=keys.integer("intermediate_size"),
        normalized=True,
    )

    def pair(name: str) -> tuple[float, float]:
        return keys.number(f"{name}_alpha_factor", 1.0), keys.number(f"{name}_beta_factor", 1.0)

    of_kind = {"attention": pair("full_attn"), "recurrent": pair("linear_attn")}
    mixers = [
        full if kind == "attention" else Lightning(full.heads, full.head_dim, factor)
        for kind, factor in zip(kinds, factors, strict=True)
    ]
    return build_architecture(
        family,
        keys,
        mixers,
        [feed] * count,
        default_eps=1e-5,
        residual=NormedStream(tuple((*of_kind[kind], *pair("mlp")) for kind in kinds)),
    )


_LING_2_5 = FeedDefaults(1, 5120, 256, 512, 1.0, 8, 4)


def read_ling(family: str, keys: ConfigKeys) -> Architecture:
    """Read any Ling. Only 3 has a short convolution, and only 2.5 and 2.6 have the class BailingMoeV2_5ForCausalLM."""
    named = "BailingMoeV2_5ForCausalLM" in keys.get("architectures", ())
    stated = keys.has("group_norm_size") and not keys.has("short_conv_kernel_size")
    is_2_5 = keys.get("model_type") == "bailing_moe_v2_5" or named or stated
    return read_ling_2_5(family, keys) if is_2_5 else read_ling_3(family, keys)


def read_ling_2_5(family: str, keys: ConfigKeys) -> Architecture:
    heads, count = keys.integer("num_attention_heads", 16), keys.integer("num_hidden_layers", 20, least=2)
    keys = keys.over({"num_key_value_heads": heads}).with_defaults(
        vocab_size=157_184, hidden_size=2048, num_hidden_layers=count, num_attention_heads=heads
    )
    keys.only(use_qkv_bias=False, use_bias=False, linear_silu=False, use_qk_norm=True, rope_interleave=True)
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // heads)
    if heads & (heads - 1):
        fail("num_attention_heads", heads, "lightning attention is served with a power of two of them")
    groups = keys.integer("group_norm_size", 4)
    if heads * head_dim % groups:
        fail("group_norm_size", groups, f"it must divide the {heads * head_dim} numbers of all heads")
    latent = read_latent_attention(keys)
    rope = read_rope(keys, head_dim, theta=6e5, partial=0.5)
    if rope.rotary_dim != latent.shared_dim:
        fail("qk_rope_head_dim", latent.shared_dim, f"both kinds of layers turn {rope.rotary_dim} dims")
    latent = replace(latent, rope=rope, scale=latent.scale * scale_of_rope(keys))
    every = keys.integer("layer_group_size", 5)
    mixers = [
        latent
        if (layer + 1) % every == 0 or layer >= count // every * every
        else Lightning(
            heads,
            head_dim,
            1 - (layer - 1) / (count - 1) + 1e-5,
            silu=False,
            qk_norm=True,
            rope=rope,
            scale=head_dim**-0.5,
            norm_groups=groups,
        )
        for layer in range(count)
    ]
    feeds = read_kimi_feed_forwards(keys, count, _LING_2_5)
    return build_architecture(
        family, keys, mixers, feeds, max_positions=32_768, mtp=mtp_behind(keys, latent, feeds[-1])
    )


_MINIMAX = Names(
    {Attention: "self_attn", Lightning: "self_attn"},
    layer_reader="weft.models.spellings:minimax_layers",
    feed_reader="weft.models.spellings:minimax_feed",
)
FAMILIES = (
    Family("ling", ("bailing_hybrid", "bailing_moe_v2_5"), read_ling, names=KIMI_NAMES),
    Family("minimax", ("minimax",), read_minimax, names=_MINIMAX),
)
