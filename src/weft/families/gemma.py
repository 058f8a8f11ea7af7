"""Gemma 1 to 4, their text part: GELU, an embedding times the root of its width.

Gemma 2 has a cap on scores, and full attention in every other layer. Gemma 3 and 4 have full attention after each five
layers with a window. From 2 on, norms are before and after each block.

Gemma 4 has more. Full layers have wider heads with rotary positions on a quarter of each, and their keys before the
norm may also be the values. Values are normed. The last layers have no keys: each reads the keys of the last layer of
the same kind that has some. A second embedding gives each token some numbers for each layer.

    layer      0 w   1 w   2 full   3 w   4 full        w: a window, in a ring
    reads      0     1     2        1     2             1 is read by 3 too, so it is in pages

Source: transformers ``GemmaConfig`` to ``Gemma4TextConfig`` and their models; their defaults are used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import Attention, Rope
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.names import Names
from weft.families.reading import WINDOW_KIND, Family, build_architecture, read_attention, windowed
from weft.families.residuals import PLAIN, PerLayer, Residual

FULL = "full_attention"
DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
}


def read_gemma3(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(**DEFAULTS, num_hidden_layers=26, vocab_size=262_208, sliding_window=4096)
    keys.only(hidden_activation="gelu_pytorch_tanh")
    both_ways = keys.boolean("use_bidirectional_attention", False)
    if both_ways:  # EmbeddingGemma has half of the window on either side
        keys = keys.over({"sliding_window": keys.integer("sliding_window", least=2) // 2})
    if keys.get("attn_logit_softcapping"):
        fail("attn_logit_softcapping", keys.get("attn_logit_softcapping"), "capped scores are not served")
    kinds = kinds_of(keys, keys.integer("sliding_window_pattern", 6))
    plain = read_attention(keys, rotary=False, qk_norm=True, scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5)
    plain = replace(plain, causal=not both_ways)
    of_kind = by_kind(keys, plain)
    return architecture(
        family, keys, [of_kind[kind] for kind in kinds], [_feed(keys)] * len(kinds), Residual(out_norms=True)
    )


def by_kind(keys: ConfigKeys, plain: Attention) -> dict[str, Attention]:
    """Return the attention of each kind of layer: windows and full layers turn by different bases."""
    local = Rope(keys.number("rope_local_base_freq", 10_000.0), plain.head_dim)
    if WINDOW_KIND in (keys.get("rope_parameters") or {}):
        local = read_rope(keys, plain.head_dim, theta=10_000.0, partial=1.0, layer_kind=WINDOW_KIND)
    full = replace(plain, rope=read_rope(keys, plain.head_dim, theta=1e6, partial=1.0, layer_kind=FULL))
    return {FULL: full, WINDOW_KIND: windowed(replace(plain, rope=local), keys)}


def read_gemma(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        **DEFAULTS | {"hidden_size": 3072, "intermediate_size": 24_576, "num_attention_heads": 16,
                       "num_key_value_heads": 16, "max_position_embeddings": 8192},
        num_hidden_layers=28, vocab_size=256_000)  # fmt: skip
    keys.only(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=None)
    count = keys.integer("num_hidden_layers")
    return architecture(family, keys, [read_attention(keys)] * count, [_feed(keys)] * count, PLAIN)


def read_gemma2(family: str, keys: ConfigKeys, *, out_norms: bool = True) -> Architecture:
    """Read Gemma 2, and VaultGemma, which has no norms after blocks."""
    keys = keys.with_defaults(
        **DEFAULTS | {"max_position_embeddings": 8192}, num_hidden_layers=26, vocab_size=256_000, sliding_window=4096
    )
    keys.only(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=None)
    plain = read_attention(keys, scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5)
    full = replace(plain, cap=_cap(keys, "attn_logit_softcapping", 50.0))
    kinds = kinds_of(keys, 2)
    window = windowed(full, keys)
    mixers = [window if kind == WINDOW_KIND else full for kind in kinds]
    keys = keys.over({"final_logit_softcapping": _cap(keys, "final_logit_softcapping", 30.0)})
    return architecture(family, keys, mixers, [_feed(keys)] * len(kinds), Residual(out_norms=out_norms))


def _cap(keys: ConfigKeys, key: str, default: float) -> float:
    """Return the cap that ``key`` names: ``default`` if it is missing, none where it says null."""
    return 0.0 if keys.has(key) and keys.get(key) is None else keys.number(key, default)


def _feed(keys: ConfigKeys) -> Dense:
    return Dense(keys.integer("intermediate_size"), "gelu_tanh")


def read_gemma4(family: str, keys: ConfigKeys) -> Architecture:
    keys = keys.with_defaults(
        **DEFAULTS, num_hidden_layers=30, vocab_size=262_144, sliding_window=512, rope_parameters=_ROPES4
    )
    keys.only(hidden_activation="gelu_pytorch_tanh")
    if keys.get("use_bidirectional_attention") == "all":
        fail("use_bidirectional_attention", "all", "text is read from left to right here")
    kinds = [*kinds_of(keys, 6)[:-1], FULL]  # the last one is always full, as in transformers
    count, reused = len(kinds), keys.integer("num_kv_shared_layers", 0, least=0)
    own = count - reused
    mixers = sharing([_attention4(keys, layer, kind) for layer, kind in enumerate(kinds)], kinds, reused)
    for kind in set(kinds):
        widths = {mixer.head_dim for mixer, mixer_kind in zip(mixers, kinds, strict=True) if mixer_kind == kind}
        if len(widths) > 1:
            fail("layer_types", kinds, f"per_layer_config has heads of {sorted(widths)} for layers that are {kind}")
    width = keys.integer("hidden_size_per_layer_input", 256, least=0)
    vocab = keys.integer("vocab_size_per_layer_input", keys.integer("vocab_size"))
    if width and vocab != keys.integer("vocab_size"):
        fail("vocab_size_per_layer_input", vocab, f"it must be vocab_size {keys.integer('vocab_size')}")
    return architecture(
        family, keys, mixers, [_feed4(keys, layer >= own) for layer in range(count)], PerLayer(width, out_norms=True)
    )


def sharing(mixers: Sequence[Attention], kinds: Sequence[str], reused: int) -> list[Attention]:
    """Return ``mixers``, the last ``reused`` of which read the keys of the last layer of their kind before them. Raises
    CheckpointError if there is none."""
    count, own = len(kinds), len(kinds) - reused
    if not 0 < own <= count or set(kinds[:own]) != set(kinds):
        fail("num_kv_shared_layers", reused, "each kind of layer needs one that has keys of its own")
    source = {kind: max(layer for layer in range(own) if kinds[layer] == kind) for kind in kinds}
    return [
        replace(mixer, shared=reused > 0 and source[kind] == layer, kv_of=source[kind] if layer >= own else None)
        for layer, (mixer, kind) in enumerate(zip(mixers, kinds, strict=True))
    ]


def read_gemma4_unified(family: str, keys: ConfigKeys) -> Architecture:
    """Read Gemma 4 12B, whose tokens have one embedding."""
    return read_gemma4(family, keys.with_defaults(
        hidden_size_per_layer_input=0, sliding_window=1024, max_position_embeddings=262_144))  # fmt: skip


_ROPES4 = {
    WINDOW_KIND: {"rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _attention4(keys: ConfigKeys, layer: int, kind: str) -> Attention:
    """Read the attention of a layer, as one with keys of its own."""
    same = kind == FULL and keys.boolean("attention_k_eq_v", False)
    stated: dict[str, Any] = {}
    if kind == FULL:
        stated["head_dim"] = keys.integer("global_head_dim", 512)
        if same and keys.get("num_global_key_value_heads") is not None:
            stated["num_key_value_heads"] = keys.integer("num_global_key_value_heads")
    if by_layer := keys.get("per_layer_config"):  # transformers saves this instead of both
        stated = by_layer.get(str(layer)) or {}
    plain = read_attention(keys.over(stated), rotary=False, scale=1.0, qk_norm=True)
    theta = 10_000.0 if kind == WINDOW_KIND else 1e6
    mixer = replace(
        plain,
        values_normed=True,
        values_are_keys=same,
        rope=reading.whole_or_proportional(
            read_rope(keys, plain.head_dim, theta=theta, partial=1.0, layer_kind=kind), plain.head_dim
        ),
    )
    return windowed(mixer, keys) if kind == WINDOW_KIND else mixer


def _feed4(keys: ConfigKeys, reuses: bool) -> FeedForward:
    wide = reuses and keys.boolean("use_double_wide_mlp", False)
    dense = Dense(keys.integer("intermediate_size") * (2 if wide else 1), "gelu_tanh")
    if not keys.boolean("enable_moe_block", False):
        return dense
    count = keys.integer("num_experts")
    chosen = keys.integer("top_k_experts")
    if chosen > count:
        fail("top_k_experts", chosen, f"the model has {count} experts")
    return Experts(
        count=count,
        per_token=chosen,
        width=keys.integer("moe_intermediate_size"),
        normalized=True,
        activation="gelu_tanh",
        shared_width=dense.width,
        normed_apart=True,
    )


def kinds_of(keys: ConfigKeys, every: int) -> list[str]:
    return reading.kinds_with_windows(
        keys,
        (FULL, WINDOW_KIND),
        [WINDOW_KIND if (i + 1) % every else FULL for i in range(keys.integer("num_hidden_layers"))],
    )


def architecture(
    family: str, keys: ConfigKeys, mixers: Sequence[Attention], feeds: Sequence[FeedForward], residual: Residual
) -> Architecture:
    return build_architecture(
        family,
        keys,
        mixers,
        feeds,
        tied=keys.outer_boolean("tie_word_embeddings", True),
        rounded_multiplier=True,
        embedding_multiplier=keys.integer("hidden_size") ** 0.5,
        logits_cap=keys.number("final_logit_softcapping", 0.0),
        residual=residual,
    )


NAMES = Names(
    {Attention: "self_attn"},
    feed_norm="pre_feedforward_layernorm",
    feed_reader="weft.models.spellings:gemma_feed",
    out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_GEMMA4 = replace(
    NAMES,
    layer_reader="weft.models.blocks.per_layer:layer_reader",
    ends_reader="weft.models.blocks.per_layer:ends_reader",
)
FAMILIES = (
    Family(
        "gemma",
        ("gemma",),
        read_gemma,
        "gelu_pytorch_tanh",
        replace(NAMES, plus_one=True, feed_norm="post_attention_layernorm"),
    ),
    Family("gemma2", ("gemma2",), read_gemma2, "gelu_pytorch_tanh", replace(NAMES, plus_one=True)),
    Family(
        "vaultgemma",
        ("vaultgemma",),
        partial(read_gemma2, out_norms=False),
        "gelu_pytorch_tanh",
        replace(NAMES, plus_one=True),
    ),
    Family("gemma3", ("gemma3", "gemma3_text"), read_gemma3, "gelu_pytorch_tanh", replace(NAMES, plus_one=True)),
    Family("gemma4", ("gemma4", "gemma4_text"), read_gemma4, "gelu_pytorch_tanh", _GEMMA4),
    Family("gemma4", ("gemma4_unified_text",), read_gemma4_unified, "gelu_pytorch_tanh", _GEMMA4),
)
