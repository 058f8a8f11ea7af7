"""OLMo 3 (attention with windows in three layers of four) and OLMo hybrid (gated delta net + attention).

Their attention norms queries and keys over all heads at once, and what comes out of a layer.
"""

from __future__ import annotations

import dataclasses

from weft.families.architecture import Architecture, Attention, Dense, GatedDelta
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.reading import (
    WINDOW_KIND,
    Family,
    build_architecture,
    kinds_with_windows,
    layer_kinds,
    read_attention,
    windowed,
)


def read_olmo3(family: str, keys: ConfigKeys) -> Architecture:
    """The rotary scaling of a release is for its full layers; window layers turn at the plain base."""
    count = keys.integer("num_hidden_layers")
    kinds = kinds_with_windows(keys, ("full_attention", WINDOW_KIND),
                               ["full_attention" if (i + 1) % 4 == 0 else WINDOW_KIND for i in range(count)])
    plain = read_attention(keys, rotary=False, qk_norm=True)

    def turned(kind: str, *, scaled: bool) -> Attention:
        rope = read_rope(keys, plain.head_dim, theta=500_000.0, partial=1.0, layer_kind=kind, scaled=scaled)
        return dataclasses.replace(plain, rope=rope, norm_whole=True)

    full = turned("full_attention", scaled=True)
    window = windowed(turned(WINDOW_KIND, scaled=False), keys, default=4096, max_positions=2048)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(family, keys, [window if kind == WINDOW_KIND else full for kind in kinds],
                              [dense] * count, tied=keys.boolean("tie_word_embeddings", False),
                              eps=keys.number("rms_norm_eps", 1e-5), max_positions=2048)


def read_olmo_hybrid(family: str, keys: ConfigKeys) -> Architecture:
    """A rotary base of null, as released, means attention without positions; silence means the default."""
    kinds = layer_kinds(keys, _last_of_four)
    rope = keys.get("rope_parameters") or {}
    theta = rope["rope_theta"] if "rope_theta" in rope else keys.get("rope_theta")
    stated = "rope_theta" in rope or keys.has("rope_theta")
    attention = read_attention(keys, qk_norm=True, rotary=theta is not None or not stated)
    heads = attention.heads
    k_heads = keys.integer("linear_num_key_heads", heads)
    k_dim = keys.integer("linear_key_head_dim", int(0.75 * keys.integer("hidden_size") / k_heads))
    delta = GatedDelta(k_heads=k_heads, v_heads=keys.integer("linear_num_value_heads", heads), k_dim=k_dim,
                       v_dim=keys.integer("linear_value_head_dim", 2 * k_dim),
                       conv_kernel=keys.integer("linear_conv_kernel_dim", 4),
                       beta_scale=2.0 if keys.boolean("linear_allow_neg_eigval", True) else 1.0)
    if delta.v_heads % delta.k_heads:
        fail("linear_num_value_heads", delta.v_heads,
             f"it must be a multiple of linear_num_key_heads {delta.k_heads}")
    attention = dataclasses.replace(attention, norm_whole=True)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(family, keys, [attention if kind == "attention" else delta for kind in kinds],
                              [dense] * len(kinds), tied=keys.boolean("tie_word_embeddings", False),
                              eps=keys.number("rms_norm_eps", 1e-6), max_positions=65536)


def _last_of_four(count: int) -> list[str]:
    kinds = ["attention" if i % 4 == 3 else "recurrent" for i in range(count)]
    return kinds if "attention" in kinds else [*kinds[:-1], "attention"]


FAMILIES = (
    Family("olmo3", ("olmo3",), read_olmo3, builder="olmo"),
    Family("olmo_hybrid", ("olmo_hybrid",), read_olmo_hybrid, builder="olmo"),
)
