"""Attention in every layer: Llama and Mistral, DiffLlama, Qwen3 (dense and sparse), SmolLM3, OLMo 3. Some layers with a
window.

OLMo's attention norms queries and keys over all heads at once, and the outputs of blocks are normed too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from weft.families import reading
from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys, fail, read_rope
from weft.families.mixers.attention import Attention
from weft.families.mixers.differential import DifferentialAttention
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.names import Names
from weft.families.reading import WINDOW_KIND, Family, build_architecture, read_attention, windowed
from weft.families.residuals import Residual

NAMES = Names({Attention: "self_attn"})
OUT_NAMES = replace(NAMES, out_norms=("post_attention_layernorm", "post_feedforward_layernorm"))
OUT_NORMED = Residual(in_norms=False, out_norms=True)
"""Residual with a norm after each block, and none before it."""


def read_llama(family: str, keys: ConfigKeys) -> Architecture:
    if keys.boolean("mlp_bias", False):
        fail("mlp_bias", True, "feed-forwards with a bias are not served")
    return _llama(family, keys, window=False, max_positions=2048)


def read_mistral(family: str, keys: ConfigKeys) -> Architecture:
    """Read Mistral. ``sliding_window`` is 4096 if config.json does not say; null means no window."""
    return _llama(family, keys, window=reading.states_window(keys), max_positions=131_072)


def _llama(family: str, keys: ConfigKeys, *, window: bool, max_positions: int) -> Architecture:
    count = keys.integer("num_hidden_layers")
    attention = read_attention(keys)
    if window:
        attention = windowed(attention, keys, default=4096)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(family, keys, [attention] * count, [dense] * count, max_positions=max_positions)


def read_diffllama(family: str, keys: ConfigKeys) -> Architecture:
    """Read DiffLlama, whose heads are pairs: the n-th of the first half with the n-th of the second half."""
    keys = keys.with_defaults(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        max_position_embeddings=2048,
    )
    count, own = keys.integer("num_hidden_layers"), read_attention(keys)
    if own.kv_heads % 2:
        fail("num_key_value_heads", own.kv_heads, "it must be even: heads are pairs")
    mixers = [
        DifferentialAttention(
            own.heads // 2, own.kv_heads // 2, own.head_dim, own.rope, 0.8 - 0.6 * math.exp(-0.3 * layer), own.bias
        )
        for layer in range(count)
    ]
    return build_architecture(
        family, keys, mixers, [Dense(keys.integer("intermediate_size"))] * count, default_eps=1e-5
    )


def read_qwen(family: str, keys: ConfigKeys, *, qk_norm: bool) -> Architecture:
    """Read Qwen 3 (``qk_norm``) and Qwen 2 (with biases), dense and mixture of experts. With ``use_sliding_window``,
    windows are in the layers that ``layer_types`` names. Without ``layer_types`` they are in the layers from
    ``max_window_layers`` on; in a sparse Qwen 3 in all layers; in a sparse Qwen 2 in every other layer before
    ``max_window_layers``."""
    count = keys.integer("num_hidden_layers")
    sparse = _expert_count(keys) > 0
    full = read_attention(keys, qk_norm=qk_norm, head_dim=None if sparse or not qk_norm else 128)
    if not qk_norm:
        full = replace(full, bias=keys.boolean("qkv_bias", True), out_bias=False)
    windows = keys.boolean("use_sliding_window", False) and reading.states_window(keys)
    first = 0 if sparse and qk_norm else keys.integer("max_window_layers", 28, least=0)
    inside = [i < first and i % 2 == 0 if sparse and not qk_norm else i >= first for i in range(count)]
    kinds = _kinds_that_switch(keys, windows, inside)
    window = windowed(full, keys, default=4096) if windows else full
    return build_architecture(
        family,
        keys,
        [window if kind == WINDOW_KIND else full for kind in kinds],
        [qwen_feed_forward(keys, layer, shared=not qk_norm) for layer in range(count)],
        max_positions=32768,
    )


def _kinds_that_switch(keys: ConfigKeys, windows: bool, in_window: list[bool]) -> list[str]:
    """Return the kind of each layer. ``windows``: whether the model has windows at all; ``in_window``: which layers
    have one if ``layer_types`` is missing."""
    stated = [WINDOW_KIND if windows and inside else "full_attention" for inside in in_window]
    kinds = reading.kinds_with_windows(keys, ("full_attention", WINDOW_KIND), stated)
    if WINDOW_KIND in kinds and not windows:
        fail("layer_types", WINDOW_KIND, "use_sliding_window and sliding_window say that there is no window")
    return kinds


def _expert_count(keys: ConfigKeys) -> int:
    return keys.integer("num_experts", keys.integer("num_local_experts", 0, least=0), least=0)


def qwen_feed_forward(keys: ConfigKeys, layer: int, *, shared: bool, normalized: bool = False) -> FeedForward:
    """Read the feed-forward of a layer. ``shared``: the family has a shared expert. ``normalized``: weights are
    normalised if config.json does not say."""
    count = _expert_count(keys)
    sparse = count > 0 and (layer + 1) % keys.integer("decoder_sparse_step", 1) == 0
    if not sparse or layer in (keys.get("mlp_only_layers") or ()):
        return Dense(keys.integer("intermediate_size"))
    return Experts(
        count=count,
        per_token=reading.experts_per_token(keys, count),
        width=keys.integer("moe_intermediate_size"),
        normalized=keys.boolean("norm_topk_prob", normalized),
        shared_width=keys.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )


def read_smollm3(family: str, keys: ConfigKeys) -> Architecture:
    """Read SmolLM 3. Layers turn where ``no_rope_layers`` says 1: by default all but every fourth. If
    ``layer_types`` is missing, windows are in the layers that do not turn."""
    keys = keys.with_defaults(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
    )
    keys.only(mlp_bias=False)
    count, every = keys.integer("num_hidden_layers"), keys.integer("no_rope_layer_interval", 4)
    turns = keys.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(count)])
    if not isinstance(turns, list) or len(turns) < count or any(turn not in (0, 1) for turn in turns):
        fail("no_rope_layers", turns, f"it must say 0 or 1 of each of the {count} layers")
    windows = keys.boolean("use_sliding_window", False) and keys.get("sliding_window") is not None
    full = read_attention(keys, theta=2e6)
    kinds = _kinds_that_switch(keys, windows, [not turn for turn in turns[:count]])
    window = windowed(full, keys) if windows else full
    each = [window if kind == WINDOW_KIND else full for kind in kinds]
    return build_architecture(
        family,
        keys,
        [mixer if turn else replace(mixer, rope=None) for mixer, turn in zip(each, turns, strict=False)],
        [Dense(keys.integer("intermediate_size"))] * count,
        tied=keys.boolean("tie_word_embeddings", True),
    )


def read_olmo3(family: str, keys: ConfigKeys) -> Architecture:
    """Read OLMo 3. The rotary scaling of a release is for its full layers; window layers turn at the plain base."""
    count = keys.integer("num_hidden_layers")
    kinds = reading.kinds_with_windows(
        keys,
        ("full_attention", WINDOW_KIND),
        ["full_attention" if (i + 1) % 4 == 0 else WINDOW_KIND for i in range(count)],
    )
    plain = read_attention(keys, rotary=False, qk_norm=True)

    def turned(kind: str, *, scaled: bool) -> Attention:
        rope = read_rope(keys, plain.head_dim, theta=500_000.0, partial=1.0, layer_kind=kind, scaled=scaled)
        return replace(plain, rope=rope, norm_whole=True)

    full = turned("full_attention", scaled=True)
    window = windowed(turned(WINDOW_KIND, scaled=False), keys, default=4096)
    dense = Dense(keys.integer("intermediate_size"))
    return build_architecture(
        family,
        keys,
        [window if kind == WINDOW_KIND else full for kind in kinds],
        [dense] * count,
        default_eps=1e-5,
        max_positions=2048,
        residual=OUT_NORMED,
    )


FAMILIES = (
    Family("llama", ("llama",), read_llama, names=NAMES),
    Family("llama", ("mistral",), read_mistral, names=NAMES),
    Family("diffllama", ("diffllama",), read_diffllama, names=Names({DifferentialAttention: "self_attn"})),
    Family(
        "qwen3",
        ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"),
        partial(read_qwen, qk_norm=True),
        names=NAMES,
    ),
    Family("smollm3", ("smollm3",), read_smollm3, names=NAMES),
    Family("olmo3", ("olmo3",), read_olmo3, names=OUT_NAMES),
)
